"""Binds ROUTER sockets: who may connect, and what may be bound beyond the machine.

Owns: socket options, CURVE keys and the ZAP responder. Called at start and stop; only zmq_transport.py uses the
sockets.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from edge_runtime.config.settings import Curve, ZmqSettings
from edge_runtime.errors import AddressTaken, ConfigError
from edge_runtime.sandbox.descriptors import Descriptors
from edge_runtime.telemetry.metrics import Counters
from edge_runtime.transports.binding import BACKLOG, IPC_MODE, PASSING, EarlySocket, for_owner_only, lock_path
from edge_runtime.transports.unsent_replies import TRACKED_BYTES
from edge_runtime.transports.zmq_connections import Connections

log = logging.getLogger(__name__)

MAX_IPC_PATH = 107
"""sun_path of Linux, less its final NUL."""

HANDSHAKE_MS = 2_000
"""A connection that says nothing is closed after this; libzmq's default of 30 s let 200 silent ones pile up."""

RECEIVE_MESSAGES = 1_000
"""Messages read ahead of us for each connection: beyond it the backlog stays in the client."""

MIN_SEND_MESSAGES = 64
"""A few small replies may always wait for a peer, even with the least memory."""

TCP_KEEPALIVE = (
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 10),
    (zmq.TCP_KEEPALIVE_INTVL, 5),
    (zmq.TCP_KEEPALIVE_CNT, 4),
)
"""A silent host is asked after 10 s, and gone 20 s later; the kernel's default is two hours."""

Z85_KEY = 40
"""Characters of a CURVE key in Z85."""

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"edge-runtime"


Context = zmq.Context[zmq.Socket[bytes]]


def new_context() -> Context:
    """Make the context of all sockets, with libzmq's own I/O thread; call `term` after the last socket is closed."""
    return zmq.Context()


@dataclass(slots=True)
class BoundSocket:
    """A bound ROUTER, its connections, the address that a client uses, and the lock and file to release with it."""

    socket: zmq.Socket[bytes]
    connections: Connections
    address: str
    lock_fd: int = -1
    ipc_path: Path | None = None

    def hide(self) -> None:
        """Remove the socket file, so that no new client finds it; connections go on. Thread: any.

        A tcp address is found until `close`: libzmq's own unbind would end the connections.
        """
        if self.ipc_path is not None:
            self.ipc_path.unlink(missing_ok=True)

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; replies not sent yet get `linger_ms`. Idempotent. `release` follows."""
        self.connections.close()
        if not self.socket.closed:
            self.socket.close(linger=linger_ms)

    def release(self) -> None:
        """Remove the socket file, release the lock. Idempotent.

        After the context has ended: until then libzmq's thread may remove the file, which could be the next daemon's.
        """
        if self.lock_fd >= 0:
            self.hide()
            os.close(self.lock_fd)
            self.lock_fd = -1


def bind_router(
    context: Context,
    address: str,
    settings: ZmqSettings,
    descriptors: Descriptors | None = None,
    *,
    is_control: bool = False,
    early: EarlySocket | None = None,
) -> BoundSocket:
    """Bind one endpoint. descriptors: of this process, which say how many connections there may be.

    early: what listens already, at the endpoint that is its own.

    Raises AddressTaken: another process has it, or the machine has no such address yet; ConfigError: a bad address, or
    one that is open to the network unguarded.
    """
    _check_exposure(address, settings)
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    connections: Connections | None = None
    try:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.MAXMSGSIZE, settings.max_frame_bytes)
        socket.set(zmq.RCVHWM, RECEIVE_MESSAGES)
        # Before bind, and never again: a connection gets the marks its listener was bound with, and lowering the mark
        # of a live one wedges it. Replies larger than this counts with are bounded in bytes (`UnsentReplies`).
        socket.set(zmq.SNDHWM, max(settings.send_bound_bytes // TRACKED_BYTES, MIN_SEND_MESSAGES))
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.set(zmq.BACKLOG, BACKLOG)
        if address.startswith("tcp://"):
            # A host that vanished closes nothing: its requests would be run, and its replies kept.
            for option, value in TCP_KEEPALIVE:
                socket.set(option, value)
        if settings.curve is not None and not address.startswith("ipc://"):
            _use_curve(socket, settings.curve)
        # libzmq accepts without asking, and aborts the process where no descriptor is left (ipc_listener.cpp).
        descriptors = descriptors or Descriptors()
        connections = Connections(
            context,
            socket,
            most=descriptors.share(settings.max_connections),
            may_connect=partial(descriptors.may_connect, is_control=is_control),
        )
        path = _ipc_path(address)
        if path is None:
            return _bind(socket, connections, address)
        return _bind_ipc(socket, connections, address, early if early is not None and early.path == path else None)
    except BaseException:
        if connections is not None:
            connections.close()
        socket.close(linger=0)
        raise


class Loopback:
    """A client of one bound ROUTER in this process, on the same socket as all other clients (self_check.py).

    Its address is of the kind `inproc`, which no other process can name and which needs no keys. Thread: one at a time.
    """

    def __init__(self, context: Context, bound: BoundSocket) -> None:
        address = f"inproc://edge-runtime-{bound.address}"
        bound.socket.bind(address)
        self._socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(address)

    def send(self, frames: Sequence[Any]) -> bool:
        """Send one message; False when the endpoint takes none now."""
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[bytes] | None:
        """The next reply, None when none is there."""
        try:
            return self._socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return None

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._socket.close(linger=0)


class ZapResponder:
    """Decides for libzmq whether a CURVE client may connect: its key must be on the list.

    It runs on the I/O thread (`handle` when `socket` is readable), so there is no serving without it. Without a
    responder libzmq accepts every key (measured).
    """

    def __init__(self, context: Context, client_keys_file: str, counters: Counters) -> None:
        self._counters = counters
        self._keys_file = Path(client_keys_file)
        self._keys = read_client_keys(self._keys_file)
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(ZAP_ENDPOINT)

    def reload(self) -> None:
        """Read the allow-list again; a broken file keeps the old list. Connections already open stay."""
        self._keys = read_client_keys(self._keys_file)

    def handle(self) -> None:
        """Answer every waiting request. ZAP 1.0 (rfc.zeromq.org/spec/27): fields by position."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            envelope, fields = frames[:2], frames[2:]
            is_known = len(fields) == 7 and fields[5] == b"CURVE" and fields[6] in self._keys
            status, text = (b"200", b"OK") if is_known else (b"400", b"key is not on the list")
            if not is_known:
                self._counters.count("curve_denied")
            request_id = fields[1] if len(fields) > 1 else b""
            self.socket.send_multipart([*envelope, b"1.0", request_id, status, text, b"", b""])

    def close(self) -> None:
        """Stop answering. Idempotent."""
        self.socket.close(linger=0)


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


