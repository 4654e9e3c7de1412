"""Graphs of OpenVINO that keep states of their own. Made in a process of its own: the library stays out of tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def accumulator(folder: Path, rows: int = -1, start: float = 5.0) -> Path:
    """x FP32 [rows, 1] -> total FP32 [rows, 1]: the sum so far, from `start` on. `sum` and `count` are its states."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.xml"
    subprocess.run([sys.executable, __file__, str(path), str(rows), str(start)], check=True)
    return path


def _write(path: str, rows: int, start: float) -> None:
    import numpy as np
    import openvino
    from openvino import opset13
    from openvino.op import util

    shape = openvino.PartialShape([rows, 1])
    x = opset13.parameter(shape, openvino.Type.f32, name="x")
    x.output(0).set_names({"x"})

    def state(name: str, beginning: float):
        described = util.VariableInfo()
        described.data_shape, described.data_type, described.variable_id = shape, openvino.Type.f32, name
        variable = util.Variable(described)
        first = opset13.broadcast(opset13.constant(np.float32([[beginning]])), opset13.shape_of(x))
        return variable, opset13.read_value(first, variable)

    of_sum, read_sum = state("sum", start)
    of_count, read_count = state("count", 0.0)
    total = opset13.add(read_sum, x)
    count = opset13.add(read_count, opset13.constant(np.float32([[1]])))
    results = [opset13.result(total), opset13.result(count)]
    for result, name in zip(results, ("total", "number"), strict=True):
        result.input_value(0).set_names({name})
    assigned = [opset13.assign(total, of_sum), opset13.assign(count, of_count)]
    openvino.save_model(openvino.Model(results, assigned, [x], "accumulator"), path, compress_to_fp16=False)


if __name__ == "__main__":
    _write(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
