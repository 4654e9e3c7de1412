"""ROUTER sockets on one I/O thread: frames in, frames out, exact framing, bounded drains.

Owns: the sockets, their bounds, and the outbox other threads post replies to. Knows no model and decodes nothing: what
a header means is asked of the `Receiver`. Uses pyzmq's Cython backend directly with plain int flags, which costs a
quarter of its ordinary API (tests/bench); everything a hostile peer may send is a reply, a drop that is counted, or a
closed connection.
"""

from __future__ import annotations

import logging
import os
import select
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import zmq
from zmq.backend import Socket as RawSocket

from edge_runtime.telemetry.counters import Counters
from edge_runtime.transports.unsent import TRACKED_BYTES, UnsentReplies

log = logging.getLogger(__name__)

NOBLOCK = int(zmq.DONTWAIT)
MORE = int(zmq.SNDMORE)
EVENTS = int(zmq.EVENTS)
POLLIN = int(zmq.POLLIN)
MORE_NOBLOCK = NOBLOCK | MORE

DRAIN_MESSAGES = 32
"""Messages taken from one socket before answers go out. The usual batch: a prototype served 0.74-0.89 of a bare loop
with 32 and 0.6 with 256; a loop that reads until EAGAIN never leaves it under overload."""

DRAIN_BYTES = 8 << 20
"""The same bound for large frames: about 2 ms of copying."""

HOT_DRAINS = 16
"""Drains of one socket before the others are looked at: under a millisecond for small messages."""

_receive = RawSocket.recv
_send = RawSocket.send
_get = RawSocket.get

Entry = tuple[bytes, bytes, Any]
"""One request of a known header: peer identity, request id, and its tensor frame (a tuple of frames for several)."""


class Route(Protocol):
    """What a header was resolved to, as far as the transport needs it.

    single_size: exact bytes of the only tensor frame, -1 when there is not exactly one of fixed size. keeps_frames:
    hand the frame over uncopied (large tensors) instead of as bytes. lot: entries gathered in this drain.
    """

    single_size: int
    keeps_frames: bool
    lot: list[Entry]

    def payload(self, frames: Sequence[Any]) -> tuple[Any, ...] | None:
        """What an entry carries for several tensor frames; None when their number or lengths are wrong."""
        ...


R = TypeVar("R", bound=Route)


