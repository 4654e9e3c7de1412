"""An ONNX model's graph as plain values: nodes, attributes, constants, declared types; read without any library.

Owns: the reading of the part of onnx.proto that ordinary models use. Refuses the rest (subgraphs, functions, external
and sparse data, fields that are not known) with NotPlain, since a library could use what is not seen here.
Bounded in memory: data of large tensors is skipped. Called by rule.py.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from msgspec import Struct

from edge_runtime.backends.model_files import open_artifact
from edge_runtime.backends.protobuf_fields import FIXED32, LENGTH_DELIMITED, VARINT, ProtobufFields, signed, varints
from edge_runtime.model_spec import DYNAMIC

FLOAT, UINT8, INT8, INT32, INT64, STRING, BOOL, DOUBLE = 1, 2, 3, 6, 7, 8, 9, 11
"""TensorProto.DataType, those that plain models use."""

_DTYPES: Mapping[int, np.dtype[np.generic]] = {
    FLOAT: np.dtype("<f4"), UINT8: np.dtype("u1"), INT8: np.dtype("i1"), INT32: np.dtype("<i4"),
    INT64: np.dtype("<i8"), BOOL: np.dtype("?"), DOUBLE: np.dtype("<f8"),
}  # fmt: skip

_MAX_NUMBERS = 4096
"""Elements of a constant that are read: scales of a wide layer. Larger ones are weights, whose values do not matter."""

_MAX_ATTRIBUTE_BYTES = 1 << 22
"""Of one list in an attribute: a forest of a hundred thousand nodes has about this much."""

_MAX_FIELDS = 1_000_000
"""Half a second of reading; a forest of a hundred thousand nodes has about this many."""

_MAX_NODES = 4096
_MAX_TEXT = 4096

Span = tuple[int, int]


class NotPlain(Exception):
    """A part of a model that this reader does not follow; the text says which."""


class OnnxConstant(Struct, frozen=True):
    """A tensor of the file. numbers: its elements in order, None where there are more than are read."""

    datatype: int
    shape: tuple[int, ...]
    numbers: tuple[float, ...] | None


class OnnxNode(Struct, frozen=True):
    """One use of an operator. domain: "" for ONNX's own."""

    operator: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, object]


class OnnxGraph(Struct, frozen=True):
    """A whole model. declared: the datatype, and where one is said the shape, of inputs, outputs and values between.

    A dimension that is not a number is DYNAMIC. inputs are without those that are constants.
    """

    opsets: Mapping[str, int]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[OnnxNode, ...]
    constants: Mapping[str, OnnxConstant]
    declared: Mapping[str, tuple[int, tuple[int, ...] | None]]


def read_graph(artifact: Path) -> OnnxGraph:
    """Read one file. Raises NotPlain, and LoadFailed for bytes that are not protobuf."""
    descriptor, status = open_artifact(artifact)
    try:
        return _GraphReader(ProtobufFields(descriptor, status.st_size, artifact.name, _MAX_FIELDS)).read()
    finally:
        os.close(descriptor)


# ---- private --------------------------------------------------------------------------------------------------------

_Field = tuple[int, int, int, int]

# Field numbers of onnx.proto (ONNX 1.23) that may be skipped: names, versions, texts for people.
_MODEL_TEXT = frozenset((1, 2, 3, 4, 5, 6, 14))
_GRAPH_TEXT = frozenset((2, 10, 14, 16))
_NODE_TEXT = frozenset((3, 6, 9))
_TENSOR_TEXT = frozenset((12, 16))
_VALUE_TEXT = frozenset((3, 4))


