"""The order of our calls of CUDA and TensorRT, on a GPU of paper: memory, shapes, graphs, and giving it all back."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.backends.base import BuildOrder, LoadOptions
from edge_runtime.backends.tensorrt import backend as tensorrt_backend
from edge_runtime.backends.tensorrt import cuda as tensorrt_cuda
from edge_runtime.backends.tensorrt import instance as tensorrt_instance
from edge_runtime.backends.tensorrt.backend import TensorRtBackend
from edge_runtime.backends.tensorrt.cuda import Cuda
from edge_runtime.backends.tensorrt.instance import EngineTensor, LoadedEngine, TensorRtInstance
from edge_runtime.backends.tensorrt.plan import EnginePlan, Gpu, plan_of
from edge_runtime.errors import BackendUnavailable, LoadFailed, RunFailed
from edge_runtime.model_spec import ModelSpec, TensorSpec
from tests.fakes.paper_gpu import PaperCuda, PaperEngine, paper_tensorrt
from tests.models import onnx_models
from tests.models.onnx_models import mlp_weights

MOST = 8
X = EngineTensor("x", "FP32", (-1, 16), MOST * 16 * 4)
Y = EngineTensor("y", "FP32", (-1, 4), MOST * 4 * 4)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[PaperCuda]:
    paper = PaperCuda()
    monkeypatch.setattr(tensorrt_cuda, "import_cuda", lambda: paper)
    yield paper
    gc.collect()
    assert (paper.memory, paper.streams, paper.graphs) == ({}, set(), {}), "not everything was given back"


class Ticks:
    """A clock in the place of time.perf_counter: it stands still unless a call costs something."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def cost(self, seconds: float) -> Callable[[], None]:
        def spend() -> None:
            self.now_s += seconds

        return spend


def instance_on(
    cuda: PaperCuda, *, shared: bool = False, graphs: bool = True, spend: Callable[[], None] = lambda: None
) -> TensorRtInstance:
    engine = PaperEngine(cuda, MOST, spend)
    device = Cuda(Gpu(0, "Paper", "8.7", "none", is_integrated=shared))
    return TensorRtInstance(
        LoadedEngine(
            cuda=device,
            engine=engine,
            spec=ModelSpec((TensorSpec("x", "FP32", (-1, 16)),), (TensorSpec("y", "FP32", (-1, 4)),), MOST),
            inputs=(X,),
            outputs=(Y,),
            device="GPU:0",
            precision="f32",
            memory_bytes=1,
            graphs=graphs,
        )
    )


def inputs(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).normal(size=(rows, 16)).astype(np.float32)


def answer(x: np.ndarray) -> np.ndarray:
    first, second = mlp_weights()
    return np.maximum(x @ first, 0) @ second


@pytest.mark.parametrize("shared", [False, True], ids=["discrete", "shared memory"])
def test_any_number_of_rows_is_answered_rightly(cuda: PaperCuda, shared: bool) -> None:
    instance = instance_on(cuda, shared=shared)
    for rows in (1, MOST, 3, 3, 1, MOST):
        np.testing.assert_allclose(instance.run({"x": inputs(rows)})[0], answer(inputs(rows)), rtol=1e-5)
    assert cuda.copies == 0 if shared else cuda.copies >= 12
    instance.close()


def test_answers_are_the_callers_own(cuda: PaperCuda) -> None:
    instance = instance_on(cuda)
    (first,) = instance.run({"x": inputs(2)})
    kept = first.copy()
    instance.run({"x": inputs(2) * 7})
    np.testing.assert_array_equal(first, kept)
    assert first.flags.writeable
    instance.close()


def test_rows_beyond_the_engines_fail_that_run_alone(cuda: PaperCuda) -> None:
    instance = instance_on(cuda)
    with pytest.raises(RunFailed, match="more than the engine was built for"):
        instance.run({"x": inputs(MOST + 1)})
    with pytest.raises(RunFailed, match="was not built for input 'x' of shape"):
        instance.run({"x": np.zeros((2, 8), np.float32)})
    np.testing.assert_allclose(instance.run({"x": inputs(2)})[0], answer(inputs(2)), rtol=1e-5)
    instance.close()


