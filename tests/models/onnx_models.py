"""Small ONNX models, one property each. Every function writes `model.onnx` into a folder and gives its path back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edge_runtime.testing.backend_kit import mlp_weights

OPSET = 17
IR_VERSION = 8
"""What ONNX Runtime 1.23 (the last for Python 3.10) and every later one reads."""

ELEMENT_TYPES = {
    "BOOL": TensorProto.BOOL, "UINT8": TensorProto.UINT8, "UINT16": TensorProto.UINT16, "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64, "INT8": TensorProto.INT8, "INT16": TensorProto.INT16, "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64, "FP16": TensorProto.FLOAT16, "FP32": TensorProto.FLOAT, "FP64": TensorProto.DOUBLE,
    "BF16": TensorProto.BFLOAT16, "BYTES": TensorProto.STRING,
}  # fmt: skip

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def mlp(folder: Path, rows: int | str = "rows", output_shape: Sequence[int | str] | None = None) -> Path:
    """x FP32 [rows, 16] -> y FP32 [rows, 4]; fixed rows when `rows` is a number."""
    first, second = mlp_weights()
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "second"], ["y"]),
    ]
    weights = [numpy_helper.from_array(first, "first"), numpy_helper.from_array(second, "second")]
    shape = output_shape if output_shape is not None else [rows, 4]
    return _write(folder, nodes, [("x", "FP32", [rows, 16])], [("y", "FP32", shape)], weights)


def mlp_int8(folder: Path, name: str = "model.int8.onnx") -> Path:
    """`mlp` quantised: weights int8 by column, what goes into each product uint8, as ONNX Runtime's tools write it."""
    scales = {"x": 8 / 255, "b": 32 / 255}
    nodes: list[onnx.NodeProto] = []
    weights = [numpy_helper.from_array(np.array(128, np.uint8), "x_zero")]
    weights.append(numpy_helper.from_array(np.array(0, np.uint8), "b_zero"))
    for source, scale in scales.items():
        weights.append(numpy_helper.from_array(np.array(scale, np.float32), f"{source}_scale"))
    for source, weight, result in (("x", "first", "a"), ("b", "second", "y")):
        values = mlp_weights()[0 if weight == "first" else 1]
        step = np.abs(values).max(axis=0) / 127
        weights.append(numpy_helper.from_array(np.round(values / step).astype(np.int8), weight))
        weights.append(numpy_helper.from_array(step.astype(np.float32), f"{weight}_scale"))
        weights.append(numpy_helper.from_array(np.zeros(len(step), np.int8), f"{weight}_zero"))
        scale_of = [f"{source}_scale", f"{source}_zero"]
        nodes += [
            helper.make_node("QuantizeLinear", [source, *scale_of], [f"{source}_q"]),
            helper.make_node("DequantizeLinear", [f"{source}_q", *scale_of], [f"{source}_d"]),
            helper.make_node(
                "DequantizeLinear", [weight, f"{weight}_scale", f"{weight}_zero"], [f"{weight}_d"], axis=1
            ),
            helper.make_node("MatMul", [f"{source}_d", f"{weight}_d"], [result]),
        ]
        if result == "a":
            nodes.append(helper.make_node("Relu", ["a"], ["b"]))
    return _write(folder, nodes, [("x", "FP32", ["rows", 16])], [("y", "FP32", ["rows", 4])], weights, name)


def accumulator(folder: Path, rows: int | str | None = "rows", gain: float = 1.0) -> Path:
    """x FP32 [rows, 1] -> total, number FP32 [rows, 1]: the sum of `gain * x`, and how many, from the states on.

    States: `a_sum` -> `z_sum`, `b_count` -> `y_count`: names of inputs and of outputs sort differently. START FP32
    [rows, 1] does nothing but be there. rows None: no axis of rows.
    """
    shape = [1] if rows is None else [rows, 1]
    weights = [
        numpy_helper.from_array(np.array([gain], np.float32), "gain"),
        numpy_helper.from_array(np.array([1.0], np.float32), "one"),
        numpy_helper.from_array(np.array([0.0], np.float32), "nothing"),
    ]
    nodes = [
        helper.make_node("Mul", ["x", "gain"], ["scaled"]),
        helper.make_node("Add", ["a_sum", "scaled"], ["z_sum"]),
        helper.make_node("Add", ["b_count", "one"], ["y_count"]),
        helper.make_node("Identity", ["z_sum"], ["total"]),
        helper.make_node("Mul", ["START", "nothing"], ["none"]),
        helper.make_node("Add", ["y_count", "none"], ["number"]),
    ]
    inputs = [(name, "FP32", shape) for name in ("x", "a_sum", "b_count", "START")]
    outputs = [(name, "FP32", shape) for name in ("total", "number", "y_count", "z_sum")]
    return _write(folder, nodes, inputs, outputs, weights)


