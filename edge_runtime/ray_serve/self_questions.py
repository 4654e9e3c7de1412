"""The questions by which `SelfCheck` sees that models answer, asked in this process: a replica has no endpoint.

Thread: that of `is_alive`; the replies of hosts come from workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from edge_runtime.daemon.core import Core
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.request.request import CHECK, Request
from edge_runtime.wire.codec import pack_error, pack_result, unpack_request

SENDER = "self-check"


class SelfQuestions:
    """A client of the models of one core, as `SelfCheck` wants it."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._replies: deque[list[bytes]] = deque()

    def send(self, frames: Sequence[Any]) -> bool:
        """Submit one question."""
        core, (head, question_id, *tensors) = self._core, frames
        reply = _Reply(self._replies, question_id)
        nbytes = sum(memoryview(each).nbytes for each in tensors)
        header = unpack_request(head)
        core.infer.submit(
            Request(header, tensors, nbytes, reply, SENDER, core.clock.monotonic_s(), core.metrics, CHECK)
        )
        return True

    def receive(self) -> list[bytes] | None:
        """The next reply, None when none is there."""
        return self._replies.popleft() if self._replies else None


class _Reply:
    """Where the answer to a question goes; its outputs are not looked at."""

    user_id = ""
    writes_text = False

    def __init__(self, replies: deque[list[bytes]], question_id: bytes) -> None:
        self._replies = replies
        self._question_id = question_id

    def answer(self, request: Request) -> None:  # noqa: ARG002 (any answer will do)
        """A sign of life."""
        self._replies.append([pack_result(None), self._question_id])

    def refuse(self, error: EdgeRuntimeError) -> None:
        """A sign of life as well, but for a full queue."""
        self._replies.append([pack_error(error), self._question_id])
