"""A candidate version beside the current one: which requests it answers, what both do, and when to judge.

Owns: the order copies or some requests, then all; and the times between two looks. The rule is `health_gate`'s, the
traffic is `serving`'s. Where requests are too few to judge by, the daemon runs the golden input on both versions
itself. Thread: the updater's, which waits here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from edge_runtime.clock import Clock
from edge_runtime.config.settings import UpdateSettings
from edge_runtime.errors import EdgeRuntimeError, LoadFailed, RunFailed
from edge_runtime.repository.golden import GoldenTensors, differences
from edge_runtime.serving.self_inference import infer_once
from edge_runtime.serving.servable import Servable
from edge_runtime.serving.swap import Swap
from edge_runtime.telemetry.metrics import ModelMetrics
from edge_runtime.update.health_gate import (
    LEAST_TO_JUDGE,
    Judgement,
    Observed,
    Thresholds,
    Verdict,
    judge_copies,
    judge_health,
)
from edge_runtime.update.rollout_progress import Interrupted, RolloutProgress

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""Between two looks: a version that regressed serves for little longer than it takes to show."""

SELF_LIMIT_S = 30.0
"""For one request of the daemon's own: it waits behind all others."""


class RunRecord:
    """The runs of a version since this object was made, or, with `whole_life`, since its load: by its own counters."""

    def __init__(self, metrics: ModelMetrics, *, whole_life: bool = False) -> None:
        then = ModelMetrics() if whole_life else metrics
        self._metrics = metrics
        self._answered, self._failed = then.answered_requests, _failures(then)
        self._counts = list(then.run_time.counts)

    def observed(self) -> Observed:
        """Requests, failures, p95 and median run time in that time."""
        failed = _failures(self._metrics) - self._failed
        answered = self._metrics.answered_requests - self._answered
        times = self._metrics.run_time.since(self._counts)
        return Observed(answered + failed, failed, times.quantile(0.95), times.quantile(0.5))


@dataclass(frozen=True, slots=True)
class Compared:
    """The runs of two versions over the same time: the release, or one of the models that it brings (`name`).

    before: None where no version before it had that model.
    """

    name: str
    before: RunRecord | None
    now: RunRecord


def judge_all(all_compared: Sequence[Compared], elapsed_s: float, thresholds: Thresholds) -> Judgement:
    """Judge a release, the first, and the models that it brings: one that regressed is the release's fault."""
    judgements = [
        judge_health(each.before.observed() if each.before else Observed(), each.now.observed(), elapsed_s, thresholds)
        for each in all_compared
    ]
    for each, judgement in zip(all_compared, judgements, strict=True):
        if judgement.verdict is Verdict.REGRESSED:
            return Judgement(judgement.verdict, f"{each.name}: {judgement.reason}" if each.name else judgement.reason)
    return judgements[0]


