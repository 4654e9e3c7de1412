"""A stop of the HTTP door, as its peers see it: a request that was sent is answered, and no connection is reset."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from edge_runtime.doors.access.addresses import DoorListener
from edge_runtime.doors.binding import bind_unix
from edge_runtime.doors.http.connection import HttpRequest
from edge_runtime.doors.http.transport import HttpTransport
from edge_runtime.doors.io_loop import IoLoop
from edge_runtime.telemetry.metrics import Metrics
from tests.fakes.loop_thread import LoopThread

ANSWER_S = 60.0
ASKED = b"POST /v2 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n"


class Echo:
    """Answers every request with its body."""

    transport: HttpTransport

    def understand(self, head: Any) -> None:
        head.body_shift = 0

    def begin(self, request: HttpRequest) -> None:
        """Take any body."""

    def requests(self, requests: Sequence[HttpRequest]) -> None:
        for each in requests:
            self.transport.answer(each, (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n" + bytes(each.body),))

    def gone(self, connection: Any) -> None:
        """Nothing waits."""

    def beat(self) -> None:
        """Nothing is due."""


class Door:
    """A transport whose thread a test holds up, so that what is sent meanwhile lies unread when it stops."""

    def __init__(self, path: Path, open_sockets: ExitStack, loop: IoLoop | None) -> None:
        receiver = self.receiver = Echo()
        self._path, self._open_sockets = path, open_sockets
        self.transport = receiver.transport = HttpTransport(
            [DoorListener(bind_unix(path, 0o600), None)], receiver, Metrics(),  # type: ignore[list-item, arg-type]
            max_body_bytes=1 << 20, body_timeout_s=60.0, max_connections=8, total_bytes=1 << 30, loop=loop,
        )  # fmt: skip
        self.transport.serve()

    def connect(self) -> socket.socket:
        client = self._open_sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        client.settimeout(ANSWER_S)
        client.connect(str(self._path))
        return client

    def stop_after(self, meanwhile: Callable[[], None]) -> None:
        """Stop while its thread is held up: it goes on when `meanwhile` is done and the stop has begun."""
        is_held, is_let_go = threading.Event(), threading.Event()

        def hold() -> None:
            is_held.set()
            assert is_let_go.wait(ANSWER_S)
            while not self.transport.is_stopping:
                pass

        self.transport.call(hold)
        assert is_held.wait(ANSWER_S)
        meanwhile()
        is_let_go.set()
        self.transport.stop()


@pytest.fixture
def loop_thread() -> Iterator[LoopThread]:
    with LoopThread() as made:
        yield made


@pytest.fixture(params=["a thread of its own", "the loop of others"])
def door(request: pytest.FixtureRequest, tmp_path: Path, loop_thread: LoopThread) -> Iterator[Door]:
    with ExitStack() as open_sockets:
        made = Door(tmp_path / "s", open_sockets, loop_thread.loop if "loop" in request.param else None)
        yield made
        made.transport.stop()


def all_of(client: socket.socket) -> bytes:
    """The bytes that come until the end of the connection, which is not a reset."""
    return b"".join(iter(lambda: client.recv(4096), b""))


def test_requests_that_were_sent_before_a_stop_are_answered_and_say_that_the_connection_ends(door: Door) -> None:
    kept = door.connect()
    kept.sendall(ASKED + b"a0")
    assert kept.recv(4096).endswith(b"a0")
    begun = door.connect()
    begun.sendall(ASKED + b"b")
    found: list[socket.socket] = []

    def ask() -> None:
        kept.sendall(ASKED + b"a1")
        found.append(door.connect())  # nobody has accepted it yet
        found[0].sendall(ASKED + b"c1")
        begun.sendall(b"1")

    door.stop_after(ask)
    for client, body in ((kept, b"a1"), (begun, b"b1"), (found[0], b"c1")):
        answer = all_of(client)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\nConnection: close\r\n")
        assert answer.endswith(body)


def test_a_peer_that_asks_nothing_more_hears_the_end_and_no_new_one_is_let_in(door: Door) -> None:
    kept = door.connect()
    kept.sendall(ASKED + b"a0")
    assert b"Connection: close" not in kept.recv(4096)
    door.stop_after(lambda: None)
    assert all_of(kept) == b""
    with pytest.raises(ConnectionRefusedError):
        door.connect()


def test_a_door_whose_loop_has_ended_answers_what_was_sent_and_ends(tmp_path: Path, loop_thread: LoopThread) -> None:
    with ExitStack() as open_sockets:
        door = Door(tmp_path / "s", open_sockets, loop_thread.loop)
        kept = door.connect()
        kept.sendall(ASKED + b"a0")
        assert kept.recv(4096).endswith(b"a0")
        loop_thread.end()
        kept.sendall(ASKED + b"a1")
        door.transport.stop()
        answer = all_of(kept)
    assert b"Connection: close" in answer
    assert answer.endswith(b"a1")


def test_an_answer_that_another_thread_posts_goes_out_on_the_loop(tmp_path: Path, loop_thread: LoopThread) -> None:
    with ExitStack() as open_sockets:
        door = Door(tmp_path / "s", open_sockets, loop_thread.loop)
        try:
            taken: SimpleQueue[HttpRequest] = SimpleQueue()
            door.receiver.requests = lambda requests: [taken.put(each) for each in requests]  # type: ignore[method-assign]
            client = door.connect()
            for body in (b"a0", b"a1"):
                client.sendall(ASKED + body)
                request = taken.get(timeout=ANSWER_S)
                door.transport.post(request, (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n" + bytes(request.body),))
                assert client.recv(4096).endswith(body)
        finally:
            door.transport.stop()
