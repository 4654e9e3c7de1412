"""One Ray cluster for all tests: its start takes half a minute. Each test has an application of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from demo.ray_cluster import RayNotStarted, running_ray
from edge_runtime.config.loading import configured
from tests.models import onnx_models, python_models

Deploy = Callable[..., Any]


@pytest.fixture(autouse=True)
def _no_leaks() -> None:
    """Ray's own threads, sockets and processes come and go with its cluster, which ends behind the last test."""


@pytest.fixture(scope="session")
def proxy() -> Iterator[str]:
    """The address of Serve's proxy."""
    with ExitStack() as ends:
        try:
            address = ends.enter_context(running_ray())
        except RayNotStarted as error:  # by a machine with much else to do
            pytest.skip(str(error))
        yield address


@pytest.fixture
def deploy(proxy: str, tmp_path: Path) -> Iterator[Deploy]:
    """Deploys a folder of models; returns the handle. The application ends with the test."""
    from ray import serve

    from edge_runtime.ray_serve import deployment

    def run(models: Path, **options: Any) -> Any:
        config = configured(calibrate=False, python_models=True, state=str(tmp_path / "state"))
        options = {"config": config, "ray_actor_options": {"num_cpus": 1}, **options}
        return serve.run(deployment(models, **options).bind(), name="models", route_prefix="/")

    yield run
    serve.delete("models")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with one small net, `mlp`."""
    onnx_models.mlp(tmp_path / "models" / "mlp" / "1")
    return tmp_path / "models"


@pytest.fixture
def sleeper(tmp_path: Path) -> Path:
    """A folder with `sleeper`, which takes 100 ms for at most 4 rows, as an accelerator would."""
    sleeping_model(tmp_path / "models")
    return tmp_path / "models"


def sleeping_model(models: Path, run_s: float = 0.1) -> Path:
    """x FP32 [rows, 4] -> y FP32 [rows, 4], after a sleep."""
    folder = models / "sleeper" / "1"
    body = f"import time\n\ndef infer(inputs):\n    time.sleep({run_s})\n    return {{'y': inputs['x']}}\n"
    path = python_models.write(folder, [("x", "FP32", [-1, 4])], [("y", "FP32", [-1, 4])], body)
    (models / "sleeper" / "model.toml").write_text("max_batch_rows = 4\n")
    return path


def body_of(response: Any) -> dict[str, Any]:
    """A response's JSON."""
    found: dict[str, Any] = json.loads(response.read())
    return found
