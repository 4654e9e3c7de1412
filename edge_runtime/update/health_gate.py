"""Whether a release that serves does as well as the one before it. Pure.

Owns: the rule. What is compared are the same numbers of both, counted the same way on this very device: no threshold
in milliseconds can fit both a Jetson and a Pi. What caused a failure is not known here; refusals under load are not
counted as failures, since they are the load's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from edge_runtime.serving.mirror import Mirrored

LEAST_TO_JUDGE = 20
"""Requests from which a share or a quantile says anything: one failure of 20 is 5 %."""

NOISE_S = 0.002
"""Below this a p95 is the machine's, not the model's: 0.2 ms beside 0.05 is four times as long and no regression."""


class Verdict(Enum):
    """What is to be done.

    UNDECIDED: go on looking; at the end of the window, with too little traffic, run the golden input and look again.
    """

    HEALTHY = "healthy"
    REGRESSED = "regressed"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Observed:
    """What one release did in a time: requests that were run, how many of them failed, and their p95 run time."""

    requests: int = 0
    failures: int = 0
    p95_s: float | None = None

    @property
    def failure_share(self) -> float:
        """Failures of requests; 0 without requests."""
        return self.failures / self.requests if self.requests else 0.0


@dataclass(frozen=True, slots=True)
class Thresholds:
    """`[update]`: how much worse is too much. window_s: how long a release is looked at before it is committed."""

    window_s: float = 60.0
    failure_share: float = 0.02
    latency_ratio: float = 3.0


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and, in words, why."""

    verdict: Verdict
    reason: str


def judge_health(before: Observed, now: Observed, elapsed_s: float, thresholds: Thresholds) -> Judgement:
    """Judge a release by what it did since it was swapped in, beside what the one before it did.

    A regression is said as soon as it is sure, health only when the window is over.
    """
    bad = _failures(before, now, thresholds) or _latency(before, now, thresholds)
    if bad is not None:
        return Judgement(Verdict.REGRESSED, bad)
    if elapsed_s < thresholds.window_s:
        return Judgement(Verdict.UNDECIDED, f"{elapsed_s:.0f} of {thresholds.window_s:.0f} s observed")
    if now.requests < LEAST_TO_JUDGE:
        wanted = f"{LEAST_TO_JUDGE} are needed to judge"
        return Judgement(Verdict.UNDECIDED, f"{now.requests} requests in {elapsed_s:.0f} s; {wanted}")
    return Judgement(
        Verdict.HEALTHY, f"{now.requests} requests in {elapsed_s:.0f} s, {now.failures} failed, {_ms(now.p95_s)}"
    )


def judge_copies(
    copies: Mirrored, elapsed_s: float, thresholds: Thresholds, agreement: float | None = None
) -> Judgement:
    """Judge a release by copies of requests that the one before it answered; run times are of runs alone.

    agreement: the share of rows of scores whose highest one must be the same; None: outputs must be within tolerance,
    and one that is not counts as a failure. Never HEALTHY for lack of copies: UNDECIDED then.
    """
    different = copies.different if agreement is None else 0
    counted = f"of {copies.requests} copies {copies.different} were answered differently and {copies.failures} failed"
    if copies.top1_rows:
        counted += f"; the highest score was the same in {copies.top1_agreements} of {copies.top1_rows} rows"
    agreed, rows = copies.top1_agreements, copies.top1_rows
    if agreement is not None and rows >= LEAST_TO_JUDGE and agreed < agreement * rows:
        return Judgement(Verdict.REGRESSED, f"{counted}; wanted {agreement:.1%}")
    before = Observed(copies.requests, 0, copies.incumbent_p95_s)
    now = Observed(copies.requests, copies.failures + different, copies.newcomer_p95_s)
    if _failures(before, now, thresholds) is not None:
        advice = "; for a classifier, compare with update.shadow_agreement" if agreement is None and rows else ""
        return Judgement(Verdict.REGRESSED, f"{counted}; {thresholds.failure_share:.1%} are allowed{advice}")
    judgement = judge_health(before, now, elapsed_s, thresholds)
    return Judgement(judgement.verdict, f"{judgement.reason}; {counted}")


def _failures(before: Observed, now: Observed, thresholds: Thresholds) -> str | None:
    """More failures than before by more than the share, over enough requests to say so."""
    allowed = before.failure_share + thresholds.failure_share
    if now.requests < LEAST_TO_JUDGE or now.failure_share <= allowed:
        return None
    return (
        f"{now.failures} of {now.requests} requests failed ({now.failure_share:.1%}); before it were "
        f"{before.failure_share:.1%}, and {thresholds.failure_share:.1%} more are allowed"
    )


def _latency(before: Observed, now: Observed, thresholds: Thresholds) -> str | None:
    """A p95 run time so many times as long as before, where both are known and not noise."""
    if now.requests < LEAST_TO_JUDGE or before.requests < LEAST_TO_JUDGE or before.p95_s is None or now.p95_s is None:
        return None
    allowed_s = max(before.p95_s, NOISE_S) * thresholds.latency_ratio
    if now.p95_s <= allowed_s:
        return None
    return (
        f"a run takes {_ms(now.p95_s)}; before it took {_ms(before.p95_s)}, and up to {allowed_s * 1e3:.3g} ms are "
        f"allowed ({thresholds.latency_ratio:g} times that, or times {NOISE_S * 1e3:g} ms where it was less)"
    )


def _ms(p95_s: float | None) -> str:
    return "p95 unknown" if p95_s is None else f"p95 {p95_s * 1e3:.3g} ms"
