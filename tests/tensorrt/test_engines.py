"""From a model to its engine as a daemon does it, with the real library in the real child process, without a GPU."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.tensorrt import backend as tensorrt_backend
from edge_runtime.backends.tensorrt.backend import TensorRtBackend
from edge_runtime.backends.tensorrt.plan import Gpu
from edge_runtime.builds.build_store import BuildNews, BuildStore
from edge_runtime.config.settings import Config
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.errors import LoadFailed, NotBuiltYet
from edge_runtime.models.executor import Executor
from edge_runtime.models.model_table import ModelTable
from tests.contract.running_daemon import put_model
from tests.models import onnx_models
from tests.tensorrt.real_library import TARGET, gpus_there, needs_rtx

pytestmark = needs_rtx

no_gpu = pytest.mark.skipif(bool(gpus_there()), reason="here is a GPU: the engine would be loaded, not refused")


@contextmanager
def device(state: Path, gpu: Gpu = TARGET) -> Iterator[tuple[TensorRtBackend, SimpleQueue[BuildNews]]]:
    """A backend with its engines in a folder, and the news of its builds."""
    store = BuildStore(state, ModelTable(Executor()))
    try:
        yield TensorRtBackend(store, lambda: [gpu]), store.news
    finally:
        store.close()


def _end(news: SimpleQueue[BuildNews]) -> BuildNews:
    """How the next build ends."""
    while not (found := news.get(timeout=60)).has_ended:
        pass
    return found


def _has_ended(news: SimpleQueue[BuildNews]) -> bool:
    """Whether a build ended that nobody looked at."""
    while not news.empty():
        if news.get().has_ended:
            return True
    return False


def build(state: Path, artifact: Path, options: LoadOptions | None = None, gpu: Gpu = TARGET) -> bool:
    """Have a model's engine there; whether it had to be built."""
    with device(state, gpu) as (backend, news):
        backend.prepare(artifact, options or LoadOptions(), threading.Event())
        return _has_ended(news)


def test_an_engine_is_built_once_and_found_by_the_next_process(tmp_path: Path) -> None:
    artifact = onnx_models.mlp(tmp_path / "m")
    assert build(tmp_path / "state", artifact)
    assert len(list((tmp_path / "state" / "engines").glob("*.engine"))) == 1
    assert not build(tmp_path / "state", artifact)


@pytest.mark.parametrize(
    ("field", "value"), [("driver", "CUDA 13010; another driver"), ("name", "Another GPU"), ("target", "SM120")]
)
def test_another_device_or_driver_builds_anew(tmp_path: Path, field: str, value: str) -> None:
    artifact = onnx_models.mlp(tmp_path / "m")
    assert build(tmp_path / "state", artifact)
    changed = msgspec.structs.replace(TARGET, **{field: value})
    assert build(tmp_path / "state", artifact, gpu=changed)
    assert len(list((tmp_path / "state" / "engines").glob("*.engine"))) == 2


@pytest.mark.parametrize(
    "options", [LoadOptions(max_rows=4), LoadOptions(extra={"tf32": "1"}), LoadOptions(extra={"workspace_mb": "64"})]
)
def test_other_options_build_another_engine(tmp_path: Path, options: LoadOptions) -> None:
    artifact = onnx_models.mlp(tmp_path / "m")
    assert build(tmp_path / "state", artifact)
    assert build(tmp_path / "state", artifact, options)


def test_other_weights_build_another_engine_and_another_place_does_not(tmp_path: Path) -> None:
    artifact = onnx_models.mlp(tmp_path / "m")
    assert build(tmp_path / "state", artifact)
    content = bytearray(artifact.read_bytes())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "model.onnx").write_bytes(content)
    assert not build(tmp_path / "state", tmp_path / "elsewhere" / "model.onnx")
    where = content.rfind(onnx_models.mlp_weights()[0].tobytes()[:32])
    assert where > 0
    content[where + 2] ^= 1  # the last bits of a weight's fraction
    artifact.write_bytes(content)
    assert build(tmp_path / "state", artifact)


def test_a_damaged_engine_is_built_again(tmp_path: Path) -> None:
    artifact = onnx_models.mlp(tmp_path / "m")
    build(tmp_path / "state", artifact)
    (kept,) = (tmp_path / "state" / "engines").glob("*.engine")
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-100] + bytes(100))
    assert build(tmp_path / "state", artifact)
    assert len(kept.read_bytes()) == len(whole)


