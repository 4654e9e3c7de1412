"""How many replicas the forecast delay and the requests ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from edge_runtime.ray_serve import autoscaling
from edge_runtime.ray_serve.autoscaler import FORECAST, RUN, DelayPolicy, wanted_replicas


@pytest.mark.parametrize(
    ("running", "target", "wait_ms", "ongoing", "wanted"),
    [
        (1, 1, 10, 1, 1),  # quiet
        (1, 1, 101, 1, 2),  # late: one more
        (2, 2, 150, 1, 3),  # as many more as the delay is over the target
        (2, 2, 5_000, 1, 4),  # a queue that grows: twice as many at once
        (2, 2, 80, 1, 2),  # near the target: as it is
        (2, 2, 10, 1, 1),  # one replica alone would be at a fifth of the target
        (2, 2, 30, 1, 2),  # one alone would be at three fifths
        (1, 1, 0, 1_000, 16),  # many requests, each quick
        (4, 4, 0, 200, 4),  # requests hold what the delay would take away
        (1, 2, 500, 1, 2),  # one starts: no third for the same queue
        (1, 2, 10, 1, 2),  # one starts: it is not taken away before it has answered
    ],
)
def test_replicas_follow_the_delay_and_the_requests(
    running: int, target: int, wait_ms: float, ongoing: float, wanted: int
) -> None:
    assert wanted_replicas(running, target, wait_ms, 100.0, ongoing=ongoing, target_ongoing=64) == wanted


@dataclass
class Context:
    """The facts that Serve's controller gives a policy."""

    aggregated_metrics: dict[str, dict[str, float]] | None
    current_num_replicas: int = 1
    target_num_replicas: int = 1
    total_num_requests: float = 1.0
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 3
    config: Any = field(default_factory=lambda: Config())  # noqa: PLW0108 (its class follows)


class Config:
    """An AutoscalingConfig."""

    def get_target_ongoing_requests(self) -> float:
        return 64.0


def test_policy_takes_the_mean_of_its_replicas_forecasts() -> None:
    told = {FORECAST: {"first": 0.0, "second": 240.0}}
    assert DelayPolicy(delay_ms=100.0)(Context(told, current_num_replicas=2, target_num_replicas=2)) == (3, {})


@pytest.mark.parametrize(
    ("forecast_ms", "run_ms", "running", "wanted"),
    [
        (120.0, 120.0, 2, 1),  # nobody waits: what is left is a run, which two make no shorter
        (290.0, 120.0, 2, 2),
        (310.0, 120.0, 1, 2),
        (700.0, 400.0, 1, 1),  # a run alone takes longer than the target: a wait of one more is no reason for replicas
        (900.0, 400.0, 1, 2),
    ],
)
def test_policy_looks_at_the_wait_behind_a_run(forecast_ms: float, run_ms: float, running: int, wanted: int) -> None:
    told = {FORECAST: {"each": forecast_ms}, RUN: {"each": run_ms}}
    context = Context(told, current_num_replicas=running, target_num_replicas=running)
    assert DelayPolicy(delay_ms=300.0)(context)[0] == wanted


def test_policy_keeps_to_serves_bounds() -> None:
    assert (
        DelayPolicy(delay_ms=1.0)(Context({FORECAST: {"first": 9e9}}, current_num_replicas=3, target_num_replicas=3))[0]
        == 3
    )
    assert DelayPolicy(delay_ms=1.0)(Context(None, total_num_requests=0.0))[0] == 1


def test_autoscaling_names_the_policy_that_serve_imports() -> None:
    config = autoscaling(max_replicas=4, delay_ms=100.0, upscale_delay_s=5.0)
    module, _, name = config["policy"]["policy_function"].partition(":")
    assert (module, name) == (DelayPolicy.__module__, DelayPolicy.__name__)
    assert DelayPolicy(**config["policy"]["policy_kwargs"])
    assert (config["max_replicas"], config["upscale_delay_s"]) == (4, 5.0)
