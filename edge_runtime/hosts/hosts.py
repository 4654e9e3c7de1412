"""Hosts, seen from the daemon: which loads are under way in them, and how one more is made.

Owns: one prepared parent a backend, started when a host is first wanted and ended when it has had none for a while;
likewise those of processes that call a function once, as conversions do. The thread that follows them is
keeper.py's, one process process.py's; instance.py talks to a loaded host. A daemon whose models run
inside imports nothing of hosts but this.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edge_runtime.backends.base import RunEvents
from edge_runtime.errors import LoadFailed
from edge_runtime.hosts.regions import Regions
from edge_runtime.sandbox.descriptors import Descriptors

if TYPE_CHECKING:
    from edge_runtime.hosts.keeper import HostKeeper
    from edge_runtime.hosts.messages import CallTask, HostTask, SharedTask
    from edge_runtime.hosts.prepared_parent import Preparation, PreparedParent
    from edge_runtime.hosts.process import HostProcess
    from edge_runtime.hosts.shared_hosts import HostPlace, SharedHosts
    from edge_runtime.sandbox.child import ChildFunction, Show, TaskT
    from edge_runtime.sandbox.ending import ChildLimits, Ending, ResultT

log = logging.getLogger(__name__)

PREPARE_TIMEOUT_S = 120.0
"""Enough to import the largest library from an SD card."""

FORK_TIMEOUT_S = 5.0
"""A fork takes milliseconds; one that takes this long met a lock that a library's thread held, and hangs.

