"""One Ray cluster for all tests: its start takes half a minute. Each test has an application of its own."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from demo.ray_cluster import RayNotStarted, running_ray
from edge_runtime.config.loading import configured
from edge_runtime.doors.http.settings import HttpSettings
from tests.contract.running_daemon import put_held_model
from tests.models import onnx_models, python_models

Deploy = Callable[..., Any]

ROWS = np.random.default_rng(0).normal(size=(2, 16)).astype(np.float32)
ONE = np.zeros((1, 4), np.float32)
ENOUGH_MS = 120_000.0
MAX_BODY_BYTES = 1 << 20
LOOK_S = 0.1
"""Between two looks at another process, each of which costs several of Ray's a call."""

INTERVALS = tuple(f"RAY_SERVE_{part}_AUTOSCALING_METRIC_PUSH_INTERVAL_S" for part in ("REPLICA", "HANDLE"))
"""Between what a replica tells the autoscaler, and a caller: 10 s else."""


@pytest.fixture(autouse=True)
def _no_leaks() -> None:
    """Ray's own threads, sockets and processes come and go with its cluster, which ends behind the last test."""


@pytest.fixture(scope="session")
def proxy() -> Iterator[str]:
    """The address of Serve's proxy."""
    with ExitStack() as ends:
        try:
            address = ends.enter_context(running_ray(environment=dict.fromkeys(INTERVALS, "0.5")))
        except RayNotStarted as error:  # by a machine with much else to do
            pytest.skip(str(error))
        yield address


@pytest.fixture
def deploy(proxy: str, tmp_path: Path) -> Iterator[Deploy]:
    """Deploys a folder of models; returns the handle. The application ends with the test."""
    with deploying(tmp_path / "state") as run:
        yield run


@pytest.fixture(scope="module")
def served(proxy: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The handle of one replica with `mlp` and `sleeper`, for the tests of a file that leave it as it is."""
    folder = tmp_path_factory.mktemp("served")
    onnx_models.mlp(folder / "models" / "mlp" / "1")
    sleeping_model(folder / "models")
    with deploying(folder / "state") as run:
        yield run(folder / "models")


@contextmanager
def deploying(state: Path) -> Iterator[Deploy]:
    """Deploy folders of models, one at a time, and end the last."""
    from ray import serve

    from edge_runtime.ray_serve import deployment

    def run(models: Path, **options: Any) -> Any:
        settings = HttpSettings(max_body_bytes=MAX_BODY_BYTES)
        config = configured(calibrate=False, python_models=True, state=str(state), http=settings)
        options = {"config": config, "ray_actor_options": {"num_cpus": 1}, **options}
        return serve.run(deployment(models, **options).bind(), name="models", route_prefix="/")

    try:
        yield run
    finally:
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


def sleeping_model(models: Path) -> Path:
    """x FP32 [rows, 4] -> y FP32 [rows, 4], after a sleep."""
    folder = models / "sleeper" / "1"
    body = "import time\n\ndef infer(inputs):\n    time.sleep(0.1)\n    return {'y': inputs['x']}\n"
    path = python_models.write(folder, [("x", "FP32", [-1, 4])], [("y", "FP32", [-1, 4])], body)
    (models / "sleeper" / "model.toml").write_text("max_batch_rows = 4\n")
    return path


def ask(proxy: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], dict[str, Any]]:
    """One request as curl would send it: status, headers in lower case, JSON.

    It goes in one piece: HAProxy sends a request again only if it had all of it when it sent it first.
    """
    address = urlsplit(proxy)
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"Host: {address.netloc}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    lines += [f"Content-Length: {len(data)}", "", ""]
    with socket.create_connection((address.hostname, address.port), timeout=120) as link:
        link.sendall("\r\n".join(lines).encode() + data)
        with http.client.HTTPResponse(link) as response:
            response.begin()
            text = response.read()
            told = {name.lower(): value for name, value in response.getheaders()}
    is_json = told.get("content-type") == "application/json"
    return response.status, told, json.loads(text) if is_json else {"text": text.decode()}


class Held:
    """A folder with `held`, x FP32 [rows, 1] -> y the same, whose runs wait for a gate that is a file, one by one."""

    def __init__(self, folder: Path) -> None:
        self.models = folder / "models"
        self._folder, self._gates = folder, itertools.count(1)
        self.close_gate()
        put_held_model(self.models, folder / "gate-{value}", "[warmup]\nruns = 0\n")

    def close_gate(self) -> None:
        """Have `row` be one that is not let through yet."""
        number = next(self._gates)
        self._gate, self.row = self._folder / f"gate-{number}", np.full((1, 1), number, np.float32)

    def open_gate(self) -> None:
        """Let all of this row through."""
        self._gate.touch()


def until(fact: Callable[[], bool]) -> None:
    """Wait for a fact of another process."""
    while not fact():
        time.sleep(LOOK_S)


async def look_until(handle: Any, fact: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Ask a replica for its status until a fact is so, and return that status."""
    while not fact(status := await handle.status.remote()):  # noqa: ASYNC110 (of another process)
        await asyncio.sleep(LOOK_S)
    found: dict[str, Any] = status
    return found


def waiting(status: dict[str, Any]) -> float:
    """Rows in the queue of a replica's `held`."""
    return float(status["metrics"]["models"]["held"]["queue_rows"])


def tensor(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The JSON of an inference with one input `x`."""
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": list(array.shape), "data": array.ravel().tolist()}]}
