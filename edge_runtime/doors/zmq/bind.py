"""Binds ZeroMQ endpoints: who may connect, and which may be bound beyond the machine.

Owns: addresses, socket options, CURVE keys, and the client that the daemon is of its own endpoints. Called at start and
stop; transport.py serves the bound ones. Imports no libzmq: that is the clients' library.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import ipaddress
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from edge_runtime.config.endpoints import MAX_IPC_PATH_BYTES, check_endpoint, is_port
from edge_runtime.config.settings import Curve, ZmqSettings
from edge_runtime.doors.binding import (
    BACKLOG,
    IPC_MODE,
    LOOKS,
    PASSING,
    EarlySocket,
    bind_tcp,
    bind_unix,
    lock_path,
)
from edge_runtime.doors.zmq.zmtp import (
    COMMAND,
    MORE,
    Mechanism,
    Null,
    ZmtpHandshake,
    command,
    cut_frame,
    message,
    properties,
)
from edge_runtime.errors import AddressTaken, ConfigError
from edge_runtime.sandbox.descriptors import Descriptors

log = logging.getLogger(__name__)

TCP_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)
"""A silent host is asked after 10 s, and gone 20 s later: it closes nothing, its requests would be run and its replies
kept. The kernel's default is two hours. Connections have them of their listener."""

Z85_KEY = 40
"""Characters of a CURVE key in Z85."""

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
"""The same digits in rfc.zeromq.org/spec/32, and in Python's base64."""

_SIOCGIFADDR = 0x8915
"""The IPv4 address of an interface (netdevice(7))."""


class BoundSocket(Struct):
    """A listening socket, the address that a client uses, and the lock and file to release with it.

    mechanism: makes the security of one connection.
    """

    socket: socket.socket
    address: str
    mechanism: Callable[[], Mechanism] = Null
    lock_fd: int = -1
    ipc_path: Path | None = None
    max_connections: int = 1 << 20
    may_connect: Callable[[], bool] = lambda: True

    def has_room(self, connections: int) -> bool:
        """Whether one more may be kept beside the present number."""
        return connections < self.max_connections and self.may_connect()

    def hide(self) -> None:
        """Remove the socket file, so that no new client finds it; connections go on. Thread: any.

        A tcp address is found until `close`.
        """
        if self.ipc_path is not None:
            self.ipc_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Listen no more. Idempotent. `release` follows."""
        self.socket.close()

    def release(self) -> None:
        """Remove the socket file, release the lock. Idempotent."""
        self.close()
        if self.lock_fd >= 0:
            self.hide()
            os.close(self.lock_fd)
            self.lock_fd = -1


def bind_router(
    address: str,
    settings: ZmqSettings,
    descriptors: Descriptors | None = None,
    *,
    is_control: bool = False,
    early: EarlySocket | None = None,
    keys: ClientKeys | None = None,
) -> BoundSocket:
    """Bind one endpoint, and listen. descriptors: of this process, which say how many connections there may be.

    early: a socket that listens already, at the endpoint that is its own. keys: of the clients that CURVE lets in.

    Raises AddressTaken: another process has it, or the machine has no such address yet; ConfigError: a bad address, or
    one that is open to the network unguarded.
    """
    _check_exposure(address, settings)
    descriptors = descriptors or Descriptors()
    mechanism: Callable[[], Mechanism] = Null
    if settings.curve is not None and not address.startswith("ipc://"):
        mechanism = _curve(settings.curve, keys or ClientKeys(settings.curve.client_keys_file))
    path = _ipc_path(address)
    if path is None:
        bound = _bind(address)
    else:
        bound = _bind_ipc(path, address, early if early is not None and early.path == path else None)
    bound.mechanism = mechanism
    bound.max_connections = descriptors.share(settings.max_connections)
    bound.may_connect = partial(descriptors.may_connect, is_control=is_control)
    bound.socket.listen(BACKLOG)
    return bound


class ServingEndpoint(Protocol):
    """An endpoint, as far as a client of its own process needs it."""

    def adopt(self, accepted: socket.socket, mechanism: Mechanism | None = None) -> None:
        """Serve one connection. Thread: I/O."""
        ...


class Loopback:
    """A client of one endpoint in this process, on the same path as all other clients (models/self_check.py).

    It needs no keys, and no other process can reach its socket. Thread: one at a time.
    """

    def __init__(self, call: Callable[[Callable[[], object]], None], endpoint: ServingEndpoint) -> None:
        """call: runs a function on the endpoint's thread."""
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._data, self._frames, self._replies = b"", list[bytes](), deque[list[bytes]]()
        self._is_greeted = False
        greeting = ZmtpHandshake.begins + b"\x01" + Null.name.ljust(20, b"\0") + bytes(32)
        self._socket.send(greeting + command(b"READY", properties({b"Socket-Type": b"DEALER"})))
        call(partial(endpoint.adopt, theirs, Null()))

    def send(self, frames: Sequence[Any]) -> bool:
        """Send one message; False when the endpoint takes none now."""
        data = b"".join(message(frames))
        try:
            sent = self._socket.send(data)
        except OSError:
            return False
        if sent < len(data):  # the endpoint would take the next one for the rest of this
            self.close()
            return False
        return True

    def receive(self) -> list[bytes] | None:
        """The next reply, None when none is there."""
        try:
            while data := self._socket.recv(1 << 16):
                self._data += data
        except OSError:
            pass
        if not self._is_greeted and len(self._data) >= 64:
            self._data, self._is_greeted = self._data[64:], True
        while self._is_greeted and self._data:
            found = cut_frame(self._data, 0)
            if found is None or found[2] > len(self._data):
                break
            flags, begin, end = found
            frame, self._data = self._data[begin:end], self._data[end:]
            if flags & COMMAND:
                continue
            self._frames.append(frame)
            if not flags & MORE:
                self._replies.append(self._frames)
                self._frames = []
        return self._replies.popleft() if self._replies else None

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._socket.close()


