"""The prepared parent: a process that imported one backend's library, and forks hosts that share its pages.

Owns: forking, killing and reaping hosts, in one thread that never blocks on a host. It never loads a model. It ends
when the daemon closes its socket, and its hosts end with it. One that imported a converter's libraries forks
processes that call a function once, and are hosts to it otherwise.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from edge_runtime.backends.host_child import import_backend, serve_host
from edge_runtime.backends.host_messages import (
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
    close_all,
    decode,
    receive_with_descriptors,
    send,
)
from edge_runtime.sandbox.child_main import call_function
from edge_runtime.sandbox.confinement import Confinement
from edge_runtime.sandbox.ending import ShowProgress

OWN_BYTES, RUNNER_BYTES = 32 << 20, 10 << 20
"""What a host needs beside its model, however little that may take: the kernel counts the whole stack of a thread,
8 MiB, and without it no thread starts."""


class ParentTask(Struct, frozen=True):
    """What a parent prepares: a backend's library. descriptor: of its socket to the daemon.

    prepare: the function, `module:name`, that imports for calls, given `backend`; "" for hosts.
    """

    backend: str
    descriptor: int
    prepare: str = ""


def prepare_hosts(task: ParentTask, _: ShowProgress) -> None:
    """Import the library, then fork hosts until the daemon closes the socket. Returns in each host too, at its end."""
    if task.prepare:
        _import_for_calls(task)
    else:
        import_backend(task.backend)
    gc.collect()
    gc.freeze()  # a collection in a host would otherwise write to every page that it shares
    with socket.socket(fileno=task.descriptor) as channel:
        forked = _Forker(channel).serve()
    if forked is None:
        return
    if isinstance(forked.task, HostTask):
        serve_host(forked.task, forked.control, [socket.socket(fileno=each) for each in forked.others])
    else:
        _serve_call(forked.task, forked.control, forked.others[0])


def _import_for_calls(task: ParentTask) -> None:
    module, _, name = task.prepare.partition(":")
    with contextlib.suppress(Exception):  # the call says what cannot be imported
        getattr(importlib.import_module(module), name)(task.backend)


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


@dataclass(frozen=True, slots=True)
class _ForkedHost:
    """A host's own view: its task and its descriptors. others: of its runners, or for its reports."""

    task: HostTask | CallTask
    control: socket.socket
    others: list[int]


class _Forker:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._hosts: dict[int, int] = {}  # process id -> the daemon's number

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
                    ready = {key.fd for key, _ in selector.select()}
                    if woken in ready:
                        with contextlib.suppress(BlockingIOError):
                            os.read(woken, 1 << 12)
                    self._reap()
                    if self._channel.fileno() in ready and (host := self._take_order()) is not None:
                        return host
        except ChannelEnded:
            for pid in self._hosts:
                _kill(pid)
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
                for pid in [pid for pid, number in self._hosts.items() if number == order.host]:
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
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            send(self._channel, Forked(order.host, 0, f"no process can be made: {error.strerror}"))
            return None
        if pid:
            # Invariant: its group exists before anybody may kill it, whichever process runs first.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            self._hosts[pid] = order.host
            send(self._channel, Forked(order.host, pid))
            return None
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        control, log, *others = descriptors
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        os.close(log)
        _confinement(parent, order.task).apply()
        return _ForkedHost(order.task, socket.socket(fileno=control), others)

    def _reap(self) -> None:
        """Report hosts that ended to the daemon, each after all that it started was killed."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            # Invariant: not reaped yet, so the group's number cannot belong to anybody else.
            _kill(ended.si_pid)
            _, status = os.waitpid(ended.si_pid, 0)
            number = self._hosts.pop(ended.si_pid, None)
            if number is not None:
                send(self._channel, Ended(number, os.waitstatus_to_exitcode(status)))


def _confinement(parent: int, task: HostTask | CallTask) -> Confinement:
    """A host sees its version's folder, plain files of the models folder that links in it lead to, and its delegate.

    It may write where OpenVINO is to keep its cache.

    One of PyTorch, whose files may hold code, sees its file alone: a model without a folder lies beside others.
    """
    if isinstance(task, CallTask):  # as nice as its parent, and without network as that is
        return Confinement(parent, has_network=True, reads=task.reads, writes=task.writes)
    cache, delegate = task.options.extra.get("CACHE_DIR", ""), task.options.delegate
    own = task.artifact if task.backend == "pytorch" else str(Path(task.artifact).parent)
    delegates = (delegate,) if delegate.startswith("/") else ()
    within = task.options.within
    own_bytes = OWN_BYTES + (task.runners + task.ahead) * RUNNER_BYTES
    if cache:
        with contextlib.suppress(OSError):  # the library says why it cannot be used
            Path(cache).mkdir(exist_ok=True)
    return Confinement(
        parent,
        has_network=True,  # the parent's filter, which has none, is the host's already
        reads=(own, *delegates),
        within=(*within, *map(os.path.realpath, delegates)) if within else (),
        writes=(cache,) if cache else (),
        memory_bytes=None if task.memory_bytes is None else own_bytes + task.memory_bytes,
    )


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
