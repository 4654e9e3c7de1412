"""Every rule of scheduling, as pure functions: what to admit, what to run next, what to expire, whom to serve first.

Nothing here locks, sleeps, or knows a model. DESIGN 4 is the specification; each rule there is a row in a table test.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, Protocol, TypeVar

AGEING_S = 1.0
"""A request gains one priority level for each second it waits, so that a steady flood of priority 1 starves nobody."""

FIRST_PRIORITY = 1

ADMISSION_MARGIN = 0.85
"""Share of the timeout that a forecast may use: the rest is the way there and back and the forecast's error
(reference prototype: 0.85 for small inputs)."""

LARGE_FRAME_MARGIN = 0.8
"""The same where copying large frames competes with the runs for the cores (prototype: about 0.8 at 600 KB)."""

LARGE_FRAME_BYTES = 64 * 1024


class Waiting(Protocol):
    """What the rules read of a waiting request. Instants are monotonic seconds; a deadline may be math.inf."""

    rows: int
    arrived_s: float
    deadline_s: float


W = TypeVar("W", bound=Waiting)
W_co = TypeVar("W_co", bound=Waiting, covariant=True)


class Lane(Protocol[W_co]):
    """A FIFO of requests of one priority, one timeout and one inner shape: arrival order is deadline order."""

    priority: int
    shape: object

    def __iter__(self) -> Iterator[W_co]: ...

    def __len__(self) -> int: ...


class RunTimes(Protocol):
    """What the rules ask of a latency model: a high quantile of the run time of so many rows, in seconds."""

    def predict_s(self, rows: int) -> float:
        """Seconds that most runs of so many rows stay under."""
        ...


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds on one batch.

    max_rows: rows joined into one run. max_delay_s: how long an idle instance may wait for a fuller batch (0: never).
    preferred_rows: sizes to cut at, ascending. max_run_s: longest run while another model waits (inf: no bound).
    """

    max_rows: int = 1
    max_delay_s: float = 0.0
    preferred_rows: tuple[int, ...] = ()
    max_run_s: float = math.inf


@dataclass(frozen=True, slots=True)
class BatchPlan(Generic[W]):
    """What to do now: run `take` together, answer `expired` with deadline_exceeded, look again at `wake_at_s`.

    take and expired are disjoint, and each is made of prefixes of lanes. wake_at_s is None when nothing waits.
    """

    take: list[W] = field(default_factory=list)
    expired: list[W] = field(default_factory=list)
    wake_at_s: float | None = None


def plan_batch(waiting: Iterable[Lane[W]], now_s: float, limits: BatchLimits, run_times: RunTimes) -> BatchPlan[W]:
    """Decide the next batch of one model. Pure: the lanes are read, not changed.

    The most urgent request leads: lowest effective priority, then earliest deadline, then arrival. Others of its inner
    shape join in the same order while rows and every taken deadline allow. A request is never split.
    """
    expired, live = _split_expired(waiting, now_s, run_times)
    leader = min(live, key=lambda head: head.urgency(now_s), default=None)
    if leader is None:
        return BatchPlan(expired=expired)
    shape = leader.lane.shape
    mates = [head for head in live if head.lane.shape == shape]
    take = _fill(mates, now_s, limits, run_times)
    rows = sum(request.rows for request in take)
    may_wait_until = _wait_for_more(take, rows, limits, run_times)
    if may_wait_until > now_s:
        return BatchPlan(expired=expired, wake_at_s=min(may_wait_until, next_expiry_s(live, run_times)))
    take = _cut_at_preferred(take, rows, limits.preferred_rows)
    left = sum(head.left for head in live) - len(take)
    return BatchPlan(take, expired, next_expiry_s(live, run_times) if left else None)


def plan_expiry(waiting: Iterable[Lane[W]], now_s: float, run_times: RunTimes) -> BatchPlan[W]:
    """The part of `plan_batch` that needs no free instance: whom to expire now, and when to look again."""
    expired, live = _split_expired(waiting, now_s, run_times)
    return BatchPlan(expired=expired, wake_at_s=next_expiry_s(live, run_times) if live else None)


def effective_priority(priority: int, arrived_s: float, now_s: float) -> int:
    """Priority with ageing: one level nearer to first for each AGEING_S waited."""
    return max(FIRST_PRIORITY, priority - int((now_s - arrived_s) / AGEING_S))


def next_expiry_s(heads: Iterable[_Head[W]], run_times: RunTimes) -> float:
    """Instant from which some lane's first request can no longer make its deadline; inf when none has one."""
    return min((head.first.deadline_s - run_times.predict_s(head.first.rows) for head in heads), default=math.inf)


@dataclass(frozen=True, slots=True)
class Load:
    """The work before a new request, in seconds of one slot each.

    running_s: what is left of runs under way. own_queued_s: queued work of the request's own model at equal or higher
    priority. all_queued_s: the same over all models that share the cores. models: how many of them have work queued.
    """

    running_s: float = 0.0
    own_queued_s: float = 0.0
    all_queued_s: float = 0.0
    models: int = 1


