"""The live sequences of one servable: which there are, which slot of the host's memory each has, and what was lost.

Owns: when a sequence begins, continues, ends and is lost. A request that was refused, or whose answer came too late,
counts as if it had not come; one whose run failed leaves the state as it was. States themselves are the host's
(states.py), which learns from the row of each request whose state it continues, and after how many steps.

Lock order: the dispatcher's, then this table's. Thread: any.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from edge_runtime.clock import Clock
from edge_runtime.errors import QueueFull, SequenceLost, TensorMismatch
from edge_runtime.kept_state import END, MAX_TEXT_BYTES, START, no_sequence, row_type
from edge_runtime.model_spec import KeptSequences
from edge_runtime.request.queue import LineEnd
from edge_runtime.request.request import Request

CHECKED = "the daemon's own check"


class StateHost(Protocol):
    """Where states are kept."""

    @property
    def lives(self) -> int:
        """How many hosts ended so far, each with all states."""
        ...


class LiveSequences:
    """The sequences of one servable and its forms."""

    def __init__(self, model: str, kept: KeptSequences, idle_s: float, host: StateHost, clock: Clock) -> None:
        self.model = model
        self.host = host
        self.lock = threading.Lock()
        self._kept = kept
        self._idle_s = idle_s
        self._clock = clock
        self._live: dict[int | str, LiveSequence] = {}
        self._free = list(range(kept.slots - 1, -1, -1))
        self._serial = 0
        self.on_over: Callable[[], None] = _nothing

    def __len__(self) -> int:
        return len(self._live)

    def enter(self, request: Request) -> None:
        """Give a request its line and its sequence's row.

        Raises TensorMismatch: it names no sequence; SequenceLost: one that is not live; QueueFull: it is the start of
        one more than there may be.
        """
        if request.origin.is_check:  # with the state of none, so it takes no client's room; it runs with no other
            request.inputs, request.shape = [*request.inputs, no_sequence()], (CHECKED, request.shape)
            return
        step = request.sequence
        if step is None or not step.id:
            raise TensorMismatch(
                f"inference request to model '{self.model}' must specify a non-zero or non-empty correlation ID"
            )
        if request.rows != 1:
            raise TensorMismatch(
                f"inference request to model '{self.model}' must specify batch-size 1 due to requirements of sequence "
                f"batcher; got {request.rows} rows"
            )
        if isinstance(step.id, str) and not self._kept.takes_text:
            raise TensorMismatch(
                f"sequence_id: got text, but model '{self.model}' takes the id as a number; wanted 1 to 2^64 - 1"
            )
        now_s = self._clock.monotonic_s()
        with self.lock:
            live = self._live.get(step.id)
            if live is not None and self._is_lost(live, now_s):
                self.end(live)
                live = None
            if step.start:
                live = self._begin(step.id, live, now_s)
            elif live is None:
                raise self.lost(step.id)
            live.used_s = now_s
            live.pending += 1
        request.line = live
        request.inputs = [*request.inputs, live.row]

    def leave(self, request: Request) -> None:
        """Take back what `enter` did."""
        if request.line is not None:
            request.line.leave(request, LineEnd.REFUSED)

    def has(self, sequence: int | str) -> bool:
        """Whether a sequence is live here."""
        return sequence in self._live

    def is_over(self) -> bool:
        """Whether every sequence has ended, or is idle for too long."""
        with self.lock:
            self._sweep()
            return not self._live

    # ---- for LiveSequence, under the lock ----------------------------------------------------------------------------

    def lost(self, sequence: int | str) -> SequenceLost:
        """Return the error of a request that continues what is not there, in Triton's words."""
        return SequenceLost(
            f"inference request for sequence {sequence} to model '{self.model}' must specify the START flag on the "
            "first request of the sequence"
        )

    def end(self, live: LiveSequence) -> None:
        """Forget a sequence; its slot is free once no request of it is left."""
        live.is_over = True
        before, live.before = live.before, None
        if self._live.get(live.id) is live:
            # A start that was refused is as if it had not come: the sequence that it would have replaced goes on.
            if before is not None and not before.is_over:
                self._live[live.id] = before
            else:
                del self._live[live.id]
        self.free(live)
        if not self._live:
            self.on_over()

    def free(self, live: LiveSequence) -> None:
        """Give a slot back that no run can use any more."""
        if live.is_over and not live.pending and live.slot >= 0:
            self._free.append(live.slot)
            live.slot = -1

    # ---- private -----------------------------------------------------------------------------------------------------

    def _is_lost(self, live: LiveSequence, now_s: float) -> bool:
        return not live.pending and (live.is_gone or now_s - live.used_s > self._idle_s)

    def _begin(self, sequence: int | str, before: LiveSequence | None, now_s: float) -> LiveSequence:
        """Make a live sequence. before: of the same id, which ends when this one has begun. Raises QueueFull."""
        if not self._free:
            self._sweep()
        if not self._free:
            idle_s = min((each.used_s for each in self._live.values() if not each.pending), default=math.inf)
            after_s = idle_s + self._idle_s - now_s
            raise QueueFull(
                f"model {self.model} keeps {self._kept.slots} sequences, and as many are live: end one, or start this "
                "one later (max_sequences in [sequence])",
                retry_after_ms=None if after_s == math.inf else max(after_s, 0.0) * 1e3,
            )
        self._serial += 1
        live = self._live[sequence] = LiveSequence(self, sequence, self._free.pop(), self._serial, before)
        return live

    def _sweep(self) -> None:
        """End the sequences that are lost without anybody asking."""
        now_s = self._clock.monotonic_s()
        for live in [each for each in self._live.values() if self._is_lost(each, now_s)]:
            self.end(live)


