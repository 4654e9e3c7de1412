"""`python -m bench.engines`: engines as the backend runs them against TensorRT's raw Python API, on a GPU.

The same engine file for both, in the same process, interleaved. Raw is what a careful script does: pinned buffers, one
stream, `execute_async_v3`, no graph, a copy in and a copy out. Without CUDA it says why and measures nothing.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import gpu_models, makers
from bench.makers import BenchModel
from edge_runtime.backends.base import BuildOrder, LoadOptions
from edge_runtime.backends.tensorrt.backend import TensorRtBackend
from edge_runtime.backends.tensorrt.build import build_engine
from edge_runtime.backends.tensorrt.cuda import find_gpus, import_cuda
from edge_runtime.backends.tensorrt.library import import_tensorrt
from edge_runtime.backends.tensorrt.plan import plan_of
from edge_runtime.errors import BackendUnavailable

RESULTS = Path(__file__).parent / "results"
ROWS = (1, 8)
ROUNDS = 5
SECONDS = 1.0
"""Of each side in each round."""
SETTLING_RUNS = 20


class OneEngine:
    """Builds in this process and keeps what it built, so that both sides run the very same bytes."""

    def __init__(self) -> None:
        self.engine_bytes = b""

    def built(self, order: BuildOrder) -> bytes:
        """See BuildSource."""
        self.engine_bytes = self.engine_bytes or bytes(build_engine(plan_of(order)).engine)
        return self.engine_bytes

    def wait(self, key: str, stop: object) -> bool:
        """See BuildSource."""
        del key, stop
        return True


def raw_runner(engine_bytes: bytes, model: BenchModel, rows: int) -> Callable[[], None]:
    """One run of an engine by TensorRT's and CUDA's own Python calls."""
    trt, cuda = import_tensorrt().module, import_cuda()

    def do(answer: tuple[Any, ...]) -> Any:
        assert answer[0] == cuda.cudaError_t.cudaSuccess, answer[0]
        return answer[1] if len(answer) > 1 else None

    logger = trt.Logger(trt.Logger.ERROR)
    runtime = trt.Runtime(logger)
    engine = runtime.deserialize_cuda_engine(engine_bytes)
    context = engine.create_execution_context()
    stream = do(cuda.cudaStreamCreate())
    sizes = {"x": rows * model.row_bytes, "y": rows * model.output_elements * 4}
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    source, target = (next(name for name in names if (engine.get_tensor_mode(name) == mode)) for mode in
                      (trt.TensorIOMode.INPUT, trt.TensorIOMode.OUTPUT))  # fmt: skip
    host = [do(cuda.cudaHostAlloc(size, cuda.cudaHostAllocDefault)) for size in sizes.values()]
    device = [do(cuda.cudaMalloc(size)) for size in sizes.values()]
    context.set_input_shape(source, (rows, *model.row_shape))
    context.set_tensor_address(source, int(device[0]))
    context.set_tensor_address(target, int(device[1]))
    to_device, to_host = cuda.cudaMemcpyKind.cudaMemcpyHostToDevice, cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost

    def run() -> None:
        do(cuda.cudaMemcpyAsync(device[0], host[0], sizes["x"], to_device, stream))
        assert context.execute_async_v3(int(stream))
        do(cuda.cudaMemcpyAsync(host[1], device[1], sizes["y"], to_host, stream))
        do(cuda.cudaStreamSynchronize(stream))

    run.keep = (logger, runtime, engine, context)  # type: ignore[attr-defined]  # as long as the function
    return run


def times_of(run: Callable[[], object]) -> list[float]:
    """Seconds of each run, for so long."""
    for _ in range(SETTLING_RUNS):
        run()
    times: list[float] = []
    end_s = time.perf_counter() + SECONDS
    while (began_s := time.perf_counter()) < end_s:
        run()
        times.append(time.perf_counter() - began_s)
    return times


def measure(model: BenchModel, rows: int) -> dict[str, Any]:
    """p50 and rate of both sides, medians over interleaved rounds."""
    source = OneEngine()
    instance = TensorRtBackend(source).load(model.path, LoadOptions(max_rows=max(ROWS)))
    x = np.random.default_rng(0).normal(size=(rows, *model.row_shape)).astype(np.float32)
    name = instance.spec.inputs[0].name
    sides: dict[str, Callable[[], object]] = {
        "ours": lambda: instance.run({name: x}),
        "raw": raw_runner(source.engine_bytes, model, rows),
    }
    found: dict[str, list[list[float]]] = {side: [] for side in sides}
    for number in range(ROUNDS):
        for side in list(sides)[:: 1 if number % 2 else -1]:
            found[side].append(times_of(sides[side]))
    precision = instance.precision
    instance.close()
    p50 = {side: statistics.median(statistics.median(times) for times in rounds) for side, rounds in found.items()}
    p99 = {side: statistics.median(float(np.quantile(each, 0.99)) for each in rounds) for side, rounds in found.items()}
    return {
        "model": model.name, "rows": rows, "precision": precision,
        **{f"{side}_p50_ms": p50[side] * 1e3 for side in sides},
        **{f"{side}_p99_ms": p99[side] * 1e3 for side in sides},
        "rate_ratio": p50["raw"] / p50["ours"], "rows_a_second": rows / p50["ours"],
    }  # fmt: skip


def _text(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main(arguments: list[str]) -> int:
    """Measure, print, and keep the figures with their date; 0 also where nothing can be measured here."""
    parser = argparse.ArgumentParser(prog="python -m bench.engines", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="write the figures to bench/results")
    options = parser.parse_args(arguments)
    try:
        library, (gpu, *_) = import_tensorrt(), find_gpus()
    except BackendUnavailable as error:
        print(f"engines: skipped: {error.message}")
        return 0
    print(f"{gpu.name}, {gpu.driver}, {library.title}")
    rows: list[dict[str, Any]] = []
    for model in (gpu_models.resnet50(), makers.mobilenetv2(), gpu_models.transformer()):
        for count in ROWS:
            rows.append(measure(model, count))
            print("  ".join(f"{key} {_text(value)}" for key, value in rows[-1].items()))
    if options.keep:
        day = dt.datetime.now(dt.timezone.utc).date()
        path = RESULTS / f"{day}-{gpu.name.lower().replace(' ', '-')}-engines.json"
        facts = {"gpu": gpu.name, "driver": gpu.driver, "library": library.title, "rows": rows}
        path.write_text(json.dumps(facts, indent=1))
        print(f"kept in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
