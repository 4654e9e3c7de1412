"""Python models of Triton, served as they are: through the doors, by Triton's own clients and by ours."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
from tritonclient.utils import InferenceServerException

from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import ModelNotFound, RunFailed, TensorMismatch, Unsupported
from tests.contract.running_daemon import ANSWER_S, grpc_url, http_url, running_daemon
from tests.models import onnx_models, triton_models

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:gevent")

FAULTS = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            value = int(x[0, 0])
            if value < 0:
                error = pb_utils.TritonError(f"no {value}", -value if value > -100 else pb_utils.TritonError.INTERNAL)
                responses.append(pb_utils.InferenceResponse(error=error))
            elif value == 100:
                raise ValueError("a hundred")
            elif value == 101:
                responses.append(None)
            elif value == 102:
                return "no list"
            elif value == 103:
                return []
            elif value == 104:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("z", x)]))
            elif value == 105:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x.astype(np.float64))]))
            else:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]))
        return responses
"""

COUNTS = """
class TritonPythonModel:
    def execute(self, requests):
        size = np.float32(len(requests))
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full_like(x, size))]))
        return responses
"""

TOLD = """
import helper
from .helper import STARS

class TritonPythonModel:
    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        responses = []
        for request in requests:
            told = {
                "args": {key: value for key, value in self.args.items() if key != "model_config"},
                "config": json.loads(self.args["model_config"])["parameters"],
                "id": request.request_id(), "parameters": json.loads(request.parameters()),
                "outputs": request.requested_output_names(), "timeout": request.timeout(),
                "cancelled": request.is_cancelled(), "correlation": request.correlation_id(),
                "helper": helper.STARS + STARS,
            }
            text = np.array([json.dumps(told).encode()], dtype=np.object_)
            tensors = [pb_utils.Tensor(name, text) for name in request.requested_output_names()]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
"""

SHAPES = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            y = np.arange(x[0, 0], dtype=np.float32)[:, None]
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]))
        return responses
"""

OPTIONAL = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            given = [pb_utils.get_input_tensor_by_name(request, name) for name in ("a", "b")]
            count = np.full((1, 1), sum(each is not None for each in given), np.float32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", count)]))
        return responses
"""

NOTHING = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([]))]) for _ in requests]
"""
"""What numpy makes of no elements is FP64, whatever the output is."""

COMPLETED = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        config = auto_complete_model_config.as_dict()
        if "INPUT0" not in [each["name"] for each in config["input"]]:
            auto_complete_model_config.add_input(
                {"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [4], "optional": True}
            )
        auto_complete_model_config.add_input({"name": "INPUT1", "data_type": "TYPE_FP32", "dims": [4]})
        auto_complete_model_config.add_output({"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [4]})
        auto_complete_model_config.set_max_batch_size(8)
        auto_complete_model_config.set_dynamic_batching()
        return auto_complete_model_config

    def execute(self, requests):
        responses = []
        for request in requests:
            first = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            array = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            if first is not None:
                array = array + first.as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]))
        return responses
"""

CALLER = """
import asyncio

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x")
            asked = pb_utils.InferenceRequest(model_name="plus", requested_output_names=["y"], inputs=[x])
            (answer,) = asked.exec(decoupled=True)
            assert asked.exec().has_error() is False
            if answer.has_error():
                raise pb_utils.TritonModelException(answer.error().message())
            y = pb_utils.get_output_tensor_by_name(answer, "y").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y * 10)]))
        return responses
"""

ASYNC_CALLER = """
import asyncio

class TritonPythonModel:
    async def execute(self, requests):
        responses = []
        for request in requests:
            waits = []
            for name in ("plus", "absent", "plus"):
                x = pb_utils.get_input_tensor_by_name(request, "x")
                asked = pb_utils.InferenceRequest(model_name=name, requested_output_names=["y"], inputs=[x])
                waits.append(asked.async_exec())
            one, absent, other = await asyncio.gather(*waits)
            assert absent.error().code() == pb_utils.TritonError.NOT_FOUND, absent.error().code()
            y = sum(pb_utils.get_output_tensor_by_name(each, "y").as_numpy() for each in (one, other))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]))
        return responses
"""


