"""One servable as the dispatcher sees it: its layouts, their run times, its queue, and one run of it as a job.

Owns: the estimates of run times, seeded by warm-up and calibration, then fed by every run. Knows no backend: a layout
has a `Runner`. Thread: changed under the dispatcher's lock.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct, field

from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.request.level_queue import LevelQueue
from edge_runtime.request.policy import BatchLimits
from edge_runtime.request.queue import RequestQueue
from edge_runtime.request.request import Request
from edge_runtime.request.senders import Culprits
from edge_runtime.telemetry.metrics import ModelMetrics
from edge_runtime.tensors import Array

SMOOTHING = 0.1
"""Weight of a new run in the moving mean and deviation: about the last twenty runs count."""

DEVIATIONS = 2.0
"""Mean + 2 mean absolute deviations lies near the 95th percentile for the skewed run times measured on CPUs."""

OUTLIER = 8.0
"""A run over this many times the estimate is clipped to it: one page fault storm is not a trend."""

LONELY_RUNS = 8
"""Runs in a row that ended with nothing else waiting or running before the next takes all cores: with two or more
callers at once, narrow runs side by side serve more, and each sooner."""

LEAST_LIMIT_S = 1.0
LIMIT_RUNS = 10.0
"""A run may last ten times as long as most do, and a second at least: swapping or throttling is not a hang."""

UNKNOWN_LIMIT_S = 60.0
"""The limit of a run whose time nothing predicts: the model could not be warmed up."""


class PerRequest(Struct):
    """The end of a run whose model answered each request by itself.

    answers: of each request, in the order of the run, a burst's one by one: its outputs, or its error.
    """

    answers: Sequence[list[Array] | EdgeRuntimeError]


RunResult = list[Array] | PerRequest | EdgeRuntimeError
"""The end of a run: the outputs of all requests, or of each, or an error: HostEnded and RunTooLong lose the run,
any other is a failure of the requests."""


class Runner(Protocol):
    """Runs requests together on one instance. An instance in a host is one."""

    def run_parts(self, parts: Sequence[Sequence[Array]], limit_s: float, *, alone: bool) -> list[Array]:
        """Run; return the outputs of all requests, in the model's order.

        parts: each request's inputs in the model's order. limit_s: a run that lasts longer is ended (math.inf: never).
        alone: the run is on trial, and the caller starts no other beside it. Raises RunFailed, RunTooLong, HostEnded.
        """
        ...

    def begin(
        self, parts: Sequence[Sequence[Array]], limit_s: float, owner: Job, on_end: Callable[[RunResult], None]
    ) -> BegunRun:
        """Begin a run as `run_parts` does, where the layout `begins`. on_end: called once, on any thread.

        owner: whose calls of other models arrive on `owner.thread`. Raises RunFailed, HostEnded: it has not begun.
        """
        ...

    def restore(self) -> None:
        """Wait until the host that ended is replaced. Raises LoadFailed."""
        ...


class BegunRun(Protocol):
    """A run that no thread waits for."""

    def left_s(self) -> float:
        """How long it may go on; math.inf: without a limit now."""
        ...

    def give_up(self) -> None:
        """End it for its limit, and wait for that: it ends with RunTooLong."""
        ...


class RequestRunner(Protocol):
    """Runs requests on an instance whose model sees each of them by itself."""

    def run_requests(
        self, batch: Sequence[Request], parts: Sequence[Sequence[Array]], limit_s: float
    ) -> list[Array] | PerRequest:
        """Run as `Runner.run_parts` does. parts: of the batch."""
        ...

    def begin_requests(
        self, parts: Sequence[Sequence[Array]], limit_s: float, owner: Job, on_end: Callable[[RunResult], None]
    ) -> BegunRun:
        """Begin that run for the batch of a job, as `Runner.begin` does."""
        ...


class LatencyModel:
    """Run time in seconds by batch rows; linear between and beyond the row counts that were seen."""

    def __init__(self, seed: Mapping[int, float] | None = None) -> None:
        self._mean: dict[int, float] = {}
        self._deviation: dict[int, float] = {}
        self._least: dict[int, float] = {}
        self._rows: list[int] = []
        for rows, run_s in (seed or {}).items():
            self.observe(rows, run_s)

    def observe(self, rows: int, run_s: float) -> None:
        """Learn from one measured run. rows >= 1."""
        mean = self._mean.get(rows)
        if mean is None:
            self._rows.insert(bisect_left(self._rows, rows), rows)
            self._mean[rows] = run_s
            self._deviation[rows] = run_s * 0.1
            self._least[rows] = run_s
            return
        self._least[rows] = min(self._least[rows], run_s)
        run_s = min(run_s, mean * OUTLIER)
        off = run_s - mean
        self._mean[rows] = mean + SMOOTHING * off
        self._deviation[rows] += SMOOTHING * (abs(off) - self._deviation[rows])

    def copy(self) -> LatencyModel:
        """Return another that knows the same, and learns by itself."""
        other = LatencyModel()
        other._mean, other._deviation = dict(self._mean), dict(self._deviation)
        other._least, other._rows = dict(self._least), list(self._rows)
        return other

    def relax(self) -> None:
        """Lower every estimate by a tenth of its distance from the best run seen.

        Called when a forecast refuses work while nothing runs: no run would ever correct it, so a few slow runs would
        refuse a tight deadline for ever.
        """
        for rows, mean in self._mean.items():
            self._mean[rows] = mean - SMOOTHING * (mean - self._least[rows])
            self._deviation[rows] *= 1 - SMOOTHING

    def mean_s(self, rows: int) -> float:
        """Expected run time; 0.0 while nothing is known."""
        mean = self._mean.get(rows)
        return self._at(rows, self._mean) if mean is None else mean

    def predict_s(self, rows: int) -> float:
        """Run time that most runs of this many rows stay under; 0.0 while nothing is known."""
        mean = self._mean.get(rows)
        if mean is not None:
            return mean + DEVIATIONS * self._deviation[rows]
        return self._at(rows, self._mean) + DEVIATIONS * self._at(rows, self._deviation)

    def known(self) -> dict[int, float]:
        """The mean run time by rows, for the calibration cache and `stats`."""
        return {rows: self._mean[rows] for rows in self._rows}

    def _at(self, rows: int, values: Mapping[int, float]) -> float:
        """The value of rows that were never run."""
        known = self._rows
        if not known:
            return 0.0
        above = bisect_left(known, rows)
        if above == 0:
            # Fewer rows than ever seen: no more than the smallest seen.
            return values[known[0]]
        if above == len(known):
            # More than ever seen: by rows in proportion, which is never too little for a machine that batches at all.
            return values[known[-1]] * rows / known[-1]
        low, high = known[above - 1], known[above]
        share = (rows - low) / (high - low)
        return values[low] + share * (values[high] - values[low])


class Layout(Struct):
    """One way to run a model: `threads` cores a run, at most `concurrency` runs at once.

    runner: None where nothing ever runs, and concurrency is 0. run_limit_s: how long a run may last; None: as the curve
    says, and least_limit_s at least, see `limit_s`; math.inf inside the daemon, where nothing can end a run.
    warm_row_bytes: of one row of the inputs that the curve was measured with, where rows differ in size, else 0.
    is_down: its host has ended and is not yet replaced, so nothing runs. ahead: runs that its host takes beside
    `concurrency`, see `Job.is_ahead`. by_request: None for a model that sees the joined rows of a run alone.
    begins: its runs are begun, and their ends are events: no thread waits.
    own_times: the curve as it was before the device was slowed, while a copy learns; None: run_times is it.
    """

    runner: Runner | None
    threads: int = 1
    concurrency: int = 1
    run_times: LatencyModel = field(default_factory=LatencyModel)
    run_limit_s: float | None = math.inf
    least_limit_s: float = LEAST_LIMIT_S
    warm_row_bytes: int = 0
    is_down: bool = False
    ahead: int = 0
    by_request: RequestRunner | None = None
    begins: bool = False
    own_times: LatencyModel | None = None

    def measured(self, times: Mapping[int, float]) -> None:
        """Begin the curve anew by what was measured of the model alone."""
        self.run_times, self.own_times = LatencyModel(times), None

    def limit_s(self, rows: int, nbytes: int) -> float:
        """Return how long a run may last before it is ended."""
        if self.run_limit_s is not None:
            return self.run_limit_s
        known_s = self.run_times.predict_s(rows)
        if not known_s:
            return UNKNOWN_LIMIT_S
        if self.warm_row_bytes:
            known_s *= max(nbytes / (rows * self.warm_row_bytes), 1.0)
        return max(known_s * LIMIT_RUNS, self.least_limit_s)


class ScheduledModel(Struct, eq=False):
    """One servable as the dispatcher sees it. Changed only under the dispatcher's lock.

    layout: for load. wide: more threads a run, for a machine that is otherwise idle, or None. served_s: run time
    used so far, for fair share. may_rerun: whether a request may run again whose host died. runs_alone: a run is on
    that no other may be beside. has_lines: its requests may have a `Line`. may_slow: it is low work, whatever the
    priority of its requests. low_credit_s: run time that its low work may take, as of low_since_s.
    """

    name: str
    layout: Layout
    limits: BatchLimits = field(default_factory=BatchLimits)
    max_queue_rows: int = 4096
    max_queue_bytes: int = 256 << 20
    wide: Layout | None = None
    may_rerun: bool = True
    metrics: ModelMetrics = field(default_factory=ModelMetrics)
    queue: RequestQueue | LevelQueue = field(default_factory=RequestQueue)
    running: int = 0
    lonely_runs: int = LONELY_RUNS
    served_s: float = 0.0
    culprits: Culprits = field(default_factory=Culprits)
    runs_alone: bool = False
    has_lines: bool = False
    may_slow: bool = False
    low_credit_s: float = 0.0
    low_since_s: float = -math.inf
    is_open: bool = True
    wake_at_s: float = math.inf

    def work_s(self, rows: int) -> float:
        """Forecast the run time of queued rows, batched as the limits allow."""
        batch = max(self.limits.max_rows, 1)
        full, rest = divmod(rows, batch)
        times = self.layout.run_times
        return full * times.predict_s(batch) + (times.predict_s(rest) if rest else 0.0)


class Job(Struct, eq=False):
    """One batch in one layout, from its start to its end.

    ended: requests of it that have their reply before the job has ended; changed under the dispatcher's lock. thread:
    that runs it, or hears of a run that was begun, while it does; 0: none. run: that was begun, until it is given up.
    result: its run's, for the thread that it is handed over to. waits_since_s: it waits for another
    model since then, and has given its cores back; waited_s: before.
    is_ahead: it was handed to its host while all its runners were at work, and begins when one of those runs ends;
    started_s is when that should be, until it is known. low_s: what it took of its model's share of low work.
    """

    model: ScheduledModel
    layout: Layout
    batch: list[Request]
    rows: int
    started_s: float
    ends_s: float
    limit_s: float = math.inf
    ended: set[Request] = field(default_factory=set)
    thread: int = 0
    run: BegunRun | None = None
    result: RunResult | None = None
    waits_since_s: float | None = None
    waited_s: float = 0.0
    is_ahead: bool = False
    low_s: float | None = None

    def left_s(self, now_s: float) -> float:
        """Return how long it is expected to hold its cores still."""
        return max(self.ends_s - max(now_s, self.started_s), 0.0)

    def unanswered(self) -> list[Request]:
        """Return the requests that have no reply yet."""
        ended = self.ended
        return [request for request in self.batch if request not in ended] if ended else self.batch
