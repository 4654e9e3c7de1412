"""One DEALER socket as its owner drives it: send a request, take the replies that are there, say why nobody answers.

Owns: the socket, its context and the meaning of silence. Starts no thread, waits for nothing but a first connection,
and is not safe to use from two threads at once: the owner holds a lock (link.py) or is an event loop (asyncio).
Uses pyzmq's Cython backend with plain int flags, as the daemon does.
"""

from __future__ import annotations

import contextlib
import errno
import socket as sockets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.backend import Socket as RawSocket

from edge_runtime.client.frames import Frame
from edge_runtime.config.endpoints import check_endpoint, no_daemon_advice
from edge_runtime.errors import ConfigError

NOBLOCK = int(zmq.DONTWAIT)
MORE = int(zmq.SNDMORE)
MORE_NOBLOCK = NOBLOCK | MORE
EVENTS = int(zmq.EVENTS)
RCVMORE = int(zmq.RCVMORE)
POLLIN = int(zmq.POLLIN)
POLLOUT = int(zmq.POLLOUT)

CONNECT_LIMIT_S = 5.0
"""A first connection on a device or its local network takes milliseconds; a busy daemon's handshake stays far below."""

PROBE_LIMIT_S = 2.0
"""How long a bare TCP connection is tried when ZeroMQ has none, to tell "refused" from "no such host"."""

RECONNECT_MS = 50
RECONNECT_MAX_MS = 500
"""A socket that connects again by itself finds a daemon that restarts within half a second."""

NEVER_MS = 86_400_000
"""A day. libzmq's own "never", -1, takes the endpoint away some time after the connection, and with it one that was
asked for meanwhile."""

PATIENCE_S = {"ipc": 0.1, "tcp": 2.0}
"""How long a first try to connect may take before it is made anew, then twice as long: somebody listens, so over ipc it
takes less than a millisecond, and over TCP three round trips, of which the slowest links (satellites) take 2 s."""

_receive: Any = RawSocket.recv
_send: Any = RawSocket.send
_get: Any = RawSocket.get


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """CURVE keys of a client, each 40 characters of Z85: the daemon's public key and the client's own pair."""

    server_key: str
    public_key: str
    secret_key: str


