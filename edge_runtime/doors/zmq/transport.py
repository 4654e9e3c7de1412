"""ZeroMQ on one loop: connections of every endpoint, frames in, frames out, bounded rounds.

Owns: the listening sockets, the connections and the bytes each may make the daemon hold, and the outbox that other
threads post replies to. zmtp.py has the protocol. Knows no model and decodes nothing: the `Receiver` knows the headers.
Any message of a hostile peer ends as a reply, a counted drop, or a closed connection.

Why not libzmq: it takes a thread, three wake-ups and 29 calls of the system for a lone request, hides its connections,
and cannot be told how many bytes a peer may leave unread (bench, data path). It is the clients' library, and the oracle
of tests/contract/doors/zmq/test_zmtp_oracle.py.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import select
import socket
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from edge_runtime.doors.binding import unread_of
from edge_runtime.doors.io_loop import IoLoop
from edge_runtime.doors.sending import SENT_PARTS, keep_unsent, send_unsent
from edge_runtime.doors.zmq.bind import BoundSocket
from edge_runtime.doors.zmq.zmtp import (
    COMMAND,
    COMMAND_BYTES,
    LONG,
    MORE,
    SHORT_MORE,
    TTL_S,
    Mechanism,
    Sealing,
    ZmtpError,
    ZmtpHandshake,
    command,
    cut_command,
    frame_head,
    message,
)
from edge_runtime.errors import DecodeFailed, EdgeRuntimeError

log = logging.getLogger(__name__)

DRAIN_MESSAGES = 32
"""Messages gathered before answers go out. The usual batch: a prototype served 0.74-0.89 of a bare loop with 32 and 0.6
with 256."""

ROUND_ACCEPTS = 16
"""Connections that one round accepts."""

RECEIVE_BYTES = 64 << 10
"""Received at once where no large frame is under way: some hundred small requests."""

AHEAD_BYTES = 1 << 10
"""Received at once of a connection that sends large frames: the bytes that come with a head are copied once more."""

SKIPPED_BYTES = 8 << 10
"""Skipped at once of a message of small frames that is dropped: under a millisecond."""

BODY_BYTES = 16 << 10
"""From this size a frame that has not come is received into memory of its own."""

LOOK_S = 1.0
"""Between two looks at which peers read."""

HANDSHAKE_S = 2.0
"""A connection that has not shaken hands is closed after this; the field's default of 30 s let 200 silent ones pile
up."""

UNREAD_S = 30.0
"""A peer that reads nothing of its replies for so long is closed: longer than a client that is stopped for a moment, or
a slow link, and no client waits longer for a reply unless it asked for that."""

COPIED_BYTES = 4096
"""Smaller frames of a reply are copied until it is sent: their memory may be written again."""

JOINED_BYTES = 32 << 10
"""Less is joined and sent as one piece; more is sent from where it lies."""

FRAME_BYTES, REPLY_BYTES = 64, 512
"""The memory that a kept frame and a waiting part of replies cost beside their bytes."""

_GONE = select.EPOLLHUP | select.EPOLLERR

Entry = tuple[Any, Any, Any]
"""One request of a known header: its connection, request id, and its tensor frame (a tuple of frames for several)."""


class Route(Protocol):
    """A known header, as far as the transport reads it.

    keeps_order: its requests are answered in the order of arrival also among those of other headers. single_size: exact
    bytes of the only tensor frame, -1 when there is not exactly one of fixed size. burst: entries gathered in this
    round.
    """

    keeps_order: bool
    single_size: int
    burst: list[Entry]

    def room(self, nbytes: int) -> memoryview | None:
        """Memory for a large tensor frame that has not come; None: any will do."""
        ...

    def payload(self, frames: Sequence[Any]) -> tuple[Any, ...] | None:
        """The tensor part of an entry whose tensors are not in one frame; None when number or lengths are wrong.

        frames: all of the message, after the envelope.
        """
        ...


R = TypeVar("R", bound=Route)


class Receiver(Protocol[R]):
    """Knows the meaning of frames: bytes, or views of memory of their own where they are large. Thread: I/O."""

    def routes(self) -> Mapping[bytes, R]:
        """Known headers. Called once a drain: an outdated mapping is never kept."""
        ...

    def answer_burst(self, endpoint: Endpoint, route: R, burst: list[Entry]) -> None:
        """Answer the requests gathered for one route in one round, in order of arrival."""
        ...

    def message(self, endpoint: Endpoint, peer: Peer, frames: list[Any]) -> R | None:
        """Answer any other message, or return the known route to whose burst it was added.

        frames: all of the message, after the envelope.
        """
        ...

    def gone(self, sender: Hashable) -> None:
        """Drop the waiting requests of a connection that has ended, or whose replies cannot be delivered."""
        ...

    def unheard(self, sender: Hashable) -> None:
        """Note that a reply to this connection was dropped: it does not read."""
        ...

    def owes(self, sender: Hashable) -> bool:
        """Whether a request of this connection waits for its answer."""
        ...

    def refuse(self, endpoint: Endpoint, peer: Peer, frames: list[Any], error: EdgeRuntimeError) -> None:
        """Answer a message that is too large with `error`: `frames` are its first ones after the envelope."""
        ...


class Peer:
    """Where a reply goes: its connection, and REQ's empty delimiter when there was one."""

    __slots__ = ("envelope",)

    def __init__(self, connection: ZmqConnection, has_delimiter: bool) -> None:
        self.envelope: tuple[Any, ...] = (connection, b"") if has_delimiter else (connection,)


