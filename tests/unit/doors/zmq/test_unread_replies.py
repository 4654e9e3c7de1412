"""What becomes of replies that peers read late, slowly or never: real connections, and looks by a clock of the test."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.doors.zmq.transport import COPIED_BYTES, REPLY_BYTES, UNREAD_S, Endpoint
from tests.fakes.zmq_site import ZmqSite

ANSWER_S = 60
BOUND_BYTES = 4 << 20
SMALL, LARGE = bytes(COPIED_BYTES - 1_000), bytes(40_000)
BACKLOG_BYTES = 400 << 10
"""More than a Unix socket holds, so that its buffer is full until the peer reads."""
HELD_BYTES = 256 << 10
"""More than a connection and its socket hold."""
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


class Listener:
    """Learns who there is."""

    def __init__(self) -> None:
        self.senders: list[Any] = []

    def routes(self) -> dict[bytes, Any]:
        return {}

    def message(self, endpoint: Endpoint, peer: Any, frames: Any) -> None:
        self.senders.append(peer.envelope[0])

    def unheard(self, sender: Any) -> None:
        """Nothing waits."""

    def gone(self, sender: Any) -> None:
        """Nothing waits."""


class Site(ZmqSite):
    """An endpoint, and peers that read when the test says so."""

    def __init__(self, folder: Path, total_bytes: int) -> None:
        self.listener = Listener()
        super().__init__(folder, self.listener, send_bound_bytes=BOUND_BYTES, total_send_bound_bytes=total_bytes)
        self._peers: list[Peer] = []

    def close(self) -> None:
        for peer in self._peers:
            peer.socket.close()
            peer.stream.close()
        super().close()

    def peer(self) -> Peer:
        bare = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer = Peer(self, bare)
        self._peers.append(peer)
        bare.settimeout(ANSWER_S)
        bare.connect(self.address.removeprefix("ipc://"))
        bare.sendall(GREETING + READY + b"\x00\x04here")
        known = len(self.listener.senders)
        self.turn_until(lambda: len(self.listener.senders) > known)
        peer.stream.read(len(GREETING))
        peer.stream.read(peer.stream.read(2)[1])
        peer.connection = self.listener.senders[-1]
        return peer

    def counted(self, name: str) -> int:
        return self.metrics.counters().get(name, 0)


class Peer:
    """A connection that reads nothing until told to. sent, came: replies that were handed over, and that came."""

    def __init__(self, site: Site, bare: socket.socket) -> None:
        self._site, self.socket = site, bare
        self.connection: Any = None
        self.stream = bare.makefile("rb")
        self.sent = self.came = 0

    def send(self, payload: bytes, count: int = 1) -> int:
        """How many were not dropped."""
        before = self._site.counted("replies_dropped")
        for _ in range(count):
            entry = (self.connection, b"%d" % self.sent, b"")
            self._site.endpoint.send_answers([entry], b"header", [[payload]], len(payload))
            self._site.loop.turn(0.0)
            self.sent += 1
        return count - (self._site.counted("replies_dropped") - before)

    def read(self, count: int = 1) -> None:
        """Read replies, which are in order where none was dropped."""
        for _ in range(count):
            self._site.turn_until(lambda: select.select([self.socket], [], [], 0)[0] or self.stream.peek())
            flags, frames = 1, []
            while flags & 1:
                flags = self._take(1)[0]
                frames.append(self._take(int.from_bytes(self._take(8 if flags & 2 else 1), "big")))
            assert frames[1] == b"%d" % self.came
            self.came += 1
        self._site.loop.turn(0.0)

    def _take(self, count: int) -> bytes:
        """Read so many bytes, while the endpoint sends."""
        data = b""
        while len(data) < count:
            self._site.loop.turn(0.0)
            data += self.stream.read1(count - len(data))
        return data

    def send_backlog(self, payload: bytes) -> int:
        """Send more than the connection holds; how many replies that were."""
        count = BACKLOG_BYTES // len(payload)
        assert self.send(payload, count) == count
        return count


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(total_bytes: int = 1 << 30) -> Site:
        (folder := tmp_path / f"{len(made)}").mkdir()
        made.append(Site(folder, total_bytes))
        return made[-1]

    yield make
    for each in made:
        each.close()


both = pytest.mark.parametrize("payload", [SMALL, LARGE], ids=["small", "large"])


@both
def test_a_peer_that_reads_all_the_time_misses_no_reply_however_many_they_are(
    make_site: Callable[..., Site], payload: bytes
) -> None:
    """Something is unread at each look."""
    site = make_site()
    peer = site.peer()
    count = peer.send_backlog(payload)
    for second in range(4 * BOUND_BYTES // (count * len(payload))):
        site.endpoint.sweep(float(second))
        assert peer.send(payload, count) == count
        peer.read(count)
    peer.read(count)
    assert peer.came == peer.sent
    assert site.counted("connections_closed_unread") == 0


@both
def test_a_peer_that_reads_slowly_but_always_is_never_closed(make_site: Callable[..., Site], payload: bytes) -> None:
    """Its buffer is filled again before each look, and looks like one that nobody reads."""
    site = make_site()
    peer = site.peer()
    assert peer.send(payload, 2)
    site.endpoint.sweep(0.0)
    peer.send_backlog(payload)
    for second in range(1, int(UNREAD_S) * 3):
        assert peer.send(payload)
        peer.read()
        site.endpoint.sweep(float(second))
    assert site.counted("connections_closed_unread") == 0


@both
def test_replies_to_a_peer_that_does_not_read_are_bounded(make_site: Callable[..., Site], payload: bytes) -> None:
    site = make_site()
    peer = site.peer()
    peer.send_backlog(payload)
    site.endpoint.sweep(0.0)
    taken = peer.send(payload, 2 * BOUND_BYTES // len(payload))
    assert BOUND_BYTES / 2 < taken * len(payload) <= BOUND_BYTES


def test_a_large_reply_of_small_frames_counts_as_any_other(make_site: Callable[..., Site]) -> None:
    site = make_site()
    peer = site.peer()
    frames = [SMALL] * 30
    sent = 10 * BOUND_BYTES // (30 * len(SMALL))
    for number in range(sent):
        site.endpoint.send((peer.connection,), [b"header", b"%d" % number, *frames])
    taken = sent - site.counted("replies_dropped")
    assert taken * 30 * len(SMALL) <= BOUND_BYTES + HELD_BYTES


def test_a_peer_that_reads_again_may_be_sent_as_much_again(make_site: Callable[..., Site]) -> None:
    site = make_site()
    peer = site.peer()
    before = peer.send_backlog(SMALL)
    site.endpoint.sweep(0.0)
    taken = peer.send(SMALL, 2 * BOUND_BYTES // len(SMALL))
    peer.sent = before + taken
    peer.read(before + taken)
    half = BOUND_BYTES // 2 // (len(SMALL) + REPLY_BYTES)
    assert peer.send(SMALL, half) == half


def test_a_peer_that_reads_nothing_for_long_is_closed_however_little_it_costs(make_site: Callable[..., Site]) -> None:
    site = make_site()
    for second in (0.0, 2.0):
        peer = site.peer()
        assert peer.send(SMALL)
        site.endpoint.sweep(second)
    site.endpoint.sweep(UNREAD_S - 1.0)
    assert site.counted("connections_closed_unread") == 0
    site.endpoint.sweep(UNREAD_S + 1.0)
    assert site.counted("connections_closed_unread") == 1


def test_a_peer_that_reads_as_much_as_it_is_sent_misses_nothing_though_some_is_always_unread(
    make_site: Callable[..., Site],
) -> None:
    """What waits costs more than its bytes, and all of that is given back as it goes."""
    site = make_site()
    peer = site.peer()
    peer.send_backlog(SMALL)
    for _ in range(3 * BOUND_BYTES // REPLY_BYTES // 4):
        assert peer.send(SMALL, 4) == 4
        peer.read(4)
    assert site.counted("replies_dropped") == 0


def test_replies_to_all_peers_that_do_not_read_are_bounded_together(make_site: Callable[..., Site]) -> None:
    site = make_site(BOUND_BYTES // 2)
    peers = site.peer(), site.peer()
    for number, peer in enumerate(peers):
        assert peer.send(SMALL)
        site.endpoint.sweep(2.0 * number)
    many = BOUND_BYTES // (len(SMALL) + REPLY_BYTES)
    taken = [peer.send(SMALL, many) for peer in peers]
    assert many / 4 < sum(taken) <= many / 2 + len(peers) * HELD_BYTES / len(SMALL)
    assert site.counted("connections_closed_unread") == 0
    site.endpoint.sweep(4.0)  # with what lies in their buffers it is too much
    assert site.counted("connections_closed_unread") >= 1
