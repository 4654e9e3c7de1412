"""The client over ZeroMQ: wire v1 from many threads, without a thread between a call and its reply.

Owns: which thread reads. A caller that waits while no thread reads, reads for all. When its own reply has come, it
passes reading to another waiting caller, else to the link's thread. That thread starts with the first `submit`, and
alone completes futures, so a callback never runs inside another caller's `ask`.

A signal's handler, a finalizer or a callback may call in the middle of its own thread's call. Where that reads, the
inner call reads too; where it holds the lock, the inner call raises RuntimeError, since nothing could ever release it.

Measured (bench): a lone `ask` costs about 10 us over a bare DEALER round trip; a thread in between costs 60.
client/core.py builds the calls and decodes the replies, asyncio_client.py is the same for an event loop. The public
names are `Client` and `CurveKeys`.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_runtime.client import forks
from edge_runtime.client.blocking_client import ControllingClient
from edge_runtime.client.core import MAX_IN_FLIGHT, ClientCore, DaemonCalls
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
    inside_own_call,
    no_control_endpoint,
    no_reply,
    without_parts,
)
from edge_runtime.clock import Clock, SystemClock
from edge_runtime.config.endpoints import client_endpoint, control_endpoint_beside
from edge_runtime.doors.zmq.channel import CONNECT_LIMIT_S, POLLIN, POLLOUT, Channel, CurveKeys
from edge_runtime.doors.zmq.client_memory import ClientMemory
from edge_runtime.errors import QueueFull
from edge_runtime.operations import Scope
from edge_runtime.tensors import Array

__all__ = ["Client", "CurveKeys"]

NOBODY, LINK = 0, -1
"""For the identity of a thread."""

SPARE_S = 1.0
"""How much longer than its wait a call waits for the thread that reads for all, which ends it by then."""

INNER_LOOK_S = 0.05
"""How often a call looks whose thread reads for all already: another thread may take its reply."""


class Client(ControllingClient):
    """A connection to a daemon; thread-safe, one for all threads of a process is enough.

    Once used, it belongs to its process: in the child of a fork every call raises RuntimeError.

    endpoint: `ipc:///path`, `tcp://host:port`, a socket's path, or None for `$EDGE_RUNTIME_ENDPOINT`, else the
    default place. control: where load and unload go; None: `<path>.control` beside an ipc endpoint.
    timeout_ms: for requests that name none; None: the model's default. max_in_flight: the most requests in flight.

    Errors of every call: the EdgeRuntimeError that the daemon answered, rebuilt (`errors.py`); TimeoutError without a
    reply within timeout_ms + 1 s of sending (30 s without a timeout), or without a slot for as long before;
    ConnectionError at once when no daemon listens, or when the connection is lost before the reply; Draining when the
    daemon got a signal to stop and has not run the request.

        with Client() as client:
            scores = client.infer("digits", {"image": x}, timeout_ms=20)["scores"]
            boxes = client.infer("yolo", picture="photo.jpg").answer.boxes
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        control: str | None = None,
        timeout_ms: float | None = None,
        max_in_flight: int = MAX_IN_FLIGHT,
        curve: CurveKeys | None = None,
    ) -> None:
        self.endpoint = client_endpoint(endpoint)
        channel = Channel(self.endpoint, curve)
        self._link = Link(channel, max_in_flight)
        if control is None and self.endpoint.startswith("ipc://"):
            control = control_endpoint_beside(self.endpoint)
        self._control = Link(Channel(client_endpoint(control), curve), max_in_flight) if control else None
        self._memory = ClientMemory(self.endpoint)
        self._core = ClientCore(timeout_ms, DaemonCalls(self.endpoint), self._memory, channel)

    def close(self) -> None:
        """Fail pending calls with ConnectionError, close the sockets, end the threads. Idempotent. Thread: any."""
        self._memory.close()
        self._link.close()
        if self._control is not None:
            self._control.close()

    def allocate(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Make an array in memory that is shared with the daemon: zeroed, C-contiguous. Thread: any.

        `infer` and `submit` send only the place of such an input, or of a contiguous part of it, and the daemon writes
        an output of `outputs={"scores": array}` into it. Leave an input unchanged, and an output unread, until the
        answer is there. Allocate once and use it again. The memory is free again when the array and all its views are
        gone; after `close` it reads as zeros. Over tcp, and where the daemon shares no memory, it is an ordinary array
        and every call gives the same answer by frames. Raises QueueFull over the daemon's bound ([shared_memory]).
        """
        array = self._memory.allocate(shape, dtype)
        if array is None:
            return np.zeros(shape, dtype)
        if self._memory.attached != self._link.connection or not self._link.connection:
            with contextlib.suppress(ConnectionError, TimeoutError):  # the next call tells
                self._run(self._core.attach())
        return array

    # ---- private ----------------------------------------------------------------------------------------------------

    def _ask(self, call: Call) -> Any:
        operation = call.operation
        if operation is None or operation.scope is Scope.INFER:
            return self._link.ask(call)
        if self._control is None:
            raise no_control_endpoint(operation.name)
        return self._control.ask(call)

    def _submit(self, call: Call) -> Future[Any]:
        return self._link.submit(call)

    def _next_part(self, call: Call) -> Any:
        return self._link.next_part(call)

    def _leave(self, call: Call) -> None:
        self._link.leave(call)


class Link:
    """Thread-safe requests over one channel. Opens it at the first use; `close` is idempotent.

    clock: of deadlines; asked from every thread that uses the link.
    """

    def __init__(self, channel: Channel, max_in_flight: int, clock: Clock | None = None) -> None:
        self._channel = channel
        self._now_s = (clock or SystemClock()).monotonic_s
        self._forks = forks.count
        self._lock = threading.RLock()  # Invariant: held once; it tells a thread that it has it already
        self._in_flight = InFlight(max_in_flight)
        self._followers: dict[bytes, Call] = {}  # callers of `ask` that wait while another thread reads
        self._slots: deque[threading.Lock] = deque()  # callers that wait for a slot
        self._reader = NOBODY  # Invariant: the thread that reads for all or is about to; the link's own is LINK
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
        self._wait(call)
        return call.result()

    def next_part(self, call: Call) -> Any:
        """Wait for the next part of an answer, and return the decoded result. Raises as `ask`. One thread at a time."""
        self._check_process()
        self._wait(call, has_begun=True)
        return call.result()

    def leave(self, call: Call) -> None:
        """Have the daemon end an answer in parts that its caller leaves. Idempotent. Thread: any, inside any call."""
        if call.is_over or self._forks != forks.count or sys.is_finalizing():
            return
        if self._holds_lock():
            threading.Thread(target=self.leave, args=(call,), name="edge-runtime-client", daemon=True).start()
            return
        self._forget(call, is_left=True)

    def _wait(self, call: Call, *, has_begun: bool = False) -> None:
        """Send a call, or have it wait for its next part; return when what it waits for is there."""
        me = threading.get_ident()
        try:
            with self._lock:
                if not has_begun:
                    self._start(call)
                elif without_parts(call):
                    call.has_ended, call.gate = False, None
                else:
                    return
                if self._reader == NOBODY:
                    self._reader = me
                    call.reads = True
                elif not self._is_read_by(me):
                    call.thread = me
                    call.gate = threading.Lock()
                    call.gate.acquire()
                    self._followers[call.number] = call
            wait_s = min(call.wait_s + SPARE_S, threading.TIMEOUT_MAX)
            if call.gate is not None and not call.gate.acquire(timeout=wait_s):
                self._take_over(call)
            if call.gate is None or call.reads:
                self._read(call)
        except Exception:
            self._forget(call)
            raise
        except BaseException:  # KeyboardInterrupt, most likely: no other thread may wait for this one
            forgets = threading.Thread(target=self._forget, args=(call,), name="edge-runtime-client", daemon=True)
            forgets.start()  # on a thread that no second one reaches
            forgets.join()
            raise

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
            if self._reader == NOBODY:
                self._reader = LINK
                self._work.put(self)
            elif self._reader != LINK and self._is_read_by(threading.get_ident()):
                self._work.put(self)  # in a signal's handler, whose thread may wait for the future there
        return future

    def close(self) -> None:
        """Fail pending calls with ConnectionError, close the socket, end the thread. Thread: any."""
        if self._forks != forks.count:
            self._is_closed = True  # the socket is the parent's
            return
        if sys.is_finalizing():
            return  # no other thread runs any more, and the process's end closes the socket
        if self._holds_lock():
            threading.Thread(target=self.close, name="edge-runtime-client", daemon=True).start()
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
            reader = self._reader
            if reader == NOBODY:
                self._left.set()
            else:
                os.eventfd_write(self._wake_fd, 1)
        if threading.current_thread() is self._thread:
            self._frees_itself = True  # in a future's callback: this thread cannot join itself
        elif reader == threading.get_ident():  # in a signal's handler, which the call that reads waits for
            threading.Thread(target=self._end, name="edge-runtime-client", daemon=True).start()
        else:
            self._end()

    def _end(self) -> None:
        """Free what there is once no thread reads."""
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
            if self._is_open or not self._lock.acquire(blocking=False):
                raise forks.crossed()
            self._lock.release()
            self._forks = forks.count
        if self._holds_lock():
            raise inside_own_call()
        if sys.is_finalizing():
            raise closed()

    def _holds_lock(self) -> bool:
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]  # noqa: SLF001 (as Condition does)

    def _is_read_by(self, thread: int) -> bool:
        """Whether a thread reads for all already, and called again meanwhile."""
        if self._reader == LINK:
            return self._thread is not None and thread == self._thread.ident
        return self._reader == thread

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
        if self._reader != NOBODY and (in_flight.look_s < self._reader_wakes_s or self._channel.events() != POLLOUT):
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
        self._poll = self._new_poll()
        self._is_open = True

    def _new_poll(self, *, wakes: bool = True) -> select.poll:
        poll = select.poll()
        for fd in self._channel.fds:
            poll.register(fd, select.POLLIN)
        if wakes:
            poll.register(self._wake_fd, select.POLLIN)
        return poll

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
                if call is None:  # its caller gave up, or it is not an answer
                    channel.take_notice(frames)
                    continue
                if call.parts is not None and call.take_part(frames):
                    in_flight.put_back(call, self._now_s())
                    self._wake(call)
                    continue
                if call.error is not None:
                    self._cancel(call)
                call.frames = frames
                self._finish(call, finished)
        now_s = self._now_s()
        if now_s >= in_flight.look_s:
            for call, late_s in in_flight.take_missed(now_s):
                call.error = no_reply(self.endpoint, call.wait_s, late_s)
                self._cancel(call)
                self._finish(call, finished)
        return finished

    def _finish(self, call: Call, finished: list[Call]) -> None:
        if call.future is not None:
            call.has_ended = True
            finished.append(call)
        else:
            self._wake(call)
        if self._slots:
            self._slots.popleft().release()

    def _wake(self, call: Call) -> None:
        """Have the caller go on that waits for a reply or a part, if one does."""
        call.has_ended = True
        if call.gate is not None and self._followers.pop(call.number, None) is not None:
            call.gate.release()

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
            self._reader = NOBODY
            self._left.set()
        elif self._followers:
            _, chosen = self._followers.popitem()  # the last: of two of one thread the inner one, which goes on first
            assert chosen.gate is not None
            chosen.reads = True
            self._reader = chosen.thread
            chosen.gate.release()
        elif self._in_flight.calls and self._thread is not None:  # else they are answers in parts that none waits for
            self._reader = LINK
            self._work.put(self)
        else:
            self._reader = NOBODY

    # ---- the lock is not held ---------------------------------------------------------------------------------------

    def _read(self, until: Call | None) -> None:
        """Read for all callers until one call has ended; on the link's own thread until none is pending.

        Beside the thread that reads for all, it looks often, and wakes that one: its reply may have come here.
        """
        is_inner = self._reader != LINK if until is None else not until.reads
        poll = self._new_poll(wakes=False) if is_inner else self._poll
        assert poll is not None
        while True:
            with self._lock:
                finished = [] if self._is_closed else self._take()
                leaves = self._is_closed or (not self._in_flight.calls if until is None else until.has_ended)
                if is_inner:
                    os.eventfd_write(self._wake_fd, 1)
                elif leaves:
                    self._pass_reading()
                else:
                    self._reader_wakes_s = self._in_flight.look_s
                if until is not None:
                    until.reads = until.reads and not leaves
                    for call in finished:
                        self._work.put(call)  # under the lock: `close` puts the end behind them
                    finished = []
            for call in finished:
                call.complete()
            if leaves:
                return
            left_s = INNER_LOOK_S if is_inner else self._reader_wakes_s - self._now_s()
            for fd, _ in poll.poll(max(left_s * 1e3 + 1, 0)):
                if fd == self._wake_fd:
                    os.eventfd_read(self._wake_fd)

    def _take_over(self, call: Call) -> None:
        """Read for all in the place of a thread that was interrupted again while it passed reading on."""
        with self._lock:
            self._followers.pop(call.number, None)
            self._reader = call.thread
            self._poll = self._new_poll()  # the other thread may be in the old one
            call.reads = True

    def _forget(self, call: Call, *, is_left: bool = False) -> None:
        """Take out the call of a caller that leaves without its reply, and pass reading on.

        is_left: another thread may wait for its next part, and goes on now.
        """
        with self._lock:
            is_followed = self._followers.pop(call.number, None) is not None
            if self._in_flight.take(call.number) is not None:
                if self._slots:
                    self._slots.popleft().release()
                self._cancel(call)
            if is_followed and is_left and call.gate is not None:
                call.gate.release()
            if call.reads and not is_left:
                call.reads = False
                self._pass_reading()

    def _cancel(self, call: Call) -> None:
        """Have the daemon end an answer whose parts are not taken any more. The lock is held."""
        if call.cancel_header is None or call.is_over:
            return
        call.leave()
        if not self._is_closed and self._channel.connection == call.connection:
            self._channel.send(call.number, call.cancel_header(call.number), ())
            if self._reader != NOBODY:  # the send may have consumed its signal; and it may read for this call
                os.eventfd_write(self._wake_fd, 1)

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
