"""The thread `edge-hosts`: starts prepared parents, reads their reports and the output of hosts, ends idle parents.

Owns: which parents and hosts there are on the machine, from their start to their end, and what of their output is
logged. The kernel ends a child with the thread that made it, so one thread starts all parents, but for one that
the start of the daemon began early, on its main thread. Imported when the first host is wanted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable

from edge_runtime.hosts.messages import ChannelEnded, Ended, ParentReport, Prepared, close_all, receive
from edge_runtime.hosts.prepared_parent import PreparedParent
from edge_runtime.hosts.process import HostLog, HostProcess

log = logging.getLogger(__name__)

_LOOKS = 10
"""At orders that a parent has not read, within the time that it may leave one unread: counted, since all may have been
stopped together."""

_LAST_READS = 4
"""After a process's end; one takes all that a pipe holds by default (64 KiB, pipe(7))."""

MOST_ENDED_LOGS = 64
"""Kept for the processes after them, which go on with what is left of their shares."""


class HostKeeper:
    """The thread, and the processes and logs that it follows. Thread: any, for the methods of the first part."""

    def __init__(self, parent_idle_s: float, silent_s: float) -> None:
        """silent_s: how long a parent may leave an order unread."""
        self._parent_idle_s = parent_idle_s
        self._step_s = silent_s / _LOOKS
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self._parents: list[PreparedParent] = []
        self._logs: list[HostLog] = []
        self._ended_logs: dict[str, HostLog] = {}
        self._is_closing = False
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="edge-hosts", daemon=True)
        self._thread.start()

    # ---- any thread --------------------------------------------------------------------------------------------------

    def call(self, step: Callable[[], None]) -> None:
        """Call something on this thread, soon."""
        with self._lock:
            self._calls.append(step)
            if not self._has_ended:  # else its number may be another file's by now
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake, b"\0")

    def add(self, parent: PreparedParent, host: HostProcess) -> bool:
        """Watch a host that is about to be forked; False: this parent forks no more."""
        with self._lock:
            if parent.is_leaving:
                return False
            parent.hosts[host.number] = host
        self.call(lambda: self._watch_host_log(host))
        return True

    def retire(self, parent: PreparedParent) -> None:
        """Fork no more hosts there; it ends with its last one."""
        parent.is_leaving = True
        self.call(lambda: None)

    def close(self) -> None:
        """End every parent, and the thread."""
        self._is_closing = True
        self.call(lambda: None)
        self._thread.join()

    # ---- the thread --------------------------------------------------------------------------------------------------

    def start_parent(self, parent: PreparedParent) -> None:
        """Start a parent, unless it was begun early, and read its reports and its output."""
        try:
            parent.begin()
        except OSError as error:
            parent.how_it_ended = f"no process can be made: {error.strerror}"
            self.parent_ended(parent)
            return
        parent.log = self.watch_log(parent.log_reader, f"prepared {parent.wanted.what}")
        self._parents.append(parent)
        self._selector.register(parent.channel, selectors.EVENT_READ, parent)

    def watch_log(self, reader: int, label: str) -> HostLog:
        """Log the lines that come through a pipe until it ends, or `_read_last_words` does."""
        made = HostLog(label, reader)
        before = self._ended_logs.pop(label, None)
        if before is not None:
            made.go_on_from(before)
        self._logs.append(made)
        self._selector.register(reader, selectors.EVENT_READ, made)
        return made

    def parent_ended(self, parent: PreparedParent) -> None:
        """A parent is gone, and its hosts with it."""
        if parent in self._parents:
            self._parents.remove(parent)
            self._selector.unregister(parent.channel)
        parent.has_failed = not (parent.is_prepared.is_set() or parent.is_leaving or self._is_closing)
        parent.end()
        self._read_last_words(parent.log)
        parent.has_ended = True
        parent.is_prepared.set()
        with self._lock:
            left = list(parent.hosts.values())
        for host in left:
            self._host_ended(parent, host, None)

    def _run(self) -> None:
        while not self._is_closing:
            for key, _ in self._selector.select(self._wait_s()):
                self._guarded(key)
            self._call_all()
            self._resume_logs()
            for parent in [each for each in self._parents if self._is_silent(each) or self._may_leave(each)]:
                self.parent_ended(parent)
        self._call_all()
        for parent in list(self._parents):
            self.parent_ended(parent)
        for each in list(self._logs):
            self._read_last_words(each)
        self._selector.close()
        with self._lock:
            self._has_ended = True
            close_all([self._woken, self._wake])

    def _call_all(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for step in calls:
            step()

    def _guarded(self, key: selectors.SelectorKey) -> None:
        try:
            if key.data is None:
                os.read(self._woken, 1 << 12)
            elif isinstance(key.data, HostLog):
                if not key.data.has_ended:  # in this very round
                    self._read_log(key.data)
            else:
                self._hear(key.data)
        except Exception:
            log.exception("an exception reached the loop of hosts")

    def _hear(self, parent: PreparedParent) -> None:
        try:
            report = receive(parent.channel, ParentReport)
        except ChannelEnded:
            self.parent_ended(parent)
            if parent.hosts or not parent.is_leaving:
                log.warning("the process that prepares hosts ended", extra={"reason": parent.how_it_ended})
            return
        if isinstance(report, Prepared):
            parent.idle_since_s = time.monotonic()  # an import from an SD card takes longer than it may be idle
            parent.is_prepared.set()
            return
        with self._lock:
            host = parent.hosts.get(report.host)
        if host is None:
            return
        if isinstance(report, Ended):
            host.ended_for = host.ended_for or report.reason
            self._host_ended(parent, host, report.status)
        elif report.pid:
            host.pid = report.pid
            host.has_forked.set()
        else:
            host.ended_for = report.reason
            self._host_ended(parent, host, None)

    def _host_ended(self, parent: PreparedParent, host: HostProcess, status: int | None) -> None:
        """Report a host's end: first to its owner, then to all threads that wait for it."""
        with self._lock:
            parent.hosts.pop(host.number, None)
            parent.idle_since_s = time.monotonic()
        host.status = status
        self._read_last_words(host.log)
        try:
            if host.on_end is not None:
                host.on_end(host)
        finally:
            host.has_forked.set()
            host.has_ended.set()
            host.hang_up()

    def _wait_s(self) -> float | None:
        ends = [each.idle_since_s + self._parent_idle_s for each in self._parents if not each.hosts]
        ends += [each.look_s for each in self._parents if each.look_s]
        ends += [each.read_again_s for each in self._logs if each.read_again_s]
        return max(min(ends) - time.monotonic(), 0.0) if ends else None

    def _is_silent(self, parent: PreparedParent) -> bool:
        """Whether a parent takes no orders any more. It is killed with its hosts, and another one made."""
        now_s = time.monotonic()
        if not parent.look_s or now_s < parent.look_s:
            return False
        parent.looks = parent.looks + 1 if parent.has_unread() else 0
        parent.look_s = now_s + self._step_s if parent.looks else 0.0
        if parent.looks <= _LOOKS:
            return False
        parent.is_leaving = True
        parent.how_it_ended = f"it was ended, since it took no order for {_LOOKS * self._step_s:g} s"
        log.warning("the process that prepares hosts ended", extra={"reason": parent.how_it_ended})
        return True

    def _may_leave(self, parent: PreparedParent) -> bool:
        with self._lock:
            if parent.hosts:
                return False
            is_idle = time.monotonic() >= parent.idle_since_s + self._parent_idle_s
            if is_idle and parent.is_prepared.is_set():
                parent.is_leaving = True  # from here on no host is forked there
            return parent.is_leaving

    def _watch_host_log(self, host: HostProcess) -> None:
        if host.log_reader >= 0:
            host.log = self.watch_log(host.log_reader, host.label)

    def _read_last_words(self, of: HostLog | None) -> None:
        """Log the rest in the pipe of a process that has ended, and close it: the log may hold the reason.

        A process that outlived it may hold the pipe open, and write without end: a few reads, no more.
        """
        if of is None:
            return
        for _ in range(_LAST_READS):
            if of.has_ended or not self._read_log(of):
                break
        if not of.has_ended:
            self._end_log(of)

    def _read_log(self, of: HostLog) -> bool:
        """Log new bytes; return whether there were any. A process that printed too much is read again later."""
        try:
            piece = os.read(of.reader, 1 << 16)
        except BlockingIOError:
            return False
        if not piece:
            self._end_log(of)
            return False
        is_watched = not of.read_again_s
        of.take(piece, time.monotonic())
        if is_watched and of.read_again_s:
            self._selector.unregister(of.reader)
        return True

    def _resume_logs(self) -> None:
        now_s = time.monotonic()
        for each in self._logs:
            if each.read_again_s and each.read_again_s <= now_s:
                each.read_again_s = 0.0
                self._selector.register(each.reader, selectors.EVENT_READ, each)

    def _end_log(self, of: HostLog) -> None:
        if not of.read_again_s:
            self._selector.unregister(of.reader)
        self._logs.remove(of)
        os.close(of.reader)
        of.end()
        self._ended_logs[of.label] = of
        while len(self._ended_logs) > MOST_ENDED_LOGS:
            del self._ended_logs[next(iter(self._ended_logs))]