A parent that leaves orders unread for as long is ended with its hosts: it was stopped, or hangs.
"""

FORK_TRIES = 3
"""Each in a new parent: the cause of a fork that hangs may make the next one hang too."""

PARENT_IDLE_S = 10.0
"""A parent without hosts stays this long: a crash, a reload and a calibration want the next host soon."""

_STOP_LOOK_S = 0.1
"""How long a stop goes unnoticed while a parent imports."""

_FOLDER_PREFIX = "edge-runtime-hosts-"
"""Of the folder below $TMPDIR that holds the temporary folders of hosts."""


class Hosts:
    """Makes hosts. Thread: any, but the callbacks of HostProcess run on `edge-hosts`, and must not wait."""

    def __init__(
        self,
        *,
        regions: Regions | None = None,
        on_failure: Callable[[], None] = lambda: None,
        fork_timeout_s: float = FORK_TIMEOUT_S,
        parent_idle_s: float = PARENT_IDLE_S,
        early: PreparedParent | None = None,
    ) -> None:
        """regions: of clients, which hosts may read. on_failure: called when an instance has failed; must not wait.

        early: a parent that was begun before a host was wanted, for `end_early` to end where none is. events: the loop
        on which runs end, set before the first load; None: a thread waits for each run.
        """
        self.regions = regions
        self.events: RunEvents | None = None
        self._early = early
        self._fork_timeout_s = fork_timeout_s
        self._parent_idle_s = parent_idle_s
        self._lock = threading.Lock()
        self._parents: dict[Preparation, PreparedParent] = {}
        self._keeper: HostKeeper | None = None
        self._last = 0
        self._shared: SharedHosts | None = None
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
        """Wait for no host beyond a moment of the monotonic clock: `close` ends those that are left."""
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
        import msgspec

        from edge_runtime.hosts.messages import CallTask
        from edge_runtime.sandbox.child import ChildOutput, follow_child, name_of

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

    def start(self, task: HostTask, label: str) -> HostProcess | HostPlace:
        """Fork a host, or take a place in one that is shared; it then loads its model. Raises LoadFailed.

        label: the beginning of its lines in the log.
        """
        place = self._shared_hosts().place_for(task, label) if task.shared_by else None
        return place or self._fork_host(task, label)

    def _shared_hosts(self) -> SharedHosts:
        from edge_runtime.hosts.shared_hosts import SharedHosts

        with self._lock:
            if self._shared is None:
                self._shared = SharedHosts(self._fork_host, self._fork_timeout_s)
            return self._shared

    def _fork_host(self, task: HostTask | SharedTask, label: str) -> HostProcess:
        return self._start(task, label, self._ends_loads if self.takes_loads else None)

    def _start(
        self,
        task: HostTask | SharedTask | CallTask,
        label: str,
        stop: threading.Event | None = None,
        pipes: Sequence[int] = (),
    ) -> HostProcess:
        """Fork a process. stop, pipes: as of `call`. Raises LoadFailed."""
        reason = ""
        for _ in range(FORK_TRIES):
            keeper, parent = self._parent_of(task)
            if not _wait_until(parent.is_prepared, PREPARE_TIMEOUT_S, stop):
                if stop is not None and stop.is_set():
                    raise LoadFailed("it was stopped")
                keeper.retire(parent)
                reason = f"{task.backend} was not imported within {PREPARE_TIMEOUT_S:g} s"
                continue
            if parent.has_failed:
                self._forget(parent)
                raise LoadFailed(f"importing {task.backend} failed: {parent.how_it_ended}")
            if parent.has_ended:  # it was idle until a moment ago
                reason = "the process that prepares hosts ended"
                self._forget(parent)
                continue
            host, reason = self._try_fork(keeper, parent, task, label, pipes)
            if host is not None:
                return host
            self._forget(parent)
            keeper.retire(parent)
        raise LoadFailed(f"no host can be started: {reason}")

    def end_early(self) -> None:
        """End the parent that was begun early and was not used. Idempotent."""
        with self._lock:
            early, self._early = self._early, None
        if early is not None:
            early.drop()

    def close(self) -> None:
        """End every parent, and with it its hosts. Idempotent."""
        self.end_early()
        with self._lock:
            self._is_closed = True
            keeper, self._keeper = self._keeper, None
            self._parents.clear()
        if keeper is not None:
            keeper.close()
        if self._folder is not None:
            from edge_runtime.sandbox.folder_tree import REMOVAL_S, remove_tree

            remove_tree(self._folder, REMOVAL_S)
            os.close(self._folder_lock)
            self._folder = None

    def _try_fork(
        self,
        keeper: HostKeeper,
        parent: PreparedParent,
        task: HostTask | SharedTask | CallTask,
        label: str,
        pipes: Sequence[int],
    ) -> tuple[HostProcess | None, str]:
        """Fork one host and wait for its first message. Returns None and the reason where it did not start."""
        from edge_runtime.hosts.messages import ChannelEnded, Hello, receive
        from edge_runtime.hosts.process import END_TIMEOUT_S, HostProcess

        descriptors = Descriptors()
        if not descriptors.may_open():
            return None, f"of the {descriptors.limit} files that this process may open none is left (ulimit -n)"
        with self._lock:
            self._last += 1
            host = HostProcess(self._last, task, label, pipes)
        if not keeper.add(parent, host):
            host.drop()
            return None, "the process that prepares hosts ends"
        try:
            folder = "" if self._folder is None else str(self._folder / str(host.number))
            host.begin(parent.channel, lambda: keeper.call(parent.look_at_orders), folder)
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

    def _parent_of(self, task: HostTask | SharedTask | CallTask) -> tuple[HostKeeper, PreparedParent]:
        """Return the prepared parent for a task, started where there is none, and who follows it."""
        from edge_runtime.hosts.keeper import HostKeeper
        from edge_runtime.hosts.prepared_parent import PreparedParent

        key = _wanted_by(task)
        with self._lock:
            if self._is_closed:
                raise LoadFailed("the daemon stops")
            if self._keeper is None:
                self._keeper = HostKeeper(self._parent_idle_s, self._fork_timeout_s)
                self._make_folder()
            keeper = self._keeper
            known = self._parents.get(key)
            if known is not None and not known.is_leaving:
                return keeper, known
            if self._early is not None and self._early.wanted == key:
                parent, self._early = self._early, None
            else:
                parent = PreparedParent(key)
            self._parents[key] = parent
        keeper.call(lambda: keeper.start_parent(parent))
        return keeper, parent

    def _make_folder(self) -> None:
        """Make the folder for the temporary ones of hosts, and remove those of daemons that were killed."""
        import tempfile

        from edge_runtime.sandbox.folder_lock import lock_folder, remove_left_behind

        try:
            parent = Path(tempfile.gettempdir())
            remove_left_behind(parent, _FOLDER_PREFIX, 0.0)
            made = Path(tempfile.mkdtemp(prefix="edge-runtime-"))
            self._folder_lock = lock_folder(made)
            self._folder = made.rename(parent / f"{_FOLDER_PREFIX}{made.name.rpartition('-')[2]}")
        except OSError as error:
            log.warning("hosts get no temporary folders", extra={"reason": str(error)})

    def _forget(self, parent: PreparedParent) -> None:
        with self._lock:
            for key in [key for key, each in self._parents.items() if each is parent]:
                del self._parents[key]


def _wanted_by(task: HostTask | SharedTask | CallTask) -> Preparation:
    from edge_runtime.hosts.messages import CallTask, HostTask
    from edge_runtime.hosts.prepared_parent import Preparation

    if isinstance(task, CallTask):
        return Preparation(task.backend, task.prepare, is_for_calls=True, niceness=task.niceness)
    declared = task.declaration
    threads = task.options.threads if isinstance(task, HostTask) and declared.is_code else 1
    return Preparation(declared.name, declared.prepare, declared.is_code, threads)


def _wait_until(event: threading.Event, timeout_s: float, stop: threading.Event | None) -> bool:
    """Wait for an event; False where the time is over or `stop` came first."""
    if stop is None:
        return event.wait(timeout_s)
    end_s = time.monotonic() + timeout_s
    while not event.wait(_STOP_LOOK_S):
        if stop.is_set() or time.monotonic() >= end_s:
            return False
    return True
