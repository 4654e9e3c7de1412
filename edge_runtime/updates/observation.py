"""A candidate version beside the current one: which requests it answers, what both do, and whether it does as well.

Owns: the rule, and the order copies or some requests, then all. The rule (`judge_health`, `judge_copies`) is pure. It
compares the same numbers of both, counted the same way on this device: no threshold in milliseconds fits both a Jetson
and a Pi. It does not know the causes of failures; refusals under load do not count as failures. The traffic is
`serving`'s. Where requests are too few to judge by, the daemon runs the golden input on both versions itself. Run times
of a device that is slowed for its heat judge nothing, and that time is none of the window. Thread: the updater's, which
waits here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from edge_runtime.clock import Clock
from edge_runtime.config.settings import UpdateSettings
from edge_runtime.errors import EdgeRuntimeError, LoadFailed, RunFailed
from edge_runtime.models.servable import Servable
from edge_runtime.models.swap import Swap
from edge_runtime.telemetry.metrics import ModelMetrics
from edge_runtime.updates.golden import GoldenTensors, golden_faults
from edge_runtime.updates.manifest import ReleaseBounds
from edge_runtime.updates.mirror import Mirrored, begin_shadow
from edge_runtime.updates.rollout_progress import Interrupted, RolloutProgress
from edge_runtime.updates.self_inference import infer_once

log = logging.getLogger(__name__)

LEAST_TO_JUDGE = 20
"""Fewer requests give no meaningful share or quantile: one failure of 20 is 5 %."""

NOISE_S = 0.002
"""Below this a run time is noise of the machine: 0.2 ms beside 0.05 ms is four times as long and no regression."""

TAIL_REQUESTS = 400
"""From here the p95 rests on 20 runs and counts alone. With fewer, other work on the machine makes one or two of them
long, so the median must be longer too: on a busy device one long run of 20 refused good releases."""

LOOK_S = 0.25
"""Between two looks at the counters: how much longer than needed a regressed version may serve."""

SLOWED_LIMIT_S = 1_800.0
"""The device may be slowed for its heat for so long in all: then the release is put off. Both versions are loaded
meanwhile, and a device in the sun may stay hot for hours."""

SELF_LIMIT_S = 30.0
"""For one golden run of the daemon's own: its request waits behind all others."""


class Verdict(Enum):
    """The verdict on a release.

    UNDECIDED: go on looking; at the end of the window, with too little traffic, run the golden input and judge again.
    At the end of an observation: the device was slowed for too long to tell.
    """

    HEALTHY = "healthy"
    REGRESSED = "regressed"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Observed:
    """The runs of one release in a time: requests, failures among them, p95 and median of their run times.

    slowed: of the requests, those that were answered while the device was slowed. Their run times tell of its heat, and
    p95 and median are without them.
    """

    requests: int = 0
    failures: int = 0
    p95_s: float | None = None
    median_s: float | None = None
    slowed: int = 0

    @property
    def timed(self) -> int:
        """Return how many requests there are whose run times count."""
        return self.requests - self.slowed

    @property
    def failure_share(self) -> float:
        """Return the share of failures; 0 without requests."""
        return self.failures / self.requests if self.requests else 0.0


