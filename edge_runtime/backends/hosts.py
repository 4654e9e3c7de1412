"""Hosts, seen from the daemon: the prepared parents, and the thread that follows them and the processes they fork.

Owns: one prepared parent a backend, started when a host is first wanted and ended when it has had none for a while;
which hosts it has, and likewise which processes that call a function once, as conversions do. One process is
host_process.py's; host_instance.py talks to a loaded host. One thread, `edge-hosts`, starts the parents, since the
kernel ends a child with the thread that made it; it logs what hosts print, and tells of each end.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import selectors
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from edge_runtime.backends.base import RunEvents
from edge_runtime.backends.host_messages import (
    CallTask,
    ChannelEnded,
    Ended,
    Hello,
    HostTask,
    ParentReport,
    Prepared,
    close_all,
    new_channel,
    receive,
)
from edge_runtime.backends.host_process import END_TIMEOUT_S, HostLog, HostProcess
from edge_runtime.errors import LoadFailed
from edge_runtime.regions import Regions
from edge_runtime.sandbox.child import (
    Child,
    ChildFunction,
    ChildOutput,
    Show,
    TaskT,
    follow_child,
    library_environment,
    name_of,
    start_child,
)
from edge_runtime.sandbox.descriptors import Descriptors
from edge_runtime.sandbox.ending import ChildLimits, Ending, ResultT, judge_ending
from edge_runtime.sandbox.folder_lock import lock_folder, remove_left_behind
from edge_runtime.sandbox.folder_tree import REMOVAL_S, remove_tree

log = logging.getLogger(__name__)

PREPARE_TIMEOUT_S = 120.0
"""Enough to import the largest library from an SD card."""

FORK_TIMEOUT_S = 5.0
"""A fork takes milliseconds; one that takes this long met a lock that a library's thread held, and hangs.

A parent that leaves orders unread for as long is ended with its hosts: it was stopped, or hangs.
"""

_LOOKS = 10
"""At orders that a parent has not read, within that time: counted, since all may have been stopped together."""

FORK_TRIES = 3
"""Each in a new parent: the cause of a fork that hangs may make the next one hang too."""

PARENT_IDLE_S = 10.0
"""A parent without hosts stays this long: a crash, a reload and a calibration want the next host soon."""

_STOP_LOOK_S = 0.1
"""How long a stop goes unnoticed while a parent imports."""

_FOLDER_PREFIX = "edge-runtime-hosts-"
"""Of the folder below $TMPDIR that holds the temporary folders of hosts."""

_OWN_PREFIX = "MODEL_"
"""Variables of the daemon's environment that a `model.py` gets beside those that libraries need."""

_LAST_READS = 4
"""After a process's end; one takes all that a pipe holds by default (64 KiB, pipe(7))."""

