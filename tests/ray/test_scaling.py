"""Serve's autoscaler in a live cluster, by the forecasts that replicas tell it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed; make test-ray has it")

from ray import serve

from edge_runtime.ray_serve import autoscaling, infer_async
from tests.ray.conftest import ENOUGH_MS, LOOK_S, ONE, Deploy, until

QUICKLY = {"upscale_delay_s": 0.5, "downscale_delay_s": 1.0, "look_back_period_s": 10.5}


def states() -> dict[str, int]:
    """How many replicas are in each state."""
    return dict(serve.status().applications["models"].deployments["models"].replica_states)


def test_a_replica_is_added_while_requests_wait_and_taken_away_when_none_does(deploy: Deploy, sleeper: Path) -> None:
    handle = deploy(sleeper, autoscaling_config=autoscaling(max_replicas=2, delay_ms=300, **QUICKLY))

    async def scenario() -> None:
        are_two = asyncio.Event()

        async def ask_again() -> None:
            while not are_two.is_set():
                await infer_async(handle, "sleeper", {"x": ONE}, timeout_ms=ENOUGH_MS)

        asking = [asyncio.create_task(ask_again()) for _ in range(32)]
        while (await asyncio.to_thread(states)).get("RUNNING") != 2:  # noqa: ASYNC110 (of another process)
            await asyncio.sleep(LOOK_S)
        are_two.set()
        await asyncio.gather(*asking)

    asyncio.run(scenario())
    until(lambda: states() == {"RUNNING": 1})