@dataclass(frozen=True, slots=True)
class Thresholds:
    """`[update]`: how much worse is too much. window_s: how long a release is observed before its commit.

    max_p95_s, max_failure_share: the release's own bounds on this device, whatever was before it; None for none.
    """

    window_s: float = 60.0
    failure_share: float = 0.02
    latency_ratio: float = 3.0
    max_p95_s: float | None = None
    max_failure_share: float | None = None

    @property
    def without_bounds(self) -> Thresholds:
        """Return those of a model that a release brings: its bounds are of the whole."""
        return replace(self, max_p95_s=None, max_failure_share=None)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and its reason in words."""

    verdict: Verdict
    reason: str


class RunRecord:
    """The runs of a version since this object was made; with `whole_life`, since its load. Reads its own counters."""

    def __init__(self, metrics: ModelMetrics, *, whole_life: bool = False) -> None:
        then = ModelMetrics() if whole_life else metrics
        self._metrics = metrics
        self._answered, self._failed = then.answered_requests, _failures(then)
        self._counts, self._slowed_counts = list(then.run_time.counts), then.slowed_counts()

    def observed(self) -> Observed:
        """Requests, failures, p95 and median run time in that time."""
        failed = _failures(self._metrics) - self._failed
        answered = self._metrics.answered_requests - self._answered
        times = self._metrics.run_time.since(self._counts)
        slowed = [now - then for now, then in zip(self._metrics.slowed_counts(), self._slowed_counts, strict=True)]
        times.counts = [max(count - apart, 0) for count, apart in zip(times.counts, slowed, strict=True)]
        return Observed(
            answered + failed, failed, times.quantile(0.95), times.quantile(0.5), min(sum(slowed), answered)
        )


@dataclass(frozen=True, slots=True)
class Compared:
    """The runs of two versions over the same time: the release, or one of the models that it brings (`name`).

    before: None where no version before it had that model.
    """

    name: str
    before: RunRecord | None
    now: RunRecord


class _SlowedTooLong(Exception):
    """The device was slowed for SLOWED_LIMIT_S."""


class Observation:
    """The judging of one candidate. `judge` once."""

    def __init__(
        self,
        swap: Swap,
        golden: GoldenTensors,
        settings: UpdateSettings,
        clock: Clock,
        progress: RolloutProgress,
        *,
        thresholds: Thresholds,
    ) -> None:
        self._swap = swap
        self._candidate = swap.candidate
        self._current = swap.current
        self._golden = golden
        self._settings = settings
        self._thresholds = thresholds
        self._clock = clock
        self._progress = progress
        self._dispatcher = swap.context.dispatcher
        self._slowed_s = 0.0

    def judge(self) -> Judgement:
        """Begin with copies or some requests, where `update.observe` says so, then let it answer all of them.

        Returns HEALTHY or REGRESSED; UNDECIDED: the device was slowed for its heat for too long. Raises Interrupted.
        """
        try:
            return self._judge()
        except _SlowedTooLong:
            return Judgement(
                Verdict.UNDECIDED,
                f"this device was slowed for its heat for {SLOWED_LIMIT_S:.0f} s, and run times of that time judge no "
                "release; it is tried again at a later look",
            )

    # ---- private ----------------------------------------------------------------------------------------------------

    def _judge(self) -> Judgement:
        if self._current is not None and self._settings.observe != "swap":
            judgement = self._judge_gently(self._current)
            if judgement.verdict is Verdict.REGRESSED:
                return judgement
        self._progress.show("answers all requests")
        self._swap.switch()
        return self._judge_alone()

    def _judge_gently(self, current: Servable) -> Judgement:
        """Let it answer some requests, or run copies. UNDECIDED: the two cannot be compared so."""
        try:
            if self._settings.observe == "canary":
                self._progress.show(f"answers {self._settings.canary_percent:g} % of the requests")
                self._swap.split(self._settings.canary_percent)
                return self._judge_beside(current)
            self._progress.show("runs copies of requests")
            tolerance = self._golden.tolerance_at(self._candidate.precision)
            mirror = begin_shadow(self._swap, self._settings.shadow_share, tolerance)
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
        judgement = self._watch(lambda elapsed_s: judge_all(compared, elapsed_s, self._thresholds), compared)
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
        judgement = self._watch(lambda elapsed_s: judge_all(compared, elapsed_s, self._thresholds), compared)
        return self._ask_if_undecided(judgement, compared)

    def _watch(self, judge: Callable[[float], Judgement], compared: Sequence[Compared] = ()) -> Judgement:
        """Look until the judgement is certain or the window is over, and show what is compared meanwhile.

        judge: gets the seconds observed, without those in which the device was slowed.
        """
        elapsed_s = 0.0
        while True:
            judgement = judge(elapsed_s)
            if judgement.verdict is not Verdict.UNDECIDED or elapsed_s >= self._thresholds.window_s:
                return judgement
            elapsed_s += self._look_away(self._thresholds.window_s - elapsed_s, judgement.reason, compared)

    def _look_away(self, most_s: float, reason: str, compared: Sequence[Compared]) -> float:
        """Wait until the next look; return the seconds of it in which the device was not slowed."""
        is_slowed, before_s = self._dispatcher.is_slowed, self._clock.monotonic_s()
        told = f"waits until this device is no more slowed for its heat; {reason}" if is_slowed else reason
        self._progress.show(told, observed_figures(compared))
        if self._progress.wait(LOOK_S if is_slowed else min(LOOK_S, most_s)):
            raise Interrupted
        waited_s = self._clock.monotonic_s() - before_s
        if not is_slowed and not self._dispatcher.is_slowed:
            return waited_s
        self._slowed_s += waited_s
        if self._slowed_s >= SLOWED_LIMIT_S:
            raise _SlowedTooLong
        return 0.0

    def _ask_if_undecided(self, judgement: Judgement, compared: Sequence[Compared]) -> Judgement:
        """Return the judgement; where requests were too few for one, judge by the golden input, run on both."""
        if judgement.verdict is not Verdict.UNDECIDED:
            return judgement
        whole, is_cool = compared[0], False
        while not is_cool:
            while self._dispatcher.is_slowed:
                self._look_away(LOOK_S, judgement.reason, compared)
            slowed = _slowed(whole)
            problem = self._run_golden(self._candidate, whole.now)
            if problem is not None:
                return Judgement(Verdict.REGRESSED, problem)
            if self._current is not None and whole.before is not None:
                self._run_golden_for_time(self._current, whole.before)
            is_cool = not self._dispatcher.is_slowed and _slowed(whole) == slowed
        judgement = judge_all(compared, self._thresholds.window_s, self._thresholds)
        if judgement.verdict is Verdict.UNDECIDED:
            return Judgement(Verdict.HEALTHY, judgement.reason)
        return Judgement(judgement.verdict, f"{judgement.reason}; too little traffic, asked itself the golden input")

    def _run_golden(self, servable: Servable, record: RunRecord) -> str | None:
        """Run the golden input until enough is observed to judge by. Returns the fault of an answer, or None."""
        for _ in _until_judgeable(record):
            try:
                got = infer_once(servable, self._golden.inputs, self._clock, SELF_LIMIT_S)
            except RunFailed as error:
                return f"its golden input fails: {error.message}"
            except EdgeRuntimeError:
                continue  # the load's fault
            found = golden_faults(self._golden, got, servable.precision)
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


def thresholds_of(settings: UpdateSettings, bounds: ReleaseBounds | None, profile: str) -> Thresholds:
    """Return a device's thresholds with the bounds that a release brings for its profile."""
    return Thresholds(
        settings.window_s,
        settings.failure_share,
        settings.latency_ratio,
        max_p95_s=bounds.max_p95_s(profile) if bounds is not None else None,
        max_failure_share=bounds.max_failure_share if bounds is not None else None,
    )


