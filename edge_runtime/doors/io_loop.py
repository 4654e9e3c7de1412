"""The loop of the I/O thread: which connections and descriptors are ready, rounds that end, and the posts of others.

Owns: the epoll, the outbox that other threads post replies to, and the bytes of messages that have not come whole.
Knows no protocol: an endpoint takes what its connections bring, and a handler is called for any other descriptor.
"""

from __future__ import annotations

import logging
import os
import select
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from edge_runtime.clock import Clock, SystemClock
from edge_runtime.telemetry.metrics import Counters

log = logging.getLogger(__name__)

ROUND_S = 0.010
"""A round takes no further message after this long. The loop promises to come round within 50 ms, and the last message
of a round may be a large one."""

ROUND_EVENTS = 128
"""Ready descriptors that one round looks at."""

MEET_POLL_S, MEET_LEAST_S = 0.005, 0.02
"""Between two looks for the first messages of connections, and how long those have that were just made."""

FLUSHED_REPLIES = 64
"""Replies sent between two looks at the clock."""

_ONCE = select.EPOLLIN | select.EPOLLONESHOT


class LoopEndpoint(Protocol):
    """Where connections come in, as the loop drives it. Thread: I/O."""

    @property
    def are_met(self) -> bool:
        """Whether each connection has brought a message."""
        ...

    def start(self) -> None:
        """Listen."""
        ...

    def begin_round(self) -> None:
        """Begin to gather the requests of one round."""
        ...

    def take(self, connection: Any, event: int) -> None:
        """Take the bytes that a connection brought, or send those that it waits for."""
        ...

    def end_round(self) -> None:
        """Answer the gathered requests, and send."""
        ...

    def send(self, envelope: Sequence[Any], frames: Sequence[Any]) -> None:
        """Send one posted reply."""
        ...

    def sweep(self, now_s: float) -> None:
        """Close connections that should be."""
        ...

    def drop_unfinished(self, connection: Any) -> None:
        """Let go of a connection's message that is not whole: all of the loop's hold too much memory."""
        ...


class LoopConnection(Protocol):
    """One connection, as the loop counts it. held_bytes: of a message that has not come whole, since began_s."""

    fd: int
    held_bytes: int
    began_s: float

    @property
    def endpoint(self) -> LoopEndpoint:
        """Where it came in."""
        ...


