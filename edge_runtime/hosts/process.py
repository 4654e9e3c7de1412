"""One host's process, as the daemon has it: its sockets and its log, its output, and how it ended.

Owns: the descriptors of a process from before its fork until it is gone. hosts.py has it forked, and follows it;
instance.py talks to it. Its runs are runner.py's.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence

from msgspec import Struct, field

from edge_runtime.hosts.messages import (
    CallTask,
    ChannelEnded,
    Fork,
    HostTask,
    Kill,
    SharedTask,
    close_all,
    new_channel,
    send,
)
from edge_runtime.sandbox.ending import is_from_outside, judge_ending, signal_name
from edge_runtime.sandbox.process_memory import oom_kills, proportional_bytes
from edge_runtime.telemetry.logs import TRACEBACK, log_traceback

log = logging.getLogger(__name__)

END_TIMEOUT_S = 10.0
"""Killed processes end at once, unless the kernel writes a large one's pages back meanwhile."""

_LOG_LINE_BYTES = 4096
"""A longer line is logged in pieces, so a model that prints an endless line costs no memory."""

_TRACEBACK_LINES = 200

LOG_BYTES_A_SECOND = 16 << 10
"""Of one process: some hundred lines a second, for ever. Without a bound `yes` wrote 9 MB a second to the disk."""

LOG_BURST_BYTES = 256 << 10
"""The bytes that it may log at once: the output of libraries at a load is a tenth of it."""

_RECORD_BYTES = 100
"""The bytes of a log line beside its text: time, level, label."""

_READ_BYTES_A_SECOND = 1 << 20
"""The bytes read of its pipe in a second, logged or not, so that reading costs no core; more waits a second."""

_TAIL_BYTES, _TAIL_LINES = 2000, 40
"""Of the output that was not logged: its end may say why the process ended."""


class HostProcess:
    """One life of a host, from its fork to its end.

    has_ended is set when the process and all that it started are gone; `status` is known by then (negative: a signal's
    number; None: its parent died first). ended_for: why the daemon killed it, "" where it did not. pipes: the caller's,
    to which one that calls a function prints and reports; a host's log is read here. A WatchedChild. Thread: any.
    """

    is_suspect = False
    """Whether its models may have ended a host that others shared; of a place, see shared_hosts.py."""

    is_one_of_many = False
    """Whether it ended with a host that others shared, and one of those may be to blame."""

    models = 1

    def __init__(
        self, number: int, task: HostTask | SharedTask | CallTask, label: str, pipes: Sequence[int] = ()
    ) -> None:
        self.number = number
        self.task = task
        self.label = label
        self.pid = 0
        self.status: int | None = None
        self.ended_for = ""
        self.has_ended = threading.Event()
        self.has_forked = threading.Event()
        self._oom_kills = oom_kills()
        self.on_end: Callable[[HostProcess], None] | None = None
        self.control, self._control_there = new_channel()
        runners = task.runners + task.ahead if isinstance(task, HostTask) else 0
        pairs = [new_channel() for _ in range(runners)]
        self.runners = [mine for mine, _ in pairs]
        self._runners_there = [there for _, there in pairs]
        self._pipes = pipes
        self.log_reader = self._log_writer = -1
        if not pipes:
            self.log_reader, self._log_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            os.set_blocking(self._log_writer, True)
        self._parent: socket.socket | None = None
        self._watch_orders: Callable[[], None] = lambda: None
        self.log: HostLog | None = None

    def begin(self, parent: socket.socket, watch_orders: Callable[[], None] = lambda: None, folder: str = "") -> None:
        """Have the prepared parent fork it, and close its own ends here. Raises ChannelEnded: the parent is gone.

        watch_orders: called after each order to the parent; must not wait. folder: as of Fork.
        """
        self._parent = parent
        self._watch_orders = watch_orders
        own = self._pipes or (self._log_writer, *(each.fileno() for each in self._runners_there))
        there = [self._control_there.fileno(), *own]
        try:
            send(parent, Fork(self.number, self.task, folder), there)
        finally:
            self._close_theirs()
            watch_orders()

    def is_alive(self) -> bool:
        """Return whether it runs."""
        return not self.has_ended.is_set()

    def end(self, reason: str = "it was ended", limit_s: float = END_TIMEOUT_S) -> int:
        """Kill it and wait; returns its exit status. reason: as of `kill`. Idempotent."""
        self.kill(reason)
        self.has_ended.wait(limit_s)
        # Without a status it died with its parent, which only the kernel ends, for its memory.
        return -signal.SIGKILL if self.status is None else self.status

    def kill(self, reason: str = "it was ended") -> None:
        """Kill it with all that it started; `has_ended` shows when. reason: of its end. Idempotent."""
        if not self.has_ended.is_set():
            self.ended_for = self.ended_for or reason
            if self._parent is not None:
                with contextlib.suppress(ChannelEnded):
                    send(self._parent, Kill(self.number))
                self._watch_orders()

    def leave(self, reason: str, limit_s: float = END_TIMEOUT_S, grace_s: float = 0.0) -> None:
        """End it, which is wanted no more and has done nothing wrong. limit_s: how long to wait. Idempotent.

        grace_s: the time that it gets to end by itself.
        """
        self.hang_up()
        if grace_s:
            self.has_ended.wait(grace_s)
        self.end(reason, limit_s)

    def hang_up(self) -> None:
        """End its channels: the host ends by itself, and every thread that waits for it wakes. Idempotent."""
        for channel in (self.control, *self.runners):
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        """Release all that a host has which was never forked."""
        self.close()
        close_all([self.log_reader])

    def close(self) -> None:
        """Close its sockets, once it has ended and no run uses them. Idempotent."""
        self._close_theirs()
        for channel in (self.control, *self.runners):
            channel.close()

    @property
    def signal_name(self) -> str:
        """The signal that ended it; "" where none did, or none is known."""
        return "" if self.status is None else signal_name(self.status)

    @property
    def how_it_ended(self) -> str:
        """How it ended, as a sentence about "it"."""
        if self.ended_for:
            return self.ended_for
        if self.status is None:
            return "its process ended with the one that prepared it"
        return judge_ending(self.status).reason

    @property
    def was_ended_from_outside(self) -> bool:
        """Whether a signal ended it that neither the model nor the daemon sent, and not the kernel for its memory."""
        if self.ended_for:
            return False
        if self.status is None:
            return True
        return is_from_outside(self.status, memory_ran_out=oom_kills() > self._oom_kills)

    def memory_bytes(self) -> int:
        """Memory that it holds, with its share of what it shares; 0 where the kernel does not report it."""
        return proportional_bytes(self.pid)

    def _close_theirs(self) -> None:
        for channel in (self._control_there, *self._runners_there):
            channel.close()
        if self._log_writer >= 0:
            close_all([self._log_writer])
            self._log_writer = -1


