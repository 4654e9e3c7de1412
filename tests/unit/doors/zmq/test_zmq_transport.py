"""What an endpoint counts of the replies that it cannot send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.doors.zmq.transport import COPIED_BYTES, DRAIN_MESSAGES, Endpoint, Entry, ZmqConnection
from tests.fakes.zmq_site import ZmqSite


class DeafReceiver:
    """An endpoint that only sends asks it nothing, and tells it who is gone."""

    def __init__(self) -> None:
        self.senders: list[Any] = []

    def gone(self, sender: Any) -> None:
        self.senders.append(sender)

    def owes(self, sender: Any) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was not expected")


class MeetingReceiver(DeafReceiver):
    """Keeps who sends it something."""

    def __init__(self) -> None:
        super().__init__()
        self.met: list[ZmqConnection] = []

    def routes(self) -> dict[bytes, Any]:
        return {}

    def message(self, endpoint: Endpoint, peer: Any, frames: list[Any]) -> None:
        self.met.append(peer.envelope[0])


@pytest.fixture
def left(tmp_path: Path) -> Iterator[tuple[ZmqSite, MeetingReceiver, list[Entry]]]:
    """A site, and two requests of a client that has left."""
    receiver = MeetingReceiver()
    site = ZmqSite(tmp_path, receiver)
    client = site.client()
    client.send(b"hello")
    site.turn_until(lambda: receiver.met)
    (connection,) = receiver.met
    client.close(linger=0)
    site.turn_until(lambda: receiver.senders)
    assert receiver.senders == [connection]
    receiver.senders.clear()
    yield site, receiver, [(connection, b"1", b""), (connection, b"2", b"")]
    site.close()


def test_a_sender_is_one_connection(tmp_path: Path) -> None:
    receiver = MeetingReceiver()
    site = ZmqSite(tmp_path, receiver)
    try:
        clients = [site.client() for _ in range(2)]
        for client in (*clients, clients[0]):
            client.send(b"hello")
        site.turn_until(lambda: len(receiver.met) == 3)
        assert len({site.endpoint.sender(each) for each in receiver.met}) == 2
    finally:
        site.close()


@pytest.mark.parametrize("output_frames", [1, 3])
@pytest.mark.parametrize("frame_bytes", [1, COPIED_BYTES])
def test_a_reply_that_finds_no_peer_is_counted_once_however_many_frames_it_has(
    left: tuple[ZmqSite, MeetingReceiver, list[Entry]], output_frames: int, frame_bytes: int
) -> None:
    site, receiver, entries = left
    frames = [bytes(frame_bytes)] * output_frames
    site.endpoint.send_answers(entries, b"header", [frames] * len(entries), output_frames * frame_bytes)
    assert site.metrics.counters() == {"replies_dropped": len(entries)}
    assert set(receiver.senders) == {entries[0][0]}, "what else waits of it is dropped"


class KnownRoute:
    """A header with one tensor of one byte."""

    keeps_order = False
    single_size = 1

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
def served(tmp_path: Path) -> Iterator[tuple[ZmqSite, FailingReceiver, Any]]:
    """An endpoint with a failing receiver, and a client of it."""
    receiver = FailingReceiver()
    site = ZmqSite(tmp_path, receiver)
    yield site, receiver, site.client()
    site.close()


def test_a_burst_that_fails_strands_no_other_of_its_drain(
    served: tuple[ZmqSite, FailingReceiver, Any],
) -> None:
    site, receiver, client = served
    for round_ in range(3):
        for number in range(5):
            for name in (b"bad", b"good", b"fine"):
                client.send_multipart([name, b"%s%d" % (name, number), b"."])
        ids = {reply[1] for reply in site.replies(client, 10)}
        assert ids == {b"%s%d" % (name, number) for name in (b"good", b"fine") for number in range(5)}, round_
        assert not any(route.burst for route in receiver.known.values())
    assert site.metrics.counters()["io_errors"] >= 3


def test_a_message_that_cannot_be_taken_loses_neither_those_before_it_nor_the_next(
    served: tuple[ZmqSite, FailingReceiver, Any],
) -> None:
    site, receiver, client = served
    for number in range(5):
        client.send_multipart([b"good", b"%d" % number, b"."])
        client.send_multipart([b"good", b"broken", b"..", b"more", b"and more"])
        client.send_multipart([b"unknown", b"header"])
    client.send_multipart([b"fine", b"last", b"."])
    assert [reply[1] for reply in site.replies(client, 6)] == [b"0", b"1", b"2", b"3", b"4", b"last"]
    assert not any(route.burst for route in receiver.known.values())


class GatheringReceiver(FailingReceiver):
    """Keeps how many requests each burst had."""

    def __init__(self) -> None:
        super().__init__()
        self.bursts: list[int] = []

    def answer_burst(self, endpoint: Endpoint, route: KnownRoute, entries: list[Entry]) -> None:
        self.bursts.append(len(entries))
        super().answer_burst(endpoint, route, entries)

    def message(self, endpoint: Endpoint, peer: Any, frames: list[Any]) -> None:
        endpoint.send(peer.envelope, [b"large", bytes(frames[1])])


def test_small_requests_after_a_large_one_are_gathered_as_before(tmp_path: Path) -> None:
    receiver = GatheringReceiver()
    site = ZmqSite(tmp_path, receiver)
    try:
        client = site.client()
        for _ in range(3):
            client.send_multipart([b"large", b"0", bytes(300_000)])
            assert site.replies(client, 1) == [[b"large", b"0"]]
            receiver.bursts.clear()
            ids = [b"%060d" % number for number in range(300)]  # long: AHEAD_BYTES hold few of them
            for each in ids:
                client.send_multipart([b"good", each, b"."])
            assert [reply[1] for reply in site.replies(client, 300)] == ids
            assert sum(size == DRAIN_MESSAGES for size in receiver.bursts) > len(receiver.bursts) / 2
    finally:
        site.close()


def test_answers_that_are_not_as_many_as_their_requests_are_not_sent(
    left: tuple[ZmqSite, MeetingReceiver, list[Entry]],
) -> None:
    site, _, entries = left
    with pytest.raises(ValueError, match="1 answers for 2 requests"):
        site.endpoint.send_answers(entries, b"header", [[b"."]], 1)
    assert site.metrics.counters() == {}
