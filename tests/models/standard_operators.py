"""Models of one operator beyond those that may run inside the daemon: of every operator that a library could meet.

Owns: `standard_cases`, ONNX's own test of each operator changed in one place, and `schema_cases`, operators of which
only the schema is known (ONNX Runtime's own). The same at every call. ONNX needs some 20 s to make its tests.
"""

from __future__ import annotations

import contextlib
import io
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from tests.models.single_operators import FLOAT_EDGES, WHOLE_EDGES, Array, Case, as_type

OLDEST_OPSET = 17
IR_VERSION = 10

_FEEDS = 24
"""Most of one model."""

_FLOATS = (0.0, -1.0, 1e6, np.inf, np.nan)


def standard_cases() -> Iterator[Case]:
    """Yield ONNX's test of each operator: as it is, with edges as data, as constants, and as attributes."""
    for name, model, inputs in _tests():
        operator = next((node.op_type for node in model.graph.node if node.op_type != "Constant"), "Constant")
        chance = random.Random(name)
        for number, (changed, feeds) in enumerate(_changes(model, inputs, chance)):
            with contextlib.suppress(ValueError):  # over 2 GB
                yield Case(f"standard/{name}/{number}", operator, changed.SerializeToString(), tuple(feeds[:_FEEDS]))


def schema_cases(schemas: Sequence[Any], each: int) -> Iterator[Case]:
    """Yield `each` models of every operator of these schemas, as ONNX Runtime tells them."""
    newest = {(schema.domain, schema.name): schema for schema in sorted(schemas, key=lambda each: each.since_version)}
    for (domain, operator), schema in sorted(newest.items()):
        for number in range(each):
            case = _schema_case(f"schema/{domain}/{operator}/{number}", schema)
            if case is not None:
                yield case


# ---- ONNX's tests ---------------------------------------------------------------------------------------------------


def _tests() -> Iterator[tuple[str, onnx.ModelProto, dict[str, Array]]]:
    """Yield name, model and inputs of each test that clients could send the inputs of."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        tests = collect_testcases(None)  # type: ignore[arg-type]
    for test in sorted(tests, key=lambda each: each.name):
        if "_expanded" in test.name or test.model is None or not test.data_sets:
            continue
        names = [value.name for value in test.model.graph.input]
        inputs = dict(zip(names, test.data_sets[0][0], strict=False))
        if all(isinstance(array, np.ndarray) for array in inputs.values()):
            yield test.name, _lowered(test.model), inputs


def _lowered(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in the oldest opset that has its operators, so that older libraries read it."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.ir_version = IR_VERSION
    for opset in copy.opset_import:
        if opset.domain == "":
            since = [
                onnx.defs.get_schema(node.op_type, opset.version, "").since_version
                for node in copy.graph.node
                if node.domain == "" and onnx.defs.has(node.op_type, "")
            ]
            opset.version = max(OLDEST_OPSET, max(since, default=1))
    return copy


def _changes(
    model: onnx.ModelProto, inputs: Mapping[str, Array], chance: random.Random
) -> Iterator[tuple[onnx.ModelProto, list[Mapping[str, Array]]]]:
    yield model, [inputs, *_with_edges(inputs)]
    yield _opened(model), [inputs, *_with_shapes(inputs, chance), *_with_edges(inputs)]
    for name, array in inputs.items():
        choices: list[Array] = [array, np.zeros((0,), array.dtype)]
        for edge in chance.sample(_edges(array), min(2, len(_edges(array)))):
            choices.append(_filled(array, edge))
        for constant in choices:
            rest = {key: value for key, value in inputs.items() if key != name}
            yield _with_constants(model, {name: constant}), [rest, *_with_edges(rest)[:4]]
    if len(inputs) > 1:
        yield _with_constants(model, inputs), [{}]
    for at, node in enumerate(model.graph.node):
        for number, attribute in enumerate(node.attribute):
            for edge in _attribute_edges(attribute, chance):
                changed = onnx.ModelProto()
                changed.CopyFrom(model)
                changed.graph.node[at].attribute[number].CopyFrom(edge)
                del changed.graph.value_info[:]
                yield _opened(changed, inputs=False), [inputs]


def _edges(array: Array) -> list[float]:
    return list(WHOLE_EDGES if array.dtype.kind in "iu" else _FLOATS if array.dtype.kind == "f" else ())


def _filled(array: Array, edge: float) -> Array:
    """Of the array's shape."""
    return as_type([edge], array.dtype).repeat(array.size).reshape(array.shape)


