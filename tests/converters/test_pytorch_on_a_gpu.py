# ruff: noqa: E402  (what follows imports torch, and is left out where there is none)
"""PyTorch on a GPU: the same promises as on a CPU, and a daemon whose profile asks for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch", reason="torch is not installed; make test-converters has it")

from edge_runtime.backends.base import Backend, Instance, LoadOptions, Probe
from edge_runtime.backends.registry import backend
from edge_runtime.config.settings import Config
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.testing import BackendContract, BackendKit
from edge_runtime.testing.backend_kit import mlp_answer, mlp_input
from tests.converters.pytorch_models import DeclaringBackend, program, save_script, script

WHY_NOT = "" if torch.cuda.is_available() else f"PyTorch {torch.__version__} finds no GPU"

pytestmark = [pytest.mark.gpu, pytest.mark.long, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

CORRUPT = (b"", b"\x00", b"\x80\x02cos\nsystem\n", b"PK\x03\x04 and no more", b"PK\x05\x06" + bytes(18))
UNSAVED = () if torch.__version__ >= "2.12" else ("UINT32", "UINT64")
"""Datatypes that an older PyTorch cannot write into an exported program."""
DECLARING = DeclaringBackend()


class OnCuda:
    """A backend, asked for the first GPU."""

    def __init__(self, one: Backend) -> None:
        self._backend = one
        self.declaration = one.declaration

    def probe(self) -> Probe:
        return self._backend.probe()

    def load(self, artifact: Path, options: LoadOptions) -> Instance:
        device = "CUDA" if options.device in ("", "CPU") else options.device
        return self._backend.load(artifact, replace(options, device=device))


def _without_bytes(make: Callable[..., Path]) -> Callable[..., Path | None]:
    """A tensor of PyTorch has no text."""

    def made(model: str, folder: Path, **arguments: Any) -> Path | None:
        if make is program and arguments.get("datatype") in UNSAVED:
            return None
        return None if arguments.get("datatype") == "BYTES" else make(model, folder, **arguments)

    return made


KITS = tuple(
    BackendKit(
        label, OnCuda(one), _without_bytes(make), CORRUPT, has_bytes=False, has_bound=False, device="CUDA:0",
        measures_memory=False,  # the weights are in the GPU's
    )
    for label, one, make in (("torchscript", DECLARING, DECLARING.make), ("program", backend("pytorch"), program))
)  # fmt: skip


class TestPyTorchOnCuda(BackendContract):
    @pytest.fixture(params=KITS, ids=lambda kit: kit.label)
    def kit(self, request: pytest.FixtureRequest) -> BackendKit:
        found: BackendKit = request.param
        return found


def test_convolutions_stay_in_f32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = torch.nn.Conv2d(64, 64, 3).eval()
    artifact = save_script(module, tmp_path, torch.zeros(1, 64, 16, 16))
    x = np.random.default_rng(0).normal(size=(1, 64, 16, 16)).astype(np.float32)
    declared = ModelSpec((TensorSpec("INPUT__0", "FP32", (-1, 64, 16, 16)),), ())
    found = []
    for device in ("CPU", "CUDA"):
        instance = backend("pytorch").load(artifact, LoadOptions(device=device, declared=declared))
        found.append(instance.run({"INPUT__0": x})[0])
        instance.close()
    np.testing.assert_allclose(found[1], found[0], atol=1e-4)


def test_a_daemon_on_a_machine_with_a_gpu_serves_modules_by_it(tmp_path: Path) -> None:
    models = tmp_path / "models"
    script("mlp", models / "script" / "1")
    (models / "script" / "model.toml").write_text("[input.x]\nshape = [-1, 16]\n")
    program("mlp", models / "program" / "1")
    config = Config(state=str(tmp_path / "state"), watch=False, calibrate=False, profile="nvidia-dgpu")
    with Runtime(models, config=config) as runtime:
        for name in ("script", "program"):
            for rows in (1, 4, 3):
                x = mlp_input(rows)
                np.testing.assert_allclose(runtime.infer(name, {"x": x})["y"], mlp_answer(x), rtol=1e-3, atol=1e-3)
        rows_of = {row["name"]: row for row in runtime.models()}
    assert {(row["backend"], row["device"]) for row in rows_of.values()} == {("pytorch", "CUDA:0")}, rows_of