def forecast_wait_s(load: Load, slots: int) -> float:
    """Seconds until a new request starts.

    Models share the cores fairly, so another model's backlog delays this one by at most as much work as this one has
    itself in the queue for each other model: the smaller of the two counts.
    """
    queued_s = min(load.all_queued_s, load.own_queued_s * max(load.models, 1))
    return (load.running_s + queued_s) / slots


def is_meetable(wait_s: float, run_s: float, timeout_s: float, nbytes: int) -> bool:
    """Whether a forecast finish lies within the part of the timeout that a forecast may use."""
    margin = LARGE_FRAME_MARGIN if nbytes >= LARGE_FRAME_BYTES else ADMISSION_MARGIN
    return wait_s + run_s <= timeout_s * margin


@dataclass(frozen=True, slots=True)
class Claim:
    """One model that wants the cores: how urgent its first request is, and how much run time it has had."""

    priority: int
    served_s: float


def choose_model(claims: Sequence[Claim]) -> list[int]:
    """Indices of claims in the order to try them: priority first, then who has had the least run time."""
    return sorted(range(len(claims)), key=lambda index: (claims[index].priority, claims[index].served_s))


# ---- private --------------------------------------------------------------------------------------------------------


class _Head(Generic[W]):
    """A cursor into one lane: `first` is its first request not yet expired."""

    __slots__ = ("first", "lane", "skipped")

    def __init__(self, lane: Lane[W], first: W, skipped: int) -> None:
        self.lane = lane
        self.first = first
        self.skipped = skipped

    @property
    def left(self) -> int:
        return len(self.lane) - self.skipped

    def urgency(self, now_s: float) -> tuple[int, float, float]:
        first = self.first
        return (effective_priority(self.lane.priority, first.arrived_s, now_s), first.deadline_s, first.arrived_s)


def _split_expired(waiting: Iterable[Lane[W]], now_s: float, run_times: RunTimes) -> tuple[list[W], list[_Head[W]]]:
    expired: list[W] = []
    live: list[_Head[W]] = []
    for lane in waiting:
        for skipped, request in enumerate(lane):
            if now_s + run_times.predict_s(request.rows) <= request.deadline_s:
                live.append(_Head(lane, request, skipped))
                break
            expired.append(request)
    return expired, live


def _fill(heads: list[_Head[W]], now_s: float, limits: BatchLimits, run_times: RunTimes) -> list[W]:
    """Take requests in order of urgency while the batch's run still meets every deadline taken."""
    take: list[W] = []
    rows, earliest_s = 0, math.inf
    for request in _by_urgency(heads, now_s):
        joined = rows + request.rows
        earliest_s = min(earliest_s, request.deadline_s)
        if take:
            run_s = run_times.predict_s(joined)
            if joined > limits.max_rows or run_s > limits.max_run_s or now_s + run_s > earliest_s:
                break
        take.append(request)
        rows = joined
        if rows >= limits.max_rows:
            break
    return take


def _by_urgency(heads: list[_Head[W]], now_s: float) -> Iterator[W]:
    if len(heads) == 1:
        yield from islice(heads[0].lane, heads[0].skipped, None)
        return
    cursors = [(head, islice(head.lane, head.skipped + 1, None)) for head in heads]
    current = [head.first for head in heads]
    while cursors:
        best = min(
            range(len(cursors)),
            key=lambda index: (
                effective_priority(cursors[index][0].lane.priority, current[index].arrived_s, now_s),
                current[index].deadline_s,
                current[index].arrived_s,
            ),
        )
        yield current[best]
        following = next(cursors[best][1], None)
        if following is None:
            del cursors[best], current[best]
        else:
            current[best] = following


def _wait_for_more(take: Sequence[Waiting], rows: int, limits: BatchLimits, run_times: RunTimes) -> float:
    """Instant until which an idle instance may wait for a fuller batch; -inf when it must not."""
    goal = limits.preferred_rows[-1] if limits.preferred_rows else limits.max_rows
    if limits.max_delay_s <= 0 or rows >= goal:
        return -math.inf
    oldest_s = min(request.arrived_s for request in take)
    earliest_s = min(request.deadline_s for request in take)
    return min(oldest_s + limits.max_delay_s, earliest_s - run_times.predict_s(goal))


def _cut_at_preferred(take: list[W], rows: int, preferred: Sequence[int]) -> list[W]:
    """Keep the longest prefix whose rows are a preferred size; everything when there is none."""
    if not preferred or rows in preferred:
        return take
    best, joined = 0, 0
    for count, request in enumerate(take, start=1):
        joined += request.rows
        if joined in preferred:
            best = count
    return take[:best] if best else take
