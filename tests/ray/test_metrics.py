"""What a replica tells of itself to whoever scrapes Ray's metrics."""

from __future__ import annotations

import urllib.request
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed; make test-ray has it")

import ray

from edge_runtime.ray_serve import infer
from tests.ray.conftest import ENOUGH_MS, ROWS, until

REQUESTS, DELAY = "ray_edge_runtime_requests_total{", "ray_edge_runtime_forecast_delay_ms{"


def scraped() -> list[str]:
    """The lines of Ray's metrics of this machine that are ours, as Prometheus gets them."""
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=60) as response:
        text = response.read().decode()
    return [line for line in text.splitlines() if line.startswith("ray_edge_runtime_")]


def test_metrics_are_exported_by_ray(served: Any) -> None:
    for _ in range(3):
        infer(served, "mlp", {"x": ROWS}, timeout_ms=ENOUGH_MS)

    def exported(name: str, *tags: str) -> list[str]:
        return [line for line in scraped() if line.startswith(name) and all(each in line for each in tags)]

    until(lambda: any(each.endswith(" 3.0") for each in exported(REQUESTS, 'model="mlp"', 'ending="answered"')))
    until(lambda: bool(exported(DELAY, 'model="sleeper"')))
