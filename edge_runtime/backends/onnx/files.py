"""Which files an ONNX model needs, and its weights' precision, read before any library reads the model.

Owns: the walk over the model's protobuf that finds every tensor, wherever nested, and refuses external data that is not
a plain file inside the version folder. Imports no library: some versions of ONNX Runtime (1.23.2, the last for Python
3.10) read `../`, absolute and linked locations and crash on address marks. Called by every backend that reads ONNX.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from edge_runtime.backends.model_files import ArtifactFiles, HasMoreFiles, open_artifact, plain_file_size
from edge_runtime.backends.protobuf_fields import LENGTH_DELIMITED, VARINT, ProtobufFields
from edge_runtime.errors import LoadFailed

# Where a tensor can sit: message -> field number -> (message in that field, whether it may repeat).
# Source: onnx.proto of ONNX 1.23 (IR version 13). The same numbers hold since IR version 3; new ones are never reused.
_CHILDREN: dict[str, dict[int, tuple[str, bool]]] = {
    "Model": {7: ("Graph", False), 20: ("TrainingInfo", True), 25: ("Function", True)},
    "TrainingInfo": {1: ("Graph", False), 2: ("Graph", False)},
    "Function": {7: ("Node", True), 11: ("Attribute", True)},
    "Graph": {1: ("Node", True), 5: ("Tensor", True), 15: ("SparseTensor", True)},
    "Node": {5: ("Attribute", True)},
    "Attribute": {
        5: ("Tensor", False), 6: ("Graph", False), 10: ("Tensor", True), 11: ("Graph", True),
        22: ("SparseTensor", False), 23: ("SparseTensor", True),
    },
    "SparseTensor": {1: ("Tensor", False), 2: ("Tensor", False)},
}  # fmt: skip

_MAX_DEPTH = 100
"""Messages inside messages; protobuf's own readers refuse more than 100 by default."""

_NODE_OP_TYPE = 4
_TENSOR_DIMS, _TENSOR_DATA_TYPE, _TENSOR_EXTERNAL_DATA, _TENSOR_DATA_LOCATION = 1, 2, 13, 14
_EXTERNAL = 1
_KNOWN_KEYS = frozenset(("location", "offset", "length", "checksum"))
_MANY = 1 << 62
"""More elements than any file holds; bounds the product of hostile dimensions."""
_MAX_ENTRY_BYTES = 8192
"""A key and a value of external data; twice the longest path (PATH_MAX, 4096)."""

# TensorProto.DataType -> precision. Types that are not listed hold shapes, indices and text, not weights.
_PRECISIONS = {
    1: "f32", 10: "f16", 11: "f64", 16: "bf16",
    2: "int8", 3: "int8",
    17: "f8", 18: "f8", 19: "f8", 20: "f8", 21: "int4", 22: "int4", 23: "f4",
}  # fmt: skip

_MOST = 0.9
"""Scales, biases and limits of an int8 or f16 model stay f32; they are a few per cent of its elements."""


def check_onnx_files(artifact: Path, opened: int = -1) -> ArtifactFiles:
    """Walk one ONNX file and check every data file it names.

    opened: as of `open_artifact`. Memory: a window of 256 KiB, whatever the model's size. Raises LoadFailed for bytes
    that are not an ONNX model, for external data that is not a plain file inside the artifact's folder, and for
    precompiled (EPContext) nodes; HasMoreFiles: there is external data, and this process sees nothing but `opened`.
    """
    descriptor, status = open_artifact(artifact, opened)
    try:
        walk = _Walk(ProtobufFields(descriptor, status.st_size, artifact.name))
        entries = walk.external_data()
    finally:
        os.close(descriptor)
    if entries and opened >= 0:
        raise HasMoreFiles(f"{artifact.name} keeps its weights in other files")
    if entries and stat.S_ISLNK(artifact.lstat().st_mode):
        raise LoadFailed(f"{artifact} is a symbolic link and has external data; copy the model and its data there")
    sizes: dict[str, int] = {}
    for entry in entries:
        location = entry["location"]
        if location not in sizes:
            sizes[location] = plain_file_size(artifact.parent, location)
        _check_range(entry, sizes[location])
    return ArtifactFiles(
        tuple(sizes),
        status.st_size + sum(sizes.values()),
        weight_precision(walk.elements),
        holds_int8(walk.elements),
    )


def holds_int8(elements: Mapping[int, int]) -> bool:
    """Whether a model was quantised to int8, wholly or in part; any other model has int8 zero points at most."""
    weights = _weights(elements)
    return weights.get("int8", 0) > (1 - _MOST) * sum(weights.values())


def weight_precision(elements: Mapping[int, int]) -> str:
    """The precision of nine weights in ten, else "mixed"; "" for a model without weights.

    elements: number of elements for each TensorProto.DataType.
    """
    weights = _weights(elements)
    if not weights:
        return ""
    most = max(weights, key=lambda precision: weights[precision])
    return most if weights[most] >= _MOST * sum(weights.values()) else "mixed"


