"""The connections of one ROUTER socket: which there are, which have ended, which do not read, which hide memory.

libzmq hides its connections. It tells the descriptor of each that it accepts and loses (its monitor), and of each
message the descriptor that it came by; the kernel tells of a descriptor what its peer has not read, and what was not
read of it. From these: whose requests nobody waits for any more, and which connection to close when memory grows in
libzmq, out of our sight. Owns: the monitor, and closing a connection. Never reads or writes one. Thread: I/O.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import socket as sockets
import stat
import struct
from collections.abc import Callable, Container
from typing import Any

import zmq

from edge_runtime.transports.zmq_gate import ListenerGate, find_gate

NOBLOCK = int(zmq.DONTWAIT)
LISTENING = int(zmq.EVENT_LISTENING)
ACCEPTED = int(zmq.EVENT_ACCEPTED)
ACCEPT_FAILED = int(zmq.EVENT_ACCEPT_FAILED)
DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
SOURCE_FD = int(zmq.SRCFD)

_EVENT = struct.Struct("=HI")
"""An event's first frame: its kind, and its descriptor (zmq_socket_monitor(3))."""

FIONREAD, TIOCOUTQ = 0x541B, 0x5411
"""Bytes that came and were not read, and bytes that were sent and not read by the peer (ioctl_list(2), unix(7))."""

SUSPECT_BYTES = 4096
"""On their way at a look: a client that fills memory keeps the kernel's buffer full (200 KB), and a small request that
waits for libzmq's busy thread is none."""

SUSPECT_LOOKS, KNOWN_LOOKS, QUIET_LOOKS = 2, 4, 8
"""Looks until a connection is suspect: what has just begun may be whole in a moment, and one that brought messages is
believed longer; and looks until one is quiet."""

AUTOMATIC = 0
"""First byte of an identity that libzmq made, which no client may choose (zmq_setsockopt(3), ZMQ_ROUTING_ID)."""


_numbers = itertools.count()
"""Numbers of monitors: an address in this process stays taken for some time after its socket was closed."""


class ZmqConnection:
    """One accepted connection. identity: known from its first message on.

    unread_bytes: what the peer had not read at the last look. unread_since_s: since when it has read nothing of that;
    None while it reads. While memory grows, in looks at it, quiet_looks: since it brought its last message;
    suspect_looks: since many bytes of the next were seen on their way, 0: none were. has_brought: it brought a message.
    """

    __slots__ = (
        "fd",
        "has_brought",
        "identity",
        "inode",
        "quiet_looks",
        "suspect_looks",
        "unread_bytes",
        "unread_since_s",
    )

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.identity: bytes | None = None
        self.inode = _socket_inode(fd)
        self.unread_bytes = 0
        self.unread_since_s: float | None = None
        self.suspect_looks = self.quiet_looks = 0
        self.has_brought = False

    def look(self, now_s: float, *, has_read: bool) -> None:
        """See whether its peer reads. has_read: it does; a buffer that was filled again looks as before."""
        unread_bytes = unread_of(self.fd)
        if has_read or not unread_bytes or unread_bytes != self.unread_bytes:
            self.unread_since_s = now_s if unread_bytes else None
        self.unread_bytes = unread_bytes

    def close(self) -> bool:
        """Close it; False when it has ended already. libzmq sees an end of file, and drops what it holds of it."""
        try:
            copy = os.dup(self.fd)
        except OSError:
            return False
        try:
            # The number may be another file's by now; the copy holds whatever it is while that is found out.
            if self.inode is None or _socket_inode(copy) != self.inode:
                return False
            with sockets.socket(fileno=copy) as own:
                copy = -1
                own.shutdown(sockets.SHUT_RDWR)
        except OSError:
            return False
        finally:
            if copy >= 0:
                os.close(copy)
        return True


