"""The memory socket beside an ipc endpoint: hands regions out to clients. docs/shared-memory.md has its protocol.

Owns: the listening Unix socket, its connections, and the protocol's bytes. A connection owns the regions that it asked
for; they end with it. Thread: I/O. Each readable socket costs one message a round of the loop, and nothing here waits.
"""

from __future__ import annotations

import array
import contextlib
import logging
import select
import socket
from enum import IntEnum
from pathlib import Path
from struct import Struct

from edge_runtime.doors.binding import bind_unix
from edge_runtime.doors.io_loop import IoLoop
from edge_runtime.errors import QueueFull
from edge_runtime.hosts.regions import RegionOwner, Regions
from edge_runtime.sandbox.descriptors import Descriptors

log = logging.getLogger(__name__)

MEMORY_PROTOCOL = 1

ASK = Struct("<IIQ")
"""Version, operation, argument."""

TOLD = Struct("<IIQQ16s")
"""Version, answer, region, bytes, secret."""

MAX_CONNECTIONS = 128
"""On one socket; for a further one the oldest that has no region is closed. Each takes a descriptor."""

MAX_ACCEPTS = 8
"""A round of the loop."""

BACKLOG = 512
"""As an endpoint's own: clients reconnect together after a restart."""

_CREDENTIALS = Struct("iII")


class MemoryOperation(IntEnum):
    """A client's operation. ALLOCATE: argument bytes; answered. FREE: the region of that number; not answered."""

    ALLOCATE = 1
    FREE = 2


class MemoryAnswer(IntEnum):
    """The answer to ALLOCATE. FULL: over a bound; `bytes` says how many are left."""

    OK = 0
    FULL = 1
    UNSUPPORTED = 2


class MemorySocket:
    """One listening socket and its connections. Bound by the constructor, watched from `start` on."""

    def __init__(self, loop: IoLoop, path: Path, regions: Regions, mode: int, descriptors: Descriptors) -> None:
        """The endpoint's lock guards this path too. Raises OSError where the socket cannot be bound."""
        self._descriptors = descriptors
        self._most = descriptors.share(MAX_CONNECTIONS)
        self._is_full = self._is_deaf = False
        self._loop = loop
        self._regions = regions
        self._path = path
        self._connections: dict[int, MemoryConnection] = {}
        self._listener = bind_unix(path, mode, socket.SOCK_SEQPACKET)
        self._listener.listen(BACKLOG)

    def start(self) -> None:
        """Let the loop watch it."""
        self._loop.watch(self._listener.fileno(), self._accept)
        self._loop.add_beat(self.sweep)

    def sweep(self) -> None:
        """Listen again where no connection could be taken. At each beat."""
        if self._is_deaf and self._listener.fileno() >= 0:
            self._is_deaf = False
            self._loop.modify(self._listener.fileno(), select.EPOLLIN)

    def close(self) -> None:
        """Remove the socket and close every connection. Idempotent; after the loop has ended."""
        if self._listener.fileno() < 0:
            return
        self._path.unlink(missing_ok=True)
        self._listener.close()
        for connection in list(self._connections.values()):
            connection.close()

    def forget(self, fd: int) -> None:
        """Drop a connection that closed."""
        self._loop.unwatch(fd)
        self._connections.pop(fd, None)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor is left: the next beat tries again, and no round before it
                self._is_deaf = True
                self._loop.modify(self._listener.fileno(), 0)
                log.warning("a memory connection could not be taken", extra={"reason": error.strerror})
                self._loop.counters.count("memory_refused")
                return
            if not self._has_room():
                accepted.close()
                continue
            accepted.setblocking(False)
            connection = MemoryConnection(self, accepted, self._regions, self._descriptors)
            self._connections[accepted.fileno()] = connection
            self._loop.watch(accepted.fileno(), connection.read)

    def _has_room(self) -> bool:
        """Whether one more connection may be kept: the oldest without a region gives way where there are too many."""
        is_full = len(self._connections) >= self._most or not self._descriptors.may_connect()
        if is_full:
            self._loop.counters.count("memory_refused")
            if not self._is_full:
                log.warning("closing memory connections without regions: there are as many as there may be")
        self._is_full = is_full
        if not is_full:
            return True
        idle = next((each for each in self._connections.values() if each.is_idle), None)
        if idle is not None:
            idle.close()
        return idle is not None


class MemoryConnection:
    """One client. Any message that is not the protocol's ends the connection, and with it the client's regions."""

    def __init__(self, door: MemorySocket, accepted: socket.socket, regions: Regions, descriptors: Descriptors) -> None:
        credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(credentials)
        self._door = door
        self._socket = accepted
        self._regions = regions
        self._descriptors = descriptors
        self._owner: RegionOwner = regions.add_owner(uid)

    @property
    def is_idle(self) -> bool:
        """Whether it has no region."""
        return not self._owner.regions

    def read(self) -> None:
        """Answer one message, or note the end."""
        try:
            # Not recvmsg: descriptors that a client sends along are dropped by the kernel.
            message = self._socket.recv(ASK.size + 1)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if len(message) != ASK.size:
            self.close()
            return
        version, operation, argument = ASK.unpack(message)
        if version != MEMORY_PROTOCOL:
            self._tell(MemoryAnswer.UNSUPPORTED)
            self.close()
        elif operation == MemoryOperation.ALLOCATE and argument:
            self._allocate(argument)
        elif operation != MemoryOperation.FREE or not self._regions.free(self._owner, argument):
            self.close()

    def close(self) -> None:
        """End it. Idempotent."""
        fd = self._socket.fileno()
        if fd < 0:
            return
        self._door.forget(fd)
        self._socket.close()
        self._regions.remove_owner(self._owner)

    def _allocate(self, nbytes: int) -> None:
        try:
            if not self._descriptors.may_open():
                raise QueueFull("no descriptor is left for a region")
            number, region = self._regions.allocate(self._owner, nbytes)
        except QueueFull:
            self._tell(MemoryAnswer.FULL, 0, max(self._regions.free_bytes(self._owner), 0))
            return
        self._tell(MemoryAnswer.OK, number, region.file.nbytes, region.file.fd)

    def _tell(self, answer: MemoryAnswer, number: int = 0, nbytes: int = 0, fd: int = -1) -> None:
        told = TOLD.pack(MEMORY_PROTOCOL, answer, number, nbytes, self._owner.secret)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
        try:
            self._socket.sendmsg([told], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:  # it does not read, or is gone
            with contextlib.suppress(OSError):
                self.close()