class Channel:
    """A connection to one endpoint, made when `wait_connected` or `dial` asks for it; `close` is idempotent.

    Invariant: a connection that was lost is not made anew before its owner asks again, so no daemon comes back unseen:
    while there is POLLOUT, the requests that were sent wait for the daemon that they were sent to.
    """

    def __init__(self, endpoint: str, curve: CurveKeys | None = None) -> None:
        self.endpoint = check_endpoint(endpoint)
        self._curve = curve
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: Any = None
        self._is_dialed = False
        self.fd = -1

    def open(self, *, comes_back: bool = False) -> None:
        """Make the socket, and no connection yet. Raises ConfigError for bad CURVE keys.

        comes_back: a lost connection is made again in the background, for a loop that drives `socket` alone.
        """
        self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.set(zmq.LINGER, 0)
            # No bound here: what is in flight is bounded by the client, in requests.
            socket.set(zmq.SNDHWM, 0)
            socket.set(zmq.RCVHWM, 0)
            # Requests go to a connection that is there, or fail at once: none waits for a daemon that is not, and
            # none is sent to the next daemon after its caller gave up.
            socket.set(zmq.IMMEDIATE, 1)
            socket.set(zmq.RECONNECT_IVL, RECONNECT_MS if comes_back else NEVER_MS)
            socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS if comes_back else 0)
            if self.endpoint.startswith("tcp://["):
                socket.set(zmq.IPV6, 1)
            if self._curve is not None:
                _set_keys(socket, self._curve)
        except BaseException:
            socket.close()
            self._context.term()
            raise
        self._socket = socket
        self._is_dialed = False
        self.fd = int(socket.get(zmq.FD))

    def close(self) -> None:
        """Give the socket back; requests not yet sent are dropped."""
        if self._socket is None or self._context is None:
            return
        self._socket.close()
        self._context.term()
        self._socket = self._context = None

    def send(self, request_id: bytes, header: bytes, tensors: Sequence[Frame]) -> bool:
        """Send one request; False when there is no connection. A memoryview frame is lent until it is on the wire."""
        socket = self._socket
        try:
            _send(socket, header, MORE_NOBLOCK)
            if not tensors:
                _send(socket, request_id, NOBLOCK)
                return True
            _send(socket, request_id, MORE_NOBLOCK)
            for frame in tensors[:-1]:
                _send(socket, frame, MORE_NOBLOCK, type(frame) is not memoryview)
            frame = tensors[-1]
            _send(socket, frame, NOBLOCK, type(frame) is not memoryview)
        except zmq.Again:
            return False
        except BaseException:
            # KeyboardInterrupt between two frames: end the message, so that the next one is not taken for its rest. If
            # it was whole already, the daemon refuses this empty one, and that reply belongs to nobody.
            with contextlib.suppress(zmq.ZMQError):
                _send(socket, b"", NOBLOCK)
            raise
        return True

    def receive(self) -> list[Any] | None:
        """Frames of the next reply (`zmq.Frame`: header, id, tensors), or None when there is none now."""
        socket = self._socket
        try:
            frame = _receive(socket, NOBLOCK, False)
            frames = [frame]
            while frame.more:
                frame = _receive(socket, NOBLOCK, False)
                frames.append(frame)
        except zmq.Again:
            return None
        except BaseException:
            while _get(socket, RCVMORE):  # KeyboardInterrupt between two frames: what is left of them goes, too
                _receive(socket, NOBLOCK, False)
            raise
        return frames

    def events(self) -> int:
        """POLLIN: a reply is there. POLLOUT: there is a connection.

        Invariant: `fd` tells of news only once. It may be waited for only after this said no POLLIN, and this must be
        asked again after each `send`, which may have taken the news (zmq_getsockopt(3), ZMQ_FD).
        """
        events: int = _get(self._socket, EVENTS)
        return events

    def wait_connected(self, limit_s: float) -> bool:
        """Connect, where there is no connection, within `limit_s` seconds; False when there is none then."""
        for patience_s in self.patience(limit_s):
            self.dial()
            end_s = time.monotonic() + patience_s
            while not self.events() & POLLOUT and (left_s := end_s - time.monotonic()) > 0:
                self._socket.poll(max(int(left_s * 1e3), 1), POLLOUT)
            if self.events() & POLLOUT:
                return True
        return False

    def dial(self) -> None:
        """Begin to connect, where there is no connection; it is made in the background. Ends the attempt before."""
        if self.events() & POLLOUT:
            return
        if self._is_dialed:
            with contextlib.suppress(zmq.ZMQError):  # it is gone already
                self._socket.disconnect(self.endpoint)
        self._is_dialed = True
        self._socket.connect(self.endpoint)

    def patience(self, limit_s: float) -> Iterator[float]:
        """Seconds to wait for each of the attempts that have room in `limit_s`."""
        wait_s = PATIENCE_S[self.endpoint.partition("://")[0]]
        while limit_s > 0:
            yield min(wait_s, limit_s)
            limit_s -= wait_s
            wait_s *= 2

    @property
    def socket(self) -> Any:
        """The DEALER itself, for a loop that drives it alone (load_generator)."""
        return self._socket

    def missing(self) -> ConnectionError | None:
        """Why there can be no connection, from trying a bare one; None when somebody listens."""
        return probe(self.endpoint)

    def no_handshake(self) -> ConnectionError:
        """What to say when somebody listens and yet no ZeroMQ connection comes about."""
        advice = (
            "check the CURVE keys, and that the daemon lets this client's public key in"
            if self._curve is not None
            else "is it an edge-runtime daemon's endpoint, and does it want CURVE keys?"
        )
        return ConnectionError(f"{self.endpoint} listens but completes no ZeroMQ handshake; {advice}")


def probe(endpoint: str) -> ConnectionError | None:
    """Connect a bare socket once and say in words what failed; None when somebody listens. At most PROBE_LIMIT_S."""
    transport, _, rest = endpoint.partition("://")
    try:
        if transport == "ipc":
            with sockets.socket(sockets.AF_UNIX) as bare:
                bare.settimeout(PROBE_LIMIT_S)
                bare.connect(rest)
        else:
            host, _, port = rest.rpartition(":")
            with contextlib.closing(sockets.create_connection((host.strip("[]"), int(port)), PROBE_LIMIT_S)):
                pass
    except BlockingIOError:
        return None  # so many connect at this moment that its queue is full: somebody listens
    except OSError as error:
        return _no_daemon(endpoint, error)
    return None


def _no_daemon(endpoint: str, error: OSError) -> ConnectionError:
    if error.errno == errno.ENOENT:
        reason = "there is no such socket"
    elif error.errno == errno.ECONNREFUSED:
        reason = "nobody listens there"
    elif error.errno == errno.EACCES:
        return ConnectionError(
            f"no permission to connect to {endpoint}; the daemon's sockets are open to its user and group: "
            "run this as one of them, or add this user to the group"
        )
    else:
        reason = error.strerror or str(error) or type(error).__name__
    return ConnectionError(f"no daemon answers at {endpoint}: {reason}; {no_daemon_advice(endpoint)}")


def _set_keys(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    for option, name in (
        (zmq.CURVE_SERVERKEY, "server_key"),
        (zmq.CURVE_PUBLICKEY, "public_key"),
        (zmq.CURVE_SECRETKEY, "secret_key"),
    ):
        key = getattr(keys, name)
        try:
            socket.set(option, key.encode())
        except (zmq.ZMQError, ValueError, UnicodeError):
            raise ConfigError(f"curve.{name}: got {len(key)} characters, wanted 40 characters of Z85") from None
