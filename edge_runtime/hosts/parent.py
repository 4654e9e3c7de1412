"""The prepared parent: a process that imported one backend's library, and forks hosts that share its pages.

Owns: forking, killing and reaping hosts, in one thread that never blocks on a host, and the temporary folder of each.
It never loads a model. It ends when the daemon closes its socket, or dies, and its hosts end with it. One that
imported a converter's libraries forks processes that call a function once, and are hosts to it otherwise.

Each host leads a process group that nothing of it can leave (sandbox/confinement.py), so one signal ends all that it
started, however quickly that forks; a process that loses its parent becomes a child of this one, which reaps it. A host
has ended when its group is empty.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

from msgspec import Struct

from edge_runtime.hosts.child import serve_host
from edge_runtime.hosts.messages import (
    CallTask,
    ChannelEnded,
    Ended,
    Fork,
    Forked,
    Hello,
    HostTask,
    Kill,
    ParentOrder,
    Prepared,
    SharedTask,
    close_all,
    decode,
    receive_with_descriptors,
    send,
)
from edge_runtime.hosts.prepared_parent import ParentTask
from edge_runtime.hosts.shared_child import serve_shared
from edge_runtime.plugins import named
from edge_runtime.sandbox.child_main import call_function
from edge_runtime.sandbox.confinement import Confinement, PreparedConfinement
from edge_runtime.sandbox.ending import ShowProgress
from edge_runtime.sandbox.folder_tree import REMOVAL_S, remove_tree, tree_bytes
from edge_runtime.sandbox.processes import MAX_PROCESSES, processes

OWN_BYTES, RUNNER_BYTES = 32 << 20, 10 << 20
"""The memory that a host needs beside its model, however small: the kernel counts the whole stack of a thread,
8 MiB, and without it no thread starts."""

SHARED_THREADS = 24
"""Of a shared host, at the same time: a load each, and as many runs as there are cores."""

FOLDER_BYTES = 256 << 20
"""The size of a host's temporary folder: a library's own needs are a hundredth. /tmp is memory on many devices."""

LOOK_S = 1.0
"""How long a host may have more than these bounds."""

_LEAVE_S = 2.0
"""The time that killed hosts may take before this process ends without them."""

_PR_SET_PDEATHSIG = 1
"""linux/prctl.h."""


def prepare_hosts(task: ParentTask, _: ShowProgress) -> None:
    """Import the library, then fork hosts until the daemon closes the socket. Returns in each host too, at its end."""
    _import(task)
    gc.collect()
    gc.freeze()  # a collection in a host would otherwise write to every page that it shares
    _outlive_the_daemon()
    with socket.socket(fileno=task.descriptor) as channel:
        forked = _Forker(channel).serve()
    if forked is None:
        return
    if isinstance(forked.task, HostTask):
        serve_host(forked.task, forked.control, [socket.socket(fileno=each) for each in forked.others])
    elif isinstance(forked.task, SharedTask):
        serve_shared(forked.control)
    else:
        _serve_call(forked.task, forked.control, forked.others[0])


def _outlive_the_daemon() -> None:
    """Stay for long enough to end all hosts when the daemon dies, which the socket shows.

    Where a signal stopped this process meanwhile, the daemon's death lets it go on.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)


def _import(task: ParentTask) -> None:
    """Import the libraries of a task. Raises nothing: the load or the call names one that cannot be imported."""
    with contextlib.suppress(Exception):
        found = named(task.prepare) if task.prepare else None
        if callable(found):
            found(*((task.what,) if task.is_for_calls else ()))


def _serve_call(task: CallTask, control: socket.socket, reports: int) -> None:
    """Call the function and end, without a library's own end."""
    status = 1
    try:
        send(control, Hello())
        status = call_function(task.function, task.data, reports)
    except (ChannelEnded, OSError):  # the daemon reads no longer
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class _ForkedHost(Struct, frozen=True):
    """A host's own view: its task and its descriptors. others: of its runners, or for its reports."""

    task: HostTask | SharedTask | CallTask
    control: socket.socket
    others: list[int]


class _Forked(Struct):
    """A host as its parent has it. folder: its temporary one, "" for none. status: None while it runs."""

    number: int
    folder: str = ""
    status: int | None = None
    reason: str = ""


