"""How jobs are begun or run, the timer that expires requests, and the result of a run for each request of its batch.

The one place that judges deadline and failure of runs: a worker's batch, a run in a host, whose end is an event, a
request run alone on its caller's thread, and, by the same rules, the lean inline bursts (infer_frontend.py), which have
no request objects. A run in a host is begun by the thread that admits its requests, and no thread waits for it; a run
inside the daemon is a worker's: take a job, run it, complete its requests. One of the three places where exceptions are
caught broadly: a failing run becomes run_failed, never a dead worker.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from msgspec.structs import replace

from edge_runtime.clock import Clock
from edge_runtime.errors import (
    DeadlineUnmeetable,
    EdgeRuntimeError,
    HostEnded,
    NotReady,
    QueueTimeExpired,
    RunFailed,
    RunTooLong,
    SequenceLost,
)
from edge_runtime.request.dispatcher import Dispatcher
from edge_runtime.request.policy import ALONE
from edge_runtime.request.request import Request, deadline_exceeded, failure_of
from edge_runtime.request.scheduled_model import Job, LatencyModel, Layout, PerRequest, RunResult, ScheduledModel
from edge_runtime.telemetry.tracing import log_fields_of
from edge_runtime.tensors import Array

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""The timer's pause after a bug."""

LOST_RUNS = 10
"""A request is run again this often at most, when its runs are lost for no fault of its own."""

JOIN_S, TOLD_S = 1.0, 10.0
"""Threads have the first to end, once their requests have been answered or refused; the timer has the second for the
refusals that it is sending, of which there may be many."""


LARGE_BYTES = 4 << 20
"""More is copied into a host, or out of it, by a worker: a loop that hears of runs must not stall for a millisecond."""

WRITTEN_BYTES = 64 << 10
"""Larger outputs that are not sent as they are, but written as text, are a worker's too."""


