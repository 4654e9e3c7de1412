"""One daemon, two transports: whatever a client asks, over ZeroMQ or through a broker, the answer is the same."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.mqtt.client import MqttClient
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import (
    DeadlineExceeded,
    DeadlineUnmeetable,
    DecodeFailed,
    Draining,
    EdgeRuntimeError,
    ModelNotFound,
    NotReady,
    QueueFull,
    TensorMismatch,
    Unsupported,
)
from tests.contract.running_daemon import ANSWER_S, floats, online_daemon, put_held_model, put_model
from tests.fakes import lent_buffers  # noqa: F401 (for its effect)
from tests.fakes.broker import Broker, needs_mosquitto
from tests.models import onnx_models

pytestmark = needs_mosquitto

AnyClient = Client | MqttClient

TRANSPORTS: dict[str, Callable[[str, str], AnyClient]] = {
    "zmq": lambda endpoint, _: Client(endpoint),
    "mqtt": lambda _, url: MqttClient(url),
    "mqtt-qos1": lambda _, url: MqttClient(url, qos=1),
}


@dataclass(frozen=True)
class Service:
    """A daemon and where it is reached."""

    daemon: Daemon
    url: str
    gate: Path

    def client(self, transport: str) -> AnyClient:
        return TRANSPORTS[transport](self.daemon.endpoints[1], self.url)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    models = tmp_path_factory.mktemp("models")
    put_model(models, "mlp", onnx_models.mlp)
    put_model(models, "queued", onnx_models.mlp, toml='mode = "workers"\n')
    put_model(models, "pair", onnx_models.two_in_two_out)
    put_model(models, "text", onnx_models.identity, datatype="BYTES")
    put_model(models, "integers", onnx_models.identity, datatype="INT32")
    put_model(models, "two", onnx_models.mlp, toml="[versions]\nall = true\n")
    put_model(models, "two", onnx_models.mlp, version=2)
    (models / "broken" / "1").mkdir(parents=True)
    (models / "broken" / "1" / "model.onnx").write_bytes(b"\x08\x09not a model")
    return models


@pytest.fixture(scope="module")
def service(models, broker, tmp_path_factory) -> Iterator[Service]:
    with serving(models, broker, tmp_path_factory.mktemp("run"), "dev1") as service:
        yield service


@pytest.fixture(params=list(TRANSPORTS))
def client(service, request) -> Iterator[AnyClient]:
    with service.client(request.param) as client:
        yield client


@contextmanager
def serving(models: Path, broker: Broker, folder: Path, device: str, **settings) -> Iterator[Service]:
    """A daemon on both transports, once it answers on both."""
    url = f"{broker.url}/{device}"
    with online_daemon(models, folder / "run", url, **settings) as daemon:
        yield Service(daemon, url, folder / "gate")


@pytest.fixture(params=list(TRANSPORTS))
def held(broker, tmp_path, request) -> Iterator[tuple[Service, AnyClient]]:
    """A daemon with one model, `held`, whose runs wait for the gate; and a client."""
    models, gate = tmp_path / "models", tmp_path / "gate"
    gate.touch()
    put_held_model(models, gate, "max_queue_rows = 4\n")
    with (
        serving(models, broker, tmp_path, "held", python_models=True) as service,
        service.client(request.param) as client,
    ):
        client.infer("held", {"x": VALUE})
        try:
            yield service, client
        finally:
            gate.touch()


VALUE = np.zeros((1, 1), np.float32)


def expected(x):
    first, second = onnx_models.mlp_weights()
    return np.maximum(x @ first, 0) @ second


def queue_is(client: AnyClient, rows: int) -> None:
    """Return once so many rows wait for the model `held`."""
    for _ in range(20_000):
        if client.stats()["metrics"]["models"]["held"]["queue_rows"] == rows:
            return
    raise AssertionError(client.stats()["metrics"]["models"]["held"])


# ---- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "queued"])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_an_answer_is_the_models_and_says_who_gave_it(client, model, rows):
    x = floats(rows, 16)

    for _ in range(4):  # the third time the header is known
        result = client.infer(model, {"x": x})

    assert (result.model, result.version, result.timing) == (model, 1, None)
    assert result["y"].dtype == np.float32
    assert result["y"].flags.writeable
    np.testing.assert_allclose(result["y"], expected(x), rtol=1e-4, atol=1e-4)


def test_a_large_answer_is_whole_and_writable(client):
    x = floats(20_000, 16)[:256].repeat(1, axis=0)
    limit = client.metadata("mlp")["max_batch_rows"]

    answer = client.infer("mlp", {"x": np.resize(x, (limit, 16))})["y"]

    assert answer.shape == (limit, 4)
    answer += 1


def test_several_inputs_and_outputs_keep_their_names_and_the_order_asked_for(client):
    inputs = {"b": np.array([[4, 5]]), "a": floats(1, 3)}

    result = client.infer("pair", inputs, outputs=["twice", "sum"])
    alone = client.infer("pair", inputs, outputs=["sum"])

    assert list(result.outputs) == ["twice", "sum"]
    assert result["twice"].tolist() == [[8, 10]]
    np.testing.assert_allclose(result["sum"], inputs["a"] * 2)
    assert list(alone.outputs) == ["sum"]


def test_text_and_lists_take_the_models_datatype(client):
    assert client.infer("text", {"x": [["né", ""]]})["y"].tolist() == [["né".encode(), b""]]
    assert client.infer("integers", {"x": [[1, 2]]})["y"].dtype == np.int32
    with pytest.raises(TensorMismatch, match="does not fit INT32"):
        client.infer("integers", {"x": [[1, 1 << 40]]})


def test_a_version_that_is_named_answers_and_else_the_newest(client):
    x = floats(1, 16)
    assert client.infer("two", {"x": x}, version=1).version == 1
    assert client.infer("two", {"x": x}).version == 2


def test_timing_is_there_when_asked_for(client):
    timing = client.infer("queued", {"x": floats(3, 16)}, timing=True).timing
    assert timing.batch_rows >= 3
    assert timing.run_ms > 0
    assert timing.queue_ms >= 0


@pytest.mark.parametrize("timeout_ms", [5_000, 12_345.6])
def test_priority_and_timeout_are_taken_and_the_answer_is_the_same(client, timeout_ms):
    x = floats(2, 16)
    for priority in (1, 9):
        for _ in range(3):
            result = client.infer("mlp", {"x": x}, priority=priority, timeout_ms=timeout_ms)
        np.testing.assert_allclose(result["y"], expected(x), rtol=1e-4, atol=1e-4)


@pytest.mark.smoke
def test_a_future_gets_what_infer_returns_or_raises(client):
    x = floats(1, 16)
    good, bad = client.submit("mlp", {"x": x}), client.submit("nope", {"x": x})

    np.testing.assert_allclose(good.result(ANSWER_S)["y"], expected(x), rtol=1e-4, atol=1e-4)
    assert isinstance(bad.exception(ANSWER_S), ModelNotFound)


@pytest.mark.parametrize("model", ["mlp", "queued"])
def test_each_of_many_requests_gets_its_own_answer_once(client, model):
    inputs = [floats(1, 16, seed=seed) for seed in range(1_000)]
    ends = Counter()

    futures = [client.submit(model, {"x": x}) for x in inputs]
    for index, future in enumerate(futures):
        future.add_done_callback(lambda _, index=index: ends.update([index]))

    for x, future in zip(inputs, futures, strict=True):
        np.testing.assert_allclose(future.result(ANSWER_S)["y"], expected(x), rtol=1e-4, atol=1e-4)
    assert set(ends.values()) == {1}
    assert len(ends) == len(inputs)


@pytest.mark.smoke
def test_threads_that_share_a_client_get_each_their_own_answers(client):
    def ask(seed: int) -> bool:
        x = floats(2, 16, seed=seed)
        return all(
            np.allclose(client.infer(model, {"x": x})["y"], expected(x), rtol=1e-4, atol=1e-4)
            for model in ("mlp", "queued") * 20
        )

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(ask, range(24)))


# ---- what the daemon says of itself ---------------------------------------------------------------------------------


def test_the_daemon_says_the_same_of_itself(service, client):
    with service.client("zmq") as reference:
        assert client.models() == reference.models()
        mine, theirs = client.metadata("pair"), reference.metadata("pair")
        assert {**mine, "max_frame_bytes": 0} == {**theirs, "max_frame_bytes": 0}
        assert mine["max_frame_bytes"] > 0
        assert client.metadata("two", 1)["version"] == 1
        assert set(client.stats()) == set(reference.stats())
    assert client.is_live()
    assert client.is_ready()
    assert client.is_ready("mlp")
    assert not client.is_ready("broken")
    assert not client.is_ready("no/such")
    client.wait_ready(ANSWER_S, "queued")


# ---- refusals -------------------------------------------------------------------------------------------------------


REFUSED = [
    ("an unknown model", "nope", {}, {}, ModelNotFound),
    ("what is not a model's name", "a/b", {}, {}, ModelNotFound),
    ("wildcards for a name", "#", {}, {}, ModelNotFound),
    ("no name", "", {}, {}, EdgeRuntimeError),
    ("an unknown version", "mlp", {}, {"version": 9}, ModelNotFound),
    ("a version below one", "mlp", {}, {"version": -1}, DecodeFailed),
    ("an unknown input", "mlp", {"z": floats(1, 16)}, {}, TensorMismatch),
    ("a wrong datatype", "mlp", {"x": np.zeros((1, 16))}, {}, TensorMismatch),
    ("a wrong shape", "mlp", {"x": floats(1, 15)}, {}, TensorMismatch),
    ("no rows", "mlp", {"x": floats(0, 16)}, {}, TensorMismatch),
    ("too many rows", "mlp", {"x": floats(20_000, 16)}, {}, TensorMismatch),
    ("an unknown output", "mlp", {}, {"outputs": ["z"]}, TensorMismatch),
    ("a complex array", "mlp", {"x": np.zeros((1, 16), np.complex64)}, {}, Unsupported),
    ("a model that failed to load", "broken", {}, {}, NotReady),
    ("a deadline that is over", "mlp", {}, {"timeout_ms": 0}, DeadlineUnmeetable),
    ("a priority that there is not", "mlp", {}, {"priority": 99}, DecodeFailed),
]


@pytest.mark.parametrize(
    ("model", "inputs", "options", "kind"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_a_refusal_is_the_wires_error_with_its_message(client, model, inputs, options, kind):
    for _ in range(2):
        with pytest.raises(kind) as caught:
            client.infer(model, inputs or {"x": floats(1, 16)}, **options)
        assert caught.value.message
        assert caught.value.retryable is kind.retryable
    assert client.infer("mlp", {"x": floats(1, 16)}).version == 1


def test_a_full_queue_refuses_the_newest_and_answers_the_others(held):
    service, client = held
    service.gate.unlink()
    admitted = [client.submit("held", {"x": VALUE})]
    queue_is(client, 0)
    admitted += [client.submit("held", {"x": VALUE}) for _ in range(4)]
    queue_is(client, 4)

    refused = [client.submit("held", {"x": VALUE}) for _ in range(20)]

    assert {type(future.exception(ANSWER_S)) for future in refused} == {QueueFull}
    assert all(future.exception().retryable for future in refused)
    service.gate.touch()
    assert [future.result(ANSWER_S).version for future in admitted] == [1] * 5


def test_a_request_that_waits_too_long_is_refused_in_time(held):
    service, client = held
    service.gate.unlink()
    running = client.submit("held", {"x": VALUE})
    queue_is(client, 0)

    with pytest.raises((DeadlineExceeded, DeadlineUnmeetable)):
        client.infer("held", {"x": VALUE}, timeout_ms=300)

    service.gate.touch()
    assert running.result(ANSWER_S).version == 1


# ---- life -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "queued"])
def test_no_request_is_lost_or_failed_over_reloads_under_load(service, client, model):
    stop = threading.Event()

    def load() -> int:
        with Client(service.daemon.endpoints[1]) as control:
            for _ in range(8):
                control.load(model)
        stop.set()
        return 8

    futures: list[Future] = []
    with ThreadPoolExecutor(1) as pool:
        loads = pool.submit(load)
        while not stop.is_set():
            lot = [client.submit(model, {"x": floats(1, 16)}) for _ in range(16)]
            wait(lot, ANSWER_S)
            futures += lot
            if loads.done():
                break
        assert loads.result(ANSWER_S) == 8

    assert {future.result(0).version for future in futures} == {1}


def test_draining_answers_what_was_admitted_and_refuses_what_comes_later(held):
    service, client = held
    service.gate.unlink()
    admitted = [client.submit("held", {"x": VALUE})]
    queue_is(client, 0)
    admitted += [client.submit("held", {"x": VALUE}) for _ in range(4)]
    queue_is(client, 4)

    stopping = threading.Thread(target=service.daemon.stop)
    stopping.start()
    try:
        refusals = iter(lambda: type(client.submit("held", {"x": VALUE}).exception(ANSWER_S)), Draining)
        assert set(refusals) <= {QueueFull}  # until the daemon has begun to stop, the queue is full
    finally:
        service.gate.touch()
        stopping.join()

    assert [future.result(ANSWER_S).version for future in admitted] == [1] * 5


def test_an_array_that_nearly_fits_gets_the_code_that_does_and_cast_converts_it(client):
    x = floats(1, 16).astype(np.float64)
    with pytest.raises(TensorMismatch, match=r"send x\.astype\(np\.float32\), or cast=True"):
        client.infer("mlp", {"x": x})
    with pytest.raises(TensorMismatch, match=r"send x\[None\]"):
        client.infer("mlp", {"x": floats(1, 16)[0]})
    result = client.infer("mlp", {"x": x}, cast=True)
    assert np.array_equal(result["y"], client.submit("mlp", {"x": x}, cast=True).result()["y"])
    assert list(result) == ["y"]
    assert dict(result).keys() == {"y"}