class _Forker:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._hosts: dict[int, _Forked] = {}  # process id, which is its group's too
        self._removals: dict[int, Ended] = {}  # process id
        self._look_s = 0.0
        self._known_tasks = 0

    def serve(self) -> _ForkedHost | None:
        """Serve until the daemon is gone, and return None; in each host, return its task."""
        # Python 3.12 warns of a fork beside threads: a library leaves some that hosts do not need.
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        try:
            with selectors.PollSelector() as selector:
                selector.register(self._channel, selectors.EVENT_READ)
                selector.register(woken, selectors.EVENT_READ)
                send(self._channel, Prepared())
                while True:
                    ready = {key.fd for key, _ in selector.select(LOOK_S if self._hosts else None)}
                    if woken in ready:
                        with contextlib.suppress(BlockingIOError):
                            os.read(woken, 1 << 12)
                    self._reap()
                    self._tell_ended()
                    if self._channel.fileno() in ready and (host := self._take_order()) is not None:
                        return host
                    self._hold_bounds()
        except ChannelEnded:
            self._end_all()
            return None
        finally:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            close_all([woken, wake])

    def _take_order(self) -> _ForkedHost | None:
        data, descriptors = receive_with_descriptors(self._channel)
        try:
            order = decode(data, ParentOrder)
            if isinstance(order, Kill):
                for pid in [pid for pid, host in self._hosts.items() if host.number == order.host]:
                    _kill(pid)
                return None
            host = self._fork(order, descriptors)
            if host is not None:
                descriptors = []
            return host
        finally:
            close_all(descriptors)

    def _fork(self, order: Fork, descriptors: list[int]) -> _ForkedHost | None:
        """Fork a host. Returns None here, and in the host its task."""
        folder = self._new_folder(order)
        confinement: PreparedConfinement | None = None
        try:
            confinement = PreparedConfinement(_confinement(os.getpid(), order.task, folder))
            pid = os.fork()
        except OSError as error:
            if confinement is not None:
                confinement.close()
            remove_tree(folder)
            send(self._channel, Forked(order.host, 0, f"no process can be made: {error.strerror}"))
            return None
        if pid:
            confinement.close()
            # Invariant: its group exists before anybody may kill it, whichever process runs first.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            self._hosts[pid] = _Forked(order.host, folder)
            send(self._channel, Forked(order.host, pid))
            return None
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        control, log, *others = descriptors
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        os.close(log)
        if folder:
            os.environ["TMPDIR"] = tempfile.tempdir = folder
        confinement.enter()
        return _ForkedHost(order.task, socket.socket(fileno=control), others)

    def _new_folder(self, order: Fork) -> str:
        """Make a host's temporary folder; "" where none can be made, and for one call, which names its own."""
        if not order.folder or isinstance(order.task, CallTask):
            return ""
        try:
            Path(order.folder).mkdir(0o700)
        except OSError as error:
            sys.stderr.write(f"a host gets no temporary folder: {order.folder}: {error.strerror}\n")
            sys.stderr.flush()
            return ""
        return order.folder

    def _reap(self) -> None:
        """Reap processes that have ended; of a host, kill all that it started."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            host = self._hosts.get(ended.si_pid)
            if host is not None:
                # Invariant: not reaped yet, so the group's number cannot belong to anybody else.
                _kill(ended.si_pid)
            _, status = os.waitpid(ended.si_pid, 0)
            if host is not None:
                host.status = os.waitstatus_to_exitcode(status)
            elif ended.si_pid in self._removals:
                send(self._channel, self._removals.pop(ended.si_pid))

    def _tell_ended(self) -> None:
        """Report hosts that ended to the daemon, each once its group is empty and its folder is gone."""
        for pid, host in list(self._hosts.items()):
            if host.status is None or _has_members(pid):
                continue
            del self._hosts[pid]  # from here on the number may be another's
            report = Ended(host.number, host.status, host.reason)
            removal = self._remove(host.folder)
            if removal:
                self._removals[removal] = report
            else:
                send(self._channel, report)

    def _remove(self, folder: str) -> int:
        """Remove a host's folder: at once where it is empty, else in a process, whose number is returned.

        A host may fill its folder so that this takes many seconds, and others want to be forked and ended meanwhile.
        """
        if not folder:
            return 0
        try:
            Path(folder).rmdir()
        except OSError:
            try:
                pid = os.fork()
            except OSError:
                remove_tree(folder)
                return 0
            if pid:
                return pid
            try:
                self._channel.close()  # else the daemon would not hear that this one's parent ended
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                remove_tree(folder)
            finally:
                os._exit(0)
        return 0

    def _hold_bounds(self) -> None:
        """End the hosts that take more of the device than they may, once in a while."""
        now_s = time.monotonic()
        if now_s < self._look_s or not self._hosts:
            return
        crowded = self._crowded()
        for pid, host in self._hosts.items():
            if host.status is None and not host.reason:
                if pid in crowded:
                    host.reason = f"it had more than {MAX_PROCESSES} processes, and was ended"
                elif host.folder and tree_bytes(host.folder, FOLDER_BYTES) > FOLDER_BYTES:
                    host.reason = f"its temporary folder held more than {FOLDER_BYTES} bytes, and it was ended"
                if host.reason:
                    _kill(pid)
        took_s = time.monotonic() - now_s
        self._look_s = now_s + max(LOOK_S, 5 * took_s)  # hosts are forked and ended meanwhile

    def _crowded(self) -> set[int]:
        """Return the groups with too many processes; looks closely only where the whole machine has many more."""
        try:
            tasks = int(Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[2])
        except (OSError, ValueError, IndexError):
            return set()
        self._known_tasks = min(self._known_tasks or tasks, tasks)
        if tasks <= self._known_tasks + MAX_PROCESSES:
            return set()
        self._known_tasks = tasks
        groups = Counter(each.group for each in processes())
        return {group for group, count in groups.items() if count > MAX_PROCESSES}

    def _end_all(self) -> None:
        """Kill every host with all that it started, and remove their folders."""
        end_s = time.monotonic() + _LEAVE_S
        for pid in self._hosts:
            _kill(pid)
        for pid in self._removals:  # the daemon goes on with it
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        while any(_has_members(pid) for pid in self._hosts) and time.monotonic() < end_s:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.002)
        for host in self._hosts.values():
            if host.folder:
                remove_tree(host.folder, REMOVAL_S)


def _libraries_beside(library: str) -> list[str]:
    """The shared libraries in a library's folder; none where it cannot be listed."""
    try:
        with os.scandir(os.path.dirname(library)) as entries:  # noqa: PTH120
            return [each.path for each in entries if ".so" in each.name]
    except OSError:
        return []