class WorkerPool:
    """Two workers for each core of the dispatcher, more while runs wait for other models, and one timer.

    Also begins the runs that need no worker, on the thread that admits their requests or hears of the run before.
    """

    def __init__(self, dispatcher: Dispatcher, clock: Clock) -> None:
        self._dispatcher = dispatcher
        self._clock = clock
        dispatcher.runs = self
        self._threads: list[threading.Thread] = []
        self._timer: threading.Thread | None = None
        self._lock = threading.Lock()
        self._workers = 0

    def start(self) -> None:
        """Start the threads."""
        self.stand_in()
        self._timer = self._spawn("edge-timer", self._time)

    def stand_in(self) -> None:
        """Start the workers that are wanted and not there: one that waits for another model runs nothing meanwhile.

        They stay: a model has few runs that can wait at the same time. Thread: any.
        """
        with self._lock:
            missing = range(self._workers, self._dispatcher.workers_wanted)
            self._workers += len(missing)
        for index in missing:
            self._spawn(f"edge-worker-{index}", self._work)

    def close(self) -> bool:
        """Stop after the jobs under way; the models must be closed first. Idempotent.

        False: a run inside the daemon does not end, and its thread goes on until the process ends.
        """
        self._dispatcher.stop()
        self._dispatcher.tell_refusals()
        until_s = time.monotonic() + JOIN_S
        for thread in list(self._threads):
            told_s = TOLD_S if thread is self._timer else 0.0
            thread.join(max(until_s + told_s - time.monotonic(), 0.0))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return not self._threads

    @property
    def is_stuck(self) -> bool:
        """Whether `close` left a run behind."""
        return self._dispatcher.is_stopping and bool(self._threads)

    def _spawn(self, name: str, run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]
            thread.start()
        return thread

    def _work(self) -> None:
        dispatcher = self._dispatcher
        while not dispatcher.is_stopping:
            try:
                job, expired = dispatcher.next_job(waits=True)
                if expired:
                    refuse_expired(expired, self._clock)
                if job is not None:
                    self._take(job)
                del job, expired  # while it waits, a worker keeps no request, and no model that was swapped out
            except Exception:  # no bug may end a worker: with the last one, nothing would ever run again
                log.exception("an exception reached a worker's loop")

    def _take(self, job: Job) -> None:
        """Run a job, begin it, or go on with one whose run has ended. Thread: a worker."""
        if job.result is None and job.layout.begins and not _is_large(job):
            self.begin(job)
            return
        result = run_batch(job) if job.result is None else job.result
        if end_job(job, result, self._dispatcher, self._clock):
            self._spawn(f"edge-restore-{job.model.name}", partial(self._restore, job.model, job.layout))

    # ---- runs that no thread waits for -------------------------------------------------------------------------------

    def drive(self) -> None:
        """Begin the runs that may begin now, and hand those over that a worker waits for. Never raises. Thread: any."""
        dispatcher = self._dispatcher
        while dispatcher.has_waiting:
            job, expired = dispatcher.next_job()
            if expired:
                refuse_expired(expired, self._clock)
            if job is not None and job.layout.begins:
                self.begin(job)
            elif job is not None:
                dispatcher.hand_over(job)
            elif not expired:
                return

    def begin(self, job: Job) -> None:
        """Begin a job of a layout that begins its runs. Never raises. Thread: any."""
        if _is_large(job):
            self._dispatcher.hand_over(job)
            return
        layout, batch = job.layout, job.batch
        try:
            parts = _parts(batch)
            ended = partial(self._ended, job)
            if layout.by_request is not None:
                job.run = layout.by_request.begin_requests(parts, job.limit_s, job, ended)
            else:
                assert layout.runner is not None  # its concurrency is 0
                job.run = layout.runner.begin(parts, job.limit_s, job, ended)
        except Exception as error:  # noqa: BLE001 (a library's failure is these requests' answer; failure_of logs it)
            failed = failure_of(error, f"a run of model {job.model.name} failed", log_fields_of(job.batch))
            self._ended(job, failed)

    def _ended(self, job: Job, result: RunResult) -> None:
        """Go on with a job whose run has ended, or have a worker do so, where that may take longer. Never raises.

        Thread: any; the loop's, where all went well.
        """
        try:
            if isinstance(result, list) and len(job.batch) > 1:
                result = _checked(job, result)
            if isinstance(result, EdgeRuntimeError) or _is_long(job, result):
                job.result = result
                self._dispatcher.hand_over(job)
            else:
                end_job(job, result, self._dispatcher, self._clock)
        except Exception:
            log.exception("an exception reached the end of a run")
        self.drive()

    def _restore(self, model: ScheduledModel, layout: Layout) -> None:
        """Wait for a layout's next host, so that no worker does; waiting requests stay queued."""
        try:
            if layout.runner is not None:
                layout.runner.restore()
        except Exception as error:  # noqa: BLE001 (these requests' answer; failure_of logs it)
            if layout is model.wide:
                return  # it stays down, and the other layout runs everything
            reason = failure_of(error, f"the host of model {model.name} was not replaced")
            failed = NotReady(f"model {model.name} has no host: {reason}")
            for request in self._dispatcher.take_all(model):
                request.refuse(failed)
        self._dispatcher.mark_up(layout)

    def _time(self) -> None:
        while not self._dispatcher.is_stopping:
            wake_at_s = self._clock.monotonic_s() + RETRY_S
            try:
                expired, wake_at_s = self._dispatcher.expire()
                refuse_expired(expired, self._clock)
                for run in self._dispatcher.take_overdue():
                    self._spawn("edge-end-run", run.give_up)
                alarms, alarm_s = self._dispatcher.due_alarms()
                for call in alarms:
                    call()
                refused, again_at_s = self._dispatcher.due_refusals()
                wake_at_s = min(wake_at_s, again_at_s, alarm_s)
                if refused:
                    began_s = time.thread_time()
                    for request in refused:
                        request.complete()
                    self._dispatcher.observe_late_refusals(time.thread_time() - began_s, len(refused))
            except Exception:  # no bug may end the timer: nothing would ever expire again
                log.exception("an exception reached the timer's loop")
            self._dispatcher.wait_for_timer(wake_at_s)


