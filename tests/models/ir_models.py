"""OpenVINO IR: `model.xml` and `model.bin` in a folder, out of the ONNX models, and one that ONNX cannot say."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edge_runtime.backends.openvino.backend import import_openvino


def from_onnx(onnx_file: Path, folder: Path, name: str = "model.xml") -> Path:
    """Convert one ONNX file, weights unchanged; gives `model.xml`, or what it is to be called, back."""
    openvino = import_openvino()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    openvino.save_model(openvino.Core().read_model(str(onnx_file)), str(path), compress_to_fp16=False)
    return path


def remembering(folder: Path) -> Path:
    """x FP32 [rows, 2] -> sum FP32 [rows, 2]: x, and what all runs before took; the state of the first run is 1."""
    openvino = import_openvino()
    from openvino import opset13 as operators

    shape = openvino.PartialShape([-1, 2])
    x = operators.parameter(shape, np.float32, name="x")
    x.output(0).tensor.set_names({"x"})
    first = operators.add(operators.multiply(x, operators.constant(np.float32(0))), operators.constant(np.float32(1)))
    total = operators.add(operators.read_value(first, "total", openvino.Type.f32, shape), x, name="sum")
    total.output(0).tensor.set_names({"sum"})
    model = openvino.Model([operators.result(total)], [operators.assign(total, "total")], [x], "remembering")
    folder.mkdir(parents=True, exist_ok=True)
    openvino.save_model(model, str(folder / "model.xml"), compress_to_fp16=False)
    return folder / "model.xml"
