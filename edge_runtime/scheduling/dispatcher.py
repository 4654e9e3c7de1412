"""The table of models that share the cores: who waits, what runs, what is free.

Owns: queues, cores and running jobs, under one short lock. It applies the rules of policy.py and starts nothing itself:
worker.py's threads ask for jobs and report them finished, transports admit. Every public method may be called from any
thread; outcomes are settled outside the lock by the caller that got them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from edge_runtime.clock import Clock
from edge_runtime.errors import Cancelled, DeadlineExceeded, DeadlineUnmeetable, Draining, QueueFull
from edge_runtime.scheduling import policy
from edge_runtime.scheduling.latency_model import LatencyModel
from edge_runtime.scheduling.policy import BatchLimits, Claim, Load
from edge_runtime.scheduling.queue import Pending, RequestQueue
from edge_runtime.tensors import Array

Run = Callable[[Sequence[Array]], list[Array]]
"""Arrays in the model's order to outputs in the model's order; raises RunFailed."""


LONELY_RUNS = 8
"""Runs in a row that ended with nothing else waiting or running before the next takes all cores: with two or more
callers at once, narrow runs side by side serve more, and each sooner."""

TIMER_STEP_S = 0.0005
"""The timer never sleeps less: deadlines are told in milliseconds, and a finer step only burns a core."""


@dataclass(slots=True)
class Layout:
    """One way to run a model: `threads` cores a run, at most `concurrency` runs at once."""

    run: Run
    threads: int = 1
    concurrency: int = 1
    run_times: LatencyModel = field(default_factory=LatencyModel)


@dataclass(slots=True, eq=False)
class ScheduledModel:
    """One servable as the dispatcher sees it. Changed only under the dispatcher's lock.

    layout: for load. wide: more threads a run, for a machine that is otherwise idle, or None. on_run(rows, requests,
    run_s) is told of every run, on the worker's thread. served_s: run time had so far, for fair share.
    """

    name: str
    layout: Layout
    limits: BatchLimits = field(default_factory=BatchLimits)
    max_queue_rows: int = 4096
    max_queue_bytes: int = 256 << 20
    wide: Layout | None = None
    on_run: Callable[[int, int, float], None] | None = None
    queue: RequestQueue = field(default_factory=RequestQueue)
    running: int = 0
    lonely_runs: int = LONELY_RUNS
    served_s: float = 0.0
    is_open: bool = True
    wake_at_s: float = math.inf

    def work_s(self, rows: int) -> float:
        """Forecast of the run time that so many queued rows will take, batched as the limits allow."""
        batch = max(self.limits.max_rows, 1)
        full, rest = divmod(rows, batch)
        times = self.layout.run_times
        return full * times.predict_s(batch) + (times.predict_s(rest) if rest else 0.0)


@dataclass(slots=True, eq=False)
class Job:
    """A batch on its way through one layout."""

    model: ScheduledModel
    layout: Layout
    batch: list[Pending]
    rows: int
    started_s: float
    ends_s: float


class Dispatcher:
    """Admission, choice of the next job, and accounts of the cores."""

    def __init__(self, clock: Clock, cores: int, max_run_s: float = 0.050) -> None:
        self._clock = clock
        self._cores = cores
        self._max_run_s = max_run_s
        self._free = cores
        self._running: set[Job] = set()
        self._active: dict[ScheduledModel, None] = {}
        self._lock = threading.Lock()
        self.has_work = threading.Condition(self._lock)
        self.has_timer = threading.Condition(self._lock)
        self._has_drained = threading.Condition(self._lock)
        self._idle_workers = 0

    @property
    def cores(self) -> int:
        """Cores that all runs share."""
        return self._cores

    def admit(self, model: ScheduledModel, request: Pending) -> None:
        """Queue a request, or refuse it at once.

        Raises Draining (the model was closed: resolve it again), QueueFull, DeadlineUnmeetable. Thread: any.
        """
        with self._lock:
            if not model.is_open:
                raise Draining(f"model {model.name} is being replaced or stopped")
            queue = model.queue
            self._check_bounds(model, request)
            if request.timeout_s != math.inf:
                self._check_deadline(model, request)
            if model not in self._active:
                self._activate(model)
            queue.push(request)
            if request.deadline_s != math.inf:
                self._wake_timer_at(model, request.deadline_s - model.layout.run_times.predict_s(request.rows))
            if self._idle_workers and self._free:
                self.has_work.notify()

    def cancel(self, model: ScheduledModel, request: Pending) -> bool:
        """Take a waiting request back and settle it as cancelled; False when it runs or has its outcome already."""
        with self._lock:
            if request.lane is None:
                return False
            model.queue.remove([request])
            self._retire(model)
        request.settle(request, Cancelled("cancelled by its caller"))
        return True

    def next_job(self) -> tuple[Job | None, list[Pending]]:
        """The next batch to run, and requests found expired, which the caller settles. Never waits."""
        with self._lock:
            return self._next_job()

    def wait_for_job(self, is_stopping: Callable[[], bool]) -> tuple[Job | None, list[Pending]]:
        """Like `next_job`, but sleeps until there is something or `is_stopping`. Thread: workers."""
        with self._lock:
            while not is_stopping():
                job, expired = self._next_job()
                if job is not None or expired:
                    return job, expired
                self._idle_workers += 1
                self.has_work.wait()
                self._idle_workers -= 1
            return None, []

    def finish(self, job: Job, run_s: float | None) -> None:
        """Give the job's cores back; `run_s` None when it failed, so that failures do not teach the forecast."""
        with self._lock:
            self._running.discard(job)
            self._free += job.layout.threads
            model = job.model
            model.running -= 1
            model.lonely_runs = model.lonely_runs + 1 if not self._running and not self._active else 0
            if run_s is not None:
                model.served_s += run_s * job.layout.threads
                job.layout.run_times.observe(job.rows, run_s)
            if not model.running and not model.is_open and not model.queue.rows:
                self._has_drained.notify_all()
            # The caller takes one job itself; cores beyond that are another worker's.
            if self._free > 1 and self._active and self._idle_workers:
                self.has_work.notify()

    def expire(self) -> tuple[list[Pending], float]:
        """Take out what can no longer make its deadline; and the instant to look again (inf: never). Thread: timer."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            expired: list[Pending] = []
            wake_at_s = math.inf
            for model in list(self._active):
                plan = policy.plan_expiry(model.queue.lanes(), now_s, model.layout.run_times)
                model.queue.remove(plan.expired)
                expired += plan.expired
                if model.wake_at_s <= now_s:
                    model.wake_at_s = math.inf
                    self.has_work.notify()
                if plan.wake_at_s is not None:
                    model.wake_at_s = min(model.wake_at_s, plan.wake_at_s)
                self._retire(model)
                wake_at_s = min(wake_at_s, model.wake_at_s)
            return expired, wake_at_s

    def wait_for_timer(self, until_s: float, is_stopping: Callable[[], bool]) -> None:
        """Sleep until `until_s`, or until an admission needs the timer sooner. Thread: timer."""
        with self._lock:
            if is_stopping():
                return
            # An admission may have asked for the timer since `until_s` was found.
            until_s = min([until_s, *(model.wake_at_s for model in self._active)])
            self.has_timer.wait(None if until_s == math.inf else max(until_s - self._clock.monotonic_s(), TIMER_STEP_S))

    def wake_all(self) -> None:
        """Let sleeping workers and the timer look at `is_stopping` again."""
        with self._lock:
            self.has_work.notify_all()
            self.has_timer.notify_all()

    def is_idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        with self._lock:
            return not self._running and not self._active

    def has_spare_core(self) -> bool:
        """Whether a core is free and nobody waits for one."""
        with self._lock:
            return self._free > 0 and not self._active

    def close_model(self, model: ScheduledModel, timeout_s: float) -> bool:
        """Stop admitting to a model and wait until its requests are answered; what is left after that is refused.

        Returns whether everything was answered in time. Thread: loader, or whoever stops the daemon.
        """
        with self._lock:
            model.is_open = False
            if model.limits.max_delay_s:
                model.limits = replace(model.limits, max_delay_s=0.0)
                self.has_work.notify_all()
            drained = self._has_drained.wait_for(lambda: not model.running and not model.queue.rows, timeout_s)
            left = model.queue.clear()
            self._active.pop(model, None)
        for request in left:
            request.settle(request, Draining("stopped before this request was reached; send it again later"))
        with self._lock:
            return self._has_drained.wait_for(lambda: not model.running, timeout_s) and drained

    def take_all(self, model: ScheduledModel) -> list[Pending]:
        """Take everything out that waits for a model; the caller settles or submits it again."""
        with self._lock:
            waiting = model.queue.clear()
            self._retire(model)
            return waiting

    def queued(self, model: ScheduledModel) -> tuple[int, int]:
        """Rows and bytes waiting for a model."""
        with self._lock:
            return model.queue.rows, model.queue.nbytes

    # ---- under the lock ---------------------------------------------------------------------------------------------

    def _check_bounds(self, model: ScheduledModel, request: Pending) -> None:
        queue = model.queue
        if queue.rows + request.rows > model.max_queue_rows:
            raise QueueFull(
                f"{queue.rows} rows wait for model {model.name}, its bound is {model.max_queue_rows}",
                retry_after_ms=self._wait_s(model, request) * 1e3,
            )
        if queue.nbytes + request.nbytes > model.max_queue_bytes:
            raise QueueFull(
                f"{queue.nbytes} bytes wait for model {model.name}, its bound is {model.max_queue_bytes}",
                retry_after_ms=self._wait_s(model, request) * 1e3,
            )

    def _check_deadline(self, model: ScheduledModel, request: Pending) -> None:
        wait_s = self._wait_s(model, request)
        run_s = model.layout.run_times.predict_s(request.rows)
        if policy.is_meetable(wait_s, run_s, request.timeout_s, request.nbytes):
            return
        if not self._running and not self._active:
            model.layout.run_times.relax()
        raise DeadlineUnmeetable(
            f"forecast {(wait_s + run_s) * 1e3:.1f} ms, timeout {request.timeout_s * 1e3:.1f} ms",
            retry_after_ms=max(wait_s + run_s - request.timeout_s * policy.ADMISSION_MARGIN, 0.0) * 1e3,
        )

    def _wait_s(self, model: ScheduledModel, request: Pending) -> float:
        if not self._running and not self._active:
            return 0.0
        now_s = self._clock.monotonic_s()
        own_s = model.work_s(model.queue.rows_before(request.priority))
        others = [other for other in self._active if other is not model]
        load = Load(
            running_s=sum(max(job.ends_s - now_s, 0.0) * job.layout.threads for job in self._running),
            own_queued_s=own_s,
            all_queued_s=own_s + sum(other.work_s(other.queue.rows_before(request.priority)) for other in others),
            models=1 + len(others),
        )
        return policy.forecast_wait_s(load, max(self._cores // model.layout.threads, 1))

    def _activate(self, model: ScheduledModel) -> None:
        """A model that was idle gets no credit for it: it starts level with the least served one."""
        least_s = min((other.served_s for other in self._active), default=model.served_s)
        model.served_s = max(model.served_s, least_s)
        self._active[model] = None

    def _retire(self, model: ScheduledModel) -> None:
        if model.queue.rows:
            return
        self._active.pop(model, None)
        model.wake_at_s = math.inf
        if not model.running and not model.is_open:
            self._has_drained.notify_all()

    def _wake_timer_at(self, model: ScheduledModel, instant_s: float) -> None:
        if instant_s < model.wake_at_s:
            model.wake_at_s = instant_s
            self.has_timer.notify()

    def _next_job(self) -> tuple[Job | None, list[Pending]]:
        expired: list[Pending] = []
        if not self._free or not self._active:
            return None, expired
        now_s = self._clock.monotonic_s()
        for model in self._by_claim(now_s):
            if model.running >= model.layout.concurrency:
                continue
            if model.layout.threads > self._free:
                # Its turn: keep the free cores for it, or smaller runs of others would starve it.
                break
            limits = model.limits
            if len(self._active) > 1:
                limits = replace(limits, max_run_s=min(limits.max_run_s, self._max_run_s))
            plan = policy.plan_batch(model.queue.lanes(), now_s, limits, model.layout.run_times)
            model.queue.remove(plan.expired)
            expired += plan.expired
            if plan.take:
                job = self._start(model, plan.take, now_s)
                self._retire(model)
                return job, expired
            if plan.wake_at_s is not None:
                self._wake_timer_at(model, plan.wake_at_s)
            self._retire(model)
        return None, expired

    def _by_claim(self, now_s: float) -> list[ScheduledModel]:
        models = list(self._active)
        if len(models) == 1:
            return models
        claims = [
            Claim(
                min(policy.effective_priority(head.priority, head.arrived_s, now_s) for head in model.queue.heads()),
                model.served_s,
            )
            for model in models
        ]
        return [models[index] for index in policy.choose_model(claims)]

    def _start(self, model: ScheduledModel, batch: list[Pending], now_s: float) -> Job:
        model.queue.remove(batch)
        rows = sum(request.rows for request in batch)
        is_alone = not self._running and not model.queue.rows and len(self._active) == 1
        is_alone = is_alone and model.lonely_runs >= LONELY_RUNS
        layout = model.wide if model.wide is not None and is_alone else model.layout
        job = Job(model, layout, batch, rows, now_s, now_s + layout.run_times.mean_s(rows))
        self._running.add(job)
        self._free -= layout.threads
        model.running += 1
        return job


def expired_error(request: Pending, now_s: float) -> DeadlineExceeded:
    """The outcome of a request whose deadline cannot be, or was not, met."""
    return DeadlineExceeded(
        f"waited {(now_s - request.arrived_s) * 1e3:.1f} ms of its {request.timeout_s * 1e3:.1f} ms"
    )
