"""What would be tried to load a version is known without loading it: backends in the profile's order, with options."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from edge_runtime.backends.registry import backend
from edge_runtime.errors import LoadFailed
from edge_runtime.profiles.profile import BackendChoice
from edge_runtime.repository.folder import ModelFolder, scan
from edge_runtime.scheduling.dispatcher import Dispatcher
from edge_runtime.serving.loading import ServingLimits, VersionLoader
from edge_runtime.telemetry.metrics import Metrics
from tests.fakes.clock import FakeClock
from tests.models.onnx_models import mlp

CHOICES = (BackendChoice(name="openvino", precision="bf16"), BackendChoice(name="onnxruntime", threads=2))


def loader() -> VersionLoader:
    clock = FakeClock()
    return VersionLoader(
        choices=CHOICES,
        backend=cache(backend),
        limits=ServingLimits(cores=4, max_batch_rows=8, queue_rows=8, queue_bytes=1 << 20),
        dispatcher=Dispatcher(clock, 4, 0.05),
        clock=clock,
        metrics=Metrics(),
    )


def model(folder: Path, settings: str = "") -> ModelFolder:
    mlp(folder / "mlp" / "1")
    (folder / "mlp" / "model.toml").write_text(settings)
    return scan(folder).models["mlp"]


def test_candidates_are_in_the_profiles_order_with_its_options(tmp_path: Path) -> None:
    folder = model(tmp_path)
    found = loader().candidates(folder, folder.versions[1])
    assert [(each.backend, each.artifact) for each in found] == [
        (name, tmp_path / "mlp" / "1" / "model.onnx") for name in ("openvino", "onnxruntime")
    ]
    assert [(each.options.precision, each.options.threads, each.options.concurrency) for each in found] == [
        ("bf16", 1, 4),
        ("", 2, 2),
    ]


def test_a_models_own_settings_come_before_the_profiles(tmp_path: Path) -> None:
    folder = model(tmp_path, "backend = 'onnxruntime'\nthreads = 3\ninstances = 1\n")
    (only,) = loader().candidates(folder, folder.versions[1])
    assert (only.backend, only.options.threads, only.options.concurrency) == ("onnxruntime", 3, 1)


def test_a_backend_that_is_not_there_leaves_no_candidate_and_says_why(tmp_path: Path) -> None:
    folder = model(tmp_path, "backend = 'tensorflow'\n")
    with pytest.raises(LoadFailed, match="there is no backend 'tensorflow'"):
        loader().candidates(folder, folder.versions[1])
