"""Whether a release that serves does as well as the one before it. Pure.

Owns: the rule. It compares the same numbers of both, counted the same way on this device: no threshold in milliseconds
fits both a Jetson and a Pi. The causes of failures are unknown here; refusals under load do not count as failures.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from edge_runtime.serving.mirror import Mirrored

LEAST_TO_JUDGE = 20
"""Fewer requests give no meaningful share or quantile: one failure of 20 is 5 %."""

NOISE_S = 0.002
"""Below this a run time is noise of the machine: 0.2 ms beside 0.05 ms is four times as long and no regression."""

TAIL_REQUESTS = 400
"""From here the p95 rests on 20 runs and counts alone. With fewer, other work on the machine makes one or two of them
long, so the median must be longer too: on a busy device one long run of 20 refused good releases."""


class Verdict(Enum):
    """The verdict on a release.

    UNDECIDED: go on looking; at the end of the window, with too little traffic, run the golden input and judge again.
    """

    HEALTHY = "healthy"
    REGRESSED = "regressed"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Observed:
    """The runs of one release in a time: requests, failures among them, p95 and median of their run times."""

    requests: int = 0
    failures: int = 0
    p95_s: float | None = None
    median_s: float | None = None

    @property
    def failure_share(self) -> float:
        """Return the share of failures; 0 without requests."""
        return self.failures / self.requests if self.requests else 0.0


@dataclass(frozen=True, slots=True)
class Thresholds:
    """`[update]`: how much worse is too much. window_s: how long a release is observed before its commit."""

    window_s: float = 60.0
    failure_share: float = 0.02
    latency_ratio: float = 3.0


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and its reason in words."""

    verdict: Verdict
    reason: str


def judge_health(before: Observed, now: Observed, elapsed_s: float, thresholds: Thresholds) -> Judgement:
    """Judge a release by its runs since it was swapped in, beside the runs of the one before it.

    Returns REGRESSED as soon as it is certain, HEALTHY only at the end of the window.
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
    if _failures(before, now, thresholds) is not None:
        advice = "; for a classifier, compare with update.shadow_agreement" if agreement is None and rows else ""
        return Judgement(Verdict.REGRESSED, f"{counted}; {thresholds.failure_share:.1%} are allowed{advice}")
    judgement = judge_health(before, now, elapsed_s, thresholds)
    return Judgement(judgement.verdict, f"{judgement.reason}; {counted}")


def _failures(before: Observed, now: Observed, thresholds: Thresholds) -> str | None:
    """Return the fault where failures exceed those before by more than the share, over enough requests."""
    allowed = before.failure_share + thresholds.failure_share
    if now.requests < LEAST_TO_JUDGE or now.failure_share <= allowed:
        return None
    return (
        f"{now.failures} of {now.requests} requests failed ({now.failure_share:.1%}); before it were "
        f"{before.failure_share:.1%}, and {thresholds.failure_share:.1%} more are allowed"
    )


def _latency(before: Observed, now: Observed, thresholds: Thresholds) -> str | None:
    """Return the fault where the p95 run time exceeds the one before by more than the ratio, and is no noise."""
    if now.requests < LEAST_TO_JUDGE or before.requests < LEAST_TO_JUDGE or before.p95_s is None or now.p95_s is None:
        return None
    allowed_s = max(before.p95_s, NOISE_S) * thresholds.latency_ratio
    if now.p95_s <= allowed_s or (now.requests < TAIL_REQUESTS and not _is_median_longer(before, now)):
        return None
    return (
        f"a run takes {_ms(now.p95_s)}; before it took {_ms(before.p95_s)}, and up to {allowed_s * 1e3:.3g} ms are "
        f"allowed ({thresholds.latency_ratio:g} times that, or times {NOISE_S * 1e3:g} ms where it was less)"
    )


def _is_median_longer(before: Observed, now: Observed) -> bool:
    if before.median_s is None or now.median_s is None:
        return True
    return now.median_s > max(before.median_s, NOISE_S)


def _ms(p95_s: float | None) -> str:
    return "p95 unknown" if p95_s is None else f"p95 {p95_s * 1e3:.3g} ms"
