"""One daemon, every door: the same request gets the same answer, bit for bit, and the same refusal by its code."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from edge_runtime import Runtime
from edge_runtime.client.core import is_starting
from edge_runtime.config.settings import Config
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import EdgeRuntimeError
from tests.contract.open_doors import ASKED, Ask, OpenDoors, open_doors
from tests.contract.running_daemon import ANSWER_S, floats, put_held_model, put_model
from tests.fakes import lent_buffers  # noqa: F401 (for its effect)
from tests.fakes.broker import needs_mosquitto
from tests.models import onnx_models

pytestmark = needs_mosquitto

DOORS = [*ASKED, "in-process"]
VALUE = np.zeros((1, 1), np.float32)
EVERY_DATATYPE = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP32", "FP64", "BYTES",
)  # fmt: skip
"""Those that JSON has, which leaves out FP16."""


@pytest.fixture(scope="module")
def gate(tmp_path_factory) -> Path:
    gate = tmp_path_factory.mktemp("gate") / "gate"
    gate.touch()
    return gate


@pytest.fixture(scope="module")
def models(tmp_path_factory, gate) -> Path:
    models = tmp_path_factory.mktemp("models")
    put_model(models, "mlp", onnx_models.mlp)
    put_model(models, "queued", onnx_models.mlp, toml='mode = "workers"\n')
    put_model(models, "pair", onnx_models.two_in_two_out)
    put_model(models, "gone", onnx_models.mlp)
    for datatype in EVERY_DATATYPE:
        put_model(models, datatype.lower(), onnx_models.identity, datatype=datatype)
    put_model(models, "two", onnx_models.mlp, toml="[versions]\nall = true\n")
    put_model(models, "two", onnx_models.mlp, version=2)
    (models / "broken" / "1").mkdir(parents=True)
    (models / "broken" / "1" / "model.onnx").write_bytes(b"\x08\x09not a model")
    return models


@pytest.fixture(scope="module")
def doors(models, broker, tmp_path_factory) -> Iterator[OpenDoors]:
    with open_doors(models, broker, tmp_path_factory.mktemp("run"), "every", calibrate=False) as doors:
        with Client(doors.zmq) as client:
            client.unload("gone")
        with doors.asking("http-json") as ask, pytest.raises(EdgeRuntimeError):
            ask("mlp", {"x": floats(2_000, 16)})  # starts the thread for large JSON, which no test then seems to leave
        yield doors


@pytest.fixture(scope="module")
def runtime(models, tmp_path_factory) -> Iterator[Runtime]:
    with Runtime(
        models, config=Config(state=str(tmp_path_factory.mktemp("state")), watch=False, calibrate=False)
    ) as runtime:
        runtime.unload("gone")
        yield runtime


@pytest.fixture(params=DOORS)
def ask(doors, runtime, request) -> Iterator[Ask]:
    if request.param == "in-process":
        yield runtime.infer
        return
    with doors.asking(request.param) as ask:
        yield ask


@pytest.fixture(scope="module")
def reference(doors) -> Iterator[Client]:
    """What every other door is held against: frames over ZeroMQ."""
    with Client(doors.zmq) as client:
        assert client.is_live()  # connected now, so that no test seems to leave its socket behind
        yield client


def values_of(datatype: str) -> np.ndarray:
    """Two rows with the hardest values of a datatype."""
    if datatype == "BYTES":
        return np.array([["né".encode(), b""], ["日本".encode(), b"x" * 300]], dtype=object)
    dtype = np.dtype({"FP32": "f4", "FP64": "f8", "BOOL": "?"}.get(datatype, datatype.lower()))
    if dtype.kind == "b":
        return np.array([[True, False], [False, True]])
    if dtype.kind == "f":
        limits = np.finfo(dtype)
        return np.array([[limits.max, limits.smallest_subnormal], [0.1, -1 / 3]], dtype)
    limits = np.iinfo(dtype)
    return np.array([[limits.min, limits.max], [1, limits.max - 1]], dtype)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.tolist() == other.tolist() if one.dtype.kind == "O" else one.tobytes() == other.tobytes()


# ---- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("model", ["mlp", "queued"])
@pytest.mark.parametrize("rows", [1, 5])
def test_an_answer_is_the_same_bit_for_bit_the_first_time_and_when_the_request_is_known(ask, reference, model, rows):
    x = floats(rows, 16, seed=rows)
    wanted = reference.infer(model, {"x": x})

    for _ in range(4):
        found = ask(model, {"x": x})
        assert (found.model, found.version) == (wanted.model, wanted.version)
        assert same_bits(found["y"], wanted["y"])


@pytest.mark.smoke
@pytest.mark.parametrize("datatype", EVERY_DATATYPE)
def test_every_datatype_comes_back_as_it_went(ask, datatype):
    x = values_of(datatype)
    assert same_bits(ask(datatype.lower(), {"x": x})["y"], x)


def test_outputs_come_in_the_order_asked_for_and_no_others(ask):
    inputs = {"b": np.array([[4, 5]]), "a": floats(1, 3)}

    assert list(ask("pair", inputs, outputs=["twice", "sum"]).outputs) == ["twice", "sum"]
    assert list(ask("pair", inputs, outputs=["sum"]).outputs) == ["sum"]
    assert list(ask("pair", inputs).outputs) == ["sum", "twice"]


def test_a_named_version_answers_and_else_the_newest(ask):
    x = {"x": floats(1, 16)}
    assert [ask("two", x, version=version).version for version in (1, 2, None)] == [1, 2, 2]


def test_a_timeout_and_a_priority_change_no_answer(ask, reference):
    x = floats(2, 16)
    found = ask("mlp", {"x": x}, timeout_ms=12_345.5, priority=1)
    assert same_bits(found["y"], reference.infer("mlp", {"x": x})["y"])


# ---- refusals -------------------------------------------------------------------------------------------------------


X = {"x": floats(1, 16)}
REFUSED = [
    ("an unknown model", "nope", X, {}, "model_not_found"),
    ("an unknown version", "mlp", X, {"version": 9}, "model_not_found"),
    ("an unknown input", "mlp", {"z": X["x"]}, {}, "tensor_mismatch"),
    ("an input too many", "mlp", {**X, "z": X["x"]}, {}, "tensor_mismatch"),
    ("a missing input", "pair", {"a": floats(1, 3)}, {}, "tensor_mismatch"),
    ("a wrong datatype", "mlp", {"x": np.zeros((1, 16))}, {}, "tensor_mismatch"),
    ("a wrong shape", "mlp", {"x": floats(1, 15)}, {}, "tensor_mismatch"),
    ("a wrong rank", "mlp", {"x": floats(16)}, {}, "tensor_mismatch"),
    ("inputs of different rows", "pair", {"a": floats(2, 3), "b": np.array([[4, 5]])}, {}, "tensor_mismatch"),
    ("too many rows", "mlp", {"x": floats(2_000, 16)}, {}, "tensor_mismatch"),
    ("an unknown output", "mlp", X, {"outputs": ["z"]}, "tensor_mismatch"),
    ("a model that failed to load", "broken", X, {}, "not_ready"),
    ("a model that was unloaded", "gone", X, {}, "not_ready"),
    ("a deadline that is over", "mlp", X, {"timeout_ms": 0.000001}, "deadline_unmeetable"),
]


@pytest.mark.parametrize(
    ("model", "inputs", "options", "code"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_a_refusal_has_the_same_code_every_time_and_the_door_stays_open(ask, model, inputs, options, code):
    for _ in range(3):
        with pytest.raises(EdgeRuntimeError) as caught:
            ask(model, inputs, **options)
        assert caught.value.code == code, caught.value
        assert caught.value.message
    assert ask("mlp", X).version == 1


def test_a_model_that_failed_to_load_says_why_through_every_door(ask):
    with pytest.raises(EdgeRuntimeError, match=r"model broken version 1 failed to load: .*model\.onnx") as caught:
        ask("broken", X)
    assert not is_starting(caught.value), "a client would wait for it"


# ---- refusals of a daemon at work -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def busy(broker, gate, tmp_path_factory) -> Iterator[OpenDoors]:
    """A daemon whose only model, `held`, waits for the gate in each run and has a queue of two."""
    models = tmp_path_factory.mktemp("held")
    put_held_model(models, gate, "max_queue_rows = 2\n")
    with open_doors(models, broker, tmp_path_factory.mktemp("busy"), "busy", python_models=True) as doors:
        yield doors


def _fill(senders: Sequence[Client]) -> list:
    """Let one request run and two wait, each of a sender of its own: none has more than its share of the queue."""
    admitted = []
    for sender, waiting in zip(senders, (0, 1, 2), strict=True):
        admitted.append(sender.submit("held", {"x": VALUE}))
        _queue_is(sender, waiting)
    return admitted


def _queue_is(client: Client, rows: int) -> None:
    for _ in range(20_000):
        if client.stats()["metrics"]["models"]["held"]["queue_rows"] == rows:
            return
    raise AssertionError(client.stats()["metrics"]["models"]["held"])


def test_a_full_queue_and_a_daemon_that_drains_refuse_alike_through_every_door(busy, gate):
    with Client(busy.zmq) as first, Client(busy.zmq) as second, Client(busy.zmq) as third:
        first.infer("held", {"x": VALUE})
        gate.unlink()
        admitted = _fill((first, second, third))
        full = {door: _code(busy, door) for door in ASKED}
        asking = {door: busy.asking(door) for door in ASKED}
        asks = {door: context.__enter__() for door, context in asking.items()}
        stopping = threading.Thread(target=busy.daemon.stop)
        try:
            stopping.start()
            drained = {door: _refusals_until(ask, "draining") for door, ask in asks.items()}
        finally:
            for context in asking.values():
                context.__exit__(None, None, None)
            gate.touch()
            stopping.join()
        answers = [future.result(ANSWER_S).version for future in admitted]

    assert full == dict.fromkeys(ASKED, "queue_full")
    assert drained == dict.fromkeys(ASKED, "draining")
    assert answers == [1, 1, 1]


def _code(doors: OpenDoors, door: str) -> str:
    with doors.asking(door) as ask, pytest.raises(EdgeRuntimeError) as caught:
        ask("held", {"x": VALUE})
    return caught.value.code


def _refusals_until(ask: Ask, code: str) -> str:
    """The code after the last `queue_full`, which is the answer until the daemon has begun to stop."""
    while True:
        with pytest.raises(EdgeRuntimeError) as caught:
            ask("held", {"x": VALUE})
        if caught.value.code != "queue_full":
            return caught.value.code
