"""The inputs and outputs that an ONNX model declares, read without any library.

Owns: the walk over the graph's inputs and outputs. Called where the library reports other ones: an engine has the types
and sizes that it was built for. files.py has checked the file before.
"""

from __future__ import annotations

import os
from pathlib import Path

from edge_runtime.backends.model_files import open_artifact
from edge_runtime.backends.protobuf_fields import LENGTH_DELIMITED, VARINT, ProtobufFields
from edge_runtime.errors import LoadFailed
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec

# TensorProto.DataType of onnx.proto -> the wire's datatype.
_DATATYPES = {
    1: "FP32", 2: "UINT8", 3: "INT8", 4: "UINT16", 5: "INT16", 6: "INT32", 7: "INT64", 8: "BYTES", 9: "BOOL",
    10: "FP16", 11: "FP64", 12: "UINT32", 13: "UINT64", 16: "BF16",
}  # fmt: skip

# Field numbers of onnx.proto.
_MODEL_GRAPH = 7
_GRAPH_INITIALIZER, _GRAPH_INPUT, _GRAPH_OUTPUT, _GRAPH_SPARSE_INITIALIZER = 5, 11, 12, 15
_SPARSE_VALUES, _TENSOR_NAME = 1, 8
_VALUE_NAME, _VALUE_TYPE = 1, 2
_TYPE_TENSOR = 1
_TENSOR_TYPE_ELEMENT, _TENSOR_TYPE_SHAPE = 1, 2
_SHAPE_DIMENSION, _DIMENSION_VALUE = 1, 1

_MAX_NAME_BYTES = 4096
_MAX_TENSORS = 4096
_LARGEST = (1 << 63) - 1

Span = tuple[int, int]


def declared_interface(artifact: Path) -> ModelSpec:
    """Return inputs and outputs in the model's order, without initializers that older exporters list as inputs.

    Raises LoadFailed: a tensor has no type, no rank, or a type that cannot be sent.
    """
    descriptor, status = open_artifact(artifact)
    try:
        return _Interface(ProtobufFields(descriptor, status.st_size, artifact.name)).read()
    finally:
        os.close(descriptor)


class _Interface:
    """One pass over a model."""

    def __init__(self, reader: ProtobufFields) -> None:
        self._reader = reader

    def read(self) -> ModelSpec:
        graphs = self._children((0, self._reader.size), _MODEL_GRAPH)
        if len(graphs) != 1:
            raise LoadFailed("the file has no graph, so it is not an ONNX model")
        inputs: list[TensorSpec] = []
        outputs: list[TensorSpec] = []
        constants: set[str] = set()
        for number, wire_type, start, end in self._reader.fields(*graphs[0]):
            if wire_type != LENGTH_DELIMITED:
                continue
            if number == _GRAPH_INPUT:
                inputs.append(self._value((start, end), "input"))
            elif number == _GRAPH_OUTPUT:
                outputs.append(self._value((start, end), "output"))
            elif number == _GRAPH_INITIALIZER:
                constants.add(self._text((start, end), _TENSOR_NAME))
            elif number == _GRAPH_SPARSE_INITIALIZER:
                constants.update(
                    self._text(each, _TENSOR_NAME) for each in self._children((start, end), _SPARSE_VALUES)
                )
            if len(inputs) + len(outputs) > _MAX_TENSORS:
                raise LoadFailed(f"the ONNX model has more than {_MAX_TENSORS} inputs and outputs")
        kept = tuple(tensor for tensor in inputs if tensor.name not in constants)
        return ModelSpec(kept, tuple(outputs))

    def _value(self, span: Span, direction: str) -> TensorSpec:
        name = self._text(span, _VALUE_NAME)
        types = [tensor for kind in self._children(span, _VALUE_TYPE) for tensor in self._children(kind, _TYPE_TENSOR)]
        if len(types) != 1:
            raise LoadFailed(f"{direction} {name!r} of the ONNX model is not a tensor; wanted one of a known type")
        element = self._number(types[0], _TENSOR_TYPE_ELEMENT)
        if element not in _DATATYPES:
            raise LoadFailed(f"{direction} {name!r} has the element type {element}, which cannot be sent")
        shapes = self._children(types[0], _TENSOR_TYPE_SHAPE)
        if len(shapes) != 1:
            raise LoadFailed(f"{direction} {name!r} has no known rank; export the model with one")
        dimensions = (self._dimension(each) for each in self._children(shapes[0], _SHAPE_DIMENSION))
        return TensorSpec(name, _DATATYPES[element], tuple(dimensions))

    def _dimension(self, span: Span) -> int:
        size = self._number(span, _DIMENSION_VALUE)
        return size if size is not None and 0 <= size <= _LARGEST else DYNAMIC

    def _children(self, span: Span, wanted: int) -> list[Span]:
        return [
            (start, end)
            for number, wire_type, start, end in self._reader.fields(*span)
            if number == wanted and wire_type == LENGTH_DELIMITED
        ]

    def _number(self, span: Span, wanted: int) -> int | None:
        found = None
        for number, wire_type, value, _ in self._reader.fields(*span):
            if number == wanted and wire_type == VARINT:
                found = value
        return found

    def _text(self, span: Span, wanted: int) -> str:
        for start, end in self._children(span, wanted):
            if end - start > _MAX_NAME_BYTES:
                raise LoadFailed(f"a name in the ONNX model is {end - start} bytes, limit {_MAX_NAME_BYTES}")
            try:
                return self._reader.content(start, end).decode()
            except UnicodeDecodeError as error:
                raise LoadFailed("a name in the ONNX model is not UTF-8") from error
        return ""
