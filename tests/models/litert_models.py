"""Small LiteRT models, one property each, written by the schema that LiteRT brings: TensorFlow is not needed.

Every function writes `model.tflite` into a folder and gives its path back. `LiteRtGraph` is what bench/litert_makers.py
makes larger ones with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.onnx_models import mlp_weights

FILE_IDENTIFIER = b"TFL3"
ELEMENT_TYPES = {
    "BOOL": "BOOL", "UINT8": "UINT8", "UINT16": "UINT16", "UINT32": "UINT32", "UINT64": "UINT64", "INT8": "INT8",
    "INT16": "INT16", "INT32": "INT32", "INT64": "INT64", "FP16": "FLOAT16", "FP32": "FLOAT32", "FP64": "FLOAT64",
    "BF16": "BFLOAT16", "BYTES": "STRING", "resource": "RESOURCE",
}  # fmt: skip

Quantisation = tuple[float, int]
"""scale, zero point."""


class LiteRtGraph:
    """One graph being written; tensors are numbers, in the order in which they are made."""

    def __init__(self) -> None:
        from ai_edge_litert import schema_py_generated as schema

        self.schema: Any = schema
        self._codes: dict[str, int] = {}
        self._tensors: list[Any] = []
        self._operators: list[Any] = []
        self._buffers = [schema.BufferT()]  # 0 is the empty one

    def tensor(
        self,
        datatype: str,
        shape: Sequence[int],
        *,
        name: str = "",
        data: np.ndarray[Any, Any] | None = None,
        scales: Sequence[float] = (),
        zero: int = 0,
        axis: int = 0,
        is_variable: bool = False,
    ) -> int:
        """A tensor; -1 is an open dimension. data: its values, where it is constant. scales: several are along axis."""
        made = self.schema.TensorT()
        made.shape = [max(size, 1) for size in shape]
        if -1 in shape:
            made.shapeSignature = list(shape)
        made.type = getattr(self.schema.TensorType, ELEMENT_TYPES[datatype])
        made.name = name or f"t{len(self._tensors)}"
        made.hasRank, made.isVariable = True, is_variable
        if scales:
            made.quantization = self.schema.QuantizationParametersT()
            made.quantization.scale = [float(scale) for scale in scales]
            made.quantization.zeroPoint = [zero] * len(scales)
            made.quantization.quantizedDimension = axis
        if data is not None:
            buffer = self.schema.BufferT()
            buffer.data = np.frombuffer(np.ascontiguousarray(data).tobytes(), np.uint8)
            self._buffers.append(buffer)
            made.buffer = len(self._buffers) - 1
        self._tensors.append(made)
        return len(self._tensors) - 1

    def constant(self, data: np.ndarray[Any, Any]) -> int:
        """A constant of a numpy array."""
        names = {"float32": "FP32", "int32": "INT32", "int64": "INT64", "int8": "INT8"}
        return self.tensor(names[data.dtype.name], data.shape, data=data)

    def operator(self, name: str, inputs: Sequence[int], outputs: Sequence[int], options: Any = None) -> None:
        """Add one operator, by its name in the schema."""
        made = self.schema.OperatorT()
        made.opcodeIndex = self._codes.setdefault(name, len(self._codes))
        made.inputs, made.outputs = list(inputs), list(outputs)
        if options is not None:
            kind = type(options).__name__.removesuffix("T")
            made.builtinOptionsType = getattr(self.schema.BuiltinOptions, kind)
            made.builtinOptions = options
        self._operators.append(made)

    def save(
        self,
        path: Path,
        inputs: Mapping[str, int],
        outputs: Mapping[str, int],
        *,
        signatures: Mapping[str, tuple[Mapping[str, int], Mapping[str, int]]] | None = None,
    ) -> Path:
        """Write the file. signatures: by key; None: one that has the names given; {}: none."""
        import flatbuffers

        schema = self.schema
        graph = schema.SubGraphT()
        graph.tensors, graph.operators, graph.name = self._tensors, self._operators, "main"
        graph.inputs, graph.outputs = list(inputs.values()), list(outputs.values())
        model = schema.ModelT()
        model.version = 3
        model.subgraphs, model.buffers = [graph], self._buffers
        model.operatorCodes = [self._code(name) for name in self._codes]
        model.description = "test"
        if signatures is None:
            signatures = {"serving_default": (inputs, outputs)}
        model.signatureDefs = [self._signature(key, *named) for key, named in signatures.items()]
        builder = flatbuffers.Builder(1 << 20)
        builder.Finish(model.Pack(builder), FILE_IDENTIFIER)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(builder.Output()))
        return path

    def _code(self, name: str) -> Any:
        made = self.schema.OperatorCodeT()
        made.builtinCode = getattr(self.schema.BuiltinOperator, name)
        made.deprecatedBuiltinCode = min(made.builtinCode, 127)
        made.version = _VERSIONS.get(name, 1)
        made.customCode = "MyOwnOperator" if name == "CUSTOM" else None
        return made

    def _signature(self, key: str, inputs: Mapping[str, int], outputs: Mapping[str, int]) -> Any:
        made = self.schema.SignatureDefT()
        made.signatureKey, made.subgraphIndex = key, 0
        made.inputs, made.outputs = self._named(inputs), self._named(outputs)
        return made

    def _named(self, tensors: Mapping[str, int]) -> list[Any]:
        found = []
        for name, index in tensors.items():
            made = self.schema.TensorMapT()
            made.name, made.tensorIndex = name, index
            found.append(made)
        return found


_VERSIONS = {"BATCH_MATMUL": 1, "CONV_2D": 3, "DEPTHWISE_CONV_2D": 3, "FULLY_CONNECTED": 4, "ADD": 2, "MEAN": 2}
"""The first version of an operator that takes int8, where it is not 1."""


def mlp(folder: Path, rows: int = -1, output_shape: Sequence[int | str] | None = None) -> Path:
    """x FP32 [rows, 16] -> y FP32 [rows, 4]; fixed rows when `rows` is a number."""
    first, second = mlp_weights()
    graph = LiteRtGraph()
    x = graph.tensor("FP32", [rows, 16])
    hidden = graph.tensor("FP32", [rows, 32])
    shape = [rows, 4] if output_shape is None else [each if isinstance(each, int) else -1 for each in output_shape]
    y = graph.tensor("FP32", shape)
    _dense(graph, x, first, hidden, relu=True)
    _dense(graph, hidden, second, y)
    return graph.save(folder / "model.tflite", {"x": x}, {"y": y})


def _dense(graph: LiteRtGraph, source: int, weights: np.ndarray[Any, Any], result: int, *, relu: bool = False) -> None:
    options = graph.schema.FullyConnectedOptionsT()
    options.keepNumDims = True
    options.fusedActivationFunction = int(relu)
    matrix = graph.constant(np.ascontiguousarray(weights.T, np.float32))
    bias = graph.constant(np.zeros(weights.shape[1], np.float32))
    graph.operator("FULLY_CONNECTED", [source, matrix, bias], [result], options)


def mlp_int8(folder: Path, rows: int = -1) -> Path:
    """`mlp` quantised whole: x INT8, y INT8, scales 8 / 255 and 1."""
    graph = LiteRtGraph()
    scales = {"x": 8 / 255, "hidden": 32 / 255, "y": 1.0}
    x = graph.tensor("INT8", [rows, 16], scales=[scales["x"]])
    hidden = graph.tensor("INT8", [rows, 32], scales=[scales["hidden"]], zero=-128)
    y = graph.tensor("INT8", [rows, 4], scales=[scales["y"]], zero=3)
    for source, weights, result, ins, relu in ((x, 0, hidden, "x", True), (hidden, 1, y, "hidden", False)):
        values = mlp_weights()[weights]
        step = float(np.abs(values).max() / 127)
        matrix = np.round(values.T / step).astype(np.int8)
        options = graph.schema.FullyConnectedOptionsT()
        options.keepNumDims, options.fusedActivationFunction = True, int(relu)
        weight = graph.tensor("INT8", matrix.shape, data=matrix, scales=[step])
        zeros = np.zeros(len(matrix), np.int32)
        bias = graph.tensor("INT32", zeros.shape, data=zeros, scales=[scales[ins] * step])
        graph.operator("FULLY_CONNECTED", [source, weight, bias], [result], options)
    return graph.save(folder / "model.tflite", {"x": x}, {"y": y})


def two_in_two_out(folder: Path) -> Path:
    """a FP32 [rows, 3], b INT64 [rows, 2] -> sum FP32 [rows, 3] = a + a, twice INT64 [rows, 2] = b + b."""
    graph = LiteRtGraph()
    a, b = graph.tensor("FP32", [-1, 3]), graph.tensor("INT64", [-1, 2])
    total, twice = graph.tensor("FP32", [-1, 3]), graph.tensor("INT64", [-1, 2])
    graph.operator("ADD", [a, a], [total], graph.schema.AddOptionsT())
    graph.operator("ADD", [b, b], [twice], graph.schema.AddOptionsT())
    return graph.save(folder / "model.tflite", {"a": a, "b": b}, {"sum": total, "twice": twice})


def identity(folder: Path, datatype: str) -> Path:
    """x [rows, 2] -> y [rows, 2] of any datatype."""
    graph = LiteRtGraph()
    x, y = graph.tensor(datatype, [-1, 2]), graph.tensor(datatype, [-1, 2])
    options = graph.schema.ReshapeOptionsT()
    options.newShape = [-1, 2]
    graph.operator("RESHAPE", [x, graph.constant(np.array([-1, 2], np.int32))], [y], options)
    return graph.save(folder / "model.tflite", {"x": x}, {"y": y})


def running_sum(folder: Path, rows: int = -1) -> Path:
    """x FP32 [steps, 4] -> y FP32 [steps, 4], summed along axis 0: dynamic everywhere, yet no batch."""
    graph = LiteRtGraph()
    x, y = graph.tensor("FP32", [rows, 4]), graph.tensor("FP32", [rows, 4])
    graph.operator("CUMSUM", [x, graph.constant(np.array(0, np.int32))], [y], graph.schema.CumsumOptionsT())
    return graph.save(folder / "model.tflite", {"x": x}, {"y": y})


def product(folder: Path) -> Path:
    """a FP32 [n, k], b FP32 [l, m] -> y FP32 [n, m] = a @ b: fits the spec for any k and l, fails unless they agree."""
    graph = LiteRtGraph()
    a, b, y = (graph.tensor("FP32", [-1, -1]) for _ in range(3))
    graph.operator("BATCH_MATMUL", [a, b], [y], graph.schema.BatchMatMulOptionsT())
    return graph.save(folder / "model.tflite", {"a": a, "b": b}, {"y": y})


def where_nonzero(folder: Path) -> Path:
    """x FP32 [rows, 2] -> places INT64 [found, 2]: as many rows as the data has, like detections after NMS."""
    graph = LiteRtGraph()
    x, found = graph.tensor("FP32", [-1, 2]), graph.tensor("BOOL", [-1, 2])
    places = graph.tensor("INT64", [-1, 2])
    zero = graph.constant(np.zeros(1, np.float32))
    graph.operator("NOT_EQUAL", [x, zero], [found], graph.schema.NotEqualOptionsT())
    graph.operator("WHERE", [found], [places], graph.schema.WhereOptionsT())
    return graph.save(folder / "model.tflite", {"x": x}, {"places": places})


def wide(folder: Path, size: int = 1024) -> Path:
    """x FP32 [rows, size] -> y FP32 [rows, size] through one matrix: `4 * size * size` bytes of weights."""
    matrix = np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)
    graph = LiteRtGraph()
    x, y = graph.tensor("FP32", [-1, size]), graph.tensor("FP32", [-1, size])
    _dense(graph, x, matrix, y)
    return graph.save(folder / "model.tflite", {"x": x}, {"y": y})


def added(folder: Path, constant: float = 1.0) -> Path:
    """x FP32 [rows, 2] -> y FP32 [rows, 2] = x + constant."""
    graph = LiteRtGraph()
    x, y = graph.tensor("FP32", [-1, 2]), graph.tensor("FP32", [-1, 2])
    graph.operator("ADD", [x, graph.constant(np.full(2, constant, np.float32))], [y], graph.schema.AddOptionsT())
    return graph.save(folder / "model.tflite", {"x": x}, {"y": y})


def two_signatures(folder: Path) -> Path:
    """Signatures `plus` and `times` over one graph: x FP32 [rows, 2] -> sum = x + 1, product = x * 3."""
    graph = LiteRtGraph()
    x, total, tripled = (graph.tensor("FP32", [-1, 2], name=name) for name in ("input:0", "sum:0", "product:0"))
    graph.operator("ADD", [x, graph.constant(np.ones(2, np.float32))], [total], graph.schema.AddOptionsT())
    graph.operator("MUL", [x, graph.constant(np.full(2, 3, np.float32))], [tripled], graph.schema.MulOptionsT())
    signatures = {"plus": ({"x": x}, {"sum": total}), "times": ({"x": x}, {"product": tripled})}
    path = folder / "model.tflite"
    return graph.save(path, {"x": x}, {"sum": total, "product": tripled}, signatures=signatures)


def unsigned(folder: Path) -> Path:
    """As `added`, without a signature: `input:0` -> `output:0`."""
    graph = LiteRtGraph()
    x, y = graph.tensor("FP32", [-1, 2], name="input:0"), graph.tensor("FP32", [-1, 2], name="output:0")
    graph.operator("ADD", [x, graph.constant(np.ones(2, np.float32))], [y], graph.schema.AddOptionsT())
    return graph.save(folder / "model.tflite", {"x": x}, {"y": y}, signatures={})


def reshaped(folder: Path, rows: int) -> Path:
    """x FP32 [rows, 4] -> y FP32 [1, 2, 2]: a shape that the converter wrote down, so that other rows do not fit."""
    graph = LiteRtGraph()
    x, y = graph.tensor("FP32", [rows, 4]), graph.tensor("FP32", [1, 2, 2])
    options = graph.schema.ReshapeOptionsT()
    options.newShape = [1, 2, 2]
    graph.operator("RESHAPE", [x, graph.constant(np.array([1, 2, 2], np.int32))], [y], options)
    return graph.save(folder / "model.tflite", {"x": x}, {"y": y})


def shared_maximum(folder: Path, rows: int) -> Path:
    """x FP32 [rows, 4] -> y FP32 [rows, 4] = x - the largest of all rows: it fits any rows, and mixes them."""
    graph = LiteRtGraph()
    x, y = graph.tensor("FP32", [rows, 4]), graph.tensor("FP32", [rows, 4])
    most = graph.tensor("FP32", [1, 4])
    options = graph.schema.ReducerOptionsT()
    options.keepDims = True
    graph.operator("REDUCE_MAX", [x, graph.constant(np.array([0], np.int32))], [most], options)
    graph.operator("SUB", [x, most], [y], graph.schema.SubOptionsT())
    return graph.save(folder / "model.tflite", {"x": x}, {"y": y})


def remembering(folder: Path) -> Path:
    """x FP32 [1, 3] -> y FP32 [1, 2] by an SVDF, which adds up what the last 4 runs took."""
    graph = LiteRtGraph()
    x, y = graph.tensor("FP32", [1, 3]), graph.tensor("FP32", [1, 2])
    features, times = graph.constant(np.ones((2, 3), np.float32)), graph.constant(np.ones((2, 4), np.float32))
    state = graph.tensor("FP32", [1, 8], is_variable=True)
    options = graph.schema.SVDFOptionsT()
    options.rank = 1
    graph.operator("SVDF", [x, features, times, -1, state], [y], options)
    return graph.save(folder / "model.tflite", {"x": x}, {"y": y})


def counting(folder: Path) -> Path:
    """x FP32 [1, 2] -> y FP32 [1, 2]: x and a variable, which becomes y."""
    graph = LiteRtGraph()
    x, y, before = (graph.tensor("FP32", [1, 2]) for _ in range(3))
    variable = graph.tensor("resource", [1])
    options = graph.schema.VarHandleOptionsT()
    options.sharedName, options.container = b"variable", b""
    graph.operator("VAR_HANDLE", [], [variable], options)
    graph.operator("READ_VARIABLE", [variable], [before], graph.schema.ReadVariableOptionsT())
    graph.operator("ADD", [before, x], [y], graph.schema.AddOptionsT())
    graph.operator("ASSIGN_VARIABLE", [variable, y], [], graph.schema.AssignVariableOptionsT())
    return graph.save(folder / "model.tflite", {"x": x}, {"y": y})


def custom_operator(folder: Path) -> Path:
    """x FP32 [rows, 2] -> y FP32 [rows, 2] by an operator that LiteRT does not have."""
    graph = LiteRtGraph()
    x, y = graph.tensor("FP32", [-1, 2]), graph.tensor("FP32", [-1, 2])
    graph.operator("CUSTOM", [x], [y])
    return graph.save(folder / "model.tflite", {"x": x}, {"y": y})
