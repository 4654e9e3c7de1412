"""What becomes of replies that peers read late, slowly or never: real connections, and looks by a clock of the test."""

from __future__ import annotations

import fcntl
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from zmq.utils import garbage

from edge_runtime.config.settings import ZmqSettings
from edge_runtime.telemetry.metrics import Metrics
from edge_runtime.transports.unsent_replies import MARK_BYTES, REPLY_BYTES, TRACKED_BYTES, UNREAD_S
from edge_runtime.transports.zmq_bind import bind_router, new_context
from edge_runtime.transports.zmq_transport import Endpoint, IoLoop
from tests.fakes import lent_buffers  # noqa: F401 (for its effect)

ANSWER_S = 60
BOUND_BYTES = 4 << 20
SMALL, LARGE = bytes(TRACKED_BYTES - 1_000), bytes(40_000)
BACKLOG_BYTES = 400 << 10
"""More than a Unix socket holds, so that its buffer is full until the peer reads."""
UNREAD_BYTES = 32 << 10
HELD_BYTES = 256 << 10
"""Less than it holds, and more than it and libzmq's buffers hold."""
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
FIONREAD = 0x541B


class Listener:
    """Learns who there is."""

    def __init__(self) -> None:
        self.identities: list[bytes] = []

    def routes(self) -> dict[bytes, Any]:
        return {}

    def message(self, endpoint: Endpoint, peer: Any, frames: Any) -> None:
        self.identities.append(peer.envelope[0])

    def unheard(self, sender: Any) -> None:
        """Nothing waits."""

    def gone(self, sender: Any) -> None:
        """Nothing waits."""


class Site:
    """An endpoint, and peers that read when the test says so."""

    def __init__(self, path: Path, total_bytes: int) -> None:
        self.metrics, self._receiver = Metrics(), Listener()
        self._context, self._loop = new_context(), IoLoop(self.metrics)
        self._bound = bind_router(self._context, f"ipc://{path}", ZmqSettings(send_bound_bytes=BOUND_BYTES))
        self._path = path
        self._peers: list[Peer] = []
        self.endpoint = Endpoint(
            self._loop, self._bound.socket, self._bound.connections, self._receiver,
            send_bound_bytes=BOUND_BYTES, max_frame_bytes=1 << 20, message_frames=64, message_bytes=1 << 20,
            total_send_bound_bytes=total_bytes, is_control=False,
        )  # fmt: skip

    def close(self) -> None:
        for peer in self._peers:
            peer.socket.close()
            peer.stream.close()
        self._bound.close()
        self._loop.close()
        self._context.term()
        self._bound.release()

    def peer(self) -> Peer:
        bare = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer = Peer(self, bare)
        self._peers.append(peer)
        bare.settimeout(ANSWER_S)
        bare.connect(str(self._path))
        bare.sendall(GREETING)
        peer.stream.read(len(GREETING))
        bare.sendall(READY)
        peer.stream.read(peer.stream.read(2)[1])
        bare.sendall(b"\x00\x04here")
        known = len(self._receiver.identities)
        while len(self._receiver.identities) == known:
            assert self._bound.socket.poll(ANSWER_S * 1_000)
            self.endpoint.notice()
            self.endpoint.drain()
        peer.identity = self._receiver.identities[-1]
        return peer

    def counted(self, name: str) -> int:
        return self.metrics.counters().get(name, 0)


class Peer:
    """A connection that reads nothing until told to. sent, came: replies that were handed over, and that came."""

    def __init__(self, site: Site, bare: socket.socket) -> None:
        self._site, self.socket, self.identity = site, bare, b""
        self.stream = bare.makefile("rb")
        self.sent = self.came = 0
        self._a_mark = 1

    def send(self, payload: bytes, count: int = 1) -> int:
        """How many were not dropped."""
        before = self._site.counted("replies_dropped")
        self._a_mark = 1 if len(payload) >= TRACKED_BYTES else MARK_BYTES // (len(payload) + REPLY_BYTES) + 1
        for _ in range(count):
            entry = (self.identity, b"%d" % self.sent, b"")
            self._site.endpoint.send_answers([entry], b"header", [[payload]], len(payload))
            self.sent += 1
        return count - (self._site.counted("replies_dropped") - before)

    def read(self, count: int = 1) -> None:
        """Read replies, which are in order where none was dropped, and wait until pyzmq's thread has told of them."""
        for _ in range(count):
            flags, frames = 1, []
            while flags & 1:
                flags = self.stream.read(1)[0]
                frames.append(self.stream.read(int.from_bytes(self.stream.read(8 if flags & 2 else 1), "big")))
            assert frames[1] == b"%d" % self.came
            self.came += 1
        end_s = time.monotonic() + ANSWER_S
        while len(garbage.gc.refs) > (self.sent - self.came) // self._a_mark + 2:
            assert time.monotonic() < end_s, "nobody tells what was sent"

    def send_backlog(self, payload: bytes) -> int:
        """Send more than the connection holds; how many replies that were."""
        count = BACKLOG_BYTES // len(payload)
        assert self.send(payload, count) == count
        self.wait_until_unread(UNREAD_BYTES)
        return count

    def wait_until_unread(self, nbytes: int) -> None:
        """Wait for libzmq's own thread, which writes when it can."""
        end_s = time.monotonic() + ANSWER_S
        while int(struct.unpack("i", fcntl.ioctl(self.socket, FIONREAD, bytes(4)))[0]) < nbytes:
            assert time.monotonic() < end_s, "nothing more came"


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(total_bytes: int = 1 << 30) -> Site:
        made.append(Site(tmp_path / f"s{len(made)}", total_bytes))
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
        peer.wait_until_unread(UNREAD_BYTES)
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
    peer.wait_until_unread(len(payload))
    site.endpoint.sweep(0.0)
    peer.send_backlog(payload)
    for second in range(1, int(UNREAD_S) * 3):
        assert peer.send(payload)
        peer.read()
        peer.wait_until_unread(UNREAD_BYTES)
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
        site.endpoint.send((peer.identity,), [b"header", b"%d" % number, *frames])
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
        peer.wait_until_unread(len(SMALL))
        site.endpoint.sweep(second)
    site.endpoint.sweep(UNREAD_S - 1.0)
    assert site.counted("connections_closed_unread") == 0
    site.endpoint.sweep(UNREAD_S + 1.0)
    assert site.counted("connections_closed_unread") == 1


def test_replies_to_all_peers_that_do_not_read_are_bounded_together(make_site: Callable[..., Site]) -> None:
    site = make_site(BOUND_BYTES // 2)
    peers = site.peer(), site.peer()
    for number, peer in enumerate(peers):
        assert peer.send(SMALL)
        peer.wait_until_unread(len(SMALL))
        site.endpoint.sweep(2.0 * number)
    many = BOUND_BYTES // (len(SMALL) + REPLY_BYTES)
    taken = [peer.send(SMALL, many) for peer in peers]
    assert many / 4 < sum(taken) <= many / 2 + HELD_BYTES / len(SMALL)
    assert site.counted("connections_closed_unread") == 0
    site.endpoint.sweep(4.0)  # with what lies in their buffers it is too much
    assert site.counted("connections_closed_unread") >= 1
