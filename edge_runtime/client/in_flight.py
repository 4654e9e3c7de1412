"""The book of requests in flight: which wait for a reply, how many may, and which are overdue.

Owns: each call from its sending to its end, and when silence counts as a missing reply. Does no I/O and takes no lock:
doors/zmq/client.py calls it under its link's lock, doors/mqtt/link.py under its own, doors/zmq/asyncio_client.py on its
loop.

A process that was held up past a deadline (short of CPU, stopped, its loop busy) finds the clock run out and nothing
read: the reply lies in the kernel, and libzmq's thread has yet to run. So silence is believed only after further looks
(measured, after 1.2 s of SIGSTOP with 256 in flight: each such reply came 2 to 13 ms after its future had failed).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from edge_runtime.client.frames import Frame, Shared
from edge_runtime.errors import Cancelled, ConfigError, QueueFull

if TYPE_CHECKING:
    from edge_runtime.operations import Operation

NEVER_S = float("inf")
ALWAYS_S = float("-inf")

LOOK_S = 0.010
"""Between two looks: the time libzmq's thread gets to bring what came."""

LOOKS = 5
"""Looks after the first. Counted, not timed: a process that is held up again in between has still looked after that."""

MOST_PARTS = 10_000
"""Parts of one answer that may wait for a caller that does not take them, some 10 MB of small ones."""

HELD_UP_S = 0.050
"""A first look this much after the deadline raises to the caller: a merely busy machine wakes a thread sooner."""


class Carrier(Protocol):
    """Carries calls. connection: its number, another one after each reconnect."""

    @property
    def connection(self) -> int:
        """The number of the connection that there is, or was last."""
        ...

    def send(self, request_id: bytes, header: bytes, tensors: Sequence[Frame]) -> bool:
        """Send one request; False when there is no connection."""
        ...


class Call:
    """One request: what is sent, how long its caller waits, and how its reply is decoded.

    `frames` is the reply, `error` why there is none; one of them is set when it has ended. connection:
    the number of the one that it was sent over. shared: what it has in shared memory. future: a concurrent or an
    asyncio one. gate: opens for a thread that waits; thread: the identity of that. reads: its caller reads for all
    threads of a link. timeout_ms: the deadline in its header. model: of an inference call; operation: of another one.
    bounded_bytes: what is held against the daemon's bound; size_advice: beside sending less. topic, message, payload:
    traceparent: over MQTT only. oip: what is sent over HTTP and gRPC in place of header and tensors.

    Where the answer comes in parts: is_last tells whether a reply is the last, parts are the replies that its caller
    has not taken, cancel_header ends it by its number. `has_ended` then means that what its caller waits for is there,
    and `is_over` that nothing more comes. replies: the answer over HTTP and gRPC, of which its caller reads the parts;
    taken: their number so far.
    """

    deadline_s = NEVER_S  # until it is sent
    number = b""
    has_ended = False
    reads = False
    frames: Sequence[Any] = ()
    error: Exception | None = None
    gate: threading.Lock | None = None
    thread = 0
    connection = 0
    shared: Shared | None = None
    future: Any = None
    model = ""
    bounded_bytes = 0
    size_advice = "raise [zmq] max_frame_bytes in its configuration"
    operation: Operation | None = None
    topic = ""
    traceparent: str | None = None
    message: Any = None
    payload = b""
    oip: Any = None
    is_last: Callable[[Sequence[Any]], bool] | None = None
    parts: deque[Sequence[Any]] | None = None
    cancel_header: Callable[[bytes], bytes] | None = None
    is_over = False
    replies: Any = None
    taken = 0

    def __init__(
        self,
        header: bytes,
        tensors: Sequence[Frame],
        wait_s: float,
        decode: Callable[[Any], Any],
        timeout_ms: float | None = None,
    ) -> None:
        self.header = header
        self.tensors = tensors
        self.wait_s = wait_s
        self.decode = decode
        self.timeout_ms = timeout_ms

    def send(self, channel: Carrier) -> bool:
        """Send it; False when there is no connection. In frames over a connection that knows none of its regions."""
        shared = self.shared
        self.connection = channel.connection
        if shared is not None and shared.connection != channel.connection:
            self.header, self.tensors, self.decode = shared.in_frames()
            self.shared = None
        return channel.send(self.number, self.header, self.tensors)

    def result(self) -> Any:
        """Decode the reply, or the next part of it. Raises what it carries, or why there is none."""
        if self.parts:
            return self.decode(self.parts.popleft())
        if self.error is not None:
            raise self.error
        return self.decode(self.frames)

    def take_part(self, frames: Sequence[Any]) -> bool:
        """Keep a reply of an answer in parts; return whether more come. Under its link's lock."""
        assert self.parts is not None
        assert self.is_last is not None
        self.parts.append(frames)
        self.has_ended = True
        try:
            self.is_over = self.is_last(frames)
        except Exception:  # noqa: BLE001 (its caller decodes it, and gets the error)
            self.is_over = True
        if not self.is_over and len(self.parts) > MOST_PARTS:
            self.error = QueueFull(f"{MOST_PARTS} parts of this answer wait to be taken; take them sooner, or ask less")
            return False
        return not self.is_over

    def leave(self) -> None:
        """Note that its caller takes no more parts. Under its link's lock."""
        self.is_over, self.has_ended = True, True
        self.error = self.error or Cancelled("the stream was closed")

    def complete(self) -> None:
        """Give a concurrent future the result or the error; its callbacks run here."""
        future = self.future
        if not future.set_running_or_notify_cancel():
            return
        if self.error is not None:
            future.set_exception(self.error)
            return
        try:
            result = self.decode(self.frames)
        except Exception as error:  # noqa: BLE001 (whatever it is, it belongs to the future)
            future.set_exception(error)
        else:
            future.set_result(result)


