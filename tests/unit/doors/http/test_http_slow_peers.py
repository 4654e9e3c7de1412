"""Which connections of the HTTP door are closed because their peers do not read."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.doors.access.addresses import DoorListener
from edge_runtime.doors.binding import bind_unix
from edge_runtime.doors.http.connection import HttpRequest
from edge_runtime.doors.http.transport import UNREAD_S, HttpTransport
from edge_runtime.telemetry.metrics import Metrics
from tests.fakes.clock import FakeClock

ANSWER_S = 60.0
STEP_S = 10.0
READ_BYTES = 40 << 10
"""Far less than the kernel asks for before it takes more of a response, and more than the piece that it counts by."""
BODY = bytes(4 << 20)


class OneResponse:
    """Answers every request with much."""

    transport: HttpTransport

    def understand(self, head: Any) -> None:
        head.body_shift = 0

    def requests(self, requests: Sequence[HttpRequest]) -> None:
        for each in requests:
            self.transport.answer(each, (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY), BODY))

    def gone(self, connection: Any) -> None:
        """Nothing waits."""

    def beat(self) -> None:
        """Nothing is due."""


class Site:
    """A transport by a clock of the test, and a client of it that has asked."""

    def __init__(self, path: Path) -> None:
        self.metrics, self.clock = Metrics(), FakeClock()
        receiver = OneResponse()
        self._transport = receiver.transport = HttpTransport(
            [DoorListener(bind_unix(path, 0o600), None)], receiver, self.metrics,  # type: ignore[list-item, arg-type]
            max_body_bytes=1 << 20, body_timeout_s=60.0, max_connections=4, total_bytes=1 << 30,
            clock=self.clock,
        )  # fmt: skip
        self._transport.serve()
        self.client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.client.settimeout(ANSWER_S)
        self.client.connect(str(path))
        self.client.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert self.client.recv(1)

    def close(self) -> None:
        self.client.close()
        self._transport.stop()

    def pass_time(self) -> None:
        """Let time pass, and the transport look at its connections."""
        self.clock.advance(STEP_S)
        for _ in range(3):
            has_come_round = threading.Event()
            self._transport.call(has_come_round.set)
            assert has_come_round.wait(ANSWER_S)

    @property
    def closed(self) -> int:
        return self.metrics.counters().get("http_connections_closed_unread", 0)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path / "s")
    yield made
    made.close()


def test_a_peer_that_reads_slowly_but_always_gets_the_whole_response(site: Site) -> None:
    left = len(BODY)
    while left > 0:
        came = len(site.client.recv(READ_BYTES))
        assert came, f"closed with {left} bytes to come"
        left -= came
        site.pass_time()
    assert site.closed == 0


def test_a_peer_that_reads_nothing_is_closed(site: Site) -> None:
    for _ in range(int(UNREAD_S / STEP_S) + 2):
        site.pass_time()
    assert site.closed == 1
