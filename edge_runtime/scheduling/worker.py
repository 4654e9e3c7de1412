"""The threads that carry jobs out and the timer that expires what waits too long.

Owns: the threads. A worker's loop is three steps: take a job, run it, settle its requests. One of the three places
where exceptions are caught broadly: a failing run becomes run_failed, never a dead worker.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from edge_runtime.clock import Clock
from edge_runtime.errors import EdgeRuntimeError, RunFailed
from edge_runtime.scheduling.batch import join, split
from edge_runtime.scheduling.dispatcher import Dispatcher, Job, expired_error
from edge_runtime.scheduling.queue import Answer, Outcome, Pending
from edge_runtime.tensors import Array

log = logging.getLogger(__name__)


class WorkerPool:
    """As many workers as the dispatcher has cores, and one timer."""

    def __init__(self, dispatcher: Dispatcher, clock: Clock) -> None:
        self._dispatcher = dispatcher
        self._clock = clock
        self._is_stopping = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads."""
        for index in range(self._dispatcher.cores):
            self._spawn(f"edge-worker-{index}", self._work)
        self._spawn("edge-timer", self._time)

    def close(self) -> None:
        """Stop after the jobs under way; what still waits is the models' owner's to close first. Idempotent."""
        self._is_stopping = True
        self._dispatcher.wake_all()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _spawn(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _stopping(self) -> bool:
        return self._is_stopping

    def _work(self) -> None:
        dispatcher, stopping = self._dispatcher, self._stopping
        while not self._is_stopping:
            job, expired = dispatcher.wait_for_job(stopping)
            settle_expired(expired, self._clock)
            if job is not None:
                carry_out(job, dispatcher, self._clock)

    def _time(self) -> None:
        while not self._is_stopping:
            expired, wake_at_s = self._dispatcher.expire()
            settle_expired(expired, self._clock)
            self._dispatcher.wait_for_timer(wake_at_s, self._stopping)


def carry_out(job: Job, dispatcher: Dispatcher, clock: Clock) -> None:
    """Run one job and settle every request in it exactly once. Thread: a worker."""
    run_s: float | None = None
    try:
        outputs = run_batch(job, job.batch)
        finished_s = clock.monotonic_s()
        run_s = finished_s - job.started_s
        if job.model.on_run is not None:
            job.model.on_run(job.rows, len(job.batch), run_s)
    except EdgeRuntimeError as error:
        # Before its place is given back: the runs one by one are still its own, and the instance may allow no more.
        _settle_failed(job, error, clock)
        dispatcher.finish(job, None)
        return
    dispatcher.finish(job, run_s)
    for request, parts in zip(job.batch, outputs, strict=True):
        settle(request, _judge(request, Answer(parts, job.started_s - request.arrived_s, run_s, job.rows), finished_s))


def run_batch(job: Job, batch: Sequence[Pending]) -> list[list[Array]]:
    """Join, run, split. Raises EdgeRuntimeError only: anything else from a library is RunFailed."""
    try:
        return split(job.layout.run(join(batch)), [request.rows for request in batch])
    except EdgeRuntimeError:
        raise
    except Exception as error:
        log.exception("run failed", extra={"model": job.model.name})
        raise RunFailed(f"{type(error).__name__}: {error}") from error


def settle(request: Pending, outcome: Outcome) -> None:
    """Hand over the outcome; a submitter's bug is logged and must not take the worker down."""
    try:
        request.settle(request, outcome)
    except Exception:
        log.exception("settling a request failed")


def settle_expired(requests: Sequence[Pending], clock: Clock) -> None:
    """Answer requests that can no longer make their deadline."""
    if requests:
        now_s = clock.monotonic_s()
        for request in requests:
            settle(request, expired_error(request, now_s))


def _settle_failed(job: Job, error: EdgeRuntimeError, clock: Clock) -> None:
    """One bad request must not fail its neighbours: a failed batch is run again one request at a time."""
    if len(job.batch) == 1:
        settle(job.batch[0], error)
        return
    for request in job.batch:
        started_s = clock.monotonic_s()
        try:
            (parts,) = run_batch(job, [request])
        except EdgeRuntimeError as own:
            settle(request, own)
            continue
        finished_s = clock.monotonic_s()
        answer = Answer(parts, started_s - request.arrived_s, finished_s - started_s, request.rows)
        settle(request, _judge(request, answer, finished_s))


def _judge(request: Pending, answer: Answer, finished_s: float) -> Outcome:
    return answer if finished_s <= request.deadline_s else expired_error(request, finished_s)