RUNS = """
class TritonPythonModel:
    runs = 0

    def execute(self, requests):
        self.runs += 1
        x = pb_utils.get_input_tensor_by_name(requests[0], "x").as_numpy()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full_like(x, self.runs))]) for _ in requests]

    def finalize(self):
        pb_utils.Logger.log_info(f"finalized after {self.runs} runs")
"""

ASYNC_REPEATS = """
import asyncio

class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.gather(*[self.answer(request) for request in requests])

    async def answer(self, request):
        sender = request.get_response_sender()
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        for index in range(int(x[0])):
            await asyncio.sleep(0)
            y = pb_utils.Tensor("y", np.array([index, x[0]], np.float32))
            sender.send(pb_utils.InferenceResponse([y]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    models = tmp_path_factory.mktemp("models")
    triton_models.add_sub(models)
    triton_models.rows(models, "identity", triton_models.IDENTITY)
    triton_models.rows(models, "faults", FAULTS)
    triton_models.rows(models, "counts", COUNTS)
    triton_models.without_batching(triton_models.rows(models, "alone", COUNTS))
    triton_models.rows(models, "shapes", SHAPES, output=[triton_models.tensor("y", "FP32", 1)])
    triton_models.put(models, "completed", COMPLETED)
    both = [triton_models.tensor(name, "FP32", 2, optional=True) for name in ("a", "b")]
    triton_models.rows(models, "optional", OPTIONAL, input=both, output=[triton_models.tensor("y", "FP32", 1)])
    for kind in ("STRING", "INT64"):
        ports = {"input": [triton_models.tensor("x", "FP32", 2)], "output": [triton_models.tensor("y", kind, -1)]}
        triton_models.put(models, f"nothing_{kind}", NOTHING, **ports)
    triton_models.rows(models, "caller", CALLER)
    triton_models.rows(models, "async_caller", ASYNC_CALLER)
    onnx_models.added(models / "plus" / "1", 2.0)
    told = triton_models.put(
        models,
        "told",
        TOLD,
        input=[triton_models.tensor("x", "STRING", 1)],
        output=[triton_models.tensor(name, "STRING", 1) for name in ("one", "two")],
        parameters={"stars": {"string_value": "5"}},
    )
    (told / "1" / "helper.py").write_text("STARS = 5\n")
    triton_models.put(models, "no_tensors", triton_models.IDENTITY)
    for name, body in {
        "repeats": triton_models.REPEATS,
        "async_repeats": ASYNC_REPEATS,
        "cancelled": triton_models.CANCELLED,
    }.items():
        triton_models.decoupled(models, name, body)
    triton_models.rows(models, "cold", RUNS, instance_group=[{"count": 2}])
    sample = {"x": {"data_type": "TYPE_FP32", "dims": [2], "zero_data": True}}
    triton_models.rows(models, "warm", RUNS, model_warmup=[{"name": "one", "batch_size": 4, "inputs": sample}])
    environment = {"EXECUTION_ENV_PATH": {"string_value": "env.tar.gz"}}
    triton_models.rows(models, "environment", triton_models.IDENTITY, parameters=environment)
    return models


@pytest.fixture(scope="module")
def daemon(models: Path, tmp_path_factory) -> Iterator[Daemon]:
    doors = {"http": HttpSettings(endpoint="127.0.0.1:0"), "grpc": GrpcSettings(endpoint="127.0.0.1:0")}
    with running_daemon(models, tmp_path_factory.mktemp("run"), python_models=True, watch=False, **doors) as daemon:
        with Client(daemon.endpoints[0]) as client:
            client.wait_ready(ANSWER_S)
            client.infer("caller", {"x": np.ones((1, 2), np.float32)})  # starts the worker that stands in, which stays
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(daemon.endpoints[0]) as client:
        yield client


@pytest.fixture(params=["http", "grpc"])
def triton(daemon: Daemon, request):
    """Triton's module of one protocol, and a client of it."""
    module = getattr(tritonclient, request.param)
    address = daemon.doors[request.param].endpoints[0].partition("://")[2]
    with module.InferenceServerClient(address) as client:
        yield module, client


