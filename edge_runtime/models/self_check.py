"""Checks that models still answer: asks one after another, by a request of the daemon's own, and expects a reply.

Owns: which model is asked next, and how long is too long. Never waits. The I/O loop calls it before it feeds systemd's
watchdog.
A question goes through an endpoint of the same loop as a client's request, soon with a known header, so it meets what
a client would meet: a model that hangs, or a burst that is never answered. Its endpoint is its own, which tells it
from a client's (`Origin`).
A model that hangs in its library never answers again, and only a new process helps; one that is slow, overloaded or
failing is alive, and so is one with a run left that does not hang.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import Struct

from edge_runtime.clock import Clock
from edge_runtime.config.settings import LOWEST_PRIORITY
from edge_runtime.errors import QueueFull
from edge_runtime.messages import RequestHeader, TensorHeader
from edge_runtime.models.model_table import ModelTable
from edge_runtime.models.servable import Servable
from edge_runtime.models.warmup import zero_inputs
from edge_runtime.tensors import array_to_wire, datatype_name
from edge_runtime.wire.codec import pack_request, unpack_reply

log = logging.getLogger(__name__)

PATIENCE_INTERVALS = 6.0
"""Watchdog intervals that a model may go without finishing a run: a hang is for ever, so there is time to be sure."""

PATIENCE_RUNS = 20.0
"""Mean runs of the slowest model to wait beyond that: it may hold every core."""

NO_TIMEOUT_MS = 1e12
"""The model's default timeout would refuse the question of a model that hangs, and so hide the hang."""

IDLE_SHARE = 0.02
"""Most of its time that a model without traffic spends on answering its own daemon."""


class CheckedDoor(Protocol):
    """A client of an endpoint of this daemon."""

    def send(self, frames: Sequence[Any]) -> bool:
        """Send one message; False when the endpoint takes none now."""
        ...

    def receive(self) -> list[bytes] | None:
        """The next reply, None when none is there."""
        ...


class _Question(Struct, eq=False):
    """One model that is asked. runs: finished by then. is_put: the request was sent. is_over: its reply came."""

    servable: Servable
    began_s: float
    runs: int
    id: bytes
    is_put: bool = False
    is_over: bool = False


class SelfCheck:
    """Asks the models in turn. Thread: that of the I/O loop."""

    def __init__(self, table: ModelTable, clock: Clock, interval_s: float, door: CheckedDoor) -> None:
        """interval_s: the watchdog's."""
        self._table = table
        self._clock = clock
        self._interval_s = interval_s
        self._door = door
        self._asked = 0
        self._question: _Question | None = None
        self._next_s = -math.inf
        self._runs_at_turn: dict[tuple[str, int], int] = {}

    def is_alive(self) -> bool:
        """False when the model whose turn it is has neither answered nor finished a run for too long; asks where due.

        True where no model can be asked.
        """
        now_s = self._clock.monotonic_s()
        if self._question is None and now_s >= self._next_s:
            self._begin(now_s)
        question = self._question
        if question is None:
            return True
        if not question.is_put:
            self._put(question)
        self._take_replies()
        if self._has_ended(question):
            self._end(question, now_s)
            return True
        waited_s = now_s - question.began_s
        if waited_s <= self._patience_s():
            return True
        log.critical(
            "a model does not answer and never will; the service manager must restart this daemon",
            extra={"model": question.servable.model, "version": question.servable.number, "waited_s": waited_s},
        )
        return False

    # ---- private ----------------------------------------------------------------------------------------------------

    def _begin(self, now_s: float) -> None:
        """Choose the model asked longest ago that has finished no run since."""
        live = {(each.model, each.number): each for each in self._table.live() if each.warm_length is not None}
        turns = {key: runs for key, runs in self._runs_at_turn.items() if key in live}
        self._runs_at_turn = turns
        for key in [*(key for key in live if key not in turns), *turns]:
            runs = live[key].metrics.runs
            before = turns.pop(key, runs)
            turns[key] = runs
            if before == runs:
                self._asked += 1
                self._question = _Question(live[key], now_s, runs, b"%d" % self._asked)
                return
        self._next_s = now_s + self._interval_s

    def _put(self, question: _Question) -> None:
        """Send a question: always in the same bytes, so that its header becomes a known one."""
        servable = question.servable
        assert servable.warm_length is not None
        inputs = zero_inputs(servable.spec, servable.warm_length, servable.settings.warmup.shapes)
        header = RequestHeader(
            model=servable.model,
            version=servable.number,
            inputs=tuple(TensorHeader(name, datatype_name(each.dtype), each.shape) for name, each in inputs.items()),
            outputs=tuple(spec.name for spec in servable.spec.outputs[:1]),
            timeout_ms=NO_TIMEOUT_MS,
            priority=LOWEST_PRIORITY,
        )
        frames = [pack_request(header), question.id, *(array_to_wire(each) for each in inputs.values())]
        question.is_put = self._door.send(frames)

    def _take_replies(self) -> None:
        """Any reply is a sign of life, but for a full queue: the model is asked again, and its runs count meanwhile."""
        while (reply := self._door.receive()) is not None:
            question = self._question
            if question is None or len(reply) < 2 or reply[1] != question.id:
                continue  # to one that has ended
            error = unpack_reply(reply[0]).error
            if error is not None and error["code"] == QueueFull.code:
                question.is_put = False
            else:
                question.is_over = True

    def _has_ended(self, question: _Question) -> bool:
        servable = question.servable
        is_gone = self._table.find(servable.model, servable.number) is not servable
        return question.is_over or is_gone or servable.metrics.runs != question.runs

    def _end(self, question: _Question, now_s: float) -> None:
        servable = question.servable
        self._question = None
        self._next_s = now_s + max(self._interval_s, _mean_run_s(servable) / IDLE_SHARE)
        self._runs_at_turn[servable.model, servable.number] = servable.metrics.runs

    def _patience_s(self) -> float:
        slowest_s = max(map(_mean_run_s, self._table.live()), default=0.0)
        return PATIENCE_INTERVALS * self._interval_s + PATIENCE_RUNS * slowest_s


def _mean_run_s(servable: Servable) -> float:
    metrics = servable.metrics
    return metrics.run_s / metrics.runs if metrics.runs else 0.0
