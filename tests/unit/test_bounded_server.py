"""A small server for strangers: how many, for how long, how much, and who leaves first."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPConnection

import pytest

from edge_runtime.bounded_server import BoundedCalls, BoundedServer, ServerBounds

WAIT_S = 60.0


class Calls(BoundedCalls):
    def do_GET(self) -> None:  # noqa: N802 (the name is http.server's)
        self.begin_answer()
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def do_POST(self) -> None:  # noqa: N802 (the name is http.server's)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()


@contextmanager
def serving(bounds: ServerBounds, monotonic_s: Callable[[], float] | None = None) -> Iterator[BoundedServer]:
    clock = {} if monotonic_s is None else {"monotonic_s": monotonic_s}
    server = BoundedServer(("127.0.0.1", 0), Calls, bounds, **clock)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()
        server.server_close()


def connected(server: BoundedServer, says: bytes = b"") -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", int(server.server_address[1])), WAIT_S)
    peer.sendall(says)
    return peer


def ask(server: BoundedServer) -> int:
    connection = HTTPConnection("127.0.0.1", int(server.server_address[1]), timeout=WAIT_S)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status
    finally:
        connection.close()


def is_ended(peer: socket.socket) -> bool:
    """Whether the server closes a connection without an answer; waits for it."""
    try:
        return peer.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "says", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nx: y", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n"]
)
def test_a_server_answers_others_though_slow_peers_have_taken_each_place(says: bytes) -> None:
    with serving(ServerBounds(connections=3, spared_s=0.0)) as server, ExitStack() as stack:
        slow = [stack.enter_context(connected(server, says)) for _ in range(12)]
        assert [ask(server) for _ in range(3)] == [200, 200, 200]
        assert is_ended(slow[0])


@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_server_ends_a_connection_whose_next_request_does_not_come_in_time(says: bytes) -> None:
    seconds = partial(next, itertools.count())  # each look at the clock is a second later
    with serving(ServerBounds(request_s=4.0, answer_s=4.0), seconds) as server, connected(server, says) as peer:
        while not is_ended(peer):
            pass


@pytest.mark.parametrize(
    "says",
    [
        b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 5000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + (b"x: " + b"y" * 60 + b"\r\n") * 90 + b"\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 999999\r\n\r\n" + b"x" * 5000,
    ],
    ids=["line", "lines", "body"],
)
def test_a_server_reads_no_more_of_a_request_than_its_bound(says: bytes) -> None:
    with serving(ServerBounds(request_bytes=4096)) as server:
        with connected(server) as peer:
            peer.sendall(says)
            if b"Content-Length" in says:
                peer.shutdown(socket.SHUT_WR)
            assert is_ended(peer)
        assert ask(server) == 200


def test_a_server_that_closes_ends_each_connection_and_thread() -> None:
    with ExitStack() as stack:
        with serving(ServerBounds()) as server:
            peers = [stack.enter_context(connected(server)) for _ in range(5)]
            assert ask(server) == 200
        assert all(is_ended(peer) for peer in peers)
    assert not [thread for thread in threading.enumerate() if thread.name == "edge-call"]


def test_a_server_keeps_a_connection_between_its_requests() -> None:
    with serving(ServerBounds(connections=1)) as server:
        connection = HTTPConnection("127.0.0.1", int(server.server_address[1]), timeout=WAIT_S)
        for _ in range(3):
            connection.request("POST", "/", b"abc")
            assert connection.getresponse().read() == b"ok"
        connection.close()
        assert ask(server) == 200
