"""Clients of a language model by OpenAI's protocol: many streams of server-sent events in one thread, with their times.

It counts chunks and reads nothing else of them: what it takes of a core is not the daemon's.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

READ_BYTES = 1 << 16
CHUNK, END, FAILED = b"data: ", b"data: [DONE]", b'data: {"error"'
LAST = b"\r\n0\r\n\r\n"
"""The end of a body in chunks."""


@dataclass(slots=True, eq=False)
class Answer:
    """One answer. times: when each chunk of it came. end_s: when it was whole, or refused; 0.0 until then."""

    sent_s: float
    status: int = 0
    times: list[float] = field(default_factory=list)
    end_s: float = 0.0
    has_failed: bool = False
    is_chunked: bool = False
    tail: bytes = b""

    @property
    def is_whole(self) -> bool:
        """Whether it came to its own end."""
        return self.status == 200 and bool(self.end_s) and not self.has_failed

    @property
    def first_s(self) -> float:
        """When its first chunk came. Only of one that has any."""
        return self.times[0]


class LanguageClients:
    """Streams of one model, asked over connections of their own. Thread: one."""

    def __init__(self, address: tuple[str, int], model: str) -> None:
        self._address = address
        self._model = model
        self._selector = selectors.DefaultSelector()
        self._sockets: dict[Answer, socket.socket] = {}
        self._kept: dict[Answer, socket.socket] = {}

    @property
    def live(self) -> int:
        """How many answers are under way."""
        return len(self._sockets)

    def ask(
        self, prompt: str, tokens: int, headers: Mapping[str, float] | None = None, after: Answer | None = None
    ) -> Answer:
        """Ask for an answer of so many tokens. after: an answer that has ended, whose connection is asked over."""
        fields = {
            "model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True,
        }  # fmt: skip
        body = json.dumps(fields).encode()
        host = f"host: {self._address[0]}:{self._address[1]}"
        lines = ["POST /v1/completions HTTP/1.1", host, "content-type: application/json"]
        lines += [f"content-length: {len(body)}", *(f"{name}: {value:g}" for name, value in (headers or {}).items())]
        kept = None if after is None else self._kept.pop(after, None)
        connection = kept or socket.create_connection(self._address)
        answer = Answer(time.monotonic())
        connection.setblocking(True)
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        connection.setblocking(False)
        self._sockets[answer] = connection
        self._selector.register(connection, selectors.EVENT_READ, answer)
        return answer

    def read(self, wait_s: float) -> list[Answer]:
        """Read what came, within so long; return the answers that ended."""
        ended = []
        for key, _ in self._selector.select(max(wait_s, 0.0)):
            answer: Answer = key.data
            if self._take(answer):
                answer.end_s = time.monotonic()
                self._kept[answer] = self._sockets.pop(answer)
                self._selector.unregister(self._kept[answer])
                ended.append(answer)
        return ended

    def read_until(self, is_done: Callable[[], bool], limit_s: float) -> list[Answer]:
        """Read until something is so, and return the answers that ended. Raises TimeoutError."""
        ended, until_s = [], time.monotonic() + limit_s
        while not is_done():
            if time.monotonic() > until_s:
                raise TimeoutError(f"{self.live} answers of {self._model} still go on after {limit_s:g} s")
            ended += self.read(0.05)
        return ended

    def leave(self, answer: Answer) -> None:
        """Close its connection."""
        connection = self._sockets.pop(answer)
        self._selector.unregister(connection)
        connection.close()

    def let_go(self) -> None:
        """Close the connections of all answers that have ended."""
        for connection in self._kept.values():
            connection.close()
        self._kept.clear()

    def close(self) -> None:
        """Leave all that go on."""
        for answer in list(self._sockets):
            self.leave(answer)
        self.let_go()
        self._selector.close()

    def _take(self, answer: Answer) -> bool:
        """Whether an answer has ended, with what came of it now."""
        try:
            data = self._sockets[answer].recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionError:
            data = b""
        if not data:  # the daemon closed it
            answer.has_failed = True
            return True
        kept = answer.tail[-len(END) :] if answer.is_chunked else answer.tail
        seen = kept + data
        if not answer.status and b"\r\n\r\n" in seen:
            answer.status = int(seen.split(b" ", 2)[1])
            answer.is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in seen.lower()
        if answer.status == 200:
            if seen.count(CHUNK) > kept.count(CHUNK):
                answer.times.append(time.monotonic())
            answer.has_failed |= FAILED in seen
        answer.tail = seen
        return seen.endswith(LAST) if answer.is_chunked else _is_whole(seen)


def _is_whole(reply: bytes) -> bool:
    head, parted, body = reply.partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(parted) and bool(lengths) and len(body) >= int(lengths[0].split(b":")[1])