def test_a_graph_is_used_where_it_is_quicker_and_stays_right(cuda, monkeypatch) -> None:
    ticks = Ticks()
    monkeypatch.setattr(tensorrt_instance, "time", ticks)
    instance = instance_on(cuda, spend=ticks.cost(1e-4))  # ordering costs, launching a graph does not
    for turn in range(40):
        x = inputs(1) * turn
        np.testing.assert_allclose(instance.run({"x": x})[0], answer(x), rtol=1e-5)
    assert cuda.launched > 30
    launched = cuda.launched
    np.testing.assert_allclose(instance.run({"x": inputs(2)})[0], answer(inputs(2)), rtol=1e-5)
    assert cuda.launched == launched
    for _ in range(tensorrt_instance.KNOWN_RUNS - 1):
        instance.run({"x": inputs(1)})
    assert cuda.launched == launched, "one batch of another size must not record a graph again at once"
    for _ in range(3):
        np.testing.assert_allclose(instance.run({"x": inputs(1)})[0], answer(inputs(1)), rtol=1e-5)
    assert cuda.launched == launched + 3
    instance.close()


def test_no_graph_is_used_where_it_is_not_quicker(cuda: PaperCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_instance, "time", Ticks())
    instance = instance_on(cuda)
    for _ in range(30):
        instance.run({"x": inputs(1)})
    assert cuda.launched == tensorrt_instance.MEASURED_RUNS
    assert not cuda.graphs
    instance.close()


