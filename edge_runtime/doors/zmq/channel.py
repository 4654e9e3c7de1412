"""One DEALER socket: sends a request, takes the replies that have arrived, and explains a missing connection.

Owns: the socket and its context. Starts no thread and waits only for a first connection. Not safe from two threads at
once: its owner holds a lock (client.py) or is an event loop (asyncio_client.py). Uses pyzmq's Cython backend with
plain int flags, as the daemon does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket as sockets
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import zmq
from msgspec import Struct
from zmq.backend import Socket as RawSocket

from edge_runtime.client.frames import Frame
from edge_runtime.client.in_flight import NotBack
from edge_runtime.config.endpoints import check_endpoint, control_endpoint_beside, no_daemon_advice
from edge_runtime.errors import ConfigError, Draining, EdgeRuntimeError
from edge_runtime.operations import OPERATIONS, pack_operation
from edge_runtime.wire.codec import unpack_reply

NOBLOCK = int(zmq.DONTWAIT)
MORE = int(zmq.SNDMORE)
MORE_NOBLOCK = NOBLOCK | MORE
EVENTS = int(zmq.EVENTS)
RCVMORE = int(zmq.RCVMORE)
POLLIN = int(zmq.POLLIN)
POLLOUT = int(zmq.POLLOUT)

CONNECT_LIMIT_S = 5.0
"""A first connection on a device or its local network takes milliseconds, also to a busy daemon."""

PROBE_LIMIT_S = 2.0
"""How long a bare TCP connection is tried when ZeroMQ has none, to tell "refused" from "no such host"."""

RECONNECT_MS = 50
RECONNECT_MAX_MS = 500
"""A socket that connects again by itself finds a daemon that restarts within half a second."""

NEVER_MS = 86_400_000
"""A day. libzmq's own "never", -1, removes the endpoint some time after the connection, and with it a new attempt that
was begun meanwhile."""

LEAVES_S = 0.1
"""After its notice a daemon may still be found over tcp for this long, and reads nothing any more. An ipc socket is
gone by then."""

CONNECTED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
MONITOR = "inproc://connection"
"""Each channel has a context of its own, and so this name."""

STOP_NOTICE, STOP_NOTICE_ID = pack_operation(OPERATIONS["stop_notice"], {}), bytes(8)
"""Sent first over each connection; answered last. No call has this number."""

PATIENCE_S = {"ipc": 0.1, "tcp": 2.0}
"""How long a first attempt to connect may take before it is repeated, then twice as long. With a listener it takes less
than a millisecond over ipc, and three round trips over TCP, 2 s on the slowest links (satellites)."""

_receive: Any = RawSocket.recv
_send: Any = RawSocket.send
_get: Any = RawSocket.get


class CurveKeys(Struct, frozen=True, forbid_unknown_fields=True):
    """CURVE keys of a client, each 40 characters of Z85: the daemon's public key and the client's own pair."""

    server_key: str
    public_key: str
    secret_key: str


class Channel:
    """A connection to one endpoint, made by `wait_connected` or `dial`; `close` is idempotent.

    Invariant: a lost connection is made again only when the owner asks, so no restart of the daemon goes unseen: while
    there is POLLOUT, sent requests wait for the daemon that they were sent to. Replies from before a connection's end
    can be received after it. ZMQ_IMMEDIATE would drop it, and end the process between two frames of one reply
    (fq.cpp); so libzmq's monitor reports the connection.
    """

    def __init__(self, endpoint: str, curve: CurveKeys | None = None) -> None:
        self.endpoint = check_endpoint(endpoint)
        self._curve = curve
        self._socket: Any = None
        self._free: weakref.finalize[..., Any] | None = None
        self._monitor: Any = None
        self._is_dialed = False
        self._is_connected = False
        self._comes_back = False
        self._has_left = False
        self._left_s = 0.0
        self._connection = 0
        self.fds: tuple[int, ...] = ()

    @property
    def connection(self) -> int:
        """The number of the connection that there is, or was last; the daemon knows nothing of it when it is new."""
        return self._connection

    def open(self, *, comes_back: bool = False) -> None:
        """Make the socket, without a connection. Raises ConfigError for bad CURVE keys.

        comes_back: make a lost connection again in the background, for a loop that drives `socket` alone.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket, monitor = context.socket(zmq.DEALER), context.socket(zmq.PAIR)
        try:
            socket.set(zmq.LINGER, 0)
            monitor.set(zmq.LINGER, 0)
            monitor.set(zmq.RCVHWM, 0)
            # No bound here: the client bounds the requests in flight.
            socket.set(zmq.SNDHWM, 0)
            socket.set(zmq.RCVHWM, 0)
            socket.set(zmq.RECONNECT_IVL, RECONNECT_MS if comes_back else NEVER_MS)
            socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS if comes_back else 0)
            if self.endpoint.startswith("tcp://["):
                socket.set(zmq.IPV6, 1)
            if self._curve is not None:
                _set_keys(socket, self._curve)
            socket.monitor(MONITOR, CONNECTED | DISCONNECTED)
            monitor.connect(MONITOR)
        except BaseException:
            _free(socket, monitor, context, os.getpid())
            raise
        # Invariant: this finalizer closes the socket before its context, also when the garbage collector frees a cycle.
        # The objects' own finalizers run in any order there, and a context with an open socket waits for ever.
        self._free = weakref.finalize(self, _free, socket, monitor, context, os.getpid())
        self._free.atexit = False  # a thread may use the socket; pyzmq terminates no context at exit
        self._socket, self._monitor = socket, monitor
        self._is_dialed = self._is_connected = False
        self._comes_back = comes_back
        self.fds = int(socket.get(zmq.FD)), int(monitor.get(zmq.FD))

    def close(self) -> None:
        """Close the socket; unsent requests are dropped."""
        if self._free is not None:
            self._socket = self._monitor = None
            self._free()

    def send(self, request_id: bytes, header: bytes, tensors: Sequence[Frame]) -> bool:
        """Send one request; False when there is no connection. A memoryview frame is lent until it is on the wire."""
        socket = self._socket
        if _get(self._monitor, EVENTS) & POLLIN:
            self._hear()
        if not self._is_connected:
            return False
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
            # KeyboardInterrupt between two frames: end the message, or the next one becomes its rest. If the message
            # was complete, the daemon refuses this empty one, and no call waits for that reply.
            with contextlib.suppress(zmq.ZMQError):
                _send(socket, b"", NOBLOCK)
            raise
        return True

    def receive(self) -> list[Any] | None:
        """Return the frames of the next reply (`zmq.Frame`: header, id, tensors), or None."""
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
            while _get(socket, RCVMORE):  # KeyboardInterrupt between two frames: drop the rest
                _receive(socket, NOBLOCK, False)
            raise
        return frames

    def events(self) -> int:
        """Return POLLIN for a waiting reply and POLLOUT for a connection.

        Invariant: `fds` signal once. Wait for them only after this returned no POLLIN, and call this again after each
        `send`, which may consume the signal (zmq_getsockopt(3), ZMQ_FD).
        """
        # Invariant: the end of a connection is heard first, so what came before it is seen below.
        if _get(self._monitor, EVENTS) & POLLIN:
            self._hear()
        events: int = _get(self._socket, EVENTS) & POLLIN
        return events | POLLOUT if self._is_connected else events

    def take_notice(self, frames: Sequence[Any]) -> None:
        """Look at a reply that answers no call: the daemon's notice that it stops.

        It comes after all its answers, so a request unanswered then was never run.
        """
        if len(frames) > 1 and frames[1].bytes == STOP_NOTICE_ID:
            with contextlib.suppress(EdgeRuntimeError):  # a peer that is not a daemon
                if unpack_reply(frames[0].bytes).error is None:  # else a daemon that gives no notice
                    if self._is_connected:  # else it has ended since
                        self._left_s = time.monotonic()
                    self._has_left, self._is_connected = True, False

    def drain(self) -> None:
        """Read the messages that came over a connection that has ended, when no call waits for it."""
        while (frames := self.receive()) is not None:
            self.take_notice(frames)

    def ended(self) -> Exception:
        """Return the error of calls that the connection left without an answer."""
        if self._has_left:
            return Draining(f"the daemon at {self.endpoint} stopped before it ran this request; send it again later")
        return ConnectionError(
            f"the connection to {self.endpoint} was lost before an answer was there: the daemon ended, or a "
            "tensor was larger than its max_frame_bytes; it may have run the request"
        )

    def wait_connected(self, limit_s: float) -> bool:
        """Connect unless connected; False when there is no connection within `limit_s` seconds."""
        for patience_s in self.patience(limit_s):
            self.dial()
            end_s = time.monotonic() + patience_s
            while not self.events() & POLLOUT and (left_s := end_s - time.monotonic()) > 0:
                self._monitor.poll(max(int(left_s * 1e3), 1), POLLIN)
            if self.events() & POLLOUT:
                return True
            if self.missing() is not None:  # it was there a moment ago, and stopped
                return False
        return False

    def dial(self) -> None:
        """Begin to connect in the background unless connected. Ends the previous attempt."""
        if self.events() & POLLOUT:
            return
        if self._is_dialed:
            with contextlib.suppress(zmq.ZMQError):  # already disconnected
                self._socket.disconnect(self.endpoint)  # and what it has not sent is never sent
        self._is_dialed = True
        self._connection += 1
        self._socket.connect(self.endpoint)

    def patience(self, limit_s: float) -> Iterator[float]:
        """Yield the seconds to wait for each attempt that fits into `limit_s`."""
        wait_s = PATIENCE_S[self.endpoint.partition("://")[0]]
        while limit_s > 0:
            yield min(wait_s, limit_s)
            limit_s -= wait_s
            wait_s *= 2

    @property
    def socket(self) -> Any:
        """The DEALER, for a loop that drives it alone (load_generator)."""
        return self._socket

    def _hear(self) -> None:
        """Take in libzmq's events of the connection."""
        with contextlib.suppress(zmq.Again):
            while True:
                told = _receive(self._monitor, NOBLOCK)
                _receive(self._monitor, NOBLOCK)  # the endpoint
                self._is_connected = int.from_bytes(told[:2], sys.byteorder) == CONNECTED
                if self._is_connected and not self._comes_back:
                    self._has_left = False
                    _send(self._socket, STOP_NOTICE, MORE_NOBLOCK)
                    _send(self._socket, STOP_NOTICE_ID, NOBLOCK)

    def missing(self) -> ConnectionError | None:
        """Try a bare connection and return why it failed; None with a listener."""
        if not self._has_left:
            return probe(self.endpoint)
        if self.endpoint.startswith("tcp:") and time.monotonic() < self._left_s + LEAVES_S:
            return NotBack(f"no daemon answers at {self.endpoint}: it said that it stops")
        found = probe(self.endpoint)
        return found and NotBack(str(found))

    def no_handshake(self) -> ConnectionError:
        """Return the error for a listener that completes no ZeroMQ handshake."""
        advice = (
            "check the CURVE keys, and that the daemon lets this client's public key in"
            if self._curve is not None
            else "is it an edge-runtime daemon's endpoint, and does it want CURVE keys?"
        )
        kind = NotBack if self._has_left else ConnectionError
        return kind(f"{self.endpoint} listens but completes no ZeroMQ handshake; {advice}")


