"""Whether models still answer: one after another is asked, by a request of the daemon's own, and must come back.

Owns: whose turn it is and how long is too long. Never waits. Called by the I/O loop before it feeds systemd's watchdog.
A model that hangs in its library answers nobody ever again, and only a new process helps; one that is slow, overloaded
or fails is alive, and so is one that has a run left which does not hang.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from edge_runtime.clock import Clock
from edge_runtime.errors import EdgeRuntimeError, QueueFull
from edge_runtime.scheduling.queue import Outcome, Pending
from edge_runtime.serving.self_inference import new_request
from edge_runtime.serving.servable import Servable
from edge_runtime.serving.servables import Servables
from edge_runtime.serving.warmup import zero_inputs

log = logging.getLogger(__name__)

PATIENCE_INTERVALS = 6.0
"""Watchdog intervals that a model may go without finishing a run: a hang is for ever, so there is time to be sure."""

PATIENCE_RUNS = 20.0
"""And so many mean runs of the slowest model beyond that, which may hold every core."""

IDLE_SHARE = 0.02
"""Most of the time that a model without traffic spends on answering its own daemon."""


@dataclass(slots=True, eq=False)
class _Question:
    """A model whose turn it is. runs: what it had finished then. is_put: was admitted. is_over: has its outcome."""

    servable: Servable
    began_s: float
    runs: int
    is_put: bool = False
    is_over: bool = False

    def settle(self, _: Pending, __: Outcome) -> None:
        """Any outcome is a sign of life. Thread: any."""
        self.is_over = True


class SelfCheck:
    """Asks the models in turn. Thread: that of the I/O loop, but for outcomes."""

    def __init__(self, servables: Servables, clock: Clock, interval_s: float) -> None:
        """interval_s: the watchdog's."""
        self._servables = servables
        self._clock = clock
        self._interval_s = interval_s
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
        if self._has_ended(question):
            self._end(question, now_s)
            return True
        waited_s = now_s - question.began_s
        if waited_s <= self._patience_s():
            return True
        log.critical(
            "a model does not answer and never will: the service manager has to start this daemon again",
            extra={"model": question.servable.model, "version": question.servable.number, "waited_s": waited_s},
        )
        return False

    # ---- private ----------------------------------------------------------------------------------------------------

    def _begin(self, now_s: float) -> None:
        """Find whose turn it is: who waits longest, and has finished no run since its last turn."""
        live = {(each.model, each.number): each for each in self._servables.live() if each.warm_length is not None}
        turns = {key: runs for key, runs in self._runs_at_turn.items() if key in live}
        self._runs_at_turn = turns
        for key in [*(key for key in live if key not in turns), *turns]:
            runs = live[key].metrics.runs
            before = turns.pop(key, runs)
            turns[key] = runs
            if before == runs:
                self._question = _Question(live[key], now_s, runs)
                return
        self._next_s = now_s + self._interval_s

    def _put(self, question: _Question) -> None:
        servable = question.servable
        assert servable.warm_length is not None
        inputs = zero_inputs(servable.spec, servable.warm_length, servable.settings.warmup.shapes)
        try:
            servable.submit_unseen(new_request(servable, inputs, self._clock, math.inf, question.settle))
        except QueueFull:
            return  # asked again at the next look; until then its runs tell
        except EdgeRuntimeError:
            question.is_over = True
        question.is_put = True

    def _has_ended(self, question: _Question) -> bool:
        servable = question.servable
        is_gone = self._servables.find(servable.model, servable.number) is not servable
        return question.is_over or is_gone or servable.metrics.runs != question.runs

    def _end(self, question: _Question, now_s: float) -> None:
        servable = question.servable
        self._question = None
        self._next_s = now_s + max(self._interval_s, _mean_run_s(servable) / IDLE_SHARE)
        self._runs_at_turn[servable.model, servable.number] = servable.metrics.runs

    def _patience_s(self) -> float:
        slowest_s = max(map(_mean_run_s, self._servables.live()), default=0.0)
        return PATIENCE_INTERVALS * self._interval_s + PATIENCE_RUNS * slowest_s


def _mean_run_s(servable: Servable) -> float:
    metrics = servable.metrics
    return metrics.run_s / metrics.runs if metrics.runs else 0.0
