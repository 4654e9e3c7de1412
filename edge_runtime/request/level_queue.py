"""The requests that wait for one model whose settings have `[queue]`, as Triton's dynamic batcher keeps them.

Owns: their order, first come first served by level, how many may wait at a level, and the end of one that waited
too long. Stands in for RequestQueue, whose methods it has. Knows no lock, no clock and no model. Thread: under the
dispatcher's lock; `ReplyLine` from any.
"""

from __future__ import annotations

import logging
import math
import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Iterable, Iterator

from edge_runtime.config.settings import QueuePolicies, QueuePolicy
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.request.queue import Share
from edge_runtime.request.request import Arrival, Reply, Request, failure_of, queue_time_expired

log = logging.getLogger(__name__)

Instants = list[tuple[float, int, Request]]
"""Requests by an instant, the earliest first, with the number of each."""


class Level:
    """The requests of one level: those on time, and behind them those that waited too long. Each is one share."""

    __slots__ = ("delayed", "on_time", "policy", "rows")

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.on_time = Share(None, 0)
        self.delayed = Share(None, 0)
        self.rows = 0

    def __len__(self) -> int:
        return len(self.on_time) + len(self.delayed)


class LevelQueue:
    """Waiting requests of one model, by the rules of its `[queue]`.

    priority: the model's, for its place among other models; levels order its own requests only. line: where answers
    go out in the order of their requests; else None.
    """

    def __init__(self, rules: QueuePolicies, priority: int) -> None:
        self.rows = 0
        self.nbytes = 0
        self.line = ReplyLine() if rules.keep_order else None
        self._rules = rules
        self._priority = priority
        self._number = 0
        first = 1 if rules.levels else 0
        self._levels = {first: Level(rules.policy_of(first))}
        self._deadlines: Instants = []
        self._timeouts: Instants = []

    def __len__(self) -> int:
        return sum(len(level) for level in self._levels.values())

    def in_order(self, now_s: float, below: float = math.inf) -> Iterable[Request]:  # noqa: ARG002 (they do not age)
        """Requests in the order in which they run if nothing else comes; none where the model is not below a priority.

        Not to be changed meanwhile.
        """
        return self._in_order() if self._priority < below else ()

    def by_deadline(self) -> Iterable[Request]:
        """Those that have a deadline, the earliest first."""
        return (entry[2] for entry in self._deadlines)

    def first_priority(self, now_s: float) -> int:  # noqa: ARG002
        """The model's priority."""
        return self._priority

    def rows_at(self, priority: int) -> int:
        """Rows waiting, where the model is as urgent as this priority or more."""
        return self.rows if self._priority <= priority else 0

    def rows_before(self, request: Request | Arrival, now_s: float, batch_rows: int) -> int:  # noqa: ARG002
        """Rows that run before a request that would come now."""
        own = self._level_of(request)
        return sum(level.rows for number, level in self._levels.items() if number <= own)

    def is_full(self, request: Request | Arrival) -> bool:
        """Whether its level has as many requests as may wait there."""
        level = self._levels.get(self._level_of(request))
        return level is not None and 0 < level.policy.max_requests <= len(level)

    def push(self, request: Request) -> None:
        """Add a request: behind all others of its level, on time again even where it has been run in vain."""
        number = self._level_of(request)
        level = self._levels.get(number)
        if level is None:
            self._levels[number] = level = Level(self._rules.policy_of(number))
            self._levels = dict(sorted(self._levels.items()))
        self._number = request.number = self._number + 1
        request.due_s = request.arrived_s + request.plan.queue_timeout_s if not request.lost_runs else math.inf
        level.on_time.append(request)
        request.share = level.on_time
        for instants, instant_s in ((self._deadlines, request.deadline_s), (self._timeouts, request.due_s)):
            if instant_s != math.inf:
                insort(instants, (instant_s, request.number, request))
        level.rows += request.rows
        self.rows += request.rows
        self.nbytes += request.nbytes

    def pass_over(self, now_s: float) -> list[Request]:
        """Remove and return those that waited too long, with their error; those that are delayed wait on."""
        rejected: list[Request] = []
        while self._timeouts and self._timeouts[0][0] <= now_s:
            request = self._timeouts[0][2]
            level = self._levels[self._level_of(request)]
            if level.policy.on_timeout == "delay" and request.share is level.on_time:
                del self._timeouts[0]
                request.due_s = math.inf
                level.on_time.remove(request)
                level.delayed.append(request)
                request.share = level.delayed
                continue
            self.remove([request])
            request.error = queue_time_expired(request.arrived_s, request.plan.queue_timeout_s, now_s)
            rejected.append(request)
        return rejected

    @property
    def next_timeout_s(self) -> float:
        """When the next request will have waited too long; math.inf: none ever."""
        return self._timeouts[0][0] if self._timeouts else math.inf

    def remove(self, requests: Iterable[Request], runs_at_s: float | None = None) -> None:  # noqa: ARG002
        """Remove requests; those that wait no longer are passed over."""
        for request in requests:
            share = request.share
            if share is None:
                continue
            if share[0] is request:
                share.popleft()
            else:
                share.remove(request)
            request.share = None
            self._levels[self._level_of(request)].rows -= request.rows
            self.rows -= request.rows
            self.nbytes -= request.nbytes
            for instants, instant_s in ((self._deadlines, request.deadline_s), (self._timeouts, request.due_s)):
                if instant_s != math.inf:
                    del instants[bisect_left(instants, (instant_s, request.number))]

    def remove_sender(self, sender: Hashable) -> list[Request]:
        """Remove and return a sender's requests."""
        found = [request for request in self._in_order() if request.sender == sender]
        self.remove(found)
        return found

    def clear(self) -> list[Request]:
        """Remove and return everything."""
        everything = list(self._in_order())
        self.remove(everything)
        return everything

    def one_in_the_way(self, request: Request | Arrival) -> Request | None:  # noqa: ARG002
        """None: a full queue refuses the newest."""
        return None

    def _in_order(self) -> Iterator[Request]:
        for level in self._levels.values():
            yield from level.on_time
            yield from level.delayed

    def _level_of(self, request: Request | Arrival) -> int:
        level: int = request.plan.level
        return level


