"""A new version beside the one before it: what both do, and when that is enough to judge by.

Owns: the looking and its times; the rule is `health_gate`'s, the traffic `serving`'s. Where requests are too few to
judge by, the daemon asks both versions its golden input itself. Thread: the updater's, which waits here.
"""

from __future__ import annotations

from collections.abc import Callable

from edge_runtime.clock import Clock
from edge_runtime.errors import EdgeRuntimeError, RunFailed
from edge_runtime.repository.golden import GoldenTensors, differences
from edge_runtime.serving.mirror import Mirror
from edge_runtime.serving.self_inference import infer_once
from edge_runtime.serving.servable import Servable
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

LOOK_S = 0.25
"""Between two looks: a version that regressed serves for little longer than what shows it."""

SELF_LIMIT_S = 30.0
"""For one request of the daemon's own: it waits behind all others."""

Wait = Callable[[float], bool]
"""Waits so many seconds; True: not to be waited for any longer (the daemon stops, an operator steps in)."""


class Interrupted(Exception):
    """Somebody wants the observation to end before it has a result."""


class Record:
    """What a version did since this was made, or, with `whole_life`, since it was loaded: by its own counters."""

    def __init__(self, metrics: ModelMetrics, *, whole_life: bool = False) -> None:
        then = ModelMetrics() if whole_life else metrics
        self._metrics = metrics
        self._answered, self._failed = then.answered_requests, _failures(then)
        self._counts = list(then.run_time.counts)

    def observed(self) -> Observed:
        """Requests, failures and p95 run time in that time."""
        failed = _failures(self._metrics) - self._failed
        answered = self._metrics.answered_requests - self._answered
        return Observed(answered + failed, failed, self._metrics.run_time.since(self._counts).quantile(0.95))


class Observation:
    """The judging of one newcomer. before: what it replaces, loaded and able to run, or None."""

    def __init__(
        self,
        newcomer: Servable,
        before: Servable | None,
        golden: GoldenTensors,
        *,
        thresholds: Thresholds,
        clock: Clock,
        wait: Wait,
        tell: Callable[[str], None],
    ) -> None:
        """tell: how far the observation is, in words."""
        self._newcomer = newcomer
        self._before = before
        self._golden = golden
        self._thresholds = thresholds
        self._clock = clock
        self._wait = wait
        self._tell = tell

    def judge_alone(self, share: Callable[[], bool]) -> Judgement:
        """Judge the newcomer while it answers everything, by what the other one did while it was loaded.

        share: lets both answer; False where they cannot. What came lately may be what fails, or takes long: one client
        could else take a good release from a device. So a regression counts only when the other one, on requests of the
        same time, does better. Returns HEALTHY or REGRESSED. Raises Interrupted.
        """
        before, now = self._before_it(), Record(self._newcomer.metrics).observed
        judgement = self._watch(lambda elapsed_s: judge_health(before(), now(), elapsed_s, self._thresholds))
        if judgement.verdict is Verdict.REGRESSED and share():
            self._tell(f"both answer, to see whether it is the requests: {judgement.reason}")
            return self.judge_beside()
        return self._asked_golden(judgement, before, now)

    def judge_beside(self) -> Judgement:
        """Judge it while both answer, over the same time. Returns HEALTHY or REGRESSED. Raises Interrupted."""
        assert self._before is not None
        before, now = Record(self._before.metrics).observed, Record(self._newcomer.metrics).observed
        judgement = self._watch(lambda elapsed_s: judge_health(before(), now(), elapsed_s, self._thresholds))
        return self._asked_golden(judgement, before, now)

    def judge_copies(self, mirror: Mirror, agreement: float | None) -> Judgement:
        """Judge it by copies of requests, see `health_gate`. UNDECIDED where they were few. Raises Interrupted."""
        return self._watch(lambda elapsed_s: judge_copies(mirror.read(), elapsed_s, self._thresholds, agreement))

    # ---- private ----------------------------------------------------------------------------------------------------

    def _before_it(self) -> Callable[[], Observed]:
        return Record(self._before.metrics, whole_life=True).observed if self._before is not None else Observed

    def _asked_golden(
        self, judgement: Judgement, before: Callable[[], Observed], now: Callable[[], Observed]
    ) -> Judgement:
        """The judgement where it is one; where requests were too few, that of the golden input, asked of both."""
        if judgement.verdict is not Verdict.UNDECIDED:
            return judgement
        problem = self._ask_golden(self._newcomer, LEAST_TO_JUDGE - now().requests)
        if problem is not None:
            return Judgement(Verdict.REGRESSED, problem)
        if self._before is not None:
            self._ask_before(LEAST_TO_JUDGE - before().requests)
        judgement = judge_health(before(), now(), self._thresholds.window_s, self._thresholds)
        if judgement.verdict is Verdict.UNDECIDED:
            return Judgement(Verdict.HEALTHY, judgement.reason)
        return Judgement(judgement.verdict, f"{judgement.reason}; too little traffic, asked itself the golden input")

    def _watch(self, judge: Callable[[float], Judgement]) -> Judgement:
        """Look until something is sure or the window is over."""
        started_s = self._clock.monotonic_s()
        while True:
            elapsed_s = self._clock.monotonic_s() - started_s
            judgement = judge(elapsed_s)
            if judgement.verdict is not Verdict.UNDECIDED or elapsed_s >= self._thresholds.window_s:
                return judgement
            self._tell(judgement.reason)
            if self._wait(min(LOOK_S, self._thresholds.window_s - elapsed_s)):
                raise Interrupted

    def _ask_golden(self, servable: Servable, times: int) -> str | None:
        """Run the golden input so many times; what is wrong with an answer, or None. Failures are counted too."""
        tolerance = self._golden.tolerance_at(servable.layouts.narrow.precision)
        for _ in range(times):
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

    def _ask_before(self, times: int) -> None:
        """Let the other one run as often, so that there is a time to compare; what it answers is its own affair."""
        for _ in range(times):
            try:
                infer_once(self._before, self._golden.inputs, self._clock, SELF_LIMIT_S)  # type: ignore[arg-type]
            except EdgeRuntimeError:
                return


def _failures(metrics: ModelMetrics) -> int:
    return metrics.refusals.get(RunFailed.code, 0)
