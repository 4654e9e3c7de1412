"""The log: text for a person at a terminal, one JSON object a line for everything else.

Owns: the formats, the handler on the package's logger, and the filter that holds back repeated warnings. Every module
logs with the standard library: `log.info("loaded", extra={"model": name, "took_s": 0.2})`; `extra` becomes fields.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import TextIO

from edge_runtime.clock import Clock, SystemClock

PACKAGE_LOGGER = "edge_runtime"

REPEAT_S = 10.0
"""A warning of one place and text is written once in this time, with the number held back: a fault at a thousand
requests a second must not fill the disk."""

DIFFERENT = 32
"""Different subjects of one place and text written in that time, such as each file that is not served."""

REMEMBERED = 256
"""Different warnings remembered at once; one more clears the memory."""

_SUBJECT = ("version", "path", "file", "folder", "topic")

TRACEBACK = "Traceback (most recent call last):"
"""Python's first line of one."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_COLOURS = {logging.DEBUG: "\x1b[2m", logging.INFO: "\x1b[32m", logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m"}
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"

_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (0, 7))
"""From each level on, syslog's number."""


def configure_logging(
    level: str, log_format: str | None, stream: TextIO, clock: Clock | None = None
) -> logging.Handler:
    """Write this package's records, and other packages' warnings, to a stream; replaces an earlier call's set-up.

    level: lowest level written, "debug", "info", "warning" or "error". log_format: "text" or "json"; None: text on a
    terminal, else JSON.
    """
    is_terminal = stream.isatty()
    as_text = log_format == "text" or (log_format is None and is_terminal)
    handler = logging.StreamHandler(stream)
    form = TextFormat(colour=is_terminal) if as_text else JsonFormat()
    handler.setFormatter(JournalFormat(form) if _is_journal(stream) else form)
    handler.addFilter(_WrittenLevel(logging.getLevelName(level.upper())))
    handler.addFilter(RepeatFilter(clock or SystemClock()))
    handler.set_name(PACKAGE_LOGGER)
    root = logging.getLogger()
    for old in [each for each in root.handlers if each.get_name() == PACKAGE_LOGGER]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    set_log_level(log_level())
    return handler


def log_traceback(log: logging.Logger, message: str, traceback: str) -> None:
    """Write a warning with a traceback that another process printed, as one record."""
    if log.isEnabledFor(logging.WARNING):
        said = {"name": log.name, "levelno": logging.WARNING, "levelname": "WARNING", "msg": message}
        log.handle(logging.makeLogRecord({**said, "stack_info": traceback}))


def log_level() -> int:
    """Return the lowest level that this package writes, as `logging` numbers it."""
    written = _written_level()
    return logging.getLogger(PACKAGE_LOGGER).getEffectiveLevel() if written is None else written.level


def set_log_level(level: int) -> None:
    """Change the lowest level that this package writes, until `configure_logging` is called again."""
    logger, written = logging.getLogger(PACKAGE_LOGGER), _written_level()
    if written is not None:
        written.level = level
        # What listeners hear. A handler without a level hears what there is: NOTSET would ask the root logger.
        level = min([level, *(each.level for each in logger.handlers if each.level)])
    logger.setLevel(level)


def listen_to_log(handler: logging.Handler) -> None:
    """Have a handler hear this package's records from its own level on, whatever is written.

    Where `configure_logging` was not called, another program's settings decide what it hears.
    """
    logging.getLogger(PACKAGE_LOGGER).addHandler(handler)
    if _written_level() is not None:
        set_log_level(log_level())


def end_listening(handler: logging.Handler) -> None:
    """Have a handler of `listen_to_log` hear nothing more. Idempotent."""
    logging.getLogger(PACKAGE_LOGGER).removeHandler(handler)
    if _written_level() is not None:
        set_log_level(log_level())


class _WrittenLevel(logging.Filter):
    """Lets this package's records pass from a level on, and all of other packages."""

    def __init__(self, level: int) -> None:
        super().__init__(PACKAGE_LOGGER)
        self.level = level

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is written."""
        return record.levelno >= self.level or not super().filter(record)


def _written_level() -> _WrittenLevel | None:
    """The filter of the handler that `configure_logging` made."""
    own = [each for each in logging.getLogger().handlers if each.get_name() == PACKAGE_LOGGER]
    return next((each for handler in own for each in handler.filters if isinstance(each, _WrittenLevel)), None)


class TextFormat(logging.Formatter):
    """`12:00:01.234 info  loaded  model=digits took_s=0.2`, coloured on a terminal."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback below it, if any."""
        clock = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        level = f"{record.levelname.lower():<7}"
        fields = " ".join(f"{name}={_shown(value)}" for name, value in record_fields(record).items())
        message = _one_line(record.getMessage())
        if self._colour:
            level = f"{_COLOURS.get(record.levelno, '')}{level}{_PLAIN}"
            clock, fields = f"{_DIM}{clock}{_PLAIN}", f"{_DIM}{fields}{_PLAIN}" if fields else ""
        line = f"{clock} {level} {message}" + (f"  {fields}" if fields else "")
        return "\n".join([line, *_trace(self, record)])