class ZmqConnection:
    """One connection, the key of all that belongs to it.

    identity: that its client chose, b"" for none. frames, nbytes: of the message under way; began_s: since when.
    body, filled: a large frame under way. skipped: bytes that came of a message that is dropped; -1: none is.
    out: parts of replies of this round; unsent: parts that the system did not take. ahead: bytes to receive at once.
    """

    __slots__ = (
        "ahead", "began_s", "body", "endpoint", "fd", "filled", "flags", "frames", "handshake", "has_brought",
        "has_read", "held_bytes", "identity", "is_dirty", "is_open", "left", "nbytes", "out", "out_bytes", "rest",
        "sealing", "skipped", "socket", "ttl_s", "unread_bytes", "unread_since_s", "unsent", "unsent_bytes", "used_s",
    )  # fmt: skip

    def __init__(self, endpoint: Endpoint, accepted: socket.socket, handshake: ZmtpHandshake, now_s: float) -> None:
        self.endpoint = endpoint
        self.socket = accepted
        self.fd = accepted.fileno()
        self.identity = b""
        self.handshake: ZmtpHandshake | None = handshake
        self.sealing: Sealing | None = None
        self.rest = b""
        self.frames: list[Any] = []
        self.nbytes = self.held_bytes = 0
        self.body: memoryview | None = None
        self.filled = self.flags = self.left = 0
        self.skipped = -1
        self.ahead = RECEIVE_BYTES
        self.out: list[Any] = []
        self.out_bytes = 0
        self.unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0
        self.is_open, self.is_dirty, self.has_brought, self.has_read = True, False, False, False
        self.unread_bytes = 0
        self.unread_since_s: float | None = None
        self.used_s = self.began_s = now_s
        self.ttl_s = 0.0

    def look(self, now_s: float) -> None:
        """See whether its peer reads; a buffer that was filled again looks as before."""
        unread_bytes = unread_of(self.fd) + self.unsent_bytes
        if self.has_read or not unread_bytes or unread_bytes != self.unread_bytes:
            self.unread_since_s = now_s if unread_bytes else None
        self.unread_bytes, self.has_read = unread_bytes, False


