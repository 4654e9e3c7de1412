"""Binds sockets for any door: who owns a path, who may connect to it, and the meaning of a stale socket there.

Owns: lock files, permissions, and the meaning of an error of `bind`; the kernel's facts on a connection. Called when
doors open and close. Thread: main, but for `unread_of`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from edge_runtime.config.endpoints import make_named_folder
from edge_runtime.errors import AddressTaken, ConfigError

IPC_MODE = 0o660
"""Owner and group may connect: a group of clients is how a device shares a socket."""

PASSING = frozenset((errno.EADDRINUSE, errno.EADDRNOTAVAIL))
"""Reasons for a bind to fail that may soon pass: a process still holds the address, or the network is not up."""


_TIOCOUTQ = 0x5411
"""Bytes that were sent and not read by the peer (ioctl_list(2), unix(7))."""


def unread_of(fd: int) -> int:
    """Bytes that were sent on a socket and not read by its peer, as far as the kernel knows. Thread: any."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(fd, _TIOCOUTQ, bytes(4)))[0])
    except OSError as error:
        if error.errno in {errno.EBADF, errno.ENOTTY, errno.EINVAL, errno.EOPNOTSUPP}:
            return 0
        raise


def bind_tcp(host: str, port: int) -> socket.socket:
    """Bind a TCP socket. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.setblocking(False)
    except OSError:
        bound.close()
        raise
    return bound


def bind_unix(path: Path, mode: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """Bind a Unix socket, and replace a stale one: the caller holds the lock of the path. Raises OSError."""
    bound = socket.socket(socket.AF_UNIX, kind)
    try:
        if path.exists() and not path.is_socket():
            raise FileExistsError(errno.EEXIST, "a file that is not a socket is there")
        path.unlink(missing_ok=True)
        with for_owner_only():
            bound.bind(str(path))
        path.chmod(mode)
        bound.setblocking(False)
    except BaseException:
        bound.close()
        raise
    return bound


@contextmanager
def for_owner_only() -> Iterator[None]:
    """Let only the owner use the files that are made inside, until `chmod` says who else may.

    The umask is the whole process's, so it leaves the owner's bits: without them, no thread could enter a folder that
    it makes meanwhile.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


class SocketFiles:
    """The Unix sockets of one door: a path is locked while the door is open, and its socket is removed at the end."""

    def __init__(self) -> None:
        self._paths: list[Path] = []
        self._lock_fds: list[int] = []

    def lock(self, path: Path, address: str) -> None:
        """Own a path before it is bound. Raises AddressTaken, ConfigError."""
        self._lock_fds.append(lock_path(path, address))

    def add(self, path: Path) -> None:
        """Have `release` remove the socket that was bound there."""
        self._paths.append(path)

    def release(self) -> None:
        """Remove the sockets, then let the paths go. Idempotent."""
        for path in self._paths:
            path.unlink(missing_ok=True)
        for fd in self._lock_fds:
            os.close(fd)
        self._paths, self._lock_fds = [], []


BACKLOG = 512
"""Connections waiting to be accepted: several hundred clients may reconnect at once after a restart."""


class EarlySocket(Struct):
    """A Unix socket that clients connect to while its door's code is still imported. `release` the untaken ones."""

    path: Path
    lock_fd: int
    socket: socket.socket

    def take(self) -> tuple[int, int]:
        """Return the descriptors of its lock and of the socket, the caller's from now on."""
        lock_fd, self.lock_fd = self.lock_fd, -1
        return lock_fd, self.socket.detach()

    def release(self) -> None:
        """Remove the socket and let the path go, unless both were taken. Idempotent."""
        if self.lock_fd >= 0:
            self.path.unlink(missing_ok=True)
            self.socket.close()
            os.close(self.lock_fd)
            self.lock_fd = -1


def listen_early(path: Path) -> EarlySocket | None:
    """Listen at a path; None where that is not possible, which `bind_router` then says why."""
    try:
        lock_fd = lock_path(path, f"ipc://{path}")
    except (ConfigError, OSError):
        return None
    try:
        bound = bind_unix(path, IPC_MODE)
    except (OSError, ValueError):
        os.close(lock_fd)
        return None
    bound.listen(BACKLOG)
    return EarlySocket(path, lock_fd, bound)


LOOKS, LOOK_S = 100, 0.02
"""How often, and how far apart, a start looks at a lock that is held, before it says that another daemon serves. A
child that a killed daemon was about to start holds all that the daemon had open, until it executes its own program:
that takes a millisecond, and on a machine that is very busy many times as long."""


def lock_path(path: Path, address: str, looks: int = 1, pause: Callable[[float], None] = time.sleep) -> int:
    """Lock `<path>.lock` until the daemon ends; a socket beside a free lock is stale. Creates the socket's own folder.

    looks: how often to try; `pause` lies between two. Returns a descriptor of the lock. Raises AddressTaken: another
    daemon has it; ConfigError: it cannot be made.
    """
    lock = path.with_name(path.name + ".lock")
    make_named_folder(path.parent, address)
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o660)
    except OSError as error:
        raise ConfigError(f"cannot use {path}: {lock}: {error.strerror}; name another endpoint") from None
    for look in range(looks):
        if look:
            pause(LOOK_S)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        return fd
    os.close(fd)
    raise AddressTaken(f"another daemon serves {address}; stop it, or give this one another endpoint")