class Connections:
    """The connections of one socket. Made before it is bound.

    ended: called with the identity of a connection that has ended, if libzmq made it: a client that chose its own may
    have come again by another connection. known: the identities of those that are there. untold: of those that ended,
    which `tell` tells. is_owed: whether a reply is still to come for an identity. closed_full: how many were closed,
    since the last look, because there were too many.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        *,
        most: int = 1 << 20,
        may_connect: Callable[[], bool] = lambda: True,
    ) -> None:
        """most: connections at once. may_connect: whether one more may be kept, for all that is not this socket's."""
        self.ended: Callable[[bytes], None] = _ignore
        self.is_owed: Callable[[bytes | None], bool] = lambda _: False
        self.closed_full = 0
        self._most = most
        self._may_connect = may_connect
        self._silent: dict[int, ZmqConnection] = {}
        self._asked: dict[int, ZmqConnection] = {}
        self._gate: ListenerGate | None = None
        self._is_let_in = True
        self.known: dict[bytes, ZmqConnection | None] = {}
        self._monitored = socket
        self._by_fd: dict[int, ZmqConnection] = {}
        self.untold: list[bytes] = []
        address = f"inproc://edge-runtime-connections-{next(_numbers)}"
        socket.monitor(address, LISTENING | ACCEPTED | ACCEPT_FAILED | DISCONNECTED)
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        # Without a bound: at a bound libzmq's own thread would wait for this one.
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.set(zmq.LINGER, 0)
        self.socket.connect(address)

    def __len__(self) -> int:
        return len(self._by_fd)

    def begin(self) -> None:
        """Ask for each connection from now on. Once the socket is bound; before `read`. Thread: any."""
        self._take_in()

    def read(self) -> None:
        """Take in what was accepted and lost since the last time, and tell of it."""
        self._take_in()
        self.tell()

    def tell(self) -> None:
        """Tell of the connections that have ended. Not while requests are gathered: theirs could be among them."""
        while self.untold:
            self.ended(self.untold.pop())

    def meet(self, identity: bytes, frame: Any) -> bool:
        """Learn which connection brought a first message. False: it has ended, and no client waits for the reply."""
        try:
            fd = frame.get(SOURCE_FD)
        except zmq.ZMQError:
            fd = -1
        if fd < 0:  # in this process
            self.known[identity] = None
            return True
        # The monitor tells of a connection before it brings a message, and of the end before that of one with this
        # descriptor: who is not known yet must not be taken for that one, whose end would cancel its requests.
        self._take_in()
        connection = self._by_fd.get(fd)
        if connection is None:
            return identity[0] != AUTOMATIC
        # A descriptor's number is given again at once, and messages outlive their connection. Of two identities the
        # one that libzmq gave later is that of the connection which is there.
        self._silent.pop(fd, None)
        self._asked.pop(fd, None)
        before = connection.identity
        if before is not None and before != identity and before[0] == identity[0] == AUTOMATIC:
            if _is_older(identity, before):
                return False
            self._forget(before)
        connection.identity = identity
        self.known[identity] = connection
        return True

    @property
    def are_met(self) -> bool:
        """Whether each connection has sent a message."""
        return all(each.identity is not None for each in self._by_fd.values())

    def look(self, now_s: float, readers: Container[bytes | None] = ()) -> None:
        """See which peers read. readers: those that are known to have read something."""
        for connection in self._by_fd.values():
            connection.look(now_s, has_read=connection.identity in readers)
        if self.closed_full:
            self._ask_all()
        self._let_in(is_asked=True)

    def unread(self) -> list[ZmqConnection]:
        """Connections whose peers do not read, the longest first."""
        found = [each for each in self._by_fd.values() if each.unread_since_s is not None]
        return sorted(found, key=_unread_since_s)

    def suspect(self, heard: Container[bytes | None]) -> None:
        """Note which connections have bytes on their way. heard: those that brought a message since the last look."""
        for connection in self._by_fd.values():
            connection.quiet_looks += 1
            if connection.identity in heard:
                connection.suspect_looks = connection.quiet_looks = 0
                connection.has_brought = True
            elif connection.suspect_looks or _ioctl(connection.fd, FIONREAD) >= SUSPECT_BYTES:
                connection.suspect_looks += 1

    def trust(self) -> None:
        """Forget what was noted: memory does not grow any more."""
        for connection in self._by_fd.values():
            connection.suspect_looks = connection.quiet_looks = 0
            connection.has_brought = False

    def suspects(self) -> list[ZmqConnection]:
        """Connections that have had bytes on their way for some looks, and brought no message."""
        return [
            each
            for each in self._by_fd.values()
            if each.suspect_looks >= (KNOWN_LOOKS if each.has_brought else SUSPECT_LOOKS)
        ]

    def quiet(self) -> list[ZmqConnection]:
        """Connections that have brought no message for many looks."""
        return [each for each in self._by_fd.values() if each.quiet_looks >= QUIET_LOOKS]

    def close(self) -> None:
        """Stop listening to the monitor. Idempotent; before the monitored socket is closed."""
        if not self.socket.closed:
            if not self._monitored.closed:
                self._monitored.disable_monitor()
            self.socket.close(linger=0)

    def _take_in(self) -> None:
        while True:
            try:
                event, _ = self.socket.recv_multipart(NOBLOCK)
            except zmq.Again:
                return
            kind, fd = _EVENT.unpack(event)
            before = self._by_fd.pop(fd, None)
            if before is not None:
                self._silent.pop(fd, None)
                self._asked.pop(fd, None)
                if before.identity is not None:
                    self._forget(before.identity)
            if kind == LISTENING:
                self._gate = self._gate or find_gate(fd)
                self._let_in(is_asked=True)
            elif kind == ACCEPTED:
                self._by_fd[fd] = self._silent[fd] = ZmqConnection(fd)
                self._is_let_in = False
                if not self._has_room():
                    self._give_way()
                self._let_in()
            elif kind == ACCEPT_FAILED:
                self._let_in(is_asked=True)
            else:
                self._let_in()

    def _has_room(self) -> bool:
        return len(self._by_fd) < self._most and self._may_connect()

    def _let_in(self, *, is_asked: bool = False) -> None:
        """Let libzmq accept one more, where one may be kept. is_asked: even if it was let accept one already."""
        if self._gate is not None and (is_asked or not self._is_let_in) and self._has_room():
            self._is_let_in = True
            self._gate.let_in()

    def _give_way(self) -> None:
        """Close one, so that the next is accepted: the first that has brought no message, else the newest."""
        fd, connection = next(iter(self._silent.items()))
        del self._silent[fd]
        connection.close()
        self.closed_full += 1

    def _ask_all(self) -> None:
        """Let those that have brought nothing since the last look give way, unless a reply is still to come for them.

        One that is not known is met again by its next message, which costs nothing while there is room.
        """
        self._silent = {**self._asked, **self._silent}
        self._asked = {}
        for fd, connection in self._by_fd.items():
            identity = connection.identity
            if identity is None or fd in self._silent or self.is_owed(identity):
                continue
            self.known.pop(identity, None)
            self._asked[fd] = connection

    def _forget(self, identity: bytes) -> None:
        self.known.pop(identity, None)
        if identity[0] == AUTOMATIC:
            self.untold.append(identity)


def unread_of(fd: int) -> int:
    """Bytes that were sent on a socket and not read by its peer, as far as the kernel knows; 0 for a closed one."""
    return _ioctl(fd, TIOCOUTQ)


def _ignore(identity: bytes) -> None:
    """Do nothing: no request came by a connection yet."""


def _is_older(identity: bytes, other: bytes) -> bool:
    """Whether libzmq made an identity before another: it counts them in four bytes after the first."""
    distance = int.from_bytes(other[1:], "big") - int.from_bytes(identity[1:], "big")
    return 0 < distance % (1 << 32) < 1 << 31


def _unread_since_s(connection: ZmqConnection) -> float:
    return connection.unread_since_s or 0.0


def _ioctl(fd: int, request: int) -> int:
    """A number of bytes; 0 for a descriptor that was closed meanwhile."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(fd, request, b"\0\0\0\0"))[0])
    except OSError as error:
        if error.errno in {errno.EBADF, errno.ENOTTY, errno.EINVAL, errno.EOPNOTSUPP}:
            return 0
        raise


def _socket_inode(fd: int) -> int | None:
    """The inode of a socket, which differs where another socket has its number later; None for another file."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else None
