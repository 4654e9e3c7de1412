"""ROUTER sockets on one I/O thread: frames in, frames out, exact framing, bounded drains.

Owns: the sockets, their bounds, and the outbox that other threads post replies to. Knows no model and decodes nothing:
the `Receiver` knows the headers. Uses pyzmq's Cython backend directly with plain int flags, at a quarter of the cost of
its ordinary API (bench). Any message of a hostile peer ends as a reply, a counted drop, or a closed connection.
"""

from __future__ import annotations

import errno
import logging
import os
import select
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import zmq
from zmq.backend import Socket as RawSocket

from edge_runtime.clock import Clock, SystemClock
from edge_runtime.errors import DecodeFailed, EdgeRuntimeError
from edge_runtime.telemetry.metrics import Counters
from edge_runtime.transports.growth_watch import GrowthWatch
from edge_runtime.transports.unsent_replies import TRACKED_BYTES, UnsentReplies
from edge_runtime.transports.zmq_connections import Connections

log = logging.getLogger(__name__)

NOBLOCK = int(zmq.DONTWAIT)
MORE = int(zmq.SNDMORE)
EVENTS = int(zmq.EVENTS)
POLLIN = int(zmq.POLLIN)
RCVMORE = int(zmq.RCVMORE)
MORE_NOBLOCK = NOBLOCK | MORE

DRAIN_MESSAGES = 32
"""Messages taken from one socket before answers go out. The usual batch: a prototype served 0.74-0.89 of a bare loop
with 32 and 0.6 with 256; a loop that reads until EAGAIN never leaves it under overload."""

DRAIN_BYTES = 8 << 20
"""The same bound for large frames: about 2 ms of copying."""

HOT_DRAINS = 16
"""Drains of one socket before the others are looked at: under a millisecond for small messages."""

ROUND_S = 0.010
"""A round takes no further message after this long. The loop promises to come round within 50 ms, and the last message
of a round may be a large one."""

SKIPPED_FRAMES = 4096
SKIPPED_BYTES = 64 << 20
"""Read in one go of a message that is dropped: a few milliseconds."""

MEET_POLL_S, MEET_LEAST_S = 0.005, 0.02
"""Between two looks for the first messages of connections, and how long libzmq's thread has to accept the last ones."""

LOOK_S = 1.0
"""Between two looks at which peers read."""

FLUSHED_REPLIES = 64
"""Replies sent between two looks at the clock."""

_receive = RawSocket.recv
_send = RawSocket.send
_get = RawSocket.get

Entry = tuple[bytes, Any, Any]
"""One request of a known header: peer identity, request id, and its tensor frame (a tuple of frames for several)."""


class Route(Protocol):
    """A known header, as far as the transport reads it.

    single_size: exact bytes of the only tensor frame, -1 when there is not exactly one of fixed size. keeps_frames:
    hand the frame over uncopied (large tensors) instead of as bytes. burst: entries gathered in this drain.
    """

    single_size: int
    keeps_frames: bool
    burst: list[Entry]

    def payload(self, frames: Sequence[Any]) -> tuple[Any, ...] | None:
        """The tensor part of an entry whose tensors are not in one frame; None when number or lengths are wrong.

        frames: all of the message, after the envelope.
        """
        ...


R = TypeVar("R", bound=Route)


class Receiver(Protocol[R]):
    """Knows what frames mean. Thread: I/O."""

    def routes(self) -> Mapping[bytes, R]:
        """Known headers. Called once a drain: an outdated mapping is never kept."""
        ...

    def answer_burst(self, endpoint: Endpoint, route: R, burst: list[Entry]) -> None:
        """Answer the requests gathered for one route in one drain, in order of arrival."""
        ...

    def message(self, endpoint: Endpoint, peer: Peer, frames: list[Any]) -> R | None:
        """Answer any other message, or return the known route to whose burst it was added.

        frames: all of the message, after the envelope.
        """
        ...

    def gone(self, sender: Hashable) -> None:
        """Drop what waits of a connection that has ended, or whose replies cannot be delivered."""
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
    """Where a reply goes: the routing identity, and REQ's empty delimiter when there was one."""

    __slots__ = ("envelope",)

    def __init__(self, identity: bytes, has_delimiter: bool) -> None:
        self.envelope: tuple[bytes, ...] = (identity, b"") if has_delimiter else (identity,)


