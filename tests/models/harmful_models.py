"""Small valid models that end, stall or starve the process that loads or runs them, with the inputs that do it.

Owns: functions that write `model.onnx` into a folder, and `HARMFUL`, what each was seen to do to ONNX Runtime 1.31.1
and 1.23.2 and to OpenVINO 2026.4.1 on x86-64 (arm64 gives a number for a division that x86-64 traps on). Loads none of
them: whoever does needs a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.models.onnx_models import crashing, save

Inputs = Mapping[str, np.ndarray[Any, Any]]

SMALLEST = -(2.0**31)
"""`dividing` ends the process that runs it on a row with this number; FP32 holds it exactly."""

FAR = 10**9
"""An index that `picking` looks up outside of its table, and of the memory of its process."""

_MANY = 2**31 - 1


def dividing(folder: Path) -> Path:
    """x FP32 [rows, 2] -> y FP32 [rows, 2] = -x, by dividing whole numbers by -1: SMALLEST ends ONNX Runtime."""
    nodes = [
        helper.make_node("Cast", ["x"], ["whole"], to=TensorProto.INT32),
        helper.make_node("Div", ["whole", "by"], ["quotient"]),
        helper.make_node("Cast", ["quotient"], ["y"], to=TensorProto.FLOAT),
    ]
    return _rows(folder, nodes, {"by": np.array([-1, -1], np.int32)})


def dividing_finder(folder: Path) -> Path:
    """image FP32 [rows, 3, 32, 32] -> boxes [rows, 7, 16], as YOLOv8 has it: SMALLEST ends ONNX Runtime."""
    base, factor = np.zeros((1, 7, 16), np.float32), np.zeros((1, 7, 16), np.float32)
    base[0, :4, 5] = 16
    factor[0, 4, 5] = -1 / 255
    nodes = [
        helper.make_node("ReduceMax", ["image"], ["most"], axes=[1, 2, 3], keepdims=0),
        helper.make_node("Cast", ["most"], ["whole"], to=TensorProto.INT32),
        helper.make_node("Div", ["whole", "by"], ["quotient"]),
        helper.make_node("Cast", ["quotient"], ["number"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["number", "axes"], ["column"]),
        helper.make_node("Mul", ["column", "factor"], ["score"]),
        helper.make_node("Add", ["score", "base"], ["boxes"]),
    ]
    inputs = [("image", TensorProto.FLOAT, ["rows", 3, 32, 32])]
    outputs = [("boxes", TensorProto.FLOAT, ["rows", 7, 16])]
    weights = {"by": np.array([-1], np.int32), "axes": np.array([1, 2]), "base": base, "factor": factor}
    return _write(folder, nodes, inputs, outputs, weights)


def dividing_by(folder: Path) -> Path:
    """x INT32 [rows, 2] -> y INT32 [rows, 2] = 8 / (x - 2): a 2 ends ONNX Runtime 1.23.2, and fails with 1.31.1."""
    nodes = [helper.make_node("Sub", ["x", "two"], ["by"]), helper.make_node("Div", ["eight", "by"], ["y"])]
    weights = {"two": np.array([2, 2], np.int32), "eight": np.array([8, 8], np.int32)}
    shape = ["rows", 2]
    return _write(folder, nodes, [("x", TensorProto.INT32, shape)], [("y", TensorProto.INT32, shape)], weights)


def picking(folder: Path) -> Path:
    """x INT64 [rows, 1] -> y FP32 [rows, 2]: rows of a table of four; FAR ends OpenVINO."""
    nodes = [helper.make_node("GatherND", ["table", "x"], ["y"])]
    weights = {"table": np.arange(8, dtype=np.float32).reshape(4, 2)}
    inputs, outputs = [("x", TensorProto.INT64, ["rows", 1])], [("y", TensorProto.FLOAT, ["rows", 2])]
    return _write(folder, nodes, inputs, outputs, weights)


def unpooling(folder: Path) -> Path:
    """x FP32 [rows, 1, 2, 2], places INT64 alike -> y FP32 [rows, 1, 4, 4]: FAR ends ONNX Runtime 1.23.2."""
    nodes = [helper.make_node("MaxUnpool", ["x", "places"], ["y"], kernel_shape=[2, 2], strides=[2, 2])]
    shape = ["rows", 1, 2, 2]
    inputs = [("x", TensorProto.FLOAT, shape), ("places", TensorProto.INT64, shape)]
    return _write(folder, nodes, inputs, [("y", TensorProto.FLOAT, ["rows", 1, 4, 4])])


def counting(folder: Path) -> Path:
    """start, end, step INT64 [1] -> y INT64 [count]; a warm-up with a step of 0 ends OpenVINO."""
    names = ("start", "end", "step")
    nodes = [
        *(helper.make_node("Squeeze", [name, "axis"], [f"{name}_scalar"]) for name in names),
        helper.make_node("Range", [f"{name}_scalar" for name in names], ["y"]),
    ]
    inputs = [(name, TensorProto.INT64, [1]) for name in names]
    return _write(folder, nodes, inputs, [("y", TensorProto.INT64, ["count"])], {"axis": np.array([0])})


def looping(folder: Path) -> Path:
    """x FP32 [rows, 2], times INT64 [1] -> y FP32 [rows, 2]: adds x to itself as often as the client says."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("before", "after")]
    conditions = [helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("goes_on", "goes_on_still")]
    body = helper.make_graph(
        [
            helper.make_node("Add", ["before", "x"], ["after"]),
            helper.make_node("Identity", ["goes_on"], ["goes_on_still"]),
        ],
        "body",
        [helper.make_tensor_value_info("count", TensorProto.INT64, []), conditions[0], values[0]],
        [conditions[1], values[1]],
    )
    nodes = [
        helper.make_node("Squeeze", ["times", "axis"], ["most"]),
        helper.make_node("Loop", ["most", "", "x"], ["y"], body=body),
    ]
    shape = ["rows", 2]
    inputs = [("x", TensorProto.FLOAT, shape), ("times", TensorProto.INT64, [1])]
    return _write(folder, nodes, inputs, [("y", TensorProto.FLOAT, shape)], {"axis": np.array([0])})