def given(module, **arrays):
    made = []
    for name, array in arrays.items():
        kind = "BYTES" if array.dtype == object else "FP32"
        made.append(module.InferInput(name, list(array.shape), kind))
        made[-1].set_data_from_numpy(array)
    return made


def test_the_first_example_of_the_documentation_answers_tritons_clients(triton) -> None:
    module, client = triton
    one, two = np.arange(4, dtype=np.float32), np.full(4, 3, np.float32)
    result = client.infer("add_sub", given(module, INPUT0=one, INPUT1=two))
    assert result.as_numpy("OUTPUT0").tolist() == (one + two).tolist()
    assert result.as_numpy("OUTPUT1").tolist() == (one - two).tolist()


def test_a_request_gives_its_model_what_its_caller_said_and_the_model_its_surroundings(triton, models: Path) -> None:
    module, client = triton
    asked = {"outputs": [module.InferRequestedOutput("two")], "request_id": "seven", "timeout": 9_000_000}
    text = np.array([b"x"], object)
    result = client.infer("told", given(module, x=text), parameters={"shade": "blue", "depth": 3}, **asked)
    assert result.as_numpy("one") is None
    told = json.loads(result.as_numpy("two")[0])
    assert told["args"] == {
        "model_instance_kind": "CPU",
        "model_instance_name": "told_0_0",
        "model_instance_device_id": "0",
        "model_repository": str(models / "told"),
        "model_version": "1",
        "model_name": "told",
    }
    assert told["config"] == {"stars": {"string_value": "5"}}
    assert told["id"] == "seven"
    assert told["parameters"] == {"shade": "blue", "depth": 3}
    assert 0 < told["timeout"] <= 9_000_000
    assert (told["outputs"], told["cancelled"], told["correlation"]) == (["two"], False, 0)
    assert told["helper"] == 10


def test_a_request_without_more_fields_asks_for_every_output(client: Client) -> None:
    told = json.loads(client.infer("told", {"x": np.array([b"x"], object)})["one"][0])
    assert (told["id"], told["parameters"], told["outputs"], told["timeout"]) == ("", {}, ["one", "two"], 0)


def test_requests_that_wait_together_come_as_a_list_of_requests(client: Client) -> None:
    waiting = [client.submit("counts", {"x": np.zeros((1, 2), np.float32)}) for _ in range(64)]
    sizes = [float(each.result(ANSWER_S)["y"][0, 0]) for each in waiting]
    assert max(sizes) > 1
    assert client.infer("counts", {"x": np.zeros((3, 2), np.float32)})["y"].tolist() == [[1.0, 1.0]] * 3


def test_without_dynamic_batching_each_run_has_one_request(client: Client) -> None:
    waiting = [client.submit("alone", {"x": np.zeros((1 + each % 3, 2), np.float32)}) for each in range(32)]
    assert {float(each.result(ANSWER_S)["y"].max()) for each in waiting} == {1.0}
    with pytest.raises(TensorMismatch, match="batch-size must be <= 64"):
        client.infer("alone", {"x": np.zeros((65, 2), np.float32)})


def test_an_error_in_one_response_fails_that_request_alone(client: Client) -> None:
    values = [float(each) for each in range(64)]
    values[5] = -200.0
    waiting = [client.submit("faults", {"x": np.full((1, 2), value, np.float32)}) for value in values]
    for value, each in zip(values, waiting, strict=True):
        if value < 0:
            with pytest.raises(RunFailed, match=r"^no -200$"):
                each.result(ANSWER_S)
        else:
            assert each.result(ANSWER_S)["y"].tolist() == [[value, value]]


