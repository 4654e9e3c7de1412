"""ONNX Runtime on a GPU by CUDA: the same promises, and a daemon whose profile asks for it. Needs onnxruntime-gpu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from bench.makers import Graph
from edge_runtime.backends.base import Instance, LoadOptions, Probe
from edge_runtime.backends.registry import backend
from edge_runtime.config.settings import Config
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.errors import BackendError
from edge_runtime.testing import BackendContract, BackendKit
from edge_runtime.testing.backend_kit import mlp_answer, mlp_input
from tests.contract.running_daemon import put_model
from tests.models import onnx_models

CORRUPT = (b"", b"\x00", b"not a model at all", b"\x08\x08\x3a\xff\xff\xff\xff\x0f")


class OnCuda:
    """The backend, asked for the first GPU."""

    def __init__(self) -> None:
        self._backend = backend("onnxruntime")
        self.declaration = self._backend.declaration

    def probe(self) -> Probe:
        found = self._backend.probe()
        return replace(found, devices=tuple(each.replace("CUDA", "CUDA:0") for each in found.devices))

    def load(self, artifact: Path, options: LoadOptions) -> Instance:
        device = "CUDA" if options.device in ("", "CPU") else options.device
        return self._backend.load(artifact, replace(options, device=device))


def why_not(folder: Path) -> str:
    """Why ONNX Runtime cannot use a GPU here, "" where it can."""
    if "CUDA" not in backend("onnxruntime").probe().devices:
        return "this ONNX Runtime was built without CUDA"
    try:
        OnCuda().load(onnx_models.mlp(folder), LoadOptions()).close()
    except BackendError as error:
        return error.message
    return ""


@pytest.fixture(scope="module", autouse=True)
def _needs_a_gpu(tmp_path_factory: pytest.TempPathFactory) -> None:
    if reason := why_not(tmp_path_factory.mktemp("tried")):
        pytest.skip(reason)


def _made(model: str, folder: Path, **arguments: Any) -> Path | None:
    """A GPU has no text."""
    return None if arguments.get("datatype") == "BYTES" else getattr(onnx_models, model)(folder, **arguments)


def convolution(folder: Path) -> Path:
    """x FP32 [rows, 64, 16, 16] -> y, by 64 filters of 3x3."""
    graph = Graph(seed=1)
    graph.save(folder / "model.onnx", (64, 16, 16), graph.conv("x", 64, 64, 3), 64, 16, 16)
    return folder / "model.onnx"


@pytest.mark.gpu
@pytest.mark.long
class TestOnCuda(BackendContract):
    @pytest.fixture
    def kit(self) -> BackendKit:
        return BackendKit("onnxruntime on CUDA", OnCuda(), _made, CORRUPT, has_bytes=False, device="CUDA:0")


@pytest.mark.gpu
@pytest.mark.long
def test_convolutions_stay_in_f32_unless_tf32_is_asked_for(tmp_path: Path) -> None:
    artifact, x = convolution(tmp_path), np.random.default_rng(0).normal(size=(1, 64, 16, 16)).astype(np.float32)
    found = {}
    for device, extra in (("CPU", {}), ("CUDA", {}), ("CUDA", {"use_tf32": "1"})):
        instance = backend("onnxruntime").load(artifact, LoadOptions(device=device, extra=extra))
        found[device, bool(extra)] = instance.run({"x": x})[0]
        instance.close()
    off = {key: float(np.abs(each - found["CPU", False]).max()) for key, each in found.items()}
    assert off["CUDA", False] < 1e-4 < off["CUDA", True], off


@pytest.mark.gpu
@pytest.mark.long
def test_a_daemon_on_a_machine_with_a_gpu_serves_by_it(tmp_path: Path) -> None:
    put_model(tmp_path / "models", "m", onnx_models.mlp)
    config = Config(state=str(tmp_path / "state"), watch=False, calibrate=False, profile="nvidia-dgpu")
    with Runtime(tmp_path / "models", config=config) as runtime:
        for rows in (1, 4, 3):
            x = mlp_input(rows)
            np.testing.assert_allclose(runtime.infer("m", {"x": x})["y"], mlp_answer(x), rtol=1e-3, atol=1e-3)
        (row,) = runtime.models()
    assert (row["backend"], row["device"]) == ("onnxruntime", "CUDA:0"), row["reason"]