def _with_edges(inputs: Mapping[str, Array]) -> list[Mapping[str, Array]]:
    """Each input filled with each edge, whole numbers first: they choose places and sizes."""
    order = sorted(inputs, key=lambda name: inputs[name].dtype.kind not in "iu")
    return [{**inputs, name: _filled(inputs[name], edge)} for name in order for edge in _edges(inputs[name])]


def _with_shapes(inputs: Mapping[str, Array], chance: random.Random) -> list[Mapping[str, Array]]:
    """Inputs with one length changed."""
    feeds: list[Mapping[str, Array]] = []
    for name, array in inputs.items():
        for axis in range(min(array.ndim, 3)):
            for size in chance.sample((0, 1, 7, array.shape[axis] + 1, 1000), 2):
                shape = (*array.shape[:axis], size, *array.shape[axis + 1 :])
                if int(np.prod(shape)) <= 1_000_000:
                    feeds.append(
                        {**inputs, name: np.resize(array, shape) if array.size else np.zeros(shape, array.dtype)}
                    )
    return feeds[: _FEEDS // 2]


def _opened(model: onnx.ModelProto, *, inputs: bool = True) -> onnx.ModelProto:
    """The model without what it says of its lengths."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for value in (*(copy.graph.input if inputs else ()), *copy.graph.output):
        if value.type.HasField("tensor_type"):
            for axis, dimension in enumerate(value.type.tensor_type.shape.dim):
                dimension.dim_param = f"{value.name}_{axis}"
    return copy


def _with_constants(model: onnx.ModelProto, constants: Mapping[str, Array]) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    kept = [value for value in copy.graph.input if value.name not in constants]
    del copy.graph.input[:]
    copy.graph.input.extend(kept)
    copy.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return _opened(copy, inputs=False)


def _attribute_edges(attribute: AttributeProto, chance: random.Random) -> list[AttributeProto]:
    """The attribute with two other values, if it is of numbers."""
    name = attribute.name
    if attribute.type == AttributeProto.INT:
        return [helper.make_attribute(name, edge) for edge in chance.sample(WHOLE_EDGES, 2)]
    if attribute.type == AttributeProto.FLOAT:
        return [helper.make_attribute(name, edge) for edge in chance.sample(FLOAT_EDGES, 2)]
    if attribute.type == AttributeProto.INTS and attribute.ints:
        changed = []
        for edge in chance.sample(WHOLE_EDGES, 2):
            numbers = list(attribute.ints)
            numbers[chance.randrange(len(numbers))] = edge
            changed.append(helper.make_attribute(name, numbers))
        return [*changed, helper.make_attribute(name, list(attribute.ints)[:-1] or [0, 0])]
    if attribute.type == AttributeProto.FLOATS and attribute.floats:
        return [helper.make_attribute(name, [chance.choice(FLOAT_EDGES) for _ in attribute.floats])]
    return []


# ---- operators of which only the schema is known --------------------------------------------------------------------

_TYPES = {
    "tensor(float)": TensorProto.FLOAT, "tensor(double)": TensorProto.DOUBLE, "tensor(int8)": TensorProto.INT8,
    "tensor(uint8)": TensorProto.UINT8, "tensor(int16)": TensorProto.INT16, "tensor(uint16)": TensorProto.UINT16,
    "tensor(int32)": TensorProto.INT32, "tensor(uint32)": TensorProto.UINT32, "tensor(int64)": TensorProto.INT64,
    "tensor(uint64)": TensorProto.UINT64, "tensor(bool)": TensorProto.BOOL, "tensor(float16)": TensorProto.FLOAT16,
}  # fmt: skip

_SHAPES = (
    (),
    (0,),
    (1,),
    (2,),
    (4,),
    (2, 4),
    (1, 4),
    (4, 4),
    (2, 3, 4),
    (1, 4, 4),
    (1, 2, 4, 4),
    (1, 1, 1, 1),
    (2, 0, 4),
)


def _schema_case(name: str, schema: Any) -> Case | None:
    """One model of random types, shapes and attributes; None where the operator takes no tensors."""
    chance = random.Random(name)
    allowed = {each.type_param_str: list(each.allowed_type_strs) for each in schema.type_constraints}
    chosen: dict[str, int] = {}
    usual = chance.choice(_SHAPES)
    arrays: dict[str, Array] = {}
    inputs: list[str] = []
    count = min(len(schema.inputs), chance.randint(max(schema.min_input, 1), max(len(schema.inputs), 1)))
    for number, formal in enumerate(schema.inputs[:count]):
        types = [_TYPES[each] for each in allowed.get(formal.typeStr, [formal.typeStr]) if each in _TYPES]
        if not types:
            return None
        datatype = chosen.setdefault(formal.typeStr, chance.choice(types))
        shape = usual if chance.random() < 0.6 else chance.choice(_SHAPES)
        dtype = helper.tensor_dtype_to_np_dtype(datatype)
        size = int(np.prod(shape))
        if chance.random() < 0.5:
            array = as_type([chance.randint(0, 3) for _ in range(size)], dtype)
        else:
            array = as_type(
                [chance.choice(FLOAT_EDGES if dtype.kind == "f" else WHOLE_EDGES) for _ in range(size)], dtype
            )
        inputs.append(f"x{number}")
        arrays[f"x{number}"] = array.reshape(shape)
    attributes = {
        key: _attribute_value(attribute, chance)
        for key, attribute in schema.attributes.items()
        if attribute.required or chance.random() < 0.3
    }
    outputs = [f"y{number}" for number in range(max(schema.min_output, 1))]
    node = helper.make_node(
        schema.name, inputs, outputs, domain=schema.domain, **{k: v for k, v in attributes.items() if v is not None}
    )
    constants = {key for key in inputs[1:] if chance.random() < 0.5}
    described = [
        helper.make_tensor_value_info(
            key, helper.np_dtype_to_tensor_dtype(array.dtype), [f"{key}_{a}" for a in range(array.ndim)]
        )
        for key, array in arrays.items()
        if key not in constants
    ]
    graph = helper.make_graph(
        [node], "schema", described, [onnx.ValueInfoProto(name=each) for each in outputs],
        [numpy_helper.from_array(arrays[key], key) for key in sorted(constants)],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", OLDEST_OPSET)]
    if schema.domain:
        opsets.append(helper.make_opsetid(schema.domain, schema.since_version))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    sent = {key: array for key, array in arrays.items() if key not in constants}
    return Case(name, schema.name, model.SerializeToString(), (sent, *_with_edges(sent)[:8]))


def _attribute_value(attribute: Any, chance: random.Random) -> Any:
    kind = str(attribute.type).rpartition(".")[2]
    return {
        "INT": chance.choice((0, 1, 2, *WHOLE_EDGES)),
        "FLOAT": chance.choice(FLOAT_EDGES),
        "INTS": [chance.choice((0, 1, 2, *WHOLE_EDGES)) for _ in range(chance.choice((0, 1, 2)))] or None,
        "FLOATS": [chance.choice(FLOAT_EDGES) for _ in range(chance.choice((0, 1, 2)))] or None,
        "STRING": chance.choice(("", "NOTSET", "x")),
    }.get(kind)
