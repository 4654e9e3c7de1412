"""Every rule of scheduling as a pure function: what to admit, run next and expire, and which model to serve first.

Nothing here locks, sleeps, or knows a model. Each rule is a row in a table test.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from edge_runtime.config.settings import QueuePolicies, QueuePolicy

AGEING_S = 1.0
"""A priority gains one level for each second in which none of it runs, so a flood of priority 1 starves no other."""

PATIENCE_S = 10.0
"""A request counts as due this long after it came at the latest, so that no flood of deadlines starves one that has a
later one, or none."""

MOST_PASSED = 256
"""Requests of another inner shape that the search for a batch passes at most: each costs some 0.2 us."""

ADMISSION_MARGIN = 0.85
"""Share of the timeout that a forecast may use: the rest is the way there and back and the forecast's error
(reference prototype: 0.85 for small inputs)."""

LARGE_FRAME_MARGIN = 0.8
"""The same where copying large frames competes with the runs for the cores (prototype: about 0.8 at 600 KB)."""

LARGE_FRAME_BYTES = 64 * 1024


SIDE_BY_SIDE = 0.6
"""Runs side by side slow one another down, on two threads of one core most: what one run would take is shared out only
where a share takes at most this part of its time."""

LEAST_GAIN_S = 0.5e-3
"""And where it ends sooner by this: each run of its own costs the daemon and its host as much."""

CHAIN_SHARE = 0.1
"""Share of a timeout that the work under way in a pipeline may take before another request begins there."""

LEAST_REFUSAL_S = 20e-6
"""The least cost of refusing a small request, in seconds of one core, and its cost until one was measured."""

MOST_REFUSAL_S = 1e-3
"""And at most: a dearer one is other work of its thread, and a sender whose refusals are held without a deadline
must not wait for minutes. 64 held ones of this cost are sent within 1.3 s."""

REFUSAL_SMOOTHING = 0.05
"""Weight of one measured refusal in the mean of their cost: about the last forty count."""

REFUSAL_OUTLIER = 4.0
"""A refusal over this many times the mean is clipped to it: its thread did other work meanwhile."""

REFUSED_BYTES_PER_S = 6e9
"""How fast tensors are received only to be dropped: a frame of 600 KB takes some 100 us more than a small one. The
measured cost is the mean of all refusals, and a sender of large ones must not pay as little as its neighbours."""

REFUSAL_SHARE = 0.05
"""Share of one core that refusing one sender of one model may cost before its refusals are held."""

REFUSALS_SHARE = 0.10
"""Share of one core that refusing all senders of one model may cost before each refusal is charged more: many senders
that each ask again at once stay within their own share, and take the cores together."""

MOST_REFUSAL_PRICE = 100.0
"""And at most so many times as much: a hundred senders are each held to a hundredth."""

CHAIN_REFUSAL_S = 300e-6
"""The least cost of a refusal by a chain, whose requests are read anew each time and forecast as a whole: measured for
chats over HTTP, from the first byte to the last."""

REFUSAL_BURST_S = 1.0
"""The share is counted over this time."""

REFUSAL_STEP_S = 0.010
"""Held refusals are sent together at multiples of this time: to wake the timer and the door for each costs as much as
refusing it."""

LONGEST_PAUSE_S = 10.0
"""Low work that is held back has its next run after this time at the latest, however long its last run was: it is
slowed, and stopped only by a refusal that says so. The watchdog's patience is longer."""

LOW_SAVED_S = 0.1
"""Low work that did not come saves up its share of this time, so that late wakes cost it nothing."""

ROUNDING = 1e-3
"""Of a step: an instant as near to one is one."""

ALONE: Final = object()
"""The shape of a request that runs alone, in its host too: it is to be found out whether it ends the host."""


class Waiting(Protocol):
    """A waiting request for the rules. Instants are monotonic seconds; a deadline may be math.inf.

    shape: equal for requests that may share a batch.
    """

    rows: int
    shape: object
    arrived_s: float
    deadline_s: float


W = TypeVar("W", bound=Waiting)


class RunTimes(Protocol):
    """A latency model for the rules: a high quantile of the run time by rows, in seconds."""

    def predict_s(self, rows: int) -> float:
        """Seconds that most runs of this many rows stay under."""
        ...