@pytest.mark.parametrize(("code", "kind"), [(2, ModelNotFound), (3, TensorMismatch), (1, RunFailed)])
def test_a_code_of_tritons_reaches_the_caller_as_the_one_that_means_it(client: Client, code: int, kind: type) -> None:
    with pytest.raises(kind, match=f"^no -{code}$"):
        client.infer("faults", {"x": np.full((1, 2), -code, np.float32)})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (100, "Failed to process the request.s. for model instance 'faults_0_0', message: ValueError: a hundred"),
        (101, "Expected an 'InferenceResponse' object in the execute function return list, found type .*NoneType"),
        (102, "Expected a list in the execute return, found type .*str"),
        (103, "InferenceRequest.s. size is:1, and InferenceResponse.s. size is:0"),
        (104, "the response has no output 'y'; got z"),
        (105, "output 'y' is FP64; the configuration says FP32"),
    ],
)
def test_a_wrong_answer_is_reported_in_tritons_words(triton, value: int, words: str) -> None:
    module, client = triton
    with pytest.raises(InferenceServerException, match=words):
        client.infer("faults", given(module, x=np.full((1, 2), value, np.float32)))


def test_responses_of_other_rows_than_their_requests_go_to_their_own_callers(client: Client) -> None:
    waiting = [client.submit("shapes", {"x": np.full((1, 2), 1 + each % 3, np.float32)}) for each in range(24)]
    assert [each.result(ANSWER_S)["y"].shape for each in waiting] == [(1 + each % 3, 1) for each in range(24)]


def test_auto_complete_config_alone_describes_a_model_with_an_optional_input(triton) -> None:
    module, client = triton
    one, two = np.ones((2, 4), np.float32), np.full((2, 4), 3, np.float32)
    assert client.infer("completed", given(module, INPUT1=two)).as_numpy("OUTPUT0").tolist() == two.tolist()
    both = client.infer("completed", given(module, INPUT0=one, INPUT1=two))
    assert both.as_numpy("OUTPUT0").tolist() == (one + two).tolist()
    with pytest.raises(
        InferenceServerException, match="expected number of inputs between 1 and 2 but got 1 inputs for"
    ):
        client.infer("completed", given(module, INPUT0=one))
    with pytest.raises(InferenceServerException, match="batch-size must be <= 8"):
        client.infer("completed", given(module, INPUT1=np.ones((9, 4), np.float32)))


def test_a_request_may_leave_out_every_input_where_all_are_optional(triton) -> None:
    module, client = triton
    assert client.infer("optional", []).as_numpy("y").tolist() == [[0.0]]
    assert client.infer("optional", given(module, b=np.ones((1, 2), np.float32))).as_numpy("y").tolist() == [[1.0]]
    with pytest.raises(InferenceServerException, match="expected 1 inputs but got 0 inputs for model 'identity'"):
        client.infer("identity", [])


@pytest.mark.parametrize("kind", ["STRING", "INT64"])
def test_an_output_without_elements_has_its_own_datatype(triton, kind: str) -> None:
    module, client = triton
    found = client.infer(f"nothing_{kind}", given(module, x=np.ones(2, np.float32)))
    assert found.as_numpy("y").shape == (0,)
    assert found.as_numpy("y").dtype == (np.int64 if kind == "INT64" else object)


@pytest.mark.parametrize(
    "sequence", [{"sequence_id": 7, "sequence_start": True}, {"sequence_id": "a", "sequence_end": True}]
)
def test_a_sequence_is_ignored_by_a_model_without_state(triton, stream, sequence) -> None:
    module, client = triton
    found = client.infer("identity", given(module, x=np.ones((1, 2), np.float32)), **sequence)
    assert found.as_numpy("y").tolist() == [[1.0, 1.0]]
    assert indices(stream("repeats", 2, 0, **sequence)) == [0, 1]


@pytest.mark.smoke
@pytest.mark.parametrize(("model", "wanted"), [("caller", 30.0), ("async_caller", 6.0)])
def test_a_model_asks_another_one_by_exec_and_async_exec(client: Client, model: str, wanted: float) -> None:
    assert client.infer(model, {"x": np.ones((1, 2), np.float32)})["y"].tolist() == [[wanted, wanted]]


