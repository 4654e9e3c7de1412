"""Which files an OpenVINO IR consists of, checked before OpenVINO reads it.

Owns: the rules for `model.xml` with its `model.bin` beside it: a plain file, large enough for every constant, and XML
that declares no entities. Never imports a library.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from xml.parsers import expat

from edge_runtime.backends.onnx_files import ArtifactFiles
from edge_runtime.backends.plain_files import open_artifact, plain_file_size
from edge_runtime.errors import LoadFailed


def check_ir_files(artifact: Path) -> ArtifactFiles:
    """Check one IR. Raises LoadFailed, saying what is wrong with which of the two files."""
    descriptor, status = open_artifact(artifact)
    with os.fdopen(descriptor, "rb") as file:
        weights_end = _Layers(artifact.name).weights_end(file)
    weights = artifact.with_suffix(".bin")
    if not os.path.lexists(weights):
        if weights_end:
            raise LoadFailed(f"{artifact.name} needs {weights.name} beside it ({weights_end} bytes of weights)")
        return ArtifactFiles((), status.st_size)
    size = plain_file_size(artifact.parent, weights.name)
    if weights_end > size:
        raise LoadFailed(f"{weights.name} is {size} bytes, but {artifact.name} wants {weights_end}; copy both again")
    return ArtifactFiles((weights.name,), status.st_size + size)


class _Layers:
    """One pass of expat over an IR; keeps the highest byte of the weights that a constant uses."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._weights_end = 0
        self._root = ""

    def weights_end(self, file: Any) -> int:
        """Bytes that `.bin` must have at least. Raises LoadFailed for XML that is not an IR."""
        parser = expat.ParserCreate()
        # An IR declares nothing. Refusing the declaration refuses external entities and entity bombs with it.
        parser.StartDoctypeDeclHandler = self._declaration
        parser.StartElementHandler = self._element
        try:
            parser.ParseFile(file)
        except expat.ExpatError as error:
            raise LoadFailed(f"{self._name} is not an OpenVINO IR: {error}") from error
        if self._root != "net":
            raise LoadFailed(f"{self._name} is not an OpenVINO IR: its first element is {self._root!r}, wanted 'net'")
        return self._weights_end

    def _declaration(self, *_: object) -> None:
        raise LoadFailed(f"{self._name} declares a document type, which could name other files; an IR has none")

    def _element(self, name: str, attributes: dict[str, str]) -> None:
        self._root = self._root or name
        # Only constants carry both an offset and a size in bytes of the weights file.
        if name == "data" and "offset" in attributes and "size" in attributes:
            offset, size = attributes["offset"], attributes["size"]
            if not all(text.isascii() and text.isdigit() and len(text) <= 19 for text in (offset, size)):
                raise LoadFailed(f"{self._name} has a constant at offset {offset[:40]!r} of {size[:40]!r} bytes")
            self._weights_end = max(self._weights_end, int(offset) + int(size))
