"""A lean load generator in its own process: sends the same frames again and again, or some by turns, over one DEALER.

Owns: the loop behind `edge-runtime bench`. Frames are packed beforehand; replies are distinguished by their header
bytes and not decoded. Closed loop: keeps a number of requests in flight. Open loop: Poisson arrivals at a rate, and
latency counts from the moment a request was due, so that a stalling daemon cannot hide it (coordinated omission). The
time that a request or its answer lay in the generator itself is measured apart: that backlog is not the daemon's.

`measure` runs it as a child; the child reads a plan and the request's frames on stdin and writes one line of JSON.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import zmq
from zmq.backend import Socket as RawSocket
from zmq.backend import zmq_poll

from edge_runtime.clock import Clock, SystemClock
from edge_runtime.doors.zmq.channel import CONNECT_LIMIT_S, Channel, CurveKeys
from edge_runtime.errors import RunFailed
from edge_runtime.wire.codec import unpack_reply

NOBLOCK = int(zmq.DONTWAIT)
MORE = int(zmq.SNDMORE)
POLLIN = int(zmq.POLLIN)

DRAIN_S = 2.0
"""Wait for replies beyond the request's own timeout after the last one was sent; then a request counts as lost."""

SLOW_RATE = 5000.0
"""Below this many requests a second an open loop sleeps up to 1 ms: busy polling takes most of a core from the daemon
on a small device and falsifies the measurement."""


BLOCKED_S = 1e-5
"""A poll that takes longer has waited for the reply that it ends with; a shorter one found it there: 1.4 µs in the
median and 4 µs at p99, on a shared virtual machine."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One measurement to make. rate: Poisson arrivals a second; None: closed loop with `in_flight` requests.

    requests: how many the frames are, each with as many frames, which are sent by turns.
    """

    endpoint: str
    in_flight: int = 1
    rate: float | None = None
    seconds: float = 5.0
    warmup_s: float = 0.5
    timeout_s: float = 30.0
    seed: int = 0
    curve: dict[str, str] | None = None
    requests: int = 1


@dataclass(slots=True)
class Measured:
    """One result, without warm-up. busy: CPU time per wall time of the generator.

    answered: answers that came in its time. latencies_s: of what was due in its time and answered, sorted. own_s: parts
    of them, sorted: sent later than due, and at most so long unread.
    """

    seconds: float = 0.0
    sent: int = 0
    answered: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    busy: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    own_s: list[float] = field(default_factory=list)