class _GraphReader:
    """One pass over a model."""

    def __init__(self, reader: ProtobufFields) -> None:
        self._reader = reader

    def read(self) -> OnnxGraph:
        opsets: dict[str, int] = {}
        graphs: list[Span] = []
        for number, wire_type, start, end in self._reader.fields(0, self._reader.size):
            if number == 7 and wire_type == LENGTH_DELIMITED:
                graphs.append((start, end))
            elif number == 8 and wire_type == LENGTH_DELIMITED:
                domain, version = self._opset((start, end))
                if opsets.setdefault(domain, version) != version:
                    raise NotPlain(f"it names two versions of the operators of {domain!r}")
            elif number not in _MODEL_TEXT:
                raise NotPlain({20: "it has training information", 25: "it has functions"}.get(number, _field(number)))
        if len(graphs) != 1:
            raise NotPlain("it has no graph, or several")
        return self._graph(graphs[0], opsets)

    def _graph(self, span: Span, opsets: Mapping[str, int]) -> OnnxGraph:
        nodes: list[OnnxNode] = []
        constants: dict[str, OnnxConstant] = {}
        named: dict[int, list[str]] = {11: [], 12: [], 13: []}
        declared: dict[str, tuple[int, tuple[int, ...] | None]] = {}
        for number, wire_type, start, end in self._reader.fields(*span):
            if number in _GRAPH_TEXT:
                continue
            if wire_type != LENGTH_DELIMITED or number not in (1, 5, *named):
                raise NotPlain("it has sparse constants" if number == 15 else _field(number))
            if number == 1:
                nodes.append(self._node((start, end)))
                if len(nodes) > _MAX_NODES:
                    raise NotPlain(f"it has more than {_MAX_NODES} nodes")
            elif number == 5:
                name, constant = self._tensor((start, end))
                if constants.setdefault(name, constant) is not constant:
                    raise NotPlain(f"it has two constants named {name!r}")
            else:
                name, kind = self._value((start, end))
                named[number].append(name)
                if kind is not None and declared.setdefault(name, kind) != kind:
                    raise NotPlain(f"it declares {name!r} in two ways")
        if any(len(set(names)) != len(names) for names in named.values()):
            raise NotPlain("it has two inputs or outputs of one name")
        inputs = tuple(name for name in named[11] if name not in constants)
        return OnnxGraph(opsets, inputs, tuple(named[12]), tuple(nodes), constants, declared)

    def _opset(self, span: Span) -> tuple[str, int]:
        domain, version = "", 0
        for number, wire_type, start, end in self._reader.fields(*span):
            if number == 1 and wire_type == LENGTH_DELIMITED:
                domain = self._text(start, end)
            elif number == 2 and wire_type == VARINT:
                version = start
        return ("" if domain == "ai.onnx" else domain), version

    def _node(self, span: Span) -> OnnxNode:
        inputs: list[str] = []
        outputs: list[str] = []
        texts = {4: "", 7: ""}
        attributes: dict[str, object] = {}
        for number, wire_type, start, end in self._reader.fields(*span):
            if number in _NODE_TEXT:
                continue
            if wire_type != LENGTH_DELIMITED or number not in (1, 2, 4, 5, 7):
                raise NotPlain(_field(number))
            if number == 5:
                name, value = self._attribute((start, end))
                if name in attributes:
                    raise NotPlain(f"a node has two attributes named {name!r}")
                attributes[name] = value
            elif number in texts:
                texts[number] = self._text(start, end)
            else:
                (inputs if number == 1 else outputs).append(self._text(start, end))
        domain = "" if texts[7] == "ai.onnx" else texts[7]
        return OnnxNode(texts[4], domain, tuple(inputs), tuple(outputs), attributes)

    def _attribute(self, span: Span) -> tuple[str, object]:
        """Return an attribute's name and value; the field that its type names, and no other."""
        name, kind = "", 0
        values: dict[int, list[_Field]] = {}
        for field in self._reader.fields(*span):
            number, wire_type, start, end = field
            if number == 1 and wire_type == LENGTH_DELIMITED:
                name = self._text(start, end)
            elif number == 20 and wire_type == VARINT:
                kind = start
            elif number != 13:
                values.setdefault(number, []).append(field)
        wanted = {1: 2, 2: 3, 3: 4, 4: 5, 6: 7, 7: 8, 8: 9}.get(kind)
        if wanted is None or set(values) - {wanted}:
            raise NotPlain(f"the attribute {name!r} is a graph, or of a kind that is not known")
        fields = values.get(wanted, [])
        if wanted in (7, 8, 9):
            return name, self._list(name, wanted, fields)
        if not fields:
            return name, {2: 0.0, 3: 0, 4: b""}.get(wanted)
        if len(fields) > 1:
            raise NotPlain(f"the attribute {name!r} has two values")
        _, wire_type, start, end = fields[0]
        if wire_type != {2: FIXED32, 3: VARINT}.get(wanted, LENGTH_DELIMITED):
            raise NotPlain(f"the attribute {name!r} is of a kind that is not known")
        if wanted == 2:
            return name, struct.unpack("<f", self._reader.content(start, end))[0]
        if wanted == 3:
            return name, signed(start)
        if wanted == 4:
            return name, self._text(start, end).encode()
        return name, self._tensor((start, end))[1]

    def _list(self, name: str, wanted: int, fields: list[_Field]) -> object:
        if (
            sum(max(end - start, 8) for _, wire_type, start, end in fields if wire_type != VARINT)
            > _MAX_ATTRIBUTE_BYTES
        ):
            raise NotPlain(f"the attribute {name!r} has more than {_MAX_ATTRIBUTE_BYTES} bytes")
        numbers: list[object] = []
        for _, wire_type, start, end in fields:
            if wanted == 9 and wire_type == LENGTH_DELIMITED:
                numbers.append(self._reader.content(start, end))
            elif wanted == 7 and wire_type in (FIXED32, LENGTH_DELIMITED):
                numbers.extend(np.frombuffer(self._packed(start, end, 4), "<f4").tolist())
            elif wanted == 8 and wire_type == VARINT:
                numbers.append(signed(start))
            elif wanted == 8 and wire_type == LENGTH_DELIMITED:
                numbers.extend(self._varints(start, end))
            else:
                raise NotPlain(f"the attribute {name!r} is of a kind that is not known")
        return tuple(numbers)

    def _tensor(self, span: Span) -> tuple[str, OnnxConstant]:
        """Read one tensor. Its data must be as long as its shape says: a library may believe either."""
        name, datatype = "", 0
        dims: list[int] = []
        data: list[_Field] = []
        for field in self._reader.fields(*span):
            number, wire_type, start, end = field
            if number == 1 and wire_type == VARINT:
                dims.append(signed(start))
            elif number == 1 and wire_type == LENGTH_DELIMITED:
                dims.extend(self._varints(start, end))
            elif number == 2 and wire_type == VARINT:
                datatype = start
            elif number == 8 and wire_type == LENGTH_DELIMITED:
                name = self._text(start, end)
            elif number in (4, 5, 7, 9, 10) and wire_type == LENGTH_DELIMITED:
                data.append(field)
            elif number == 14 and wire_type == VARINT and start == 0:
                continue
            elif number not in _TENSOR_TEXT:
                is_outside = number in (13, 14)
                raise NotPlain(f"the constant {name!r} has its data in another file" if is_outside else _field(number))
        if datatype not in _DTYPES:
            raise NotPlain(f"the constant {name!r} is of the type {datatype}, whose kernels were not tried")
        if len(dims) > 8 or any(size < 1 for size in dims):
            raise NotPlain(f"the constant {name!r} is empty, or has more than 8 axes")
        return name, OnnxConstant(datatype, tuple(dims), self._numbers(name, datatype, math.prod(dims), data))

    def _numbers(self, name: str, datatype: int, count: int, data: list[_Field]) -> tuple[float, ...] | None:
        if len(data) != 1:
            raise NotPlain(f"the constant {name!r} has no data, or more than once")
        number, _, start, end = data[0]
        dtype = _DTYPES[datatype]
        if number == 9 or (number, datatype) in ((4, FLOAT), (10, DOUBLE)):
            if end - start != count * dtype.itemsize:
                raise NotPlain(f"the constant {name!r} has not as much data as its shape says")
            if count > _MAX_NUMBERS:
                return None
            return tuple(np.frombuffer(self._reader.content(start, end), dtype).tolist())
        is_right = datatype == INT64 if number == 7 else number == 5 and datatype in (INT32, INT8, UINT8, BOOL)
        if not is_right or end - start > 10 * _MAX_NUMBERS:
            raise NotPlain(f"the constant {name!r} is written in a way that is not read here")
        numbers = self._varints(start, end)
        if len(numbers) != count:
            raise NotPlain(f"the constant {name!r} has not as much data as its shape says")
        return tuple(numbers)

    def _value(self, span: Span) -> tuple[str, tuple[int, tuple[int, ...] | None] | None]:
        """Return a value's name, and its datatype and shape where they are declared."""
        name, kind = "", None
        for number, wire_type, start, end in self._reader.fields(*span):
            if number == 1 and wire_type == LENGTH_DELIMITED:
                name = self._text(start, end)
            elif number == 2 and wire_type == LENGTH_DELIMITED and kind is None:
                kind = self._type(name, (start, end))
            elif number not in _VALUE_TEXT:
                raise NotPlain(_field(number))
        return name, kind

    def _type(self, name: str, span: Span) -> tuple[int, tuple[int, ...] | None]:
        fields = [field for field in self._reader.fields(*span) if field[0] != 6]
        if len(fields) != 1 or fields[0][:2] != (1, LENGTH_DELIMITED):
            raise NotPlain(f"{name!r} is not a tensor")
        datatype, shape = 0, None
        for number, wire_type, start, end in self._reader.fields(*fields[0][2:]):
            if number == 1 and wire_type == VARINT:
                datatype = start
            elif number == 2 and wire_type == LENGTH_DELIMITED and shape is None:
                shape = self._shape((start, end))
            else:
                raise NotPlain(_field(number))
        return datatype, shape

    def _shape(self, span: Span) -> tuple[int, ...]:
        shape: list[int] = []
        for number, wire_type, start, end in self._reader.fields(*span):
            if number != 1 or wire_type != LENGTH_DELIMITED:
                raise NotPlain(_field(number))
            size = DYNAMIC
            for part, kind, value, _ in self._reader.fields(start, end):
                if part == 1 and kind == VARINT:
                    size = signed(value)
            shape.append(size if size >= 0 else DYNAMIC)
        return tuple(shape)

    def _varints(self, start: int, end: int) -> list[int]:
        try:
            return varints(self._packed(start, end, 1))
        except ValueError as error:
            raise NotPlain(str(error)) from error

    def _packed(self, start: int, end: int, size: int) -> bytes:
        if end - start > _MAX_ATTRIBUTE_BYTES or (end - start) % size:
            raise NotPlain("a list of numbers is cut off, or longer than is read here")
        return self._reader.content(start, end)

    def _text(self, start: int, end: int) -> str:
        if end - start > _MAX_TEXT:
            raise NotPlain(f"a name has more than {_MAX_TEXT} bytes")
        try:
            return self._reader.content(start, end).decode()
        except UnicodeDecodeError as error:
            raise NotPlain("a name is not UTF-8") from error


def _field(number: int) -> str:
    return f"it has a part that is not read here (field {number})"
