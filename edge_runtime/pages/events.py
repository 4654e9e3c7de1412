"""The last events of a daemon: loads, updates, failures and warnings, each with what to do about it.

Owns: a copy of the log's last lines from "info" on, whatever level the log is written at, bounded in number and bytes,
and the advice that goes with them. Thread: any.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from collections.abc import Mapping
from copy import copy
from typing import Any

from edge_runtime.clock import SystemClock
from edge_runtime.telemetry.logs import RepeatFilter, end_listening, listen_to_log, record_fields

KEPT = 300
"""Events: of 2 KB at most each."""

LONGEST = 500
"""Characters of a text, and of a field."""

MOST_FIELDS = 12

LEFT_OUT = frozenset(("edge_runtime.hosts.process", "edge_runtime.backends.tensorrt.build"))
"""Loggers whose plain lines are what models print, not what becomes of them."""

RUNBOOK = "deploy/runbook.md"

ADVICE: Mapping[str, tuple[str, str]] = {
    r"is not loaded|a load failed|^not served|is not served": (
        "Correct what the reason names: the folder is looked at again by itself when its files change.",
        "docs/models.md",
    ),
    r"a host ended": (
        "It was started again. If it ends again, look at the model's memory and at its own code.",
        "docs/errors.md",
    ),
    r"host is not started again": ("Load the model anew once its cause is mended.", "docs/errors.md"),
    r"rolling back|rolled back": (
        "The release before serves. Withdraw the new one, or publish a better one.",
        f"{RUNBOOK}#a-bad-release-is-in-the-field",
    ),
    r"^refused: ": ("The device keeps what it has.", f"{RUNBOOK}#a-good-release-was-refused"),
    r"no updates until their journal": (
        "Restore the journal, or move it away.",
        f"{RUNBOOK}#a-devices-memory-of-updates-is-lost",
    ),
    r"an active release does not serve": (
        "Let the device fetch its files again.",
        f"{RUNBOOK}#a-models-files-on-a-device-are-damaged",
    ),
    r"no space left|disk is full": ("Make room on the disk of the state folder.", f"{RUNBOOK}#a-devices-disk-is-full"),
    r"timestamp.*expired|expired.*timestamp": (
        "Sign the repository's timestamp again, and look at the device's clock.",
        f"{RUNBOOK}#the-timestamp-has-expired",
    ),
    r"^no update\b": ("Look at the reason: the repository, the network or the clock.", RUNBOOK),
    r"connection.* closed|closed .*connection|no connection can be accepted": (
        "Find the client that opens so many or does not read; a door's max_connections can be raised.",
        "docs/configuration.md",
    ),
    r"closed to hosts": (
        "Look at the reason: the kernel, what it was started with, or the filter of a container.",
        "docs/serve.md",
    ),
    r"need a restart": ("Restart the daemon when it suits.", "docs/configuration.md"),
    r"broker": ("Look whether the broker is up, and whether it lets this device in.", "docs/mqtt.md"),
    r"camera": ("Look at the camera's power, its network and its address.", "docs/cameras.md"),
    r"plug-in": ("Mend the plug-in or remove it; `edge-runtime plugins` shows its state.", "docs/plugins.md"),
    r"(pip|apt) install": ("Install what the reason names.", "docs/install.md"),
}
"""Of a warning by its text: what to do, and the document with more. The first that fits counts."""

_ADVICE = [(re.compile(pattern, re.IGNORECASE), *told) for pattern, told in ADVICE.items()]

BUG = ("This is a fault of the software: report it, with the bundle of `edge-runtime doctor`.", "docs/page.md")
"""Of a line with a traceback."""


class Events(logging.Handler):
    """Keeps the last events. Call `start` and `close`."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._guard = threading.Lock()
        self._kept: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._repeats = RepeatFilter(SystemClock())
        self._last_id = 0

    @property
    def last_id(self) -> int:
        """The number of the newest event; they are counted from 1."""
        return self._last_id

    def start(self) -> None:
        """Listen to the log."""
        listen_to_log(self)

    def close(self) -> None:
        """Listen no more. Idempotent."""
        end_listening(self)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line of the log; of one that comes again and again, the first of ten seconds."""
        if record.levelno < logging.WARNING and record.name in LEFT_OUT:
            return
        record = copy(record)  # the filter writes into it, and the log has a filter of its own
        if not self._repeats.filter(record):
            return
        try:
            event = _event(record)
        except Exception:  # noqa: BLE001 (as the handlers of the standard library: a bad line of the log ends nothing)
            self.handleError(record)
            return
        with self._guard:
            self._last_id += 1
            self._kept.append({"id": self._last_id, **event})

    def last(self, count: int) -> list[dict[str, Any]]:
        """Return the last events, newest first."""
        with self._guard:
            return list(reversed(self._kept))[:count]

    def since(self, number: int) -> list[dict[str, Any]]:
        """Return the events after that number, oldest first."""
        with self._guard:
            return [each for each in self._kept if each["id"] > number]


def _event(record: logging.LogRecord) -> dict[str, Any]:
    fields = dict(record_fields(record))
    model, version, repeated = fields.pop("model", None), fields.pop("version", None), fields.pop("repeated", 0)
    what = record.getMessage()
    if record.exc_info and record.exc_info[1] is not None:
        what = f"{what}: {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
    advice, docs = _advice(record, f"{what} {fields.get('reason', '')}")
    return {
        "time": round(record.created, 3),
        "level": "error" if record.levelno >= logging.ERROR else record.levelname.lower(),
        "what": _cut(what),
        "model": None if model is None else _cut(str(model)),
        "version": version if isinstance(version, int) else None,
        "fields": {name: _value(value) for name, value in list(fields.items())[:MOST_FIELDS]},
        "advice": advice,
        "docs": docs,
        "repeated": repeated,
    }


def _advice(record: logging.LogRecord, text: str) -> tuple[str, str]:
    """The advice for a warning, and the document with more; empty for other lines."""
    if record.levelno < logging.WARNING:
        return "", ""
    for pattern, advice, docs in _ADVICE:
        if pattern.search(text):
            return advice, docs
    if record.exc_info or record.stack_info:
        return BUG
    return "", ""


def _value(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | None) else _cut(str(value))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
