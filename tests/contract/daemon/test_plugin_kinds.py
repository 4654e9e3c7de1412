"""Plug-ins that bring a protocol on the HTTP door, a kind of input and a kind of answer, each in its smallest form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edge_runtime import Client
from edge_runtime.doors.http.settings import HttpSettings
from tests.contract.raw_http import RawHttp
from tests.contract.running_daemon import http_url, put_model, running_daemon
from tests.fakes.plugin_site import PluginSite, plugin_site
from tests.models import onnx_models

SUMS = """
    import numpy as np
    from edge_runtime.doors.http.answer import error_frames, json_response
    from edge_runtime.doors.http.call import INFER
    from edge_runtime.doors.http.protocols import CallRequests, ProtocolDeclaration, paths
    from edge_runtime.messages import RequestHeader, TensorHeader

    PROTOCOL = ProtocolDeclaration("sums", "sums_protocol:Sums")

    class Answer:
        def answer(self, request, request_id):
            (y,) = request.plan.select(request.outputs)
            return json_response({"sum": float(y.sum())}, deflates=None)

        def refusal(self, error, request_id):
            return error_frames(error)

        def result(self, result, request_id):
            return json_response(*result)

    class Sums:
        paths = paths((r"/sums/(?P<name>[^/]+)", {"POST": INFER}), (r"/sums", {"GET": "sums"}))
        open_calls = frozenset()

        def __init__(self, context, protocol): ...
        def encoding(self, call): return Answer()
        def understand(self, head, call): ...
        def claims(self, call): return False
        def reads_long(self, body, head): return False
        def read(self, body, head, call): return [float(each) for each in bytes(body).split()]
        def model_of(self, message, call): return call.values["name"], None
        def call(self, call, fields, caller, reply): reply(({"sums": "numbers, with spaces between"}, 200))
        def close(self): raise RuntimeError("no luck in close")

        def requests_of(self, servable, message, head, call):
            x = np.array([message], np.float32)
            header = RequestHeader(model=servable.model, inputs=(TensorHeader("x", "FP32", x.shape),))
            return CallRequests(Answer(), [(header, (x,))])
"""

KINDS = """
    from typing import Literal

    import numpy as np
    from edge_runtime.answers import AnswerLayout
    from edge_runtime.hosts.steps_instance import PlainOutput
    from edge_runtime.model_spec import TensorSpec
    from edge_runtime.steps import InputSteps, ModelSteps, StepsDeclaration

    class PercentSteps(InputSteps, frozen=True, forbid_unknown_fields=True, rename={"source": "from"}):
        source: Literal["percent"] = "percent"

        def made_up(self, sent, kind):
            return np.full((max(sent.shape[0], 1), 16), 50, np.uint8)

    STEPS = StepsDeclaration(
        "percent", ("percent",), "odd_kinds:PercentSteps", "odd_kinds:declared", "odd_kinds:PercentInput"
    )

    def declared(settings, folder, version, artifact):
        return ModelSteps(settings.input, settings.output)

    class PercentInput:
        sides, joins, keeps, source_specs, kinds = None, None, None, (), ("percent",)

        def __init__(self, model, steps, threads, runs):
            self.name = next(iter(steps.inputs))
            self.fills = (self.name,)

        def sent_spec(self, kind): return TensorSpec(self.name, "UINT8", (-1, 16))
        def tensors(self, kind, sent): return {self.name: sent.astype(np.float32) / 100}, [None] * len(sent)
        def source_rows(self, places): return []

    class LargestOutput(PlainOutput):
        def __init__(self, declared):
            super().__init__(declared.spec)
            self.spec = TensorSpec(declared.spec.name, "FP32", (-1, 1))

        def make(self, results, rows):
            return results[self.spec.name].max(axis=1, keepdims=True)

    ANSWER = AnswerLayout(
        "largest", "odd_kinds:LargestOutput", read=lambda row: round(float(row.array[0]), 3),
        lines=lambda value, labels: [f"largest {value}"],
    )
