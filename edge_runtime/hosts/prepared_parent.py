"""One prepared parent, as the daemon has it: the process that imported a backend's library and forks hosts.

Owns: how it is started, confined and ended, its channel, and its environment. Its own work is parent.py's; the
thread that follows it is keeper.py's. Imports little: the start of a daemon begins one before it imports what the
daemon is made of, so that the two overlap on two cores.
"""

from __future__ import annotations

import fcntl
import os
import socket
import termios
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from edge_runtime.sandbox.child import Child, library_environment, start_child
from edge_runtime.sandbox.ending import judge_ending

if TYPE_CHECKING:
    from edge_runtime.hosts.process import HostLog, HostProcess

PREPARE_HOSTS = "edge_runtime.hosts.parent:prepare_hosts"
"""The name of its function: the daemon imports nothing of it."""

_OWN_PREFIX = "MODEL_"
"""Variables of the daemon's environment that a `model.py` gets beside those that libraries need."""

_LEAVE_S, _LEAVE_LOOK_S = 1.0, 0.002
"""The time that a prepared parent may take to end its hosts and itself; it needs some milliseconds."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class ParentTask(Struct, frozen=True):
    """The task of a parent: prepare the library of a backend, or of called functions. descriptor: of its socket.

    what, prepare, is_for_calls: as of Preparation.
    """

    what: str
    descriptor: int
    prepare: str = ""
    is_for_calls: bool = False


class Preparation(NamedTuple):
    """The purpose of a prepared parent; equal ones share it. what: the backend of its hosts, or what calls want.

    prepare: what it imports: of a backend's declaration, or as of CallTask. is_code: its hosts run code of users.
    """

    what: str
    prepare: str = ""
    is_code: bool = False
    threads: int = 1
    is_for_calls: bool = False
    niceness: int = 0


class PreparedParent:
    """One prepared parent and its hosts. Thread: the keeper's; any thread may read it, and send to `channel`."""

    def __init__(self, wanted: Preparation) -> None:
        self.wanted = wanted
        self.is_prepared = threading.Event()  # or it has ended
        self.is_leaving = False
        self.has_ended = False
        self.has_failed = False  # ended before it was prepared, by itself
        self.how_it_ended = ""
        self.hosts: dict[int, HostProcess] = {}
        self.idle_since_s = time.monotonic()
        self.look_s = 0.0  # 0: no order is waited for
        self.looks = 0
        self.log: HostLog | None = None
        self.log_reader = -1
        self.channel, self._there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: Child | None = None

    def begin(self) -> None:
        """Start the process, unless it was. Thread: one that lives as long as it. Raises OSError."""
        if self._process is not None:
            return
        self.log_reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(writer, True)
        try:
            self._process = start_child(
                PREPARE_HOSTS,
                ParentTask(self.wanted.what, self._there.fileno(), self.wanted.prepare, self.wanted.is_for_calls),
                stdout=writer,
                has_children=True,
                niceness=self.wanted.niceness,
                pass_fds=[self._there.fileno()],
                environment=self._environment(),
            )
        except OSError:
            os.close(self.log_reader)
            raise
        finally:
            os.close(writer)
            self._there.close()

    def look_at_orders(self) -> None:
        """Look soon whether it has read the orders that it was sent."""
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

    def drop(self) -> None:
        """End one without a keeper. Idempotent."""
        if self._process is not None:
            self.end()
            os.close(self.log_reader)

    def _environment(self) -> Mapping[str, str]:
        """Return the variables that libraries need of the daemon's environment, and how many threads they take."""
        threads = dict.fromkeys(_THREAD_VARIABLES, str(self.wanted.threads))
        if self.wanted.is_code:
            own = {name: value for name, value in os.environ.items() if name.startswith(_OWN_PREFIX)}
            return {**library_environment(), **own, "PYTHONUNBUFFERED": "1", **threads}
        calls = {"OMP_WAIT_POLICY": "passive"} if self.wanted.is_for_calls else {}  # they run beside what serves
        return {**library_environment(), "PYTHONUNBUFFERED": "1", "OPENBLAS_NUM_THREADS": "1", **calls}
