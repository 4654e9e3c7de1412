"""Answers in parts, of models that send several responses: by every door, to their end or until their caller leaves."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq

from edge_runtime.client.blocking_client import BlockingClient
from edge_runtime.config.settings import ZmqSettings
from edge_runtime.doors.mqtt.client import MqttClient
from edge_runtime.doors.open_inference.client import OipClient
from edge_runtime.doors.zmq.asyncio_client import AsyncClient
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import DeadlineExceeded, ModelNotFound, Unsupported
from tests.contract.open_doors import OpenDoors, open_doors
from tests.contract.running_daemon import ANSWER_S, RawClient, error_code, header, op, running_daemon
from tests.fakes.broker import needs_mosquitto
from tests.models import triton_models

pytestmark = needs_mosquitto


@pytest.fixture(scope="module")
def doors(broker, tmp_path_factory) -> Iterator[OpenDoors]:
    models: Path = tmp_path_factory.mktemp("models")
    triton_models.decoupled(models, "repeats", triton_models.REPEATS)
    triton_models.decoupled(models, "cancelled", triton_models.CANCELLED)
    triton_models.rows(models, "identity", triton_models.IDENTITY)
    with open_doors(models, broker, tmp_path_factory.mktemp("run"), "parts", python_models=True, watch=False) as doors:
        yield doors


@pytest.fixture
def raw(doors: OpenDoors) -> Iterator[RawClient]:
    with RawClient(doors.zmq) as raw:
        yield raw


@pytest.fixture
def left(doors: OpenDoors) -> Iterator[Callable[[], int]]:
    """How many callers of the model that streams without end have left, as it knows."""
    with Client(doors.zmq) as client:
        yield lambda: int(client.infer("cancelled", {"x": np.zeros(2, np.float32)})["y"][0])


def x(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


def parts(raw: RawClient, *values: float, **fields) -> list[tuple[dict, list[bytes]]]:
    """Headers and tensors of all parts of an answer of `repeats`."""
    raw.send(header("repeats", (2,), stream=True, **fields), b"7", x(*values))
    found = []
    while not found or not {"final", "error"} & found[-1][0].keys():
        packed, request_id, *tensors = raw.receive()
        assert request_id == b"7"
        found.append((msgpack.unpackb(packed), tensors))
    return found


@pytest.mark.smoke
@pytest.mark.parametrize("again", [1, 2, 3])
def test_parts_come_in_frames_with_their_numbers_and_the_last_is_marked(raw: RawClient, again: int) -> None:
    *found, (end, no_tensors) = parts(raw, 3, 0)
    assert [told["part"] for told, _ in found] == [0, 1, 2]
    assert [np.frombuffer(each, np.float32).tolist() for _, (each,) in found] == [[0, 3], [1, 3], [2, 3]]
    assert end == {"v": 1, "model": "repeats", "version": 1, "outputs": [], "part": 3, "final": True}
    assert no_tensors == []
    assert found[0][0] == {
        "v": 1, "model": "repeats", "version": 1, "part": 0,
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [2]}],
    }  # fmt: skip


def test_parts_may_end_with_outputs_or_an_error(raw: RawClient) -> None:
    *_, last = parts(raw, 2, 1, timing=True)
    assert (last[0]["part"], last[0]["final"], len(last[1])) == (1, True, 1)
    assert last[0]["timing"]["run_ms"] >= 0
    first, _, (failed, _) = parts(raw, 2, 2)
    assert first[0]["part"] == 0
    assert failed == {"v": 1, "error": {"code": "unsupported", "message": "the end", "retryable": False}}
    assert [told.get("part") for told, _ in parts(raw, 0, 0)] == [0]


def test_parts_of_a_model_with_one_answer_are_that_one(raw: RawClient) -> None:
    raw.send(header("identity", (1, 2), stream=True), b"", x(1, 2))
    packed, _, tensor = raw.receive()
    assert (msgpack.unpackb(packed)["part"], msgpack.unpackb(packed)["final"], tensor) == (0, True, x(1, 2))
    assert error_code(raw.ask(header("absent", (2,), stream=True), b"", x(1, 2))) == "model_not_found"
    assert error_code(raw.ask(header("repeats", (2,), stream=1), b"", x(1, 2))) == "decode_failed"


def test_parts_come_as_json_where_the_request_did(raw: RawClient) -> None:
    request = {
        "model": "repeats", "id": "a", "stream": True,
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [2, 0]}],
    }  # fmt: skip
    for _ in range(3):
        raw.send(json.dumps(request).encode())
        found = [json.loads(raw.receive()[0]) for _ in range(3)]
        assert [(each["id"], each["part"], each.get("final", False)) for each in found] == [
            ("a", 0, False), ("a", 1, False), ("a", 2, True)
        ]  # fmt: skip
        assert [each["data"] for told in found for each in told["outputs"]] == [[0, 2], [1, 2]]


def test_parts_end_with_an_error_when_their_caller_cancels_them(raw: RawClient, left: Callable[[], int]) -> None:
    before = left()
    raw.send(header("cancelled", (2,), stream=True), b"7", x(1, 1))
    assert msgpack.unpackb(raw.receive()[0])["part"] == 0
    with RawClient(raw.socket.last_endpoint.decode()) as other:
        assert other.result("cancel", parameters={"request_id": b"7".hex()}) is False
    raw.send(op("cancel", parameters={"request_id": b"7".hex()}), b"8")
    ends: dict[bytes, dict] = {}
    while len(ends) < 2:
        packed, request_id, *_ = raw.receive()
        told = msgpack.unpackb(packed)
        assert "part" not in told or b"7" not in ends  # none behind the end
        if "part" not in told:
            ends[request_id] = told
    assert ends[b"7"]["error"]["code"] == "cancelled"
    assert ends[b"8"] == {"v": 1, "result": True}
    assert left() == before + 1
    assert raw.result("cancel", parameters={"request_id": b"7".hex()}) is False


def test_parts_are_cancelled_when_their_callers_connection_ends(doors: OpenDoors, left: Callable[[], int]) -> None:
    before = left()
    with RawClient(doors.zmq) as leaves:
        leaves.send(header("cancelled", (2,), stream=True), b"7", x(1, 1))
        leaves.receive()
    assert left() == before + 1


def test_parts_end_at_their_deadline_with_an_error(raw: RawClient, left: Callable[[], int]) -> None:
    before = left()
    raw.send(header("cancelled", (2,), stream=True, timeout_ms=300.0), b"7", x(1, 1))
    while "error" not in (told := msgpack.unpackb(raw.receive()[0])):
        assert "part" in told
    assert told["error"]["code"] == "deadline_exceeded"
    assert left() == before + 1
    assert raw.is_silent()


def test_parts_that_their_caller_does_not_read_end_its_connection_and_run(doors: OpenDoors, tmp_path: Path) -> None:
    models = tmp_path / "models"
    triton_models.decoupled(models, "cancelled", triton_models.CANCELLED)
    endpoint = f"ipc://{tmp_path}/infer.sock"
    bound = ZmqSettings(endpoints=(endpoint,), send_bound_bytes=64 << 10)
    with (
        running_daemon(models, tmp_path / "run", python_models=True, watch=False, zmq=bound),
        RawClient(endpoint) as silent,
        Client(endpoint) as client,
    ):
        client.wait_ready(ANSWER_S)
        silent.socket.set(zmq.RCVHWM, 1)
        silent.socket.disconnect(endpoint)
        silent.socket.connect(endpoint)
        silent.send(header("cancelled", (2,), stream=True), b"7", x(1, 1))
        silent.receive()
        assert client.infer("cancelled", given(0, 0))["y"][0] == 1  # which runs once the other has ended
        assert client.stats()["metrics"]["counters"]["connections_closed_unread"] == 1


# ---- clients --------------------------------------------------------------------------------------------------------

ENDLESS = {"x": np.ones(2, np.float32)}


def given(*values: float) -> dict[str, np.ndarray]:
    return {"x": np.array(values, np.float32)}


@pytest.fixture(params=["zmq", "mqtt", "mqtt 3.1.1", "http", "grpc"])
def client(doors: OpenDoors, request) -> Iterator[BlockingClient]:
    made = {
        "zmq": lambda: Client(doors.zmq),
        "mqtt": lambda: MqttClient(doors.mqtt),
        "mqtt 3.1.1": lambda: MqttClient(doors.mqtt, protocol="3.1.1", qos=1),
        "http": lambda: OipClient(doors.http),
        "grpc": lambda: OipClient(doors.grpc),
    }
    with made[request.param]() as client:
        client.wait_ready()
        yield client


@pytest.mark.smoke
def test_stream_gives_each_part_in_order_and_marks_the_last(client) -> None:
    found = list(client.stream("repeats", given(3, 1)))
    assert [(each.part, each.final, each["y"].tolist()) for each in found] == [
        (0, False, [0, 3]), (1, False, [1, 3]), (2, True, [2, 3])
    ]  # fmt: skip
    assert [each["y"][0] for each in client.stream("repeats", given(5, 0))] == [0, 1, 2, 3, 4]
    assert list(client.stream("repeats", given(0, 0))) == []


def test_stream_of_a_model_with_one_answer_gives_that(client) -> None:
    (only,) = client.stream("identity", {"x": np.ones((1, 2), np.float32)})
    assert (only.part, only.final, only["x" if "x" in only else "y"].tolist()) == (0, True, [[1, 1]])


def test_stream_raises_the_error_that_ends_it(client) -> None:
    parts = client.stream("repeats", given(1, 2))
    assert next(parts)["y"][0] == 0
    with pytest.raises(Unsupported, match="the end"):
        next(parts)
    assert list(parts) == []
    with pytest.raises(ModelNotFound):
        next(client.stream("absent", given(1, 2)))


def test_stream_ends_at_its_deadline_with_an_error(client, left: Callable[[], int]) -> None:
    before = left()
    with pytest.raises(DeadlineExceeded):
        for _ in client.stream("cancelled", ENDLESS, timeout_ms=500):
            pass
    assert left() == before + 1


def test_stream_that_is_left_early_is_cancelled(client, left: Callable[[], int]) -> None:
    before = left()
    for each in client.stream("cancelled", ENDLESS):  # left by break, and so freed
        assert each["y"].tolist() == [0, 0]
        break
    gc.collect()
    assert left() == before + 1
    with client.stream("cancelled", ENDLESS) as parts:
        next(parts)
    assert left() == before + 2
    assert list(parts) == []
    assert [each["y"][0] for each in client.stream("repeats", given(2, 0))] == [0, 1]


def test_stream_is_ended_by_another_thread_that_closes_it(client, left: Callable[[], int]) -> None:
    before = left()
    parts = client.stream("cancelled", ENDLESS)
    has_begun = threading.Event()

    def read() -> None:
        for _ in parts:
            has_begun.set()

    reads = threading.Thread(target=read)
    reads.start()
    has_begun.wait()
    parts.close()
    reads.join()
    assert left() == before + 1


def test_streams_and_answers_of_one_client_go_side_by_side(client) -> None:
    one, two = client.stream("repeats", given(40, 0)), client.stream("repeats", given(40, 1))
    waiting = client.submit("repeats", given(1, 1))
    pairs = [(a["y"][0], b["y"][0]) for a, b in zip(one, two, strict=True)]
    assert pairs == [(each, each) for each in range(40)]
    assert waiting.result()["y"][0] == 0
    found: list[list[float]] = []
    threads = [
        threading.Thread(target=lambda: found.append([each["y"][0] for each in client.stream("repeats", given(30, 0))]))
        for _ in range(4)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [list(range(30))] * 4


def test_async_stream_gives_parts_and_cancels_what_is_left(doors: OpenDoors, left: Callable[[], int]) -> None:
    before = left()

    async def ask() -> None:
        async with AsyncClient(doors.zmq) as client:
            assert [each["y"][0] async for each in client.stream("repeats", given(4, 0))] == [0, 1, 2, 3]
            with pytest.raises(Unsupported, match="the end"):
                async for _ in client.stream("repeats", given(2, 2)):
                    pass
            async with client.stream("cancelled", ENDLESS) as parts:
                assert (await anext(parts)).part == 0
            assert int((await client.infer("cancelled", given(0, 0)))["y"][0]) == before + 1
            has_begun = asyncio.Event()

            async def read() -> None:
                async for _ in client.stream("cancelled", ENDLESS):
                    has_begun.set()

            task = asyncio.create_task(read())
            await has_begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert int((await client.infer("cancelled", given(0, 0)))["y"][0]) == before + 2

    asyncio.run(ask())
