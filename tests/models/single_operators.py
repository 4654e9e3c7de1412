"""Models of the operators that may run inside the daemon, alone and in short chains, with edge values.

Owns: how each row of the rule's table is used: shapes, constants and attributes at its edges, and what clients send,
the same at every call. Runs none of them. standard_operators.py has models of all other operators.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edge_runtime.backends.onnx.graph import OnnxConstant, OnnxNode
from edge_runtime.backends.onnx.rule import OPERATORS, NodeUse
from edge_runtime.backends.onnx.traced_values import NotInside, TracedValue
from edge_runtime.model_spec import DYNAMIC

Array = np.ndarray[Any, Any]

FLOAT_EDGES = (0.0, -0.0, -1.0, 1.0, 1e6, -1e6, 3e38, -3e38, 1e-45, math.inf, -math.inf, math.nan, 2.0**31, -(2.0**31))
WHOLE_EDGES = (0, -1, 1, 2, 7, 10**6, 10**9, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))
TABLE_OPSET = 17
ROWS = (1, 2, 7)


@dataclass(frozen=True, slots=True)
class Case:
    """One model and what clients send it, in order. operator: what it is counted under."""

    name: str
    operator: str
    model: bytes
    feeds: tuple[Mapping[str, Array], ...]


# ---- of the table ---------------------------------------------------------------------------------------------------


def table_cases(each: int, operators: Iterable[str] = tuple(OPERATORS), chains: int = 0) -> Iterator[Case]:
    """Yield `each` models of every operator that may run inside, and chains of two to six of them."""
    for operator in operators:
        for number in range(each):
            yield _table_case(f"table/{operator}/{number}", operator)
    for number in range(chains):
        yield _chain_case(f"chain/{number}")


def _table_case(name: str, operator: str) -> Case:
    chance = random.Random(name)
    for _ in range(200):
        building = _Building(chance)
        if building.extend(operator):
            return building.case(name, operator)
    raise AssertionError(f"no model of {operator} could be made")


def _chain_case(name: str) -> Case:
    chance = random.Random(name)
    building = _Building(chance)
    length = chance.randint(2, 6)
    names: list[str] = []
    while len(names) < length:
        operator = chance.choice([each for each in OPERATORS if each != "Constant"])
        if building.extend(operator):
            names.append(operator)
        elif names:
            length -= chance.random() < 0.2
    return building.case(f"{name}/{'-'.join(names)}", "chain")


class _Building:
    """A model that grows by one operator after another; shapes follow as the rule has them."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.values: dict[str, TracedValue] = {}
        self._inputs: dict[str, TracedValue] = {}
        self._weights: dict[str, Array] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._last = ""

    def extend(self, operator: str) -> bool:
        """Add one node; False where nothing that was tried fits."""
        domain, _, kind = operator.rpartition(".")
        for _ in range(10):
            start = self._last or self.input(operator)
            if not self.shape(start):
                return False
            try:
                inputs, attributes = MAKERS[operator](self, start)
                plain = {key: self._plain(value) for key, value in attributes.items()}
                use = NodeUse(OnnxNode(kind, domain, tuple(inputs), ("y",), plain), TABLE_OPSET, self.values)
                followed = OPERATORS[operator].follow(use)
                is_constant = use.finish()
            except (NotInside, IndexError, ValueError):  # of an axis or a choice that this shape does not have
                continue
            outputs = [f"v{len(self._nodes)}_{number}" for number in range(len(followed))]
            for output, each in zip(outputs, followed, strict=True):
                self.values[output] = TracedValue(each.shape, each.datatype, is_constant, each.numbers)
            self._nodes.append(helper.make_node(kind, inputs, outputs, domain=domain, **attributes))
            self._last = outputs[-1]
            if operator == "Constant":
                self._last = start
                return self._join("Add", [start, outputs[0]])
            return True
        return False

    def _join(self, operator: str, inputs: list[str]) -> bool:
        """Add a node over values that are there, which fit."""
        output = f"v{len(self._nodes)}"
        self.values[output] = self.values[inputs[0]]
        self._nodes.append(helper.make_node(operator, inputs, [output]))
        self._last = output
        return True

    def input(self, operator: str) -> str:
        """A tensor that clients send, of a shape and type that suits an operator."""
        types, ranks = _WANTS.get(operator, ((TensorProto.FLOAT,), (1, 2, 2, 3, 4)))
        rank = self.chance.choice(ranks)
        first = self.chance.choice((DYNAMIC, DYNAMIC, DYNAMIC, 1, 3))
        shape = (first, *(self.chance.choice((1, 2, 3, 4, 5, 8, 16)) for _ in range(rank - 1)))
        return self._sent(TracedValue(shape, self.chance.choice(types)))

    def again(self, name: str) -> str:
        """Another tensor that clients send, like this one."""
        return self._sent(self.values[name])

    def _sent(self, value: TracedValue) -> str:
        """A tensor of this type and shape: truths are whether numbers that clients send are above 0."""
        name = f"x{len(self._inputs)}"
        is_truth = value.datatype == TensorProto.BOOL
        self._inputs[name] = TracedValue(value.shape, TensorProto.FLOAT if is_truth else value.datatype)
        self.values[name] = self._inputs[name]
        if not is_truth:
            return name
        output = f"t{len(self._nodes)}"
        self.values[output] = TracedValue(value.shape, TensorProto.BOOL)
        self._nodes.append(helper.make_node("Greater", [name, self.weights(np.array(0, np.float32))], [output]))
        return output

    def weights(self, array: Array) -> str:
        """A constant of the file."""
        name = f"w{len(self._weights)}"
        self._weights[name] = array
        datatype = helper.np_dtype_to_tensor_dtype(array.dtype)
        self.values[name] = TracedValue(array.shape, datatype, is_constant=True, numbers=tuple(array.ravel().tolist()))
        return name

    def floats(self, *shape: int) -> str:
        """A constant of ordinary numbers, or with edges among them."""
        return self.weights(_floats(self.chance, [abs(size) for size in shape]))

    def numbers(self, *values: int) -> str:
        """A constant list of int64."""
        return self.weights(np.array(values, np.int64))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.values[name].shape

    def case(self, name: str, operator: str) -> Case:
        """The model, with all that is not used further as outputs, and data for it."""
        used = {each for node in self._nodes for each in node.input}
        self._inputs = {each: value for each, value in self._inputs.items() if each in used}
        written = [each for node in self._nodes for each in node.output if each not in used]
        graph = helper.make_graph(
            self._nodes,
            "graph",
            [_described(each, value) for each, value in self._inputs.items()],
            [_described(each, self.values[each]) for each in written],
            [numpy_helper.from_array(array, each) for each, array in self._weights.items() if each in used],
        )
        opsets = [helper.make_opsetid("", TABLE_OPSET), helper.make_opsetid("ai.onnx.ml", 3)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        return Case(name, operator, model.SerializeToString(), tuple(self._feeds()))

    def _feeds(self) -> Iterator[dict[str, Array]]:
        for rows in ROWS:
            shapes = {each: [rows, *value.shape[1:]] for each, value in self._inputs.items()}
            for each, value in self._inputs.items():
                shapes[each][0] = rows if value.shape[0] == DYNAMIC else value.shape[0]
            types = {
                each: helper.tensor_dtype_to_np_dtype(int(str(value.datatype))) for each, value in self._inputs.items()
            }
            for edge in (None, *range(len(FLOAT_EDGES)), -1, -1) if rows == 1 else (None, -1, -1, -1):
                yield {each: _data(self.chance, types[each], shapes[each], edge) for each in self._inputs}

    def _plain(self, value: object) -> object:
        if isinstance(value, TensorProto):
            array = numpy_helper.to_array(value)
            return OnnxConstant(value.data_type, array.shape, tuple(array.ravel().tolist()))
        if isinstance(value, str):
            return value.encode()
        if isinstance(value, list):
            return tuple(each.encode() if isinstance(each, str) else each for each in value)
        return value


def _described(name: str, value: TracedValue) -> onnx.ValueInfoProto:
    shape = ["rows" if size == DYNAMIC else size for size in value.shape]
    return helper.make_tensor_value_info(name, int(str(value.datatype)), shape)


def _data(chance: random.Random, dtype: np.dtype[Any], shape: Sequence[int], edge: int | None) -> Array:
    """Data of one tensor: ordinary (None), all one edge value, or edges without order (-1)."""
    count = math.prod(shape)
    edges = FLOAT_EDGES if dtype.kind == "f" else WHOLE_EDGES
    if dtype.kind == "b":
        return np.array([chance.random() < 0.5 for _ in range(count)], dtype).reshape(shape)
    if edge is None:
        return np.array([chance.randint(-5, 5) for _ in range(count)]).astype(dtype).reshape(shape)
    chosen = [edges[edge % len(edges)] if edge >= 0 else chance.choice(edges) for _ in range(count)]
    return as_type(chosen, dtype).reshape(shape)


def as_type(numbers: Sequence[float], dtype: np.dtype[Any]) -> Array:
    """Numbers as a type, whole ones cut to its range."""
    if dtype.kind not in "iu":
        with np.errstate(all="ignore"):
            return np.array(numbers, np.float64).astype(dtype)
    limits = np.iinfo(dtype)
    return np.array([min(max(int(number), int(limits.min)), int(limits.max)) for number in numbers], dtype)


def _floats(chance: random.Random, shape: Sequence[int]) -> Array:
    edge_share = chance.choice((0.0, 0.0, 0.3, 1.0))
    numbers = [
        chance.choice(FLOAT_EDGES) if chance.random() < edge_share else chance.gauss(0, 1)
        for _ in range(math.prod(shape))
    ]
    return as_type(numbers, np.dtype(np.float32)).reshape(tuple(shape))


Maker = Callable[[_Building, str], tuple[list[str], dict[str, Any]]]

_ANY = (
    TensorProto.FLOAT,
    TensorProto.DOUBLE,
    TensorProto.INT32,
    TensorProto.INT64,
    TensorProto.INT8,
    TensorProto.UINT8,
)
_SPACE = ((TensorProto.FLOAT,), (3, 4))
_WANTS: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    **dict.fromkeys(("Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze"), (_ANY, (1, 2, 3, 4))),
    **dict.fromkeys(("Transpose", "Concat", "Slice", "Gather"), (_ANY, (1, 2, 3, 4))),
    **dict.fromkeys(("Add", "Sub", "Mul"), ((*_ANY[:4],), (1, 2, 3))),
    **dict.fromkeys(("Conv", "MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"), _SPACE),
    "DequantizeLinear": ((TensorProto.INT8, TensorProto.UINT8), (1, 2, 3)),
    **dict.fromkeys(("Not", "And", "Or", "Xor", "Where"), ((TensorProto.BOOL,), (1, 2))),
    "Gemm": ((TensorProto.FLOAT,), (2,)),
    **dict.fromkeys(("ai.onnx.ml.Scaler", "ai.onnx.ml.Normalizer"), (_ANY[:4], (2,))),
    **dict.fromkeys(("ai.onnx.ml.LinearRegressor", "ai.onnx.ml.LinearClassifier"), ((TensorProto.FLOAT,), (2,))),
    **dict.fromkeys(("ai.onnx.ml.TreeEnsembleRegressor", "ai.onnx.ml.TreeEnsembleClassifier"), ((1,), (2,))),
}  # fmt: skip