class Receiver(Protocol[R]):
    """Who gives frames a meaning. Thread: every call comes from the I/O thread."""

    def routes(self) -> Mapping[bytes, R]:
        """Known headers. Asked once a drain: a mapping that is no longer valid is never kept."""
        ...

    def lot(self, endpoint: Endpoint, route: R, entries: list[Entry]) -> None:
        """Answer the requests gathered for one route in one drain, in order of arrival."""
        ...

    def message(self, endpoint: Endpoint, peer: Peer, frames: list[Any]) -> None:
        """Answer any other message: `frames` are all its frames after the envelope."""
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
        receiver: Receiver[Any],
        *,
        send_bound_bytes: int,
        max_frame_bytes: int,
        is_control: bool,
    ) -> None:
        self.socket = socket
        self.max_frame_bytes = max_frame_bytes
        self.is_control = is_control
        self.fd = int(socket.get(zmq.FD))
        self._loop = loop
        self._receiver = receiver
        self._unsent = UnsentReplies(send_bound_bytes)
        self._bound = 1
        self._has_messages = True
        # Invariant: set by everything done to the socket but a receive that found nothing. A send may take in libzmq's
        # signal that messages came, and its descriptor then stays silent about them: the socket has to be asked.
        self._is_unsure = True

    def drain(self) -> None:  # noqa: PLR0912, PLR0915 (the lean loop: calls cost)
        """Take what is there, up to the bounds, and answer it."""
        socket, receiver, bound = self.socket, self._receiver, self._bound
        routes = receiver.routes()
        header: bytes = b""
        route: Route | None = None
        touched: list[Route] = []
        size, keeps_frames = -1, False
        append: Callable[[Entry], None] = touched.append  # type: ignore[assignment]
        taken = nbytes = 0
        try:
            while taken < bound and nbytes < DRAIN_BYTES:
                identity = _receive(socket, NOBLOCK)
                taken += 1
                first = _receive(socket, NOBLOCK, False)
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
                                size, keeps_frames, append = route.single_size, route.keeps_frames, route.lot.append
                                if not route.lot:
                                    touched.append(route)
                        if len(third) == size and not third.more:
                            request_id = second.bytes
                            if len(request_id) <= 64:
                                append((identity, request_id, third if keeps_frames else third.bytes))
                                nbytes += size
                                continue
                        frames = self._all_frames([first, second, third])
                        payload = route.payload(frames[2:]) if route is not None and len(second) <= 64 else None
                        if payload is not None:
                            append((identity, second.bytes, payload))
                            nbytes += sum(len(frame) for frame in payload)
                            continue
                        self._message(identity, frames)
                    else:
                        self._message(identity, [first, second])
                else:
                    self._message(identity, [first])
        except zmq.Again:
            self._has_messages = self._is_unsure = False
        for each in touched:
            entries = each.lot
            if entries:
                each.lot = []
                receiver.lot(self, each, entries)
        if taken > 1:
            self._bound = DRAIN_MESSAGES
        elif self._has_messages:
            # A lone request is answered before the next is looked for, and the next is asked for without receiving:
            # a receive that finds nothing raises, which costs as much as all else for a client that sends one by one.
            self._has_messages, self._is_unsure, self._bound = False, True, 1

    def notice(self) -> None:
        """Its descriptor says that messages may have come."""
        self._has_messages = True

    def has_messages(self) -> bool:
        """Whether there is something to drain; cheap when that is known."""
        if self._is_unsure and not self._has_messages:
            self._is_unsure = False
            self._has_messages = bool(_get(self.socket, EVENTS) & POLLIN)  # type: ignore[operator]
            if self._has_messages:
                self._bound = DRAIN_MESSAGES
        return self._has_messages

    def answer_lot(
        self, entries: Sequence[Entry], header: bytes, payloads: Iterable[Sequence[bytes]], reply_bytes: int
    ) -> None:
        """Send answers of equal header to entries, each with its output frames: at least one, `reply_bytes` in all."""
        socket = self.socket
        self._is_unsure = True
        if reply_bytes >= TRACKED_BYTES:
            for (identity, request_id, _), frames in zip(entries, payloads, strict=True):
                self.send((identity,), (header, request_id, *frames))
            return
        for (identity, request_id, _), frames in zip(entries, payloads, strict=True):
            try:
                _send(socket, identity, MORE_NOBLOCK)
            except zmq.ZMQError:
                self._dropped()
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
        socket, last, peer = self.socket, len(frames) - 1, envelope[0]
        self._is_unsure = True
        nbytes = sum(len(frame) for frame in frames)
        is_tracked = nbytes >= TRACKED_BYTES
        if is_tracked and not self._unsent.has_room(peer, nbytes):
            self._dropped()
            return
        try:
            _send(socket, peer, MORE_NOBLOCK)
        except zmq.ZMQError:
            self._dropped()
            return
        for part in envelope[1:]:
            _send(socket, part, MORE)
        for index, frame in enumerate(frames):
            flags = MORE if index < last else 0
            if is_tracked and len(frame) >= TRACKED_BYTES:
                tracked = zmq.Frame(frame, track=True, copy=False)
                _send(socket, tracked, flags, False)
                self._unsent.add(peer, tracked.tracker, len(frame))
            else:
                _send(socket, frame, flags)

    def post(self, envelope: Sequence[bytes], frames: Sequence[Any]) -> None:
        """Hand a reply to the I/O thread. Thread: any."""
        self._loop.post(self, envelope, frames)

    def call(self, function: Callable[[], None]) -> None:
        """Run a function on the I/O thread soon. Thread: any."""
        self._loop.call(function)

    def _all_frames(self, frames: list[Any]) -> list[Any]:
        """The rest of the message whose first frames these are: libzmq delivers a message whole or not at all."""
        while frames[-1].more:
            frames.append(_receive(self.socket, NOBLOCK, False))
        return frames

    def _message(self, identity: bytes, frames: list[Any]) -> None:
        has_delimiter = len(frames) > 1 and not len(frames[0])
        try:
            self._receiver.message(self, Peer(identity, has_delimiter), frames[1:] if has_delimiter else frames)
        except Exception:  # a receiver's bug must not lose the requests gathered before it
            log.exception("a message was not answered")
            self._loop.counters.count("io_errors")

    def _dropped(self) -> None:
        """One reply, of however many frames."""
        self._loop.counters.count("replies_dropped")

    def sweep(self) -> None:
        """Forget replies that were sent. Called at each beat."""
        self._unsent.sweep()