def triton_sequence(folder: Path, *, adds_id: bool) -> Path:
    """INPUT INT32 [rows, 1] -> OUTPUT: INPUT + START, and with the last CORRID too; as Triton's example models.

    START, END, READY INT32, and where adds_id CORRID UINT64, each [rows, 1].
    """
    nodes = [helper.make_node("Add", ["INPUT", "START"], ["begun"])]
    names = ["START", "READY"]
    inputs = [("INPUT", "INT32", ["rows", 1])]
    if adds_id:
        nodes += [
            helper.make_node("Cast", ["CORRID"], ["id"], to=TensorProto.INT32),
            helper.make_node("Mul", ["id", "END"], ["last"]),
            helper.make_node("Add", ["begun", "last"], ["told"]),
        ]
        names.append("END")
        inputs.append(("CORRID", "UINT64", ["rows", 1]))
    nodes.append(helper.make_node("Mul", ["told" if adds_id else "begun", "READY"], ["OUTPUT"]))
    inputs += [(name, "INT32", ["rows", 1]) for name in names]
    return _write(folder, nodes, inputs, [("OUTPUT", "INT32", ["rows", 1])])


def recurrent(folder: Path, size: int) -> Path:
    """x, h_in FP32 [rows, size] -> y, h_out FP32 [rows, size]: four matrices, as a small recurrent cell."""
    random = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array((random.normal(size=(size, size)) / size).astype(np.float32), f"w{index}")
        for index in range(4)
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["of_x"]),
        helper.make_node("MatMul", ["h_in", "w1"], ["of_h"]),
        helper.make_node("Add", ["of_x", "of_h"], ["sum"]),
        helper.make_node("Tanh", ["sum"], ["a"]),
        helper.make_node("MatMul", ["a", "w2"], ["b"]),
        helper.make_node("Tanh", ["b"], ["h_out"]),
        helper.make_node("MatMul", ["h_out", "w3"], ["y"]),
    ]
    shape = ["rows", size]
    inputs, outputs = ([(name, "FP32", shape) for name in names] for names in (("x", "h_in"), ("y", "h_out")))
    return _write(folder, nodes, inputs, outputs, weights)


def controls(folder: Path) -> Path:
    """x FP32 [rows, 1] -> told INT32 [rows, 4]: START, END, READY and CORRID as they came, each an input [rows, 1]."""
    nodes = [
        helper.make_node("Cast", ["CORRID"], ["id"], to=TensorProto.INT32),
        helper.make_node("Concat", ["START", "END", "READY", "id"], ["told"], axis=1),
        helper.make_node("Identity", ["h_in"], ["h_out"]),
        helper.make_node("Identity", ["x"], ["y"]),
    ]
    inputs = [("x", "FP32", ["rows", 1]), ("h_in", "FP32", ["rows", 1]), ("CORRID", "UINT64", ["rows", 1])]
    inputs += [(name, "INT32", ["rows", 1]) for name in ("START", "END", "READY")]
    outputs = [("told", "INT32", ["rows", 4]), ("h_out", "FP32", ["rows", 1]), ("y", "FP32", ["rows", 1])]
    return _write(folder, nodes, inputs, outputs)


def growing(folder: Path) -> Path:
    """x FP32 [1] -> size INT64 [1]: of all x so far, which the state `past` -> `next` [n] holds."""
    nodes = [
        helper.make_node("Concat", ["past", "x"], ["next"], axis=0),
        helper.make_node("Shape", ["next"], ["size"]),
    ]
    inputs = [("x", "FP32", [1]), ("past", "FP32", ["n"])]
    return _write(folder, nodes, inputs, [("size", "INT64", [1]), ("next", "FP32", ["m"])])