def measure(plan: Plan, frames: Sequence[bytes]) -> Measured:
    """Run a plan in a child process. frames: header and tensors, of each request. Raises ConnectionError, RunFailed."""
    lengths = [len(frame) for frame in frames]
    head = json.dumps({"plan": asdict(plan), "lengths": lengths}).encode() + b"\n"
    child = subprocess.Popen(
        [sys.executable, "-m", "edge_runtime.doors.zmq.load_generator"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, err = child.communicate(head + b"".join(frames))
    except BaseException:
        child.kill()
        child.wait()
        raise
    if child.returncode != 0:
        raise RunFailed(f"the load generator failed with status {child.returncode}: {err.decode(errors='replace')}")
    fields = json.loads(out)
    if "error" in fields:
        raise ConnectionError(fields["error"])
    return Measured(**fields)


def quantile(values: Sequence[float], q: float) -> float | None:
    """Return the smallest value that a share `q` of the values does not exceed (nearest rank); None without values."""
    if not values:
        return None
    return sorted(values)[max(math.ceil(q * len(values)) - 1, 0)]


class Generator:
    """One run of a plan over an open socket. Single-threaded."""

    def __init__(self, socket: Any, plan: Plan, frames: Sequence[bytes], clock: Clock | None = None) -> None:
        """clock: of sending and of latencies."""
        self._socket = socket
        self._now_s = (clock or SystemClock()).monotonic_s
        self._plan = plan
        count = len(frames) // plan.requests
        self._requests = [(frames[at], frames[at + 1 : at + count]) for at in range(0, len(frames), count)]
        self._sent_s: dict[bytes, tuple[float, float]] = {}
        """When a request was due, and how much later it was sent."""
        self._unread_since_s = 0.0
        """A reply that is there came no earlier: the socket was empty then."""
        self._number = 0
        self._frames_after: dict[bytes, tuple[int, str]] = {}
        self._counts_from_s = 0.0
        self._ends_s = 0.0
        self.measured = Measured()

    def run(self) -> Measured:
        """Send for the plan's time, then wait for the replies in flight."""
        began_s, began_cpu_s = self._now_s(), time.process_time()
        self._counts_from_s = began_s + self._plan.warmup_s
        self._ends_s = self._counts_from_s + self._plan.seconds
        self._unread_since_s = began_s
        if self._plan.rate is None:
            self._closed_loop()
        else:
            self._open_loop(self._plan.rate)
        cpu_s = time.process_time() - began_cpu_s
        wall_s = self._now_s() - began_s
        # What was sent late has its whole time too: else the generator's own backlog would count as lost.
        self._drain(max(self._ends_s, self._now_s()) + self._plan.timeout_s + DRAIN_S)
        measured = self.measured
        measured.seconds = self._plan.seconds
        measured.lost = sum(due_s >= self._counts_from_s for due_s, _ in self._sent_s.values())
        measured.busy = round(cpu_s / wall_s, 3)
        measured.latencies_s.sort()
        measured.own_s.sort()
        return measured

    def _closed_loop(self) -> None:
        now = self._now_s
        for _ in range(self._plan.in_flight):
            self._send(now(), 0.0)
        while (now_s := now()) < self._ends_s:
            self._poll(20)
            for _ in range(self._take(self._plan.in_flight)):
                now_s = now()
                if now_s < self._ends_s:
                    self._send(now_s, 0.0)

    def _open_loop(self, rate: float) -> None:
        now, ends_s = self._now_s, self._ends_s
        due = random.Random(self._plan.seed)  # noqa: S311 (arrivals, not secrets)
        step_ms = 1 if rate < SLOW_RATE else 0
        due_s = now() + due.expovariate(rate)
        while True:
            now_s = now()
            # Send also the requests that became due while this process was stalled past the end.
            while due_s <= now_s and due_s < ends_s:
                self._send(due_s, now() - due_s)
                due_s += due.expovariate(rate)
            if now_s >= ends_s:
                return
            self._poll(min(step_ms, max(int((due_s - now()) * 1e3), 0)) if step_ms else 0)
            self._take(256)

    def _drain(self, end_s: float) -> None:
        while self._sent_s and self._now_s() < end_s:
            self._poll(20)
            self._take(1 << 20)

    def _poll(self, timeout_ms: int) -> None:
        now = self._now_s
        began_s = now()
        zmq_poll([(self._socket, POLLIN)], timeout_ms)
        if (ended_s := now()) - began_s > BLOCKED_S:
            self._unread_since_s = ended_s

    def _send(self, due_s: float, late_s: float) -> None:
        send, socket = RawSocket.send, self._socket
        header, tensors = self._requests[self._number % len(self._requests)]
        self._number += 1
        request_id = self._number.to_bytes(8, "little")
        send(socket, header, MORE)
        send(socket, request_id, MORE if tensors else 0)
        for frame in tensors[:-1]:
            send(socket, frame, MORE)
        if tensors:
            send(socket, tensors[-1], 0)
        self._sent_s[request_id] = (due_s, late_s)
        if due_s >= self._counts_from_s:
            self.measured.sent += 1

    def _take(self, bound: int) -> int:
        """Take up to `bound` replies; return their number."""
        receive, socket, sent_s = RawSocket.recv, self._socket, self._sent_s
        measured, counts_from_s, ends_s = self.measured, self._counts_from_s, self._ends_s
        now = self._now_s
        taken = 0
        try:
            while taken < bound:
                header = receive(socket, NOBLOCK)
                request_id = receive(socket, NOBLOCK)
                known = self._frames_after.get(header)
                if known is None:
                    known = self._learn(header)
                after, code = known
                for _ in range(after):
                    receive(socket, NOBLOCK)
                taken += 1
                due_s, late_s = sent_s.pop(request_id, (0.0, 0.0))
                now_s = now()
                # Those sent before, too: a rate is of what was answered in this time, however long it was under way.
                measured.answered += not code and counts_from_s <= now_s <= ends_s
                if due_s < counts_from_s:
                    continue
                if code:
                    measured.refused[code] = measured.refused.get(code, 0) + 1
                    continue
                measured.latencies_s.append(now_s - due_s)
                measured.own_s.append(late_s + max(now_s - max(self._unread_since_s, due_s + late_s), 0.0))
        except zmq.Again:
            self._unread_since_s = now()
        return taken

    def _learn(self, header: bytes) -> tuple[int, str]:
        """Return the number of frames after this header and its id, and the code of an error."""
        reply = unpack_reply(header)
        found = (0, str(reply.error.get("code", "internal"))) if reply.error else (len(reply.outputs), "")
        if len(self._frames_after) > 4096:  # refusals carry forecasts, so their headers all differ
            self._frames_after.clear()
        self._frames_after[header] = found
        return found


def measure_here(plan: Plan, frames: Sequence[bytes]) -> Measured:
    """Run a plan in this process, which must do nothing else meanwhile. Raises ConnectionError."""
    channel = Channel(plan.endpoint, CurveKeys(**plan.curve) if plan.curve else None)
    if (missing := channel.missing()) is not None:
        raise missing
    channel.open(comes_back=True)
    try:
        if not channel.wait_connected(CONNECT_LIMIT_S):
            raise channel.no_handshake()
        return Generator(channel.socket, plan, frames).run()
    finally:
        channel.close()


def main() -> int:
    """Run the child: read a plan and frames on stdin, write one line of JSON on stdout."""
    stdin = sys.stdin.buffer
    head = json.loads(stdin.readline())
    plan = Plan(**head["plan"])
    frames = [stdin.read(length) for length in head["lengths"]]
    try:
        said = asdict(measure_here(plan, frames))
    except ConnectionError as error:
        said = {"error": str(error)}
    sys.stdout.write(json.dumps(said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