class IoLoop:
    """The one thread that touches ROUTER sockets. `run` is its body; `call` brings work to it from other threads."""

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self._endpoints: list[Endpoint] = []
        self._by_fd: dict[int, Endpoint] = {}
        self._handlers: dict[int, Callable[[], None]] = {}
        self._outbox: deque[tuple[Endpoint, Sequence[bytes], Sequence[Any]]] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self._wake_fd, select.POLLIN)
        self._is_asleep = False
        self._is_stopping = False

    def add(self, endpoint: Endpoint) -> None:
        """Serve one more endpoint. Thread: I/O, or before `run`."""
        self._endpoints.append(endpoint)
        self._by_fd[endpoint.fd] = endpoint
        self._poller.register(endpoint.fd, select.POLLIN)

    def add_handler(self, socket: Any, handler: Callable[[], None]) -> None:
        """Call `handler` when another socket of this thread may be readable (ZAP); it reads until nothing is left."""
        fd = int(socket.get(zmq.FD))
        self._handlers[fd] = handler
        self._poller.register(fd, select.POLLIN)

    def post(self, endpoint: Endpoint, envelope: Sequence[bytes], frames: Sequence[Any]) -> None:
        """Queue a reply. Thread: any."""
        self._outbox.append((endpoint, envelope, frames))
        if self._is_asleep:
            self._wake()

    def sweep(self) -> None:
        """Let every endpoint forget what it need not keep. Thread: I/O, at each beat."""
        for endpoint in self._endpoints:
            endpoint.sweep()

    def call(self, function: Callable[[], None]) -> None:
        """Run a function on the I/O thread soon. Thread: any."""
        self._calls.append(function)
        self._wake()

    def stop(self) -> None:
        """Let `run` return after the replies already posted. Thread: any."""
        self._is_stopping = True
        self._wake()

    def run(self, beat: Callable[[], None], beat_s: float) -> None:
        """Serve until `stop`. `beat` is called at least each `beat_s` seconds: it shows that serving works."""
        while not self._is_stopping:
            try:
                self._serve(beat, beat_s)
            except Exception:  # one of the three broad catches: serving goes on
                log.exception("the I/O loop caught what it should not have")
                self.counters.count("io_errors")
        self._flush()

    def close(self) -> None:
        """Free the wake-up descriptor. Idempotent; after `run` returned."""
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _serve(self, beat: Callable[[], None], beat_s: float) -> None:
        """Sleep on descriptors rather than in zmq_poll, which asks every socket twice before and after it sleeps."""
        timeout_ms = int(beat_s * 1e3)
        is_busy = True
        while not self._is_stopping:
            beat()
            # Invariant: asleep is set before the outbox is looked at, so a post after the look always wakes.
            self._is_asleep = True
            for fd, _ in self._poller.poll(0 if is_busy or self._outbox or self._calls else timeout_ms):
                self._notice(fd)
            self._is_asleep = False
            if self._outbox or self._calls:
                self._flush()
            for endpoint in self._endpoints:
                self._drain(endpoint)
            is_busy = any(endpoint.has_messages() for endpoint in self._endpoints)

    def _drain(self, endpoint: Endpoint) -> None:
        for _ in range(HOT_DRAINS):
            if not endpoint.has_messages():
                return
            endpoint.drain()
            if self._outbox:
                self._flush()

    def _notice(self, fd: int) -> None:
        """A descriptor is readable: a socket may have messages, another thread posted, or ZAP asks."""
        if fd == self._wake_fd:
            os.eventfd_read(fd)
        elif fd in self._handlers:
            self._handlers[fd]()
        else:
            self._by_fd[fd].notice()

    def _flush(self) -> None:
        outbox, calls = self._outbox, self._calls
        for _ in range(len(outbox)):
            endpoint, envelope, frames = outbox.popleft()
            endpoint.send(envelope, frames)
        while calls:
            calls.popleft()()

    def _wake(self) -> None:
        if self._wake_fd >= 0:  # else closed, and nobody is there to be woken
            os.eventfd_write(self._wake_fd, 1)
