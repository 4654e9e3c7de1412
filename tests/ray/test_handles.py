"""A deployment of `ray_serve.deployment`, asked by its handle in a real Ray Serve."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed; make test-ray has it")

from ray import serve

from edge_runtime import Runtime
from edge_runtime.errors import Cancelled, DeadlineExceeded, DeadlineUnmeetable, ModelNotFound, TensorMismatch
from edge_runtime.ray_serve import Instant, infer, infer_async
from tests.models import onnx_models
from tests.ray.conftest import Deploy, sleeping_model

ROWS = np.random.default_rng(0).normal(size=(2, 16)).astype(np.float32)
ONE = np.zeros((1, 4), np.float32)
ENOUGH_MS = 120_000.0


async def counted(handle: Any) -> dict[str, Any]:
    """The metrics of `sleeper` in the only replica."""
    status = await handle.status.remote()
    found: dict[str, Any] = status["metrics"]["models"]["sleeper"]
    return found


async def waiting(handle: Any) -> float:
    """Rows in its queue."""
    return float((await counted(handle))["queue_rows"])


def test_answer_by_a_handle_is_that_of_the_runtime(deploy: Deploy, models: Path) -> None:
    answer = infer(deploy(models), "mlp", {"x": ROWS}, timeout_ms=ENOUGH_MS)
    with Runtime(models) as runtime:
        np.testing.assert_array_equal(answer["y"], runtime.infer("mlp", {"x": ROWS})["y"])
    assert (answer.model, answer.version) == ("mlp", 1)


def test_errors_of_a_replica_are_the_callers_own(deploy: Deploy, models: Path) -> None:
    handle = deploy(models)
    with pytest.raises(ModelNotFound) as not_found:
        infer(handle, "absent", {"x": ROWS})
    with pytest.raises(TensorMismatch):
        infer(handle, "mlp", {"x": ROWS[:, :3]})
    assert type(not_found.value) is ModelNotFound


def test_deadline_counts_from_where_the_request_began(deploy: Deploy, sleeper: Path) -> None:
    handle = deploy(sleeper)
    infer(handle, "sleeper", {"x": ONE})
    now = Instant.now()
    began = Instant(now.boot, now.monotonic_s - 1.0, now.utc_s - 1.0)
    with pytest.raises((DeadlineUnmeetable, DeadlineExceeded)):  # the replica's word, or the caller's own
        infer(handle, "sleeper", {"x": ONE}, timeout_ms=1_010.0, began=began)
    assert infer(handle, "sleeper", {"x": ONE}, timeout_ms=ENOUGH_MS, began=began)["y"].shape == (1, 4)


def test_cancelled_response_leaves_the_queue(deploy: Deploy, tmp_path: Path) -> None:
    sleeping_model(tmp_path / "models", 2.0)
    handle = deploy(tmp_path / "models")

    async def scenario() -> dict[str, int]:
        def ask() -> asyncio.Task[Any]:
            return asyncio.create_task(infer_async(handle, "sleeper", {"x": ONE}))

        first = [ask() for _ in range(8)]  # one runs alone, then four
        while await waiting(handle) < 7:
            pass
        later = [ask() for _ in range(8)]
        while await waiting(handle) < 11:
            pass
        for each in later:
            each.cancel()
        await asyncio.gather(*later, return_exceptions=True)
        assert all(each.cancelled() for each in later)
        while await waiting(handle) > 7:
            pass
        answers = await asyncio.gather(*first)
        assert [each["y"].shape for each in answers] == [(1, 4)] * 8
        return dict((await counted(handle))["refused"])

    assert asyncio.run(scenario()) == {Cancelled.code: 8}


def test_requests_of_a_killed_replica_are_answered_by_another(deploy: Deploy, sleeper: Path) -> None:
    handle = deploy(sleeper, num_replicas=2, ray_actor_options={"num_cpus": 0.5})

    async def scenario() -> list[Any]:
        pids = set()
        while len(pids) < 2:
            pids.add((await handle.status.remote())["pid"])
        asked = [
            asyncio.create_task(infer_async(handle, "sleeper", {"x": ONE}, timeout_ms=ENOUGH_MS)) for _ in range(40)
        ]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        os.kill(pids.pop(), signal.SIGKILL)
        return await asyncio.gather(*asked)

    assert [each["y"].shape for each in asyncio.run(scenario())] == [(1, 4)] * 40


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


def test_multiplexed_replica_loads_the_models_that_are_asked_for(deploy: Deploy, models: Path) -> None:
    onnx_models.mlp(models / "other" / "1")
    handle = deploy(models, models_per_replica=1)

    def ready() -> list[str]:
        return [each["name"] for each in handle.status.remote().result()["models"] if each["state"] == "ready"]

    assert ready() == []
    for name in ("mlp", "other", "mlp"):
        assert infer(handle, name, {"x": ROWS}, multiplexed=True).model == name
        assert ready() == [name]


def test_replica_has_the_cores_that_ray_gives_it(deploy: Deploy, models: Path) -> None:
    assert deploy(models, ray_actor_options={"num_cpus": 1}).status.remote().result()["cores"] == 1


def test_deleted_application_ends_its_hosts(deploy: Deploy, sleeper: Path) -> None:
    replica = psutil.Process(deploy(sleeper).status.remote().result()["pid"])
    children = replica.children(recursive=True)
    assert any("prepare_hosts" in " ".join(each.cmdline()) for each in children)
    serve.delete("models")
    assert psutil.wait_procs([replica, *children], timeout=60.0)[1] == []
