"""Latency and rate of answers: the raw backend in process, and the daemon over ZeroMQ.

Owns: the measured loops. All ways of one model are measured in turn, round after round, so that a busy moment of the
machine falls on each of them. The client shares the cores with the daemon; `make bench` measures with one of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import onnxruntime

from edge_runtime import Client
from edge_runtime.errors import DeadlineExceeded, EdgeRuntimeError, Refused
from edge_runtime.messages import InferResult
from edge_runtime.tuning.other_work import OtherWork

Images = npt.NDArray[np.float32]
ANSWER_LIMIT_S = 30.0
"""No answer takes this long on any known device; past it the measurement fails instead of hanging."""

STARVED_SHARE = 0.25
"""From this share of the cores on, other programs' work explains late replies: a demonstration has some two cores."""


@dataclass(slots=True)
class Round:
    """One measurement: each answer's time, the measurement's length, and its number of runs."""

    latencies_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    runs: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """The summary of all rounds: percentiles over all answers, the median of the rounds' rates."""

    p50_ms: float
    p95_ms: float
    p99_ms: float
    per_s: float
    batch_rows: float


class Way(Protocol):
    """One way to have images answered."""

    title: str
    in_flight: int

    def round(self, images: Images, seconds: float) -> Round:
        """Request one image after the other for a time. Shapes: images [n, ...]; each request is one of them."""
        ...


def measure(
    ways: Sequence[Way], images: Images, *, rounds: int, seconds: float, progress: Callable[[str], None]
) -> list[Figures]:
    """Measure each way in turn, `rounds` times, after a short start that is not counted."""
    found: list[list[Round]] = [[] for _ in ways]
    for number in range(rounds + 1):
        for way, rounds_of_way in zip(ways, found, strict=True):
            progress(f"round {number} of {rounds}: {way.title}, {way.in_flight} at a time" if number else "warming up")
            measured = way.round(images, seconds if number else seconds / 4)
            if number:
                rounds_of_way.append(measured)
    return [_figures(rounds_of_way) for rounds_of_way in found]


class Raw:
    """ONNX Runtime in this process with no server around it: `in_flight` threads, each its own run on one image.

    One thread: the session has every core, which gives the shortest run. Several: one core each, which gives the most
    answers.
    """

    title = "raw ONNX Runtime"

    def __init__(self, model: Path, in_flight: int) -> None:
        self.in_flight = in_flight
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 0 if in_flight == 1 else 1
        # Threads that spin between runs would take the daemon's cores while it is measured.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def answer(self, images: Images) -> list[npt.NDArray[Any]]:
        """All outputs for all images in one run. Shapes: axis 0 is rows."""
        found: list[npt.NDArray[Any]] = self._session.run(None, {"image": images})
        return found

    def round(self, images: Images, seconds: float) -> Round:
        """Time runs on the images, `in_flight` at once."""
        start = time.perf_counter()
        with ThreadPoolExecutor(self.in_flight) as callers:
            parts = list(callers.map(lambda _: self._calls(images, start + seconds), range(self.in_flight)))
        spent = time.perf_counter() - start
        latencies = [latency for part in parts for latency in part]
        return Round(latencies, spent, len(latencies))

    def _calls(self, images: Images, end: float) -> list[float]:
        latencies: list[float] = []
        now = time.perf_counter()
        while now < end:
            row = len(latencies) % len(images)
            self._session.run(None, {"image": images[row : row + 1]})
            before, now = now, time.perf_counter()
            latencies.append((now - before) * 1e3)
        return latencies


class DaemonWay:
    """The daemon, asked by one client that keeps `in_flight` requests of one image under way."""

    title = "edge-runtime"

    def __init__(self, client: Client, model: str, in_flight: int) -> None:
        self.in_flight = in_flight
        self._client = client
        self._model = model

    def round(self, images: Images, seconds: float) -> Round:
        """Time requests. Raises the EdgeRuntimeError of a failed one."""
        before = self._runs()
        found = self._one_by_one(images, seconds) if self.in_flight == 1 else self._pipelined(images, seconds)
        # Counted by the daemon: asking each request for its timing would make the answers dearer.
        found.runs = self._runs() - before
        return found

    def _runs(self) -> int:
        return int(self._client.stats()["metrics"]["models"][self._model]["runs"])

    def _one_by_one(self, images: Images, seconds: float) -> Round:
        found, count = Round(), 0
        start = now = time.perf_counter()
        while now < start + seconds:
            row = count % len(images)
            self._client.infer(self._model, {"image": images[row : row + 1]}, timeout_ms=ANSWER_LIMIT_S * 1e3)
            before, now, count = now, time.perf_counter(), count + 1
            found.latencies_ms.append((now - before) * 1e3)
        found.seconds = now - start
        return found

    def _pipelined(self, images: Images, seconds: float) -> Round:
        found, free = Round(), threading.Semaphore(self.in_flight)
        failures: list[BaseException] = []
        start, count = time.perf_counter(), 0

        def note(sent: float, done: Future[InferResult]) -> None:
            found.latencies_ms.append((time.perf_counter() - sent) * 1e3)
            failure = done.exception()
            if failure is not None:
                failures.append(failure)
            free.release()

        while time.perf_counter() < start + seconds and not failures:
            _acquire(free)
            row = count % len(images)
            sent, inputs = time.perf_counter(), {"image": images[row : row + 1]}
            future = self._client.submit(self._model, inputs, timeout_ms=ANSWER_LIMIT_S * 1e3)
            future.add_done_callback(partial(note, sent))
            count += 1
        for _ in range(self.in_flight):
            _acquire(free)
        found.seconds = time.perf_counter() - start
        if failures:
            raise failures[0]
        return found