class InFlight:
    """Calls by number. most: how many may be in flight. looks: after the first, before a reply counts as missing.

    first_number: where the numbers begin, by which replies are known. Invariant: a call that was taken out is ended by
    who took it, and by no other.
    """

    def __init__(self, most: int, *, looks: int = LOOKS, first_number: int = 1) -> None:
        self.most = most
        self.calls: dict[bytes, Call] = {}
        self.look_s = NEVER_S
        """No call is overdue before this, and no look before it counts."""
        self._numbers = count(first_number)
        self._earliest_s = NEVER_S  # no deadline is before this
        self._looks = SecondLooks(looks)

    @property
    def is_full(self) -> bool:
        """Whether a further call has to wait."""
        return len(self.calls) >= self.most

    def number(self, call: Call) -> bytes:
        """Give a call the number under which it is sent."""
        call.number = next(self._numbers).to_bytes(8, "little")
        return call.number

    def add(self, call: Call, deadline_s: float) -> None:
        """Count a numbered call as in flight. deadline_s: NEVER_S for a caller that looks at the clock itself."""
        call.deadline_s = deadline_s
        self.calls[call.number] = call
        if deadline_s < self._earliest_s:
            self._earliest_s = deadline_s
            self.look_s = max(deadline_s, self._looks.due_s)

    def take(self, number: bytes) -> Call | None:
        """Take out the call that a reply answers; None for one that was given up, or answered before."""
        return self.calls.pop(number, None)

    def put_back(self, call: Call, now_s: float) -> None:
        """Have a call of which a part came wait for the next: until its deadline, or as long again without one."""
        self.calls[call.number] = call
        if call.timeout_ms is None and call.deadline_s != NEVER_S:
            call.deadline_s = now_s + call.wait_s

    def take_all(self) -> list[Call]:
        """Take out every call."""
        calls = list(self.calls.values())
        self.calls.clear()
        return calls

    def take_missed(self, now_s: float) -> list[tuple[Call, float]]:
        """Take out the calls whose replies are missing, each with the seconds by which it was looked for late.

        Call after a look that took every reply there was, at `look_s` or later.
        """
        if now_s < self.look_s:
            return []
        missed_s = self._looks.judge(now_s, self._earliest_deadline_s())
        found: list[tuple[Call, float]] = []
        if missed_s is not None:
            overdue = [call for call in self.calls.values() if call.deadline_s <= missed_s]
            found = [(self.calls.pop(call.number), missed_s - call.deadline_s) for call in overdue]
            self._looks.judge(now_s, self._earliest_deadline_s())  # what became overdue during the looks gets its own
        self.look_s = max(self._earliest_s, self._looks.due_s)
        return found

    def _earliest_deadline_s(self) -> float:
        self._earliest_s = min((call.deadline_s for call in self.calls.values()), default=NEVER_S)
        return self._earliest_s


