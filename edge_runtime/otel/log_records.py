"""The log as a collector gets it: records of this package from a level on, with the trace that a line belongs to.

Owns: the handler that keeps them until they are sent, within a bound, and their form in OTLP. Thread: `emit` any.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

from edge_runtime.clock import Clock
from edge_runtime.otel.otlp import attributes, packed, text_of
from edge_runtime.telemetry.logs import RepeatFilter, record_fields

MOST_RECORDS = 2048
"""That wait for being sent. A daemon writes a few lines a minute; a fault that floods is held back by its filter."""

PIECE = 64
"""Records that are written at once, in some 0.1 ms."""

MOST_BODY, MOST_TRACEBACK = 4096, 8192
"""Characters of a record's text, and of the end of a traceback: its beginning says less."""

TRACE_ID, SPAN_ID = "trace_id", "span_id"

_SEVERITIES = ((logging.CRITICAL, 21), (logging.ERROR, 17), (logging.WARNING, 13), (logging.INFO, 9), (0, 5))
"""From each level on, OTLP's number."""


class LogRecords(logging.Handler):
    """Keeps records until they are taken. lost: how many found no place."""

    def __init__(self, level: int, clock: Clock) -> None:
        super().__init__(level)
        self.addFilter(RepeatFilter(clock))
        self._kept: deque[logging.LogRecord] = deque()
        self.lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        if len(self._kept) >= MOST_RECORDS:
            self.lost += 1
            return
        self._kept.append(record)

    def pieces(self) -> Iterator[bytes]:
        """Take what was kept, written a few at a time."""
        while self._kept:
            taken = [self._kept.popleft() for _ in range(min(PIECE, len(self._kept)))]
            yield packed([self._written(record) for record in taken])

    def _written(self, record: logging.LogRecord) -> dict[str, Any]:
        fields = dict(record_fields(record))
        trace = {"traceId": fields.pop(TRACE_ID, ""), "spanId": fields.pop(SPAN_ID, "")}
        thrown: list[dict[str, Any]] = []
        if record.exc_info and record.exc_info[0] is not None:
            fields["exception.type"] = record.exc_info[0].__name__
            traceback = logging.Formatter().formatException(record.exc_info)[-MOST_TRACEBACK:]
            thrown = [{"key": "exception.stacktrace", "value": {"stringValue": text_of(traceback, MOST_TRACEBACK)}}]
        instant = str(int(record.created * 1e9))
        return {
            "timeUnixNano": instant,
            "observedTimeUnixNano": instant,
            "severityNumber": next(number for level, number in _SEVERITIES if record.levelno >= level),
            "severityText": record.levelname,
            "body": {"stringValue": text_of(record.getMessage(), MOST_BODY)},
            "attributes": attributes({"logger": record.name, **fields}) + thrown,
            **{key: value for key, value in trace.items() if value},
        }
