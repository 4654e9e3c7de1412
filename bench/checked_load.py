"""Asks for answers without a pause, on several connections, and looks at each of them: right, wrong, failed or lost.

    python -m bench.checked_load '{"endpoint": "ipc://…", "model": "adder"}'

What it asks adds its version's number to zeros (tests/models/onnx_models), so that an answer tells whether it belongs
to the version that its header names. A process of its own, one thread, closed loops: each line on its input begins a
phase of that name, the end of its input ends it, and what each phase saw is one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Any

import zmq

from bench.servers import REPOSITORY, BenchError
from edge_runtime.messages import RequestHeader, TensorHeader
from edge_runtime.wire.codec import pack_request, unpack_reply

COLUMNS = 2
ROW = bytes(4 * COLUMNS)
DRAIN_S = 10.0
POLL_MS = 100


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """What to ask. in_flight: of each connection."""

    endpoint: str
    model: str
    connections: int = 4
    in_flight: int = 4


@dataclass(slots=True)
class PhaseCount:
    """What became of the requests of one phase.

    answers: right ones, by version. wrong: not what the version in the header would answer. failed: by error code.
    lost: neither answered nor refused when the drain ended. stray: answers to nothing, or the second to something.
    """

    answers: dict[int, int] = field(default_factory=dict)
    wrong: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    lost: int = 0
    stray: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    longest_ms: float = 0.0

    @property
    def unanswered(self) -> int:
        """Requests that did not get the one right answer."""
        return self.wrong + sum(self.failed.values()) + self.lost + self.stray


class CheckedLoad:
    """The process, from the bench's side. `phase` as often as wanted, then `end`."""

    def __init__(self, run: CheckedRun) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(asdict(run))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            text=True,
        )

    def __enter__(self) -> CheckedLoad:  # noqa: PYI034 (typing.Self needs 3.11)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def phase(self, name: str) -> None:
        """What is asked from now on belongs to another phase; the first begins the load."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()

    def end(self) -> Mapping[str, PhaseCount]:
        """Ask nothing more, wait for what is under way, and tell what each phase saw. Raises BenchError."""
        said, _ = self._process.communicate(timeout=DRAIN_S + 20.0)
        if self._process.returncode:
            raise BenchError(f"the load ended with {self._process.returncode}")
        return {name: _seen(words) for name, words in json.loads(said).items()}


def main(arguments: list[str]) -> None:
    """Ask until standard input ends."""
    print(json.dumps({name: asdict(seen) for name, seen in _Loops(CheckedRun(**json.loads(arguments[0]))).run()}))


# ---- private --------------------------------------------------------------------------------------------------------


class _Phase:
    """One phase while it lasts."""

    def __init__(self) -> None:
        self.seen = PhaseCount()
        self.answers: Counter[int] = Counter()
        self.failed: Counter[str] = Counter()
        self.times_ms = array("f")

    def ended(self) -> PhaseCount:
        ordered = sorted(self.times_ms)
        if ordered:
            self.seen.p50_ms, self.seen.p99_ms = (ordered[int(q * len(ordered))] for q in (0.5, 0.99))
            self.seen.longest_ms = ordered[-1]
        self.seen.answers, self.seen.failed = dict(self.answers), dict(self.failed)
        return self.seen


class _Loops:
    """The connections, each with as many requests under way as it may have."""

    def __init__(self, run: CheckedRun) -> None:
        self._run = run
        self._header = pack_request(RequestHeader(model=run.model, inputs=(TensorHeader("x", "FP32", (1, COLUMNS)),)))
        self._phases: dict[str, _Phase] = {}
        self._phase: _Phase | None = None
        self._under_way: dict[bytes, tuple[float, _Phase]] = {}
        self._count = 0

    def run(self) -> list[tuple[str, PhaseCount]]:
        """Ask, phase by phase; what each of them saw."""
        poller = zmq.Poller()
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        sockets = [self._connect(poller) for _ in range(self._run.connections)]
        until_s = float("inf")
        while time.perf_counter() < until_s and (self._under_way or until_s == float("inf")):
            for ready, _ in poller.poll(POLL_MS):
                if isinstance(ready, zmq.Socket):
                    self._receive(ready)
                elif (words := os.read(ready, 4096)) == b"":
                    poller.unregister(ready)
                    self._phase, until_s = None, time.perf_counter() + DRAIN_S
                else:
                    self._begin(words.decode().split()[-1], sockets)
        for _, phase in self._under_way.values():
            phase.seen.lost += 1
        return [(name, phase.ended()) for name, phase in self._phases.items()]

    def _connect(self, poller: zmq.Poller) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.connect(self._run.endpoint)
        poller.register(socket, zmq.POLLIN)
        return socket

    def _begin(self, name: str, sockets: list[zmq.Socket[bytes]]) -> None:
        is_first = self._phase is None
        self._phase = self._phases.setdefault(name, _Phase())
        if is_first:
            for socket in sockets:
                for _ in range(self._run.in_flight):
                    self._ask(socket)

    def _ask(self, socket: zmq.Socket[bytes]) -> None:
        if self._phase is None:
            return
        self._count += 1
        name = self._count.to_bytes(8, "little")
        self._under_way[name] = (time.perf_counter(), self._phase)
        socket.send_multipart([self._header, name, ROW], copy=True)

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        while socket.get(zmq.EVENTS) & zmq.POLLIN:
            header, name, *tensors = socket.recv_multipart()
            began_s, phase = self._under_way.pop(name, (0.0, None))
            if phase is None:
                if self._phase is not None:
                    self._phase.seen.stray += 1
                continue
            phase.times_ms.append((time.perf_counter() - began_s) * 1e3)
            version, code = _told(header)
            if code:
                phase.failed[code] += 1
            elif tensors == [_row(version)]:
                phase.answers[version] += 1
            else:
                phase.seen.wrong += 1
            self._ask(socket)


@lru_cache
def _told(header: bytes) -> tuple[int, str]:
    """The version that answered, or the code of what went wrong."""
    reply = unpack_reply(header)
    return (0, str(reply.error.get("code"))) if reply.error is not None else (int(reply.version or 0), "")


@lru_cache
def _row(version: int) -> bytes:
    return array("f", [float(version)] * COLUMNS).tobytes()


def _seen(words: Mapping[str, Any]) -> PhaseCount:
    return PhaseCount(**{**words, "answers": {int(version): count for version, count in words["answers"].items()}})


if __name__ == "__main__":
    main(sys.argv[1:])