def sized_by_client(folder: Path) -> Path:
    """shape INT64 [2] -> y FP32 [a, b] of ones, as large as the client says in 16 bytes."""
    one = numpy_helper.from_array(np.array([1], np.float32))
    nodes = [helper.make_node("ConstantOfShape", ["shape"], ["y"], value=one)]
    return _write(folder, nodes, [("shape", TensorProto.INT64, [2])], [("y", TensorProto.FLOAT, ["a", "b"])])


def crashing_at_load(folder: Path) -> Path:
    """x FP32 [rows, 2] -> y FP32 [rows, 2]: each library divides two constants while it loads, and is ended by that."""
    nodes = [
        helper.make_node("Div", ["smallest", "by"], ["quotient"]),
        helper.make_node("Cast", ["quotient"], ["number"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "number"], ["y"]),
    ]
    return _rows(folder, nodes, {"smallest": np.full(2, -(2**31), np.int32), "by": np.full(2, -1, np.int32)})


@dataclass(frozen=True, slots=True)
class Harmful:
    """One model, an input that it answers, one that does harm (None: loading does), and what happens to each library.

    ends: library -> "crash", "endless" or "large" (2.3 GB; OpenVINO takes 4.4 for it); a library that is not named
    answers, or raises. "onnxruntime" is 1.23.2 and 1.31.1; "onnxruntime 1.23.2" is that one alone.
    """

    make: Callable[[Path], Path]
    ends: Mapping[str, str]
    good: Inputs = field(default_factory=dict)
    bad: Inputs | None = None


def _floats(*values: float) -> np.ndarray[Any, Any]:
    return np.array([values], np.float32)


HARMFUL: Mapping[str, Harmful] = {
    "one_hot_at_load": Harmful(crashing, {"onnxruntime": "crash"}),
    "crashing_at_load": Harmful(crashing_at_load, {"onnxruntime": "crash", "openvino": "crash"}),
    "dividing": Harmful(dividing, {"onnxruntime": "crash"}, {"x": _floats(1, 2)}, {"x": _floats(1, SMALLEST)}),
    "dividing_by": Harmful(
        dividing_by,
        {"onnxruntime 1.23.2": "crash"},
        {"x": np.array([[1, 3]], np.int32)},
        {"x": np.array([[1, 2]], np.int32)},
    ),
    "picking": Harmful(picking, {"openvino": "crash"}, {"x": np.array([[3]])}, {"x": np.array([[FAR]])}),
    "unpooling": Harmful(
        unpooling,
        {"onnxruntime 1.23.2": "crash"},
        {"x": np.ones((1, 1, 2, 2), np.float32), "places": np.zeros((1, 1, 2, 2), np.int64)},
        {"x": np.ones((1, 1, 2, 2), np.float32), "places": np.full((1, 1, 2, 2), FAR)},
    ),
    "counting": Harmful(
        counting,
        {"openvino": "crash"},
        {"start": np.array([0]), "end": np.array([4]), "step": np.array([1])},
        {"start": np.array([0]), "end": np.array([4]), "step": np.array([0])},
    ),
    "looping": Harmful(
        looping,
        {"onnxruntime": "endless", "openvino": "endless"},
        {"x": _floats(1, 2), "times": np.array([3])},
        {"x": _floats(1, 2), "times": np.array([_MANY])},
    ),
    "sized_by_client": Harmful(
        sized_by_client,
        {"onnxruntime": "large", "openvino": "large"},
        {"shape": np.array([2, 2])},
        {"shape": np.array([24_000, 24_000])},
    ),
}


def _rows(folder: Path, nodes: Sequence[onnx.NodeProto], weights: Mapping[str, np.ndarray[Any, Any]]) -> Path:
    shape = ["rows", 2]
    return _write(folder, nodes, [("x", TensorProto.FLOAT, shape)], [("y", TensorProto.FLOAT, shape)], weights)


def _write(
    folder: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[tuple[str, int, Sequence[int | str]]],
    outputs: Sequence[tuple[str, int, Sequence[int | str]]],
    weights: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    described = [[helper.make_tensor_value_info(*each) for each in tensors] for tensors in (inputs, outputs)]
    constants = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    return save(folder, helper.make_graph(list(nodes), "graph", described[0], described[1], constants))