def run_job(job: Job, dispatcher: Dispatcher, clock: Clock) -> bool:
    """Run one job and complete each request in it, or queue it again. Thread: a worker.

    Returns whether the layout's host ended: the caller then has it restored.
    """
    return end_job(job, run_batch(job), dispatcher, clock)


def end_job(job: Job, result: RunResult, dispatcher: Dispatcher, clock: Clock) -> bool:
    """Complete each request of a job whose run has ended, or queue it again; as `run_job`.

    Thread: a worker, or for outputs any that may encode them.
    """
    run_s = give_result(job, result, clock)
    if isinstance(result, PerRequest):
        _complete_apart(job, result.answers, run_s, dispatcher, clock)
        return False
    if isinstance(result, EdgeRuntimeError):
        return _after_failure(job, result, dispatcher, clock)
    dispatcher.finish(job, run_s)
    # Invariant: once a job is finished, the timer expires none of its requests.
    _complete(job, dispatcher)
    return False


def _is_large(job: Job) -> bool:
    """Whether writing its inputs takes long."""
    batch = job.batch
    return (batch[0].nbytes if len(batch) == 1 else sum([request.nbytes for request in batch])) > LARGE_BYTES


def _is_long(job: Job, result: list[Array] | PerRequest) -> bool:
    """Whether answering with these outputs may take long."""
    arrays = result if isinstance(result, list) else ()
    nbytes = 0
    for array in arrays:
        nbytes += array.nbytes
    return nbytes > WRITTEN_BYTES and (nbytes > LARGE_BYTES or any(each.reply.writes_text for each in job.batch))


def _complete(job: Job, dispatcher: Dispatcher) -> None:
    """Answer or refuse requests of a finished job. Next steps that the answers ask for, this thread begins itself.

    Another worker that wakes for them would take the interpreter from this one, and begin with the first alone. The
    step after a lone run in a host begins at once, as a request of a door does.
    """
    ended = job.unanswered()
    asks = (len(ended) > 1 or not job.layout.begins) and any(request.is_step for request in ended)
    if asks:
        dispatcher.begin_burst()
    for request in ended:
        request.complete()  # never raises
    if asks:
        dispatcher.end_burst(taken=1)


def _after_failure(job: Job, error: EdgeRuntimeError, dispatcher: Dispatcher, clock: Clock) -> bool:
    """Decide the end of requests whose run gave no outputs; as `run_job`. Thread: a worker."""
    if any(request.count > 1 for request in job.batch) and not dispatcher.take_apart(job):
        dispatcher.finish(job, None)
        return False
    if isinstance(error, HostEnded | RunTooLong):
        return _judge_lost_run(job, error, dispatcher)
    if len(job.batch) > 1:
        return _run_each(job, dispatcher, clock)
    dispatcher.finish(job, None)
    _complete(job, dispatcher)
    return False


def _run_each(job: Job, dispatcher: Dispatcher, clock: Clock) -> bool:
    """Run the requests of a failed batch again one by one, for one bad request must not fail the others.

    As `run_job`. The job keeps its cores meanwhile: these runs are still its own, and the instance may allow no more.
    """
    for request in job.batch:
        if request in job.ended:
            continue
        job.thread = threading.get_ident()
        alone = replace(job, batch=[request], rows=request.rows, started_s=clock.monotonic_s())
        give_result(alone, run_batch(alone), clock)
        if isinstance(request.error, HostEnded | RunTooLong):
            # Those that have not run yet are lost with it.
            return _judge_lost_run(job, request.error, dispatcher)
        if dispatcher.claim(job, request):
            request.complete()
    dispatcher.finish(job, None)
    return False