def probe(endpoint: str) -> ConnectionError | None:
    """Connect a bare socket once and return why it failed; None with a listener. Takes at most PROBE_LIMIT_S."""
    error = _why_silent(endpoint)
    return _no_daemon(endpoint, error) if error is not None else None


def _why_silent(endpoint: str) -> OSError | None:
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
        return None  # a listener whose queue of connections is full at this moment
    except OSError as error:
        return error
    except ValueError as error:  # a port of `*`, or a host that no name can be
        return OSError(errno.EINVAL, f"no client can connect to such an address ({error})")
    return None


def starting_control(endpoint: str, control: str | None = None) -> str | None:
    """The control endpoint of the daemon that starts there; None where none does.

    A daemon listens at its control endpoint before its libraries are imported, and at the others after that. control:
    where that is; None: beside an ipc endpoint.
    """
    if control is None:
        if not endpoint.startswith("ipc://"):
            return None
        control = control_endpoint_beside(endpoint)
    return control if _why_silent(control) is None and _why_silent(endpoint) is not None else None


def _free(
    socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]], pid: int
) -> None:
    if os.getpid() == pid:
        socket.disable_monitor()
        monitor.close()
        socket.close()
        context.term()


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
    if starting_control(endpoint) is not None:
        return ConnectionError(
            f"no daemon answers at {endpoint} yet: it is starting, and answers in a moment; wait_ready() waits for "
            "that, and from a shell edge-runtime status tells how far it is"
        )
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