def observed_figures(compared: Sequence[Compared]) -> list[tuple[str, str, str]]:
    """Return for each version compared its figures, before and now, as text with units; "" before where none was."""
    return [
        (f"{each.name}: {name}" if each.name else name, _figures(each.before)[name], now)
        for each in compared
        for name, now in _figures(each.now).items()
    ]


# ---- the rule -------------------------------------------------------------------------------------------------------


def judge_all(all_compared: Sequence[Compared], elapsed_s: float, thresholds: Thresholds) -> Judgement:
    """Judge a release, the first, and the models that it brings: one that regressed is the release's fault."""
    judgements = [
        judge_health(
            each.before.observed() if each.before else Observed(),
            each.now.observed(),
            elapsed_s,
            thresholds.without_bounds if each.name else thresholds,
        )
        for each in all_compared
    ]
    for each, judgement in zip(all_compared, judgements, strict=True):
        if judgement.verdict is Verdict.REGRESSED:
            return Judgement(judgement.verdict, f"{each.name}: {judgement.reason}" if each.name else judgement.reason)
    return judgements[0]


def judge_health(before: Observed, now: Observed, elapsed_s: float, thresholds: Thresholds) -> Judgement:
    """Judge a release by its runs since it was swapped in, beside the runs of the one before it.

    Returns REGRESSED as soon as it is certain, HEALTHY only at the end of the window.
    """
    bad = _why_failing(before, now, thresholds) or _why_slow(before, now, thresholds) or _why_beyond(now, thresholds)
    if bad is not None:
        return Judgement(Verdict.REGRESSED, bad)
    if elapsed_s < thresholds.window_s:
        return Judgement(Verdict.UNDECIDED, f"{elapsed_s:.0f} of {thresholds.window_s:.0f} s observed")
    if now.timed < LEAST_TO_JUDGE:
        wanted = f"{LEAST_TO_JUDGE} are needed to judge"
        return Judgement(Verdict.UNDECIDED, f"{now.timed} requests in {elapsed_s:.0f} s; {wanted}")
    return Judgement(
        Verdict.HEALTHY, f"{now.requests} requests in {elapsed_s:.0f} s, {now.failures} failed, {_ms(now.p95_s)}"
    )


