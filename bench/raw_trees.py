"""XGBoost by itself: makes the model of `trees`, and measures its own predict. Run by the converters' Python.

    python raw_trees.py make FOLDER         trains model.json, converts it to model.onnx (its input called `x`)
    python raw_trees.py measure FOLDER S    prints a line of JSON: rows a second of each way to call predict

Each way runs S seconds on 32 rows that are alike, as the daemon's requests are, so that neither mispredicts a branch;
and one on 32 that are not, beside ONNX Runtime on the same.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TREES, DEPTH, FEATURES, ROWS = 500, 6, 32, 32
SAMPLES = 8_000


def make(folder: Path) -> None:
    """Train 500 trees of depth 6 on made-up columns, and convert them."""
    import onnx
    import xgboost

    from edge_runtime_converters.onnx_from_xgboost import convert

    random = np.random.default_rng(0)
    rows = random.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
    value = rows[:, 0] * rows[:, 1] + rows[:, 2] - np.abs(rows[:, 3]) + 0.3 * random.normal(size=SAMPLES)
    settings = {"objective": "binary:logistic", "max_depth": DEPTH, "seed": 0, "nthread": 1}
    xgboost.train(settings, xgboost.DMatrix(rows, value > 0), TREES).save_model(folder / "model.json")
    convert(folder / "model.json", folder / "made.onnx", {})
    model = onnx.load(folder / "made.onnx")
    model.graph.input[0].name = "x"
    for node in model.graph.node:
        node.input[:] = ["x" if name == "features" else name for name in node.input]
    onnx.save(model, folder / "model.onnx")


def measure(folder: Path, seconds: float) -> dict[str, float]:
    """Rows a second, by the way of calling."""
    import onnxruntime
    import xgboost

    cores = len(os.sched_getaffinity(0))
    alike = np.full((ROWS, FEATURES), 0.5, np.float32)
    unlike = np.random.default_rng(1).normal(size=(ROWS, FEATURES)).astype(np.float32)

    def predict(threads: int, rows: Any, *, in_place: bool = True) -> Callable[[], object]:
        booster = xgboost.Booster(model_file=folder / "model.json")
        booster.set_param({"nthread": threads})
        if in_place:
            return lambda: booster.inplace_predict(rows)
        return lambda: booster.predict(xgboost.DMatrix(rows, nthread=threads))

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    return {
        "one": _rate([predict(1, alike)], seconds),
        "all": _rate([predict(cores, alike)], seconds),
        "matrix": _rate([predict(cores, alike, in_place=False)], seconds),
        "callers": _rate([predict(1, alike) for _ in range(cores)], seconds),
        "unlike": _rate([predict(1, unlike)], seconds),
        "unlike_onnx": _rate([lambda: session.run(None, {"x": unlike})], seconds),
        "alike_onnx": _rate([lambda: session.run(None, {"x": alike})], seconds),
    }


def _rate(calls: list[Callable[[], object]], seconds: float) -> float:
    counts = [0] * len(calls)
    for call in calls:
        call()
    began_s = time.perf_counter()
    until_s = began_s + seconds

    def repeat(index: int) -> None:
        while time.perf_counter() < until_s:
            calls[index]()
            counts[index] += 1

    threads = [threading.Thread(target=repeat, args=(index,)) for index in range(1, len(calls))]
    for thread in threads:
        thread.start()
    repeat(0)
    for thread in threads:
        thread.join()
    return sum(counts) * ROWS / (time.perf_counter() - began_s)


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    if what == "make":
        make(where)
    else:
        print(json.dumps(measure(where, float(sys.argv[3]))))