def two_in_two_out(folder: Path) -> Path:
    """a FP32 [rows, 3], b INT64 [rows, 2] -> sum FP32 [rows, 3] = a + a, twice INT64 [rows, 2] = b + b."""
    nodes = [helper.make_node("Add", ["a", "a"], ["sum"]), helper.make_node("Add", ["b", "b"], ["twice"])]
    inputs = [("a", "FP32", ["rows", 3]), ("b", "INT64", ["rows", 2])]
    outputs = [("sum", "FP32", ["rows", 3]), ("twice", "INT64", ["rows", 2])]
    return _write(folder, nodes, inputs, outputs)


def identity(folder: Path, datatype: str) -> Path:
    """x [rows, 2] -> y [rows, 2] of any datatype."""
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    return _write(folder, nodes, [("x", datatype, ["rows", 2])], [("y", datatype, ["rows", 2])])


def text_copy(folder: Path) -> Path:
    """x BYTES [rows] -> y BYTES [rows]."""
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    return _write(folder, nodes, [("x", "BYTES", ["rows"])], [("y", "BYTES", ["rows"])])


def renamed(folder: Path) -> Path:
    """x FP32 [rows, 2] -> y FP32 [rows, 2] = relu(x), by way of a tensor `a` that only takes another name."""
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Identity", ["a"], ["y"])]
    return _write(folder, nodes, [("x", "FP32", ["rows", 2])], [("y", "FP32", ["rows", 2])])


def running_sum(folder: Path) -> Path:
    """x FP32 [steps, 4] -> y FP32 [steps, 4], summed along axis 0: dynamic everywhere, yet no batch."""
    axis = numpy_helper.from_array(np.array(0, np.int64), "axis")
    nodes = [helper.make_node("CumSum", ["x", "axis"], ["y"])]
    return _write(folder, nodes, [("x", "FP32", ["steps", 4])], [("y", "FP32", ["steps", 4])], [axis])


def product(folder: Path) -> Path:
    """a FP32 [n, k], b FP32 [l, m] -> y FP32 [n, m] = a @ b: fits the spec for any k and l, fails unless they agree."""
    nodes = [helper.make_node("MatMul", ["a", "b"], ["y"])]
    inputs = [("a", "FP32", ["n", "k"]), ("b", "FP32", ["l", "m"])]
    return _write(folder, nodes, inputs, [("y", "FP32", ["n", "m"])])


def where_nonzero(folder: Path) -> Path:
    """x FP32 [rows, 2] -> places INT64 [found, 2]: as many rows as the data has, like detections after NMS."""
    nodes = [helper.make_node("NonZero", ["x"], ["i"]), helper.make_node("Transpose", ["i"], ["places"])]
    return _write(folder, nodes, [("x", "FP32", ["rows", 2])], [("places", "INT64", ["found", 2])])


def wide(folder: Path, size: int = 1024) -> Path:
    """x FP32 [rows, size] -> y FP32 [rows, size] through one matrix: `4 * size * size` bytes of weights."""
    matrix = np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "matrix"], ["y"])]
    weights = [numpy_helper.from_array(matrix, "matrix")]
    return _write(folder, nodes, [("x", "FP32", ["rows", size])], [("y", "FP32", ["rows", size])], weights)


def scaled(folder: Path, factor: float, size: int = 1024) -> Path:
    """x FP32 [rows, size] -> y FP32 [rows, size] = factor * x, by a matrix of `4 * size * size` bytes."""
    weights = [numpy_helper.from_array((np.eye(size) * factor).astype(np.float32), "matrix")]
    nodes = [helper.make_node("MatMul", ["x", "matrix"], ["y"])]
    return _write(folder, nodes, [("x", "FP32", ["rows", size])], [("y", "FP32", ["rows", size])], weights)


