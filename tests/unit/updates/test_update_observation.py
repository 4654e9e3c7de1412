"""A release is judged beside the one before it, on this device, by enough requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.config.settings import UpdateSettings
from edge_runtime.errors import RunFailed
from edge_runtime.telemetry.metrics import ModelMetrics
from edge_runtime.updates.manifest import ReleaseBounds
from edge_runtime.updates.mirror import Mirrored
from edge_runtime.updates.observation import (
    LEAST_TO_JUDGE,
    Compared,
    Observed,
    RunRecord,
    Thresholds,
    Verdict,
    judge_all,
    judge_copies,
    judge_health,
    observed_figures,
    thresholds_of,
)

RULE = Thresholds(window_s=60.0, failure_share=0.02, latency_ratio=3.0)
GOOD = Observed(1000, 0, 0.010)


@pytest.mark.parametrize(
    ("before", "now", "elapsed_s", "verdict", "reason"),
    [
        (GOOD, Observed(1000, 0, 0.011), 60, Verdict.HEALTHY, "1000 requests in 60 s, 0 failed, p95 11 ms"),
        (GOOD, Observed(1000, 0, 0.011), 59, Verdict.UNDECIDED, "59 of 60 s observed"),
        (GOOD, Observed(3, 0, 0.011), 90, Verdict.UNDECIDED, "3 requests in 90 s; 20 are needed"),
        (GOOD, Observed(), 60, Verdict.UNDECIDED, "0 requests"),
        (GOOD, Observed(100, 0, 0.100), 5, Verdict.REGRESSED, "a run takes p95 100 ms; before it took p95 10 ms"),
        (GOOD, Observed(100, 0, 0.030), 60, Verdict.HEALTHY, "100 requests"),
        (GOOD, Observed(100, 3, 0.010), 5, Verdict.REGRESSED, "3 of 100 requests failed (3.0%)"),
        (GOOD, Observed(100, 2, 0.010), 60, Verdict.HEALTHY, "2 failed"),
        (Observed(100, 10, 0.01), Observed(100, 11, 0.01), 60, Verdict.HEALTHY, "11 failed"),
        (GOOD, Observed(19, 19, 9.0), 5, Verdict.UNDECIDED, "5 of 60 s"),
        # Tiny models: four times next to nothing is nothing.
        (Observed(1000, 0, 0.00005), Observed(1000, 0, 0.0002), 60, Verdict.HEALTHY, "p95 0.2 ms"),
        (Observed(1000, 0, 0.00005), Observed(1000, 0, 0.02), 60, Verdict.REGRESSED, "a run takes"),
        # One long run of 20 on a busy machine is not a slow release; a longer median, or a tail of many runs, is.
        (Observed(20, 0, 0.01, 0.004), Observed(20, 0, 0.09, 0.004), 60, Verdict.HEALTHY, "p95 90 ms"),
        (Observed(20, 0, 0.01, 0.004), Observed(20, 0, 0.09, 0.04), 60, Verdict.REGRESSED, "a run takes p95 90 ms"),
        (Observed(20, 0, 0.001, 0.0001), Observed(20, 0, 0.09, 0.0019), 60, Verdict.HEALTHY, "p95 90 ms"),
        (Observed(400, 0, 0.01, 0.004), Observed(400, 0, 0.09, 0.004), 60, Verdict.REGRESSED, "a run takes p95 90 ms"),
        # Nothing to compare with: the first release of a model.
        (Observed(), Observed(1000, 0, 5.0), 60, Verdict.HEALTHY, "p95 5e+03 ms"),
        (Observed(), Observed(1000, 500, 5.0), 60, Verdict.REGRESSED, "500 of 1000"),
    ],
)
def test_a_release_is_judged(before: Observed, now: Observed, elapsed_s: float, verdict: Verdict, reason: str) -> None:
    found = judge_health(before, now, elapsed_s, RULE)
    assert found.verdict is verdict
    assert reason in found.reason


BOUNDED = Thresholds(window_s=60.0, max_p95_s=0.02, max_failure_share=0.01)


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (Observed(1000, 0, 0.021), "a run takes p95 21 ms; its signed bound here is 20 ms"),
        (Observed(20, 0, 0.09, 0.03), "a run takes p95 90 ms; its signed bound here is 20 ms"),
        (Observed(20, 0, 0.09, 0.004), ""),  # one long run of 20 on a busy machine
        (Observed(400, 0, 0.09, 0.004), "a run takes p95 90 ms"),
        (Observed(19, 0, 9.0), ""),
        (Observed(1000, 10, 0.019), ""),
        (Observed(1000, 11, 0.019), "11 of 1000 requests failed (1.1%); its signed bound is 1.0%"),
    ],
)
def test_a_release_is_held_to_its_own_bounds_with_nothing_before_it(now: Observed, reason: str) -> None:
    found = judge_health(Observed(), now, 5, BOUNDED)
    assert (found.verdict is Verdict.REGRESSED) == bool(reason)
    assert reason in found.reason


def test_a_model_that_a_release_brings_is_not_held_to_the_bounds_of_the_whole() -> None:
    metrics = ModelMetrics()
    metrics.answered_requests = 100
    metrics.run_time.record(0.05, 100)
    slow = RunRecord(metrics, whole_life=True)
    assert judge_all([Compared("", None, slow)], 60, BOUNDED).verdict is Verdict.REGRESSED
    fast = RunRecord(ModelMetrics())
    compared = [Compared("", None, fast), Compared("reader/read", None, slow)]
    assert judge_all(compared, 60, BOUNDED).verdict is Verdict.UNDECIDED


@pytest.mark.parametrize(("profile", "bound_s"), [("rpi5", 0.04), ("jetson-orin", 0.02), ("x86-avx2", 0.02)])
def test_a_bound_of_run_times_is_that_of_the_profile_else_of_all_others(profile: str, bound_s: float) -> None:
    bounds = ReleaseBounds({"rpi5": 40.0, "*": 20.0})
    assert thresholds_of(UpdateSettings(root_file=""), bounds, profile).max_p95_s == bound_s
    assert thresholds_of(UpdateSettings(root_file=""), None, profile).max_p95_s is None


OBSERVED = st.builds(
    lambda requests, share, p95: Observed(requests, int(requests * share), p95 if requests else None),
    st.integers(0, 5000), st.floats(0, 1), st.floats(1e-5, 10),
)  # fmt: skip


@given(OBSERVED, st.floats(0, 300))
def test_a_release_that_does_exactly_as_well_as_before_is_never_a_regression(
    observed: Observed, elapsed_s: float
) -> None:
    assert judge_health(observed, observed, elapsed_s, RULE).verdict is not Verdict.REGRESSED


@given(OBSERVED, OBSERVED, st.floats(0, 300))
def test_too_few_requests_decide_nothing(before: Observed, now: Observed, elapsed_s: float) -> None:
    found = judge_health(before, now, elapsed_s, RULE)
    assert found.verdict is Verdict.UNDECIDED or now.requests >= LEAST_TO_JUDGE
    assert found.verdict is not Verdict.HEALTHY or elapsed_s >= RULE.window_s


@given(OBSERVED, OBSERVED, st.integers(1, 50))
def test_more_failures_never_make_it_healthier(before: Observed, now: Observed, more: int) -> None:
    worse = Observed(now.requests, min(now.failures + more, now.requests), now.p95_s)
    if judge_health(before, now, 60, RULE).verdict is Verdict.REGRESSED:
        assert judge_health(before, worse, 60, RULE).verdict is Verdict.REGRESSED


def copies(**changes: float) -> Mirrored:
    usual = {"requests": 100, "current_p95_s": 0.010, "candidate_p95_s": 0.011}
    return Mirrored(**{**usual, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seen", "agreement", "elapsed_s", "verdict", "reason"),
    [
        (copies(), None, 60, Verdict.HEALTHY, "of 100 copies 0 were answered differently and 0 failed"),
        (copies(), None, 59, Verdict.UNDECIDED, "59 of 60 s observed"),
        (copies(requests=3), None, 90, Verdict.UNDECIDED, "20 are needed"),
        (copies(different=2), None, 60, Verdict.HEALTHY, "2 were answered differently"),
        (copies(different=3), None, 1, Verdict.REGRESSED, "of 100 copies 3 were answered differently"),
        (copies(failures=3), 0.5, 1, Verdict.REGRESSED, "3 failed; 2.0% are allowed"),
        (copies(candidate_p95_s=0.1), None, 1, Verdict.REGRESSED, "a run takes p95 100 ms"),
        # A classifier that was trained again answers differently, and means the same.
        (copies(different=100, top1_rows=200, top1_agreements=190), 0.9, 60, Verdict.HEALTHY, "in 190 of 200 rows"),
        (
            copies(top1_rows=9, top1_agreements=9, top1_distinct=7),
            0.9,
            60,
            Verdict.HEALTHY,
            "9 of 9 rows (7 different)",
        ),
        # A quiet camera: agreeing on one class says little, and holds no release up.
        (
            copies(top1_rows=99, top1_agreements=99, top1_distinct=1),
            0.9,
            60,
            Verdict.HEALTHY,
            "which any release could",
        ),
        (copies(different=100, top1_rows=200, top1_agreements=179), 0.9, 1, Verdict.REGRESSED, "wanted 90.0%"),
        (copies(different=9, requests=10, top1_rows=10), 0.9, 1, Verdict.UNDECIDED, "1 of 60 s observed"),
    ],
)
def test_a_release_is_judged_by_copies_of_requests(
    seen: Mirrored, agreement: float | None, elapsed_s: float, verdict: Verdict, reason: str
) -> None:
    judgement = judge_copies(seen, elapsed_s, RULE, agreement)
    assert (judgement.verdict, reason in judgement.reason) == (verdict, True), judgement


def test_a_model_that_a_release_brings_is_judged_beside_the_same_model_of_the_release_before() -> None:
    def runs(requests: int, failures: int = 0) -> RunRecord:
        metrics = ModelMetrics()
        metrics.answered_requests = requests - failures
        metrics.refusals[RunFailed.code] = failures
        for _ in range(requests):
            metrics.run_time.record(0.01)
        return RunRecord(metrics, whole_life=True)

    whole = Compared("", runs(100), runs(100))
    good, bad = Compared("reader/detect", runs(100), runs(100)), Compared("reader/read", runs(100), runs(100, 50))
    thresholds = Thresholds(window_s=1.0)
    assert judge_all([whole, good], 1.0, thresholds).verdict is Verdict.HEALTHY
    judgement = judge_all([whole, good, bad], 0.5, thresholds)
    assert judgement.verdict is Verdict.REGRESSED
    assert judgement.reason.startswith("reader/read: 50 of 100 requests failed")
    assert judge_all([whole, Compared("reader/new", None, runs(0))], 1.0, thresholds).verdict is Verdict.HEALTHY


def test_the_figures_that_are_compared_are_shown_before_and_now_with_units() -> None:
    before, now, step = ModelMetrics(), ModelMetrics(), ModelMetrics()
    compared = [Compared("", RunRecord(before), RunRecord(now)), Compared("detector", None, RunRecord(step))]
    for metrics, run_s in ((before, 0.004), (now, 0.02)):
        for _ in range(30):
            metrics.answered(queue_s=0.0, run_s=run_s)

    shown = observed_figures(compared)

    assert shown[:2] == [("requests", "30", "30"), ("failures", "0", "0")]
    assert [name for name, *_ in shown[2:4]] == ["run time, median", "run time, p95"]
    assert all(each.endswith(" ms") for _, *both in shown[2:4] for each in both)
    assert shown[4] == ("detector: requests", "", "0")
    assert shown[-1] == ("detector: run time, p95", "", "")
