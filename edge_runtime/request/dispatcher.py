"""The models that share the cores: which requests wait, which jobs run, which cores are free.

Owns: queues, cores and running jobs, under one short lock. It applies the rules of policy.py and runs nothing itself:
worker.py's threads ask for jobs and report them finished, servables admit; `runs` begins jobs that need no thread, on
that of the caller. Every public method may be called from any thread; requests are answered and refused, and runs
begun, outside the lock, by the caller that got them.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Protocol

from msgspec.structs import replace

from edge_runtime.clock import Clock
from edge_runtime.config.settings import DEFAULT_PRIORITY, FIRST_PRIORITY
from edge_runtime.errors import (
    CalledTooSoon,
    Cancelled,
    DeadlineExceeded,
    DeadlineUnmeetable,
    Draining,
    EdgeRuntimeError,
    QueueFull,
    Unsupported,
)
from edge_runtime.request import policy
from edge_runtime.request.level_queue import LevelQueue
from edge_runtime.request.policy import Allowance, BatchLimits, ChainLoad, Claim, Load
from edge_runtime.request.queue import LineEnd, RequestQueue, end_of, in_turn
from edge_runtime.request.request import Arrival, Request, StreamingReply
from edge_runtime.request.scheduled_model import LONELY_RUNS, BegunRun, Job, Layout, ScheduledModel
from edge_runtime.request.senders import Refusals

WIDE_AGAIN_RUNS = 16
"""Where all cores together are slower than one, since other processes have them, they are tried again this often."""

TIMER_STEP_S = 0.0005
"""The timer never sleeps less: deadlines are given in milliseconds, and a finer step only burns a core."""

LONGEST_SLEEP_S = 3600.0
"""The timer never sleeps longer: a deadline may be any finite number, and one of 300 years is more than the system's
clocks can wait for."""

UNDISTURBED_S = 1.0
"""A run is handed to its host while all cores are taken only when no other model ran for this long: the run begins as
soon as another ends, so a request of another model that comes meanwhile would find the core taken."""

SHORT_RUN_S = 0.001
"""Of a shorter run a batch is handed ahead though it is not full: the way to its host and back takes as long."""

WIDE_GAIN = 0.9
"""A run on all cores in place of runs side by side must take at most this part of their time: its cores idle between it
and the next."""

TOGETHER_ROWS = 64
"""At most this many rows are admitted as one request: those of two drains of a transport."""

MOST_GIVEN_WAY = 16
"""At most this many requests give way to a new one: one of many rows must not empty a queue of small ones."""


class Runs(Protocol):
    """Begins jobs whose runs no thread waits for. Thread: any; never raises."""

    def begin(self, job: Job) -> None:
        """Begin a job that has its cores."""
        ...

    def drive(self) -> None:
        """Ask for jobs, as long as there are, and begin them."""
        ...


class Dispatcher:
    """Admission, choice of the next job, and accounts of the cores.

    works: requests queued, runs started and runs ended so far. Read without the lock, by who asks whether any was.
    taken_s, low_s: seconds of cores that all runs took, and those of low work alone, since `count_work`.
    is_slowed: an allowance bounds runs. refuses_from: the priority from which on it refuses requests, math.inf where it
    refuses none. Both are values, set once an allowance: without one no request pays for them by a call.
    """

    def __init__(self, clock: Clock, cores: int, max_run_s: float = 0.050) -> None:
        self._clock = clock
        self._cores = cores
        self._max_run_s = max_run_s
        self._free = cores
        # Invariant: what runs may take now, _cores where nothing bounds them; _free is of these.
        self._usable = cores
        # Invariant: cores that an allowance leaves to urgent work alone, _cores - _usable.
        self._withheld = 0
        self._allowance: Allowance | None = None
        self.is_slowed = False
        self.refuses_from = math.inf
        self._taught_apart: list[tuple[ScheduledModel, Layout]] = []
        self._running: set[Job] = set()
        self._active: dict[ScheduledModel, None] = {}
        self._refusals = Refusals()
        self._lock = threading.Lock()
        self.has_work = threading.Condition(self._lock)
        self.has_timer = threading.Condition(self._lock)
        self._has_drained = threading.Condition(self._lock)
        self._idle_workers = 0
        self._bursts = 0
        self._waiting_jobs = 0
        self._ahead: list[Job] = []
        self._last: ScheduledModel | None = None
        self._disturbed_s = -math.inf
        # Invariant: without a circle, so that no run waits for itself, through whatever others.
        self._calls: dict[ScheduledModel, set[str]] = {}
        self._chains, self._promised_s = 0, 0.0
        self._alarms: dict[Callable[[], None], float] = {}
        self._handed: deque[Job] = deque()
        self.runs: Runs | None = None
        self.works = 0
        self.taken_s, self.low_s = 0.0, 0.0
        self._low_from: int | None = None
        self.is_stopping = False
        # Invariant: -inf while the timer is awake, which looks at every model's `wake_at_s` before it sleeps. Waking it
        # for a deadline that it looks at in time anyway would cost each request a switch of threads.
        self._timer_sleeps_until_s = -math.inf

    @property
    def cores(self) -> int:
        """Cores that all runs share."""
        return self._cores

    def count_work(self, low_priority: int) -> None:
        """Count from now on the cores that all work and low work take. low_priority: as of an `Allowance`."""
        self._low_from = low_priority

    def allow(self, allowance: Allowance | None) -> None:
        """Bound the runs that begin from now on; None: they may have all cores. Thread: any."""
        if allowance == self._allowance:
            return
        with self._lock:
            usable = self._cores if allowance is None else max(min(allowance.cores, self._cores), 0)
            self._free += usable - self._usable
            self._usable, self._withheld, self._allowance = usable, self._cores - usable, allowance
            self.is_slowed = allowance is not None
            refuses = allowance is not None and allowance.refuses_low
            self.refuses_from = allowance.low_priority if allowance is not None and refuses else math.inf
            if allowance is None:
                self._forget_taught_apart()
            is_waiting = bool(self._active)
            self.has_work.notify_all()
        if is_waiting and self.runs is not None:
            self.runs.drive()

    def refusal_of_low(self, priority: int) -> QueueFull | None:
        """Return the error that refuses requests of a priority, `refuses_from` or beyond; None: they are not any more.

        Takes no lock. Thread: any.
        """
        allowance = self._allowance
        if allowance is None or not allowance.refuses_low or priority < allowance.low_priority:
            return None
        return QueueFull(
            f"the device is too hot: requests of priority {allowance.low_priority} and less urgent ones are refused "
            "until it has cooled",
            retry_after_ms=allowance.retry_s * 1e3,
        )

    def admit(self, model: ScheduledModel, request: Request) -> None:
        """Queue a request, or begin its run at once, or raise.

        Raises Draining (the model was closed: resolve it again), QueueFull, DeadlineUnmeetable. Thread: any.
        """
        runs, drives = self.runs, False
        with self._lock:
            if not model.is_open:
                raise _replaced(model)
            if self._allowance is not None and request.origin.is_check:
                request.priority = FIRST_PRIORITY  # the watchdog must not take slowed work for a hang
            refusal = self._judge(model, request)
            if refusal is not None:
                raise refusal
            job = self._start_at_once(model, request) if runs is not None and model.layout.begins else None
            if job is None:
                given_way = self._make_room(model, request)
                if isinstance(model.queue, LevelQueue) and model.queue.line is not None:
                    model.queue.line.join(request)
                self._queue(model, request)
                if not self._bursts and (self._free + self._withheld > 0 or self._room_ahead(model)):
                    drives = self._wake_for(model)
        if job is not None:
            assert runs is not None
            runs.begin(job)
            return
        for other, error in given_way:
            other.refuse(error)
        if drives and runs is not None:
            runs.drive()

    def judge(self, model: ScheduledModel, arrival: Arrival) -> tuple[EdgeRuntimeError | None, bool]:
        """Return the error that `admit` would refuse an arrival with now, and whether that holds for more like it.

        None: `admit` decides. More like it: of its plan and its sender, until something is admitted. An idle model
        learns from each refusal, so each is judged by itself there. Thread: any.
        """
        with self._lock:
            if not model.is_open:
                return None, False
            return self._judge(model, arrival), self._is_busy()

    def foresee(self, model: ScheduledModel, arrival: Arrival) -> None:
        """Raise DeadlineUnmeetable where a request whose tensors have not come would be refused now. Thread: any."""
        with self._lock:
            refusal = self._judge_deadline(model, arrival) if arrival.timeout_s != math.inf else None
        if refusal is not None:
            raise refusal

    def forecast_s(self, model: ScheduledModel, arrival: Arrival) -> float:
        """Seconds until an arrival would be answered: its wait and its run. Thread: any."""
        with self._lock:
            return self._wait_s(model, arrival) + model.layout.run_times.predict_s(arrival.rows)

    def begin_burst(self) -> None:
        """Wake no worker for requests admitted until `end_burst`. Thread: any.

        One woken sooner takes the first request of many alone, and both threads then pass the interpreter to and fro.
        """
        with self._lock:
            self._bursts += 1

    def end_burst(self, taken: int = 0) -> None:
        """Begin the runs that can begin without a worker, and wake as many workers as can start a run now.

        taken: runs that the caller begins itself.
        """
        with self._lock:
            self._bursts -= 1
            drives = any(model.layout.begins for model in self._active)
        if drives and self.runs is not None:
            self.runs.drive()
        with self._lock:
            if not self._idle_workers or not any(not model.layout.begins for model in self._active):
                return
            runs = sum(-(-model.queue.rows // max(model.limits.max_rows, 1)) for model in self._active)
            able = max(self._free + self._withheld, 0)
            if runs > able and len(self._active) == 1:
                able = max(able, self._room_ahead(next(iter(self._active))))
            able = min(able - taken, runs - taken, self._idle_workers)
            if able > 0:
                self.has_work.notify(able)

    def cancel(self, model: ScheduledModel, request: Request) -> bool:
        """Refuse a request as cancelled that waits, or is answered in parts; False: any other run, or it has ended."""
        with self._lock:
            if request.share is not None:
                model.queue.remove([request])
                _leave_lines([request])
                self._retire(model)
            elif not any(_leave_run(job, request) for job in self._running):
                return False
        request.refuse(Cancelled("cancelled by its caller"))
        return True

    def refuse(self, request: Request, error: EdgeRuntimeError, least_s: float = 0.0) -> None:
        """Refuse a request that was not admitted; later, where refusing its sender costs too much.

        least_s: of a core, the least that refusing it cost. Thread: any.
        """
        with self._lock:
            is_held = not self.is_stopping and self._refusals.hold(request, error, self._clock.monotonic_s(), least_s)
            until_s = self._refusals.next_s()
            if is_held and until_s is not None and until_s < self._timer_sleeps_until_s:
                self.has_timer.notify()
        if not is_held:
            request.refuse(error)

    def told_now(self, sender: Hashable, model: str, nbytes: int, count: int) -> int:
        """Count refusals of `count` requests of one header that became no `Request`; return how many are sent now.

        `refuse` counts the others, and holds them. nbytes: copied for each, of its tensors. Thread: any.
        """
        with self._lock:
            if self.is_stopping:
                return count
            return self._refusals.pay(sender, model, nbytes, count, self._clock.monotonic_s())

    def observe_refusals(self, cpu_s: float, count: int, nbytes: int = 0) -> None:
        """Learn the cost of refusals: `cpu_s` of one core for `count` requests, with `nbytes` of tensors in all.

        Thread: any.
        """
        with self._lock:
            self._refusals.observe(cpu_s, count, nbytes)

    def due_refusals(self) -> tuple[list[Request], float]:
        """Held requests to complete now, and the instant to look again (inf: none is held). Thread: the timer's."""
        with self._lock:
            found = self._refusals.due(self._clock.monotonic_s())
            until_s = self._refusals.next_s()
            return found, math.inf if until_s is None else until_s

    def set_alarm(self, call: Callable[[], None], instant_s: float) -> None:
        """Have the timer call a function at an instant (inf: not at all), in place of the one set before.

        For deadlines that are in no queue and no run: a chain's between its steps. The call must not wait. Thread: any.
        """
        with self._lock:
            if instant_s == math.inf:
                self._alarms.pop(call, None)
                return
            self._alarms[call] = instant_s
            if instant_s < self._timer_sleeps_until_s:
                self.has_timer.notify()

    def due_alarms(self) -> tuple[list[Callable[[], None]], float]:
        """Functions to call now, each once, and the instant to look again (inf: none is set). Thread: the timer's."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            found = [call for call, instant_s in self._alarms.items() if instant_s <= now_s]
            for call in found:
                del self._alarms[call]
            return found, min(self._alarms.values(), default=math.inf)

    def observe_late_refusals(self, cpu_s: float, count: int) -> None:
        """Learn the time that sending `count` held refusals took of the timer. Thread: the timer's."""
        with self._lock:
            self._refusals.observe_late(cpu_s, count)

    def tell_refusals(self) -> None:
        """Send every held refusal now. Thread: one that stops doors."""
        with self._lock:
            found = self._refusals.due(math.inf)
        for request in found:
            request.complete()

    def drop(self, sender: Hashable) -> int:
        """Cancel every request of a sender that is gone that waits, or is answered in parts; return how many.

        Other runs go on. Thread: any.
        """
        with self._lock:
            dropped = self._refusals.remove_sender(sender, self._clock.monotonic_s())
            for model in list(self._active):
                removed = model.queue.remove_sender(sender)
                _leave_lines(removed)
                dropped += removed
                self._retire(model)
            for job in self._running:
                for request in job.batch:
                    if request.sender == sender and not request.is_given_up:
                        request.is_given_up = True
                        if _leave_run(job, request):
                            dropped.append(request)
        for request in dropped:
            request.refuse(Cancelled("its sender is gone"))
        return len(dropped)

    def rows_together(self, model: ScheduledModel) -> int:
        """Most rows of one sender's small requests that may be one request; 0: each is to be one by itself.

        Only where a run is so short that the cost of a request here counts for more than which of them run together.
        """
        with self._lock:
            limits, times = model.limits, model.layout.run_times
            rows = min(limits.max_rows, TOGETHER_ROWS)
            is_plain = not limits.max_delay_s and not limits.preferred_rows and not model.culprits
            is_plain = is_plain and isinstance(model.queue, RequestQueue)
            return rows if is_plain and times.mean_s(rows) <= SHORT_RUN_S else 0

    def starts_at_once(self, model: ScheduledModel, rows: int) -> bool:
        """Whether the run of one more request would begin now: its sender counts for nothing then. Thread: any.

        A change meanwhile may prove it wrong.
        """
        with self._lock:
            if self.runs is None or not model.layout.begins or not self._may_start(model):
                return False
            is_free = self._free >= model.layout.threads and model.running < model.layout.concurrency
            return is_free or self._room_ahead(model, rows) > 0

    def take_apart(self, job: Job) -> list[Request]:
        """Have each request of a failed job stand for itself; return those that are unanswered."""
        with self._lock:
            parts: list[Request] = []
            for request in job.unanswered():
                if request.split is None:
                    parts.append(request)
                else:
                    parts += request.split(request)
            job.batch, job.ended = parts, set()
            return parts

    def hand_over(self, job: Job) -> None:
        """Have a worker take a job that was started, or whose run has ended. Thread: any."""
        with self._lock:
            self._handed.append(job)
            self.has_work.notify()

    def next_job(self, *, waits: bool = False) -> tuple[Job | None, list[Request]]:
        """The next batch to run, and requests found expired, which the caller refuses.

        waits: sleep until there is one of them, one that was handed over, or `stop`. Thread: workers; without `waits`
        any.
        """
        with self._lock:
            while not (waits and self.is_stopping):
                if waits and self._handed:
                    return self._handed.popleft(), []
                if len(self._active) == 1 and self._room_ahead(model := next(iter(self._active))):
                    found = self._hand_ahead(model)
                else:
                    found = self._next_run()
                if any(found) or not waits:
                    return found
                self._idle_workers += 1
                self.has_work.wait()
                self._idle_workers -= 1
            return None, []

    def claim(self, job: Job, request: Request) -> bool:
        """Whether the caller is to answer a request of a job that goes on: True once, False when the timer did."""
        with self._lock:
            if request in job.ended:
                return False
            job.ended.add(request)
            if request.line is not None:
                request.line.leave(request, end_of(request))
            return True

    def finish(self, job: Job, run_s: float | None) -> None:
        """Free the job's cores; the caller then answers the requests of `job.unanswered`.

        run_s: None when it failed, so that failures do not teach the forecast.
        """
        with self._lock:
            self._end(job)
            model = job.model
            model.lonely_runs = model.lonely_runs + 1 if not self._running and not self._active else 0
            if run_s is not None:
                model.served_s += max(run_s - job.waited_s, 0.0) * job.layout.threads
                if self.is_slowed:
                    self._teach_apart(model, job.layout)
                if not job.is_ahead:  # else it ended before the run that it seemed to wait for: nobody knows its time
                    job.layout.run_times.observe(job.rows, run_s)

    def teach_apart(self, model: ScheduledModel) -> None:
        """Have runs that end while the device is slowed teach a copy of a model's curve, and be counted apart.

        Thread: any.
        """
        with self._lock:
            if self.is_slowed:
                self._teach_apart(model, model.layout)

    def run_again(self, job: Job, again: Sequence[Request], culprit: Request | None) -> None:
        """Free the cores of a job whose run its host ended, and queue these requests of it again; others are answered.

        culprit: the request that ended the host, None where that is not known.
        """
        with self._lock:
            model, now_s = job.model, self._clock.monotonic_s()
            model.served_s += (now_s - job.started_s) * job.layout.threads
            if culprit is not None:
                model.culprits.add(culprit.sender, now_s)
                for request in model.queue.remove_sender(culprit.sender):
                    request.shape = policy.ALONE
                    model.queue.push(request)  # its place in its line stays
            for request in again:
                if request not in job.ended:
                    job.ended.add(request)
                    self._queue(model, request)
            self._end(job)

    def take_overdue(self) -> list[BegunRun]:
        """Runs that were begun and are over their limits, each once, for the caller to give up. Thread: the timer's."""
        with self._lock:
            overdue = []
            for job in self._running:
                if job.run is not None and job.run.left_s() <= 0:
                    overdue.append(job.run)
                    job.run = None
            return overdue

    # ---- runs that call other models ---------------------------------------------------------------------------------

    def begin_call(self, model: str) -> tuple[Job, list[Request]]:
        """Let the run of this thread wait for another model: its cores are free until `end_call`.

        Returns the job, and its requests whose answers wait for the call. Raises CalledTooSoon: this thread runs no
        job; DeadlineExceeded: its answer would be late; Unsupported: the call would wait for itself.
        """
        with self._lock:
            thread = threading.get_ident()
            job = next((each for each in self._running if each.thread == thread), None)
            if job is None:
                raise CalledTooSoon(f"model {model!r} was called by a run that no request asked for")
            waiting = job.unanswered()
            if not waiting:
                raise DeadlineExceeded("the requests of this run have been answered")
            self._add_call(job.model, model)
            self._waiting_jobs += not job.layout.begins
            job.waits_since_s = self._clock.monotonic_s()
            self._free += job.layout.threads
            if self._free + self._withheld > 0 and self._active and self._idle_workers:
                self.has_work.notify()
            return job, list(waiting)

    def end_call(self, job: Job) -> None:
        """Let a run go on. It takes its cores at once: until others end, more run than there are, and none begins."""
        with self._lock:
            if job.waits_since_s is not None:
                self._end_wait(job, job.waits_since_s)

    @property
    def workers_wanted(self) -> int:
        """Threads that are to run jobs.

        For each core one whose run is on and one whose run is handed ahead, and one for each run that a worker waits
        for and that waits for another model.
        """
        return 2 * self._cores + self._waiting_jobs

    # ---- chains of steps ---------------------------------------------------------------------------------------------
    #
    # A pipeline is a scheduled model that never runs by itself (concurrency 0): its queue holds the requests that wait
    # before their first step, and `running` counts those under way. Each of their steps is a request to another model.

    def chain_load(
        self, chain: ScheduledModel, models: Sequence[ScheduledModel], request: Request
    ) -> tuple[int, ChainLoad, list[float]]:
        """Return the load before a new request to a pipeline.

        Returns the rows that wait for the pipeline and begin before it, runs that chains under way still ask for, and
        how long it would wait for each of these models now. Thread: any.
        """
        with self._lock:
            now_s = self._clock.monotonic_s()
            rows = chain.queue.rows_before(request, now_s, 1) if chain.queue.rows else 0
            waits_s = [self._wait_s(model, request) for model in models]
            if (allowance := self._allowance) is not None:
                waits_s = [
                    self._slowed_s(model, request.priority, wait_s, allowance)
                    for model, wait_s in zip(models, waits_s, strict=True)
                ]
            return rows, ChainLoad(self._promised_s), waits_s

    def queue_chain(self, chain: ScheduledModel, request: Request) -> None:
        """Have a request wait before its first step. Raises Draining, QueueFull. Thread: any."""
        with self._lock:
            if not chain.is_open:
                raise _replaced(chain)
            refusal = self._judge_room(chain, request)
            if refusal is not None:
                raise refusal
            given_way = self._make_room(chain, request)
            self._queue(chain, request)
        for other, error in given_way:
            other.refuse(error)

    def next_chain(
        self, chain: ScheduledModel, may_begin: Callable[[Request], bool]
    ) -> tuple[Request | None, list[Request]]:
        """Take the request that is to begin now, which `end_chain` ends, and those found expired. Thread: any.

        may_begin: whether that which is first may; asked under the lock.
        """
        with self._lock:
            if not chain.queue.rows:
                return None, []
            now_s = self._clock.monotonic_s()
            plan = policy.plan_batch(chain.queue.in_order(now_s), now_s, chain.limits, chain.layout.run_times)
            chain.queue.remove(plan.expired)
            first = plan.take[0] if plan.take else None
            if first is not None and may_begin(first):
                chain.queue.remove([first], runs_at_s=now_s)
                self._begin_chain(chain)
            else:
                first = None
            self._retire(chain)
            return first, plan.expired

    def begin_chain(self, chain: ScheduledModel) -> None:
        """Count a request that begins without having waited. Raises Draining."""
        with self._lock:
            if not chain.is_open:
                raise _replaced(chain)
            self._begin_chain(chain)

    def promise(self, seconds: float) -> None:
        """Add to the work that chains under way will still ask for, in seconds of one core; less than 0: asked for."""
        with self._lock:
            self._promised_s = max(self._promised_s + seconds, 0.0)

    def end_chain(self, chain: ScheduledModel, promised_s: float) -> None:
        """Count a request to a pipeline that was answered. promised_s: of the runs that it has not asked for."""
        with self._lock:
            chain.running -= 1
            self._chains -= 1
            # Sums of floats drift, so they begin anew where they must be 0.
            self._promised_s = max(self._promised_s - promised_s, 0.0) if self._chains else 0.0
            if not chain.is_open:
                self._tell_drained(chain)

    def mark_down(self, layout: Layout) -> bool:
        """Start no run in a layout whose host ended; True: the caller alone is to have it restored."""
        with self._lock:
            was_up, layout.is_down = not layout.is_down, True
            return was_up

    def mark_up(self, layout: Layout) -> None:
        """Start runs again."""
        with self._lock:
            layout.is_down = False
            self.has_work.notify_all()

    def expire(self) -> tuple[list[Request], float]:
        """Remove requests that cannot make their deadline; return them and the instant to look again (inf: never).

        Those that wait expire when no run could make it any more, those that run at their deadline: their run goes on,
        and its result is dropped. Thread: the timer's.
        """
        with self._lock:
            now_s = self._clock.monotonic_s()
            expired: list[Request] = []
            wake_at_s = math.inf
            for model in list(self._active):
                plan = policy.plan_expiry(model.queue.by_deadline(), now_s, model.layout.run_times)
                model.queue.remove(plan.expired)
                _leave_lines(plan.expired)
                expired += plan.expired
                if model.wake_at_s <= now_s:
                    model.wake_at_s = math.inf
                    self.has_work.notify()
                if plan.wake_at_s is not None:
                    model.wake_at_s = min(model.wake_at_s, plan.wake_at_s)
                if isinstance(model.queue, LevelQueue):
                    expired += model.queue.pass_over(now_s)
                    model.wake_at_s = min(model.wake_at_s, model.queue.next_timeout_s)
                self._retire(model)
                wake_at_s = min(wake_at_s, model.wake_at_s)
            for job in self._running:
                if job.layout.begins:
                    # One that is being begun at this moment has its whole limit left.
                    wake_at_s = min(wake_at_s, now_s + (job.run.left_s() if job.run is not None else job.limit_s))
                for request in job.unanswered():
                    if request.deadline_s <= now_s:
                        job.ended.add(request)
                        expired.append(request)
                    else:
                        wake_at_s = min(wake_at_s, request.deadline_s)
            return expired, wake_at_s

    def wait_for_timer(self, until_s: float) -> None:
        """Sleep until `until_s`, or until an admission needs the timer sooner. Thread: timer."""
        with self._lock:
            if self.is_stopping:
                return
            # An admission may have asked for the timer since `until_s` was found, and be running already.
            until_s = min([until_s, *(model.wake_at_s for model in self._active), *self._running_deadlines()])
            refusal_s = self._refusals.next_s()
            if refusal_s is not None:
                until_s = min(until_s, refusal_s)
            until_s = min([until_s, *self._alarms.values()])
            self._timer_sleeps_until_s = until_s
            sleep_s = max(until_s - self._clock.monotonic_s(), TIMER_STEP_S)
            self.has_timer.wait(min(sleep_s, LONGEST_SLEEP_S))
            self._timer_sleeps_until_s = -math.inf

    def stop(self) -> None:
        """Make `next_job` and `wait_for_timer` return at once from now on."""
        with self._lock:
            self.is_stopping = True
            self.has_work.notify_all()
            self.has_timer.notify_all()

    @property
    def has_waiting(self) -> bool:
        """Whether a request waits in a queue. Takes no lock: who queues one asks for its run as well."""
        return bool(self._active)

    def is_idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        with self._lock:
            return not self._running and not self._active

    def has_spare_core(self) -> bool:
        """Whether a core is free and no request waits for one."""
        with self._lock:
            return self._free > 0 and not self._active

    def close_model(self, model: ScheduledModel, timeout_s: float) -> bool:
        """Stop admitting to a model, wait until its requests are answered, and refuse those left after `timeout_s`.

        A run may still be on then. Returns whether everything was answered in time. Thread: the loader's, or the one
        that stops the daemon.
        """
        with self._lock:
            model.is_open = False
            if model.limits.max_delay_s:
                model.limits = replace(model.limits, max_delay_s=0.0)
                self.has_work.notify_all()
            drained = self._has_drained.wait_for(lambda: not model.running and not model.queue.rows, timeout_s)
            left = model.queue.clear()
            _leave_lines(left)
            self._active.pop(model, None)
            self._taught_apart = [each for each in self._taught_apart if each[0] is not model]
            for job in self._running:
                if job.model is model:
                    running = job.unanswered()
                    left += running
                    job.ended.update(running)
        for request in left:
            request.refuse(Draining("stopped before this request was answered; send it again later"))
        return drained

    def wait_for_runs(self, model: ScheduledModel, timeout_s: float) -> bool:
        """Wait until no run of a closed model is on; False: one still is, and its instance must not be freed."""
        with self._lock:
            return self._has_drained.wait_for(lambda: not model.running, timeout_s)

    def take_all(self, model: ScheduledModel) -> list[Request]:
        """Remove and return every waiting request of a model; the caller refuses or resubmits each."""
        with self._lock:
            waiting = model.queue.clear()
            _leave_lines(waiting)
            self._retire(model)
            return waiting

    def queued(self, model: ScheduledModel) -> tuple[int, int]:
        """Rows and bytes waiting for a model."""
        with self._lock:
            return model.queue.rows, model.queue.nbytes

    # ---- under the lock ---------------------------------------------------------------------------------------------

    def _begin_chain(self, chain: ScheduledModel) -> None:
        chain.running += 1
        self._chains += 1

    def _queue(self, model: ScheduledModel, request: Request) -> None:
        if model not in self._active:
            # A model that was idle earns no credit for it: it starts level with the least served one that runs.
            least_s = min(
                (other.served_s for other in self._active if other.layout.concurrency), default=model.served_s
            )
            model.served_s = max(model.served_s, least_s)
            self._active[model] = None
        self.works += 1
        model.queue.push(request)
        if request.line is not None:
            request.line.join(request)
        if request.deadline_s != math.inf:
            self._wake_timer_at(model, request.deadline_s - model.layout.run_times.predict_s(request.rows))
        if isinstance(model.queue, LevelQueue):
            self._wake_timer_at(model, model.queue.next_timeout_s)

    def _add_call(self, caller: ScheduledModel, called: str) -> None:
        """Keep who calls whom. Raises Unsupported for a call that closes a circle."""
        known = self._calls.get(caller)
        if known is not None and called in known:
            return
        for gone in [each for each in self._calls if not each.is_open and not each.running]:
            del self._calls[gone]
        way = self._way(called, caller.name)
        if way is not None:
            raise Unsupported(
                f"model {caller.name} cannot call {called}, which would wait for {caller.name} itself: "
                f"{' -> '.join([caller.name, *way])}"
            )
        self._calls.setdefault(caller, set()).add(called)

    def _way(self, start: str, end: str) -> list[str] | None:
        """Models on the way of calls from one to another; None where there is none."""
        ways = [[start]]
        seen = {start}
        while ways:
            way = ways.pop()
            if way[-1] == end:
                return way
            for model, called in self._calls.items():
                if model.name == way[-1]:
                    ways += [[*way, each] for each in sorted(called - seen)]
                    seen |= called
        return None

    def _end_wait(self, job: Job, since_s: float) -> None:
        job.waited_s += self._clock.monotonic_s() - since_s
        job.waits_since_s = None
        self._waiting_jobs -= not job.layout.begins
        self._free -= job.layout.threads

    def _is_busy(self) -> bool:
        """Whether a run is on that waits for nothing, or a request waits."""
        return bool(self._active) or any(job.waits_since_s is None for job in self._running)

    def _end(self, job: Job) -> None:
        model = job.model
        self.works += 1
        if job.waits_since_s is not None:
            self._end_wait(job, job.waits_since_s)
        if self._low_from is not None:
            self._count_work(job, self._low_from)
        self._running.discard(job)
        self._free += job.layout.threads
        model.running -= 1
        model.runs_alone = False
        if model.has_lines:
            for request in job.batch:
                if request.line is not None and request.share is None:  # else it runs again
                    request.line.leave(request, LineEnd.REFUSED if request in job.ended else end_of(request))
        if not model.is_open:
            self._tell_drained(model)
        if job.is_ahead:
            self._ahead.remove(job)
        elif self._ahead:
            self._begin_ahead(job.layout)
        # The caller takes one job itself, or all that need no worker; cores beyond that are another worker's.
        idle = self._free + self._withheld
        if idle > 1 and self._idle_workers and any(not each.layout.begins for each in self._active):
            self.has_work.notify()

    def _make_room(self, model: ScheduledModel, request: Request) -> list[tuple[Request, QueueFull]]:
        """Keep the queue's bounds; return requests that gave way, and why, which the caller refuses. Raises QueueFull.

        The last request of a sender that has more waiting gives way: one that fills the queue must not shut others out.
        """
        queue = model.queue
        given_way: list[tuple[Request, QueueFull]] = []
        while queue.rows + request.rows > model.max_queue_rows or queue.nbytes + request.nbytes > model.max_queue_bytes:
            other = queue.one_in_the_way(request) if len(given_way) < MOST_GIVEN_WAY else None
            if other is None:
                for each, _ in given_way:
                    queue.push(each)
                raise self._queue_full(model, request)
            given_way.append((other, self._queue_full(model, other)))
            queue.remove([other])
        _leave_lines([each for each, _ in given_way])
        return given_way

    def _judge(self, model: ScheduledModel, request: Request | Arrival) -> EdgeRuntimeError | None:
        """Return the refusal of a request to an open model; None: `_make_room` decides, where others may give way."""
        if model.culprits and model.culprits.has(request.sender, self._clock.monotonic_s()):
            request.shape = policy.ALONE
        if request.timeout_s != math.inf:
            late = self._judge_deadline(model, request)
            if late is not None:
                return late
        return self._judge_room(model, request)

    def _judge_room(self, model: ScheduledModel, request: Request | Arrival) -> QueueFull | None:
        queue = model.queue
        if isinstance(queue, LevelQueue) and queue.is_full(request):
            return QueueFull(
                f"Exceeds maximum queue size: as many requests wait for model {model.name} as its [queue] allows",
                retry_after_ms=self._wait_s(model, request) * 1e3,
            )
        if queue.rows + request.rows <= model.max_queue_rows and queue.nbytes + request.nbytes <= model.max_queue_bytes:
            return None
        return self._queue_full(model, request) if queue.one_in_the_way(request) is None else None

    def _queue_full(self, model: ScheduledModel, request: Request | Arrival) -> QueueFull:
        queue = model.queue
        if queue.rows + request.rows > model.max_queue_rows:
            wait, bound = f"{queue.rows} rows", model.max_queue_rows
        else:
            wait, bound = f"{queue.nbytes} bytes", model.max_queue_bytes
        return QueueFull(
            f"Exceeds maximum queue size: {wait} wait for model {model.name}, its bound is {bound}",
            retry_after_ms=self._wait_s(model, request) * 1e3,
        )

    def _judge_deadline(self, model: ScheduledModel, request: Request | Arrival) -> DeadlineUnmeetable | None:
        own_wait_s = self._wait_s(model, request)
        if request.shape is policy.ALONE:
            own_wait_s += max(model.culprits.not_before_s(request.sender) - self._clock.monotonic_s(), 0.0)
        wait_s = own_wait_s
        if self._allowance is not None:
            wait_s = self._slowed_s(model, request.priority, own_wait_s, self._allowance)
        run_s = model.layout.run_times.predict_s(request.rows)
        if request.trace is not None:
            request.trace.forecast_s = wait_s + run_s
        if policy.is_meetable(wait_s, run_s, request.timeout_s, request.nbytes, is_step=request.is_step):
            return None
        # What an allowance alone makes late says nothing of how long runs take.
        is_slowed_late = wait_s != own_wait_s and policy.is_meetable(
            own_wait_s, run_s, request.timeout_s, request.nbytes, is_step=request.is_step
        )
        if not is_slowed_late and not self._is_busy():
            model.layout.run_times.relax()
        return DeadlineUnmeetable(
            f"forecast {(wait_s + run_s) * 1e3:.1f} ms, timeout {request.timeout_s * 1e3:.1f} ms",
            retry_after_ms=max(wait_s + run_s - request.timeout_s * policy.ADMISSION_MARGIN, 0.0) * 1e3,
        )

    def _wait_s(self, model: ScheduledModel, request: Request | Arrival) -> float:
        if not self._is_busy():
            return 0.0
        now_s = self._clock.monotonic_s()
        own_s = model.work_s(model.queue.rows_before(request, now_s, model.limits.max_rows))
        running_s, all_s, models = 0.0, own_s, 1
        for job in self._running:
            if job.waits_since_s is None:
                running_s += job.left_s(now_s) * job.layout.threads
        for other in self._active:
            # What waits before a pipeline's first step is in no model's way yet.
            if other is not model and other.layout.concurrency:
                all_s += other.work_s(other.queue.rows_at(request.priority))
                models += 1
        load = Load(running_s, own_s, all_s, models)
        cores = self._usable if request.priority >= DEFAULT_PRIORITY else self._cores
        return policy.forecast_wait_s(load, max(cores // model.layout.threads, 1))

    # ---- what an allowance leaves; under the lock too ----------------------------------------------------------------

    def _slowed_s(self, model: ScheduledModel, priority: int, wait_s: float, allowance: Allowance) -> float:
        """Return how long a new request waits, which would wait for `wait_s` if no work were slowed."""
        if priority < allowance.low_priority and not model.may_slow:
            return wait_s
        held_s = self._held_s(model, self._clock.monotonic_s(), allowance)
        return held_s + wait_s / allowance.low_share if allowance.low_share > 0 else math.inf

    def _low_rate(self, model: ScheduledModel, allowance: Allowance) -> float:
        layout = model.layout
        return allowance.low_share * max(min(self._usable // max(layout.threads, 1), layout.concurrency), 1)

    def _held_s(self, model: ScheduledModel, now_s: float, allowance: Allowance) -> float:
        """Return how long low work of a model is held back from now; 0: it may run."""
        rate = self._low_rate(model, allowance)
        elapsed_s = min(now_s - model.low_since_s, policy.LONGEST_PAUSE_S + 1.0)
        model.low_credit_s = policy.low_credit_s(model.low_credit_s, elapsed_s, rate)
        model.low_since_s = now_s
        return -model.low_credit_s / rate if model.low_credit_s < 0 else 0.0

    def _runs_below(self, model: ScheduledModel, now_s: float, allowance: Allowance) -> float | None:
        """Return the priority below which a model's waiting requests may run now; None: none of them may.

        Where the cores that an allowance leaves are taken, the others are for urgent work.
        """
        below = self._held_from(model, now_s, allowance)
        if self._free <= 0:
            below = min(below, DEFAULT_PRIORITY)
        if below == math.inf:
            return below
        return below if below > 0 and model.queue.rows_at(int(below) - 1) else None

    def _held_from(self, model: ScheduledModel, now_s: float, allowance: Allowance) -> float:
        """Return the priority from which on a model's requests are held back now; math.inf: none is.

        A model that is closed answers what it has admitted: who swaps it waits for that.
        """
        if not model.is_open:
            return math.inf
        held_s = self._held_s(model, now_s, allowance)
        if not held_s:
            return math.inf
        self._wake_timer_at(model, now_s + held_s)
        return -math.inf if model.may_slow else allowance.low_priority

    def _teach_apart(self, model: ScheduledModel, layout: Layout) -> None:
        if layout.own_times is None:
            layout.own_times, layout.run_times = layout.run_times, layout.run_times.copy()
            self._taught_apart.append((model, layout))
            model.metrics.begin_slowed()

    def _forget_taught_apart(self) -> None:
        """Have the curves be again what they were before the device was slowed."""
        for model, layout in self._taught_apart:
            model.metrics.end_slowed()
            if layout.own_times is not None:
                layout.run_times, layout.own_times = layout.own_times, None
        self._taught_apart.clear()

    def _take_low(self, job: Job, allowance: Allowance) -> None:
        """Charge a job of low work alone, as long as it should take."""
        if _is_low(job, allowance.low_priority):
            job.low_s = job.ends_s - job.started_s
            job.model.low_credit_s -= job.low_s

    def _count_work(self, job: Job, low_from: int) -> None:
        """Correct the charge of a job by how long it took, and count it."""
        taken_s = max(self._clock.monotonic_s() - job.started_s - job.waited_s, 0.0)
        if job.low_s is not None:
            job.model.low_credit_s += job.low_s - taken_s
        self.taken_s += taken_s * job.layout.threads
        if _is_low(job, low_from):
            self.low_s += taken_s * job.layout.threads

    # ---- runs that begin and end; under the lock too -----------------------------------------------------------------

    def _running_deadlines(self) -> Iterator[float]:
        return (request.deadline_s for job in self._running for request in job.unanswered())

    def _retire(self, model: ScheduledModel) -> None:
        """Forget a model with an empty queue until it has a request again."""
        if model.queue.rows:
            return
        self._active.pop(model, None)
        model.wake_at_s = math.inf
        if not model.is_open:
            self._tell_drained(model)

    def _tell_drained(self, model: ScheduledModel) -> None:
        """Wake the thread that closes a model, once its last request has ended."""
        if not model.running and not model.queue.rows:
            self._has_drained.notify_all()

    def _wake_timer_at(self, model: ScheduledModel, instant_s: float) -> None:
        if instant_s < model.wake_at_s:
            model.wake_at_s = instant_s
            if instant_s < self._timer_sleeps_until_s:
                self.has_timer.notify()

    def _next_run(self) -> tuple[Job | None, list[Request]]:
        """Start the run that is next, of the model whose turn it is; also return requests that expired on the way."""
        models = list(self._active)
        expired: list[Request] = []
        free = self._free + self._withheld
        if free <= 0 or not models:
            return None, expired
        now_s = self._clock.monotonic_s()
        for model in models if len(models) == 1 else self._by_claim(models, now_s):
            if model.running >= model.layout.concurrency or model.layout.is_down or model.runs_alone:
                continue
            if isinstance(model.queue, LevelQueue):
                expired += model.queue.pass_over(now_s)
            below = math.inf if self._allowance is None else self._runs_below(model, now_s, self._allowance)
            if below is None:
                continue
            lost: list[Request] = []
            waiting = _in_order(model, now_s, lost, below)
            if model.culprits:
                waiting = self._due(model, waiting, now_s)
                if not waiting and not lost:
                    continue
            if model.layout.threads > free:
                # Its turn: keep the free cores for it, or smaller runs of others would starve it.
                break
            plan = policy.plan_batch(waiting, now_s, self._limits(model), model.layout.run_times)
            if plan.expired or lost:
                gone = plan.expired + lost
                model.queue.remove(gone)
                _leave_lines(gone)
                expired += gone
            if plan.take and plan.take[0].shape is policy.ALONE and model.running:
                continue  # its turn, when the model's other runs have ended
            if plan.take:
                return self._start(model, plan.take, now_s), expired
            if plan.wake_at_s is not None:
                self._wake_timer_at(model, plan.wake_at_s)
            self._retire(model)
        return None, expired

    def _limits(self, model: ScheduledModel) -> BatchLimits:
        """Return the limits of a model's next run: short beside others, and alone such that no core is without one."""
        limits, layout = model.limits, model.layout
        if len(self._active) > 1:
            return replace(limits, max_run_s=min(limits.max_run_s, self._max_run_s))
        slots = min(self._free // layout.threads, layout.concurrency - model.running)
        if slots < 2 or limits.preferred_rows or limits.in_order or limits.max_delay_s:
            return limits
        rows = policy.shared_rows(model.queue.rows, limits, slots, layout.run_times)
        if rows == limits.max_rows or self._is_wide_quicker(model, rows):
            return limits
        return replace(limits, max_rows=rows)

    def _is_wide_quicker(self, model: ScheduledModel, rows: int) -> bool:
        """Whether all that waits on all cores ends clearly before shares of this many rows, which slow one another."""
        wide = model.wide
        if wide is None or wide.is_down or wide.threads > self._usable:
            return False
        return wide.run_times.mean_s(model.queue.rows) < model.layout.run_times.mean_s(rows) * WIDE_GAIN

    def _wake_for(self, model: ScheduledModel) -> bool:
        """Wake a worker for a model that has work; False: none is needed, for the caller drives."""
        if model.layout.begins and self.runs is not None:
            return True
        if self._idle_workers:
            self.has_work.notify()
        return False

    def _start_at_once(self, model: ScheduledModel, request: Request) -> Job | None:
        """Start a request's run where nothing waits, and nothing has to be weighed: it needs no place in a queue."""
        layout = model.layout
        if self._bursts or request.shape is policy.ALONE or not self._may_start(model):
            return None
        line = request.line
        if line is not None and (line.first is not None or line.why_not(request) is not None):
            return None
        now_s = self._clock.monotonic_s()
        allowance = self._allowance
        if allowance is not None and request.priority >= self._held_from(model, now_s, allowance):
            return None
        if self._free >= layout.threads and model.running < layout.concurrency:
            job = self._start(model, [request], now_s)
        elif self._room_ahead(model, request.rows):
            job = self._start_ahead(model, [request], now_s, self._turn_ahead_s(model, now_s))
        else:
            return None
        if request.deadline_s < self._timer_sleeps_until_s:
            self.has_timer.notify()
        return job

    def _may_start(self, model: ScheduledModel) -> bool:
        """Whether nothing speaks against a run of a new request, but that cores or runners are taken."""
        limits = model.limits
        if self._active or model.layout.is_down or model.runs_alone or model.culprits:
            return False
        return not (limits.max_delay_s or limits.preferred_rows or isinstance(model.queue, LevelQueue))

    def _room_ahead(self, model: ScheduledModel, new_rows: int = 0) -> int:
        """Runs of a model that may be handed to its host now, though its runners are at work.

        Only while it is alone: another model would find the cores taken. Full batches, or short ones. new_rows: beside
        those that wait.
        """
        layout = model.layout
        room = layout.concurrency + layout.ahead - model.running
        if not layout.ahead or room <= 0 or model.running != len(self._running) or layout.is_down or model.culprits:
            return 0
        if self._free >= layout.threads and model.running < layout.concurrency:
            return 0  # it may begin at once
        has_wide = model.wide is not None and any(job.layout is not layout for job in self._running)
        if model.runs_alone or len(self._active) > 1 or has_wide or self._allowance is not None:
            return 0
        rows, most = model.queue.rows + new_rows, max(model.limits.max_rows, 1)
        run_s = layout.run_times.mean_s(min(rows, most))
        if run_s > self._max_run_s or (rows < most and run_s > SHORT_RUN_S) or not rows:
            return 0
        if model is not self._last or self._clock.monotonic_s() - self._disturbed_s < UNDISTURBED_S:
            return 0
        return min(room, max(rows // most, 1))

    def _hand_ahead(self, model: ScheduledModel) -> tuple[Job | None, list[Request]]:
        """Start the run that waits in its host until one of those under way has ended. Nothing expires here."""
        now_s = self._clock.monotonic_s()
        start_s = self._turn_ahead_s(model, now_s)
        # What would be too late by then may still be on time when a run ends sooner: it waits, and expires by itself.
        waiting = _in_order(model, now_s, [])
        take = policy.plan_batch(waiting, start_s, model.limits, model.layout.run_times).take
        if not take or take[0].shape is policy.ALONE:
            return None, []
        return self._start_ahead(model, take, now_s, start_s), []

    def _turn_ahead_s(self, model: ScheduledModel, now_s: float) -> float:
        """When the next run that is handed ahead should begin."""
        ends_s = sorted(job.ends_s for job in self._running)
        return max(ends_s[max(len(ends_s) - model.layout.concurrency, 0)], now_s)

    def _start_ahead(self, model: ScheduledModel, batch: list[Request], now_s: float, start_s: float) -> Job:
        """As `_start`, for a run that waits in its host until `start_s`."""
        job = self._start(model, batch, now_s)
        job.limit_s += max((other.limit_s for other in self._running if other is not job), default=0.0)
        job.is_ahead = True
        self._ahead.append(job)
        job.started_s, job.ends_s = start_s, job.ends_s + start_s - now_s
        return job

    def _begin_ahead(self, layout: Layout) -> None:
        """Note that a run has ended, so the first of those that wait in the host has begun."""
        job = next((each for each in self._ahead if each.layout is layout), None)
        if job is not None:
            now_s = self._clock.monotonic_s()
            self._ahead.remove(job)
            job.is_ahead = False
            job.started_s, job.ends_s = now_s, now_s + layout.run_times.mean_s(job.rows)

    def _due(self, model: ScheduledModel, waiting: Iterable[Request], now_s: float) -> list[Request]:
        """Return the waiting requests, but those of culprits that must wait longer."""
        due: list[Request] = []
        for request in waiting:
            due_s = model.culprits.not_before_s(request.sender) if request.shape is policy.ALONE else now_s
            if due_s <= now_s:
                due.append(request)
            else:
                self._wake_timer_at(model, due_s)
        return due

    def _by_claim(self, models: list[ScheduledModel], now_s: float) -> list[ScheduledModel]:
        claims = [Claim(model.queue.first_priority(now_s), model.served_s) for model in models]
        return [models[index] for index in policy.choose_model(claims)]

    def _start(self, model: ScheduledModel, batch: list[Request], now_s: float) -> Job:
        """Take a batch out of its queue, where it waits there, and the cores that its run has."""
        model.queue.remove(batch, runs_at_s=now_s)
        if model.has_lines:
            for request in batch:
                if request.line is not None:
                    request.line.join(request)
                    request.line.begin(request)
        rows = batch[0].rows if len(batch) == 1 else sum(request.rows for request in batch)
        is_alone = not self._running and not model.queue.rows and len(self._active) == 1
        is_alone = is_alone and model.lonely_runs >= LONELY_RUNS
        wide, layout = model.wide, model.layout
        if batch[0].shape is policy.ALONE:
            model.runs_alone = True
        elif wide is not None and is_alone and not wide.is_down and wide.threads <= self._usable:
            is_quicker = wide.run_times.mean_s(rows) <= layout.run_times.mean_s(rows)
            layout = wide if is_quicker or model.lonely_runs % WIDE_AGAIN_RUNS == 0 else layout
        if model is not self._last:
            self._last, self._disturbed_s = model, now_s
        ends_s = now_s + layout.run_times.mean_s(rows)
        job = Job(model, layout, batch, rows, now_s, ends_s, thread=0 if layout.begins else threading.get_ident())
        if layout.run_limit_s != math.inf:
            job.limit_s = layout.limit_s(rows, sum(request.nbytes for request in batch) if layout.warm_row_bytes else 0)
            if layout.begins and now_s + job.limit_s < self._timer_sleeps_until_s:
                self.has_timer.notify()
        if self._allowance is not None:
            self._take_low(job, self._allowance)
        self.works += 1
        self._running.add(job)
        self._free -= layout.threads
        model.running += 1
        if model in self._active:
            self._retire(model)
        return job


def _in_order(model: ScheduledModel, now_s: float, lost: list[Request], below: float = math.inf) -> Iterable[Request]:
    """Return the waiting requests that may run now, in the order of the queue. lost: as of `in_turn`.

    below: as of `RequestQueue.in_order`.
    """
    waiting = model.queue.in_order(now_s, below)
    return in_turn(waiting, lost) if model.has_lines else waiting


def _is_low(job: Job, low_priority: int) -> bool:
    """Whether a job is low work: one that carries a more urgent request is not."""
    return job.model.may_slow or all(request.priority >= low_priority for request in job.batch)


def _leave_run(job: Job, request: Request) -> bool:
    """Take a request out of a run that answers it in parts, which goes on; whether it was there, without an end."""
    if request not in job.batch or request in job.ended or not isinstance(request.reply, StreamingReply):
        return False
    job.ended.add(request)
    return True


def _leave_lines(requests: Iterable[Request]) -> None:
    """Take requests out of their lines that were waiting, and do not run."""
    for request in requests:
        if request.line is not None:
            request.line.leave(request, LineEnd.REFUSED)


def _replaced(model: ScheduledModel) -> Draining:
    return Draining(f"model {model.name} is being replaced or stopped")