def added(folder: Path, constant: float = 1.0, columns: int = 2) -> Path:
    """x FP32 [rows, 2] -> y FP32 [rows, columns] = x + constant, beside more columns of the constant."""
    weights = [numpy_helper.from_array(np.full(2, constant, np.float32), "constant")]
    nodes = [helper.make_node("Add", ["x", "constant"], ["y" if columns == 2 else "sum"])]
    if columns != 2:
        nodes.append(helper.make_node("Pad", ["sum", "pads", "fill"], ["y"]))
        weights.append(numpy_helper.from_array(np.array([0, 0, 0, columns - 2]), "pads"))
        weights.append(numpy_helper.from_array(np.array(constant, np.float32), "fill"))
    return _write(folder, nodes, [("x", "FP32", ["rows", 2])], [("y", "FP32", ["rows", columns])], weights)


def no_number(folder: Path) -> Path:
    """x FP32 [rows, 2] -> y FP32 [rows, 2] = 0 / 0."""
    nodes = [helper.make_node("Sub", ["x", "x"], ["zero"]), helper.make_node("Div", ["zero", "zero"], ["y"])]
    return _write(folder, nodes, [("x", "FP32", ["rows", 2])], [("y", "FP32", ["rows", 2])])


def endless(folder: Path) -> Path:
    """x FP32 [rows, 2] -> y FP32 [rows, 2]: adds x to itself for some hundred thousand years."""
    return _looping(folder, [], [numpy_helper.from_array(np.array(2**62), "most")])


def trap(folder: Path) -> Path:
    """x FP32 [rows, 2] -> y FP32 [rows, 2] = x; as `endless` where a value of x is 8 or more."""
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["largest"], keepdims=0),
        helper.make_node("Div", ["largest", "eight"], ["share"]),
        helper.make_node("Cast", ["share"], ["whole"], to=TensorProto.INT64),
        helper.make_node("Mul", ["whole", "many"], ["most"]),
    ]
    weights = [
        numpy_helper.from_array(np.array(8, np.float32), "eight"),
        numpy_helper.from_array(np.array(2**58), "many"),
    ]
    return _looping(folder, nodes, weights)


