"""What an endpoint counts of the replies that it cannot send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq

from edge_runtime.config.settings import ZmqSettings
from edge_runtime.telemetry.metrics import Metrics
from edge_runtime.transports.unsent_replies import TRACKED_BYTES
from edge_runtime.transports.zmq_bind import bind_router, new_context
from edge_runtime.transports.zmq_transport import Endpoint, Entry, IoLoop

GONE: list[Entry] = [(b"gone", b"1", b""), (b"gone", b"2", b"")]


class DeafReceiver:
    """An endpoint that only sends asks it nothing, and tells it who is gone."""

    def __init__(self) -> None:
        self.senders: list[Any] = []

    def gone(self, sender: Any) -> None:
        self.senders.append(sender)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was not expected")


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def endpoint(tmp_path: Path, metrics: Metrics) -> Iterator[Endpoint]:
    """One that nobody is connected to."""
    context, loop = new_context(), IoLoop(metrics)
    bound = bind_router(context, f"ipc://{tmp_path}/s", ZmqSettings())
    try:
        yield Endpoint(
            loop,
            bound.socket,
            bound.connections,
            DeafReceiver(),
            send_bound_bytes=1 << 20,
            max_frame_bytes=1 << 20,
            message_frames=64,
            message_bytes=1 << 20,
            total_send_bound_bytes=1 << 30,
            is_control=False,
        )
    finally:
        bound.close()
        loop.close()
        context.term()
        bound.release()


def test_a_sender_is_one_connection_of_one_endpoint(endpoint: Endpoint) -> None:
    assert endpoint.sender(b"a") == endpoint.sender(bytes([97]))
    assert len({endpoint.sender(b"a"), endpoint.sender(b"b"), (None, b"a")}) == 3


@pytest.mark.parametrize("output_frames", [1, 3])
@pytest.mark.parametrize("frame_bytes", [1, TRACKED_BYTES])
def test_a_reply_that_finds_no_peer_is_counted_once_however_many_frames_it_has(
    endpoint: Endpoint, metrics: Metrics, output_frames: int, frame_bytes: int
) -> None:
    frames = [bytes(frame_bytes)] * output_frames
    endpoint.send_answers(GONE, b"header", [frames] * len(GONE), output_frames * frame_bytes)
    assert metrics.counters() == {"replies_dropped": len(GONE)}


class KnownRoute:
    """A header with one tensor of one byte."""

    single_size = 1
    keeps_frames = False

    def __init__(self) -> None:
        self.burst: list[Entry] = []

    def payload(self, frames: Sequence[Any]) -> tuple[Any, ...] | None:
        raise MemoryError


class FailingReceiver:
    """Knows three headers, and fails at what comes with the first."""

    def __init__(self) -> None:
        self.known = {b"bad": KnownRoute(), b"good": KnownRoute(), b"fine": KnownRoute()}

    def routes(self) -> dict[bytes, KnownRoute]:
        return self.known

    def answer_burst(self, endpoint: Endpoint, route: KnownRoute, entries: list[Entry]) -> None:
        if route is self.known[b"bad"]:
            raise RuntimeError("a bug")
        endpoint.send_answers(entries, b"header", [[entry[2]] for entry in entries], 1)

    def message(self, endpoint: Endpoint, peer: Any, frames: list[Any]) -> None:
        raise RuntimeError("another bug")


@pytest.fixture
def served(tmp_path: Path, metrics: Metrics) -> Iterator[tuple[Endpoint, FailingReceiver, Any]]:
    """An endpoint with a failing receiver, and a client of it."""
    context, loop, receiver = new_context(), IoLoop(metrics), FailingReceiver()
    bound = bind_router(context, f"ipc://{tmp_path}/s", ZmqSettings())
    client = context.socket(zmq.DEALER)
    client.connect(f"ipc://{tmp_path}/s")
    try:
        yield (
            Endpoint(
                loop,
                bound.socket,
                bound.connections,
                receiver,
                send_bound_bytes=1 << 20,
                max_frame_bytes=1 << 20,
                message_frames=64,
                message_bytes=1 << 20,
                total_send_bound_bytes=1 << 30,
                is_control=False,
            ),
            receiver,
            client,
        )
    finally:
        client.close(linger=0)
        bound.close()
        loop.close()
        context.term()
        bound.release()


def drained(endpoint: Endpoint, client: Any, count: int) -> list[list[bytes]]:
    """Serve until so many replies have come."""
    replies: list[list[bytes]] = []
    while len(replies) < count:
        assert endpoint.socket.poll(5_000) or client.poll(5_000), "no reply came"
        endpoint.notice()
        endpoint.drain()
        while client.poll(20):
            replies.append(client.recv_multipart())
    return replies


def test_a_burst_that_fails_strands_no_other_of_its_drain(
    served: tuple[Endpoint, FailingReceiver, Any], metrics: Metrics
) -> None:
    endpoint, receiver, client = served
    for round_ in range(3):
        for number in range(5):
            for name in (b"bad", b"good", b"fine"):
                client.send_multipart([name, b"%s%d" % (name, number), b"."])
        ids = {reply[1] for reply in drained(endpoint, client, 10)}
        assert ids == {b"%s%d" % (name, number) for name in (b"good", b"fine") for number in range(5)}, round_
        assert not any(route.burst for route in receiver.known.values())
    assert metrics.counters()["io_errors"] >= 3


def test_a_message_that_cannot_be_taken_loses_neither_those_before_it_nor_the_next(
    served: tuple[Endpoint, FailingReceiver, Any],
) -> None:
    endpoint, receiver, client = served
    for number in range(5):
        client.send_multipart([b"good", b"%d" % number, b"."])
        client.send_multipart([b"good", b"broken", b"..", b"more", b"and more"])
        client.send_multipart([b"unknown", b"header"])
    client.send_multipart([b"fine", b"last", b"."])
    assert [reply[1] for reply in drained(endpoint, client, 6)] == [b"0", b"1", b"2", b"3", b"4", b"last"]
    assert not any(route.burst for route in receiver.known.values())


def test_answers_that_are_not_as_many_as_their_requests_are_not_sent(endpoint: Endpoint, metrics: Metrics) -> None:
    with pytest.raises(ValueError, match="1 answers for 2 requests"):
        endpoint.send_answers(GONE, b"header", [[b"."]], 1)
    assert metrics.counters() == {}