class _Walk:
    """One pass over a model; iterative, so nesting cannot exhaust the stack."""

    def __init__(self, reader: ProtobufFields) -> None:
        self.elements: dict[int, int] = {}
        self._reader = reader
        self._entries: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}

    def external_data(self) -> list[dict[str, str]]:
        """Return the keys and values of each tensor's external data, equal ones once."""
        if self._reader.size == 0:
            raise LoadFailed("the ONNX file is empty; copy it again")
        seen = self._children("Model", 0, self._reader.size)
        if not any(message == "Graph" for message, _, _ in seen):
            raise LoadFailed("the file has no graph, so it is not an ONNX model")
        levels = [seen]
        while levels:
            if not levels[-1]:
                levels.pop()
                continue
            message, start, end = levels[-1].pop()
            if message == "Tensor":
                self._tensor(start, end)
                continue
            if len(levels) > _MAX_DEPTH:
                raise LoadFailed(f"the ONNX file nests deeper than {_MAX_DEPTH} messages; flatten the model")
            levels.append(self._children(message, start, end))
        return list(self._entries.values())

    def _children(self, message: str, start: int, end: int) -> list[tuple[str, int, int]]:
        """Find the messages inside one message that are or may hold tensors, as (message, start, end)."""
        known = _CHILDREN[message]
        found: list[tuple[str, int, int]] = []
        once: set[int] = set()
        for number, wire_type, first, last in self._reader.fields(start, end):
            child = known.get(number)
            if child is not None:
                if wire_type != LENGTH_DELIMITED:
                    raise LoadFailed(f"field {number} of an ONNX {message} has wire type {wire_type}, wanted 2")
                name, may_repeat = child
                # A reader merges repeated singular messages, so that halves which look harmless could add up.
                if not may_repeat and number in once:
                    raise LoadFailed(f"field {number} of an ONNX {message} occurs twice; no exporter writes that")
                once.add(number)
                found.append((name, first, last))
            elif message == "Node" and number == _NODE_OP_TYPE and wire_type == LENGTH_DELIMITED:
                self._op_type(first, last)
        return found

    def _op_type(self, start: int, end: int) -> None:
        # EPContext names a compiled binary by path, or carries one; both are code.
        if end - start == len(b"EPContext") and self._reader.content(start, end) == b"EPContext":
            raise LoadFailed("the model holds precompiled code (an EPContext node); wanted the original ONNX model")

    def _tensor(self, start: int, end: int) -> None:
        """Collect one tensor's external data; it must be sound even where the tensor does not call itself external."""
        entry: dict[str, str] = {}
        is_external = False
        data_type, elements = 0, 1
        for number, wire_type, first, last in self._reader.fields(start, end):
            if number == _TENSOR_EXTERNAL_DATA:
                if wire_type != LENGTH_DELIMITED:
                    raise LoadFailed(f"external data of an ONNX tensor has wire type {wire_type}, wanted 2")
                self._entry(first, last, entry)
            elif number == _TENSOR_DATA_LOCATION and wire_type == VARINT:
                is_external = is_external or first == _EXTERNAL
            elif number == _TENSOR_DATA_TYPE and wire_type == VARINT:
                data_type = first
            elif number == _TENSOR_DIMS and wire_type == VARINT:
                elements = min(elements * first, _MANY)
        if (entry or is_external) and "location" not in entry:
            raise LoadFailed("a tensor of the ONNX model says its data is in another file, but not in which one")
        self.elements[data_type] = self.elements.get(data_type, 0) + elements
        if entry:
            self._entries[tuple(sorted(entry.items()))] = entry

    def _entry(self, start: int, end: int, into: dict[str, str]) -> None:
        if end - start > _MAX_ENTRY_BYTES:
            raise LoadFailed(f"external data of an ONNX tensor is {end - start} bytes, limit {_MAX_ENTRY_BYTES}")
        text = {1: "", 2: ""}
        for number, wire_type, first, last in self._reader.fields(start, end):
            if number in text and wire_type == LENGTH_DELIMITED:
                try:
                    text[number] = self._reader.content(first, last).decode()
                except UnicodeDecodeError as error:
                    raise LoadFailed("external data of an ONNX tensor is not UTF-8") from error
        key, value = text[1], text[2]
        if key not in _KNOWN_KEYS:
            raise LoadFailed(f"external data of an ONNX tensor has the key {key[:80]!r}; known: {sorted(_KNOWN_KEYS)}")
        if key in into:
            raise LoadFailed(f"external data of an ONNX tensor names its {key} twice")
        into[key] = value


def _check_range(entry: Mapping[str, str], size: int) -> None:
    """Raise LoadFailed unless offset and length lie inside a file of `size` bytes."""
    numbers = {key: entry.get(key, "0") for key in ("offset", "length")}
    for key, text in numbers.items():
        if not (text.isascii() and text.isdigit() and len(text) <= 19):
            raise LoadFailed(f"external data {entry['location']!r} has the {key} {text[:40]!r}; wanted a whole number")
    offset, length = int(numbers["offset"]), int(numbers["length"])
    if offset + length > size:
        where = f"bytes {offset} to {offset + length}"
        raise LoadFailed(f"external data {entry['location']!r} is {size} bytes, but the model wants {where} of it")


def _weights(elements: Mapping[int, int]) -> dict[str, int]:
    weights: dict[str, int] = {}
    for data_type, count in elements.items():
        precision = _PRECISIONS.get(data_type)
        if precision is not None and count > 0:
            weights[precision] = weights.get(precision, 0) + count
    return weights
