"""Names of a TensorFlow Lite file's tensors: its signature's, without any library.

Owns: the few tables of the FlatBuffer that are read for it, bounded, with `pread`. Source: tflite's schema.fbs, tables
Model, SubGraph, Tensor, SignatureDef, TensorMap; https://flatbuffers.dev/internals. Called by backends whose library
reads the graph alone.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct, field

from edge_runtime.backends.model_files import open_artifact
from edge_runtime.errors import LoadFailed

DEFAULT_SIGNATURE = "serving_default"
"""The signature that TensorFlow's converter writes by default."""

_SUBGRAPHS, _SIGNATURES = 2, 7  # of Model
_TENSORS = 0  # of SubGraph
_TENSOR_NAME = 3  # of Tensor
_SIGNATURE_INPUTS, _SIGNATURE_OUTPUTS, _SIGNATURE_KEY, _SIGNATURE_SUBGRAPH = 0, 1, 2, 4
_MAP_NAME, _MAP_TENSOR = 0, 1  # of TensorMap

_MAX_ENTRIES = 4096
"""Of a list of signatures or of their tensors."""
_MAX_NAME_BYTES = 4096


class SignatureNames(Struct, frozen=True):
    """The names that a signature gives to tensors, by the tensor's own name; empty where the file has no signature."""

    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)


def signature_names(artifact: Path) -> SignatureNames:
    """Return the names in the signature `serving_default` of the first graph, else in that graph's first signature.

    Raises LoadFailed: the file cannot be read, or its tables lead out of it.
    """
    descriptor, status = open_artifact(artifact)
    try:
        return _Tables(descriptor, status.st_size, artifact.name).names()
    finally:
        os.close(descriptor)


def without_ports(names: list[str]) -> list[str]:
    """Return TensorFlow's names of tensors without `:0`, the number of an operator's first output; all, or none."""
    short = [name.removesuffix(":0") for name in names]
    return short if len(set(short)) == len(names) else names


class _Tables:
    """Tables of one open file. Positions are bytes from its beginning."""

    def __init__(self, descriptor: int, size: int, name: str) -> None:
        self._descriptor = descriptor
        self._size = size
        self._name = name

    def names(self) -> SignatureNames:
        model = self._follow(0)
        graphs = list(self._elements(model, _SUBGRAPHS))
        found: SignatureNames | None = None
        for signature in self._elements(model, _SIGNATURES):
            if self._number(signature, _SIGNATURE_SUBGRAPH) != 0 or not graphs:
                continue
            is_default = self._text(signature, _SIGNATURE_KEY) == DEFAULT_SIGNATURE
            if is_default or found is None:
                tensors = self._vector(graphs[0], _TENSORS)
                inputs = dict(self._mapped(signature, _SIGNATURE_INPUTS, tensors))
                found = SignatureNames(inputs, dict(self._mapped(signature, _SIGNATURE_OUTPUTS, tensors)))
            if is_default:
                break
        return found or SignatureNames()

    def _mapped(self, signature: int, number: int, tensors: tuple[int, int]) -> Iterator[tuple[str, str]]:
        start, count = tensors
        for entry in self._elements(signature, number):
            index = self._number(entry, _MAP_TENSOR)
            if index >= count:
                raise self._broken(f"its signature names tensor {index} of {count}")
            yield self._text(self._follow(start + 4 * index), _TENSOR_NAME), self._text(entry, _MAP_NAME)

    def _elements(self, table: int, number: int) -> Iterator[int]:
        start, count = self._vector(table, number)
        if count > _MAX_ENTRIES:
            raise self._broken(f"a list has {count} entries, wanted at most {_MAX_ENTRIES}")
        for index in range(count):
            yield self._follow(start + 4 * index)

    def _vector(self, table: int, number: int) -> tuple[int, int]:
        """Return where a list begins, and how many entries it has: none where it is absent."""
        position = self._field(table, number)
        if not position:
            return 0, 0
        start = self._follow(position)
        return start + 4, self._read("<I", start)

    def _text(self, table: int, number: int) -> str:
        start, length = self._vector(table, number)
        if length > _MAX_NAME_BYTES:
            raise self._broken(f"a name has {length} bytes, wanted at most {_MAX_NAME_BYTES}")
        return self._bytes(start, length).decode(errors="replace")

    def _number(self, table: int, number: int) -> int:
        position = self._field(table, number)
        return self._read("<I", position) if position else 0

    def _field(self, table: int, number: int) -> int:
        """Return where a field of a table lies; 0: the table leaves it out."""
        fields = table - self._read("<i", table)
        place = 4 + 2 * number
        offset = self._read("<H", fields + place) if place + 2 <= self._read("<H", fields) else 0
        return table + offset if offset else 0

    def _follow(self, position: int) -> int:
        return position + self._read("<I", position)

    def _read(self, form: str, position: int) -> int:
        (value,) = struct.unpack(form, self._bytes(position, struct.calcsize(form)))
        return int(value)

    def _bytes(self, position: int, length: int) -> bytes:
        if not 0 <= position <= self._size - length:
            raise self._broken(f"a table lies at byte {position} of {self._size}")
        content = os.pread(self._descriptor, length, position)
        if len(content) != length:
            raise self._broken("it became shorter while it was read")
        return content

    def _broken(self, reason: str) -> LoadFailed:
        return LoadFailed(f"{self._name} is not a sound TensorFlow Lite file: {reason}; copy it again")