class BatchLimits(Struct, frozen=True):
    """Bounds on one batch.

    max_rows: rows joined into one run. max_delay_s: how long an idle instance may wait for a fuller batch (0: never).
    preferred_rows: sizes to cut at, ascending. max_run_s: longest run while another model waits (inf: no bound).
    in_order: as Triton's batcher forms batches: no request passes another, a preferred size goes at once, and once the
    delay is over everything goes.
    """

    max_rows: int = 1
    max_delay_s: float = 0.0
    preferred_rows: tuple[int, ...] = ()
    max_run_s: float = math.inf
    in_order: bool = False


class BatchPlan(Struct, Generic[W], frozen=True):
    """The decision: run `take` together, answer `expired` with deadline_exceeded, look again at `wake_at_s`.

    take and expired are disjoint. wake_at_s is None when nothing asks for another look.
    """

    take: list[W] = field(default_factory=list)
    expired: list[W] = field(default_factory=list)
    wake_at_s: float | None = None


def plan_batch(waiting: Iterable[W], now_s: float, limits: BatchLimits, run_times: RunTimes) -> BatchPlan[W]:
    """Decide the next batch of one model. Pure.

    waiting: in the order of the queue. The first that can make its deadline leads; others of its inner shape join in
    that order while rows and every taken deadline allow. A request is never split.
    """
    take, expired, is_complete = _fill(waiting, now_s, limits, run_times)
    if not take:
        return BatchPlan(expired=expired)
    if limits.in_order:
        return _plan_in_order(BatchPlan(take, expired), now_s, limits, run_times, is_complete=is_complete)
    rows = take[0].rows if len(take) == 1 else sum(request.rows for request in take)
    if limits.max_delay_s > 0:
        may_wait_until = _wait_for_more(take, rows, limits, run_times)
        if may_wait_until > now_s:
            return BatchPlan(expired=expired, wake_at_s=may_wait_until)
    return BatchPlan(_cut_at_preferred(take, rows, limits.preferred_rows), expired)


