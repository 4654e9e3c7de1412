"""gRPC's connections by a clock of the test: which are closed, which calls end, and what a stop leaves."""

from __future__ import annotations

import gzip
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.doors.access.addresses import DoorListener
from edge_runtime.doors.binding import bind_unix
from edge_runtime.doors.grpc import transport as rules
from edge_runtime.doors.grpc.http2 import GrpcCall
from edge_runtime.doors.grpc.http2_head import ENHANCE_YOUR_CALM
from edge_runtime.doors.grpc.transport import GrpcMethod, GrpcTransport
from edge_runtime.doors.io_loop import IoLoop
from edge_runtime.telemetry.metrics import Metrics
from tests.fakes import http2_peer as peer
from tests.fakes.clock import FakeClock
from tests.fakes.http2_peer import BEGIN, DATA, END_HEADERS, END_STREAM, HEADERS, Frame, block, call, frame, message

ANSWER_S = 10.0
MOST_BYTES, TOTAL_BYTES, BODY_S, MOST_CONNECTIONS = 1 << 20, 3 << 20, 30.0, 6
LARGE = bytes(range(256)) * 2048


class Methods:
    """Answers with what it gets, with much, or not at all."""

    def __init__(self) -> None:
        self.gone_calls = 0
        self.held: list[GrpcCall] = []
        self.methods = {
            "/echo": GrpcMethod(lambda data, call: call.answer(bytes(data))),
            "/much": GrpcMethod(lambda data, call: call.answer(LARGE)),
            "/never": GrpcMethod(self._never),
            "/stream": GrpcMethod(lambda data, call: None, is_stream=True),
        }

    def _never(self, data: Any, call: GrpcCall) -> None:
        call.receiver = self
        self.held.append(call)

    def gone(self) -> None:
        self.gone_calls += 1

    def ended(self) -> None:
        """Nothing waits."""

    def may_write(self) -> None:
        """Nothing waits."""

    def end_round(self) -> None:
        """Nothing was gathered."""

    def beat(self) -> None:
        """Nothing is due."""


