"""Models that end in ZipMap, as scikit-learn's, XGBoost's, LightGBM's and CatBoost's exporters write them.

Owns: the rewriting of such a file in memory. ZipMap makes a list of dictionaries of a tensor, one a row, which no wire
carries; each ZipMap becomes an Identity, and its output a tensor [rows, classes]. Its keys name the classes. Called by
backends/onnxruntime/backend.py, and by pictures/model_metadata.py for the names. files.py has checked the file before.
"""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct

from edge_runtime.backends.model_files import open_artifact
from edge_runtime.backends.protobuf_fields import FIXED32, LENGTH_DELIMITED, VARINT, ProtobufFields, signed, varints
from edge_runtime.errors import LoadFailed

# Field numbers of onnx.proto.
_MODEL_GRAPH, _MODEL_OPSET = 7, 8
_GRAPH_NODE, _GRAPH_OUTPUT = 1, 12
_NODE_INPUT, _NODE_OUTPUT, _NODE_OPERATOR, _NODE_ATTRIBUTE, _NODE_DOMAIN = 1, 2, 4, 5, 7
_ATTRIBUTE_NAME, _ATTRIBUTE_INTS, _ATTRIBUTE_STRINGS = 1, 8, 9
_VALUE_NAME, _VALUE_TYPE = 1, 2
_TYPE_TENSOR, _TENSOR_ELEMENT, _TENSOR_SHAPE = 1, 1, 2
_SHAPE_DIMENSION, _DIMENSION_VALUE, _DIMENSION_NAME = 1, 1, 2
_OPSET_VERSION = 2

_FLOAT = 1
_IDENTITY_OPSET = 13
"""For models that name no version of ONNX's own operators: the one since which Identity has not changed for floats."""

_MAX_TEXT = 4096
_MAX_FIELDS = 5_000_000
_MAX_CLASSES = 100_000

Span = tuple[int, int]


class ZipMap(Struct, frozen=True):
    """One such node. classes: its keys in the order of columns, as text."""

    span: Span
    source: str
    output: str
    classes: tuple[str, ...]


def zipmap_classes(artifact: Path) -> tuple[str, ...]:
    """The names of the classes where the model ends in one ZipMap; () for every other. Raises LoadFailed."""
    descriptor, status = open_artifact(artifact)
    try:
        rewriter = _Rewriter(ProtobufFields(descriptor, status.st_size, artifact.name, _MAX_FIELDS))
        return rewriter.zipmaps[0].classes if len(rewriter.zipmaps) == 1 else ()
    finally:
        os.close(descriptor)


def without_zipmaps(artifact: Path, opened: int = -1) -> bytes | None:
    """The model with tensors in place of dictionaries; None where it has no ZipMap. Raises LoadFailed.

    opened: as of `open_artifact`.
    """
    descriptor, status = open_artifact(artifact, opened)
    try:
        rewriter = _Rewriter(ProtobufFields(descriptor, status.st_size, artifact.name, _MAX_FIELDS))
        return rewriter.rewritten() if rewriter.zipmaps else None
    finally:
        os.close(descriptor)


# ---- private --------------------------------------------------------------------------------------------------------


