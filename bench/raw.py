"""What a backend does in process, with no server around it: the other yardstick.

    python raw.py '{"model": …, "row_shape": […], "backend": "onnxruntime", "layout": "callers", …}'

Layouts: `all` one session with every core, as the library sets it up (ONNX Runtime then spins); `all-quiet` the same
without spinning; `callers` one session with intra-op 1 (OpenVINO: one stream a core) called from as many threads as
there are cores; `one` one core, one caller. PyTorch runs the quickest form of its module. A process of its own each
time, so that no thread pool is left over from another layout. Prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

Layout = Literal["all", "all-quiet", "callers", "one"]
WARM_S = 0.3


@dataclass(frozen=True, slots=True)
class RawRun:
    """What to measure. precision: "f32" or "bf16" (OpenVINO only)."""

    model: str
    row_shape: tuple[int, ...]
    layout: Layout
    backend: str = "onnxruntime"
    precision: str = "f32"
    rows: int = 1
    seconds: float = 3.0


@dataclass(frozen=True, slots=True)
class RawResult:
    """Rows a second over all callers, and how long one call took. `precision` is read back from the library."""

    rows_per_s: float
    p50_ms: float
    p99_ms: float
    precision: str


def measure(run: RawRun) -> RawResult:
    """Measure in this process."""
    cores = len(os.sched_getaffinity(0))
    callers = cores if run.layout == "callers" else 1
    makers = {
        "onnxruntime": _onnxruntime_calls,
        "openvino": _openvino_calls,
        "litert": _litert_calls,
        "pytorch": _pytorch_calls,
    }
    make = makers[run.backend]
    batch = np.random.default_rng(0).random((run.rows, *run.row_shape), np.float32)
    calls, precision = make(run, batch, callers, cores)
    for call in calls:
        # One at a time: OpenVINO's binding sets up a static in its first call, holding its guard while it waits for the
        # GIL; two first calls at once deadlock (2026.4.1, one run in some dozens).
        call()
    _call_from_threads(calls, WARM_S)
    start = time.perf_counter()
    times = _call_from_threads(calls, run.seconds)
    elapsed = time.perf_counter() - start
    return RawResult(
        rows_per_s=len(times) * run.rows / elapsed,
        p50_ms=float(np.quantile(times, 0.5)) * 1e3,
        p99_ms=float(np.quantile(times, 0.99)) * 1e3,
        precision=precision,
    )


# ---- private --------------------------------------------------------------------------------------------------------


def _onnxruntime_calls(
    run: RawRun, batch: np.ndarray[Any, Any], callers: int, cores: int
) -> tuple[list[Callable[[], Any]], str]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = cores if run.layout in ("all", "all-quiet") else 1
    options.inter_op_num_threads = 1
    if run.layout != "all":
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(run.model, options, providers=["CPUExecutionProvider"])
    return [lambda: session.run(None, {"x": batch})] * callers, "f32"


def _openvino_calls(
    run: RawRun, batch: np.ndarray[Any, Any], callers: int, cores: int
) -> tuple[list[Callable[[], Any]], str]:
    import openvino

    threads = 1 if run.layout == "one" else cores
    settings = {
        "INFERENCE_PRECISION_HINT": run.precision,
        "INFERENCE_NUM_THREADS": str(threads),
        "NUM_STREAMS": str(callers),
        "PERFORMANCE_HINT": "THROUGHPUT" if callers > 1 else "LATENCY",
    }
    core = openvino.Core()
    model = core.read_model(run.model)
    compiled = core.compile_model(model, "CPU", settings)
    read_back = str(compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name())

    def call_for(request: Any) -> Callable[[], Any]:
        return lambda: request.infer({"x": batch}, share_inputs=True, share_outputs=True)

    return [call_for(compiled.create_infer_request()) for _ in range(callers)], read_back


def _pytorch_calls(
    run: RawRun, batch: np.ndarray[Any, Any], callers: int, cores: int
) -> tuple[list[Callable[[], Any]], str]:
    import warnings

    import torch

    warnings.simplefilter("ignore")
    threads = 1 if run.layout in ("callers", "one") else cores
    torch.set_num_interop_threads(1)
    torch.set_num_threads(threads)
    given, here = torch.from_numpy(batch), threading.local()

    def call_for(form: Any, tensor: Any) -> Callable[[], Any]:
        def call() -> Any:
            if not hasattr(here, "is_bound"):  # the number of threads is each calling thread's own
                torch.set_num_threads(threads)
                here.is_bound = True
            with torch.inference_mode():
                return form(tensor)

        return call

    def seconds(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times)

    def saved(*, channels_last: bool = False) -> Any:
        module = torch.jit.load(run.model).eval()
        return module.to(memory_format=torch.channels_last) if channels_last else module

    last = given.contiguous(memory_format=torch.channels_last)
    forms = [
        (saved(), given),
        (torch.jit.freeze(saved()), given),
        (torch.jit.optimize_for_inference(torch.jit.freeze(saved())), given),
        (torch.jit.freeze(saved(channels_last=True)), last),
        (torch.jit.optimize_for_inference(torch.jit.freeze(saved(channels_last=True))), last),
    ]
    best = min((call_for(*each) for each in forms), key=seconds)
    return [best] * callers, "f32"


def _litert_calls(
    run: RawRun, batch: np.ndarray[Any, Any], callers: int, cores: int
) -> tuple[list[Callable[[], Any]], str]:
    """An interpreter for each caller, since one has one run at a time."""
    from ai_edge_litert.interpreter import Interpreter

    content = Path(run.model).read_bytes()

    def call_for() -> Callable[[], Any]:
        threads = cores if run.layout in ("all", "all-quiet") else 1
        interpreter = Interpreter(model_content=content, num_threads=threads)
        (source,), (result,) = interpreter.get_input_details(), interpreter.get_output_details()
        interpreter.resize_tensor_input(source["index"], batch.shape)
        interpreter.allocate_tensors()

        def call() -> Any:
            interpreter.set_tensor(source["index"], batch)
            interpreter.invoke()
            return interpreter.get_tensor(result["index"])

        return call

    return [call_for() for _ in range(callers)], "as converted"


def _call_from_threads(calls: list[Callable[[], Any]], seconds: float) -> list[float]:
    """Every caller calls until the time is up; the seconds each call took."""
    until = time.perf_counter() + seconds
    found: list[list[float]] = [[] for _ in calls]

    def repeat(call: Callable[[], Any], times: list[float]) -> None:
        now = time.perf_counter()
        while now < until:
            call()
            end = time.perf_counter()
            times.append(end - now)
            now = end

    threads = [threading.Thread(target=repeat, args=pair) for pair in zip(calls[1:], found[1:], strict=True)]
    for thread in threads:
        thread.start()
    repeat(calls[0], found[0])
    for thread in threads:
        thread.join()
    return [seconds for times in found for seconds in times]


if __name__ == "__main__":
    words = json.loads(sys.argv[1])
    print(json.dumps(asdict(measure(RawRun(**{**words, "row_shape": tuple(words["row_shape"])})))))