class Endpoint:
    """One listening socket and its connections. Thread: the I/O thread, except `post` and `post_answers`."""

    def __init__(
        self,
        loop: IoLoop,
        bound: BoundSocket,
        receiver: Receiver[Any],
        *,
        send_bound_bytes: int,
        max_frame_bytes: int,
        message_frames: int,
        message_bytes: int,
        total_send_bound_bytes: int,
        is_control: bool,
    ) -> None:
        """message_frames, message_bytes: of one whole message.

        send_bound_bytes: of replies to one peer that does not read; total_send_bound_bytes: to all such peers.
        """
        self.max_frame_bytes = max_frame_bytes
        self.is_control = is_control
        self.connections: dict[int, ZmqConnection] = {}
        self._message_frames = message_frames
        self._message_bytes = message_bytes
        self._send_bound_bytes = send_bound_bytes
        self._total_send_bound_bytes = total_send_bound_bytes
        self._bound = bound
        self._loop = loop
        self._receiver = receiver
        self._named: dict[bytes, ZmqConnection] = {}
        self._unsent_bytes = 0
        self._look_due_s = 0.0
        self._is_deaf = self._has_ended = False
        self._closed_full = 0
        self._victims: list[ZmqConnection] | None = None
        self._dirty: list[ZmqConnection] = []
        # Of this round: known headers, those with a burst, and how many messages are in bursts.
        self._routes: Mapping[bytes, Route] = {}
        self._touched: list[Route] = []
        self._gathered = 0
        self._is_looked_up = False
        self._no_burst: list[Entry] = []
        self._is_ordered = False
        self._header = self._prefix = self._tail = b""
        self._single = 0
        self._append: Callable[[Entry], None] = self._no_burst.append

    def start(self) -> None:
        """Accept connections from now on."""
        self._loop.watch(self._bound.socket.fileno(), self._accept)

    @property
    def are_met(self) -> bool:
        """Whether each connection has sent a message."""
        return all(each.has_brought for each in self.connections.values())

    def sender(self, origin: ZmqConnection) -> Hashable:
        """The connection of an entry: its requests share a queue."""
        return origin

    def connection(self, origin: ZmqConnection) -> Hashable:
        """The same: a connection is its process's until it ends."""
        return origin

    def owes(self, connection: ZmqConnection) -> bool:
        """Whether a reply is still to come for a connection."""
        return self._receiver.owes(connection)

    # ---- rounds -----------------------------------------------------------------------------------------------------

    def begin_round(self) -> None:
        """Nothing: known headers are looked up before a message is cut, which a part of a large frame is not."""

    def take(self, connection: ZmqConnection, event: int) -> None:
        """Take the bytes that are ready of a connection. event: of epoll; 0 to go on with those that came before."""
        if not connection.is_open:
            return
        try:
            if event & select.EPOLLOUT:
                self._send_unsent(connection)
            if event & select.EPOLLIN:
                self._receive(connection)
            elif event & _GONE:
                self.close(connection)
            elif not event:
                data, connection.rest = connection.rest, b""
                self._look_up()
                self._cut(connection, data)
        except (BlockingIOError, InterruptedError):
            pass
        except ZmtpError as error:
            self._turn_away(connection, error)
        except OSError:  # reset
            self.close(connection)
        except MemoryError:
            log.warning("a connection was closed: there is no memory for its message")
            self._loop.counters.count("connections_closed_unfinished")
            self.close(connection)
        except Exception:  # a bug: this connection ends, and what others gathered is answered
            log.exception("a connection is closed for a bug")
            self._loop.counters.count("io_errors")
            self.close(connection)

    def end_round(self) -> None:
        """Answer the gathered requests, and send the bytes that are to go out."""
        if self._gathered:
            self._answer()
        if self._dirty:
            self._write_dirty()
        # A route keeps its model's memory, also that of one that is unloaded until the next round.
        self._routes, self._touched, self._append = {}, [], self._no_burst.append
        self._is_looked_up = False

    def _answer_ordered(self) -> bool:
        """Answer the bursts where one has an order, before what comes now; whether one has."""
        if self._is_ordered:
            self._answer()
            return True
        return False

    def _answer(self) -> None:
        """Answer the bursts.

        Invariant: no burst outlives its round, also where the receiver raises: only the first entry of an empty burst
        marks its route as touched, so a burst left behind would never be answered.
        """
        touched, self._touched, self._gathered, self._is_ordered = self._touched, [], 0, False
        for route in touched:
            entries = route.burst
            if not entries:
                continue
            route.burst = []
            try:
                self._receiver.answer_burst(self, route, entries)
            except Exception:
                log.exception("%d requests were not answered", len(entries))
                self._loop.counters.count("io_errors")
        self._write_dirty()
        self._renew()

    def _look_up(self) -> None:
        """Look up the known headers, once a round."""
        if not self._is_looked_up:
            self._renew()

    def _renew(self) -> None:
        """Look up the known headers anew; go on to expect the last one, if it means the same."""
        self._is_looked_up = True
        self._routes = self._receiver.routes()
        route = self._routes.get(self._header) if self._header else None
        if route is None or route.single_size != self._single:
            self._forget_lean()
            return
        self._append = route.burst.append
        self._touched.append(route)

    # ---- receiving --------------------------------------------------------------------------------------------------

    def _receive(self, connection: ZmqConnection) -> None:
        body = connection.body
        if body is None:
            data = connection.socket.recv(connection.ahead)
            if not data:
                self.close(connection)
                return
            connection.used_s = self._loop.now_s
            was_full = len(data) == connection.ahead
            if connection.rest:
                data, connection.rest = connection.rest + data, b""
            self._look_up()
            self._cut(connection, data)
            if was_full and connection.body is None:  # small messages again
                connection.ahead = RECEIVE_BYTES
            return
        count = connection.socket.recv_into(body[connection.filled :])
        if not count:
            self.close(connection)
            return
        connection.used_s = self._loop.now_s
        connection.filled += count
        self._loop.hold(connection, count)
        if connection.filled == len(body) and connection.is_open:
            connection.body = None
            connection.ahead = AHEAD_BYTES
            self._look_up()
            self._add_frame(connection, connection.flags, body)

    def _cut(self, connection: ZmqConnection, data: bytes) -> None:  # noqa: PLR0912, PLR0915 (the lean loop: calls cost)
        """Take bytes apart into messages. A frame that is not whole waits for the next bytes."""
        if connection.handshake is not None:
            data = self._shake(connection, connection.handshake, data)
        at, size = 0, len(data)
        if connection.left:
            at = self._skip(connection, 0, size)
        prefix, tail, single, append = self._prefix, self._tail, self._single, self._append
        tail_size = len(tail)
        prefix_size = len(prefix)
        is_over = False
        while at < size:
            # The lean path: a message with the header of the one before, and one tensor of its size.
            if prefix_size and data.startswith(prefix, at) and not connection.frames:
                begin = at + prefix_size
                if begin < size:
                    id_size = data[begin]
                    first = begin + 1 + id_size
                    if id_size <= 64 and data.startswith(tail, first):
                        first += tail_size
                        end = first + single
                        if end <= size and connection.skipped < 0 and connection.sealing is None:
                            append((connection, data[begin + 1 : begin + 1 + id_size], data[first:end]))
                            connection.has_brought = True
                            at = end
                            self._gathered += 1
                            if self._gathered >= DRAIN_MESSAGES:
                                self._answer()
                                if not connection.is_open:
                                    return
                                append = self._append
                                if not self._header:
                                    prefix_size = 0
                                if self._loop.is_round_over():
                                    break
                            continue
            flags = data[at]
            if flags & LONG:
                begin = at + 9
                if begin > size:
                    break
                length = int.from_bytes(data[at + 1 : begin], "big")
            else:
                begin = at + 2
                if begin > size:
                    break
                length = data[at + 1]
            if flags > 7 or length > self.max_frame_bytes or (flags & COMMAND and not _is_command(flags, length)):
                raise ZmtpError("a frame over its limit, or none")
            end = begin + length
            if connection.skipped >= 0 and not flags & COMMAND and connection.sealing is None:
                if at >= SKIPPED_BYTES:  # others have their turn
                    is_over = True
                    break
                if flags == MORE:
                    began = at
                    while at < SKIPPED_BYTES and end <= size and data[at] == MORE:
                        at = end
                        end = at + 2 + data[at + 1] if at + 1 < size else size + 1
                    if at > began:
                        connection.flags, connection.left = MORE, at - began
                        at = self._skip(connection, began, at)
                        continue
                connection.flags, connection.left = flags, length
                connection.skipped += begin - at
                at = self._skip(connection, begin, size)
                if self._loop.is_round_over():
                    break
                continue
            if end > size:
                if length >= BODY_BYTES and not flags & COMMAND:
                    at = self._begin_body(connection, flags, data, begin, length)
                break
            frame = data[begin:end]
            at = end
            if flags & COMMAND:
                self._command(connection, frame)
                continue
            before = len(self._touched)
            is_over = self._add_frame(connection, flags, frame)
            if not connection.is_open:
                return
            if is_over:
                break
            if not flags & MORE or len(self._touched) != before:
                prefix, tail, single, append = self._prefix, self._tail, self._single, self._append
                prefix_size, tail_size = len(prefix), len(tail)
        if at < size:
            connection.rest = data[at:]
            if is_over or self._loop.is_round_over():
                self._loop.again.append(connection)

    def _begin_body(self, connection: ZmqConnection, flags: int, data: bytes, begin: int, length: int) -> int:
        """Make room for a large frame that has not come, and take the bytes that have; return how far they go."""
        if self._is_over_bounds(connection, length) and connection.sealing is None:
            self._refuse(connection)
            connection.flags, connection.left = flags, length
            return self._skip(connection, begin, len(data))
        frames = connection.frames
        # A sealed frame has other bytes than its tensor.
        has_header = len(frames) > 1 and type(frames[0]) is bytes and connection.sealing is None
        route = self._routes.get(frames[0]) if has_header else None
        body = route.room(length) if route is not None else None
        if body is None:
            body = np.empty(length, np.uint8).data
        there = len(data) - begin
        body[:there] = memoryview(data)[begin:]
        if not frames:
            connection.began_s = self._loop.now_s
        connection.body, connection.filled, connection.flags = body, there, flags
        self._loop.hold(connection, there)
        return len(data)

    def _skip(self, connection: ZmqConnection, begin: int, size: int) -> int:
        """Leave out bytes of a dropped message; return how far. One that goes on without end ends its connection."""
        count = min(connection.left, size - begin)
        connection.left -= count
        connection.skipped += count
        if not connection.left and not connection.flags & MORE:
            connection.skipped = -1
        elif connection.skipped > self._message_bytes:
            self._loop.counters.count("connections_closed_unfinished")
            raise ZmtpError("a message without an end")
        return begin + count

    def _add_frame(self, connection: ZmqConnection, flags: int, frame: Any) -> bool:
        """Take a whole frame; return whether the round is over."""
        if connection.sealing is not None:
            flags, frame = connection.sealing.open(bytes(frame))
            if flags & COMMAND:
                self._command(connection, frame)
                return False
            if connection.skipped >= 0:
                connection.flags, connection.left = flags, len(frame)
                self._skip(connection, 0, len(frame))
                return self._loop.is_round_over()
        frames = connection.frames
        if self._is_over_bounds(connection, len(frame)):
            if len(frames) < 2:
                frames.append(frame)
            self._refuse(connection)
            if flags & MORE:
                connection.skipped = connection.left = 0
            else:
                connection.skipped = -1
            return self._loop.is_round_over()
        frames.append(frame)
        connection.nbytes += len(frame)
        if flags & MORE:
            if len(frames) == 1:
                connection.began_s = self._loop.now_s
            self._loop.hold(connection, connection.nbytes + FRAME_BYTES * len(frames) - connection.held_bytes)
            return False
        self._loop.release(connection)
        connection.frames, connection.nbytes = [], 0
        connection.has_brought = True
        return self._whole(connection, frames)

    def _is_over_bounds(self, connection: ZmqConnection, length: int) -> bool:
        return len(connection.frames) >= self._message_frames or connection.nbytes + length > self._message_bytes

    def _whole(self, connection: ZmqConnection, frames: list[Any]) -> bool:
        """Take a whole message: an entry of a burst, or any other. Returns whether the round is over."""
        header = frames[0]
        route = self._routes.get(header) if len(frames) > 1 and type(header) is bytes else None
        if route is not None and len(frames[1]) <= 64:
            if len(frames) == 3 and len(frames[2]) == route.single_size:
                payload: Any = frames[2]
            else:
                try:
                    payload = route.payload(frames)
                except Exception:  # a bug, or no memory for one message: what was gathered before it is answered
                    log.exception("a message could not be taken")
                    self._loop.counters.count("io_errors")
                    return False
            if payload is not None:
                if not route.burst:
                    if route.keeps_order and self._answer_ordered():
                        return self._whole(connection, frames)
                    self._is_ordered |= route.keeps_order
                    self._touched.append(route)
                route.burst.append((connection, bytes(frames[1]), payload))
                self._gathered += 1
                if header is not self._header and header != self._header:
                    self._learn(header, route)
                if self._gathered >= DRAIN_MESSAGES:
                    self._answer()
                    return self._loop.is_round_over()
                return False
        self._answer_ordered()
        has_delimiter = len(frames) > 1 and not len(frames[0])
        try:
            known = self._receiver.message(
                self, Peer(connection, has_delimiter), frames[1:] if has_delimiter else frames
            )
            if known is not None:
                if len(known.burst) == 1:
                    self._touched.append(known)
                self._gathered += 1
        except Exception:  # a receiver's bug must not lose the requests gathered before it
            log.exception("a message was not answered")
            self._loop.counters.count("io_errors")
        return self._loop.is_round_over()

    def _learn(self, header: bytes, route: Route) -> None:
        """Expect the next message to be like this one, if its tensor is small."""
        if not 0 <= route.single_size < BODY_BYTES:
            self._forget_lean()
            return
        self._header, self._single, self._append = header, route.single_size, route.burst.append
        self._prefix = frame_head(MORE, len(header)) + header + bytes((MORE,))
        self._tail = frame_head(0, route.single_size)

    def _forget_lean(self) -> None:
        """Look at the next message closely: bursts were answered, or headers may have another meaning."""
        self._header = self._prefix = self._tail = b""
        self._single = 0
        self._append = self._no_burst.append

    def _refuse(self, connection: ZmqConnection) -> None:
        """Answer a message that is too large, of which only the first frames were read, and skip the rest."""
        frames = connection.frames
        self._loop.release(connection)
        connection.frames, connection.nbytes, connection.skipped = [], 0, 0
        connection.has_brought = True
        if len(frames) >= self._message_frames:
            error = DecodeFailed(f"the message has more than {self._message_frames} frames (limits.message_frames)")
        else:
            error = DecodeFailed(f"the message has more than {self._message_bytes} bytes (limits.message_bytes)")
        self._loop.counters.count("messages_too_large")
        has_delimiter = len(frames) > 1 and not len(frames[0])
        first = frames[1:3] if has_delimiter else frames[:2]
        self._receiver.refuse(self, Peer(connection, has_delimiter), first, error)

    def _shake(self, connection: ZmqConnection, handshake: ZmtpHandshake, data: bytes) -> bytes:
        """Go on with a handshake; return the bytes that came behind it."""
        out = handshake.take(data)
        if out:
            self._put(connection, [out])
        if handshake.identity is None:
            return b""
        connection.handshake = None
        connection.sealing = handshake.sealing
        connection.identity = handshake.identity
        if connection.identity:
            self._named.setdefault(connection.identity, connection)
        return handshake.rest

    def _command(self, connection: ZmqConnection, body: bytes) -> None:
        """Answer PING; other commands mean nothing to a ROUTER."""
        name, rest = cut_command(body)
        if name == b"PING" and len(rest) >= 2:
            connection.ttl_s = int.from_bytes(rest[:2], "big") * TTL_S
            pong = command(b"PONG", rest[2:18])
            self._put(connection, [pong] if connection.sealing is None else connection.sealing.seal_command(pong[2:]))

    # ---- sending ----------------------------------------------------------------------------------------------------

    def send_answers(
        self, entries: Sequence[Entry], header: bytes, payloads: Sequence[Sequence[bytes]], reply_bytes: int
    ) -> None:
        """Send each entry an answer: the header, its id and its output frames, at least one, `reply_bytes` in all.

        Raises ValueError, with nothing sent, when there are not as many payloads as entries.
        """
        _check_counts(entries, payloads)
        if reply_bytes >= COPIED_BYTES:
            for (connection, request_id, _), frames in zip(entries, payloads, strict=True):
                self.send((connection,), (header, request_id, *frames))
            return
        # The lean path: the parts of small answers of one frame.
        head = frame_head(MORE, len(header)) + header
        last = frame_head(0, reply_bytes)
        nbytes = len(head) + reply_bytes + 16
        dirty = self._dirty
        for (connection, request_id, _), frames in zip(entries, payloads, strict=True):
            if connection.unsent or connection.sealing is not None or not connection.is_open or len(frames) != 1:
                self.send((connection,), (header, request_id, *frames))
                continue
            connection.out += (head, SHORT_MORE[len(request_id)], request_id, last, frames[0])
            connection.out_bytes += nbytes
            if not connection.is_dirty:
                connection.is_dirty = True
                dirty.append(connection)

    def send(self, envelope: Sequence[Any], frames: Sequence[Any]) -> None:
        """Send one reply, or drop and count it when its peer is gone or does not read. Thread: I/O."""
        connection: ZmqConnection = envelope[0]
        if not connection.is_open:
            heir = self._named.get(connection.identity) if connection.identity else None
            if heir is None:
                self._loop.counters.count("replies_dropped")
                self._receiver.gone(connection)
                return
            connection = heir
        try:
            whole = [each if type(each) is bytes else _kept(each) for each in (*envelope[1:], *frames)]
            parts = message(whole) if connection.sealing is None else connection.sealing.seal(whole)
            nbytes = sum(map(len, parts))
        except Exception:  # a frame that is not a plain buffer
            log.exception("a reply could not be written")
            self._loop.counters.count("io_errors")
            return
        if connection.unsent_bytes and not self._has_room(connection, nbytes):
            self._loop.counters.count("replies_dropped")
            self._receiver.unheard(connection)
            return
        self._put(connection, parts, nbytes)

    def post(self, envelope: Sequence[Any], frames: Sequence[Any]) -> None:
        """Hand a reply to the I/O thread. Thread: any."""
        loop = self._loop
        loop.outbox.append((self, envelope, frames))
        if loop.is_asleep:
            # Once: the thread stays asleep until it has the interpreter, and each further wake would hand it over, to
            # send one reply of a batch at a time.
            loop.is_asleep = False
            loop.wake()

    def post_part(self, envelope: Sequence[Any], frames: Sequence[Any], marks: Mapping[str, Any]) -> None:  # noqa: ARG002 (they are in its header)
        """Hand a part of an answer to the I/O thread. Thread: any."""
        loop = self._loop
        loop.calls.append(partial(self._send_part, envelope, frames))
        if loop.is_asleep:  # as in `post`
            loop.is_asleep = False
            loop.wake()

    def _send_part(self, envelope: Sequence[Any], frames: Sequence[Any]) -> None:
        """Send a part; a peer that does not read ends here, since one that is dropped would leave a gap."""
        connection: ZmqConnection = envelope[0]
        nbytes = sum(memoryview(each).nbytes for each in frames)
        if connection.is_open and connection.unsent_bytes and not self._has_room(connection, nbytes):
            self._loop.counters.count("connections_closed_unread")
            log.warning("closed a connection whose peer does not read the parts of an answer")
            self.close(connection)
            return
        self.send(envelope, frames)

    def post_answers(
        self, entries: Sequence[Entry], header: bytes, payloads: Sequence[Sequence[bytes]], reply_bytes: int
    ) -> None:
        """Hand answers to the I/O thread. Thread: any. Raises ValueError as `send_answers` does, before that."""
        _check_counts(entries, payloads)
        loop = self._loop
        loop.calls.append(partial(self.send_answers, entries, header, payloads, reply_bytes))
        if loop.is_asleep:  # as in `post`
            loop.is_asleep = False
            loop.wake()

    def _has_room(self, connection: ZmqConnection, nbytes: int) -> bool:
        """Whether one more reply may wait for a peer that left some unread."""
        nbytes += REPLY_BYTES
        total = self._unsent_bytes + nbytes
        return connection.unsent_bytes + nbytes <= self._send_bound_bytes and total <= self._total_send_bound_bytes

    def _put(self, connection: ZmqConnection, parts: Iterable[Any], nbytes: int = 0) -> None:
        connection.out += parts
        connection.out_bytes += nbytes or sum(map(len, parts))
        if not connection.is_dirty:
            connection.is_dirty = True
            self._dirty.append(connection)
        if connection.out_bytes >= JOINED_BYTES:
            connection.is_dirty = False
            self._dirty.remove(connection)
            self._write(connection)

    def _write_dirty(self) -> None:
        dirty, self._dirty = self._dirty, []
        for connection in dirty:
            connection.is_dirty = False
            if connection.is_open:
                self._write(connection)

    def _write(self, connection: ZmqConnection) -> None:
        """Send the replies of this round; those that the system does not take now wait."""
        parts, connection.out = connection.out, []
        nbytes, connection.out_bytes = connection.out_bytes, 0
        sent = 0
        if nbytes < JOINED_BYTES:
            parts = [b"".join(parts)]
        if not connection.unsent:
            try:
                if len(parts) == 1:
                    sent = connection.socket.send(parts[0])
                    if sent == len(parts[0]):
                        return
                else:
                    sent = connection.socket.sendmsg(parts[:SENT_PARTS])
            except (BlockingIOError, InterruptedError):
                pass
            except OSError:
                self.close(connection)
                return
        self._keep(connection, parts, sent)

    def _keep(self, connection: ZmqConnection, parts: Sequence[Any], sent: int) -> None:
        """Keep the unsent bytes, and watch for room."""
        had_none = not connection.unsent
        kept_bytes, count = keep_unsent(connection.unsent, parts, sent)
        kept_bytes += REPLY_BYTES * count
        connection.unsent_bytes += kept_bytes
        self._unsent_bytes += kept_bytes
        if had_none and connection.unsent:
            self._loop.modify(connection.fd, select.EPOLLIN | select.EPOLLOUT)

    def _send_unsent(self, connection: ZmqConnection) -> None:
        """Send the waiting bytes, as far as there is room."""
        unsent = connection.unsent
        if unsent:
            freed, count = send_unsent(connection.socket, unsent)
            connection.has_read = True
            freed += REPLY_BYTES * count
            connection.unsent_bytes -= freed
            self._unsent_bytes -= freed
        if not unsent:
            self._loop.modify(connection.fd, select.EPOLLIN)

    # ---- connections ------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        self._victims = None
        for _ in range(ROUND_ACCEPTS):
            try:
                accepted, _ = self._bound.socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor is left: the next beat tries again
                log.warning("no connection can be accepted", extra={"reason": str(error)})
                self._is_deaf = True
                self._loop.modify(self._bound.socket.fileno(), 0)
                return
            if not self._bound.has_room(len(self.connections)) and not self._give_way():
                accepted.close()
                self._closed_full += 1
                continue
            self.adopt(accepted)

    def adopt(self, accepted: socket.socket, mechanism: Mechanism | None = None) -> None:
        """Serve one connection. mechanism: in place of the endpoint's own."""
        accepted.setblocking(False)
        handshake = ZmtpHandshake(mechanism or self._bound.mechanism())
        connection = ZmqConnection(self, accepted, handshake, self._loop.now_s)
        self.connections[connection.fd] = connection
        self._loop.add_connection(connection)
        self._put(connection, [ZmtpHandshake.begins])

    def _give_way(self) -> bool:
        """Close the connection that is silent for longest, so that another is kept; False: all are owed a reply.

        First those that have brought no message. A client that is closed connects again by itself.
        """
        if self._victims is None:
            there = [each for each in self.connections.values() if not each.has_brought or not self.owes(each)]
            self._victims = sorted(there, key=lambda each: (each.has_brought, each.used_s), reverse=True)
        while self._victims:
            victim = self._victims.pop()
            if victim.is_open:
                self.close(victim)
                self._closed_full += 1
                return True
        return False

    def close(self, connection: ZmqConnection) -> None:
        """End a connection, and drop all that waits of it. Idempotent."""
        if not connection.is_open:
            return
        connection.is_open = False
        self._loop.remove_connection(connection)
        self.connections.pop(connection.fd, None)
        connection.socket.close()
        self._unsent_bytes -= connection.unsent_bytes
        connection.unsent_bytes = 0
        connection.unsent.clear()
        connection.out, connection.frames, connection.rest, connection.body = [], [], b"", None
        if connection.identity and self._named.get(connection.identity) is connection:
            # Its client may come again by another connection, to which its replies then go.
            del self._named[connection.identity]
            heirs = (each for each in self.connections.values() if each.identity == connection.identity)
            for heir in itertools.islice(heirs, 1):
                self._named[heir.identity] = heir
        elif not self._has_ended:
            # Not while requests are gathered: its own could be among them.
            self._loop.calls.append(partial(self._receiver.gone, connection))

    def drop_unfinished(self, connection: ZmqConnection) -> None:
        """Close a connection whose message is not whole: all of the loop's hold too much memory."""
        self._loop.counters.count("connections_closed_unfinished")
        log.warning("closed a connection that brought no whole message", extra={"bytes": connection.held_bytes})
        self.close(connection)

    def _turn_away(self, connection: ZmqConnection, error: ZmtpError) -> None:
        """Close a connection that is not a client, or may not be one."""
        if error.reply:
            self._loop.counters.count("curve_denied")
            with contextlib.suppress(OSError):
                connection.socket.send(error.reply)
        log.debug("a connection was closed", extra={"reason": str(error)})
        self.close(connection)

    def sweep(self, now_s: float) -> None:
        """Close connections that do not shake hands, whose time is over, or whose peers read nothing. At each beat."""
        if self._is_deaf:
            self._is_deaf = False
            self._loop.modify(self._bound.socket.fileno(), select.EPOLLIN)
        for each in list(self.connections.values()):
            if (each.handshake is not None and now_s - each.began_s >= HANDSHAKE_S) or (
                each.ttl_s and now_s - each.used_s > each.ttl_s
            ):
                self.close(each)
        if now_s < self._look_due_s:
            return
        self._look_due_s = now_s + LOOK_S
        for each in self.connections.values():
            each.look(now_s)
        self._close_unread(now_s)
        closed_full, self._closed_full = self._closed_full, 0
        if closed_full:
            self._loop.counters.count("connections_closed_full", closed_full)
            log.warning(
                "closed silent connections: there are as many as there may be",
                extra={"connections": closed_full, "kept": len(self.connections)},
            )

    def _close_unread(self, now_s: float) -> None:
        unread = [each for each in self.connections.values() if each.unread_since_s is not None]
        unread.sort(key=lambda each: each.unread_since_s or 0.0)
        total = sum(each.unread_bytes for each in unread)
        closed = 0
        for each in unread:
            assert each.unread_since_s is not None
            if now_s - each.unread_since_s < UNREAD_S and total <= self._total_send_bound_bytes:
                break
            total -= each.unread_bytes
            self.close(each)
            closed += 1
        if closed:
            self._loop.counters.count("connections_closed_unread", closed)
            log.warning("closed connections whose peers read nothing", extra={"connections": closed})

    def end(self, linger_s: float) -> None:
        """Send the waiting bytes, for at most `linger_s`, and close all connections. After the loop has ended."""
        self.end_round()
        self._has_ended = True
        for connection in list(self.connections.values()):
            with contextlib.suppress(OSError):
                connection.socket.settimeout(linger_s)
                while connection.unsent:
                    self._send_unsent(connection)
                # What its client sent meanwhile is read, or the end could overtake a reply (RFC 9293, 3.10.4).
                connection.socket.shutdown(socket.SHUT_WR)
                connection.socket.setblocking(False)
                while connection.socket.recv(RECEIVE_BYTES):
                    pass
            self.close(connection)


def _check_counts(entries: Sequence[Entry], payloads: Sequence[Sequence[bytes]]) -> None:
    if len(entries) != len(payloads):
        raise ValueError(f"{len(payloads)} answers for {len(entries)} requests")


def _kept(frame: Any) -> Any:
    """A frame of a reply as bytes, or as a view of its bytes where it is large."""
    view = memoryview(frame)
    return view.cast("B") if view.nbytes >= COPIED_BYTES and view.contiguous else view.tobytes()


def _is_command(flags: int, length: int) -> bool:
    return not flags & MORE and length <= COMMAND_BYTES
