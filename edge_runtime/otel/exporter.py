"""Sends what has come together to the collector, each second; keeps it on disk while there is none.

Owns: the thread `edge-otel`, the bound of what waits in memory, the turns of the three signals, and when each is tried
again: a flood of one, or a collector that is slow or full for one, keeps no other back. A request's thread adds to a
queue and never waits: what finds no place there is dropped and counted. Made by opening.py.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from edge_runtime import __version__
from edge_runtime.clock import Clock
from edge_runtime.errors import StorageFailed
from edge_runtime.otel.collector import WAIT_S, Collector
from edge_runtime.otel.log_records import LogRecords
from edge_runtime.otel.metric_points import Period, metric_pieces
from edge_runtime.otel.otlp import LOGS, METRICS, SIGNALS, TRACES, body
from edge_runtime.otel.spans import span_pieces
from edge_runtime.otel.store import BodyStore
from edge_runtime.otel.tracer import EndedRequest
from edge_runtime.telemetry.busiest import BusiestModels
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

SEND_S = 1.0
"""Between two looks at what has come together."""

KEEP_S = 5.0
"""The same of a signal that is not taken: each is a file."""

MOST_TRACES = 1000
"""Traces that wait for being sent; more are dropped and counted. Writing one takes some 30 us of the interpreter, on a
board some 100, so that tracing takes a tenth of a core at most, however many requests are traced."""

BODY_TRACES = 500
"""Of one body: some 30 KB, packed."""

RESENT = 16
"""Bodies of a signal from disk between two looks, so that new ones do not wait behind a long absence."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before a signal is tried again that was not taken; doubled each time."""

CLOCK_SET_S = 30.0
"""The clock was set where the process seems to have begun this much earlier or later. The kernel rounds that to
seconds, and to a collector each other start is a restart."""

CLOSE_WAIT_S, CLOSE_LIMIT_S = 1.0, 2.0
"""For each step of the last bodies, when the daemon stops; and for all of them. Then the process ends without them."""


class _SignalTurn:
    """One signal's. bodies: makes what is due. due_s: when that is looked at next.

    retry_at_s: when it is tried again; None while the collector takes it.
    """

    def __init__(self, signal: str, bodies: Callable[[], Iterator[bytes]], every_s: float, due_s: float) -> None:
        self.signal = signal
        self.bodies = bodies
        self.every_s = every_s
        self.due_s = due_s
        self.retry_at_s: float | None = None
        self.pause_s = FIRST_PAUSE_S

    def put_off(self, now_s: float, after_s: float) -> None:
        """Try it again later; after_s: in this time at the earliest, as the collector says."""
        self.retry_at_s = now_s + max(after_s, self.pause_s)
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)