def judge_copies(
    copies: Mirrored, elapsed_s: float, thresholds: Thresholds, agreement: float | None = None
) -> Judgement:
    """Judge a release by copies of requests that the one before it answered; run times are of runs alone.

    agreement: the share of rows of scores whose highest one must be the same; None: outputs must be within tolerance,
    and each one that is not counts as a failure. UNDECIDED where copies are few.
    """
    different = copies.different if agreement is None else 0
    counted = f"of {copies.requests} copies {copies.different} were answered differently and {copies.failures} failed"
    if copies.top1_rows:
        counted += f"; the highest score was the same in {copies.top1_agreements} of {copies.top1_rows} rows"
        if copies.top1_distinct:
            alike = ", which any release could give" if copies.top1_distinct == 1 else ""
            counted += f" ({copies.top1_distinct} different{alike})"
    agreed, rows = copies.top1_agreements, copies.top1_rows
    if agreement is not None and rows >= LEAST_TO_JUDGE and agreed < agreement * rows:
        return Judgement(Verdict.REGRESSED, f"{counted}; wanted {agreement:.1%}")
    before = Observed(copies.requests, 0, copies.current_p95_s, copies.current_median_s)
    failures = copies.failures + different
    now = Observed(copies.requests, failures, copies.candidate_p95_s, copies.candidate_median_s)
    if _why_failing(before, now, thresholds) is not None:
        advice = "; for a classifier, compare with update.shadow_agreement" if agreement is None and rows else ""
        return Judgement(Verdict.REGRESSED, f"{counted}; {thresholds.failure_share:.1%} are allowed{advice}")
    judgement = judge_health(before, now, elapsed_s, thresholds)
    return Judgement(judgement.verdict, f"{judgement.reason}; {counted}")


# ---- private --------------------------------------------------------------------------------------------------------


def _until_judgeable(record: RunRecord) -> Iterator[int]:
    """Count until enough requests were observed, at most twice that: an answer may be here before it is counted."""
    for number in range(2 * LEAST_TO_JUDGE):
        if record.observed().timed >= LEAST_TO_JUDGE:
            return
        yield number


def _slowed(compared: Compared) -> int:
    """Return how many requests of both were answered while the device was slowed."""
    return sum(record.observed().slowed for record in (compared.before, compared.now) if record is not None)


def _failures(metrics: ModelMetrics) -> int:
    return metrics.refusals.get(RunFailed.code, 0)


def _why_failing(before: Observed, now: Observed, thresholds: Thresholds) -> str | None:
    """Return the fault where failures exceed those before by more than the share, over enough requests."""
    allowed = before.failure_share + thresholds.failure_share
    if now.requests < LEAST_TO_JUDGE or now.failure_share <= allowed:
        return None
    return (
        f"{now.failures} of {now.requests} requests failed ({now.failure_share:.1%}); before it were "
        f"{before.failure_share:.1%}, and {thresholds.failure_share:.1%} more are allowed"
    )


def _why_slow(before: Observed, now: Observed, thresholds: Thresholds) -> str | None:
    """Return the fault where the p95 run time exceeds the one before by more than the ratio, and is not noise."""
    if now.timed < LEAST_TO_JUDGE or before.timed < LEAST_TO_JUDGE or before.p95_s is None or now.p95_s is None:
        return None
    allowed_s = max(before.p95_s, NOISE_S) * thresholds.latency_ratio
    if now.p95_s <= allowed_s or (now.timed < TAIL_REQUESTS and not _is_median_longer(before, now)):
        return None
    return (
        f"a run takes {_ms(now.p95_s)}; before it took {_ms(before.p95_s)}, and up to {allowed_s * 1e3:.3g} ms are "
        f"allowed ({thresholds.latency_ratio:g} times that, or times {NOISE_S * 1e3:g} ms where it was less)"
    )


def _why_beyond(now: Observed, thresholds: Thresholds) -> str | None:
    """Return the fault where the release breaks a bound of its own, over enough requests; as in `_why_slow`."""
    if now.requests < LEAST_TO_JUDGE:
        return None
    most_share, most_s = thresholds.max_failure_share, thresholds.max_p95_s
    if most_share is not None and now.failure_share > most_share:
        return (
            f"{now.failures} of {now.requests} requests failed ({now.failure_share:.1%}); its signed bound is "
            f"{most_share:.1%}"
        )
    if most_s is None or now.timed < LEAST_TO_JUDGE or now.p95_s is None or now.p95_s <= most_s:
        return None
    if now.timed < TAIL_REQUESTS and now.median_s is not None and now.median_s <= most_s:
        return None
    return f"a run takes {_ms(now.p95_s)}; its signed bound here is {most_s * 1e3:g} ms"


def _is_median_longer(before: Observed, now: Observed) -> bool:
    if before.median_s is None or now.median_s is None:
        return True
    return now.median_s > max(before.median_s, NOISE_S)


def _ms(p95_s: float | None) -> str:
    return "p95 unknown" if p95_s is None else f"p95 {p95_s * 1e3:.3g} ms"


def _figures(record: RunRecord | None) -> dict[str, str]:
    """The figures of a version by name: "" for those that are not known yet."""
    seen = record.observed() if record is not None else None
    return {
        "requests": str(seen.requests) if seen is not None else "",
        "failures": str(seen.failures) if seen is not None else "",
        "run time, median": _milliseconds(seen.median_s) if seen is not None else "",
        "run time, p95": _milliseconds(seen.p95_s) if seen is not None else "",
    }


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3g} ms"
