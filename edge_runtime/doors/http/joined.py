"""One call that became several requests, a few of them under way at a time, answered as one.

A list of texts may be longer than a run of its model, or than its queue. Owns: that such a call ends once, when its
last request is answered or its first is refused; those that wait then are taken back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from edge_runtime.doors.http.answer import HttpEndpoint
from edge_runtime.doors.http.connection import HttpRequest
from edge_runtime.doors.http.protocols import CallRequests, JoinedEncoding
from edge_runtime.errors import EdgeRuntimeError
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

    Thread: the door's, but for `take` and `refuse`.
    """

    __slots__ = ("_answered", "_asked", "_has_ended", "_left", "_lock", "_next", "_on_door", "_submit", "admitted")

    def __init__(
        self,
        frontend: InferFrontend,
        endpoint: HttpEndpoint,
        envelope: tuple[HttpRequest],
        asked: CallRequests,
        *,
        submit: Submit,
        on_door: Callable[[Callable[[], None]], None],
    ) -> None:
        """on_door: runs a function on the door's thread soon."""
        super().__init__(frontend, endpoint, envelope, asked.encoding, None)
        self._asked = asked
        self._submit = submit
        self._on_door = on_door
        self._lock = threading.Lock()
        self._answered: list[Request | None] = [None] * len(asked.requests)
        self._left = len(asked.requests)
        self._next = 0
        self._has_ended = False
        self.admitted: list[Request] = []

    def begin(self) -> None:
        """Submit the first requests; each answer brings the next."""
        for _ in range(MOST_UNDER_WAY):
            self._go_on()

    def take(self, index: int, request: Request) -> None:
        """Take the answer of one, and answer with the last. Raises what writing raises: the call is refused then."""
        if self._frontend.listeners:
            self._frontend.tell_of(request)
        with self._lock:
            self._answered[index] = request
            self._left -= 1
            left = self._left
        if self._has_ended:
            return
        if left:
            self._on_door(self._go_on)
            return
        encoding: JoinedEncoding = self._asked.encoding  # type: ignore[assignment]
        frames = encoding.join([each for each in self._answered if each is not None])
        self._endpoint.post(self._envelope, frames)

    def refuse(self, error: EdgeRuntimeError) -> None:
        """Send the error, once, and take back what waits."""
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
        super().refuse(error)
        self._on_door(self._take_back)

    def _go_on(self) -> None:
        """Submit the next request, if there is one and its client is still there."""
        index = self._next
        if index == len(self._answered) or self._has_ended:
            return
        self._next += 1
        if not self._envelope[0].connection.is_open:
            self._has_ended = True
            return
        header, tensors = self._asked.requests[index]
        try:
            admitted = self._submit(PartReply(self, index), header, tensors)
        except Exception as error:  # noqa: BLE001 (its client's answer; failure_of logs it)
            self.refuse(failure_of(error, "a part of a call could not become a request"))
            return
        if admitted is not None:
            self.admitted.append(admitted)

    def _take_back(self) -> None:
        for each in self.admitted:
            self._frontend.cancel(each)


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
        self._whole.refuse(error)

    def result(self, result: Any) -> None:
        """Nothing: no part is an operation."""
