"""Sends what has come together to the collector, each second; keeps it on disk while there is none.

Owns: the thread `edge-otel`, the bound of what waits in memory, and when it is tried again. A request's thread adds to
a queue and never waits: what finds no place there is dropped and counted. Made by opening.py.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from edge_runtime import __version__
from edge_runtime.clock import Clock
from edge_runtime.errors import StorageFailed
from edge_runtime.otel.collector import WAIT_S, Collector
from edge_runtime.otel.log_records import LogRecords
from edge_runtime.otel.metric_points import metric_pieces
from edge_runtime.otel.otlp import LOGS, METRICS, TRACES, body
from edge_runtime.otel.spans import span_pieces
from edge_runtime.otel.store import BodyStore
from edge_runtime.otel.tracer import EndedRequest
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

SEND_S = 1.0
"""Between two looks at what has come together."""

KEEP_S = 5.0
"""The same without a collector, at most: each is a file."""

MOST_TRACES = 1000
"""Traces that wait for being sent; more are dropped and counted. Writing one takes some 30 us of the interpreter, on a
board some 100, so that tracing takes a tenth of a core at most, however many requests are traced."""

BODY_TRACES = 500
"""Of one body: some 30 KB, packed."""

RESENT = 16
"""Bodies from disk between two looks, so that new ones do not wait behind a long absence."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before a collector is tried again; doubled each time."""

CLOSE_WAIT_S, CLOSE_LIMIT_S = 1.0, 2.0
"""For each step of the last bodies, when the daemon stops; and for all of them. Then the process ends without them."""


class Exporter:
    """The sender of one daemon. Its thread runs from `start` to `close`."""

    def __init__(
        self,
        collector: Collector,
        store: BodyStore,
        resource: Mapping[str, Any],
        *,
        metrics: Metrics,
        host: HostProbe,
        logs: LogRecords | None,
        metrics_s: float,
        clock: Clock,
    ) -> None:
        """logs: None where none are sent. metrics_s: between two bodies of metrics, 0: none are sent."""
        self._collector = collector
        self._store = store
        self._resource = resource
        self._metrics = metrics
        self._host = host
        self._logs = logs
        self._metrics_s = metrics_s
        self._clock = clock
        self._new_id = random.Random().getrandbits  # noqa: S311 (ids are to differ, and not secret)
        self._ended: deque[EndedRequest] = deque()
        self._waiting = 0
        self._start_ns = time.time_ns()
        self._metrics_due_s = clock.monotonic_s() + metrics_s
        self._retry_at_s: float | None = None
        self._pause_s = FIRST_PAUSE_S
        self._wakes = threading.Event()
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        metrics.watch("telemetry_kept_bytes", lambda: store.nbytes)

    def has_room(self, traces: int) -> bool:
        """Whether this number of traces may be added now. Thread: any."""
        return self._waiting + traces <= MOST_TRACES

    def add(self, ended: EndedRequest) -> None:
        """Take an ended request, for which there is room. Thread: any."""
        self._waiting += ended.traces
        self._ended.append(ended)

    def drop(self, traces: int) -> None:
        """Count traces for which there was no room. Thread: any."""
        self._metrics.count("traces_dropped", traces)

    def start(self) -> None:
        """Begin to send."""
        self._thread = threading.Thread(target=self._run, name="edge-otel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what is left, or keep it, and stop. Idempotent."""
        self._is_stopping = True
        self._wakes.set()
        if self._thread is not None:
            self._thread.join(CLOSE_LIMIT_S)
            self._thread = None
        self._collector.close()

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._store.open()
        except StorageFailed as error:
            log.warning("telemetry is not kept while its collector is away", extra={"reason": error.message})
        is_last = False
        while not is_last:
            self._wakes.wait(SEND_S if self._retry_at_s is None else min(self._pause_s, KEEP_S))
            is_last = self._is_stopping
            self._look()

    def _look(self) -> None:
        try:
            for signal, made in self._bodies():
                self._deliver(signal, made)
            self._send_kept()
        except Exception:  # no bug may end the thread: nothing would ever be sent again
            log.exception("an exception reached the exporter's loop")

    def _bodies(self) -> Iterator[tuple[str, bytes]]:
        """Make bodies of what has come together."""
        offset_ns = time.time_ns() - int(self._clock.monotonic_s() * 1e9)
        while self._ended:
            taken = list(islice(_taken(self._ended), BODY_TRACES))
            count = sum(each.traces for each in taken)
            self._waiting -= count
            pieces = span_pieces(taken, offset_ns, self._new_id)
            yield TRACES, body(TRACES, self._resource, __version__, pieces)
        if self._logs is not None:
            first = next(pieces := self._logs.pieces(), None)
            if first is not None:
                yield LOGS, body(LOGS, self._resource, __version__, _chained(first, pieces))
        now_s = self._clock.monotonic_s()
        if self._metrics_s and (now_s >= self._metrics_due_s or self._is_stopping):
            self._metrics_due_s = now_s + self._metrics_s
            points = metric_pieces(self._metrics, self._host, self._start_ns, time.time_ns())
            yield METRICS, body(METRICS, self._resource, __version__, points)

    def _deliver(self, signal: str, made: bytes) -> None:
        """Send a body, or keep it."""
        if self._may_send() and self._sent(signal, made):
            return
        if self._retry_at_s is not None:
            self._lose(self._store.put(signal, made))

    def _send_kept(self) -> None:
        """Send some of what was kept; while there is no collector it is tried by the oldest."""
        for _ in range(RESENT):
            if self._is_stopping or not self._may_send():
                return
            kept = self._store.oldest()
            if kept is None:
                return
            self._sent(*kept)
            if self._retry_at_s is not None:
                return
            self._store.drop_oldest()

    def _may_send(self) -> bool:
        return self._retry_at_s is None or self._clock.monotonic_s() >= self._retry_at_s

    def _sent(self, signal: str, made: bytes) -> bool:
        """Send a body; False where it was not taken. Then `_retry_at_s` says whether it may be sent again."""
        answer = self._collector.send(signal, made, CLOSE_WAIT_S if self._is_stopping else WAIT_S)
        if not answer.is_taken and answer.may_repeat:
            if self._retry_at_s is None:
                log.warning(
                    "the collector takes no telemetry; it is kept",
                    extra={"endpoint": self._collector.endpoint, "reason": answer.reason},
                )
            self._retry_at_s = self._clock.monotonic_s() + max(answer.after_s, self._pause_s)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            return False
        if self._retry_at_s is not None:
            log.info("the collector takes telemetry again", extra={"endpoint": self._collector.endpoint})
        self._retry_at_s, self._pause_s = None, FIRST_PAUSE_S
        if not answer.is_taken:
            log.warning("the collector refused telemetry", extra={"signal": signal, "reason": answer.reason})
            self._lose(1)
        return answer.is_taken

    def _lose(self, bodies: int) -> None:
        if bodies:
            self._metrics.count("telemetry_lost", bodies)


def _taken(ended: deque[EndedRequest]) -> Iterator[EndedRequest]:
    while ended:
        yield ended.popleft()


def _chained(first: bytes, others: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from others