class JsonFormat(logging.Formatter):
    """One JSON object a line: `time` (UTC, RFC 3339), `level`, `logger`, `message`, the fields, `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        """The object. A field that JSON cannot hold becomes text; one named like a fixed key gets a `_` behind it."""
        instant = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, object] = {
            "time": instant.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in record_fields(record).items():
            line[f"{name}_" if name in line else name] = value
        trace = _trace(self, record)
        if trace:
            line["exception"] = "\n".join(trace)
        text = json.dumps(line, default=str, ensure_ascii=False)
        # JSON lets other line breaks pass, and control characters that a terminal obeys.
        return text if text.isprintable() else "".join(_escaped(char) for char in text)


class JournalFormat(logging.Formatter):
    """Another format, each of its lines with the priority that systemd's journal takes off again: `<4>slow`."""

    def __init__(self, form: logging.Formatter) -> None:
        super().__init__()
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        """The lines, as sd-daemon(3) has them."""
        priority = next(number for level, number in _PRIORITIES if record.levelno >= level)
        return "\n".join(f"<{priority}>{line}" for line in self._form.format(record).split("\n"))


class RepeatFilter(logging.Filter):
    """Passes a repeated warning once in `repeat_s`, with `repeated` = the number held back since.

    Two records are of one place when their logger, line, unformatted message, `model` and `code` are equal. Of one
    place, up to DIFFERENT are written in `repeat_s` if they differ in the message's arguments or in file, folder, path,
    topic or version. Only warnings and worse are held back: lower levels log a sequence. Thread: any.
    """

    def __init__(self, clock: Clock, repeat_s: float = REPEAT_S) -> None:
        super().__init__()
        self._repeat_s = repeat_s
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[tuple[object, ...], _Subjects] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write this record; sets its `repeated` when it stands for others."""
        if record.levelno < logging.WARNING:
            return True
        fields = vars(record)
        key = (record.name, record.lineno, str(record.msg), fields.get("model"), fields.get("code"))
        subject = hash(repr((record.args, *(fields.get(name) for name in _SUBJECT))))
        now_s = self._clock.monotonic_s()
        with self._lock:
            seen = self._seen.get(key)
            if seen is not None and now_s - seen.since_s < self._repeat_s:
                return seen.is_new(subject)
            if seen is None and len(self._seen) >= REMEMBERED:
                self._seen.clear()
            self._seen[key] = _Subjects(now_s, subject)
        if seen is not None and seen.held_back:
            record.repeated = seen.held_back
        return True


class _Subjects:
    """The subjects that one place has written since an instant."""

    __slots__ = ("held_back", "since_s", "subjects")

    def __init__(self, since_s: float, subject: int) -> None:
        self.since_s = since_s
        self.subjects = {subject}
        self.held_back = 0

    def is_new(self, subject: int) -> bool:
        """Whether the subject is new and there were fewer than DIFFERENT; otherwise count it as held back."""
        if subject in self.subjects or len(self.subjects) >= DIFFERENT:
            self.held_back += 1
            return False
        self.subjects.add(subject)
        return True


def record_fields(record: logging.LogRecord) -> Mapping[str, object]:
    """The fields that the caller put into `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


# ---- private --------------------------------------------------------------------------------------------------------


def _is_journal(stream: TextIO) -> bool:
    """Whether what is written there goes to systemd's journal, as the unit's environment says (systemd.exec(5))."""
    told = os.environ.get("JOURNAL_STREAM", "")
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):  # io.UnsupportedOperation is both
        return False
    return told == f"{found.st_dev}:{found.st_ino}"


def _shown(value: object) -> str:
    """A value on one line, quoted unless it reads as one word. Control characters cannot reach the terminal."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if text.isprintable() and text and not set(text) & set(' "=') else json.dumps(text)


def _one_line(text: str) -> str:
    """The message with its control characters escaped: a line break in it begins no record."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _escaped(char: str) -> str:
    """A character of a JSON text, so that it is printed."""
    return char if char.isprintable() else json.dumps(char)[1:-1]


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    trace = []
    if record.exc_info and record.exc_info[0] is not None:
        trace.append(formatter.formatException(record.exc_info))
    if record.stack_info:
        trace.append(formatter.formatStack(record.stack_info))
    return trace