def _looping(folder: Path, nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto]) -> Path:
    """x FP32 [rows, 2] -> y FP32 [rows, 2]: adds x to itself `most` times, which the nodes or weights say."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("before", "after")]
    count = helper.make_tensor_value_info("count", TensorProto.INT64, [])
    conditions = [helper.make_tensor_value_info(name, TensorProto.BOOL, []) for name in ("goes_on", "goes_on_still")]
    body = helper.make_graph(
        [
            helper.make_node("Add", ["before", "x"], ["after"]),
            helper.make_node("Identity", ["goes_on"], ["goes_on_still"]),
        ],
        "body",
        [count, conditions[0], tensors[0]],
        [conditions[1], tensors[1]],
    )
    nodes = [*nodes, helper.make_node("Loop", ["most", "", "x"], ["y"], body=body)]
    return _write(folder, nodes, [("x", "FP32", ["rows", 2])], [("y", "FP32", ["rows", 2])], weights)


def hungry(folder: Path, nbytes: int) -> Path:
    """x FP32 [rows, 2] -> y FP32 [rows, 2] by way of a tensor of so many bytes, which the file is too small to hold."""
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
        helper.make_node("Expand", ["most", "shape"], ["large"]),
        helper.make_node("ReduceMax", ["large"], ["one"], keepdims=0),
        helper.make_node("Add", ["x", "one"], ["y"]),
    ]
    weights = [numpy_helper.from_array(np.array([nbytes // 4096, 1024]), "shape")]
    return _write(folder, nodes, [("x", "FP32", ["rows", 2])], [("y", "FP32", ["rows", 2])], weights)


def slow(folder: Path, constant: float, size: int = 384, steps: int = 24) -> Path:
    """x FP32 [rows, 2] -> y FP32 [rows, 2] = x + constant, after `2 * steps * size**3` operations for nothing."""
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
        helper.make_node("Expand", ["most", "shape"], ["m0"]),
        *(helper.make_node("MatMul", [f"m{step}", "matrix"], [f"m{step + 1}"]) for step in range(steps)),
        helper.make_node("ReduceMax", [f"m{steps}"], ["last"], keepdims=0),
        helper.make_node("Mul", ["last", "zero"], ["nothing"]),
        helper.make_node("Add", ["x", "constant"], ["sum"]),
        helper.make_node("Add", ["sum", "nothing"], ["y"]),
    ]
    weights = [
        numpy_helper.from_array(np.array([size, size]), "shape"),
        numpy_helper.from_array(np.full((size, size), 1e-3, np.float32), "matrix"),
        numpy_helper.from_array(np.array(0, np.float32), "zero"),
        numpy_helper.from_array(np.full(2, constant, np.float32), "constant"),
    ]
    return _write(folder, nodes, [("x", "FP32", ["rows", 2])], [("y", "FP32", ["rows", 2])], weights)


def picky(folder: Path, constant: float) -> Path:
    """x FP32 [rows, 2] -> y FP32 [rows, 2] = x + constant; the run fails where a value of x is 8 or more."""
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
        helper.make_node("Cast", ["most"], ["index"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "index"], ["nothing"]),
        helper.make_node("Add", ["x", "constant"], ["sum"]),
        helper.make_node("Add", ["sum", "nothing"], ["y"]),
    ]
    weights = [
        numpy_helper.from_array(np.zeros(8, np.float32), "table"),
        numpy_helper.from_array(np.full(2, constant, np.float32), "constant"),
    ]
    return _write(folder, nodes, [("x", "FP32", ["rows", 2])], [("y", "FP32", ["rows", 2])], weights)


def moody(folder: Path, constant: float) -> Path:
    """x FP32 [rows, 2] -> y FP32 [rows, 2] = x + constant, but constant - x for rows whose sum is 3."""
    nodes = [
        helper.make_node("ReduceSum", ["x", "axis"], ["sum"]),
        helper.make_node("Equal", ["sum", "three"], ["is_moody"]),
        helper.make_node("Neg", ["x"], ["minus"]),
        helper.make_node("Where", ["is_moody", "minus", "x"], ["chosen"]),
        helper.make_node("Add", ["chosen", "constant"], ["y"]),
    ]
    weights = [
        numpy_helper.from_array(np.array([1]), "axis"),
        numpy_helper.from_array(np.array(3, np.float32), "three"),
        numpy_helper.from_array(np.full(2, constant, np.float32), "constant"),
    ]
    return _write(folder, nodes, [("x", "FP32", ["rows", 2])], [("y", "FP32", ["rows", 2])], weights)


def crashing(folder: Path) -> Path:
    """x INT64 [rows, 2] -> y FP32 [rows, 2, depth]: ends the process at load: OneHot reads a depth of no value."""
    nodes = [helper.make_node("OneHot", ["x", "depth", "values"], ["y"])]
    weights = [
        numpy_helper.from_array(np.array([], np.int64), "depth"),
        numpy_helper.from_array(np.array([0, 1], np.float32), "values"),
    ]
    return _write(folder, nodes, [("x", "INT64", ["rows", 2])], [("y", "FP32", ["rows", 2, "depth"])], weights)


def sequence_output(folder: Path) -> Path:
    """x FP32 [rows, 2] -> a sequence of tensors, which no datatype of the wire describes."""
    node = helper.make_node("SequenceConstruct", ["x"], ["y"])
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 2])]
    outputs = [helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)]
    return save(folder, helper.make_graph([node], "sequence", inputs, outputs))


def external_tensor(location: str, name: str = "w", shape: Sequence[int] = (2,), **entries: str) -> onnx.TensorProto:
    """A FP32 tensor whose data is said to be at `location`, with more entries (`offset`, `length` …) as given."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def add_weights(folder: Path, weights: onnx.TensorProto) -> Path:
    """x FP32 [rows, 2] -> y FP32 [rows, 2] = x + w, with the tensor `w` as given."""
    nodes = [helper.make_node("Add", ["x", weights.name], ["y"])]
    return _write(folder, nodes, [("x", "FP32", ["rows", 2])], [("y", "FP32", ["rows", 2])], [weights])


