"""Scales a deployment by the forecast delay of its replicas as well as by its requests.

A model of 50 ms is late long before Serve's count of requests says so, and one of 50 us never is. Pure. Thread: any.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

FORECAST, RUN = "forecast_delay_ms", "run_ms"
"""The statistics that each replica tells Serve's controller (`Replica.record_autoscaling_stats`): how long a request
would take that came now, and what of it is the model's own run, which no further replica makes shorter."""

DOWN_SHARE = 0.5
"""Replicas are taken away where the wait would stay below this share of its room on those that are left."""


def autoscaling(
    *, min_replicas: int = 1, max_replicas: int, delay_ms: float, target_ongoing_requests: float = 64, **options: Any
) -> dict[str, Any]:
    """Make the `autoscaling_config` of a deployment.

    delay_ms: replicas are added while a request that came now would take longer; half of the timeout that callers
    have is a good one. Where a run alone takes most of it, a wait of one more run adds none. target_ongoing_requests:
    of a replica, by which they are added too. options: of Serve's AutoscalingConfig, such as `upscale_delay_s`.
    """
    return {
        "min_replicas": min_replicas,
        "max_replicas": max_replicas,
        "target_ongoing_requests": target_ongoing_requests,
        **options,
        "policy": {
            "policy_function": "edge_runtime.ray_serve.autoscaler:DelayPolicy",
            "policy_kwargs": {"delay_ms": delay_ms},
        },
    }


def wanted_replicas(
    running: int, target: int, wait_ms: float, room_ms: float, *, ongoing: float, target_ongoing: float
) -> int:
    """Return how many replicas these figures ask for, before Serve's bounds.

    running: those that take requests. target: those that were wanted last, of which some may still start. wait_ms: the
    mean of the running; a queue that grows has no end, so at most twice as many are added at once. room_ms: what a
    request may wait.
    """
    by_requests = math.ceil(ongoing / target_ongoing)
    share = wait_ms / room_ms
    if share > 1:
        by_delay = max(math.ceil(running * min(share, 2.0)), target)
    elif running >= target and share * running < DOWN_SHARE * (target - 1):
        by_delay = target - 1
    else:
        by_delay = target
    return max(by_requests, by_delay)


class DelayPolicy:
    """The policy as Serve's controller calls it."""

    def __init__(self, *, delay_ms: float) -> None:
        self._delay_ms = delay_ms

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return how many replicas are wanted, and the state of the policy, which has none."""
        told = context.aggregated_metrics or {}
        forecast_ms, run_ms = (_mean(told.get(name, {}).values()) for name in (FORECAST, RUN))
        wanted = wanted_replicas(
            max(context.current_num_replicas, 1),
            context.target_num_replicas,
            max(forecast_ms - run_ms, 0.0),
            max(self._delay_ms - run_ms, run_ms),
            ongoing=context.total_num_requests,
            target_ongoing=context.config.get_target_ongoing_requests(),
        )
        lowest, highest = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(max(wanted, lowest), highest), {}


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values) if values else 0.0