class ClientKeys:
    """The public keys of the clients that may connect by CURVE, from a file. Thread: I/O."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError."""
        self._path = Path(path)
        self._keys = read_client_keys(self._path)

    def reload(self) -> None:
        """Read the list again; a broken file keeps the old one and raises ConfigError. Open connections stay."""
        self._keys = read_client_keys(self._path)

    def has(self, key: bytes) -> bool:
        """Whether a key is on the list."""
        return key in self._keys


def read_client_keys(path: Path) -> frozenset[bytes]:
    """Raw public keys from a file: a Z85 key is the first word of a line, a line of `#` and text is a comment.

    (`#` may begin a key, so a word of 40 characters is always one.) Raises ConfigError naming the line.
    """
    keys: set[bytes] = set()
    for number, line in enumerate(_read_text(path, "zmq.curve.client_keys_file").splitlines(), start=1):
        word = (line.split() or [""])[0]
        if word and (len(word) == Z85_KEY or not word.startswith("#")):
            keys.add(_z85(word, f"{path}:{number}"))
    if not keys:
        raise ConfigError(f"zmq.curve.client_keys_file: {path} holds no key, so no client could connect")
    return frozenset(keys)


def is_this_machine(address: str) -> bool:
    """Whether only this machine reaches an endpoint: ipc, or TCP on loopback."""
    scheme, _, rest = address.partition("://")
    return scheme == "ipc" or _is_loopback(rest)


# ---- private --------------------------------------------------------------------------------------------------------


def _ipc_path(address: str) -> Path | None:
    """The file of an ipc endpoint; None for other transports and for abstract names."""
    if not address.startswith("ipc://") or address.startswith("ipc://@"):
        return None
    return Path(address.removeprefix("ipc://"))


def _bind(address: str) -> BoundSocket:
    """Bind a TCP address, or an abstract name."""
    try:
        if address.startswith("ipc://"):
            name = address.removeprefix("ipc://@")
            if len(os.fsencode(name)) > MAX_IPC_PATH_BYTES:
                raise ConfigError(
                    f"endpoint {address!r}: the name has {len(os.fsencode(name))} bytes and a socket's may have "
                    f"{MAX_IPC_PATH_BYTES}; choose a shorter one"
                )
            bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                bound.bind(f"\0{name}")
                bound.setblocking(False)
            except OSError:
                bound.close()
                raise
            return BoundSocket(bound, address)
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        bound = bind_tcp(_host(host), _port(port, address))
    except socket.gaierror as error:
        raise ConfigError(
            f"cannot bind {address}: {error.strerror}; wanted ipc:///path or tcp://address:port"
        ) from None
    except OSError as error:
        if error.errno in PASSING:
            raise AddressTaken(f"cannot bind {address}: {error.strerror}; free it, or name another endpoint") from None
        if error.errno == errno.EINVAL:
            raise ConfigError(
                f"cannot bind {address}: {error.strerror}; each interface has addresses that begin with "
                "fe80, so name the interface too: tcp://[fe80::1%eth0]:port"
            ) from None
        raise ConfigError(
            f"cannot bind {address}: {error.strerror}; wanted ipc:///path or tcp://address:port"
        ) from None
    for option in TCP_OPTIONS:
        bound.setsockopt(*option)
    own, port_number = bound.getsockname()[:2]
    return BoundSocket(bound, f"tcp://[{own}]:{port_number}" if ":" in own else f"tcp://{own}:{port_number}")