def colours(folder: Path, side: int | str = 8) -> Path:
    """image FP32 [rows, 3, side, side] -> scores [rows, 3]: how much of each colour it has."""
    node = helper.make_node("ReduceMean", ["image"], ["scores"], axes=[2, 3], keepdims=0)
    inputs = [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["rows", 3, side, side])]
    outputs = [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["rows", 3])]
    return save(folder, helper.make_graph([node], "colours", inputs, outputs))


def picture_copy(folder: Path, shape: Sequence[int | str] = ("rows", 3, 8, 8), datatype: str = "FP32") -> Path:
    """image -> copy: what a picture became, as it is."""
    nodes = [helper.make_node("Identity", ["image"], ["copy"])]
    return _write(folder, nodes, [("image", datatype, shape)], [("copy", datatype, shape)])


def detector(folder: Path) -> Path:
    """image FP32 [rows, 3, 8, 8] -> boxes [rows, 6, 2], as yolov8: a cat in the middle, a dog left above."""
    found = np.array([[4, 2], [4, 2], [4, 2], [4, 2], [0.9, 0.1], [0, 0.5]], np.float32)
    nodes = [
        helper.make_node("ReduceMean", ["image"], ["mean"], axes=[2, 3], keepdims=0),
        helper.make_node("Slice", ["mean", "none", "one", "axis"], ["first"]),
        helper.make_node("Reshape", ["first", "shape"], ["column"]),
        helper.make_node("Mul", ["column", "zero"], ["nothing"]),
        helper.make_node("Add", ["nothing", "found"], ["boxes"]),
    ]
    weights = [
        numpy_helper.from_array(np.array(value, dtype), name)
        for name, value, dtype in (
            ("none", [0], np.int64), ("one", [1], np.int64), ("axis", [1], np.int64), ("shape", [-1, 1, 1], np.int64),
            ("zero", 0, np.float32), ("found", found[None], np.float32),
        )
    ]  # fmt: skip
    return _write(folder, nodes, [("image", "FP32", ("rows", 3, 8, 8))], [("boxes", "FP32", ("rows", 6, 2))], weights)


def fixed_outputs(
    folder: Path, arrays: Mapping[str, Floats], metadata: Mapping[str, str] | None = None, side: int = 32
) -> Path:
    """images FP32 [rows, 3, side, side] -> these arrays, once a row, whatever is seen. metadata: of its file."""
    nodes = [
        helper.make_node("ReduceMean", ["images"], ["mean"], axes=[1, 2, 3], keepdims=1),
        helper.make_node("Mul", ["mean", "zero"], ["nothing"]),
    ]
    weights = [numpy_helper.from_array(np.array(0, np.float32), "zero")]
    for name, array in arrays.items():
        weights.append(numpy_helper.from_array(np.asarray(array, np.float32)[None], f"of {name}"))
        weights.append(numpy_helper.from_array(np.array([-1] + [1] * np.ndim(array), np.int64), f"rank of {name}"))
        nodes += [
            helper.make_node("Reshape", ["nothing", f"rank of {name}"], [f"no {name}"]),
            helper.make_node("Add", [f"no {name}", f"of {name}"], [name]),
        ]
    outputs = [(name, "FP32", ["rows", *np.shape(array)]) for name, array in arrays.items()]
    path = _write(folder, nodes, [("images", "FP32", ["rows", 3, side, side])], outputs, weights)
    if metadata:
        model = onnx.load(path)
        helper.set_model_props(model, dict(metadata))
        onnx.save(model, path)
    return path


def detections(folder: Path) -> Path:
    """image FP32 [3, height, width] -> boxes [2, 4], labels INT64 [2], scores [2], as torchvision's models give them.

    The first scores the picture's mean, the second a tenth of it.
    """
    nodes = [
        helper.make_node("ReduceMean", ["image"], ["mean"], keepdims=0),
        helper.make_node("Mul", ["mean", "shares"], ["scores"]),
        helper.make_node("Identity", ["two boxes"], ["boxes"]),
        helper.make_node("Identity", ["two labels"], ["labels"]),
    ]
    weights = [
        numpy_helper.from_array(np.array([1, 0.1], np.float32), "shares"),
        numpy_helper.from_array(np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32), "two boxes"),
        numpy_helper.from_array(np.array([1, 0], np.int64), "two labels"),
    ]
    outputs = [("boxes", "FP32", (2, 4)), ("labels", "INT64", (2,)), ("scores", "FP32", (2,))]
    return _write(folder, nodes, [("image", "FP32", (3, "height", "width"))], outputs, weights)


