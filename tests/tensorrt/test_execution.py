"""Engines that run: these need an NVIDIA GPU with CUDA, and a TensorRT that knows it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.backends.base import Instance, LoadOptions
from edge_runtime.backends.registry import backend
from edge_runtime.backends.tensorrt.backend import TensorRtBackend
from edge_runtime.config.settings import Config
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.errors import RunFailed
from tests.contract.running_daemon import put_model
from tests.models import onnx_models
from tests.models.onnx_models import mlp_weights
from tests.tensorrt.real_library import why_no_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.long, pytest.mark.skipif(bool(why_no_gpu()), reason=why_no_gpu())]


@pytest.fixture
def mlp(tmp_path: Path) -> Iterator[Instance]:
    instance = TensorRtBackend().load(onnx_models.mlp(tmp_path), LoadOptions(max_rows=16))
    yield instance
    instance.close()


def answer(x: np.ndarray) -> np.ndarray:
    first, second = mlp_weights()
    return np.maximum(x @ first, 0) @ second


def inputs(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).normal(size=(rows, 16)).astype(np.float32)


@pytest.mark.parametrize("rows", [1, 2, 7, 16])
def test_an_engine_answers_as_the_model_does(mlp: Instance, rows: int) -> None:
    (y,) = mlp.run({"x": inputs(rows)})
    np.testing.assert_allclose(y, answer(inputs(rows)), rtol=1e-4, atol=1e-4)


def test_device_precision_memory_and_rows_are_read_back(mlp: Instance) -> None:
    assert (mlp.device, mlp.precision, mlp.spec.max_rows) == ("GPU:0", "f32", 16)
    assert mlp.memory_bytes > 0


def test_runs_of_the_same_shape_stay_right_when_a_graph_is_recorded(mlp: Instance) -> None:
    for turn in range(60):
        rows = 1 if turn % 30 < 25 else 3
        x = inputs(rows) * turn
        np.testing.assert_allclose(mlp.run({"x": x})[0], answer(x), rtol=1e-3, atol=1e-3)


def test_more_rows_than_the_engine_was_built_for_are_refused_and_the_next_run_is_right(mlp: Instance) -> None:
    with pytest.raises(RunFailed):
        mlp.run({"x": inputs(17)})
    np.testing.assert_allclose(mlp.run({"x": inputs(2)})[0], answer(inputs(2)), rtol=1e-4, atol=1e-4)


def test_bound_buffers_answer_the_same_and_outlive_the_instance(mlp: Instance) -> None:
    bound = mlp.bind(8)
    assert bound is not None
    for rows in (1, 8, 3, 1):
        bound.inputs[0][:rows] = inputs(rows)
        bound.run(rows)
        np.testing.assert_allclose(bound.outputs[0][:rows], answer(inputs(rows)), rtol=1e-4, atol=1e-4)
    mlp.close()
    assert bound.inputs[0].sum() != 0
    with pytest.raises(RunFailed):
        bound.run(1)


def test_a_run_after_close_fails_and_close_may_be_repeated(mlp: Instance) -> None:
    mlp.close()
    mlp.close()
    with pytest.raises(RunFailed):
        mlp.run({"x": inputs(1)})


def test_instances_on_threads_of_their_own_do_not_disturb_one_another(tmp_path: Path) -> None:
    instances = [TensorRtBackend().load(onnx_models.mlp(tmp_path), LoadOptions(max_rows=8)) for _ in range(3)]
    wrong: list[str] = []

    def ask(instance: Instance, seed: int) -> None:
        for turn in range(200):
            x = inputs(1 + (turn + seed) % 8)
            if not np.allclose(instance.run({"x": x})[0], answer(x), rtol=1e-3, atol=1e-3):
                wrong.append(f"{seed}, {turn}")

    threads = [threading.Thread(target=ask, args=pair) for pair in zip(instances, range(3), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for instance in instances:
        instance.close()
    assert wrong == []


@pytest.mark.parametrize("datatype", ["FP32", "FP16", "INT32", "INT64", "BOOL"])
def test_datatypes_come_out_as_they_went_in(tmp_path: Path, datatype: str) -> None:
    artifact = onnx_models.identity(tmp_path, datatype)
    x = np.array([[0, 1], [1, 0]]).astype(
        {"FP32": "f4", "FP16": "f2", "INT32": "i4", "INT64": "i8", "BOOL": "?"}[datatype]
    )
    instance = TensorRtBackend().load(artifact, LoadOptions())
    try:
        (y,) = instance.run({"x": x})
        assert y.dtype == x.dtype
        np.testing.assert_array_equal(y, x)
    finally:
        instance.close()


def test_a_daemon_lets_the_engine_take_over_and_loses_nothing(tmp_path: Path) -> None:
    put_model(tmp_path / "models", "m", onnx_models.mlp)
    config = Config(state=str(tmp_path / "state"), watch=False, calibrate=False, profile="nvidia-dgpu")
    with Runtime(tmp_path / "models", config=config) as runtime:
        for turn in range(100_000):
            x = inputs(1 + turn % 4)
            np.testing.assert_allclose(runtime.infer("m", {"x": x})["y"], answer(x), rtol=1e-3, atol=1e-3)
            if turn % 50 == 0 and runtime.models()[0]["backend"] == "tensorrt":
                break
        assert runtime.models()[0]["backend"] == "tensorrt"


def test_probe_names_the_gpus() -> None:
    probe = backend("tensorrt").probe()
    assert probe.is_available, probe.reason
    assert "GPU:0" in probe.devices