class Site:
    """A transport by a clock of the test. loop: "own", or "shared" with others."""

    def __init__(self, path: Path, loop: str) -> None:
        self.metrics, self.clock, self.methods, self.path = Metrics(), FakeClock(), Methods(), path
        self.shared = IoLoop(self.metrics, self.clock, unfinished_bytes=TOTAL_BYTES) if loop == "shared" else None
        self._swept_s = 0.0
        if self.shared is not None:
            self._thread = threading.Thread(target=self.shared.run, args=(self._beat, 0.25))
            self._thread.start()
        self.transport = GrpcTransport(
            [DoorListener(bind_unix(path, 0o600), None)],
            self.methods,
            self.metrics,
            max_message_bytes=MOST_BYTES,
            body_timeout_s=BODY_S,
            max_connections=MOST_CONNECTIONS,
            total_bytes=TOTAL_BYTES,
            clock=self.clock,
            loop=self.shared,
        )
        self.transport.serve()

    def _beat(self) -> None:
        """As the daemon's."""
        if self.clock.monotonic_s() >= self._swept_s + rules.BEAT_S and self.shared is not None:
            self._swept_s = self.clock.monotonic_s()
            self.shared.sweep()

    def stop(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """End the shared loop, then the transport, as the daemon does; time passes."""
        if self.shared is not None:
            self.shared.stop()
            self._thread.join()
        stopping = threading.Thread(target=self.transport.stop)
        stopping.start()
        try:
            meanwhile()
        finally:
            while stopping.is_alive():
                self.clock.advance(0.1)
                stopping.join(0.01)
            if self.shared is not None:
                self.shared.close()

    def pass_time(self, seconds: float = 0.0) -> None:
        """Let time pass, and the transport look at its connections."""
        self.clock.advance(seconds)
        for _ in range(3):
            has_come_round = threading.Event()
            self.transport.call(has_come_round.set)
            assert has_come_round.wait(ANSWER_S)

    def on_thread(self, action: Callable[[], None]) -> None:
        """Run something on the transport's thread."""
        self.transport.call(action)
        self.pass_time()

    def count(self, name: str) -> int:
        return self.metrics.counters().get(name, 0)


class Client:
    """One connection to it."""

    def __init__(self, site: Site, *sent: bytes, begin: bytes = BEGIN) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(ANSWER_S)
        self.socket.connect(str(site.path))
        self._replies = peer.Replies()
        self._frames: list[Frame] = []
        self.send(begin, *sent)

    def send(self, *sent: bytes) -> None:
        self.socket.sendall(b"".join(sent))

    def next(self, *kinds: int) -> Frame:
        """The next frame of some kinds. Raises ConnectionError at the end."""
        while True:
            while self._frames:
                found = self._frames.pop(0)
                if found.kind in kinds:
                    return found
            data = self.socket.recv(1 << 16)
            if not data:
                raise ConnectionError("closed")
            self._frames = self._replies.take(data)

    def meet(self) -> None:
        """Wait until what was sent with the settings has come."""
        while not self.next(peer.SETTINGS).flags & peer.ACK:
            pass

    def reset_or_trailers(self) -> Frame:
        while True:
            found = self.next(HEADERS, peer.RESET)
            if found.kind == peer.RESET or found.flags & END_STREAM:
                return found

    def is_ended(self) -> bool:
        """Read up to the end."""
        try:
            while True:
                self.next(99)
        except ConnectionError:
            return True


@pytest.fixture(params=["own", "shared"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path / "grpc.sock", request.param)
    yield made
    made.stop()


@pytest.fixture
def connected(site: Site) -> Iterator[Callable[..., Client]]:
    made: list[Client] = []

    def connect(*sent: bytes, begin: bytes = BEGIN) -> Client:
        made.append(Client(site, *sent, begin=begin))
        return made[-1]

    yield connect
    for each in made:
        each.socket.close()


Connect = Callable[..., Client]


def ask(number: int, path: str, data: bytes = b"", **changes: str) -> bytes:
    return call(number, data, block(path, **changes))


def test_calls_are_answered_small_and_large(connected: Connect) -> None:
    client = connected(peer.window(1 << 30), peer.settings({4: 1 << 20}))
    for number, data in enumerate((b"", b"x", bytes(1000), LARGE)):
        client.send(ask(2 * number + 1, "/echo", data))
        got = b""
        while len(got) < 5 + len(data):
            got += client.next(DATA).payload
        assert got == message(data)
        assert dict(client.reset_or_trailers().payload) == {"grpc-status": "0"}


@pytest.mark.parametrize("size", [100, 10_000, 500_000])
def test_a_compressed_message_is_inflated_in_the_order_of_its_stream(site: Site, connected: Connect, size: int) -> None:
    got: list[bytes] = []
    has_ended = threading.Event()

    class Stream:
        gone = may_write = lambda self: None

        def ended(self) -> None:
            has_ended.set()

    def take(data: Any, call: GrpcCall) -> None:
        call.receiver = Stream()
        got.append(bytes(data))

    site.methods.methods["/stream"] = GrpcMethod(take, is_stream=True)
    data = [b"first", bytes(size), b"third", bytes(size)]
    sent = message(data[0]) + message(gzip.compress(data[1]), 1) + message(data[2]) + message(gzip.compress(data[3]), 1)
    connected(frame(HEADERS, END_HEADERS, 1, block("/stream", grpc_encoding="gzip")) + frame(DATA, END_STREAM, 1, sent))
    assert has_ended.wait(ANSWER_S)
    assert got == data


@pytest.mark.parametrize(
    ("packed", "status", "text"),
    [
        (gzip.compress(bytes(64 << 20)), "8", "larger than max"),
        (b"garbage", "13", "zlib"),
        (gzip.compress(b"x") + b"tail", "13", "not all input"),
        (gzip.compress(bytes(100_000))[:-4], "13", "end missing"),
    ],
    ids=["bomb", "garbage", "tail", "cut"],
)
def test_a_message_that_cannot_be_inflated_is_answered_with_a_status(
    connected: Connect, packed: bytes, status: str, text: str
) -> None:
    headers = block("/echo", grpc_encoding="gzip")
    client = connected(frame(HEADERS, END_HEADERS, 1, headers) + frame(DATA, END_STREAM, 1, message(packed, 1)))
    told = dict(client.reset_or_trailers().payload)
    assert told["grpc-status"] == status
    assert text in told["grpc-message"]


def test_a_peer_that_reads_nothing_is_closed(site: Site, connected: Connect) -> None:
    client = connected(peer.window(1 << 30), peer.settings({4: 1 << 30}), ask(1, "/much"), ask(3, "/much"))
    client.next(HEADERS)
    site.pass_time(rules.UNREAD_S - 5)
    site.pass_time(rules.UNREAD_S)
    site.pass_time(rules.UNREAD_S)
    assert site.count("connections_closed_unread") == 1
    assert client.is_ended()


def test_a_peer_that_gives_no_window_is_closed_and_one_that_gives_some_is_not(site: Site, connected: Connect) -> None:
    stalled = connected(ask(1, "/much"), begin=peer.PREFACE + peer.settings({4: 0}))
    slow = connected(ask(1, "/much"), begin=peer.PREFACE + peer.settings({4: 0}))
    stalled.next(HEADERS)
    slow.next(HEADERS)
    for _ in range(8):
        site.pass_time(rules.UNREAD_S / 4)
        slow.send(peer.window(1, 1), frame(peer.PING, peer.ACK, 0, bytes(8)))
        slow.next(DATA)
    assert stalled.is_ended()
    assert site.count("connections_closed_unread") == 1


def test_answers_without_a_window_are_bounded_for_each_connection(site: Site, connected: Connect) -> None:
    many = [ask(number, "/much") for number in range(1, 2 * TOTAL_BYTES // len(LARGE) + 5, 2)]
    client = connected(*many, begin=peer.PREFACE + peer.settings({4: 0}))
    assert client.is_ended()
    assert site.count("connections_closed_unread") == 1


def test_messages_that_do_not_come_whole_are_bounded_together_oldest_first(site: Site, connected: Connect) -> None:
    part = struct.pack(">BI", 0, MOST_BYTES) + bytes(900_000)
    clients = []
    for _ in range(4):
        begun = frame(HEADERS, END_HEADERS, 1, block("/echo")) + frame(DATA, 0, 1, part)
        clients.append(connected(peer.window(1 << 30), peer.settings({4: 2 * MOST_BYTES}), begun))
        clients[-1].meet()
        site.pass_time(1.0)
    assert dict(clients[0].reset_or_trailers().payload)["grpc-status"] == "8"
    assert clients[0].next(peer.RESET).number == 1
    clients[0].send(ask(3, "/echo"))
    assert dict(clients[0].reset_or_trailers().payload) == {"grpc-status": "0"}
    for each in clients[1:]:
        each.send(frame(DATA, END_STREAM, 1, bytes(MOST_BYTES - 900_000)))
        assert dict(each.reset_or_trailers().payload) == {"grpc-status": "0"}


def test_calls_without_a_message_are_bounded_too(site: Site, connected: Connect) -> None:
    heads = b"".join(frame(HEADERS, END_HEADERS, number, block("/echo")) for number in range(1, 2000, 2))
    clients = []
    for _ in range(4):
        clients.append(connected(heads))
        clients[-1].meet()
        site.pass_time(1.0)
    assert site.count("connections_closed_unfinished") == 0
    part = struct.pack(">BI", 0, MOST_BYTES) + bytes(600_000)
    connected(frame(HEADERS, END_HEADERS, 1, block("/stream")) + frame(DATA, 0, 1, part))
    assert dict(clients[0].reset_or_trailers().payload)["grpc-status"] == "8"
    assert site.count("connections_closed_unfinished") > 0


def test_a_message_of_which_nothing_comes_any_more_ends_its_call(site: Site, connected: Connect) -> None:
    client = connected(frame(HEADERS, END_HEADERS, 1, block("/echo")) + frame(DATA, 0, 1, message(bytes(100))[:20]))
    client.meet()
    site.pass_time()
    for _ in range(3):
        site.pass_time(BODY_S - 1)
        client.send(frame(DATA, 0, 1, b"x"), frame(peer.PING, peer.ACK, 0, bytes(8)))
        site.pass_time()
    client.send(ask(3, "/echo"))
    site.pass_time()
    site.pass_time(BODY_S + 1)
    statuses = [dict(client.reset_or_trailers().payload)["grpc-status"] for _ in range(2)]
    assert statuses == ["0", "4"]


def test_a_deadline_ends_a_call_that_nobody_answers(site: Site, connected: Connect) -> None:
    client = connected(ask(1, "/never", grpc_timeout="5S"))
    client.meet()
    site.pass_time(4.0)
    assert site.methods.gone_calls == 0
    site.pass_time(2.0)
    assert dict(client.reset_or_trailers().payload) == {
        ":status": "200", "content-type": "application/grpc", "grpc-status": "4", "grpc-message": "Deadline Exceeded"
    }  # fmt: skip
    assert site.methods.gone_calls == 1


def test_a_connection_that_does_not_shake_hands_is_closed(site: Site, connected: Connect) -> None:
    client = connected(begin=peer.PREFACE[:10])
    client.next(peer.SETTINGS)
    site.pass_time(rules.HANDSHAKE_S + 1)
    assert client.is_ended()


def test_a_peer_that_is_silent_is_asked_whether_it_is_there(site: Site, connected: Connect) -> None:
    there, gone = connected(), connected()
    for each in (there, gone):
        each.meet()
    site.pass_time(rules.PING_S + 1)
    pings = [each.next(peer.PING) for each in (there, gone)]
    there.send(frame(peer.PING, peer.ACK, 0, pings[0].payload))
    site.pass_time()
    site.pass_time(rules.PING_ANSWER_S + 1)
    assert gone.is_ended()
    there.send(ask(1, "/echo"))
    assert dict(there.reset_or_trailers().payload) == {"grpc-status": "0"}


def test_a_connection_without_calls_is_dismissed(site: Site, connected: Connect) -> None:
    client = connected()
    client.meet()
    for _ in range(int(rules.IDLE_S / 20) - 1):
        site.pass_time(20.0)
        client.send(frame(peer.PING, peer.ACK, 0, bytes(8)))
        site.pass_time()
    site.pass_time(20.0)
    assert client.next(peer.GOAWAY).payload[8:] == b"max_idle"
    assert client.is_ended()


def test_the_connection_that_is_silent_for_longest_gives_way(site: Site, connected: Connect) -> None:
    clients = []
    for number in range(MOST_CONNECTIONS):
        clients.append(connected(ask(1, "/never" if not number else "/echo")))
        clients[-1].meet()
        site.pass_time(1.0)
    late = connected(ask(1, "/echo"))
    assert dict(late.reset_or_trailers().payload) == {"grpc-status": "0"}
    assert clients[1].is_ended()
    site.on_thread(partial(site.methods.held[0].answer, b""))
    assert dict(clients[0].reset_or_trailers().payload) == {"grpc-status": "0"}


def test_a_peer_that_breaks_the_protocol_gets_the_reason_and_its_calls_are_dropped(
    site: Site, connected: Connect
) -> None:
    client = connected(ask(1, "/never"))
    client.meet()
    site.pass_time()
    client.send(frame(peer.PUSH, 0, 1, bytes(8)), bytes(100_000))
    assert struct.unpack(">I", client.next(peer.GOAWAY).payload[4:8])[0] == 1
    client.send(bytes(1000))
    client.socket.shutdown(socket.SHUT_WR)
    assert client.is_ended()
    site.pass_time()
    assert site.methods.gone_calls == 1


def test_a_peer_that_floods_and_reads_nothing_meanwhile_gets_the_reason_behind_what_it_asked_for(
    connected: Connect,
) -> None:
    client = connected(peer.settings({4: 100}) * 40_000)  # their acknowledgements fill the socket
    assert struct.unpack(">I", client.next(peer.GOAWAY).payload[4:8])[0] == ENHANCE_YOUR_CALM
    client.socket.shutdown(socket.SHUT_WR)
    assert client.is_ended()


@pytest.mark.parametrize("loop", ["own", "shared"])
def test_a_stop_answers_what_was_asked_and_says_when_nothing_is_read_any_more(tmp_path: Path, loop: str) -> None:
    site = Site(tmp_path / "grpc.sock", loop)
    client = Client(site, ask(1, "/echo"), ask(3, "/never"))
    client.reset_or_trailers()
    site.pass_time()

    def meanwhile() -> None:
        assert client.next(peer.GOAWAY).payload[:4] == b"\x7f\xff\xff\xff"
        client.send(ask(5, "/echo"))  # it could not know yet
        assert client.reset_or_trailers().number == 5
        site.clock.advance(rules.LEAVE_S + 0.05)
        assert struct.unpack(">I", client.next(peer.GOAWAY).payload[:4])[0] == 5
        client.send(ask(7, "/echo"))
        site.transport.call(partial(site.methods.held[0].answer, b"late"))
        assert client.next(DATA).payload == message(b"late")

    try:
        site.stop(meanwhile)
        assert client.is_ended()
    finally:
        client.socket.close()