def test_an_engine_that_cannot_be_recorded_is_run_as_it_is(cuda: PaperCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        if cuda.recorded is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    instance = instance_on(cuda, spend=refuse)
    for rows in (1,) * 30 + (2,) * 30:
        np.testing.assert_allclose(instance.run({"x": inputs(rows)})[0], answer(inputs(rows)), rtol=1e-5)
    assert (cuda.launched, cuda.recorded) == (0, None)
    instance.close()


def test_long_runs_are_not_measured_for_a_graph(cuda: PaperCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Ticks()
    monkeypatch.setattr(tensorrt_instance, "time", ticks)
    instance = instance_on(cuda, spend=ticks.cost(0.01))
    for _ in range(30):
        instance.run({"x": inputs(1)})
    assert (cuda.launched, cuda.ordered) == (0, 30)
    instance.close()


@pytest.mark.parametrize("shared", [False, True], ids=["discrete", "shared memory"])
def test_bound_buffers_are_the_pinned_memory_and_answer_the_same(cuda: PaperCuda, shared: bool) -> None:
    instance = instance_on(cuda, shared=shared)
    bound = instance.bind(100)
    assert bound is not None
    assert bound.max_rows == MOST
    for rows in (1, MOST, 3):
        bound.inputs[0][:rows] = inputs(rows)
        bound.run(rows)
        np.testing.assert_allclose(bound.outputs[0][:rows], answer(inputs(rows)), rtol=1e-5)
    for rows in (0, MOST + 1):
        with pytest.raises(RunFailed, match=f"got {rows} rows, wanted 1 to {MOST}"):
            bound.run(rows)
    instance.close()
    assert bound.inputs[0].shape == (MOST, 16)
    bound.inputs[0][:] = 1.0  # its memory outlives the instance
    with pytest.raises(RunFailed, match="closed"):
        bound.run(1)


def test_closing_twice_is_closing_once_and_no_run_comes_after(cuda: PaperCuda) -> None:
    instance = instance_on(cuda)
    instance.close()
    instance.close()
    with pytest.raises(RunFailed, match="closed"):
        instance.run({"x": inputs(1)})
    assert instance.bind(1) is None


def test_a_gpu_without_memory_is_a_reason_and_leaves_nothing(cuda: PaperCuda) -> None:
    cuda.limit_bytes = 256
    with pytest.raises(RunFailed, match=r"CUDA cannot pin 512 bytes of memory: out of memory \(2\)"):
        instance_on(cuda)
    gc.collect()
    assert not cuda.streams


class Kept:
    """Engines that are there; which were asked for."""

    def __init__(self) -> None:
        self.plans: list[EnginePlan] = []

    def built(self, order: BuildOrder) -> bytes:
        self.plans.append(plan_of(order))
        return b"an engine"

    def wait(self, key: str, stop: object) -> bool:
        return True


ORIN = Gpu(0, "Orin", "8.7", "none", is_integrated=True)
CARD = Gpu(1, "Card", "8.9", "none")


@pytest.fixture
def paper(cuda: PaperCuda, monkeypatch: pytest.MonkeyPatch) -> PaperEngine:
    engine = PaperEngine(cuda, 32)
    monkeypatch.setattr(tensorrt_backend, "import_tensorrt", lambda: paper_tensorrt(engine))
    cuda.cudaSetDevice = lambda index: (0,)  # type: ignore[attr-defined]
    return engine


def test_a_loaded_engine_is_described_as_the_model_declares_itself(tmp_path: Path, paper: PaperEngine) -> None:
    kept = Kept()
    instance = TensorRtBackend(kept, lambda: [ORIN]).load(onnx_models.mlp(tmp_path), LoadOptions())
    assert instance.spec.inputs == (TensorSpec("x", "FP32", (-1, 16)),)
    assert instance.spec.outputs == (TensorSpec("y", "FP32", (-1, 4)),)
    assert instance.spec.max_rows == 32
    assert (instance.device, instance.precision, instance.concurrency) == ("GPU:0", "f32", 1)
    assert instance.memory_bytes >= 4096 + 32 * 20 * 4
    np.testing.assert_allclose(instance.run({"x": inputs(5)})[0], answer(inputs(5)), rtol=1e-5)
    instance.close()
    assert kept.plans[0].shapes == {"x": ((1, 16), (8, 16), (32, 16))}


def test_the_second_gpu_is_used_where_it_is_asked_for(tmp_path: Path, paper: PaperEngine) -> None:
    backend = TensorRtBackend(Kept(), lambda: [ORIN, CARD])
    instance = backend.load(onnx_models.mlp(tmp_path), LoadOptions(device="GPU:1"))
    assert instance.device == "GPU:1"
    instance.close()
    with pytest.raises(BackendUnavailable, match="there is no GPU 2; CUDA finds 0, 1"):
        backend.load(onnx_models.mlp(tmp_path), LoadOptions(device="GPU:2"))


def test_a_dla_takes_one_row_in_f16_and_says_that_it_is_one(tmp_path: Path, paper: PaperEngine) -> None:
    kept = Kept()
    backend = TensorRtBackend(kept, lambda: [ORIN])
    instance = backend.load(onnx_models.mlp(tmp_path), LoadOptions(device="DLA:1", precision="f16"))
    assert (instance.device, instance.spec.inputs[0].shape, kept.plans[0].dla_core) == ("DLA:1", (1, 16), 1)
    np.testing.assert_allclose(instance.run({"x": inputs(1)})[0], answer(inputs(1)), rtol=1e-5)
    instance.close()
    with pytest.raises(BackendUnavailable, match="a DLA runs f16 and int8"):
        backend.load(onnx_models.mlp(tmp_path), LoadOptions(device="DLA:1"))


def test_an_engine_that_the_library_refuses_is_a_reason(tmp_path: Path, cuda: PaperCuda, monkeypatch) -> None:
    monkeypatch.setattr(tensorrt_backend, "import_tensorrt", lambda: paper_tensorrt(None))
    with pytest.raises(LoadFailed, match="cannot load the engine that it built: the paper is torn"):
        TensorRtBackend(Kept(), lambda: [ORIN]).load(onnx_models.mlp(tmp_path), LoadOptions())


def test_a_full_gpu_is_a_failed_load(tmp_path: Path, paper: PaperEngine) -> None:
    paper.cuda.limit_bytes = 16
    with pytest.raises(LoadFailed, match="CUDA cannot pin"):
        TensorRtBackend(Kept(), lambda: [ORIN]).load(onnx_models.mlp(tmp_path), LoadOptions())


def test_devices_are_probed(paper: PaperEngine) -> None:
    probe = TensorRtBackend(Kept(), lambda: [CARD]).probe()
    assert (probe.is_available, probe.version, probe.devices) == (True, "10.3.0", ("GPU:1",))