class _Rewriter:
    """One model, read field by field; only what changes is decoded."""

    def __init__(self, reader: ProtobufFields) -> None:
        self._reader = reader
        graphs = [
            (start, end)
            for number, wire_type, start, end in reader.fields(0, reader.size)
            if number == _MODEL_GRAPH and wire_type == LENGTH_DELIMITED
        ]
        self._graph = graphs[0] if len(graphs) == 1 else (0, 0)
        found = (
            self._zipmap((start, end))
            for number, wire_type, start, end in reader.fields(*self._graph)
            if number == _GRAPH_NODE and wire_type == LENGTH_DELIMITED
        )
        self.zipmaps = [each for each in found if each is not None]

    def rewritten(self) -> bytes:
        """The whole model, changed."""
        by_span = {each.span: each for each in self.zipmaps}
        by_output = {each.output: each for each in self.zipmaps}
        graph: list[bytes] = []
        for number, wire_type, start, end in self._reader.fields(*self._graph):
            if (start, end) in by_span and number == _GRAPH_NODE:
                graph.append(_identity(by_span[start, end]))
            elif number == _GRAPH_OUTPUT and wire_type == LENGTH_DELIMITED:
                zipmap = by_output.get(self._text((start, end), _VALUE_NAME))
                graph.append(self._copied(number, wire_type, start, end) if zipmap is None else _tensor(zipmap))
            else:
                graph.append(self._copied(number, wire_type, start, end))
        model: list[bytes] = []
        has_own_operators = False
        for number, wire_type, start, end in self._reader.fields(0, self._reader.size):
            if (start, end) == self._graph and number == _MODEL_GRAPH:
                model.append(_field(_MODEL_GRAPH, b"".join(graph)))
                continue
            if number == _MODEL_OPSET and wire_type == LENGTH_DELIMITED:
                has_own_operators |= self._text((start, end), 1) in ("", "ai.onnx")
            model.append(self._copied(number, wire_type, start, end))
        if not has_own_operators:
            model.append(_field(_MODEL_OPSET, _number(_OPSET_VERSION, _IDENTITY_OPSET)))
        return b"".join(model)

    def _zipmap(self, span: Span) -> ZipMap | None:
        texts = {_NODE_INPUT: "", _NODE_OUTPUT: "", _NODE_OPERATOR: "", _NODE_DOMAIN: ""}
        attributes: list[Span] = []
        for number, wire_type, start, end in self._reader.fields(*span):
            if wire_type != LENGTH_DELIMITED:
                continue
            if number == _NODE_ATTRIBUTE:
                attributes.append((start, end))
            elif number in texts and end - start <= _MAX_TEXT:
                texts[number] = self._reader.content(start, end).decode("utf-8", "replace")
        if (texts[_NODE_OPERATOR], texts[_NODE_DOMAIN]) != ("ZipMap", "ai.onnx.ml"):
            return None
        classes = [name for attribute in attributes for name in self._classes(attribute)]
        return ZipMap(span, texts[_NODE_INPUT], texts[_NODE_OUTPUT], tuple(classes))

    def _classes(self, span: Span) -> list[str]:
        if self._text(span, _ATTRIBUTE_NAME) not in ("classlabels_int64s", "classlabels_strings"):
            return []
        found: list[str] = []
        for number, wire_type, start, end in self._reader.fields(*span):
            if len(found) >= _MAX_CLASSES:
                break
            if number == _ATTRIBUTE_STRINGS and wire_type == LENGTH_DELIMITED and end - start <= _MAX_TEXT:
                found.append(self._reader.content(start, end).decode("utf-8", "replace"))
            elif number == _ATTRIBUTE_INTS and wire_type == VARINT:
                found.append(str(signed(start)))
            elif number == _ATTRIBUTE_INTS and wire_type == LENGTH_DELIMITED:  # packed
                found += map(str, self._packed(start, end))
        return found

    def _packed(self, start: int, end: int) -> list[int]:
        if end - start > _MAX_CLASSES * 10:  # bytes of the longest number
            raise LoadFailed(f"its ZipMap names more than {_MAX_CLASSES} classes")
        try:
            return varints(self._reader.content(start, end))
        except ValueError as error:
            raise LoadFailed(f"its ZipMap cannot be read: {error}") from error

    def _text(self, span: Span, wanted: int) -> str:
        for number, wire_type, start, end in self._reader.fields(*span):
            if number == wanted and wire_type == LENGTH_DELIMITED and end - start <= _MAX_TEXT:
                return self._reader.content(start, end).decode("utf-8", "replace")
        return ""

    def _copied(self, number: int, wire_type: int, start: int, end: int) -> bytes:
        if wire_type == VARINT:
            return _number(number, start)
        content = self._reader.content(start, end)
        if wire_type == LENGTH_DELIMITED:
            return _field(number, content)
        assert wire_type == FIXED32 or len(content) == 8
        return _varint(number << 3 | wire_type) + content


def _identity(zipmap: ZipMap) -> bytes:
    node = _field(_NODE_INPUT, zipmap.source.encode()) + _field(_NODE_OUTPUT, zipmap.output.encode())
    return _field(_GRAPH_NODE, node + _field(_NODE_OPERATOR, b"Identity"))


def _tensor(zipmap: ZipMap) -> bytes:
    """The declaration of its output: FP32 [rows, classes]."""
    rows = _field(_SHAPE_DIMENSION, _field(_DIMENSION_NAME, b"rows"))
    columns = _field(_SHAPE_DIMENSION, _number(_DIMENSION_VALUE, len(zipmap.classes)) if zipmap.classes else b"")
    tensor = _number(_TENSOR_ELEMENT, _FLOAT) + _field(_TENSOR_SHAPE, rows + columns)
    named = _field(_VALUE_NAME, zipmap.output.encode())
    return _field(_GRAPH_OUTPUT, named + _field(_VALUE_TYPE, _field(_TYPE_TENSOR, tensor)))


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | LENGTH_DELIMITED) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3 | VARINT) + _varint(value)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