class Exporter:
    """The sender of one daemon. Its thread runs from `start` to `close`."""

    def __init__(
        self,
        collector: Collector,
        store: BodyStore,
        resource: Mapping[str, Any],
        *,
        metrics: Metrics,
        busiest: BusiestModels,
        host: HostProbe,
        logs: LogRecords | None,
        metrics_s: float,
        clock: Clock,
    ) -> None:
        """busiest: chooses the models whose metrics are sent, as for a scrape. logs: None where none are sent.

        metrics_s: between two bodies of metrics, 0: none are sent.
        """
        self._collector = collector
        self._store = store
        self._resource = resource
        self._metrics = metrics
        self._busiest = busiest
        self._host = host
        self._logs = logs
        self._metrics_s = metrics_s
        self._clock = clock
        self._new_id = random.Random().getrandbits  # noqa: S311 (ids are to differ, and not secret)
        self._ended: deque[EndedRequest] = deque()
        self._waiting = 0
        self._started_s: float | None = None
        bodies = {METRICS: self._metric_bodies, LOGS: self._log_bodies, TRACES: self._trace_bodies}
        every_s = {METRICS: metrics_s, LOGS: 0.0, TRACES: 0.0}
        self._turns = [
            _SignalTurn(each, bodies[each], every_s[each], clock.monotonic_s() + every_s[each]) for each in SIGNALS
        ]
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
            self._wakes.wait(SEND_S)
            is_last = self._is_stopping
            self.look()

    def look(self) -> None:
        """Send what is due of each signal, and some of what was kept. Thread: the exporter's. Never raises.

        Each signal has its turn, and none takes the time of another for long: of new ones there are two bodies at most,
        and what was kept goes round about.
        """
        until_s = self._clock.monotonic_s() + SEND_S
        try:
            for turn in self._turns:
                self._send_new(turn)
            self._send_kept(until_s)
        except Exception:  # no bug may end the thread: nothing would ever be sent again
            log.exception("an exception reached the exporter's loop")

    def _send_new(self, turn: _SignalTurn) -> None:
        """Send what has come together of a signal, or keep it."""
        if not self._is_stopping and self._clock.monotonic_s() < turn.due_s:
            return
        try:
            for made in turn.bodies():
                if not (self._may_send(turn) and self._sent(turn, made)) and turn.retry_at_s is not None:
                    self._lose(self._store.put(turn.signal, made))
        finally:
            pause_s = turn.every_s if turn.retry_at_s is None else max(turn.every_s, KEEP_S)
            turn.due_s = self._clock.monotonic_s() + pause_s

    def _send_kept(self, until_s: float) -> None:
        """Send some of what was kept, of each signal in turn; one that is not taken is tried again by its oldest."""
        for _ in range(RESENT):
            has_sent = False
            for turn in self._turns:
                if self._is_stopping or not self._may_send(turn):
                    continue
                kept = self._store.oldest(turn.signal)
                if kept is None:
                    continue
                self._sent(turn, kept)
                if turn.retry_at_s is None:
                    self._store.drop_oldest(turn.signal)
                    has_sent = True
            if not has_sent or self._clock.monotonic_s() >= until_s:
                return

    def _trace_bodies(self) -> Iterator[bytes]:
        offset_ns = time.time_ns() - int(self._clock.monotonic_s() * 1e9)
        for _ in range(-(-MOST_TRACES // BODY_TRACES)):  # while new ones come as quickly, too
            taken = list(islice(_taken(self._ended), BODY_TRACES))
            if not taken:
                return
            self._waiting -= sum(each.traces for each in taken)
            yield body(TRACES, self._resource, __version__, span_pieces(taken, offset_ns, self._new_id))

    def _log_bodies(self) -> Iterator[bytes]:
        if self._logs is None:
            return
        first = next(pieces := self._logs.pieces(), None)
        if first is not None:
            yield body(LOGS, self._resource, __version__, _chained(first, pieces))

    def _metric_bodies(self) -> Iterator[bytes]:
        if not self._metrics_s:
            return
        # Read each time: on a device without a clock of its own the time of the start is known later.
        told_s = self._host.started_s() or time.time()
        if self._started_s is None or abs(told_s - self._started_s) > CLOCK_SET_S:
            self._started_s = told_s
        now_ns = time.time_ns()
        period = Period(min(int(self._started_s * 1e9), now_ns), now_ns)
        pieces = metric_pieces(self._metrics, self._busiest.choose, self._host, period)
        yield body(METRICS, self._resource, __version__, pieces)

    def _may_send(self, turn: _SignalTurn) -> bool:
        return turn.retry_at_s is None or self._clock.monotonic_s() >= turn.retry_at_s

    def _sent(self, turn: _SignalTurn, made: bytes) -> bool:
        """Send a body; False where it was not taken. Then `retry_at_s` says whether it may be sent again."""
        answer = self._collector.send(turn.signal, made, CLOSE_WAIT_S if self._is_stopping else WAIT_S)
        if not answer.is_taken and answer.may_repeat:
            if turn.retry_at_s is None:
                what = "telemetry" if answer.is_away else turn.signal
                told = {"endpoint": self._collector.endpoint, "reason": answer.reason}
                log.warning("the collector takes no %s; kept for later", what, extra=told)
            # When the daemon stops there is no time to find out by each signal that nothing is taken.
            for each in self._turns if answer.is_away or self._is_stopping else (turn,):
                each.put_off(self._clock.monotonic_s(), answer.after_s)
            return False
        if turn.retry_at_s is not None:
            told = {"endpoint": self._collector.endpoint}
            log.info("the collector takes %s again", turn.signal, extra=told)
        turn.retry_at_s, turn.pause_s = None, FIRST_PAUSE_S
        if not answer.is_taken:
            log.warning("the collector refused telemetry", extra={"signal": turn.signal, "reason": answer.reason})
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
