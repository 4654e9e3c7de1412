"""Two replicas of a folder in Ray Serve, under load: one is killed, then all are redeployed, and no request is lost.

`make demo-ray`; exit status 0 when every request was answered.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from demo.ray_cluster import running_ray

MODELS = Path(__file__).parent / "models"
CALLERS = 8
LEAST = 100
"""Requests of each part, at least."""

TIMEOUT_MS = 120_000.0


def main() -> int:
    """Show it, and return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder, "models")
        shutil.copytree(MODELS / "digits", models / "digits")
        print("starting Ray and Serve on this machine: half a minute", flush=True)
        with running_ray() as proxy:
            return _show(models, proxy)


def _show(models: Path, proxy: str) -> int:
    from ray import serve

    from edge_runtime.config.settings import Config
    from edge_runtime.ray_serve import deployment

    config = Config(state=str(models.parent / "state"), calibrate=False)

    def deploy(cpus: float) -> Any:
        app = deployment(models, config=config, num_replicas=2, ray_actor_options={"num_cpus": cpus})
        return serve.run(app.bind(), name="models")

    handle = deploy(0.5)
    print(f"two replicas serve {models.name}/; {proxy}/v2/models/digits answers HTTP", flush=True)

    def kill() -> None:
        pid = handle.status.remote().result()["pid"]
        print(f"  kill -9 {pid}, a replica", flush=True)
        os.kill(pid, signal.SIGKILL)

    def redeploy() -> None:
        print("  serve.run with other options: each replica is replaced", flush=True)
        deploy(0.6)

    lost = 0
    for name, event in (("nothing happens", lambda: None), ("a replica is killed", kill), ("a redeployment", redeploy)):
        print(f"{name}:", flush=True)
        answered, errors = asyncio.run(_load(handle, event))
        lost += len(errors)
        print(f"  {answered} answered, {len(errors)} lost {sorted(set(errors)) or ''}", flush=True)
    print("no request was lost" if not lost else f"{lost} requests were lost", flush=True)
    return 1 if lost else 0


async def _load(handle: Any, event: Callable[[], None]) -> tuple[int, list[str]]:
    """Requests of several callers until an event in their midst is over; how many were answered, and the errors."""
    from edge_runtime.ray_serve import infer_async

    answered, errors = 0, list[str]()
    image = np.zeros((1, 64), np.float32)
    happening: asyncio.Future[None] | None = None

    async def call() -> None:
        nonlocal answered, happening
        while answered < LEAST or happening is None or not happening.done():
            try:
                await infer_async(handle, "digits", {"image": image}, timeout_ms=TIMEOUT_MS)
                answered += 1
            except Exception as error:  # noqa: BLE001 (what was lost, and why, is what this shows)
                errors.append(f"{type(error).__name__}: {error}")
            if happening is None and answered >= LEAST / 4:
                happening = asyncio.get_running_loop().run_in_executor(None, event)

    await asyncio.gather(*(call() for _ in range(CALLERS)))
    return answered, errors


if __name__ == "__main__":
    sys.exit(main())