def _bind_ipc(path: Path, address: str, early: EarlySocket | None) -> BoundSocket:
    if early is not None:
        lock_fd, listener = early.take()
        bound = socket.socket(fileno=listener)
        bound.setblocking(False)
        return BoundSocket(bound, address, lock_fd=lock_fd, ipc_path=path)
    lock_fd = _own_path(path)
    try:
        return BoundSocket(bind_unix(path, IPC_MODE), address, lock_fd=lock_fd, ipc_path=path)
    except BaseException as error:
        os.close(lock_fd)
        if isinstance(error, OSError):
            raise ConfigError(f"cannot bind {address}: {error.strerror}; name another endpoint") from None
        raise


def _own_path(path: Path) -> int:
    """Return a descriptor of the lock of a socket's path. Raises AddressTaken; ConfigError: no socket can be there."""
    check_endpoint(f"ipc://{path}")
    lock_fd = lock_path(path, f"ipc://{path}", LOOKS)
    if path.exists() and not path.is_socket():
        os.close(lock_fd)
        raise ConfigError(f"{path} is there and is not a socket; name another endpoint or remove it")
    return lock_fd


def _host(host: str) -> str:
    """The address of a host as endpoints name it: `*` for all, an interface's name, or what a resolver knows."""
    host = host.strip("[]")
    if host == "*":
        return "0.0.0.0"  # noqa: S104 (`_check_exposure` has agreed)
    if host not in {name for _, name in socket.if_nameindex()}:
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            found = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", host.encode()))
        except OSError:
            raise OSError(errno.EADDRNOTAVAIL, f"interface {host} has no IPv4 address") from None
    return socket.inet_ntoa(found[20:24])


def _port(port: str, address: str) -> int:
    if port == "*":
        return 0
    if is_port(port):
        return int(port)
    raise ConfigError(f"cannot bind {address}: got port {port!r}; wanted ipc:///path or tcp://address:port")


def _check_exposure(address: str, settings: ZmqSettings) -> None:
    scheme, _, rest = address.partition("://")
    if scheme not in {"ipc", "tcp"} or not rest or "\0" in rest:
        raise ConfigError(f"endpoint {address!r}: wanted ipc:///path or tcp://address:port")
    if settings.curve is not None or settings.insecure or is_this_machine(address):
        return
    raise ConfigError(
        f"{address} can be reached from other machines: set [zmq.curve] (secret_key_file, client_keys_file), "
        "bind 127.0.0.1, or accept the risk with zmq.insecure = true"
    )


def _is_loopback(rest: str) -> bool:
    host = rest.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in {"localhost", "lo"}


def _curve(curve: Curve, keys: ClientKeys) -> Callable[[], Mechanism]:
    """Return the maker of connections' security by CURVE. Raises ConfigError."""
    try:
        from edge_runtime.doors.zmq import curve as zmtp_curve
    except ImportError as error:
        from edge_runtime.extras import install_advice  # only here: it asks the disk

        raise ConfigError(f"zmq.curve: {error}; {install_advice('curve')}") from None
    path = Path(curve.secret_key_file)
    text = _read_text(path, "zmq.curve.secret_key_file")
    if path.stat().st_mode & 0o077:
        log.warning("the secret key can be read by others", extra={"path": str(path), "advice": f"chmod 600 {path}"})
    word = next((word for word in text.split() if len(word) == Z85_KEY), text.strip())
    return partial(zmtp_curve.CurveHandshake, _z85(word, str(path)), keys.has)


def _z85(text: str, where: str) -> bytes:
    if len(text) == Z85_KEY and all(each in _Z85 for each in text):
        try:
            return base64.b85decode(text.translate(str.maketrans(_Z85, _B85)))
        except ValueError:  # five digits over 32 bits
            pass
    raise ConfigError(f"{where}: got {len(text)} characters that are not a key; wanted 40 characters of Z85")


def _read_text(path: Path, key: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error}") from None