_LEAVE_S, _LEAVE_LOOK_S = 1.0, 0.002
"""What a prepared parent may take to end its hosts and itself; it needs some milliseconds."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class Hosts:
    """Makes hosts. Thread: any, but the callbacks of HostProcess run on `edge-hosts`, and must not wait."""

    def __init__(
        self,
        *,
        regions: Regions | None = None,
        on_failure: Callable[[], None] = lambda: None,
        fork_timeout_s: float = FORK_TIMEOUT_S,
        parent_idle_s: float = PARENT_IDLE_S,
    ) -> None:
        """regions: of clients, which hosts may read. on_failure: called when an instance has failed; must not wait.

        events: the loop on which runs end, set before the first load; None: a thread waits for each run.
        """
        self.regions = regions
        self.events: RunEvents | None = None
        self._fork_timeout_s = fork_timeout_s
        self._parent_idle_s = parent_idle_s
        self._lock = threading.Lock()
        self._parents: dict[_Preparation, _PreparedParent] = {}
        self._keeper: _HostKeeper | None = None
        self._last = 0
        self._is_closed = False
        self._failures: deque[tuple[object, str]] = deque()
        self._on_failure = on_failure
        self._loads: set[Callable[[str], None]] = set()
        self._ends_loads = threading.Event()
        self._end_by_s = math.inf
        self._folder: Path | None = None
        self._folder_lock = -1

    @property
    def takes_loads(self) -> bool:
        """Whether a load may begin: not once the daemon stops. Thread: any."""
        return not self._ends_loads.is_set()

    def begin_load(self, give_up: Callable[[str], None]) -> None:
        """Keep how a load and its warm-up are given up, until `end_load`. Raises LoadFailed: the daemon stops."""
        with self._lock:
            if not self.takes_loads:
                raise LoadFailed("the daemon stops")
            self._loads.add(give_up)

    def end_load(self, give_up: Callable[[str], None]) -> None:
        """Forget a load. Idempotent."""
        with self._lock:
            self._loads.discard(give_up)

    def end_loads(self) -> None:
        """Give up every load and warm-up under way, and take no more; hosts that are warm go on."""
        with self._lock:
            self._ends_loads.set()
            loads = list(self._loads)
        for give_up in loads:
            give_up("the daemon stops")

    def end_by(self, end_s: float) -> None:
        """Wait for no host beyond a moment of the monotonic clock: `close` ends what is left."""
        self._end_by_s = end_s

    def grace_s(self, wanted_s: float) -> float:
        """Return how long to wait for a host that is to end, at most."""
        return max(min(wanted_s, self._end_by_s - time.monotonic()), 0.0)

    def report_failure(self, instance: object, reason: str) -> None:
        """Keep that an instance's host is not started again, for `take_failures`."""
        self._failures.append((instance, reason))
        self._on_failure()

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
        within: tuple[str, ...] = (),
        stop: threading.Event | None = None,
        show: Show | None = None,
    ) -> Ending[ResultT]:
        """Call a function as `run_child` does, in a process that finds its libraries imported.

        prepare: a module-level function that imports them in the parent, given `what`, which names them. Raises
        LoadFailed: no process can be forked; nothing was called. Leaves no process but the parent.
        """
        order = CallTask(
            what,
            name_of(prepare),
            name_of(function),
            msgspec.json.encode(task),
            tuple(map(os.path.abspath, reads)),
            tuple(map(os.path.abspath, writes)),
            within,
            niceness,
        )
        with ChildOutput() as output:
            host = self._start(order, what, stop, (output.prints, output.reports))
            try:
                return follow_child(host, function, output, limits=limits, stop=stop, show=show)
            finally:
                host.close()

    def start(self, task: HostTask, label: str) -> HostProcess:
        """Fork a host, which then loads its model. label: what its lines in the log begin with. Raises LoadFailed."""
        return self._start(task, label, self._ends_loads if self.takes_loads else None)

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
        if self._folder is not None:
            remove_tree(self._folder, REMOVAL_S)
            close_all([self._folder_lock])
            self._folder = None

    def _try_fork(
        self, parent: _PreparedParent, task: HostTask | CallTask, label: str, pipes: Sequence[int]
    ) -> tuple[HostProcess | None, str]:
        """Fork one host and wait for its first message. Returns None and the reason where it did not start."""
        descriptors = Descriptors()
        if not descriptors.may_open():
            return None, f"of the {descriptors.limit} files that this process may open none is left (ulimit -n)"
        with self._lock:
            self._last += 1
            host = HostProcess(self._last, task, label, pipes)
        if not parent.keeper.add(parent, host):
            host.drop()
            return None, "the process that prepares hosts ends"
        try:
            host.begin(parent.channel, lambda: parent.keeper.call(parent.look_at_orders))
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
        host.end(reason)
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
                self._keeper = _HostKeeper(self._parent_idle_s, self._fork_timeout_s)
                self._make_folder()
            parent = self._parents[key] = _PreparedParent(self._keeper, key, str(self._folder or ""))
        parent.keeper.call(parent.start)
        return parent

    def _make_folder(self) -> None:
        """Make the folder for the temporary ones of hosts, and remove those of daemons that were killed."""
        import tempfile

        try:
            parent = Path(tempfile.gettempdir())
            remove_left_behind(parent, _FOLDER_PREFIX, 0.0)
            made = Path(tempfile.mkdtemp(prefix="edge-runtime-"))
            self._folder_lock = lock_folder(made)
            self._folder = made.rename(parent / f"{_FOLDER_PREFIX}{made.name.rpartition('-')[2]}")
        except OSError as error:
            log.warning("hosts get no temporary folders", extra={"reason": str(error)})

    def _forget(self, parent: _PreparedParent) -> None:
        with self._lock:
            for key in [key for key, each in self._parents.items() if each is parent]:
                del self._parents[key]


class _Preparation(NamedTuple):
    """What a prepared parent is for; equal ones share it. prepare: a function's name as of CallTask, "" for hosts."""

    backend: str
    threads: int = 1
    prepare: str = ""
    niceness: int = 0