class HostLog(Struct):
    """The output of a process in a pipe: each second's share is logged, the rest is counted.

    reader: the pipe's end here, which `edge-hosts` reads and closes. line: the beginning of a line that has no end yet.
    read_again_s: when the pipe is read next. Thread: `edge-hosts`.
    """

    label: str
    reader: int
    line: bytearray = field(default_factory=bytearray)
    traceback: list[str] = field(default_factory=list)
    has_ended: bool = False
    read_again_s: float = 0.0
    _read_bytes: int = 0
    _read_since_s: float = -math.inf
    _budget_bytes: float = LOG_BURST_BYTES
    _budget_s: float = 0.0
    _left_out: int = 0
    _tail: bytes = b""

    def take(self, piece: bytes, now_s: float) -> None:
        """Log the lines that are whole, as far as the budget goes; keep the rest."""
        self._account(len(piece), now_s)
        self.line += piece
        while (end := self.line.find(b"\n")) >= 0 or len(self.line) >= _LOG_LINE_BYTES:
            if self._left_out or self._budget_bytes <= 0:
                self._leave_out()
                return
            end = end if 0 <= end <= _LOG_LINE_BYTES else _LOG_LINE_BYTES - 1
            self._budget_bytes -= end + _RECORD_BYTES
            self._write(bytes(self.line[: end + 1]))
            del self.line[: end + 1]

    def go_on_from(self, before: HostLog) -> None:
        """Have what is left of the share of the process before it: one that ends and is started again gets no more."""
        self._budget_bytes, self._budget_s = before._budget_bytes, before._budget_s

    def end(self) -> None:
        """Log the lines that are left, and the end of the output that was left out."""
        self.has_ended = True
        tail = self._tail
        if self._left_out:
            self._tell_left_out()
        for line in (tail + bytes(self.line)).splitlines()[-_TAIL_LINES:]:
            self._write(line)
        self._write_traceback("a traceback without an end")

    def _account(self, nbytes: int, now_s: float) -> None:
        """Count bytes read, and see how many may be logged now; a quarter of a burst must be free after too many."""
        if now_s - self._read_since_s >= 1.0:
            self._read_bytes, self._read_since_s = 0, now_s
        self._read_bytes += nbytes
        if self._read_bytes >= _READ_BYTES_A_SECOND:
            self.read_again_s = self._read_since_s + 1.0
        gained = LOG_BYTES_A_SECOND * (now_s - self._budget_s)
        self._budget_bytes, self._budget_s = min(self._budget_bytes + gained, LOG_BURST_BYTES), now_s
        if self._left_out and self._budget_bytes >= LOG_BURST_BYTES / 4:
            self._tell_left_out()

    def _leave_out(self) -> None:
        """Count the whole lines that there are, and forget them."""
        self._write_traceback("a traceback without an end")
        end = self.line.rfind(b"\n") + 1 or len(self.line)
        self._tail = (self._tail + bytes(self.line[max(end - _TAIL_BYTES, 0) : end]))[-_TAIL_BYTES:]
        self._left_out += end
        del self.line[:end]

    def _tell_left_out(self) -> None:
        nbytes, self._left_out, self._tail = self._left_out, 0, b""
        bound = f"a model may log {LOG_BYTES_A_SECOND} bytes a second"
        log.warning("%s: %d bytes that it printed are left out: %s", self.label, nbytes, bound)

    def _write(self, line: bytes) -> None:
        """One record a line, and one a traceback, which ends with the first line that is not indented."""
        text = line.decode(errors="replace").rstrip()
        if text == TRACEBACK or (self.traceback and text.startswith(" ") and len(self.traceback) < _TRACEBACK_LINES):
            self.traceback.append(text)
        elif self.traceback:
            self.traceback.append(text)
            self._write_traceback(text)
        else:
            log.info("%s: %s", self.label, text)

    def _write_traceback(self, text: str) -> None:
        if self.traceback:
            lines, self.traceback = self.traceback, []
            log_traceback(log, f"{self.label}: {text}", "\n".join(lines))