class ReplyLine:
    """Has the answers of one model go out in the order in which their requests were admitted.

    A refusal goes out at once, and its place is given up.
    """

    def __init__(self) -> None:
        self._line: deque[_Turn] = deque()
        self._lock = threading.Lock()
        self._is_telling = False

    def join(self, request: Request) -> None:
        """Give an admitted request its place."""
        with self._lock:
            request.reply = turn = _Turn(self, request.reply)
            self._line.append(turn)

    def go_on(self) -> None:
        """Send every answer whose turn it is, one after another, on one thread at a time."""
        while True:
            with self._lock:
                while self._line and self._line[0].is_over:
                    self._line.popleft()
                if self._is_telling or not self._line or self._line[0].answered is None:
                    return
                turn = self._line.popleft()
                self._is_telling = True
            try:
                turn.tell()
            finally:
                with self._lock:
                    self._is_telling = False


class _Turn:
    """One request's place in a line: its door's reply, and its answer while that waits."""

    __slots__ = ("_line", "_reply", "answered", "is_over")

    def __init__(self, line: ReplyLine, reply: Reply) -> None:
        self._line = line
        self._reply = reply
        self.answered: Request | None = None
        self.is_over = False

    @property
    def user_id(self) -> str:
        """The caller's own name for its request."""
        return self._reply.user_id

    @property
    def writes_text(self) -> bool:
        """As of the door's reply."""
        return self._reply.writes_text

    def answer(self, request: Request) -> None:
        """Keep the answer until its turn has come."""
        self.answered = request
        self._line.go_on()

    def refuse(self, error: EdgeRuntimeError) -> None:
        """Refuse at once."""
        self.is_over = True
        try:
            self._reply.refuse(error)
        finally:
            self._line.go_on()

    def tell(self) -> None:
        """Send the kept answer. Never raises: a request that cannot be answered is refused."""
        request, self.answered = self.answered, None
        assert request is not None
        try:
            self._reply.answer(request)
            return
        except Exception as error:  # noqa: BLE001 (its client's answer; failure_of logs it)
            failed = failure_of(error, f"an answer of model {request.header.model} could not be given")
        try:
            self._reply.refuse(failed)
        except Exception:
            log.exception("a refusal by model %s could not be given", request.header.model)
