"""An HTTP answer that has one time in all, where http.client gives its timeout to each piece that it reads.

Used by what asks a server and may not wait for a slow one: telemetry, enrolment. Thread: its caller's.
"""

from __future__ import annotations

import io
import socket
from collections.abc import Callable
from http.client import HTTPResponse
from typing import Any


class TimedAnswer(HTTPResponse):
    """The answer of a connection, as its `response_class`. left_s: returns how long the next wait may be, or raises."""

    def __init__(self, sock: socket.socket, *arguments: Any, left_s: Callable[[], float], **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp.close()
        self.fp = io.BufferedReader(_AnswerReader(sock, left_s))


class _AnswerReader(io.RawIOBase):
    def __init__(self, sock: socket.socket, left_s: Callable[[], float]) -> None:
        self._sock, self._left_s = sock, left_s
        self._raw = sock.makefile("rb", buffering=0)  # keeps it open, though the answer ends the connection

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._raw.close()
        super().close()

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._left_s())
        return self._raw.readinto(buffer)
