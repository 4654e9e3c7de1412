"""Requests and replies over one channel from many threads, with no thread of its own between a call and its answer.

Owns: which thread reads. Whoever waits for an answer and finds nobody reading reads for all, and hands reading on when
its own answer is there: to another waiting caller, else to the link's thread, which exists only once `submit` was
used and is the only one that completes futures (so a callback never runs inside somebody's `ask`).

Measured (tests/bench): a lone `ask` costs about 10 us over a bare DEALER round trip; a thread in between costs 60.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from queue import SimpleQueue
from typing import Any

from edge_runtime.client.channel import CONNECT_LIMIT_S, POLLIN, POLLOUT, Channel
from edge_runtime.client.frames import Frame
from edge_runtime.client.lateness import LOOK_S, LOOKS, SecondLooks, no_reply
from edge_runtime.errors import QueueFull

NEVER_S = float("inf")


class _Asked:
    """One request in flight. Exactly one of `frames` and `error` is set when `is_done`."""

    __slots__ = ("deadline_s", "decode", "error", "frames", "future", "gate", "is_done", "leads", "number", "wait_s")

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self.deadline_s = NEVER_S  # until it is sent
        self.number = b""
        self.is_done = False
        self.leads = False  # its caller reads for all, or was told to
        self.frames: list[Any] = []
        self.error: Exception | None = None
        self.gate: threading.Lock | None = None
        self.future: Future[Any] | None = None
        self.decode: Callable[[list[Any]], Any] | None = None


class Link:
    """Thread-safe requests over one channel. Opens it at the first use; `close` is idempotent.

    monotonic_s: the clock that deadlines are judged by; asked from every thread that uses the link.
    """

    def __init__(self, channel: Channel, max_in_flight: int, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._channel = channel
        self._max_in_flight = max_in_flight
        self._now_s = monotonic_s
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._pending: dict[bytes, _Asked] = {}
        self._followers: dict[bytes, _Asked] = {}  # callers of `ask` that wait while another thread reads
        self._slots: deque[threading.Lock] = deque()  # callers that wait for one request less in flight
        self._is_read = False  # Invariant: true while one thread reads or has been told to, so never with two
        self._earliest_s = NEVER_S  # no pending deadline is before this
        self._reader_wakes_s = NEVER_S
        self._second_looks = SecondLooks()
        self._poll: select.poll | None = None
        self._wake_fd = -1
        self._is_open = False
        self._is_closed = False
        self._frees_itself = False  # closed on the link's own thread, which then gives the socket back
        self._left = threading.Event()  # closed, and nobody reads any more
        self._thread: threading.Thread | None = None
        self._work: SimpleQueue[_Asked | bool] = SimpleQueue()  # a finished future, True: read, False: end

    @property
    def endpoint(self) -> str:
        """Where this link leads."""
        return self._channel.endpoint

    def ask(self, header: bytes, tensors: Sequence[Frame], wait_s: float) -> list[Any]:
        """Send one request and wait for its reply's frames.

        Raises TimeoutError when wait_s seconds went by without a slot, or since it was sent; ConnectionError when
        nobody answers at the endpoint or the connection is lost meanwhile.
        """
        asked = _Asked(wait_s)
        try:
            with self._lock:
                self._start(asked, header, tensors)
                if not self._is_read:
                    asked.leads = self._is_read = True
                else:
                    asked.gate = threading.Lock()
                    asked.gate.acquire()
                    self._followers[asked.number] = asked
            if asked.gate is not None:
                asked.gate.acquire()
            if asked.leads:
                self._read(asked)
        except BaseException:  # KeyboardInterrupt, most likely: nobody else must wait for what this caller left
            self._forget(asked)
            raise
        if asked.error is not None:
            raise asked.error
        return asked.frames

    def submit(
        self, header: bytes, tensors: Sequence[Frame], wait_s: float, decode: Callable[[list[Any]], Any]
    ) -> Future[Any]:
        """Send one request; the future gets `decode(frames)`, or the error. Blocks while `max_in_flight` are pending.

        Raises as `ask` when it cannot be sent, and QueueFull inside a future's callback, which must not block.
        """
        asked = _Asked(wait_s)
        future: Future[Any] = Future()
        asked.future = future
        asked.decode = decode
        with self._lock:
            self._start(asked, header, tensors)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="edge-runtime-client", daemon=True)
                self._thread.start()
            if not self._is_read:
                self._is_read = True
                self._work.put(True)
        return future

    def close(self) -> None:
        """Fail what is pending with ConnectionError and give the socket and the thread back. Thread: any."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for asked in self._fail(list(self._pending), ConnectionError("closed before an answer was there")):
                self._work.put(asked)
            while self._slots:
                self._slots.popleft().release()
            self._work.put(False)
            if self._is_read:
                os.eventfd_write(self._wake_fd, 1)
            else:
                self._left.set()
        if threading.current_thread() is self._thread:
            self._frees_itself = True  # in a future's callback: this very thread may be the one to wait for
            return
        self._left.wait()
        if self._thread is not None:
            # A KeyboardInterrupt during `start` leaves a thread that runs, or never will, and may not be joined yet;
            # where it runs, it finds the end in its work.
            with contextlib.suppress(RuntimeError):
                self._thread.join()
        self._free()

    # ---- the link's lock is held ------------------------------------------------------------------------------------

    def _start(self, asked: _Asked, header: bytes, tensors: Sequence[Frame]) -> None:
        self._check_open()
        if len(self._pending) >= self._max_in_flight:
            self._wait_for_slot(asked)
        number = asked.number = next(self._numbers).to_bytes(8, "little")
        if not self._channel.send(number, header, tensors):
            self._connect(asked)
            if not self._channel.send(number, header, tensors):
                raise lost(self.endpoint)
        # Only now: what waited long for its slot has to be given time for its answer, too.
        asked.deadline_s = self._now_s() + asked.wait_s
        self._pending[number] = asked
        if asked.deadline_s < self._earliest_s:
            self._earliest_s = asked.deadline_s
            if self._is_read and asked.deadline_s < self._reader_wakes_s:
                os.eventfd_write(self._wake_fd, 1)
        if self._is_read and self._channel.events() != POLLOUT:
            # This send took the news (a reply, a lost connection) that the reading thread sleeps on: pass it on.
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
        self._poll = select.poll()
        self._poll.register(self._channel.fd, select.POLLIN)
        self._poll.register(self._wake_fd, select.POLLIN)
        self._is_open = True

    def _connect(self, asked: _Asked) -> None:
        """No connection: what is pending lost its answer. Fail at once when nobody listens, else connect anew."""
        if self._pending:
            for done in self._take():
                self._work.put(done)
            os.eventfd_write(self._wake_fd, 1)  # the reading thread may be the one whose answer was lost
        missing = self._channel.missing()
        if missing is not None:
            raise missing
        if not self._channel.wait_connected(min(CONNECT_LIMIT_S, asked.wait_s)):
            raise self._channel.missing() or self._channel.no_handshake()

    def _wait_for_slot(self, asked: _Asked) -> None:
        if threading.current_thread() is self._thread:
            raise QueueFull(
                f"{self._max_in_flight} requests are in flight, as many as this client may have, and a future's "
                "callback cannot wait for one of them; submit from another thread or raise max_in_flight"
            )
        end_s, looks_left = self._now_s() + asked.wait_s, LOOKS
        while len(self._pending) >= self._max_in_flight:
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
            looks_left -= 1  # the reading thread may have been held up as this one was
            if not looks_left and len(self._pending) >= self._max_in_flight:
                raise TimeoutError(
                    f"{self._max_in_flight} requests were in flight for {asked.wait_s:.3f} s, as many as this client "
                    "may have; raise max_in_flight, or ask less often"
                )

    def _take(self) -> list[_Asked]:
        """Take every reply that is there; returns the futures that are finished by that."""
        channel, pending = self._channel, self._pending
        finished: list[_Asked] = []
        while pending:
            events = channel.events()
            if not events & POLLIN:
                if not events & POLLOUT:
                    # All replies that came were read before, so what is pending now has lost its answer.
                    finished += self._fail(list(pending), lost(self.endpoint))
                break
            while pending and (frames := channel.receive()) is not None:
                asked = pending.pop(frames[1].bytes if len(frames) > 1 else b"", None)
                if asked is None:
                    continue  # the reply to a request that was given up
                asked.frames = frames
                self._finish(asked, finished)
        now_s = self._now_s()
        if now_s >= self._earliest_s:
            finished += self._expire(now_s)
        return finished

    def _finish(self, asked: _Asked, finished: list[_Asked]) -> None:
        asked.is_done = True
        if asked.future is not None:
            finished.append(asked)
        elif asked.gate is not None and self._followers.pop(asked.number, None) is not None:
            asked.gate.release()
        if self._slots:
            self._slots.popleft().release()

    def _fail(self, numbers: list[bytes], error: Exception) -> list[_Asked]:
        finished: list[_Asked] = []
        for number in numbers:
            asked = self._pending.pop(number)
            asked.error = type(error)(*error.args)
            self._finish(asked, finished)
        return finished

    def _expire(self, now_s: float) -> list[_Asked]:
        """Every reply that was there is taken: fail what is overdue and was looked for often enough."""
        pending, finished = self._pending, []
        if now_s < self._second_looks.due_s:
            return []
        self._earliest_s = min((asked.deadline_s for asked in pending.values()), default=NEVER_S)
        missed_s = self._second_looks.judge(now_s, self._earliest_s)
        if missed_s is None:
            return []
        for number in [number for number, asked in pending.items() if asked.deadline_s <= missed_s]:
            asked = pending[number]
            finished += self._fail([number], no_reply(self.endpoint, asked.wait_s, missed_s - asked.deadline_s))
        self._earliest_s = min((asked.deadline_s for asked in pending.values()), default=NEVER_S)
        return finished

    def _pass_reading(self) -> None:
        """Let somebody else read, if there is anything to read for."""
        self._reader_wakes_s = NEVER_S
        if self._is_closed:
            self._is_read = False
            self._left.set()
        elif self._followers:
            chosen = self._followers.pop(next(iter(self._followers)))
            assert chosen.gate is not None
            chosen.leads = True
            chosen.gate.release()
        elif self._pending:
            self._work.put(True)
        else:
            self._is_read = False

    # ---- the lock is not held ---------------------------------------------------------------------------------------

    def _read(self, until: _Asked | None) -> None:
        """Read for everybody until one request is done, or, for the link's own thread, nothing is pending."""
        poll = self._poll
        assert poll is not None
        while True:
            with self._lock:
                finished = [] if self._is_closed else self._take()
                leaves = self._is_closed or (not self._pending if until is None else until.is_done)
                if leaves:
                    if until is not None:
                        until.leads = False
                    self._pass_reading()
                else:
                    self._reader_wakes_s = max(self._earliest_s, self._second_looks.due_s)
                if until is not None:
                    for asked in finished:
                        self._work.put(asked)  # under the lock: `close` puts the end behind them
                    finished = []
            for asked in finished:
                _complete(asked)
            if leaves:
                return
            left_s = self._reader_wakes_s - self._now_s()
            for fd, _ in poll.poll(max(left_s * 1e3 + 1, 0)):
                if fd == self._wake_fd:
                    os.eventfd_read(self._wake_fd)

    def _forget(self, asked: _Asked) -> None:
        """The caller of `ask` is leaving without its answer: let nobody wait for it, and pass reading on."""
        with self._lock:
            self._followers.pop(asked.number, None)
            if self._pending.pop(asked.number, None) is not None and self._slots:
                self._slots.popleft().release()
            if asked.leads:
                asked.leads = False
                self._pass_reading()

    def _serve(self) -> None:
        """Body of the link's thread: complete futures, and read when told to."""
        while (item := self._work.get()) is not False:
            if item is True:
                self._read(None)
            else:
                _complete(item)
        if self._frees_itself:
            self._left.wait()
            self._free()

    def _free(self) -> None:
        if self._is_open:
            self._channel.close()
            os.close(self._wake_fd)
            self._is_open = False


def closed() -> ConnectionError:
    """What those are told who come after `close`."""
    return ConnectionError("the client is closed; make a new one")


def lost(endpoint: str) -> ConnectionError:
    """What those are told whose answer went with the connection."""
    return ConnectionError(
        f"the connection to {endpoint} was lost before an answer was there: the daemon stopped, or a tensor was larger "
        "than its max_frame_bytes; it is safe to ask again"
    )


def _complete(asked: _Asked) -> None:
    """Give a future its result or error. Thread: the link's, with no lock held, since callbacks run here."""
    future = asked.future
    assert future is not None
    assert asked.decode is not None
    if not future.set_running_or_notify_cancel():
        return
    if asked.error is not None:
        future.set_exception(asked.error)
        return
    try:
        result = asked.decode(asked.frames)
    except Exception as error:  # noqa: BLE001 (whatever it is, it belongs to the future)
        future.set_exception(error)
    else:
        future.set_result(result)