def _complete_apart(
    job: Job,
    answers: Sequence[list[Array] | EdgeRuntimeError],
    run_s: float | None,
    dispatcher: Dispatcher,
    clock: Clock,
) -> None:
    """Complete the requests of a run whose model answered each by itself; those of a burst one by one."""
    assert run_s is not None
    finished_s = clock.monotonic_s()
    own: dict[Request, Sequence[list[Array] | EdgeRuntimeError]] = {}
    start = 0
    for request in job.batch:
        own[request] = answers[start : start + request.count]
        start += request.count

    def give(part: Request, answer: list[Array] | EdgeRuntimeError) -> None:
        if isinstance(answer, EdgeRuntimeError):
            part.error = answer
        else:
            _give(part, answer, finished_s - run_s, finished_s, run_s, job.rows)

    for request in job.batch:
        if request.line is not None:  # which asks, at the end of the job, whether it counts
            give(request, own[request][0])
    dispatcher.finish(job, run_s)
    for request in job.unanswered():
        parts = request.split(request) if request.split is not None else [request]
        for part, answer in zip(parts, own[request], strict=True):
            give(part, answer)
            part.complete()


def _judge_lost_run(job: Job, error: HostEnded | RunTooLong, dispatcher: Dispatcher) -> bool:
    """Decide who is to blame for a run that ended its host, or was ended: run_failed for it, another run for others.

    Returns whether the host ended.
    """
    left, model = job.unanswered(), job.model
    culprit, again = find_culprit(left, error, may_rerun=model.may_rerun)
    lost = [request for request in left if request not in again]
    is_first = isinstance(error, HostEnded) and dispatcher.mark_down(job.layout)
    dispatcher.run_again(job, again, culprit)
    if not isinstance(error, HostEnded) or error.has_begun:
        log.warning(
            "a run was lost",
            extra={
                "model": model.name,
                "requests": len(job.batch),
                "again": len(again),
                "reason": error.message,
                **log_fields_of(job.batch),
            },
        )
    for request in job.unanswered():
        if request in lost:
            request.error = error
            request.complete()
    return is_first


def find_culprit(
    batch: Sequence[Request], error: HostEnded | RunTooLong, *, may_rerun: bool
) -> tuple[Request | None, list[Request]]:
    """Tell who ended a host, None where that is not known, and which requests are to be run again.

    Nobody is blamed for a signal from outside, nor while another run was on in the host: then all run again as they
    are, LOST_RUNS times at most, and without a count where there was no host to begin. Else those of a batch, and one
    that died among others, run again alone, and one that dies alone is to blame. A run that is over its limit is known,
    and no other is to blame. may_rerun: False, and none runs again that has begun.
    """
    is_known = isinstance(error, RunTooLong) or (error.was_alone and not error.is_outside)
    again: list[Request] = []
    for request in batch:
        is_last_try = request.shape is ALONE or isinstance(error, RunTooLong) or not may_rerun
        if isinstance(error, HostEnded) and not error.has_begun:
            again.append(request)
            continue
        if is_known and len(batch) == 1 and is_last_try:
            return request, []
        if not (isinstance(error, HostEnded) and error.is_outside):
            request.shape = ALONE
        request.lost_runs += 1
        if may_rerun and request.lost_runs <= LOST_RUNS:
            again.append(request)
    return None, again


def refuse_expired(requests: Sequence[Request], clock: Clock) -> None:
    """Refuse requests that can no longer make their deadline, waited for too long, or lost their sequence."""
    for request in requests:
        if isinstance(request.error, QueueTimeExpired | SequenceLost):
            request.refuse(request.error)
            continue
        request.refuse(deadline_exceeded(request.arrived_s, request.timeout_s, clock.monotonic_s()))