class IoLoop:
    """The one loop of connections and hosts. `run` is its thread's body; other threads hand it work by `call`."""

    def __init__(self, counters: Counters, clock: Clock | None = None, *, unfinished_bytes: int = 128 << 20) -> None:
        """unfinished_bytes: of messages that have not come whole, of all connections together."""
        self.counters = counters
        self.unfinished_bytes = unfinished_bytes
        self._held_bytes = 0
        self._monotonic_s = (clock or SystemClock()).monotonic_s
        self.now_s = 0.0
        self._round_ends_s = 0.0
        self._endpoints: list[LoopEndpoint] = []
        self._connections: dict[int, LoopConnection] = {}
        self._handlers: dict[int, Callable[[], object]] = {}
        self._left: list[tuple[int, int]] = []
        self.again: list[LoopConnection] = []
        self.outbox: deque[tuple[LoopEndpoint, Sequence[Any], Sequence[Any]]] = deque()
        self.calls: deque[Callable[[], object]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self.watch(self._wake_fd, partial(os.eventfd_read, self._wake_fd))
        self._beats: list[Callable[[], object]] = []
        self.is_asleep = self.is_running = False
        self._is_stopping = False
        self._stopping_s: float | None = None
        self._meet_s = 0.0

    def add(self, endpoint: LoopEndpoint, beat: Callable[[], object] | None = None) -> None:
        """Serve one more endpoint. beat: comes with each sweep. Thread: I/O, or before `run`."""
        self._endpoints.append(endpoint)
        if beat is not None:
            self._beats.append(beat)
        endpoint.start()

    def remove(self, endpoint: LoopEndpoint) -> None:
        """Serve an endpoint no more, whose connections were removed. Thread: I/O, or after `run`."""
        self._endpoints.remove(endpoint)

    def sweep(self) -> None:
        """Close connections that should be. Thread: I/O, at each beat."""
        self.now_s = self._monotonic_s()
        for endpoint in self._endpoints:
            endpoint.sweep(self.now_s)
        for beat in self._beats:
            beat()

    def add_door(self, fd: int, take: Callable[[], object], beat: Callable[[], object]) -> None:
        """Serve a door that has an epoll of its own: `take` looks at it without waiting, `beat` comes with each sweep.

        Thread: I/O, or before `run`.
        """
        self.watch(fd, take)
        self._beats.append(beat)

    def remove_door(self, fd: int, beat: Callable[[], object]) -> None:
        """Serve a door no more. Thread: as `add_door`, or after `run`."""
        self.unwatch(fd)
        self._beats.remove(beat)

    def add_beat(self, beat: Callable[[], object]) -> None:
        """Have `beat` come with each sweep. Thread: I/O, or before `run`."""
        self._beats.append(beat)

    def watch(self, fd: int, handler: Callable[[], object]) -> None:
        """Call `handler` in each round in which a descriptor is readable. Thread: I/O, or before `run`."""
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLIN)

    def watch_once(self, fd: int, handler: Callable[[], object]) -> None:
        """Call `handler` when a descriptor is readable, or has ended, once after each `arm`. Thread: any.

        It may be called when neither is.
        """
        self._handlers[fd] = handler
        self._epoll.register(fd, select.EPOLLONESHOT)

    def arm(self, fd: int) -> None:
        """Watch a descriptor of `watch_once` again. Thread: any."""
        self._epoll.modify(fd, _ONCE)

    def unwatch(self, fd: int) -> None:
        """Forget a descriptor, before it is closed. Thread: any; of `watch_once` after its last run."""
        if self._handlers.pop(fd, None) is not None and not self._epoll.closed:
            self._epoll.unregister(fd)

    def add_connection(self, connection: LoopConnection) -> None:
        """Watch a connection."""
        self._connections[connection.fd] = connection
        self._epoll.register(connection.fd, select.EPOLLIN)

    def remove_connection(self, connection: LoopConnection) -> None:
        """Forget a connection, before it is closed."""
        self.release(connection)
        if self._connections.pop(connection.fd, None) is not None and not self._epoll.closed:
            self._epoll.unregister(connection.fd)

    def modify(self, fd: int, events: int) -> None:
        """Watch a descriptor for other events."""
        self._epoll.modify(fd, events)

    def hold(self, connection: LoopConnection, nbytes: int) -> None:
        """Count bytes of a message that has not come whole; over the bound, the one longest under way is dropped."""
        connection.held_bytes += nbytes
        self._held_bytes += nbytes
        while self._held_bytes > self.unfinished_bytes:
            holders = [each for each in self._connections.values() if each.held_bytes]
            oldest = min(holders, key=lambda each: each.began_s)
            if len(holders) == 1 and oldest is connection:
                return  # one message may be as large as all
            oldest.endpoint.drop_unfinished(oldest)
            if oldest is connection:
                return

    def release(self, connection: LoopConnection) -> None:
        """Count no bytes of a connection any more."""
        self._held_bytes -= connection.held_bytes
        connection.held_bytes = 0

    def call(self, function: Callable[[], object]) -> None:
        """Run a function on the I/O thread soon. Thread: any."""
        self.calls.append(function)
        self.wake()

    def stop(self, meet_s: float = 0.0) -> None:
        """Make `run` return after the replies already posted. Thread: any.

        meet_s: how long, at most, to go on until each connection has brought a message: it can then be told that
        later messages are not read.
        """
        self._meet_s = meet_s
        self._is_stopping = True
        self.wake()

    def run(self, beat: Callable[[], None], beat_s: float) -> None:
        """Serve until `stop`, calling `beat` at least each `beat_s` seconds."""
        self.is_running = True
        while not self._is_stopping or not self._is_over():
            try:
                self._serve(beat, beat_s)
            except Exception:  # one of the three broad catches: serving goes on
                log.exception("an exception reached the I/O loop")
                self.counters.count("io_errors")
        self.is_running = False
        self.send_rest()

    def send_rest(self) -> None:
        """Send the posted replies. Thread: I/O, or after `run`."""
        self._round_ends_s = self._monotonic_s() + ROUND_S
        while self.outbox or self.calls:
            self._flush()
        self._end_rounds()

    def close(self) -> None:
        """Free the wake-up descriptor. Idempotent; after `run` returned."""
        if self._wake_fd >= 0:
            os.close(self._wake_fd)
            self._epoll.close()
            self._wake_fd = -1

    def _serve(self, beat: Callable[[], None], beat_s: float) -> None:
        while not self._is_stopping or not self._is_over():
            beat()
            self.turn(MEET_POLL_S if self._is_stopping else beat_s)

    def turn(self, wait_s: float) -> None:
        """Take one round: wait for ready connections, take their bytes in, answer, send. Thread: I/O."""
        # Invariant: asleep is set before the outbox is looked at, so a post after the look always wakes.
        self.is_asleep = True
        is_busy = self.outbox or self.calls or self.again or self._left
        events = self._epoll.poll(0 if is_busy else wait_s, ROUND_EVENTS)
        self.is_asleep = False
        self.now_s = self._monotonic_s()
        self._round_ends_s = self.now_s + ROUND_S
        if self.outbox or self.calls:
            self._flush()
        # Those that the last round had no time for come first, and are read no further before that.
        pending = dict.fromkeys([each.fd for each in self.again], 0) if self.again else {}
        self.again = []
        for fd, event in (*self._left, *events):
            pending.setdefault(fd, event)
        current: LoopEndpoint | None = None
        turns = iter(pending.items())
        try:
            for fd, event in turns:
                connection = self._connections.get(fd)
                if connection is None:
                    handler = self._handlers.get(fd)
                    if handler is not None:  # else one before it in this round closed the descriptor
                        handler()
                    continue
                endpoint = connection.endpoint
                if endpoint is not current:
                    # Invariant: bursts hold entries of one endpoint: each answers its own before another gathers.
                    if current is not None:
                        current.end_round()
                    current = endpoint
                    endpoint.begin_round()
                endpoint.take(connection, event)
                if self._monotonic_s() >= self._round_ends_s:
                    break
        finally:
            self._left = list(turns)
        if self.outbox or self.calls:  # replies of runs that ended in hosts
            self._flush()
        self._end_rounds()
        if self.calls:  # those that came meanwhile may have something to send
            self._flush()
            self._end_rounds()

    def _end_rounds(self) -> None:
        for endpoint in self._endpoints:
            endpoint.end_round()

    def _is_over(self) -> bool:
        """Whether a loop that is to stop has waited long enough for first messages."""
        now_s = self._monotonic_s()
        if self._stopping_s is None:
            self._stopping_s = now_s
        taken_s = now_s - self._stopping_s
        if taken_s >= self._meet_s:
            return True
        return taken_s >= MEET_LEAST_S and all(endpoint.are_met for endpoint in self._endpoints)

    def is_round_over(self) -> bool:
        """Whether this round has taken as long as one may: the rest waits for the next. Thread: I/O."""
        return self._monotonic_s() >= self._round_ends_s

    def _flush(self) -> None:
        outbox, calls = self.outbox, self.calls
        for index in range(1, len(outbox) + 1):
            endpoint, envelope, frames = outbox.popleft()
            endpoint.send(envelope, frames)
            if not index % FLUSHED_REPLIES and self.is_round_over():
                break
        for _ in range(len(calls)):  # what these ask for is the next round's
            calls.popleft()()

    def call_soon(self, function: Callable[[], object]) -> None:
        """As `call`, and wakes the thread once: it stays asleep until it has the interpreter. Thread: any."""
        self.calls.append(function)
        if self.is_asleep:
            self.is_asleep = False
            self.wake()

    def wake(self) -> None:
        """Make the I/O thread look at its outbox and calls. Thread: any."""
        if self._wake_fd >= 0:  # else closed
            os.eventfd_write(self._wake_fd, 1)
