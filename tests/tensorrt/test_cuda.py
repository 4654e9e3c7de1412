"""Memory, streams, graphs and runs of an engine on a real GPU, whichever TensorRT is there: its runs are a kernel."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from edge_runtime.backends.tensorrt.cuda import Cuda, find_gpus
from edge_runtime.backends.tensorrt.instance import EngineTensor, LoadedEngine, TensorRtInstance
from edge_runtime.errors import RunFailed
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.testing.backend_kit import mlp_answer, mlp_input
from tests.fakes.kernel_engine import KernelEngine, done, why_no_compiler
from tests.tensorrt.real_library import why_no_cuda

WHY_NOT = why_no_cuda() or why_no_compiler()

pytestmark = [pytest.mark.gpu, pytest.mark.long, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

MOST = 8
X = EngineTensor("x", "FP32", (-1, 16), MOST * 16 * 4)
Y = EngineTensor("y", "FP32", (-1, 4), MOST * 4 * 4)
TOO_MUCH = 1 << 50
"""Bytes that no machine has."""

NewInstance = Callable[[], TensorRtInstance]


@pytest.fixture
def cuda() -> Cuda:
    return Cuda(find_gpus()[0])


@pytest.fixture(params=[1, 24], ids=["one kernel", "many kernels"])
def engine(request: pytest.FixtureRequest) -> Iterator[KernelEngine]:
    """Many are what a graph is for."""
    engine = KernelEngine(MOST, request.param)
    yield engine
    gc.collect()
    engine.close()


@pytest.fixture
def new_instance(cuda: Cuda, engine: KernelEngine) -> Iterator[NewInstance]:
    made: list[TensorRtInstance] = []

    def new() -> TensorRtInstance:
        loaded = LoadedEngine(
            cuda=cuda,
            engine=engine,
            spec=ModelSpec((TensorSpec("x", "FP32", (-1, 16)),), (TensorSpec("y", "FP32", (-1, 4)),), MOST),
            inputs=(X,),
            outputs=(Y,),
            device="GPU:0",
            precision="f32",
            memory_bytes=1,
            graphs=True,
        )
        made.append(TensorRtInstance(loaded))
        return made[-1]

    yield new
    for each in made:
        each.close()


def test_a_gpu_is_found_with_its_name_capability_and_driver() -> None:
    gpu, *_ = find_gpus()
    assert gpu.index == 0
    assert gpu.name
    assert re.fullmatch(r"\d+\.\d", gpu.capability)
    assert re.match(r"CUDA \d{5}; (?!unknown)", gpu.driver)


def test_bytes_go_to_the_gpu_and_come_back(cuda: Cuda) -> None:
    stream = cuda.new_stream()
    buffer = cuda.new_buffer(1000)
    sent = np.arange(1000).astype(np.uint8)
    buffer.host[:] = sent
    cuda.copy_in(buffer, 1000, stream)
    cuda.wait(stream)
    if not buffer.is_shared:
        buffer.host[:] = 0
    cuda.copy_out(buffer, 500, stream)
    cuda.wait(stream)
    cuda.end_stream(stream)
    np.testing.assert_array_equal(buffer.host[:500], sent[:500])
    assert buffer.is_shared or not buffer.host[500:].any()


def test_memory_that_no_gpu_has_is_refused_with_cudas_reason_and_the_next_is_had(cuda: Cuda) -> None:
    with pytest.raises(RunFailed, match=rf"CUDA cannot pin {TOO_MUCH} bytes of memory: .* \(\d+\)"):
        cuda.new_buffer(TOO_MUCH)
    assert cuda.new_buffer(16).host.nbytes == 16


def test_a_failed_call_leaves_no_error_for_the_next_library_that_looks(cuda: Cuda) -> None:
    from cuda.bindings import runtime

    stream = cuda.new_stream()
    for fail in (lambda: cuda.new_buffer(TOO_MUCH), lambda: cuda.record(stream, lambda: cuda.wait(stream))):
        with pytest.raises(RunFailed):
            fail()
        assert done(runtime.cudaGetLastError()) is None
    cuda.end_stream(stream)


def test_a_buffer_lives_as_long_as_a_view_of_it(cuda: Cuda) -> None:
    view = cuda.new_buffer(64).host[8:16]
    gc.collect()
    view[:] = 7
    assert view.sum() == 56


def test_a_graph_repeats_what_was_recorded_with_what_the_memory_holds_then(cuda: Cuda) -> None:
    stream = cuda.new_stream()
    buffer = cuda.new_buffer(8)

    def there_and_back() -> None:
        cuda.copy_in(buffer, 8, stream)
        cuda.copy_out(buffer, 8, stream)

    graph = cuda.record(stream, there_and_back)
    for value in (1, 2, 3):
        buffer.host[:] = value
        cuda.launch(graph, stream)
        cuda.wait(stream)
        assert set(buffer.host) == {value}
    cuda.end_graph(graph)
    cuda.end_stream(stream)


def test_waiting_cannot_be_recorded_and_the_stream_works_afterwards(cuda: Cuda) -> None:
    stream = cuda.new_stream()
    buffer = cuda.new_buffer(8)
    with pytest.raises(RunFailed, match="CUDA cannot"):
        cuda.record(stream, lambda: cuda.wait(stream))
    cuda.copy_in(buffer, 8, stream)
    cuda.wait(stream)
    cuda.end_graph(cuda.record(stream, lambda: cuda.copy_in(buffer, 8, stream)))
    cuda.end_stream(stream)


def test_recording_is_not_disturbed_by_other_threads_that_take_memory_and_copy(cuda: Cuda) -> None:
    stop, failed = threading.Event(), []

    def disturb() -> None:
        mine = cuda.new_stream()
        try:
            while not stop.is_set():
                buffer = cuda.new_buffer(4096)
                cuda.copy_in(buffer, 4096, mine)
                cuda.wait(mine)
        except RunFailed as error:
            failed.append(error.message)
        cuda.end_stream(mine)

    others = [threading.Thread(target=disturb) for _ in range(3)]
    for each in others:
        each.start()
    stream = cuda.new_stream()
    buffer = cuda.new_buffer(8)
    try:
        for _ in range(200):
            cuda.end_graph(cuda.record(stream, lambda: cuda.copy_in(buffer, 8, stream)))
    finally:
        stop.set()
        for each in others:
            each.join()
    cuda.end_stream(stream)
    assert failed == []


def test_any_number_of_rows_is_answered_rightly_also_when_a_graph_was_recorded(new_instance: NewInstance) -> None:
    instance = new_instance()
    for turn in range(200):
        rows = 1 + turn % 3 if turn % 50 > 40 else MOST
        x = mlp_input(rows) * (turn + 1)
        np.testing.assert_allclose(instance.run({"x": x})[0], mlp_answer(x), rtol=1e-4, atol=1e-3)


def test_rows_beyond_the_engines_fail_that_run_alone(new_instance: NewInstance) -> None:
    instance = new_instance()
    with pytest.raises(RunFailed, match="more than the engine was built for"):
        instance.run({"x": mlp_input(MOST + 1)})
    np.testing.assert_allclose(instance.run({"x": mlp_input(2)})[0], mlp_answer(mlp_input(2)), rtol=1e-4, atol=1e-4)


def test_bound_buffers_answer_the_same_and_outlive_the_instance(new_instance: NewInstance) -> None:
    instance = new_instance()
    bound = instance.bind(MOST)
    assert bound is not None
    for rows in (1, MOST, 3, *(1,) * 30):
        bound.inputs[0][:rows] = mlp_input(rows)
        bound.run(rows)
        np.testing.assert_allclose(bound.outputs[0][:rows], mlp_answer(mlp_input(rows)), rtol=1e-4, atol=1e-4)
    instance.close()
    bound.inputs[0][:] = 1.0
    with pytest.raises(RunFailed, match="closed"):
        bound.run(1)


def test_instances_on_threads_of_their_own_do_not_disturb_one_another(new_instance: NewInstance) -> None:
    wrong: list[str] = []

    def ask(instance: TensorRtInstance, seed: int) -> None:
        for turn in range(200):
            x = mlp_input(1 + (turn // 20 + seed) % MOST)
            if not np.allclose(instance.run({"x": x})[0], mlp_answer(x), rtol=1e-3, atol=1e-3):
                wrong.append(f"{seed}, {turn}")

    threads = [threading.Thread(target=ask, args=(new_instance(), seed)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_closed_instances_give_the_gpus_memory_back(new_instance: NewInstance) -> None:
    from cuda.bindings import runtime

    def free_bytes() -> int:
        gc.collect()
        assert int(runtime.cudaDeviceSynchronize()[0]) == 0
        status, free, _ = runtime.cudaMemGetInfo()
        assert int(status) == 0
        return int(free)

    def turn() -> None:
        instance = new_instance()
        bound = instance.bind(MOST)
        assert bound is not None
        for _ in range(20):
            bound.run(MOST)
            instance.run({"x": mlp_input(1)})
        instance.close()

    turn()
    before = free_bytes()
    for _ in range(30):
        turn()
    assert free_bytes() >= before