@dataclass(slots=True)
class Flood:
    """The fates of more requests than the daemon can serve: each is in exactly one list, with its time in ms.

    given_up_ms: those whose reply did not come while the client waited for it. others: the share of the cores' time
    that other programs took meanwhile, 0 to 1.
    """

    answered_ms: list[float] = field(default_factory=list)
    refused_ms: list[float] = field(default_factory=list)
    expired_ms: list[float] = field(default_factory=list)
    given_up_ms: list[float] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    seconds: float = 0.0
    others: float = 0.0

    @property
    def asked(self) -> int:
        """All requests."""
        replied = len(self.answered_ms) + len(self.refused_ms) + len(self.expired_ms)
        return replied + len(self.given_up_ms) + len(self.failures)

    @property
    def is_starved(self) -> bool:
        """Whether other programs took so much of the cores that the measured rate means nothing any more."""
        return self.others >= STARVED_SHARE


def flood(client: Client, model: str, images: Images, *, per_s: float, timeout_ms: float, seconds: float) -> Flood:
    """Send requests with a deadline at a steady rate, without waiting for answers.

    Raises EdgeRuntimeError where the daemon's own count does not say that it ended each of them.
    """
    found, under_way, others, ended_before = Flood(), threading.Semaphore(0), OtherWork(), _ended(client, model)
    start, count = time.perf_counter(), 0

    def note(sent: float, done: Future[InferResult]) -> None:
        latency_ms, failure = (time.perf_counter() - sent) * 1e3, done.exception()
        if failure is None:
            found.answered_ms.append(latency_ms)
        elif isinstance(failure, DeadlineExceeded):
            found.expired_ms.append(latency_ms)
        elif isinstance(failure, Refused):
            found.refused_ms.append(latency_ms)
        elif isinstance(failure, TimeoutError):
            found.given_up_ms.append(latency_ms)
        else:
            found.failures.append(failure)
        under_way.release()

    while (elapsed := time.perf_counter() - start) < seconds:
        while count < elapsed * per_s:
            row, sent = count % len(images), time.perf_counter()
            future = client.submit(model, {"image": images[row : row + 1]}, timeout_ms=timeout_ms)
            future.add_done_callback(partial(note, sent))
            count += 1
        time.sleep(0.002)
    for _ in range(count):
        _acquire(under_way)
    found.seconds, found.others = time.perf_counter() - start, others.share()
    # A reply that came too late counts as the daemon's all the same: its client cannot tell late from lost.
    limit_s = time.perf_counter() + ANSWER_LIMIT_S
    while (ended := _ended(client, model) - ended_before) < count - len(found.failures):
        if time.perf_counter() > limit_s:
            raise EdgeRuntimeError(f"of {count} requests the daemon ended {ended}; look at its log")
        time.sleep(0.02)
    return found


def _ended(client: Client, model: str) -> int:
    """Requests for a model that the daemon answered or refused, by its own count."""
    counts = client.stats()["metrics"]["models"][model]
    return int(counts["answered"] + sum(counts["refused"].values()))


def percentile(latencies_ms: Sequence[float], percent: float) -> float:
    """A percentile; NaN without values."""
    return float(np.percentile(latencies_ms, percent)) if latencies_ms else float("nan")


def _acquire(free: threading.Semaphore) -> None:
    if not free.acquire(timeout=ANSWER_LIMIT_S):
        raise EdgeRuntimeError(f"no answer within {ANSWER_LIMIT_S:.0f} s; look at the daemon's log")


def _figures(rounds: Sequence[Round]) -> Figures:
    latencies = [latency for measured in rounds for latency in measured.latencies_ms]
    runs = sum(measured.runs for measured in rounds)
    return Figures(
        percentile(latencies, 50),
        percentile(latencies, 95),
        percentile(latencies, 99),
        float(np.median([len(measured.latencies_ms) / measured.seconds for measured in rounds])),
        len(latencies) / runs if runs else float("nan"),
    )
