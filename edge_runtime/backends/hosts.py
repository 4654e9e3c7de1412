"""Hosts, seen from the daemon: prepared parents, the processes that they fork, and what those print.

Owns: one prepared parent a backend, started when a host is first wanted and ended when it has had none for a while;
each host's process from its fork to its end, and likewise those that call a function once, as conversions do. Knows no
runs: host_instance.py talks to a loaded host. One thread,
`edge-hosts`, starts the parents, since the kernel ends a child with the thread that made it; it logs what hosts print,
and tells of each end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from edge_runtime.backends.host_messages import (
    CallTask,
    ChannelEnded,
    Ended,
    Fork,
    Hello,
    HostTask,
    Kill,
    ParentReport,
    Prepared,
    close_all,
    new_channel,
    receive,
    send,
)
from edge_runtime.backends.host_parent import ParentTask, prepare_hosts
from edge_runtime.errors import LoadFailed
from edge_runtime.regions import Regions
from edge_runtime.sandbox.child import ChildFunction, Show, TaskT, end_child, follow_child, start_child
from edge_runtime.sandbox.ending import ChildLimits, Ending, ResultT, judge_ending
from edge_runtime.telemetry.logs import TRACEBACK, log_traceback

log = logging.getLogger(__name__)

PREPARE_TIMEOUT_S = 120.0
"""Enough to import the largest library from an SD card."""

FORK_TIMEOUT_S = 5.0
"""A fork takes milliseconds; one that takes this long met a lock that a library's thread held, and hangs."""

FORK_TRIES = 3
"""Each in a new parent, since whatever made a fork hang may make the next one hang too."""

PARENT_IDLE_S = 10.0
"""A parent without hosts stays this long: a crash, a reload and a calibration want the next host soon."""

END_TIMEOUT_S = 10.0
"""Killed processes end at once, unless the kernel writes a large one's pages back meanwhile."""

_STOP_LOOK_S = 0.1
"""How long a stop goes unnoticed while a parent imports."""

_LOG_LINE_BYTES = 4096
"""A longer line is logged in pieces, so a model that prints an endless line costs no memory."""

_TRACEBACK_LINES = 200

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")

_VMSTAT = Path("/proc/vmstat")