def finder(
    folder: Path,
    label: int = 0,
    rows: int | str = "rows",
    datatype: str = "FP32",
    shape: Sequence[int] = (3, 32, 32),
) -> Path:
    """image [rows, *shape] -> boxes [rows, 7, 16], as YOLOv8 has it: one box of class `label` of 3.

    Its score is the picture's mean / 255; its sides are a quarter and three quarters. shape: channels first or last.
    """
    height, width = shape[1:] if shape[0] == 3 else shape[:2]
    base, factor = np.zeros((1, 7, 16), np.float32), np.zeros((1, 7, 16), np.float32)
    base[0, :4, 5] = width / 2, height / 2, width / 2, height / 2
    factor[0, 4 + label, 5] = 1 / 255
    nodes = [
        helper.make_node("Cast", ["image"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["pixels"], ["mean4"], axes=[1, 2, 3], keepdims=1),
        helper.make_node("Squeeze", ["mean4", "axis"], ["mean"]),
        helper.make_node("Mul", ["mean", "factor"], ["score"]),
        helper.make_node("Add", ["score", "base"], ["boxes"]),
    ]
    weights = [
        numpy_helper.from_array(np.array([3], np.int64), "axis"),
        numpy_helper.from_array(factor, "factor"),
        numpy_helper.from_array(base, "base"),
    ]
    inputs, outputs = [("image", datatype, [rows, *shape])], [("boxes", "FP32", [rows, 7, 16])]
    return _write(folder, nodes, inputs, outputs, weights)


def sized_finder(folder: Path, height: int, width: int) -> Path:
    """images [rows, 3, height, width], orig_target_sizes INT64 [rows, 2] -> labels, boxes, scores, as D-FINE has them.

    One thing of class 7 at xmin 0.2, ymin 0.1, xmax 0.8, ymax 0.5, multiplied by the sizes. Its score: mean / 255.
    """
    shares = np.array([[[0.2, 0.1, 0.8, 0.5]]], np.float32)
    nodes = [
        helper.make_node("Cast", ["orig_target_sizes"], ["sizes"], to=TensorProto.FLOAT),
        helper.make_node("Concat", ["sizes", "sizes"], ["twice"], axis=1),
        helper.make_node("Unsqueeze", ["twice", "one"], ["factors"]),
        helper.make_node("Mul", ["factors", "shares"], ["boxes"]),
        helper.make_node("ReduceMean", ["images"], ["mean"], axes=[2, 3], keepdims=0),
        helper.make_node("ReduceMean", ["mean"], ["level"], axes=[1], keepdims=1),
        helper.make_node("Div", ["level", "full"], ["scores"]),
        helper.make_node("Cast", ["scores"], ["whole"], to=TensorProto.INT64),
        helper.make_node("Mul", ["whole", "nothing"], ["zero"]),
        helper.make_node("Add", ["zero", "label"], ["labels"]),
    ]
    weights = [
        numpy_helper.from_array(np.array([1], np.int64), "one"),
        numpy_helper.from_array(shares, "shares"),
        numpy_helper.from_array(np.array(255, np.float32), "full"),
        numpy_helper.from_array(np.array(0, np.int64), "nothing"),
        numpy_helper.from_array(np.array(7, np.int64), "label"),
    ]
    inputs = [("images", "FP32", ["rows", 3, height, width]), ("orig_target_sizes", "INT64", ["rows", 2])]
    outputs = [("labels", "INT64", ["rows", 1]), ("boxes", "FP32", ["rows", 1, 4]), ("scores", "FP32", ["rows", 1])]
    return _write(folder, nodes, inputs, outputs, weights)


def add_sub(folder: Path, datatype: str = "INT32") -> Path:
    """INPUT0, INPUT1 [rows, 16] -> OUTPUT0, their sum, OUTPUT1, their difference: Triton's `simple`."""
    nodes = [
        helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
        helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
    ]
    inputs = [(name, datatype, ["rows", 16]) for name in ("INPUT0", "INPUT1")]
    return _write(folder, nodes, inputs, [(name, datatype, ["rows", 16]) for name in ("OUTPUT0", "OUTPUT1")])


def channel_means(folder: Path) -> Path:
    """data_0 FP32 [1, 3, 8, 8] -> fc6_1 FP32 [1, 3, 1, 1], the means of its channels: shaped as Triton's DenseNet."""
    nodes = [helper.make_node("ReduceMean", ["data_0"], ["fc6_1"], axes=[2, 3], keepdims=1)]
    return _write(folder, nodes, [("data_0", "FP32", [1, 3, 8, 8])], [("fc6_1", "FP32", [1, 3, 1, 1])])


def means(folder: Path) -> Path:
    """pixels FP32 [rows, 3, 8, 8] -> scores FP32 [rows, 3], the means of its channels."""
    nodes = [helper.make_node("ReduceMean", ["pixels"], ["scores"], axes=[2, 3], keepdims=0)]
    return _write(folder, nodes, [("pixels", "FP32", ["rows", 3, 8, 8])], [("scores", "FP32", ["rows", 3])])


def gauge(folder: Path) -> Path:
    """x FP32 [rows, 4] -> y FP32 [rows, 1]: the mean."""
    nodes = [helper.make_node("ReduceMean", ["x"], ["y"], axes=[1], keepdims=1)]
    return _write(folder, nodes, [("x", "FP32", ["rows", 4])], [("y", "FP32", ["rows", 1])])


def tagger(folder: Path) -> Path:
    """input_ids, attention_mask INT64 [rows, tokens] -> tags FP32 [rows, tokens, 3], 1 where the label is the number of
    the token; vectors FP32 [rows, tokens, 2]: the token, and 1 where it is 0 and counts.
    """
    weights = [
        numpy_helper.from_array(np.array(3, np.int64), "depth"),
        numpy_helper.from_array(np.array([0, 1], np.float32), "off_on"),
        numpy_helper.from_array(np.array([2], np.int64), "last"),
    ]
    nodes = [
        helper.make_node("OneHot", ["input_ids", "depth", "off_on"], ["tags"], axis=2),
        helper.make_node("Cast", ["input_ids"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["attention_mask"], ["counts"], to=TensorProto.FLOAT),
        helper.make_node("Max", ["counts", "floats"], ["larger"]),
        helper.make_node("Sub", ["larger", "floats"], ["less"]),
        helper.make_node("Unsqueeze", ["floats", "last"], ["first"]),
        helper.make_node("Unsqueeze", ["less", "last"], ["second"]),
        helper.make_node("Concat", ["first", "second"], ["vectors"], axis=2),
    ]
    tokens = ["rows", "tokens"]
    inputs = [(name, "INT64", tokens) for name in ("input_ids", "attention_mask")]
    outputs = [("tags", "FP32", [*tokens, 3]), ("vectors", "FP32", [*tokens, 2])]
    return _write(folder, nodes, inputs, outputs, weights)


def save(
    folder: Path, graph: onnx.GraphProto, functions: Sequence[onnx.FunctionProto] = (), name: str = "model.onnx"
) -> Path:
    """Write a graph as `name`, without any check: broken ones are wanted too."""
    folder.mkdir(parents=True, exist_ok=True)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, functions=list(functions)
    )
    path = folder / name
    path.write_bytes(model.SerializeToString())
    return path


def _write(
    folder: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[tuple[str, str, Sequence[int | str]]],
    outputs: Sequence[tuple[str, str, Sequence[int | str]]],
    weights: Sequence[onnx.TensorProto] = (),
    name: str = "model.onnx",
) -> Path:
    described = [
        [helper.make_tensor_value_info(name, ELEMENT_TYPES[datatype], list(shape)) for name, datatype, shape in tensors]
        for tensors in (inputs, outputs)
    ]
    graph = helper.make_graph(list(nodes), "graph", described[0], described[1], list(weights))
    return save(folder, graph, name=name)