@pytest.fixture
def stream(daemon: Daemon) -> Iterator[Callable[..., list[object]]]:
    """Ask a decoupled model over a stream of Triton's client: what came, up to the mark of the end."""
    came: queue.Queue[object] = queue.Queue()
    address = grpc_url(daemon).partition("://")[2]
    with tritonclient.grpc.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: came.put(error or result))

        def ask(model: str, *x: float, **more) -> list[object]:
            asked = given(tritonclient.grpc, x=np.array(x, np.float32))
            client.async_stream_infer(model, asked, enable_empty_final_response=True, request_id="7", **more)
            found: list[object] = []
            while not found or not is_end(found[-1]):
                found.append(came.get(timeout=ANSWER_S))
            return found

        yield ask
        client.stop_stream()


def is_end(found: object) -> bool:
    if isinstance(found, InferenceServerException):
        return True
    assert isinstance(found, tritonclient.grpc.InferResult)
    assert found.get_response().id == "7"
    return found.get_response().parameters["triton_final_response"].bool_param


def indices(found: list[object]) -> list[float]:
    return [each.as_numpy("y")[0] for each in found if each.as_numpy("y") is not None]


@pytest.mark.parametrize("model", ["repeats", "async_repeats"])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_decoupled_model_sends_any_number_of_responses_on_a_stream(stream, model: str, count: int) -> None:
    found = stream(model, count, 0)
    assert indices(found) == list(range(count))
    assert found[-1].as_numpy("y") is None


def test_a_last_response_may_be_the_end_itself(stream) -> None:
    found = stream("repeats", 3, 1)
    assert indices(found) == [0, 1, 2]
    assert len(found) == 3


def test_an_error_ends_the_responses_of_its_request_and_the_stream_goes_on(stream) -> None:
    *before, last = stream("repeats", 2, 2)
    assert indices(before) == [0, 1]
    assert "the end" in str(last)
    *before, last = stream("repeats", 2, 3)
    assert indices(before) == [0, 1]
    assert "let go of its response sender without TRITONSERVER_RESPONSE_COMPLETE_FINAL" in str(last)
    assert indices(stream("repeats", 2, 0)) == [0, 1]


def test_one_response_reaches_a_door_that_takes_one_and_more_are_an_error(client: Client, triton) -> None:
    assert client.infer("repeats", {"x": np.array([1, 0], np.float32)})["y"].tolist() == [0, 1]
    with pytest.raises(Unsupported, match=r"decoupled and sent more than one response"):
        client.infer("repeats", {"x": np.array([2, 0], np.float32)})
    with pytest.raises(Unsupported, match=r"decoupled and sent no response"):
        client.infer("repeats", {"x": np.array([0, 0], np.float32)})
    module, other = triton
    assert other.infer("repeats", given(module, x=np.array([1, 1], np.float32))).as_numpy("y").tolist() == [0, 1]
    for count in (0, 2):
        with pytest.raises(InferenceServerException, match="doesn't support models with decoupled") as caught:
            other.infer("repeats", given(module, x=np.array([count, 0], np.float32)))
        assert caught.value.status() in {"501", "StatusCode.UNIMPLEMENTED"}


def events(daemon: Daemon, model: str, *x: float, version: int = 11) -> list[object]:
    """What `generate_stream` sends, event by event."""
    host, _, port = http_url(daemon).partition("://")[2].partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=ANSWER_S)
    connection._http_vsn, connection._http_vsn_str = version, f"HTTP/1.{version % 10}"
    try:
        connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps({"x": x}))
        answer = connection.getresponse()
        whole = answer.read().decode()
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8" or answer.status != 200
        return [json.loads(each.removeprefix("data: ")) for each in whole.split("\n\n") if each]
    finally:
        connection.close()


