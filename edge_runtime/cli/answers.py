"""An answer as a person reads it: small arrays whole, large ones in brief, of scores the best; or as JSON, or .npy."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.cli.arguments import UsageError
from edge_runtime.cli.models import shape_text
from edge_runtime.cli.screen import Screen, ms_text
from edge_runtime.messages import InferResult
from edge_runtime.tensors import Array, datatype_name

WHOLE_ELEMENTS = 64
"""Up to here every value is shown: about eight lines."""

MAX_SCORE_ROWS = 4
BEST = 5
MIN_SCORES = 6
"""Fewer classes than this are read at a glance."""


def print_answer(result: InferResult, screen: Screen) -> None:
    """Every output with its datatype and shape."""
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
    """The answer in the Open Inference Protocol's words; data flat, what JSON cannot say as text."""
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
    """A few rows of one float a class."""
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
