"""Calls of the Open Inference Protocol on a serving core, as every door of it hands them on: no socket between."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest

from edge_runtime import __version__
from edge_runtime.config.loading import configured
from edge_runtime.daemon.assemble import assemble_core
from edge_runtime.daemon.core import DaemonStatus
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.open_inference.named_regions import NamedRegions
from edge_runtime.doors.open_inference.operations import Caller, OpenInference
from edge_runtime.errors import EdgeRuntimeError, Forbidden, ModelNotFound, Unsupported
from edge_runtime.request.operation_handlers import OperationHandlers
from edge_runtime.telemetry.host import HostProbe
from tests.contract.running_daemon import ANSWER_S, put_model
from tests.models import onnx_models

CONTROL = Caller("tests", may_control=True)
X = {"name": "x", "datatype": "FP32", "shape": [-1, 16]}


class Words:
    """Calls that wait for their answers."""

    def __init__(self, calls: OpenInference, status: DaemonStatus) -> None:
        self.calls = calls
        self.status = status

    def ask(self, call, caller=CONTROL, **values):
        answers = []
        has_answered = threading.Event()

        def reply(answer):
            answers.append(answer)
            has_answered.set()

        self.calls.call(call, values, caller, reply)
        assert has_answered.wait(ANSWER_S)
        (answer,) = answers
        if isinstance(answer, EdgeRuntimeError):
            raise answer
        return answer


@contextmanager
def serving(tmp_path, **settings):
    core = assemble_core(configured(models=str(tmp_path / "models"), state=str(tmp_path / "state"), **settings))
    status = DaemonStatus(core, HostProbe())
    operations = OperationHandlers(core.table, core.loader, core.pending_loads, status)
    settings = core.config.table("http") or HttpSettings()
    regions = NamedRegions(is_allowed=False, max_tensor_bytes=0)
    calls = OpenInference(
        core.table,
        operations,
        status,
        regions,
        server_name=settings.server_name,
        strict_readiness=settings.strict_readiness,
    )
    words = Words(calls, status)
    try:
        core.start()
        assert core.wait_settled(ANSWER_S)
        status.is_ready = True  # as the daemon does then
        yield words
    finally:
        core.close(1.0)


@pytest.fixture
def words(tmp_path):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    with serving(tmp_path, calibrate=False) as words:
        yield words


def test_the_server_is_live_ready_and_says_what_it_is(words):
    assert words.ask("server_live") == {"live": True}
    assert words.ask("server_ready") == {"ready": True}
    answer = words.ask("server_metadata")
    assert list(answer) == ["name", "version", "extensions"]
    assert (answer["name"], answer["version"]) == ("edge-runtime", __version__)
    words.status.is_draining = True
    assert words.ask("server_ready") == {"ready": False, "reason": "draining"}


def test_a_model_is_ready_and_described_in_the_protocols_order(words):
    assert words.ask("model_ready", name="mlp") == {"name": "mlp", "ready": True}
    assert words.ask("model_ready", name="none") == {"name": "none", "ready": False}
    answer = words.ask("model_metadata", name="mlp", version="1")
    assert list(answer) == ["name", "versions", "platform", "inputs", "outputs"]
    assert (answer["versions"], answer["platform"], answer["inputs"]) == (["1"], "onnxruntime_onnx", [X])
    with pytest.raises(ModelNotFound):
        words.ask("model_metadata", name="mlp", version="2")


def test_the_index_follows_unload_and_load(words):
    ready = {"name": "mlp", "version": "1", "state": "READY", "reason": ""}
    assert words.ask("repository_index") == [ready]
    assert words.ask("repository_unload", name="mlp") == {}
    assert words.ask("repository_index") == [{**ready, "state": "UNAVAILABLE", "reason": "unloaded"}]
    assert words.ask("repository_index", ready=True) == []
    assert words.ask("repository_load", name="mlp") == {}
    assert words.ask("repository_index", ready=True) == [ready]


def test_load_and_unload_want_control_and_the_refusal_names_the_ways_to_it(words):
    for call in ("repository_load", "repository_unload"):
        with pytest.raises(Forbidden, match=r"--allow-control.*--http-control"):
            words.ask(call, Caller("tests"), name="mlp")
    assert words.ask("model_ready", name="mlp")["ready"]


def test_one_failed_model_makes_the_server_not_ready_only_where_readiness_is_strict(tmp_path):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    (tmp_path / "models" / "bad" / "1").mkdir(parents=True)
    (tmp_path / "models" / "bad" / "1" / "model.onnx").write_bytes(b"no model")
    for strict, ready in ((False, {"ready": True}), (True, {"ready": False, "reason": "model bad failed to load"})):
        with serving(tmp_path, calibrate=False, http=HttpSettings(strict_readiness=strict)) as words:
            assert words.ask("server_ready") == ready
            assert words.ask("model_ready", name="bad") == {"name": "bad", "ready": False}


def test_an_unknown_call_is_unsupported(words):
    with pytest.raises(Unsupported):
        words.ask("model_dance")