def _confinement(parent: int, task: HostTask | SharedTask | CallTask, folder: str) -> Confinement:
    """A host sees its version's folder, plain files of the models folder that links in it lead to, and its delegate.

    It may write to its temporary folder, and where its library is to keep its cache.

    One whose files may hold code sees its file alone, as the declaration says: a model without a folder lies beside
    others. A shared one sees no model's file: they come opened.
    """
    if isinstance(task, CallTask):  # as nice as its parent, and without network as that is
        return Confinement(
            parent, has_network=True, reads=task.reads, writes=task.writes, within=task.within, inherits=True
        )
    if isinstance(task, SharedTask):
        threads_bytes = OWN_BYTES + SHARED_THREADS * RUNNER_BYTES
        return Confinement(
            parent,
            has_network=True,
            reads=(),
            writes=(folder,) if folder else (),
            memory_bytes=None if task.memory_bytes is None else threads_bytes + task.memory_bytes,
            starts_none=True,
            file_bytes=FOLDER_BYTES,
            inherits=True,
        )
    cache, delegate = task.options.extra.get(task.declaration.cache_option, ""), task.options.delegate
    own = task.artifact if task.declaration.sees == "file" else str(Path(task.artifact).parent)
    # Beside a provider of ONNX Runtime lie the libraries that it loads.
    delegates = (delegate, *_libraries_beside(delegate)) if delegate.startswith("/") else ()
    within = task.options.within
    own_bytes = OWN_BYTES + (task.runners + task.ahead) * RUNNER_BYTES
    if cache:
        with contextlib.suppress(OSError):  # the library says why it cannot be used
            Path(cache).mkdir(exist_ok=True)
    return Confinement(
        parent,
        has_network=True,  # the parent's filter, which has none, is the host's already
        reads=(own, *delegates, *(task.options.steps.files.values() if task.options.steps is not None else ())),
        within=(*within, *map(os.path.realpath, delegates)) if within else (),
        writes=tuple(filter(None, (cache, folder))),
        memory_bytes=None if task.memory_bytes is None else own_bytes + task.memory_bytes,
        starts_none=not task.declaration.starts_processes,
        file_bytes=None if cache else FOLDER_BYTES,  # a compiled model may be as large as the model
        inherits=True,
    )


def _kill(group: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)


def _has_members(group: int) -> bool:
    """Whether a process of a host is left: each is a child of this process, or will be once its own parent is gone."""
    try:
        os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