def run_batch(job: Job) -> RunResult:
    """Run the requests of a job together, and wait. Never raises. Thread: a worker, or an inline request's own."""
    batch, layout = job.batch, job.layout
    job.thread = threading.get_ident()
    try:
        parts = _parts(batch)
        if layout.by_request is not None:
            return layout.by_request.run_requests(batch, parts, job.limit_s)
        assert layout.runner is not None  # its concurrency is 0
        alone = len(batch) == 1 and batch[0].shape is ALONE
        return _checked(job, layout.runner.run_parts(parts, job.limit_s, alone=alone))
    except Exception as error:  # noqa: BLE001 (a library's failure is these requests' answer; failure_of logs it)
        return failure_of(error, f"a run of model {job.model.name} failed", log_fields_of(batch))


def _checked(job: Job, outputs: list[Array]) -> RunResult:
    """Return the end of a run with these outputs: an error where several requests cannot share them."""
    if len(job.batch) > 1:
        for array in outputs:
            if not array.ndim:
                return RunFailed(f"model {job.model.name} gave an output without rows for {job.rows} rows")
    return outputs


def _parts(batch: Sequence[Request]) -> Sequence[Sequence[Array]]:
    """The inputs of each request."""
    if len(batch) == 1 and batch[0].plan.copies_shared:  # a batch is copied by joining it
        return [[array.copy() for array in batch[0].inputs]]
    return [request.inputs for request in batch]


def give_result(job: Job, result: RunResult, clock: Clock) -> float | None:
    """Give each request the outputs of its run, or the error that it is to be refused with; count the run.

    Returns the run's seconds, None when it failed. Results given request by request are not given here.
    """
    batch, model = job.batch, job.model
    if isinstance(result, EdgeRuntimeError):
        for request in batch:
            request.error = result
        return None
    finished_s = clock.monotonic_s()
    started_s = min(job.started_s, finished_s)  # one that was handed ahead knows it now
    run_s = finished_s - started_s
    model.metrics.run(job.rows, run_s)
    if isinstance(result, list):
        shares = [result] if len(batch) == 1 else split(result, [request.rows for request in batch])
        for request, own in zip(batch, shares, strict=True):
            _give(request, own, started_s, finished_s, run_s, job.rows)
    return run_s


def _give(  # noqa: PLR0917 (on the data path, where keywords cost)
    request: Request, outputs: list[Array], started_s: float, finished_s: float, run_s: float, rows: int
) -> None:
    """Give a request the outputs of its run, or the error that they come too late."""
    if finished_s > request.deadline_s:
        request.error = deadline_exceeded(request.arrived_s, request.timeout_s, finished_s)
        return
    request.error = None
    request.outputs = outputs
    request.queue_s = started_s - request.arrived_s
    request.run_s = run_s
    request.batch_rows = rows


def check_in_time(run_times: LatencyModel, rows: int, arrived_s: float, timeout_s: float, started_s: float) -> None:
    """Raise DeadlineUnmeetable for a run that waits for nothing and would still end after the deadline.

    Invariant: such a refusal relaxes the forecast, because no run would ever correct it.
    """
    if started_s + run_times.predict_s(rows) - arrived_s > timeout_s:
        run_times.relax()
        raise DeadlineUnmeetable(f"a run takes longer than what is left of the timeout, {timeout_s * 1e3:.3f} ms")


def join(parts: Sequence[Sequence[Array]]) -> Sequence[Array]:
    """Stack the inputs of requests along axis 0.

    Shapes: each input [rows_i, *inner] -> [sum(rows_i), *inner], same dtype, C-contiguous; one request alone is passed
    through without a copy. Thread: any. Raises: nothing; specs were checked before admission.
    """
    if len(parts) == 1:
        return parts[0]
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def split(outputs: Sequence[Array], rows: Sequence[int]) -> list[list[Array]]:
    """Cut batch outputs [sum(rows), *inner] into each request's own, as views in the order of `rows`.

    One request gets the outputs whole, whatever their axis 0 is.
    """
    if len(rows) == 1:
        return [list(outputs)]
    parts: list[list[Array]] = []
    start = 0
    for count in rows:
        parts.append([output[start : start + count] for output in outputs])
        start += count
    return parts