class Observation:
    """The judging of one candidate. `judge` once."""

    def __init__(
        self, swap: Swap, golden: GoldenTensors, settings: UpdateSettings, clock: Clock, progress: RolloutProgress
    ) -> None:
        self._swap = swap
        self._candidate = swap.candidate
        self._current = swap.current
        self._golden = golden
        self._settings = settings
        self._thresholds = Thresholds(settings.window_s, settings.failure_share, settings.latency_ratio)
        self._clock = clock
        self._progress = progress

    def judge(self) -> Judgement:
        """Begin with copies or some requests, where `update.observe` says so, then let it answer all of them.

        Returns HEALTHY or REGRESSED. Raises Interrupted.
        """
        if self._current is not None and self._settings.observe != "swap":
            judgement = self._judge_gently(self._current)
            if judgement.verdict is Verdict.REGRESSED:
                return judgement
        self._progress.show("answers all requests")
        self._swap.switch()
        return self._judge_alone()

    # ---- private ----------------------------------------------------------------------------------------------------

    def _judge_gently(self, current: Servable) -> Judgement:
        """Let it answer some requests, or run copies. UNDECIDED: the two cannot be compared so."""
        try:
            if self._settings.observe == "canary":
                self._progress.show(f"answers {self._settings.canary_percent:g} % of the requests")
                self._swap.split(self._settings.canary_percent)
                return self._judge_beside(current)
            self._progress.show("runs copies of requests")
            tolerance = self._golden.tolerance_at(self._candidate.precision)
            mirror = self._swap.mirror(self._settings.shadow_share, tolerance)
        except LoadFailed as error:
            log.warning("it answers all requests at once", extra={"model": self._swap.model, "reason": error.message})
            return Judgement(Verdict.UNDECIDED, error.message)
        agreement = self._settings.shadow_agreement
        return self._watch(lambda elapsed_s: judge_copies(mirror.read(), elapsed_s, self._thresholds, agreement))

    def _judge_alone(self) -> Judgement:
        """Judge the candidate while it answers everything, by the runs of the current version while that was loaded.

        The requests of the last minutes may be what fails or takes long; otherwise one client could take a good release
        from a device. So a regression counts only when the current version does better on requests of the same time.
        """
        compared = self._compared(self._current, whole_life=True)
        judgement = self._watch(lambda elapsed_s: judge_all(compared, elapsed_s, self._thresholds))
        if judgement.verdict is Verdict.REGRESSED and self._current is not None and self._split_in_halves():
            self._progress.show(f"both answer, to see whether it is the requests: {judgement.reason}")
            return self._judge_beside(self._current)
        return self._ask_if_undecided(judgement, compared)

    def _compared(self, current: Servable | None, *, whole_life: bool) -> list[Compared]:
        """Count the runs of the candidate and its models from now. whole_life: the current's from its load."""
        currents = {"": current} | {part.model: part for part in (current.owned if current is not None else ())}
        candidates = {"": self._candidate} | {part.model: part for part in self._candidate.owned}
        compared: list[Compared] = []
        for name, candidate in candidates.items():
            known = currents.get(name)
            before = RunRecord(known.metrics, whole_life=whole_life) if known is not None else None
            compared.append(Compared(name, before, RunRecord(candidate.metrics)))
        return compared

    def _split_in_halves(self) -> bool:
        """Let both answer every other request; False: they cannot stand in for one another."""
        try:
            self._swap.split(50)
        except LoadFailed:
            return False
        return True

    def _judge_beside(self, current: Servable) -> Judgement:
        """Judge the candidate while both answer, over the same time."""
        compared = self._compared(current, whole_life=False)
        judgement = self._watch(lambda elapsed_s: judge_all(compared, elapsed_s, self._thresholds))
        return self._ask_if_undecided(judgement, compared)

    def _watch(self, judge: Callable[[float], Judgement]) -> Judgement:
        """Look until the judgement is certain or the window is over. judge: gets the seconds observed."""
        started_s = self._clock.monotonic_s()
        while True:
            elapsed_s = self._clock.monotonic_s() - started_s
            judgement = judge(elapsed_s)
            if judgement.verdict is not Verdict.UNDECIDED or elapsed_s >= self._thresholds.window_s:
                return judgement
            self._progress.show(judgement.reason)
            if self._progress.wait(min(LOOK_S, self._thresholds.window_s - elapsed_s)):
                raise Interrupted

    def _ask_if_undecided(self, judgement: Judgement, compared: Sequence[Compared]) -> Judgement:
        """Return the judgement; where requests were too few for one, judge by the golden input, run on both."""
        if judgement.verdict is not Verdict.UNDECIDED:
            return judgement
        whole = compared[0]
        problem = self._run_golden(self._candidate, whole.now)
        if problem is not None:
            return Judgement(Verdict.REGRESSED, problem)
        if self._current is not None and whole.before is not None:
            self._run_golden_for_time(self._current, whole.before)
        judgement = judge_all(compared, self._thresholds.window_s, self._thresholds)
        if judgement.verdict is Verdict.UNDECIDED:
            return Judgement(Verdict.HEALTHY, judgement.reason)
        return Judgement(judgement.verdict, f"{judgement.reason}; too little traffic, asked itself the golden input")

    def _run_golden(self, servable: Servable, record: RunRecord) -> str | None:
        """Run the golden input until enough is observed to judge by. Returns the fault of an answer, or None."""
        tolerance = self._golden.tolerance_at(servable.precision)
        for _ in _until_judgeable(record):
            try:
                got = infer_once(servable, self._golden.inputs, self._clock, SELF_LIMIT_S)
            except RunFailed as error:
                return f"its golden input fails: {error.message}"
            except EdgeRuntimeError:
                continue  # the load's fault
            found = differences(self._golden.forms, self._golden.outputs, got, tolerance)
            if found:
                return f"its golden output is wrong: {found[0]}"
        return None

    def _run_golden_for_time(self, current: Servable, record: RunRecord) -> None:
        """Run the golden input on the current version, for a run time to compare with; its answers do not matter."""
        for _ in _until_judgeable(record):
            try:
                infer_once(current, self._golden.inputs, self._clock, SELF_LIMIT_S)
            except EdgeRuntimeError:
                return


def _until_judgeable(record: RunRecord) -> Iterator[int]:
    """Count until enough requests were observed, at most twice that: an answer may be here before it is counted."""
    for number in range(2 * LEAST_TO_JUDGE):
        if record.observed().requests >= LEAST_TO_JUDGE:
            return
        yield number


def _failures(metrics: ModelMetrics) -> int:
    return metrics.refusals.get(RunFailed.code, 0)