class SecondLooks:
    """Decides up to which deadline replies are missing. One round at a time: a first look, then further ones."""

    def __init__(self, looks: int = LOOKS) -> None:
        self.due_s = ALWAYS_S
        """No look before this one counts."""
        self._looks = looks
        self._first_s = ALWAYS_S
        self._left = 0

    def judge(self, now_s: float, earliest_s: float) -> float | None:
        """The time up to which deadlines are missed for good; None: look again at `due_s`.

        Call after a look that took every reply there was; earliest_s: the earliest deadline still without one. What
        became overdue after the round's first look is left to the next round.
        """
        if now_s < earliest_s:
            self._end()
            return None
        if not self._left:
            self._first_s, self._left = now_s, self._looks
        elif now_s >= self.due_s:
            self._left -= 1
            if not self._left:
                self._end()
                return self._first_s
        else:
            return None
        self.due_s = now_s + LOOK_S
        return None

    def _end(self) -> None:
        self._left = 0
        self.due_s = ALWAYS_S


class Gate(Protocol):
    """A lock or semaphore that another thread opens."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Wait as threading.Lock does."""
        ...


def acquire(gate: Gate, limit_s: float) -> bool:
    """Wait for what another thread opens, then look LOOKS times more: it may have been held up as this one was.

    Returns whether it opened. limit_s: cut to what a thread can wait; below 0 it is 0.
    """
    is_open = gate.acquire(timeout=min(max(limit_s, 0.0), threading.TIMEOUT_MAX))
    return is_open or any(gate.acquire(timeout=LOOK_S) for _ in range(LOOKS))


class NotBack(ConnectionRefusedError):
    """Nothing was sent: the daemon stopped, and none listens yet. `retry=True` outlasts no other ConnectionError."""


def no_reply(endpoint: str, waited_s: float, late_s: float = 0.0) -> TimeoutError:
    """The error of a call whose reply is missing. late_s: how late its own process first looked."""
    told = f"no reply from {endpoint} within {waited_s:.3f} s; the daemon is stuck, overloaded or gone: see "
    held_up = f" (this process was held up, too: it looked {late_s:.2f} s late; is it short of CPU?)"
    return TimeoutError(f"{told}`edge-runtime status`{held_up if late_s > HELD_UP_S else ''}")


def all_in_flight(most: int, waited_s: float) -> TimeoutError:
    """The error of a call that got no slot in time."""
    return TimeoutError(
        f"{most} requests were in flight for {waited_s:.3f} s, as many as this client may have; raise max_in_flight, "
        "or ask less often"
    )


def all_in_flight_in_callback(most: int) -> str:
    """The message for a call from a future's callback, which cannot wait for a slot."""
    return (
        f"{most} requests are in flight, as many as this client may have, and a future's callback cannot wait for one "
        "of them; submit from another thread or raise max_in_flight"
    )


def without_parts(call: Call) -> bool:
    """Whether a caller must wait for the next part of an answer: none is there, and nothing ended it."""
    return not call.parts and call.error is None


def inside_own_call() -> RuntimeError:
    """The error of a call in the middle of another one of its thread, which holds the link's lock."""
    return RuntimeError(
        "a signal's handler or a finalizer called this client in the middle of the same thread's call, which "
        "cannot go on before it; let it note what to do, or use a client of its own"
    )


def no_control_endpoint(name: str) -> ConfigError:
    """The error of an operation that no endpoint of this client answers."""
    return ConfigError(f"{name} needs the control endpoint, which a tcp endpoint does not tell; give control=")


def closed() -> ConnectionError:
    """The error of a call that comes after `close`."""
    return ConnectionError("the client is closed; make a new one")


def closed_before_answer() -> ConnectionError:
    """The error of a call that `close` ended."""
    return ConnectionError("closed before an answer was there")
