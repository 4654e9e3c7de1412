"""What becomes of deployments: replicas killed, redeployed and ended, versions and models that come and go."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed; make test-ray has it")

from ray import serve

from edge_runtime.ray_serve import infer, infer_async
from tests.models import onnx_models
from tests.ray.conftest import ENOUGH_MS, ROWS, Deploy, Held, ask, look_until, tensor, waiting


def test_requests_of_a_killed_replica_are_answered_by_another(deploy: Deploy, tmp_path: Path, proxy: str) -> None:
    model = Held(tmp_path)
    handle = deploy(model.models, num_replicas=2, ray_actor_options={"num_cpus": 0.5})

    async def scenario() -> tuple[list[Any], list[Any]]:
        pids = set()
        while len(pids) < 2:
            pids.add((await handle.status.remote())["pid"])
        loop, body = asyncio.get_running_loop(), tensor(model.row)
        with ThreadPoolExecutor(8) as clients:
            by_http = [loop.run_in_executor(clients, ask, proxy, "/v2/models/held/infer", body) for _ in range(8)]
            by_handle = [
                asyncio.create_task(infer_async(handle, "held", {"x": model.row}, timeout_ms=ENOUGH_MS))
                for _ in range(8)
            ]
            status = await look_until(handle, lambda status: waiting(status) >= 3)
            os.kill(status["pid"], signal.SIGKILL)
            model.open_gate()
            return await asyncio.gather(*by_handle), await asyncio.gather(*by_http)

    answers, responses = asyncio.run(scenario())
    assert [each["y"].shape for each in answers] == [(1, 1)] * 8
    assert [status for status, _, _ in responses] == [200] * 8, responses


def test_redeployment_loses_no_request(deploy: Deploy, models: Path) -> None:
    handle = deploy(models, ray_actor_options={"num_cpus": 0.5})

    async def scenario() -> int:
        async def ask() -> int:
            count = 0
            while not deployed.done():
                await infer_async(handle, "mlp", {"x": ROWS}, timeout_ms=ENOUGH_MS)
                count += 1
            return count

        loop = asyncio.get_running_loop()
        deployed = loop.run_in_executor(None, lambda: deploy(models, ray_actor_options={"num_cpus": 0.6}))
        counts = await asyncio.gather(*(ask() for _ in range(4)))
        await deployed
        return sum(counts)

    assert asyncio.run(scenario()) > 0


def test_version_dropped_into_the_folder_answers(deploy: Deploy, models: Path) -> None:
    handle = deploy(models)
    onnx_models.mlp(models / "mlp" / "2")
    while infer(handle, "mlp", {"x": ROWS}, timeout_ms=ENOUGH_MS).version != 2:
        pass


def test_folder_with_a_model_that_fails_is_not_deployed(deploy: Deploy, models: Path) -> None:
    (models / "broken" / "1").mkdir(parents=True)
    (models / "broken" / "1" / "model.onnx").write_bytes(b"no net")
    with pytest.raises(RuntimeError):
        deploy(models, max_constructor_retry_count=1)


def test_multiplexed_replica_loads_the_models_that_are_asked_for(deploy: Deploy, models: Path, proxy: str) -> None:
    onnx_models.mlp(models / "other" / "1")
    handle = deploy(models, models_per_replica=1)

    def ready() -> list[str]:
        return [each["name"] for each in handle.status.remote().result()["models"] if each["state"] == "ready"]

    assert ready() == []
    for name in ("mlp", "other", "mlp"):
        assert infer(handle, name, {"x": ROWS}, multiplexed=True).model == name
        assert ready() == [name]
    assert ask(proxy, "/v2/models/other/infer", tensor(ROWS))[0] == 200
    assert ready() == ["other"]


def test_deleted_application_ends_its_hosts(deploy: Deploy, sleeper: Path) -> None:
    replica = psutil.Process(deploy(sleeper).status.remote().result()["pid"])
    children = replica.children(recursive=True)
    assert any("prepare_hosts" in " ".join(each.cmdline()) for each in children)
    serve.delete("models")
    assert psutil.wait_procs([replica, *children], timeout=60.0)[1] == []
