"""One daemon, every door: the same request gets the same answer, bit for bit, and the same refusal by its code."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from edge_runtime import Runtime
from edge_runtime.config.settings import Config
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.testing import DoorContract
from edge_runtime.testing.door_kit import DATATYPES
from tests.contract.open_doors import ASKED, Ask, OpenDoors, open_doors
from tests.contract.running_daemon import ANSWER_S, floats, put_held_model, put_model
from tests.fakes import lent_buffers  # noqa: F401 (for its effect)
from tests.fakes.broker import needs_mosquitto
from tests.models import onnx_models

pytestmark = needs_mosquitto

DOORS = [*ASKED, "in-process"]
VALUE = np.zeros((1, 1), np.float32)


@pytest.fixture(scope="module")
def gate(tmp_path_factory) -> Path:
    gate = tmp_path_factory.mktemp("gate") / "gate"
    gate.touch()
    return gate


@pytest.fixture(scope="module")
def models(tmp_path_factory, gate) -> Path:
    models = tmp_path_factory.mktemp("models")
    put_model(models, "mlp", onnx_models.mlp)
    put_model(models, "pair", onnx_models.two_in_two_out)
    put_model(models, "gone", onnx_models.mlp)
    for datatype in DATATYPES:
        put_model(models, datatype.lower(), onnx_models.identity, datatype=datatype)
    put_model(models, "two", onnx_models.mlp, toml='mode = "workers"\n[versions]\nall = true\n')
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


@pytest.fixture(scope="module")
def frames(doors) -> Iterator[Client]:
    """What every other door is held against: frames over ZeroMQ."""
    with Client(doors.zmq) as client:
        assert client.is_live()  # connected now, so that no test seems to leave its socket behind
        yield client


class TestEveryDoor(DoorContract):
    @pytest.fixture(params=DOORS)
    def ask(self, doors, runtime, request) -> Iterator[Ask]:
        if request.param == "in-process":
            yield runtime.infer
            return
        with doors.asking(request.param) as ask:
            yield ask

    @pytest.fixture
    def reference(self, frames):
        return frames.infer


for _name in (
    "test_an_answer_is_the_same_bit_for_bit_the_first_time_and_when_the_request_is_known",
    "test_every_datatype_comes_back_as_it_went",
):
    pytest.mark.smoke(getattr(DoorContract, _name))


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