# ---- private --------------------------------------------------------------------------------------------------------


def _ipc_path(address: str) -> Path | None:
    """The file of an ipc endpoint; None for other transports and for abstract names."""
    if not address.startswith("ipc://") or address.startswith("ipc://@"):
        return None
    return Path(address.removeprefix("ipc://"))


def _bind(socket: zmq.Socket[bytes], connections: Connections, address: str) -> BoundSocket:
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        if error.errno in PASSING:
            raise AddressTaken(f"cannot bind {address}: {error.strerror}; free it, or name another endpoint") from None
        raise ConfigError(
            f"cannot bind {address}: {error.strerror}; wanted ipc:///path or tcp://address:port"
        ) from None
    connections.begin()
    return BoundSocket(socket, connections, bytes(socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode())


def _bind_ipc(
    socket: zmq.Socket[bytes], connections: Connections, address: str, early: EarlySocket | None
) -> BoundSocket:
    path = _ipc_path(address)
    assert path is not None
    if early is not None:
        lock_fd, listener = early.take()
        socket.set(zmq.USE_FD, listener)
    else:
        lock_fd = _own_path(path)
    try:
        with for_owner_only():
            bound = _bind(socket, connections, address)
        path.chmod(IPC_MODE)
    except BaseException:
        os.close(lock_fd)
        raise
    bound.lock_fd, bound.ipc_path, bound.address = lock_fd, path, address
    return bound


def _own_path(path: Path) -> int:
    """Return a descriptor of the lock of a socket's path. Raises AddressTaken; ConfigError: no socket can be there."""
    if len(os.fsencode(path)) > MAX_IPC_PATH:
        size = len(os.fsencode(path))
        raise ConfigError(f"ipc://{path}: the path is {size} bytes, a Unix socket takes {MAX_IPC_PATH}")
    lock_fd = lock_path(path, f"ipc://{path}")
    if path.exists() and not path.is_socket():
        os.close(lock_fd)
        raise ConfigError(f"{path} is there and is no socket; name another endpoint or remove it")
    return lock_fd


def is_this_machine(address: str) -> bool:
    """Whether only this machine reaches an endpoint: ipc, or TCP on loopback."""
    scheme, _, rest = address.partition("://")
    return scheme == "ipc" or _is_loopback(rest)


def _check_exposure(address: str, settings: ZmqSettings) -> None:
    scheme, _, rest = address.partition("://")
    if scheme not in {"ipc", "tcp"} or not rest:
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


def _use_curve(socket: zmq.Socket[bytes], curve: Curve) -> None:
    if not zmq.has("curve"):
        raise ConfigError("zmq.curve: this libzmq was built without CURVE; install the pyzmq wheel from PyPI")
    path = Path(curve.secret_key_file)
    text = _read_text(path, "zmq.curve.secret_key_file")
    if path.stat().st_mode & 0o077:
        log.warning("the secret key can be read by others", extra={"path": str(path), "advice": f"chmod 600 {path}"})
    word = next((word for word in text.split() if len(word) == Z85_KEY), text.strip())
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, _z85(word, str(path)))
    socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)


def _z85(text: str, where: str) -> bytes:
    from zmq.utils import z85

    try:
        if len(text) == Z85_KEY:
            return bytes(z85.decode(text.encode("ascii")))
    except (ValueError, KeyError, UnicodeEncodeError):
        pass
    raise ConfigError(f"{where}: got {len(text)} characters that are no key; wanted 40 characters of Z85")


def _read_text(path: Path, key: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error}") from None
