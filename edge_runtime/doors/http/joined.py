"""One call that became several requests, a few of them under way at a time, answered as one.

A list of texts may be longer than a run of its model, or than its queue. Owns: that such a call ends once, when its
last request is answered or its first is refused; those that wait then are taken back.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from edge_runtime.doors.http.answer import HttpEndpoint
from edge_runtime.doors.http.connection import HttpRequest
from edge_runtime.doors.http.protocols import CallRequests, JoinedEncoding
from edge_runtime.errors import EdgeRuntimeError, QueueFull
from edge_runtime.messages import RequestHeader
from edge_runtime.request.infer_frontend import InferFrontend
from edge_runtime.request.replies import OpReply, TransportReply
from edge_runtime.request.request import Request, failure_of

MOST_UNDER_WAY = 8
"""Requests of one call at a time: enough to keep every core busy, and few in the queue before other callers'."""

Submit = Callable[[OpReply, RequestHeader, Sequence[Any]], Request | None]
"""Submits one request by the door's way. Raises EdgeRuntimeError: refused, and not answered yet."""


class JoinedReply(TransportReply):
    """The reply to a call that became several requests. admitted: those that were submitted so far.

    Thread: the door's, but for `take`, `refuse_one` and `refuse`.
    """

    __slots__ = (
        "_answered", "_asked", "_has_begun", "_has_ended", "_left", "_lock", "_on_door", "_on_end", "_submit",
        "_under_way", "_waiting", "admitted",
    )  # fmt: skip

    def __init__(
        self,
        frontend: InferFrontend,
        endpoint: HttpEndpoint,
        envelope: tuple[HttpRequest],
        asked: CallRequests,
        *,
        submit: Submit,
        on_door: Callable[[Callable[[], None]], None],
        on_end: Callable[[], None],
    ) -> None:
        """on_door: runs a function on the door's thread soon. on_end: called there once it has ended, if it began."""
        super().__init__(frontend, endpoint, envelope, asked.encoding, None)
        self._asked = asked
        self._submit = submit
        self._on_door = on_door
        self._on_end = on_end
        self._has_begun = False
        self._lock = threading.Lock()
        self._answered: list[Request | None] = [None] * len(asked.requests)
        self._left = len(asked.requests)
        self._waiting = deque(range(len(asked.requests)))
        self._under_way = 0
        self._has_ended = False
        self.admitted: list[Request] = []

    def begin(self) -> None:
        """Submit the first requests. Called once, unless it is refused."""
        self._has_begun = True
        self.go_on()

    def go_on(self) -> None:
        """Submit requests until enough are under way; each that ends brings the next."""
        for _ in range(MOST_UNDER_WAY):  # inline ones have ended by then: the others are the next round's
            if not self._waiting or self._under_way >= MOST_UNDER_WAY or not self._submit_next():
                return
        if self._waiting:
            self._on_door(self.go_on)

    def take(self, index: int, request: Request) -> None:
        """Take the answer of one, and answer with the last. Raises the errors of writing: the call is refused then."""
        if self._frontend.listeners:
            self._frontend.tell_of(request)
        with self._lock:
            self._answered[index] = request
            self._under_way -= 1
            self._left -= 1
            left = self._left
        if self._has_ended:
            return
        if left:
            self._on_door(self.go_on)
            return
        encoding: JoinedEncoding = self._asked.encoding  # type: ignore[assignment]
        frames = encoding.join([each for each in self._answered if each is not None])
        if self._ends():
            self._endpoint.post(self._envelope, frames)

    def refuse_one(self, index: int, error: EdgeRuntimeError) -> None:
        """Refuse the call; but where others of it are under way, one that found the queue full comes after them."""
        with self._lock:
            self._under_way -= self._answered[index] is None
            comes_later = isinstance(error, QueueFull) and self._under_way > 0 and not self._has_ended
            if comes_later:
                self._waiting.appendleft(index)
        if not comes_later:
            self.refuse(error)

    def refuse(self, error: EdgeRuntimeError) -> None:
        """Send the error, once, and take back the waiting requests."""
        if self._ends():
            super().refuse(error)

    def _ends(self) -> bool:
        """Whether it has not ended yet; it has from now on."""
        with self._lock:
            ends, self._has_ended = not self._has_ended, True
        if ends:
            self._on_door(self._leave)
        return ends

    def _submit_next(self) -> bool:
        """Submit one; False: none goes in now."""
        if self._has_ended:
            return False
        if not self._envelope[0].connection.is_open:
            self._ends()
            return False
        with self._lock:
            index = self._waiting.popleft()
            self._under_way += 1
        header, tensors = self._asked.requests[index]
        try:
            admitted = self._submit(PartReply(self, index), header, tensors)
        except Exception as error:  # noqa: BLE001 (its client's answer; failure_of logs it)
            self.refuse_one(index, failure_of(error, "a part of a call could not become a request"))
            return False
        if admitted is not None:
            self.admitted.append(admitted)
        waiting = self._waiting
        return not waiting or waiting[0] != index

    def _leave(self) -> None:
        """Take back the waiting requests, and let the next call begin."""
        for each in self.admitted:
            self._frontend.cancel(each)
        self.admitted.clear()
        if self._has_begun:
            self._on_end()


class PartReply:
    """The reply to one of them. Thread: any."""

    __slots__ = ("_index", "_whole")

    user_id = ""
    writes_text = True

    def __init__(self, whole: JoinedReply, index: int) -> None:
        self._whole = whole
        self._index = index

    def answer(self, request: Request) -> None:
        """Keep the answer until all are there."""
        self._whole.take(self._index, request)

    def refuse(self, error: EdgeRuntimeError) -> None:
        """Refuse the whole call."""
        self._whole.refuse_one(self._index, error)

    def result(self, result: Any) -> None:
        """Nothing: no part is an operation."""
