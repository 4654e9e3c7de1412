"""Requests and replies over one channel from many threads, without a thread between a call and its reply.

Owns: which thread reads. A caller that waits while no thread reads, reads for all. When its own reply has come, it
passes reading to another waiting caller, else to the link's thread. That thread starts with the first `submit`, and
alone completes futures, so a callback never runs inside another caller's `ask`.

Measured (bench): a lone `ask` costs about 10 us over a bare DEALER round trip; a thread in between costs 60.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from edge_runtime.client import forks
from edge_runtime.client.channel import CONNECT_LIMIT_S, POLLIN, POLLOUT, Channel
from edge_runtime.client.in_flight import (
    LOOK_S,
    LOOKS,
    NEVER_S,
    Call,
    InFlight,
    all_in_flight,
    all_in_flight_in_callback,
    closed,
    closed_before_answer,
    no_reply,
)
from edge_runtime.errors import QueueFull


class Link:
    """Thread-safe requests over one channel. Opens it at the first use; `close` is idempotent.

    monotonic_s: the clock that deadlines are judged by; asked from every thread that uses the link.
    """

    def __init__(self, channel: Channel, max_in_flight: int, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._channel = channel
        self._now_s = monotonic_s
        self._forks = forks.count
        self._lock = threading.Lock()
        self._in_flight = InFlight(max_in_flight)
        self._followers: dict[bytes, Call] = {}  # callers of `ask` that wait while another thread reads
        self._slots: deque[threading.Lock] = deque()  # callers that wait for a slot
        self._is_read = False  # Invariant: true while a thread reads or is about to; never two
        self._reader_wakes_s = NEVER_S
        self._poll: select.poll | None = None
        self._wake_fd = -1
        self._close_wake_fd: weakref.finalize[..., Any] | None = None
        self._is_open = False
        self._is_closed = False
        self._frees_itself = False  # closed on the link's own thread, which then closes the socket
        self._left = threading.Event()  # closed, and no thread reads any more
        self._thread: threading.Thread | None = None
        # A finished future; None: end; this link: read for it. Queued, the link lives until its futures are complete.
        self._work: SimpleQueue[Call | Link | None] = SimpleQueue()

    @property
    def endpoint(self) -> str:
        """The daemon's endpoint."""
        return self._channel.endpoint

    @property
    def connection(self) -> int:
        """The number of the connection that there is, or was last."""
        return self._channel.connection

    def ask(self, call: Call) -> Any:
        """Send one request, wait for its reply and return the decoded result.

        Raises TimeoutError after wait_s seconds without a slot, or without a reply since it was sent; ConnectionError
        when no daemon listens or the connection is lost meanwhile; Draining when the daemon stopped and has not run it;
        the error that the reply carries.
        """
        self._check_process()
        try:
            with self._lock:
                self._start(call)
                if not self._is_read:
                    call.reads = self._is_read = True
                else:
                    call.gate = threading.Lock()
                    call.gate.acquire()
                    self._followers[call.number] = call
            if call.gate is not None:
                call.gate.acquire()
            if call.reads:
                self._read(call)
        except BaseException:  # KeyboardInterrupt, most likely: no other thread may wait for this one
            self._forget(call)
            raise
        return call.result()

    def submit(self, call: Call) -> Future[Any]:
        """Send one request; the future gets the result or the error. Blocks while `max_in_flight` are pending.

        Raises as `ask` when it cannot be sent, and QueueFull inside a future's callback, which must not block.
        """
        self._check_process()
        call.future = future = Future[Any]()
        with self._lock:
            self._start(call)
            if self._thread is None:
                work = self._work
                self._thread = threading.Thread(
                    target=Link._serve, args=(weakref.ref(self), work), name="edge-runtime-client", daemon=True
                )
                weakref.finalize(self, work.put, None).atexit = False
                self._thread.start()
            if not self._is_read:
                self._is_read = True
                self._work.put(self)
        return future

    def close(self) -> None:
        """Fail pending calls with ConnectionError, close the socket, end the thread. Thread: any."""
        if self._forks != forks.count:
            self._is_closed = True  # the socket is the parent's
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for call in self._fail_all(closed_before_answer):
                self._work.put(call)
            while self._slots:
                self._slots.popleft().release()
            self._work.put(None)
            if self._is_read:
                os.eventfd_write(self._wake_fd, 1)
            else:
                self._left.set()
        if threading.current_thread() is self._thread:
            self._frees_itself = True  # in a future's callback: this thread cannot join itself
            return
        self._left.wait()
        if self._thread is not None:
            # After a KeyboardInterrupt during `start` the thread may run or not, and cannot be joined yet. If it runs,
            # it finds the end in its work.
            with contextlib.suppress(RuntimeError):
                self._thread.join()
        self._free()

    def _check_process(self) -> None:
        """A link that was never used works in the child of a fork; any other raises RuntimeError."""
        if self._forks != forks.count:
            if self._is_open or self._lock.locked():
                raise forks.crossed()
            self._forks = forks.count

    # ---- the link's lock is held ------------------------------------------------------------------------------------

    def _start(self, call: Call) -> None:
        self._check_open()
        in_flight = self._in_flight
        if in_flight.is_full:
            self._wait_for_slot(call)
        in_flight.number(call)
        if not call.send(self._channel):
            self._connect(call)
            if not call.send(self._channel):
                raise self._channel.ended()
        # The wait starts now: a long wait for a slot must not shorten the time for the reply.
        in_flight.add(call, self._now_s() + call.wait_s)
        if self._is_read and (in_flight.look_s < self._reader_wakes_s or self._channel.events() != POLLOUT):
            # The reading thread sleeps beyond this deadline, or on a signal that this send consumed (a reply, a lost
            # connection).
            os.eventfd_write(self._wake_fd, 1)

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed()
        if self._is_open:
            return
        missing = self._channel.missing()
        if missing is not None:
            raise missing
        self._channel.open()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._close_wake_fd = weakref.finalize(self, os.close, self._wake_fd)
        self._close_wake_fd.atexit = False  # the thread may wait for it
        self._poll = select.poll()
        for fd in self._channel.fds:
            self._poll.register(fd, select.POLLIN)
        self._poll.register(self._wake_fd, select.POLLIN)
        self._is_open = True

    def _connect(self, call: Call) -> None:
        """Reconnect after a loss, which ends the pending calls. Raises at once without a listener."""
        if self._in_flight.calls:
            for done in self._take():
                self._work.put(done)
            os.eventfd_write(self._wake_fd, 1)  # the reading thread's own reply may be lost
        self._channel.drain()
        missing = self._channel.missing()
        if missing is not None:
            raise missing
        if not self._channel.wait_connected(min(CONNECT_LIMIT_S, call.wait_s)):
            raise self._channel.missing() or self._channel.no_handshake()

    def _wait_for_slot(self, call: Call) -> None:
        in_flight = self._in_flight
        if threading.current_thread() is self._thread:
            raise QueueFull(all_in_flight_in_callback(in_flight.most))
        end_s, looks_left = self._now_s() + call.wait_s, LOOKS
        while in_flight.is_full:
            slot = threading.Lock()
            slot.acquire()
            self._slots.append(slot)
            self._lock.release()
            try:
                is_free = slot.acquire(timeout=max(end_s - self._now_s(), LOOK_S))
            finally:
                self._lock.acquire()
                if slot in self._slots:
                    self._slots.remove(slot)
            self._check_open()
            if is_free:
                continue
            looks_left -= 1  # the reading thread may have been stalled like this one
            if not looks_left and in_flight.is_full:
                raise all_in_flight(in_flight.most, call.wait_s)

    def _take(self) -> list[Call]:
        """Take every reply that has arrived; return the futures that it ends."""
        channel, in_flight = self._channel, self._in_flight
        calls, finished = in_flight.calls, list[Call]()
        while calls:
            events = channel.events()
            if not events & POLLIN:
                if not events & POLLOUT:
                    # Every reply that came is read, so the pending ones are lost with the connection.
                    finished += self._fail_all(channel.ended)
                break
            while calls and (frames := channel.receive()) is not None:
                call = in_flight.take(frames[1].bytes if len(frames) > 1 else b"")
                if call is None:  # its caller gave up, or it is no answer
                    channel.take_notice(frames)
                    continue
                call.frames = frames
                self._finish(call, finished)
        now_s = self._now_s()
        if now_s >= in_flight.look_s:
            for call, late_s in in_flight.take_missed(now_s):
                call.error = no_reply(self.endpoint, call.wait_s, late_s)
                self._finish(call, finished)
        return finished

    def _finish(self, call: Call, finished: list[Call]) -> None:
        call.has_ended = True
        if call.future is not None:
            finished.append(call)
        elif call.gate is not None and self._followers.pop(call.number, None) is not None:
            call.gate.release()
        if self._slots:
            self._slots.popleft().release()

    def _fail_all(self, error: Callable[[], Exception]) -> list[Call]:
        finished: list[Call] = []
        for call in self._in_flight.take_all():
            call.error = error()
            self._finish(call, finished)
        return finished

    def _pass_reading(self) -> None:
        """Pass reading to another thread while calls are pending."""
        self._reader_wakes_s = NEVER_S
        if self._is_closed:
            self._is_read = False
            self._left.set()
        elif self._followers:
            chosen = self._followers.pop(next(iter(self._followers)))
            assert chosen.gate is not None
            chosen.reads = True
            chosen.gate.release()
        elif self._in_flight.calls:
            self._work.put(self)
        else:
            self._is_read = False

    # ---- the lock is not held ---------------------------------------------------------------------------------------

    def _read(self, until: Call | None) -> None:
        """Read for all callers until one call has ended; on the link's own thread until none is pending."""
        poll = self._poll
        assert poll is not None
        while True:
            with self._lock:
                finished = [] if self._is_closed else self._take()
                leaves = self._is_closed or (not self._in_flight.calls if until is None else until.has_ended)
                if leaves:
                    if until is not None:
                        until.reads = False
                    self._pass_reading()
                else:
                    self._reader_wakes_s = self._in_flight.look_s
                if until is not None:
                    for call in finished:
                        self._work.put(call)  # under the lock: `close` puts the end behind them
                    finished = []
            for call in finished:
                call.complete()
            if leaves:
                return
            left_s = self._reader_wakes_s - self._now_s()
            for fd, _ in poll.poll(max(left_s * 1e3 + 1, 0)):
                if fd == self._wake_fd:
                    os.eventfd_read(self._wake_fd)

    def _forget(self, call: Call) -> None:
        """Take out the call of a caller that leaves without its reply, and pass reading on."""
        with self._lock:
            self._followers.pop(call.number, None)
            if self._in_flight.take(call.number) is not None and self._slots:
                self._slots.popleft().release()
            if call.reads:
                call.reads = False
                self._pass_reading()

    @staticmethod
    def _serve(link_of: weakref.ref[Link], work: SimpleQueue[Call | Link | None]) -> None:
        """Body of the link's thread: complete futures, and read when asked to.

        Holds the link only while it reads, so a client that was dropped without `close` ends this thread too.
        """
        while (item := work.get()) is not None:
            if isinstance(item, Link):
                item._read(None)  # noqa: SLF001 (its own)
            else:
                item.complete()
            item = None
        link = link_of()
        if link is not None and link._frees_itself:  # noqa: SLF001
            link._left.wait()  # noqa: SLF001
            link._free()  # noqa: SLF001

    def _free(self) -> None:
        if self._is_open:
            self._channel.close()
            assert self._close_wake_fd is not None
            self._close_wake_fd()
            self._is_open = False
