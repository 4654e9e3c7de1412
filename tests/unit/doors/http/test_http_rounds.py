"""Rounds of the HTTP door end, and no connection is always the last of them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from edge_runtime.doors.access.addresses import DoorListener
from edge_runtime.doors.binding import bind_unix
from edge_runtime.doors.http.connection import HttpRequest
from edge_runtime.doors.http.transport import HttpTransport
from edge_runtime.doors.io_loop import ROUND_S
from edge_runtime.telemetry.metrics import Metrics
from tests.fakes.clock import FakeClock

ANSWER_S = 60.0
COUNT = 12
REQUEST = b"POST /v2/%d HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nab"


class SlowReceiver:
    """Takes more than half of a round to understand a head."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.rounds: list[list[str]] = []
        self.transport: HttpTransport

    def understand(self, head: Any) -> None:
        head.body_shift = 0
        self.clock.advance(0.6 * ROUND_S)

    def begin(self, request: HttpRequest) -> None:
        """Take any body."""

    def requests(self, requests: Sequence[HttpRequest]) -> None:
        self.rounds.append([each.head.path for each in requests if each.head is not None])
        for each in requests:
            self.transport.answer(each, (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",))

    def gone(self, connection: Any) -> None:
        """Nothing waits."""

    def beat(self) -> None:
        """Nothing is due."""


def test_a_round_ends_after_its_time_and_the_next_begins_with_those_that_were_left(tmp_path: Path) -> None:
    clock = FakeClock()
    receiver = SlowReceiver(clock)
    transport = receiver.transport = HttpTransport(
        [DoorListener(bind_unix(tmp_path / "s", 0o600), None)], receiver, Metrics(),  # type: ignore[list-item, arg-type]
        max_body_bytes=1 << 20, body_timeout_s=60.0, max_connections=2 * COUNT, total_bytes=1 << 30, clock=clock,
    )  # fmt: skip
    transport.serve()
    try:
        with ExitStack() as open_sockets:
            clients = []
            for _ in range(COUNT):
                client = open_sockets.enter_context(socket.socket(socket.AF_UNIX))
                client.settimeout(ANSWER_S)
                client.connect(str(tmp_path / "s"))
                clients.append(client)
            have_all_sent, is_held = threading.Event(), threading.Event()
            transport.call(lambda: (is_held.set(), have_all_sent.wait(ANSWER_S)))  # type: ignore[arg-type, return-value]
            assert is_held.wait(ANSWER_S)
            for at, client in enumerate(clients):
                client.sendall(REQUEST % at)
            have_all_sent.set()
            for client in clients:
                assert client.recv(4096).startswith(b"HTTP/1.1 200")
    finally:
        transport.stop()
    assert max(map(len, receiver.rounds)) <= 2
    assert sum(map(len, receiver.rounds)) == COUNT