class HostProcess:
    """One life of a host, from its fork to its end.

    has_ended is set when the process and all that it started are gone; `status` is known by then (negative: a signal's
    number; None: its parent died first). ended_for: why the daemon killed it, "" where it did not. pipes: the caller's,
    to which one that calls a function prints and reports; a host's log is read here. Thread: any.
    """

    def __init__(self, number: int, task: HostTask | CallTask, label: str, pipes: Sequence[int] = ()) -> None:
        self.number = number
        self.task = task
        self.label = label
        self.pid = 0
        self.status: int | None = None
        self.ended_for = ""
        self.has_ended = threading.Event()
        self.has_forked = threading.Event()
        self.oom_kills = oom_kills()
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
        self._parent: _PreparedParent | None = None
        self.log: _HostLog | None = None

    def begin(self, parent: _PreparedParent) -> None:
        """Have a parent fork it, and close what is the host's here. Raises ChannelEnded: the parent is gone."""
        self._parent = parent
        own = self._pipes or (self._log_writer, *(each.fileno() for each in self._runners_there))
        there = [self._control_there.fileno(), *own]
        try:
            parent.send(Fork(self.number, self.task), there)
        finally:
            self._close_theirs()

    def kill(self, reason: str) -> None:
        """Kill it with all that it started; `has_ended` tells when. reason: what is told of its end. Idempotent."""
        if not self.has_ended.is_set():
            self.ended_for = self.ended_for or reason
            if self._parent is not None:
                with contextlib.suppress(ChannelEnded):
                    self._parent.send(Kill(self.number))

    def hang_up(self) -> None:
        """End its channel, so that it ends by itself, and everything that waits for it wakes. Idempotent."""
        for channel in (self.control, *self.runners):
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        """Give everything back of a host that was never forked."""
        self.close()
        close_all([self.log_reader])

    def close(self) -> None:
        """Give its sockets back, once it has ended and no run uses them. Idempotent."""
        self._close_theirs()
        for channel in (self.control, *self.runners):
            channel.close()

    @property
    def signal_name(self) -> str:
        """The signal that ended it; "" where none did, or none is known."""
        if self.status is None or self.status >= 0:
            return ""
        try:
            return signal.Signals(-self.status).name
        except ValueError:
            return f"signal {-self.status}"

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
        return -self.status in _OUTSIDE and not (-self.status == signal.SIGKILL and oom_kills() > self.oom_kills)

    def memory_bytes(self) -> int:
        """Memory that it holds, with its share of what it shares; 0 where the kernel does not tell."""
        with contextlib.suppress(OSError, IndexError, ValueError):
            for line in Path(f"/proc/{self.pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
        return 0

    def _close_theirs(self) -> None:
        for channel in (self._control_there, *self._runners_there):
            channel.close()
        if self._log_writer >= 0:
            close_all([self._log_writer])
            self._log_writer = -1


_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals by which a person or a service manager ends a process, and no crash does."""


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory; 0 where it does not tell."""
    with contextlib.suppress(OSError, ValueError):
        for line in _VMSTAT.read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


class Hosts:
    """Makes hosts. Thread: any, but the callbacks of HostProcess run on `edge-hosts`, and must not wait."""

    def __init__(
        self,
        *,
        regions: Regions | None = None,
        fork_timeout_s: float = FORK_TIMEOUT_S,
        parent_idle_s: float = PARENT_IDLE_S,
    ) -> None:
        """regions: of clients, which hosts may read."""
        self.regions = regions
        self._fork_timeout_s = fork_timeout_s
        self._parent_idle_s = parent_idle_s
        self._lock = threading.Lock()
        self._parents: dict[_Preparation, _PreparedParent] = {}
        self._keeper: _HostKeeper | None = None
        self._last = 0
        self._is_closed = False
        self._failures: deque[tuple[object, str]] = deque()
        self.on_failure: Callable[[], None] = lambda: None
        self._loads: set[Callable[[str], None]] = set()
        self._takes_loads = True

    def begin_load(self, give_up: Callable[[str], None]) -> None:
        """Keep how a load and its warm-up are given up, until `end_load`. Raises LoadFailed: the daemon stops."""
        with self._lock:
            if not self._takes_loads:
                raise LoadFailed("the daemon stops")
            self._loads.add(give_up)

    def end_load(self, give_up: Callable[[str], None]) -> None:
        """Forget a load. Idempotent."""
        with self._lock:
            self._loads.discard(give_up)

    def end_loads(self) -> None:
        """Give up every load and warm-up under way, and take no more; hosts that are warm go on."""
        with self._lock:
            self._takes_loads = False
            loads = list(self._loads)
        for give_up in loads:
            give_up("the daemon stops")

    def report_failure(self, instance: object, reason: str) -> None:
        """Keep that an instance's host is not started again, and call `on_failure`, which must not wait."""
        self._failures.append((instance, reason))
        self.on_failure()

    def take_failures(self) -> list[tuple[object, str]]:
        """Return the instances that failed since the last call, each with the reason."""
        taken: list[tuple[object, str]] = []
        while self._failures:
            taken.append(self._failures.popleft())
        return taken

    def call(
        self,
        function: ChildFunction[TaskT, ResultT],
        task: TaskT,
        *,
        prepare: Callable[[str], None],
        what: str,
        limits: ChildLimits,
        niceness: int = 0,
        reads: Sequence[Path] = (),
        writes: Sequence[Path] = (),
        stop: threading.Event | None = None,
        show: Show | None = None,
    ) -> Ending[ResultT]:
        """Call a function as `run_child` does, in a process that finds its libraries imported.

        prepare: a module-level function that imports them in the parent, given `what`, which names them. Raises
        LoadFailed: no process can be forked; nothing was called. Leaves no process but the parent.
        """
        order = CallTask(
            what,
            _name_of(prepare),
            _name_of(function),
            msgspec.json.encode(task),
            tuple(map(os.path.abspath, reads)),
            tuple(map(os.path.abspath, writes)),
            niceness,
        )
        printed, prints = os.pipe2(os.O_CLOEXEC)
        reports, reports_there = os.pipe2(os.O_CLOEXEC)
        try:
            try:
                host = self._start(order, what, stop, (prints, reports_there))
            finally:
                close_all([prints, reports_there])
            try:
                return follow_child(_Call(host), function, (reports, printed), limits=limits, stop=stop, show=show)
            finally:
                host.close()
        finally:
            close_all([printed, reports])

    def start(self, task: HostTask, label: str) -> HostProcess:
        """Fork a host, which then loads its model. label: what its lines in the log begin with. Raises LoadFailed."""
        return self._start(task, label)

    def _start(
        self,
        task: HostTask | CallTask,
        label: str,
        stop: threading.Event | None = None,
        pipes: Sequence[int] = (),
    ) -> HostProcess:
        """Fork a process. stop, pipes: as of `call`. Raises LoadFailed."""
        reason = ""
        for _ in range(FORK_TRIES):
            parent = self._parent_of(task)
            if not _wait_until(parent.is_prepared, PREPARE_TIMEOUT_S, stop):
                if stop is not None and stop.is_set():
                    raise LoadFailed("it was stopped")
                parent.keeper.retire(parent)
                reason = f"{task.backend} was not imported within {PREPARE_TIMEOUT_S:g} s"
                continue
            if parent.has_failed:
                self._forget(parent)
                raise LoadFailed(f"importing {task.backend} failed: {parent.how_it_ended}")
            if parent.has_ended:  # it was idle until a moment ago
                reason = "the process that prepares hosts ended"
                self._forget(parent)
                continue
            host, reason = self._try_fork(parent, task, label, pipes)
            if host is not None:
                return host
            self._forget(parent)
            parent.keeper.retire(parent)
        raise LoadFailed(f"no host can be started: {reason}")

    def close(self) -> None:
        """End every parent, and with it its hosts. Idempotent."""
        with self._lock:
            self._is_closed = True
            keeper, self._keeper = self._keeper, None
            self._parents.clear()
        if keeper is not None:
            keeper.close()

    def _try_fork(
        self, parent: _PreparedParent, task: HostTask | CallTask, label: str, pipes: Sequence[int]
    ) -> tuple[HostProcess | None, str]:
        """Fork one host and hear its first word; None, and why not."""
        with self._lock:
            self._last += 1
            host = HostProcess(self._last, task, label, pipes)
        if not parent.keeper.add(parent, host):
            host.drop()
            return None, "the process that prepares hosts ends"
        try:
            host.begin(parent)
            host.control.settimeout(self._fork_timeout_s)
            receive(host.control, Hello)
            host.has_forked.wait(self._fork_timeout_s)
        except TimeoutError:
            reason = f"a fork did not begin within {self._fork_timeout_s:g} s"
        except ChannelEnded:
            host.has_ended.wait(END_TIMEOUT_S)
            reason = host.ended_for or host.how_it_ended
        else:
            return host, ""
        log.warning("a host did not start", extra={"reason": reason, "of": label})
        host.kill(reason)
        host.has_ended.wait(END_TIMEOUT_S)
        host.close()
        return None, reason

    def _parent_of(self, task: HostTask | CallTask) -> _PreparedParent:
        """Return the prepared parent for a task, started where there is none."""
        key = _wanted_by(task)
        with self._lock:
            if self._is_closed:
                raise LoadFailed("the daemon stops")
            parent = self._parents.get(key)
            if parent is not None and not parent.is_leaving:
                return parent
            if self._keeper is None:
                self._keeper = _HostKeeper(self._parent_idle_s)
            parent = self._parents[key] = _PreparedParent(self._keeper, key)
        parent.keeper.call(parent.start)
        return parent

    def _forget(self, parent: _PreparedParent) -> None:
        with self._lock:
            for key in [key for key, each in self._parents.items() if each is parent]:
                del self._parents[key]


class _Preparation(NamedTuple):
    """What a prepared parent is for: processes that want the same share one. prepare: see CallTask, "" for hosts."""

    backend: str
    threads: int = 1
    prepare: str = ""
    niceness: int = 0


def _wanted_by(task: HostTask | CallTask) -> _Preparation:
    if isinstance(task, CallTask):
        return _Preparation(task.backend, 1, task.prepare, task.niceness)
    return _Preparation(task.backend, task.options.threads if task.backend == "python" else 1)


class _Call:
    """A forked process that calls a function. A WatchedChild."""

    def __init__(self, host: HostProcess) -> None:
        self._host = host
        self.pid = host.pid

    def is_alive(self) -> bool:
        return not self._host.has_ended.is_set()

    def kill(self) -> None:
        self._host.kill("it was ended")

    def end(self) -> int:
        self.kill()
        self._host.has_ended.wait(END_TIMEOUT_S)
        # Without a status it died with its parent, which only the kernel ends, for its memory.
        return -signal.SIGKILL if self._host.status is None else self._host.status


def _name_of(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__name__}"


def _wait_until(event: threading.Event, timeout_s: float, stop: threading.Event | None) -> bool:
    """Wait for an event; False where the time is over or `stop` came first."""
    if stop is None:
        return event.wait(timeout_s)
    end_s = time.monotonic() + timeout_s
    while not event.wait(_STOP_LOOK_S):
        if stop.is_set() or time.monotonic() >= end_s:
            return False
    return True


class _PreparedParent:
    """One prepared parent. Thread: the keeper's, but `send` and what is read of it."""

    def __init__(self, keeper: _HostKeeper, wanted: _Preparation) -> None:
        self.keeper = keeper
        self.backend = wanted.backend
        self.is_prepared = threading.Event()  # or it has ended
        self.is_leaving = False
        self.has_ended = False
        self.has_failed = False  # ended before it was prepared, by itself
        self.how_it_ended = ""
        self.hosts: dict[int, HostProcess] = {}
        self.idle_since_s = time.monotonic()
        self.channel, self._there = new_channel()
        self.log_reader = -1
        self._wanted = wanted
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process. Thread: the keeper's, which outlives it."""
        self.log_reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(writer, True)
        try:
            self._process = start_child(
                prepare_hosts,
                ParentTask(self.backend, self._there.fileno(), self._wanted.prepare),
                stdout=writer,
                niceness=self._wanted.niceness,
                pass_fds=[self._there.fileno()],
                environment=self._environment(),
            )
        except OSError as error:
            self.how_it_ended = f"no process can be made: {error.strerror}"
            self.keeper.parent_ended(self)
            return
        finally:
            os.close(writer)
            self._there.close()
        self.keeper.watch_parent(self)

    def send(self, message: Fork | Kill, descriptors: Sequence[int] = ()) -> None:
        """Send an order. Raises ChannelEnded. Thread: any."""
        send(self.channel, message, descriptors)

    def end(self) -> None:
        """Close the channel, kill what is left, reap it. Idempotent."""
        self.is_leaving = True
        self.channel.close()
        self._there.close()
        if self._process is not None:
            end_child(self._process)
            self.how_it_ended = self.how_it_ended or judge_ending(self._process.returncode).reason
            self._process = None

    def _environment(self) -> Mapping[str, str] | None:
        """A model.py gets the daemon's environment, and its own number of threads; a library next to nothing."""
        threads = dict.fromkeys(_THREAD_VARIABLES, str(self._wanted.threads))
        if self.backend == "python":
            return {**os.environ, "PYTHONUNBUFFERED": "1", **threads}
        kept = {name: os.environ[name] for name in _LIBRARY_VARIABLES if name in os.environ}
        calls = {"OMP_WAIT_POLICY": "passive"} if self._wanted.prepare else {}  # they run beside what serves
        return {**kept, "PYTHONUNBUFFERED": "1", "OPENBLAS_NUM_THREADS": "1", **calls}


_LIBRARY_VARIABLES = (
    *("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_PATH", "CUDA_VISIBLE_DEVICES"),
    "ORT_DISABLE_TELEMETRY",
)
"""What libraries need of the environment; keys and passphrases may be in it too."""


@dataclass(slots=True)
class _HostLog:
    """What a process prints: its label, the beginning of a line that has no end yet, and of a traceback."""

    label: str
    line: bytearray = field(default_factory=bytearray)
    traceback: list[str] = field(default_factory=list)
    has_ended: bool = False

    def take(self, piece: bytes) -> None:
        self.line += piece
        while (end := self.line.find(b"\n")) >= 0 or len(self.line) >= _LOG_LINE_BYTES:
            end = end if 0 <= end <= _LOG_LINE_BYTES else _LOG_LINE_BYTES - 1
            self._write(bytes(self.line[: end + 1]))
            del self.line[: end + 1]

    def end(self) -> None:
        self.has_ended = True
        if self.line:
            self._write(bytes(self.line))
        self._write_traceback("a traceback without an end")

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


class _HostKeeper:
    """The thread `edge-hosts`: starts parents, reads what they tell and what hosts print, ends idle parents."""

    def __init__(self, parent_idle_s: float) -> None:
        self._parent_idle_s = parent_idle_s
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self._parents: list[_PreparedParent] = []
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

    def add(self, parent: _PreparedParent, host: HostProcess) -> bool:
        """Watch a host that is about to be forked; False: this parent forks no more."""
        with self._lock:
            if parent.is_leaving:
                return False
            parent.hosts[host.number] = host
        self.call(lambda: self._watch_host_log(host))
        return True

    def retire(self, parent: _PreparedParent) -> None:
        """Fork no more hosts there; it ends with its last one."""
        parent.is_leaving = True
        self.call(lambda: None)

    def close(self) -> None:
        """End every parent, and the thread."""
        self._is_closing = True
        self.call(lambda: None)
        self._thread.join()

    # ---- the thread --------------------------------------------------------------------------------------------------

    def watch_parent(self, parent: _PreparedParent) -> None:
        """Hear a parent that was started."""
        self._parents.append(parent)
        self._selector.register(parent.channel, selectors.EVENT_READ, parent)
        self._watch_log(parent.log_reader, f"prepared {parent.backend}")

    def parent_ended(self, parent: _PreparedParent) -> None:
        """A parent is gone, and its hosts with it."""
        if parent in self._parents:
            self._parents.remove(parent)
            self._selector.unregister(parent.channel)
        parent.has_failed = not (parent.is_prepared.is_set() or parent.is_leaving or self._is_closing)
        parent.end()
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
            for parent in [each for each in self._parents if self._may_leave(each)]:
                self.parent_ended(parent)
        self._call_all()
        for parent in list(self._parents):
            self.parent_ended(parent)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _HostLog):
                self._read_log(key.fd, key.data)
                if key.fd in self._selector.get_map():
                    self._end_log(key.fd, key.data)
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
            elif isinstance(key.data, _HostLog):
                if not key.data.has_ended:  # in this very round
                    self._read_log(key.fd, key.data)
            else:
                self._hear(key.data)
        except Exception:
            log.exception("an exception reached the loop of hosts")

    def _hear(self, parent: _PreparedParent) -> None:
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
            self._host_ended(parent, host, report.status)
        elif report.pid:
            host.pid = report.pid
            host.has_forked.set()
        else:
            host.ended_for = report.reason
            self._host_ended(parent, host, None)

    def _host_ended(self, parent: _PreparedParent, host: HostProcess, status: int | None) -> None:
        """Tell of a host's end: first its owner, then all that wait for it."""
        with self._lock:
            parent.hosts.pop(host.number, None)
            parent.idle_since_s = time.monotonic()
        host.status = status
        self._read_last_words(host)
        try:
            if host.on_end is not None:
                host.on_end(host)
        finally:
            host.has_forked.set()
            host.has_ended.set()
            host.hang_up()

    def _wait_s(self) -> float | None:
        ends = [each.idle_since_s + self._parent_idle_s for each in self._parents if not each.hosts]
        return max(min(ends) - time.monotonic(), 0.0) if ends else None

    def _may_leave(self, parent: _PreparedParent) -> bool:
        with self._lock:
            if parent.hosts:
                return False
            is_idle = time.monotonic() >= parent.idle_since_s + self._parent_idle_s
            if is_idle and parent.is_prepared.is_set():
                parent.is_leaving = True  # from here on nobody forks there
            return parent.is_leaving

    def _watch_host_log(self, host: HostProcess) -> None:
        if host.log_reader >= 0:
            host.log = self._watch_log(host.log_reader, host.label)

    def _watch_log(self, reader: int, label: str) -> _HostLog:
        of = _HostLog(label)
        self._selector.register(reader, selectors.EVENT_READ, of)
        return of

    def _read_last_words(self, host: HostProcess) -> None:
        """Log what is in the pipe of a host that has ended: whoever hears of its end may look for the reason there."""
        while host.log is not None and not host.log.has_ended and self._read_log(host.log_reader, host.log):
            pass

    def _read_log(self, reader: int, of: _HostLog) -> bool:
        """Log what has come; return whether there was something."""
        try:
            piece = os.read(reader, 1 << 16)
        except BlockingIOError:
            return False
        if piece:
            of.take(piece)
        else:
            self._end_log(reader, of)
        return bool(piece)

    def _end_log(self, reader: int, of: _HostLog) -> None:
        self._selector.unregister(reader)
        os.close(reader)
        of.end()
