"""Run a model once on a running daemon and show the answer.

  edge-runtime infer digits --input image=scan.npy
  edge-runtime infer digits --random --timing
  echo '{"image": [[0, 0.5, …]]}' | edge-runtime infer digits --input -

Inputs: .npy; .json and @JSON (nested lists; they take the model's datatype); .bin (raw little-endian bytes); pictures
where Pillow is installed (scaled to the model's size, floats are pixels / 255).
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.cli.arguments import UsageError, add_connection, positive
from edge_runtime.cli.connection import connected
from edge_runtime.cli.inputs import add_input_arguments, given, specs_of, tensors
from edge_runtime.cli.screen import Screen, ms_text, shape_text
from edge_runtime.client.load_generator import quantile
from edge_runtime.messages import InferResult
from edge_runtime.tensors import Array, datatype_name

WHOLE_ELEMENTS = 64
"""Arrays up to this size are shown whole: about eight lines."""

MAX_SCORE_ROWS = 4
BEST = 5
MIN_SCORES = 6
"""Fewer classes are read at a glance."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `infer`."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--version", metavar="N", type=positive, help="one version (default: the daemon's choice)")
    parser.add_argument("--outputs", metavar="NAME,…", help="these outputs, in this order (default: all)")
    parser.add_argument("--output", metavar="DIR|FILE.npy", type=Path, help="save the outputs as .npy")
    parser.add_argument("--timeout-ms", metavar="MS", type=float, help="deadline of the request")
    parser.add_argument("--priority", metavar="N", type=int, default=0, choices=range(1, 10), help="1 (first) to 9")
    parser.add_argument("--timing", action="store_true", help="show where the time went")
    parser.add_argument("--repeat", metavar="N", type=positive, default=1, help="ask N times and show latencies")
    add_input_arguments(parser)
    add_connection(parser)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Send the request, show the answer, save it."""
    asked = given(arguments)
    options: dict[str, Any] = {
        "version": arguments.version,
        "outputs": arguments.outputs.split(",") if arguments.outputs else None,
        "timeout_ms": arguments.timeout_ms,
        "priority": arguments.priority,
        "timing": arguments.timing,
    }
    latencies_ms: list[float] = []
    with connected(arguments) as client:
        specs = specs_of(client.metadata(arguments.model, arguments.version))
        inputs = tensors(asked, specs, screen)
        for _ in range(arguments.repeat):
            began_s = time.perf_counter()
            result = client.infer(arguments.model, inputs, **options)
            latencies_ms.append((time.perf_counter() - began_s) * 1e3)
    saved = save(result.outputs, arguments.output) if arguments.output is not None else []
    summary = {name: quantile(latencies_ms, q) for name, q in (("p50", 0.5), ("p95", 0.95), ("max", 1.0))}
    if screen.wants_json:
        screen.json({**answer_json(result), "latency_ms": summary, "saved": [str(path) for path in saved]})
        return 0
    print_answer(result, screen)
    times = ", ".join(f"{name} {ms_text(value)} ms" for name, value in summary.items())
    screen.line(
        f"{arguments.repeat:,} times: {times}" if arguments.repeat > 1 else f"took {ms_text(summary['max'])} ms"
    )
    for path in saved:
        screen.line(f"saved {path}")
    return 0


def print_answer(result: InferResult, screen: Screen) -> None:
    """Print every output with its datatype and shape."""
    screen.heading(f"{result.model} version {result.version}")
    for name, array in result.outputs.items():
        screen.line(f"{screen.painted(name, 'bold')}  {datatype_name(array.dtype)} {shape_text(array.shape)}")
        for line in _lines(array):
            screen.line(f"  {line}")
    if result.timing is not None:
        timing = result.timing
        screen.line(
            f"waited {ms_text(timing.queue_ms)} ms, ran {ms_text(timing.run_ms)} ms in a batch of {timing.batch_rows}"
        )


def answer_json(result: InferResult) -> dict[str, Any]:
    """Return the answer as the Open Inference Protocol writes it: flat data, NaN and infinities as text."""
    answer: dict[str, Any] = {
        "model_name": result.model,
        "model_version": str(result.version),
        "outputs": [
            {
                "name": name,
                "datatype": datatype_name(array.dtype),
                "shape": list(array.shape),
                "data": [_json_value(value) for value in array.reshape(-1).tolist()],
            }
            for name, array in result.outputs.items()
        ],
    }
    if result.timing is not None:
        timing = result.timing
        answer["timing"] = {"queue_ms": timing.queue_ms, "run_ms": timing.run_ms, "batch_rows": timing.batch_rows}
    return answer


def save(outputs: Mapping[str, Array], where: Path) -> list[Path]:
    """Write outputs as .npy: one file for a model's only output, else a file each in a folder. Returns the files."""
    if where.suffix == ".npy":
        if len(outputs) != 1:
            raise UsageError(f"--output {where}: the model has {len(outputs)} outputs; name a folder, or one --outputs")
        files = {where: next(iter(outputs.values()))}
    else:
        where.mkdir(parents=True, exist_ok=True)
        files = {where / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.npy": array for name, array in outputs.items()}
    for path, array in files.items():
        np.save(path, array.astype("S") if array.dtype.kind == "O" else array, allow_pickle=False)
    return list(files)


def _lines(array: Array) -> list[str]:
    if array.size == 0:
        return ["empty"]
    if _are_scores(array):
        rows = array.reshape(-1, array.shape[-1])
        return [line for row in rows for line in _best(row)]
    if array.size <= WHOLE_ELEMENTS:
        shown = np.array2string(array, precision=4, suppress_small=True, max_line_width=100, separator=", ")
        return shown.splitlines()
    lines = [np.array2string(array, precision=4, suppress_small=True, max_line_width=100, threshold=8, edgeitems=2)]
    if array.dtype.kind in "iuf":
        numbers = array.astype(np.float64)
        finite = numbers[np.isfinite(numbers)]
        if finite.size:
            lines.append(
                f"min {finite.min():.4g}, mean {finite.mean():.4g}, max {finite.max():.4g}, std {finite.std():.4g}"
            )
        if finite.size < numbers.size:
            lines.append(f"{numbers.size - finite.size:,} values are NaN or infinite")
    return [line for text in lines for line in text.splitlines()]


def _are_scores(array: Array) -> bool:
    """Return whether an array is a few rows with one float for each class."""
    if array.dtype.kind != "f" or array.ndim not in (1, 2) or array.shape[-1] < MIN_SCORES:
        return False
    return array.size // array.shape[-1] <= MAX_SCORE_ROWS and bool(np.isfinite(array).all())


def _best(row: Array) -> list[str]:
    scores = row.astype(np.float64)
    best = np.argsort(-scores, kind="stable")[:BEST]
    is_share = bool((scores >= 0).all()) and abs(float(scores.sum()) - 1) < 0.01
    width = len(str(int(best.max())))
    values = (f"{scores[index]:.2%}" if is_share else f"{scores[index]:.4f}" for index in best)
    return [
        f"{rank}. [{str(index).rjust(width)}]  {value}"
        for rank, (index, value) in enumerate(zip(best, values, strict=True), 1)
    ]


def _json_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
