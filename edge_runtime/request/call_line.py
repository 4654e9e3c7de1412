"""Calls that each become several requests to one model: those that wait for their turn as a whole.

Were all their requests queued at once, senders would take turns by request: under overload each call would get a part
of what it needs, and none all of it. So as many calls are under way as there are cores, and the others wait here by the
rules of every queue: by turns of their senders, within their deadlines, within bounds. A line is a scheduled model that
never runs, as a pipeline's. Thread: its door's; a call that expires is refused on the timer's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

from msgspec import Struct

from edge_runtime.clock import Clock
from edge_runtime.config.settings import DEFAULT_PRIORITY
from edge_runtime.errors import DeadlineUnmeetable, EdgeRuntimeError
from edge_runtime.messages import RequestHeader
from edge_runtime.models.pending_loads import WaitTerms
from edge_runtime.request import policy
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.request import Request, deadline_exceeded
from edge_runtime.request.scheduled_model import Layout, ScheduledModel
from edge_runtime.telemetry.metrics import ModelMetrics

MAX_WAITING = 1024
MAX_WAITING_BYTES = 64 << 20
"""Bounds of one line: as of a pending load."""

SMOOTHING = 0.2
"""Weight of one more call in the mean work of calls."""


class WaitingCall(Struct, eq=False):
    """One call. sender: as of a request. work_s: the run time of its requests, one after another, as forecast.

    asks: the model that they ask. begin: called once at its turn; refuse: in its place, on any thread.
    """

    header: RequestHeader
    sender: Hashable
    nbytes: int
    arrived_s: float
    asks: ScheduledModel
    work_s: float
    begin: Callable[[], None]
    refuse: Callable[[EdgeRuntimeError], None]


class LineReply:
    """The reply of the entry that stands for a call in its line."""

    __slots__ = ("call",)

    user_id = ""
    writes_text = False

    def __init__(self, call: WaitingCall) -> None:
        self.call = call

    def answer(self, request: Request) -> None:
        """Nothing: it never runs."""

    def refuse(self, error: EdgeRuntimeError) -> None:
        """Refuse the call."""
        self.call.refuse(error)


class CallLine:
    """The line before one model. A caller that joins it calls `end` once a call that began has ended."""

    def __init__(self, model: str, dispatcher: Dispatcher, clock: Clock) -> None:
        self._dispatcher = dispatcher
        self._clock = clock
        self._line = ScheduledModel(
            model, Layout(None, concurrency=0), max_queue_rows=MAX_WAITING, max_queue_bytes=MAX_WAITING_BYTES
        )
        self._under_way: dict[WaitingCall, float] = {}
        self._mean_s = 0.0

    def join(self, call: WaitingCall) -> None:
        """Begin a call, now or at its turn. Raises DeadlineUnmeetable, QueueFull."""
        timeout_s = math.inf if call.header.timeout_ms is None else call.header.timeout_ms / 1e3
        terms = WaitTerms(DEFAULT_PRIORITY, timeout_s, ModelMetrics())
        waiting = Request(call.header, (), call.nbytes, LineReply(call), call.sender, call.arrived_s, terms.metrics)
        waiting.take(terms, ())
        self._mean_s += SMOOTHING * (call.work_s - self._mean_s) if self._mean_s else call.work_s
        if timeout_s != math.inf:
            before, _, (wait_s,) = self._dispatcher.chain_load(self._line, [call.asks], waiting)
            self._check(call, timeout_s, max(wait_s, self._turn_s()) + before * self._mean_s)
        if self._may_begin(waiting) and not self._line.queue.rows:
            self._dispatcher.begin_chain(self._line)
            self._begin(call)
        else:
            self._dispatcher.queue_chain(self._line, waiting)

    def end(self, call: WaitingCall) -> None:
        """Count a call that began as ended, and begin those that wait."""
        del self._under_way[call]
        self._dispatcher.end_chain(self._line, 0.0)
        while True:
            first, expired = self._dispatcher.next_chain(self._line, self._may_begin)
            now_s = self._clock.monotonic_s()
            for each in expired:
                each.refuse(deadline_exceeded(each.arrived_s, each.timeout_s, now_s))
            if first is None:
                return
            assert isinstance(first.reply, LineReply)
            following = first.reply.call
            try:
                if first.timeout_s != math.inf:
                    self._check(following, first.timeout_s, now_s - first.arrived_s)
            except DeadlineUnmeetable as error:
                self._dispatcher.end_chain(self._line, 0.0)
                following.refuse(error)
                continue
            self._begin(following)

    def _may_begin(self, _first: Request) -> bool:
        return len(self._under_way) < self._dispatcher.cores

    def _begin(self, call: WaitingCall) -> None:
        share = self._dispatcher.cores  # all that may be under way take as long as one after another
        self._under_way[call] = self._clock.monotonic_s() + call.work_s * share
        call.begin()

    def _turn_s(self) -> float:
        """How long until one more may begin, as forecast: of those under way the first ends."""
        if len(self._under_way) < self._dispatcher.cores:
            return 0.0
        return max(min(self._under_way.values()) - self._clock.monotonic_s(), 0.0)

    @staticmethod
    def _check(call: WaitingCall, timeout_s: float, wait_s: float) -> None:
        """Raise DeadlineUnmeetable for a call that would not end in time."""
        if not policy.is_meetable(wait_s, call.work_s, timeout_s, call.nbytes):
            forecast_s = wait_s + call.work_s
            raise DeadlineUnmeetable(
                f"forecast {forecast_s * 1e3:.1f} ms, timeout {timeout_s * 1e3:.1f} ms",
                retry_after_ms=max(forecast_s - timeout_s * policy.ADMISSION_MARGIN, 0.0) * 1e3,
            )