@pytest.mark.parametrize("name", ["model.plan", "model.engine", "model.trt"])
def test_an_engine_from_elsewhere_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    artifact = onnx_models.mlp(tmp_path / "m")
    build(tmp_path / "state", artifact)
    (kept,) = (tmp_path / "state" / "engines").glob("*.engine")
    (tmp_path / name).write_bytes(kept.read_bytes()[48:])
    with device(tmp_path / "state") as (backend, _), pytest.raises(LoadFailed) as raised:
        backend.load(tmp_path / name, LoadOptions())
    assert f"{name} is refused: an engine fits one GPU, driver and version of TensorRT" in raised.value.message
    (tmp_path / "model.onnx").write_bytes(kept.read_bytes()[48:])
    with device(tmp_path / "state") as (backend, _), pytest.raises(LoadFailed):
        backend.load(tmp_path / "model.onnx", LoadOptions())


def test_a_model_that_the_library_refuses_is_reported_with_its_reason_and_not_tried_again(tmp_path: Path) -> None:
    artifact = onnx_models.identity(tmp_path / "m", "BYTES")
    for _ in range(2):
        with device(tmp_path / "state") as (backend, news), pytest.raises(LoadFailed) as raised:
            backend.prepare(artifact, LoadOptions(), threading.Event())
        assert not isinstance(raised.value, NotBuiltYet)
        assert "cannot read model.onnx" in raised.value.message
    assert not _has_ended(news)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk wants root")
def test_a_disk_that_was_full_is_not_a_reason_for_ever(tmp_path: Path) -> None:
    artifact, state = onnx_models.wide(tmp_path / "m", 256), tmp_path / "state"
    state.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(state)], check=False)
    if mounted.returncode != 0:
        pytest.skip("this place lets nobody mount")
    try:
        with device(state) as (backend, news):
            with pytest.raises(NotBuiltYet):
                backend.load(artifact, LoadOptions())
            assert "No space left on device" in _end(news).words
        assert [path for path in state.rglob("*") if path.is_file()] == []
        subprocess.run(["mount", "-o", "remount,size=64m", str(state)], check=True)
        assert build(state, artifact)
    finally:
        subprocess.run(["umount", str(state)], check=True)


def test_closing_leaves_no_process_and_no_half_engine(tmp_path: Path) -> None:
    artifact = onnx_models.wide(tmp_path / "m", 2048)
    with device(tmp_path / "state") as (backend, _), pytest.raises(NotBuiltYet):
        backend.load(artifact, LoadOptions())
    assert not list((tmp_path / "state" / "engines").glob("*.engine"))
    assert build(tmp_path / "state", artifact)


@no_gpu
def test_a_daemon_serves_meanwhile_and_goes_on_where_the_engine_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All real but the GPU: ONNX Runtime serves, the engine is built, and CUDA then says that there is no driver."""
    monkeypatch.setattr(tensorrt_backend, "find_gpus", lambda: (TARGET,))
    put_model(tmp_path / "models", "m", onnx_models.mlp)
    # Inside, where the GPU of this test is; a host would look for a real one.
    config = Config(
        state=str(tmp_path / "state"), watch=False, calibrate=False, profile="nvidia-dgpu", isolation="never"
    )
    with Runtime(tmp_path / "models", config=config) as runtime:
        core = runtime.core
        (entry,) = runtime.models()
        assert (entry["state"], entry["backend"]) == ("ready", "onnxruntime")
        assert "tensorrt: its engine is" in entry["reason"]
        artifact = tmp_path / "models" / "m" / "1" / "model.onnx"
        TensorRtBackend(core.builds).prepare(artifact, LoadOptions(), threading.Event())
        runtime.load("m")
        (entry,) = runtime.models()
        assert (entry["state"], entry["backend"]) == ("ready", "onnxruntime")
        assert "tensorrt: " in entry["reason"]
        assert "CUDA" in entry["reason"]
    assert len(list((tmp_path / "state" / "engines").glob("*.engine"))) == 1


@no_gpu
def test_without_a_gpu_the_next_backend_serves_and_the_reason_says_why(tmp_path: Path) -> None:
    put_model(tmp_path / "models", "m", onnx_models.mlp)
    config = Config(state=str(tmp_path / "state"), watch=False, calibrate=False, profile="nvidia-dgpu")
    with Runtime(tmp_path / "models", config=config) as runtime:
        (entry,) = runtime.models()
        assert (entry["state"], entry["backend"]) == ("ready", "onnxruntime")
        assert "tensorrt: CUDA cannot find a GPU" in entry["reason"]