class Endpoint:
    """One bound ROUTER socket. Thread: the I/O thread, except `post`."""

    def __init__(
        self,
        loop: IoLoop,
        socket: zmq.Socket[bytes],
        connections: Connections,
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
        self.heard: set[bytes | None] | None = None
        self.socket = socket
        self.max_frame_bytes = max_frame_bytes
        self._message_frames = message_frames
        self._message_bytes = message_bytes
        self.is_control = is_control
        self.fd = int(socket.get(zmq.FD))
        self._loop = loop
        self._receiver = receiver
        self._known = connections.known
        self.connections = connections
        connections.ended = self._gone
        connections.is_owed = self.is_owed
        self._unsent = UnsentReplies(send_bound_bytes, total_send_bound_bytes)
        self._bound = 1
        self._has_messages = True
        # Invariant: set by everything done to the socket but a receive that found nothing. A send may take in libzmq's
        # signal that messages came, and its descriptor then stays silent about them: the socket has to be asked.
        self._is_unsure = True
        self._is_skipping = False
        self._look_due_s = 0.0

    def drain(self) -> None:  # noqa: PLR0912, PLR0915 (the lean loop: calls cost)
        """Receive messages up to the bounds, and answer them."""
        if self._is_skipping and not self._skip():
            return
        socket, receiver, bound, known = self.socket, self._receiver, self._bound, self._known
        routes = receiver.routes()
        header: bytes = b""
        route: Route | None = None
        touched: list[Route] = []
        size, keeps_frames = -1, False
        append: Callable[[Entry], None] = touched.append  # type: ignore[assignment]
        taken = nbytes = 0
        is_whole = True
        try:
            while taken < bound and nbytes < DRAIN_BYTES:
                identity = _receive(socket, NOBLOCK)
                taken += 1
                first = _receive(socket, NOBLOCK, False)
                if identity not in known and not self.connections.meet(identity, first):
                    self._loop.counters.count("requests_dropped")
                    self._is_skipping = first.more
                    if not self._skip():
                        break
                    continue
                if first.more:
                    second = _receive(socket, NOBLOCK, False)
                    if second.more:
                        third = _receive(socket, NOBLOCK, False)
                        # Invariant: `.more` of each frame is exact, so no message can swallow or forge another's.
                        found = first.bytes
                        if found != header:
                            header, route = found, routes.get(found)
                            if route is None:
                                size = -1
                            else:
                                size, keeps_frames, append = route.single_size, route.keeps_frames, route.burst.append
                                if not route.burst:
                                    touched.append(route)
                        if len(third) == size and not third.more:
                            request_id = second.bytes
                            if len(request_id) <= 64:
                                append((identity, request_id, third if keeps_frames else third.bytes))
                                nbytes += size
                                continue
                        frames = [first, second, third]
                        nbytes += self._take_rest(frames)
                        if self._is_skipping:
                            self._refuse(identity, frames)
                            break
                        payload = route.payload(frames) if route is not None and len(second) <= 64 else None
                        if payload is not None:
                            append((identity, second.bytes, payload))
                            nbytes += sum(len(frame) for frame in payload)
                            continue
                        is_over = self._message(identity, frames, touched)
                    else:
                        # All tensors lie in shared memory, or it is another operation.
                        found = first.bytes
                        if found != header:
                            header, route, size = found, routes.get(found), -1
                            if route is not None:
                                size, keeps_frames, append = route.single_size, route.keeps_frames, route.burst.append
                                if not route.burst:
                                    touched.append(route)
                        payload = route.payload([first, second]) if route is not None and len(second) <= 64 else None
                        if payload is None:
                            is_over = self._message(identity, [first, second], touched)
                        else:
                            append((identity, second.bytes, payload))
                            continue
                else:
                    nbytes += len(first)
                    is_over = self._message(identity, [first], touched)
                if is_over:
                    break
        except zmq.Again:
            self._has_messages = self._is_unsure = False
        except Exception:  # a bug, or no memory for one message: requests gathered before it are answered all the same
            is_whole = False
            log.exception("a message could not be taken from its socket")
            self._loop.counters.count("io_errors")
        # Invariant: no burst outlives its drain, whatever the receiver raises: only the first entry of an empty burst
        # marks its route as touched, so a burst left behind would never be answered.
        for each in touched:
            entries = each.burst
            if entries:
                each.burst = []
                if self.heard is not None:
                    self.heard.update(entry[0] for entry in entries)
                try:
                    receiver.answer_burst(self, each, entries)
                except Exception:
                    log.exception("%d requests were not answered", len(entries))
                    self._loop.counters.count("io_errors")
        if not is_whole:
            self._is_skipping = bool(_get(socket, RCVMORE))
        if self.connections.untold:
            self.connections.tell()
        if taken > 1:
            self._bound = DRAIN_MESSAGES
        elif self._has_messages:
            # A lone request is answered before the next is looked for, and the next is asked for without receiving:
            # a receive that finds nothing raises, which costs as much as all else for a client that sends one by one.
            self._has_messages, self._is_unsure, self._bound = False, True, 1

    def sender(self, identity: bytes) -> Hashable:
        """The key of one connection: identities are of one socket only, and clients may choose equal ones."""
        return (self, identity)

    def connection(self, identity: bytes, frame: Any) -> Hashable:
        """The key of one connection and of the process that made it (zmq_msg_gets(3), Peer-Address).

        An identity alone would do for any process that takes it over after its connection has ended.
        """
        try:
            address = frame.get("Peer-Address")
        except zmq.ZMQError:  # inproc
            address = ""
        return (self, identity, address)

    def notice(self) -> None:
        """Note that its descriptor is readable: messages may have come."""
        self._has_messages = True

    def has_messages(self) -> bool:
        """Whether there are messages; cheap when that is known."""
        if self._is_unsure and not self._has_messages:
            self._is_unsure = False
            self._has_messages = bool(_get(self.socket, EVENTS) & POLLIN)  # type: ignore[operator]
            if self._has_messages:
                self._bound = DRAIN_MESSAGES
        return self._has_messages

    def send_answers(
        self, entries: Sequence[Entry], header: bytes, payloads: Sequence[Sequence[bytes]], reply_bytes: int
    ) -> None:
        """Send each entry an answer: the header, its id and its output frames, at least one, `reply_bytes` in all.

        Raises ValueError, with nothing sent, when there are not as many payloads as entries.
        """
        _check_counts(entries, payloads)
        socket = self.socket
        self._is_unsure = True
        if reply_bytes >= TRACKED_BYTES:
            for (identity, request_id, _), frames in zip(entries, payloads, strict=True):
                self.send((identity,), (header, request_id, *frames))
            return
        unread = self._unsent.unread
        for (identity, request_id, _), frames in zip(entries, payloads, strict=True):
            if identity in unread:
                self.send((identity,), (header, request_id, *frames))
                continue
            try:
                _send(socket, identity, MORE_NOBLOCK)
            except zmq.ZMQError as error:
                self._undelivered(identity, error)
                continue
            _send(socket, header, MORE)
            _send(socket, request_id, MORE)
            if len(frames) == 1:
                _send(socket, frames[0], 0)
                continue
            for frame in frames[:-1]:
                _send(socket, frame, MORE)
            _send(socket, frames[-1], 0)

    def send(self, envelope: Sequence[bytes], frames: Sequence[Any]) -> None:
        """Send one reply, or drop and count it when its peer is gone or does not read. Thread: I/O."""
        socket, unsent, last, peer = self.socket, self._unsent, len(frames) - 1, envelope[0]
        self._is_unsure = True
        nbytes = sum(map(len, frames))
        is_large = nbytes >= TRACKED_BYTES
        is_unread = peer in unsent.unread
        if (is_large or is_unread) and not unsent.has_room(peer, nbytes):
            self._dropped()
            self._receiver.unheard(self.sender(peer))
            return
        try:
            _send(socket, peer, MORE_NOBLOCK)
        except zmq.ZMQError as error:
            self._undelivered(peer, error)
            return
        is_marked = is_unread and not is_large and unsent.needs_mark(peer, nbytes)
        try:
            for part in envelope[1:]:
                _send(socket, part, MORE)
            for index, frame in enumerate(frames):
                flags = MORE if index < last else 0
                counted = nbytes if index == last else len(frame)
                if counted >= TRACKED_BYTES or (is_marked and index == last):
                    # Of small frames the last is tracked, which leaves after all others.
                    tracked = zmq.Frame(frame, track=True, copy=False)
                    _send(socket, tracked, flags, False)
                    unsent.add(peer, tracked.tracker, 0 if is_marked else counted)
                    nbytes -= counted
                else:
                    _send(socket, frame, flags)
        except Exception:  # a frame that is no plain buffer: the message ends here, or the next one would be its rest
            log.exception("a reply was cut short")
            self._loop.counters.count("io_errors")
            _send(socket, b"", 0)

    def post(self, envelope: Sequence[bytes], frames: Sequence[Any]) -> None:
        """Hand a reply to the I/O thread. Thread: any."""
        loop = self._loop
        loop.outbox.append((self, envelope, frames))
        if loop.is_asleep:
            # Once: the thread stays asleep until it has the interpreter, and each further wake would hand it over, to
            # send one reply of a batch at a time.
            loop.is_asleep = False
            loop.wake()

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

    def _take_rest(self, frames: list[Any]) -> int:
        """Receive the rest of a message, or begin to skip it when it is too large; return the bytes of all.

        libzmq delivers a message whole or not at all, so all of it has come.
        """
        nbytes = sum(len(frame) for frame in frames)
        while frames[-1].more and len(frames) < self._message_frames and nbytes <= self._message_bytes:
            frame = _receive(self.socket, NOBLOCK, False)
            frames.append(frame)
            nbytes += len(frame)
        # A message that is whole, and too large all the same, is skipped too, though nothing of it is left to read.
        self._is_skipping = frames[-1].more or nbytes > self._message_bytes
        return nbytes

    def _skip(self) -> bool:
        """Read on in a message that is dropped, or it would be taken for the next one; return whether it has ended.

        Some of it at a time: a message of millions of frames takes seconds, in which replies have to go out.
        """
        socket, nbytes = self.socket, 0
        self._is_skipping = bool(_get(socket, RCVMORE))
        for _ in range(SKIPPED_FRAMES):
            if not self._is_skipping or nbytes >= SKIPPED_BYTES:
                break
            frame = _receive(socket, NOBLOCK, False)
            self._is_skipping = frame.more
            nbytes += len(frame)
        return not self._is_skipping

    def _refuse(self, identity: bytes, frames: list[Any]) -> None:
        """Answer a message that is too large, of which only the first frames were read."""
        if len(frames) >= self._message_frames:
            error = DecodeFailed(f"the message has more than {self._message_frames} frames (limits.message_frames)")
        else:
            error = DecodeFailed(f"the message has more than {self._message_bytes} bytes (limits.message_bytes)")
        self._loop.counters.count("messages_too_large")
        if self.heard is not None:
            self.heard.add(identity)
        has_delimiter = not len(frames[0])
        peer = Peer(identity, has_delimiter)
        self._receiver.refuse(self, peer, frames[1:3] if has_delimiter else frames[:2], error)

    def _message(self, identity: bytes, frames: list[Any], touched: list[Route]) -> bool:
        """Answer any other message; return whether the round is over, for decoding one may take milliseconds.

        touched: gets the route of a burst that the message began.
        """
        if self.heard is not None:
            self.heard.add(identity)
        has_delimiter = len(frames) > 1 and not len(frames[0])
        try:
            peer = Peer(identity, has_delimiter)
            route: Route | None = self._receiver.message(self, peer, frames[1:] if has_delimiter else frames)
            if route is not None and len(route.burst) == 1:
                touched.append(route)
        except Exception:  # a receiver's bug must not lose the requests gathered before it
            log.exception("a message was not answered")
            self._loop.counters.count("io_errors")
        return self._loop.is_round_over()

    def _gone(self, identity: bytes) -> None:
        self._receiver.gone(self.sender(identity))

    def _undelivered(self, identity: bytes, error: zmq.ZMQError) -> None:
        """Count a reply that has no way to its peer; one that is gone waits for no other either."""
        self._dropped()
        if error.errno == errno.EHOSTUNREACH:
            self._gone(identity)
        else:
            self._receiver.unheard(self.sender(identity))

    def _dropped(self) -> None:
        """Count one reply, of any number of frames."""
        self._loop.counters.count("replies_dropped")

    def is_owed(self, identity: bytes | None) -> bool:
        """Whether a reply is still to come for this connection."""
        return identity is not None and self._receiver.owes(self.sender(identity))

    def sweep(self, now_s: float) -> None:
        """Forget sent replies, and close connections whose peers read nothing. Called at each beat."""
        self._unsent.sweep()
        if now_s < self._look_due_s:
            return
        self._look_due_s = now_s + LOOK_S
        connections = self.connections
        connections.look(now_s, self._unsent.take_readers())
        closed = self._unsent.look(connections.unread(), now_s)
        for connection in closed:
            if connection.close():
                self._loop.counters.count("connections_closed_unread")
        if closed:
            log.warning("closed connections whose peers read nothing", extra={"connections": len(closed)})
        closed_full, connections.closed_full = connections.closed_full, 0
        if closed_full:
            self._loop.counters.count("connections_closed_full", closed_full)
            log.warning(
                "closed silent connections: there are as many as there may be",
                extra={"connections": closed_full, "kept": len(connections)},
            )


def _check_counts(entries: Sequence[Entry], payloads: Sequence[Sequence[bytes]]) -> None:
    if len(entries) != len(payloads):
        raise ValueError(f"{len(payloads)} answers for {len(entries)} requests")


class IoLoop:
    """The one thread that uses ROUTER sockets. `run` is its body; other threads hand it work by `call`."""

    def __init__(
        self,
        counters: Counters,
        clock: Clock | None = None,
        growth: GrowthWatch | None = None,
    ) -> None:
        self.counters = counters
        self._growth = growth
        self._monotonic_s = (clock or SystemClock()).monotonic_s
        self._round_ends_s = 0.0
        self._endpoints: list[Endpoint] = []
        self._handlers: dict[int, Callable[[], object]] = {}
        self.outbox: deque[tuple[Endpoint, Sequence[bytes], Sequence[Any]]] = deque()
        self.calls: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        self.watch(self._wake_fd, partial(os.eventfd_read, self._wake_fd))
        self.is_asleep = False
        self._is_stopping = False
        self._stopping_s: float | None = None
        self._meet_s = 0.0

    def add(self, endpoint: Endpoint) -> None:
        """Serve one more endpoint. Thread: I/O, or before `run`."""
        self._endpoints.append(endpoint)
        self.watch(endpoint.fd, endpoint.notice)
        self.add_handler(endpoint.connections.socket, endpoint.connections.read)

    def add_handler(self, socket: Any, handler: Callable[[], None]) -> None:
        """Call `handler` when another socket of this thread may be readable (ZAP, a monitor); it empties the socket."""
        self.watch(int(socket.get(zmq.FD)), handler)

    def sweep(self) -> None:
        """Forget sent replies, and close connections whose peers read nothing. Thread: I/O, at each beat."""
        now_s = self._monotonic_s()
        for endpoint in self._endpoints:
            endpoint.sweep(now_s)

    def watch(self, fd: int, handler: Callable[[], object]) -> None:
        """Call `handler` in each round in which a descriptor is readable. Thread: I/O, or before `run`."""
        self._handlers[fd] = handler
        self._poller.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        """Forget a descriptor, before it is closed. Thread: I/O, or after `run`."""
        if self._handlers.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def call(self, function: Callable[[], None]) -> None:
        """Run a function on the I/O thread soon. Thread: any."""
        self.calls.append(function)
        self.wake()

    def stop(self, meet_s: float = 0.0) -> None:
        """Make `run` return after the replies already posted. Thread: any.

        meet_s: how long, at most, to go on until each connection has brought a message: it can then be told that what
        comes later is not read.
        """
        self._meet_s = meet_s
        self._is_stopping = True
        self.wake()

    def run(self, beat: Callable[[], None], beat_s: float) -> None:
        """Serve until `stop`, calling `beat` at least each `beat_s` seconds."""
        while not self._is_over():
            try:
                self._serve(beat, beat_s)
            except Exception:  # one of the three broad catches: serving goes on
                log.exception("an exception reached the I/O loop")
                self.counters.count("io_errors")
        self.send_rest()

    def send_rest(self) -> None:
        """Send what was posted. Thread: I/O, or after `run`."""
        while self.outbox or self.calls:
            self._flush()

    def close(self) -> None:
        """Free the wake-up descriptor. Idempotent; after `run` returned."""
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _serve(self, beat: Callable[[], None], beat_s: float) -> None:
        """Sleep on descriptors rather than in zmq_poll, which asks every socket twice before and after it sleeps."""
        timeout_ms = int(beat_s * 1e3)
        growth, is_busy = self._growth, True
        while not self._is_over():
            beat()
            if growth is not None:
                growth.look(self._endpoints, self._monotonic_s())
                timeout_ms = int(min(beat_s, growth.interval_s) * 1e3)
            if self._is_stopping:
                timeout_ms = int(MEET_POLL_S * 1e3)
            # Invariant: asleep is set before the outbox is looked at, so a post after the look always wakes.
            self.is_asleep = True
            for fd, _ in self._poller.poll(0 if is_busy or self.outbox or self.calls else timeout_ms):
                handler = self._handlers.get(fd)
                if handler is not None:  # else a handler before it in this round closed the descriptor
                    handler()
            self.is_asleep = False
            self._round_ends_s = self._monotonic_s() + ROUND_S
            if self.outbox or self.calls:
                self._flush()
            for endpoint in self._endpoints:
                self._drain(endpoint)
            is_busy = any(endpoint.has_messages() for endpoint in self._endpoints)

    def _is_over(self) -> bool:
        if not self._is_stopping:
            return False
        now_s = self._monotonic_s()
        if self._stopping_s is None:
            self._stopping_s = now_s
        taken_s = now_s - self._stopping_s
        if taken_s >= self._meet_s:
            return True
        return taken_s >= MEET_LEAST_S and all(endpoint.connections.are_met for endpoint in self._endpoints)

    def is_round_over(self) -> bool:
        """Whether this round has taken as long as one may: what is left waits for the next. Thread: I/O."""
        return self._monotonic_s() >= self._round_ends_s

    def _drain(self, endpoint: Endpoint) -> None:
        """Drain one socket. Each has a turn in every round, however long the others took."""
        for _ in range(HOT_DRAINS):
            if not endpoint.has_messages():
                return
            endpoint.drain()
            if self.outbox or self.calls:
                self._flush()
            if self.is_round_over():
                return

    def _flush(self) -> None:
        outbox, calls = self.outbox, self.calls
        for index in range(1, len(outbox) + 1):
            endpoint, envelope, frames = outbox.popleft()
            endpoint.send(envelope, frames)
            if not index % FLUSHED_REPLIES and self.is_round_over():
                break
        while calls:
            calls.popleft()()

    def wake(self) -> None:
        """Make the I/O thread look at its outbox and calls. Thread: any."""
        if self._wake_fd >= 0:  # else closed
            os.eventfd_write(self._wake_fd, 1)