class LiveSequence:
    """One sequence, from its start to its end: the `Line` of its requests.

    steps: requests of it that counted. row: what its runs get, as `kept_state.row_type`. pending: requests of it that
    have not ended. is_begun: its start has run. before: one of the same id, which its start replaces.
    """

    __slots__ = (
        "_fields", "_lives", "_table", "_waiting", "before", "id", "is_begun", "is_over", "pending", "row", "slot",
        "steps", "used_s",
    )  # fmt: skip

    def __init__(
        self, table: LiveSequences, sequence: int | str, slot: int, serial: int, before: LiveSequence | None
    ) -> None:
        self.id = sequence
        self.slot = slot
        self.steps = 0
        self.pending = 0
        self.used_s = 0.0
        self.is_begun = self.is_over = False
        self.before = before
        self.row = no_sequence()
        self._table = table
        self._lives = table.host.lives
        # Of one id all requests run one after another, also those of the sequence before.
        self._waiting: deque[Request] = before._waiting if before is not None else deque()  # noqa: SLF001
        self._fields = self.row.view(row_type())[0]
        self._fields["serial"], self._fields["slot"] = serial, slot
        if isinstance(sequence, str):
            data = sequence.encode("utf-8", "surrogatepass")[:MAX_TEXT_BYTES]
            self._fields["is_text"], self._fields["length"], self._fields["text"] = 1, len(data), data
        else:
            self._fields["number"] = sequence

    @property
    def is_gone(self) -> bool:
        """Whether its state died with its host."""
        return self.steps > 0 and self._lives != self._table.host.lives

    @property
    def first(self) -> Request | None:
        """The request whose turn it is."""
        return self._waiting[0] if self._waiting else None

    def join(self, request: Request) -> None:
        """Put a request behind all others; one whose turn it is, and that begins or runs again, is there."""
        if self.first is not request:
            self._waiting.append(request)

    def why_not(self, request: Request) -> SequenceLost | None:
        """Return why a request cannot run: its sequence is over, or its state is gone."""
        del request
        return self._table.lost(self.id) if self.is_over or self.is_gone else None

    def begin(self, request: Request) -> None:
        """Write into the row what this run is told."""
        step = request.sequence
        assert step is not None
        if not self.steps:
            self._lives = self._table.host.lives
        self._fields["flags"] = START * step.start | END * step.end
        self._fields["steps"] = self.steps

    def leave(self, request: Request, end: LineEnd) -> None:
        """Take a request out, and move the sequence on."""
        table, waiting = self._table, self._waiting
        with table.lock:
            if waiting and waiting[0] is request:
                waiting.popleft()
            elif request in waiting:
                waiting.remove(request)
            if request.line is self:
                request.line = None
            else:
                return  # it left before
            self.pending -= 1
            self._move_on(request, end)
            table.free(self)

    def _move_on(self, request: Request, end: LineEnd) -> None:
        step = request.sequence
        assert step is not None
        has_run = end in (LineEnd.COUNTED, LineEnd.FAILED)
        if has_run and not self.is_begun:
            self.is_begun = True
            before, self.before = self.before, None
            if before is not None:
                self._table.end(before)
        if end is LineEnd.COUNTED:
            self.steps += 1
        is_unbegun = step.start and not self.is_begun
        if end is LineEnd.LOST or is_unbegun or (has_run and step.end):
            self._table.end(self)


def _nothing() -> None:
    """Do nothing, in place of `on_over`, while its version is not about to leave."""