def _one(**attributes: Sequence[object]) -> Maker:
    """One input; each attribute left out, or one of these."""
    return lambda b, x: (
        [x],
        {name: b.chance.choice(values) for name, values in attributes.items() if b.chance.random() < 0.7},
    )


def _two(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    return [x, _partner(b, x)], {}


def _several(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    return [x, *(_partner(b, x) for _ in range(b.chance.randint(0, 3)))], {}


def _partner(b: _Building, x: str) -> str:
    """Something to add to x: itself, another input, or a constant that fits it, wider ones too."""
    kind = b.chance.randrange(4)
    if kind == 0:
        return x
    if kind == 1:
        return b.again(x)
    shape = [1 if size == DYNAMIC or b.chance.random() < 0.3 else size for size in b.shape(x)]
    shape = shape[b.chance.randint(0, len(shape)) :]
    dtype = helper.tensor_dtype_to_np_dtype(int(str(b.values[x].datatype)))
    return b.weights(_data(b.chance, dtype, shape, b.chance.choice((None, -1))))


def _where(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    inner = b.shape(x)[1:]
    return [x, b.floats(1, *inner), b.floats(*inner[-1:])], {}


def _clip(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    bounds = [
        b.weights(np.array(b.chance.choice(FLOAT_EDGES), np.float32)) if b.chance.random() < 0.7 else "" for _ in "ab"
    ]
    return [x, *bounds], {}


def _matmul(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    return [x, b.floats(b.shape(x)[-1], b.chance.choice((1, 2, 7, 16, 33)))], {}


def _gemm(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    inner, columns = b.shape(x)[-1], b.chance.choice((1, 2, 7, 16, 33))
    turned = b.chance.randrange(2)
    bias = b.chance.choice(((), (1,), (columns,), (1, 1), (1, columns)))
    attributes = {"transB": turned} | {
        name: b.chance.choice(FLOAT_EDGES) for name in ("alpha", "beta") if b.chance.random() < 0.3
    }
    return [x, b.floats(*((columns, inner) if turned else (inner, columns))), b.floats(*bias)][
        : b.chance.choice((2, 3))
    ], attributes


def _window(b: _Building, axes: int, *, gaps: bool) -> dict[str, Any]:
    kernel = [b.chance.choice((1, 1, 2, 3, 5)) for _ in range(axes)]
    window: dict[str, Any] = {"kernel_shape": kernel}
    if b.chance.random() < 0.5:
        window["strides"] = [b.chance.choice((1, 2, 3, 1024)) for _ in range(axes)]
    if gaps and b.chance.random() < 0.3:
        window["dilations"] = [b.chance.choice((1, 2, 3)) for _ in range(axes)]
    if b.chance.random() < 0.6:
        window["pads"] = [b.chance.randint(0, max(size - 1, 0)) for size in kernel * 2]
    return window


def _conv(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    channels, axes = b.shape(x)[1], len(b.shape(x)) - 2
    window = _window(b, axes, gaps=True)
    group = b.chance.choice([size for size in (1, 2, 3, 4, 8, 16) if channels % size == 0])
    filters = group * b.chance.choice((1, 2, 3))
    weights = [x, b.floats(filters, channels // group, *window["kernel_shape"]), b.floats(filters)]
    return weights[: b.chance.choice((2, 3))], {**window, "group": group}


def _pool(**attributes: Sequence[int]) -> Maker:
    def make(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
        chosen = {name: b.chance.choice(values) for name, values in attributes.items() if b.chance.random() < 0.5}
        return [x], {**_window(b, max(len(b.shape(x)) - 2, 1), gaps=False), **chosen}

    return make


def _batch_normalization(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    channels = b.shape(x)[1] if len(b.shape(x)) > 1 else 1
    return [x, *(b.floats(channels) for _ in range(4))], {"epsilon": b.chance.choice((1e-5, 0.0, *FLOAT_EDGES))}


def _layer_normalization(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    axis = b.chance.randint(1, max(len(b.shape(x)) - 1, 1))
    inner = b.shape(x)[axis:]
    return [x, b.floats(*inner), b.floats(*inner)][: b.chance.choice((2, 3))], {"axis": axis}


def _axis(b: _Building, x: str) -> int:
    rank = len(b.shape(x))
    return b.chance.choice((*range(-rank, rank), b.chance.choice(WHOLE_EDGES)))


def _along(**attributes: Sequence[int]) -> Maker:
    return lambda b, x: ([x], {"axis": _axis(b, x), **{name: b.chance.choice(v) for name, v in attributes.items()}})


def _reduce(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    rank = len(b.shape(x))
    axes = b.chance.sample(range(rank), b.chance.randint(1, rank))
    return [x], {"axes": axes, "keepdims": b.chance.randrange(2)}


def _reduce_sum(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    _, attributes = _reduce(b, x)
    return [x, b.numbers(*attributes["axes"])], {"keepdims": attributes["keepdims"]}


def _reshape(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    inner = math.prod(b.shape(x)[1:])
    first = b.chance.choice((0, -1))
    factor = b.chance.choice([size for size in (1, 2, 3, 4, 5, 8) if inner % size == 0])
    rest = b.chance.choice(([inner], [factor, inner // factor], [1, inner, 1], [factor, -1]))
    return [x, b.numbers(first, *rest)], {}


def _squeeze(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    return [x, b.numbers(*[axis for axis, size in enumerate(b.shape(x)) if size == 1] or [0])], {}


def _unsqueeze(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    rank = len(b.shape(x))
    return [x, b.numbers(*b.chance.sample(range(-1, rank + 1), b.chance.choice((1, 2))))], {}


def _transpose(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    rank = len(b.shape(x))
    return [x], {"perm": [0, *b.chance.sample(range(1, rank), rank - 1)]}


def _concat(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    return [x, *(b.chance.choice((x, b.again(x))) for _ in range(b.chance.randint(0, 3)))], {"axis": _axis(b, x)}


def _slice(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    edges = (0, 0, 1, -1, 2, *WHOLE_EDGES)
    lists = [b.numbers(b.chance.choice(edges)) for _ in range(2)]
    return [x, *lists, b.numbers(b.chance.randrange(len(b.shape(x))))], {}


def _gather(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    axis = b.chance.randrange(len(b.shape(x)))
    length = max(b.shape(x)[axis], 1)
    places = [b.chance.randrange(-length, length) for _ in range(b.chance.randint(1, 4))]
    return [x, b.weights(np.array(places[0])) if b.chance.random() < 0.3 else b.numbers(*places)], {"axis": axis}


def _scales(b: _Building, x: str, zero: type[np.generic]) -> tuple[list[str], dict[str, Any]]:
    axis = b.chance.randrange(len(b.shape(x)))
    count = b.chance.choice(((), (abs(b.shape(x)[axis]),)))
    scale = np.array([b.chance.choice((1.0, 0.02, 1e-45, 3e38)) for _ in range(math.prod(count))], np.float32)
    limits = np.iinfo(zero)  # type: ignore[arg-type]
    points = np.array([b.chance.choice((0, limits.min, limits.max)) for _ in range(math.prod(count))], zero)
    names = [b.weights(scale.reshape(count)), b.weights(points.reshape(count))]
    return [x, *names[: b.chance.choice((1, 2, 2))]], {"axis": axis}


def _quantize(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    return _scales(b, x, b.chance.choice((np.int8, np.uint8)))


def _dequantize(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    return _scales(b, x, np.int8 if b.values[x].datatype == TensorProto.INT8 else np.uint8)


def _constant(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    return [], {"value": numpy_helper.from_array(_floats(b.chance, b.chance.choice(((), (1,), b.shape(x)[-1:]))))}


_TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO")


def _some(b: _Building, count: int) -> list[float]:
    """A list of numbers for an attribute, with edges among them."""
    return [float(each) for each in _floats(b.chance, (count,))]


def _scaler(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    columns = b.shape(x)[1]
    count = b.chance.choice((1, columns))
    return [x], {"offset": _some(b, count), "scale": _some(b, count)}


def _linear_regressor(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    targets = b.chance.choice((1, 2, 5))
    attributes = {"coefficients": _some(b, targets * b.shape(x)[1]), "targets": targets}
    return [x], {**attributes, **({"intercepts": _some(b, targets)} if b.chance.random() < 0.7 else {})}


def _linear_classifier(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    classes = b.chance.choice((2, 3, 7))
    return [x], {
        "classlabels_ints": [b.chance.choice(WHOLE_EDGES) for _ in range(classes)],
        "coefficients": _some(b, classes * b.shape(x)[1]),
        "intercepts": _some(b, classes),
        "multi_class": b.chance.randrange(2),
        "post_transform": b.chance.choice(_TRANSFORMS),
    }


def _forest(b: _Building, x: str, kind: str, results: int) -> dict[str, Any]:
    """One to four trees, grown at random: lopsided ones and single leaves too."""
    lists: dict[str, list[Any]] = {name: [] for name in (
        "treeids", "nodeids", "featureids", "modes", "values", "truenodeids", "falsenodeids",
    )}  # fmt: skip
    weighed: dict[str, list[Any]] = {name: [] for name in ("treeids", "nodeids", "ids", "weights")}
    for tree in range(b.chance.choice((1, 1, 2, 4))):
        size = 2 * b.chance.choice((0, 1, 2, 5, 40)) + 1
        children: dict[int, tuple[int, int]] = {}
        leaves = [0]
        while len(children) * 2 + 1 < size:
            parent = leaves.pop(b.chance.randrange(len(leaves)))
            first = len(children) * 2 + 1
            children[parent] = (first, first + 1)
            leaves += children[parent]
        for node in range(size):
            mode = b.chance.choice(("LEQ", "LT", "GTE", "GT", "EQ", "NEQ"))
            row = (tree, node, b.chance.randrange(b.shape(x)[1]), f"BRANCH_{mode}" if node in children else "LEAF")
            values = (b.chance.choice((0.5, *FLOAT_EDGES)), *children.get(node, (0, 0)))
            for name, value in zip(lists, (*row, *values), strict=True):
                lists[name].append(value)
            for each in b.chance.sample(range(results), b.chance.randint(1, results)) if node not in children else ():
                for name, value in zip(weighed, (tree, node, each, b.chance.choice((0.5, *FLOAT_EDGES))), strict=True):
                    weighed[name].append(value)
    attributes = {f"nodes_{name}": values for name, values in lists.items()}
    attributes |= {f"{kind}_{name}": values for name, values in weighed.items()}
    return attributes | ({"base_values": _some(b, results)} if b.chance.random() < 0.3 else {})


def _tree_classifier(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    classes = b.chance.choice((2, 3, 7))
    labels = {"classlabels_int64s": list(range(classes)), "post_transform": b.chance.choice(_TRANSFORMS)}
    return [x], {**_forest(b, x, "class", classes), **labels}


def _tree_regressor(b: _Building, x: str) -> tuple[list[str], dict[str, Any]]:
    targets = b.chance.choice((1, 1, 3))
    sums = {"aggregate_function": b.chance.choice(("SUM", "AVERAGE", "MIN", "MAX")), "n_targets": targets}
    return [x], {**_forest(b, x, "target", targets), **sums}


MAKERS: Mapping[str, Maker] = {
    **{name: _one() for name in OPERATORS},
    "LeakyRelu": _one(alpha=FLOAT_EDGES), "Elu": _one(alpha=FLOAT_EDGES),
    "Selu": _one(alpha=FLOAT_EDGES, gamma=FLOAT_EDGES), "HardSigmoid": _one(alpha=FLOAT_EDGES, beta=FLOAT_EDGES),
    "Clip": _clip, "PRelu": _two, "Cast": _one(to=(1, 6, 7, 11)), "Where": _where,
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Pow", "Greater", "Less"), _two),
    **dict.fromkeys(("GreaterOrEqual", "LessOrEqual", "Equal", "And", "Or", "Xor"), _two),
    "Min": _several, "Max": _several, "Sum": _several,
    "MatMul": _matmul, "Gemm": _gemm, "Conv": _conv,
    "MaxPool": _pool(storage_order=(0, 1), ceil_mode=(0, 1)),
    "AveragePool": _pool(count_include_pad=(0, 1, 7), ceil_mode=(0, 1)),
    "BatchNormalization": _batch_normalization, "LayerNormalization": _layer_normalization,
    "Softmax": _along(), "LogSoftmax": _along(),
    "Constant": _constant, "Reshape": _reshape, "Squeeze": _squeeze, "Unsqueeze": _unsqueeze, "Transpose": _transpose,
    "Concat": _concat, "Slice": _slice, "Gather": _gather,
    **dict.fromkeys(("ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2"), _reduce), "ReduceSum": _reduce_sum,
    "ArgMax": _along(keepdims=(0, 1), select_last_index=(0, 1)), "ArgMin": _along(keepdims=(0, 1)),
    "QuantizeLinear": _quantize, "DequantizeLinear": _dequantize,
    "ai.onnx.ml.Scaler": _scaler, "ai.onnx.ml.Normalizer": _one(norm=("MAX", "L1", "L2")),
    "ai.onnx.ml.LinearRegressor": _linear_regressor, "ai.onnx.ml.LinearClassifier": _linear_classifier,
    "ai.onnx.ml.TreeEnsembleRegressor": _tree_regressor, "ai.onnx.ml.TreeEnsembleClassifier": _tree_classifier,
}  # fmt: skip