@pytest.mark.parametrize("version", [10, 11])
def test_generate_stream_sends_an_event_a_response(daemon: Daemon, version: int) -> None:
    assert [each["y"][0] for each in events(daemon, "repeats", 5, 0, version=version)] == [0, 1, 2, 3, 4]
    assert [each["y"][0] for each in events(daemon, "repeats", 2, 1, version=version)] == [0, 1]
    assert events(daemon, "repeats", 0, 0, version=version) == []
    *before, last = events(daemon, "repeats", 2, 2, version=version)
    assert [each["y"][0] for each in before] == [0, 1]
    assert last == {"error": "the end", "code": "unsupported"}


def test_a_caller_that_leaves_is_known_to_a_model_that_streams(daemon: Daemon, stream) -> None:
    address = grpc_url(daemon).partition("://")[2]

    async def leave() -> None:
        async def asked() -> AsyncIterator[dict[str, object]]:
            yield {"model_name": "cancelled", "inputs": given(tritonclient.grpc, x=np.ones(2, np.float32))}

        async with tritonclient.grpc.aio.InferenceServerClient(address) as client:
            responses = client.stream_infer(asked())
            assert (await responses.__anext__())[0].as_numpy("y").tolist() == [0, 0]
            responses.cancel()

    (before,) = indices(stream("cancelled", 0, 0))
    asyncio.run(leave())
    assert indices(stream("cancelled", 0, 0)) == [before + 1]


def test_an_event_is_there_before_the_last_is_sent_and_a_closed_connection_ends_them(daemon: Daemon, stream) -> None:
    (before,) = indices(stream("cancelled", 0, 0))
    host, _, port = http_url(daemon).partition("://")[2].partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=ANSWER_S)
    connection.request("POST", "/v2/models/cancelled/generate_stream", json.dumps({"x": [1, 1]}))
    answer = connection.getresponse()
    assert json.loads(answer.readline().removeprefix(b"data: "))["y"] == [0, 0]
    answer.close()
    connection.close()
    assert indices(stream("cancelled", 0, 0)) == [before + 1]


def test_a_model_runs_before_its_first_request_only_where_its_configuration_says_so(client: Client) -> None:
    runs = {name: client.infer(name, {"x": np.zeros((1, 2), np.float32)})["y"][0, 0] for name in ("cold", "warm")}
    assert runs["cold"] == 1
    assert runs["warm"] > 1


def test_more_instances_than_a_python_model_has_are_reported_at_load(client: Client) -> None:
    (told,) = [each["reason"] for each in client.models() if each["name"] == "cold"]
    assert "instance_group.count: a Python model has one process" in told


def test_a_model_finalizes_when_its_daemon_stops(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    triton_models.rows(tmp_path / "models", "runs", RUNS)
    caplog.set_level(logging.INFO)
    with (
        running_daemon(tmp_path / "models", tmp_path / "run", watch=False, python_models=True) as daemon,
        Client(daemon.endpoints[0]) as client,
    ):
        client.wait_ready(ANSWER_S)
        client.infer("runs", {"x": np.zeros((1, 2), np.float32)})
    assert any("finalized after 1 runs" in each.getMessage() for each in caplog.records)


def test_a_model_that_cannot_be_served_says_why(client: Client) -> None:
    reasons = {each["name"]: each["reason"] for each in client.models() if each["state"] == "failed"}
    assert "has no input: write it into config.pbtxt, or add it in auto_complete_config" in reasons["no_tensors"]
    assert "EXECUTION_ENV_PATH is not served" in reasons["environment"]
    assert set(reasons) == {"no_tensors", "environment"}


def test_a_model_of_triton_is_code_that_the_configuration_must_allow(tmp_path: Path) -> None:
    triton_models.add_sub(tmp_path / "models")
    onnx_models.added(tmp_path / "models" / "plus" / "1", 2.0)
    with (
        running_daemon(tmp_path / "models", tmp_path / "run", watch=False) as daemon,
        Client(daemon.endpoints[0]) as client,
    ):
        client.wait_ready(ANSWER_S)
        (entry,) = [each for each in client.models() if each["name"] == "add_sub"]
    assert entry["state"] == "failed"
    assert "python_models = true" in entry["reason"]