def _wanted_by(task: HostTask | CallTask) -> _Preparation:
    if isinstance(task, CallTask):
        return _Preparation(task.backend, 1, task.prepare, task.niceness)
    return _Preparation(task.backend, task.options.threads if task.backend == "python" else 1)


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
    """One prepared parent and its hosts. Thread: the keeper's; any thread may read it, and send to `channel`."""

    def __init__(self, keeper: _HostKeeper, wanted: _Preparation, folder: str) -> None:
        self.keeper = keeper
        self.backend = wanted.backend
        self.is_prepared = threading.Event()  # or it has ended
        self.is_leaving = False
        self.has_ended = False
        self.has_failed = False  # ended before it was prepared, by itself
        self.how_it_ended = ""
        self.hosts: dict[int, HostProcess] = {}
        self.idle_since_s = time.monotonic()
        self.look_s = 0.0  # 0: no order is waited for
        self.looks = 0
        self.channel, self._there = new_channel()
        self.log: HostLog | None = None
        self._wanted = wanted
        self._folder = folder
        self._process: Child | None = None

    def start(self) -> None:
        """Start the process. Thread: the keeper's, which outlives it."""
        from edge_runtime.backends.host_parent import ParentTask, prepare_hosts

        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(writer, True)
        self.log = self.keeper.watch_log(reader, f"prepared {self.backend}")
        try:
            self._process = start_child(
                prepare_hosts,
                ParentTask(self.backend, self._there.fileno(), self._wanted.prepare, self._folder),
                stdout=writer,
                has_children=True,
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

    def look_at_orders(self) -> None:
        """Look soon whether it has read what it was sent."""
        self.look_s = self.look_s or time.monotonic()

    def has_unread(self) -> bool:
        """Whether it has not yet read all that it was sent: unix(7), SIOCOUTQ."""
        try:
            return fcntl.ioctl(self.channel, termios.TIOCOUTQ, bytes(4)) != bytes(4)
        except OSError:
            return False

    def end(self) -> None:
        """Close the channel, by which it ends with its hosts; kill what is left, reap it. Idempotent."""
        self.is_leaving = True
        self.channel.close()
        self._there.close()
        if self._process is not None:
            end_s = time.monotonic() + (_LEAVE_S if self.is_prepared.is_set() else 0.0)
            while self._process.is_alive() and time.monotonic() < end_s:
                time.sleep(_LEAVE_LOOK_S)
            status = self._process.end()
            self.how_it_ended = self.how_it_ended or judge_ending(status).reason
            self._process = None

    def _environment(self) -> Mapping[str, str]:
        """Return what libraries need of the daemon's environment, and how many threads they take."""
        threads = dict.fromkeys(_THREAD_VARIABLES, str(self._wanted.threads))
        if self.backend == "python":
            own = {name: value for name, value in os.environ.items() if name.startswith(_OWN_PREFIX)}
            return {**library_environment(), **own, "PYTHONUNBUFFERED": "1", **threads}
        calls = {"OMP_WAIT_POLICY": "passive"} if self._wanted.prepare else {}  # they run beside what serves
        return {**library_environment(), "PYTHONUNBUFFERED": "1", "OPENBLAS_NUM_THREADS": "1", **calls}


class _HostKeeper:
    """The thread `edge-hosts`: starts parents, reads their reports and the output of hosts, ends idle parents."""

    def __init__(self, parent_idle_s: float, silent_s: float) -> None:
        """silent_s: how long a parent may leave an order unread."""
        self._parent_idle_s = parent_idle_s
        self._step_s = silent_s / _LOOKS
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self._parents: list[_PreparedParent] = []
        self._logs: list[HostLog] = []
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
        """Read the reports and the output of a parent that was started."""
        self._parents.append(parent)
        self._selector.register(parent.channel, selectors.EVENT_READ, parent)

    def watch_log(self, reader: int, label: str) -> HostLog:
        """Log what comes through a pipe until it ends, or `_read_last_words` does."""
        made = HostLog(label, reader)
        self._logs.append(made)
        self._selector.register(reader, selectors.EVENT_READ, made)
        return made

    def parent_ended(self, parent: _PreparedParent) -> None:
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
            host.ended_for = host.ended_for or report.reason
            self._host_ended(parent, host, report.status)
        elif report.pid:
            host.pid = report.pid
            host.has_forked.set()
        else:
            host.ended_for = report.reason
            self._host_ended(parent, host, None)

    def _host_ended(self, parent: _PreparedParent, host: HostProcess, status: int | None) -> None:
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

    def _is_silent(self, parent: _PreparedParent) -> bool:
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

    def _may_leave(self, parent: _PreparedParent) -> bool:
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
        """Log what is in the pipe of a process that has ended, and close it: the log may hold the reason.

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
        """Log what has come; return whether there was something. Who printed too much is read again later."""
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