"""

ROW = np.arange(16, dtype=np.float32)[None] / 100


@pytest.fixture
def site(tmp_path: Path) -> Iterator[PluginSite]:
    with plugin_site(tmp_path / "site") as made:
        yield made


@pytest.fixture
def models(tmp_path: Path) -> Path:
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    return tmp_path / "models"


def test_a_protocol_of_a_plugin_answers_its_own_paths_beside_ours(
    site: PluginSite, models: Path, tmp_path: Path
) -> None:
    site.put("sums-protocol", SUMS, {"protocols.sums": "sums_protocol:PROTOCOL"})
    settings = HttpSettings(endpoint="127.0.0.1:0")
    with (
        running_daemon(models, tmp_path / "run", plugins=("sums-protocol",), http=settings) as daemon,
        Client(daemon.endpoints[0]) as client,
        RawHttp(http_url(daemon)) as http,
    ):
        (wanted,) = client.infer("mlp", {"x": ROW}).outputs.values()
        body = " ".join(map(str, ROW[0].tolist())).encode()
        assert http.ask("POST", "/sums/mlp", body).fields["sum"] == pytest.approx(float(wanted.sum()), rel=1e-4)
        assert http.ask("GET", "/sums").fields == {"sums": "numbers, with spaces between"}
        assert http.ask("POST", "/sums/mlp", b"one two").status == 500  # its own fault, and its caller's answer
        assert http.ask("POST", "/sums/absent", body).status == 404
        assert http.ask("GET", "/v2/health/ready").status == 200
        assert [each["state"] for each in client.stats()["plugins"]] == ["ready"]


@pytest.mark.parametrize("fault", ["def Sums(context, protocol): raise RuntimeError('no luck')", "class Sums: ..."])
def test_a_protocol_that_cannot_be_opened_is_a_state_and_the_door_answers(
    site: PluginSite, models: Path, tmp_path: Path, fault: str
) -> None:
    source = f"""
    from edge_runtime.doors.http.protocols import ProtocolDeclaration
    PROTOCOL = ProtocolDeclaration("sums", "sums_protocol:Sums")
    {fault}
    """
    site.put("sums-protocol", source, {"protocols.sums": "sums_protocol:PROTOCOL"})
    settings = HttpSettings(endpoint="127.0.0.1:0")
    with (
        running_daemon(models, tmp_path / "run", plugins=("sums-protocol",), http=settings) as daemon,
        Client(daemon.endpoints[0]) as client,
        RawHttp(http_url(daemon)) as http,
    ):
        (told,) = client.stats()["plugins"]
        assert told["state"] == "failed"
        assert told["reason"].startswith(("RuntimeError: no luck", "TypeError: "))
        assert http.ask("GET", "/v2/health/ready").status == 200


def test_inputs_and_answers_of_a_plugin_are_read_and_made_in_the_host_and_told_by_every_door(
    site: PluginSite, models: Path, tmp_path: Path
) -> None:
    site.put("odd-kinds", KINDS, {"steps.percent": "odd_kinds:STEPS", "answers.largest": "odd_kinds:ANSWER"})
    settings = HttpSettings(endpoint="127.0.0.1:0")
    (models / "mlp" / "model.toml").write_text('[input.x]\nfrom = "percent"\n[output.y]\nanswer = "largest"\n')
    with (
        running_daemon(models, tmp_path / "run", plugins=("odd-kinds",), http=settings) as daemon,
        Client(daemon.endpoints[0]) as client,
        RawHttp(http_url(daemon)) as http,
    ):
        bare = client.infer("mlp", {"x": ROW}).outputs["y"]
        (answer,) = client.infer("mlp", {"x": (ROW * 100).astype(np.uint8)}).answers
        assert answer.more == {"largest": pytest.approx(float(bare.max()), abs=1e-3)}
        sent = {"name": "x", "datatype": "UINT8", "shape": [1, 16], "data": list(range(16))}
        told = http.ask("POST", "/v2/models/mlp/infer", json.dumps({"inputs": [sent]}).encode()).fields
        assert told["answer"] == answer.more