def shared_rows(rows: int, limits: BatchLimits, slots: int, run_times: RunTimes) -> int:
    """The most rows of the next run of a model whose runs may take `slots` places now, so that none idles beside it.

    rows: that wait. Where one run would take them all, they are shared out among runs side by side that end clearly
    sooner; a curve that hardly grows with its rows says that one run is as quick. More rows than a run takes leave some
    for the other places by themselves.
    """
    share = -(-rows // slots)
    if not share < rows <= limits.max_rows:
        return limits.max_rows
    together_s = run_times.predict_s(rows)
    is_sooner = run_times.predict_s(share) <= min(together_s * SIDE_BY_SIDE, together_s - LEAST_GAIN_S)
    return share if is_sooner else limits.max_rows


def plan_expiry(by_deadline: Iterable[W], now_s: float, run_times: RunTimes) -> BatchPlan[W]:
    """Which requests to expire now though no instance is free, and when to look again.

    by_deadline: those that have a deadline, the earliest first.
    """
    expired: list[W] = []
    for request in by_deadline:
        latest_s = request.deadline_s - run_times.predict_s(request.rows)
        if now_s <= latest_s:
            return BatchPlan(expired=expired, wake_at_s=latest_s)
        expired.append(request)
    return BatchPlan(expired=expired)


def aged_priority(priority: int, unserved_since_s: float, now_s: float) -> int:
    """A priority with ageing: one level nearer to first for each AGEING_S in which none of it ran.

    It does not stop at the first: else a priority would only draw level with a flood, and never run.
    """
    return priority - max(int((now_s - unserved_since_s) / AGEING_S), 0)


def due_s(arrived_s: float, deadline_s: float) -> float:
    """The instant by which requests of one turn are ordered: the deadline, or PATIENCE_S after the arrival."""
    return min(deadline_s, arrived_s + PATIENCE_S)


class Load(Struct, frozen=True):
    """The work before a new request, in seconds of one slot each.

    running_s: the rest of runs under way. own_queued_s: queued work of the request's own model at equal or higher
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


def is_meetable(wait_s: float, run_s: float, timeout_s: float, nbytes: int, *, is_step: bool = False) -> bool:
    """Whether a forecast finish lies within the part of the timeout that a forecast may use.

    is_step: of a pipeline's request that was admitted: nothing comes after the forecast that is not in it.
    """
    if is_step:
        return wait_s + run_s <= timeout_s
    margin = LARGE_FRAME_MARGIN if nbytes >= LARGE_FRAME_BYTES else ADMISSION_MARGIN
    return wait_s + run_s <= timeout_s * margin


def level_of(priority: int, queue: QueuePolicies) -> int:
    """The level of a request with this priority, 0 where the queue has one level only."""
    return priority if 1 <= priority <= queue.levels else queue.default_level


def queue_timeout_s(policy: QueuePolicy, asked_ms: float) -> float:
    """How long a request may wait at a level, in seconds; math.inf: without end. asked_ms: its own `timeout`, or 0."""
    allowed_ms = policy.timeout_ms
    if policy.allow_override and 0 < asked_ms < allowed_ms:
        allowed_ms = asked_ms
    return allowed_ms / 1e3 if allowed_ms else math.inf


class ChainLoad(Struct, frozen=True):
    """The work before a new request to a pipeline, in seconds of one core.

    promised_s: of steps that chains under way will still ask for, of all pipelines: by their deadlines they come first.
    waiting_s: all steps of the requests that wait for this pipeline and run before the new one.
    """

    promised_s: float = 0.0
    waiting_s: float = 0.0


def forecast_chain_s(load: ChainLoad, path_s: float, cores: int) -> float:
    """Seconds until a new request to a pipeline is answered.

    path_s: its critical path, with the wait for each step's model. The queues of models do not show the runs that
    chains will ask for later: without these, each would be admitted by its first step's queue, and expire before its
    last.
    """
    return (load.promised_s + load.waiting_s) / cores + path_s


class ChainFlow(Struct, frozen=True):
    """The chains of one pipeline that are under way.

    rows: of all. full_rows: as many as keep each step's model at full batches, with the next ones queued. work_s: the
    runs left to them, in seconds of one core. nbytes: of their tensors; max_bytes: the bound on them.
    """

    rows: int
    full_rows: int
    work_s: float
    nbytes: int
    max_bytes: int


def may_begin_chain(flow: ChainFlow, timeout_s: float, cores: int) -> bool:
    """Whether the first request that waits for a pipeline begins now; else it waits on before its first step.

    Invariant: a chain under way costs work when it expires, so as few are as keep the cores busy. As many as there are
    cores always are; more, only while those under way take a small part of the timeout.
    """
    if flow.rows < cores:
        return True
    is_short = flow.work_s / cores <= timeout_s * CHAIN_SHARE
    return flow.rows < flow.full_rows and is_short and flow.nbytes < flow.max_bytes


def refusal_cost_s(small_s: float, nbytes: int) -> float:
    """Return the cost of one refusal, in seconds of one core.

    small_s: of a small request. nbytes: of tensors that were copied to get here.
    """
    return small_s + nbytes / REFUSED_BYTES_PER_S


def small_refusals_s(cpu_s: float, nbytes: int) -> float:
    """Return the cost of refusals that took `cpu_s`, had they been small: `refusal_cost_s` adds their bytes."""
    return cpu_s - nbytes / REFUSED_BYTES_PER_S


def learnt_refusal_s(known_s: float, cpu_s: float, count: int) -> float:
    """The mean cost of a small refusal after `count` more, which took `cpu_s` in all. count >= 1."""
    each_s = min(cpu_s / count, known_s * REFUSAL_OUTLIER)
    weight = REFUSAL_SMOOTHING if count == 1 else 1.0 - (1.0 - REFUSAL_SMOOTHING) ** count
    return min(max(known_s + weight * (each_s - known_s), LEAST_REFUSAL_S), MOST_REFUSAL_S)


def refusal_price(all_paid_until_s: float, now_s: float) -> float:
    """How many times its cost a refusal is charged, where those sent lately cost more than the share of all."""
    return min(max((all_paid_until_s - now_s) / REFUSAL_BURST_S, 1.0), MOST_REFUSAL_PRICE)


def refusals_told_now(paid_until_s: float, each_s: float, now_s: float) -> int:
    """How many more refusals of one sender `hold_refusal_until_s` sends now, of which each is paid for in each_s."""
    return max(int((now_s + REFUSAL_BURST_S - paid_until_s) / each_s), 0)


def hold_refusal_until_s(paid_until_s: float, retry_s: float, deadline_s: float, now_s: float) -> float:
    """When a refusal is sent: now, unless its sender's refusals cost more than their share.

    paid_until_s: when all of them, this one too, are paid for by their share. Then it is held until the time to wait
    that it names is over, and the sender is within its share again; at most until the request's deadline. Those of one
    step are sent together.
    """
    if paid_until_s <= now_s + REFUSAL_BURST_S:
        return now_s
    until_s = max(now_s + retry_s, paid_until_s - REFUSAL_BURST_S)
    if until_s + REFUSAL_STEP_S <= deadline_s:
        return math.ceil(until_s / REFUSAL_STEP_S - ROUNDING) * REFUSAL_STEP_S
    return max(math.floor(deadline_s / REFUSAL_STEP_S + ROUNDING) * REFUSAL_STEP_S, now_s)


class Allowance(Struct, frozen=True):
    """The part of the device that runs may take now, as a governor of its heat says.

    cores: for all runs together, 0 for a moment; work that is more urgent than the default priority may take the others
    too, so that its deadlines hold. low_priority: requests of this priority and of less urgent ones are low work, as
    all of a model that `may_slow` are. low_share: of the time of a model's places, for its low work. refuses_low: its
    priorities are refused at the door, to be asked again after `retry_s`.
    """

    cores: int
    low_priority: int
    low_share: float = 1.0
    refuses_low: bool = False
    retry_s: float = 0.0


def low_credit_s(credit_s: float, elapsed_s: float, rate: float) -> float:
    """Return the run time that a model's low work may take now; below 0: its runs took that much more than its share.

    rate: seconds of runs a second that its share allows, of all its places.
    """
    return min(max(credit_s, -LONGEST_PAUSE_S * rate) + elapsed_s * rate, LOW_SAVED_S * rate)


class Claim(Struct, frozen=True):
    """One model that wants the cores: how urgent its first request is, and the run time it has used."""

    priority: int
    served_s: float


def choose_model(claims: Sequence[Claim]) -> list[int]:
    """Indices of claims in the order to try them: priority first, then least run time used."""
    return sorted(range(len(claims)), key=lambda index: (claims[index].priority, claims[index].served_s))


# ---- private --------------------------------------------------------------------------------------------------------


def _fill(
    waiting: Iterable[W], now_s: float, limits: BatchLimits, run_times: RunTimes
) -> tuple[list[W], list[W], bool]:
    """Take requests in order while the batch's run still meets every deadline taken; those too late expire.

    Also returns whether the batch is complete: one waits that may not join it.
    """
    take: list[W] = []
    expired: list[W] = []
    shape: object = None
    rows, earliest_s, passed = 0, math.inf, 0
    is_complete = False
    for request in waiting:
        deadline_s = request.deadline_s
        if deadline_s != math.inf and now_s + run_times.predict_s(request.rows) > deadline_s:
            expired.append(request)
            continue
        if not take:
            shape = request.shape
        elif request.shape != shape:
            passed += 1
            if passed >= MOST_PASSED or limits.in_order:
                is_complete = True
                break
            continue
        joined = rows + request.rows
        earliest_s = min(earliest_s, deadline_s)
        if take:
            run_s = run_times.predict_s(joined) if joined <= limits.max_rows else math.inf
            if run_s > limits.max_run_s or now_s + run_s > earliest_s or joined > limits.max_rows:
                is_complete = True
                break
        take.append(request)
        rows = joined
        if rows >= limits.max_rows or shape is ALONE:
            is_complete = True
            break
    return take, expired, is_complete


def _plan_in_order(
    plan: BatchPlan[W], now_s: float, limits: BatchLimits, run_times: RunTimes, *, is_complete: bool
) -> BatchPlan[W]:
    """Release requests taken by the rules of Triton's batcher (`GetDynamicBatch` in dynamic_batch_scheduler.cc)."""
    take, rows, best = plan.take, 0, 0
    for count, request in enumerate(take, start=1):
        rows += request.rows
        if rows in (limits.preferred_rows or (limits.max_rows,)):
            best = count
    until_s = min(request.arrived_s for request in take) + limits.max_delay_s
    if best and (limits.max_delay_s <= 0 or now_s < until_s):
        return replace(plan, take=take[:best])
    may_wait_until = _wait_for_more(take, rows, limits, run_times)
    if is_complete or may_wait_until <= now_s:
        return plan
    return replace(plan, take=[], wake_at_s=may_wait_until)


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
