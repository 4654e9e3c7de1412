"""The model that a conversion began with, loaded so that it can answer: what the result is compared with.

Owns: the protocol, and the one for artifacts that a backend of edge-runtime runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from edge_runtime.backends.base import Instance, LoadOptions
from edge_runtime.backends.registry import backend
from edge_runtime.errors import BackendError, ConversionFailed
from edge_runtime.model_spec import ModelSpec
from edge_runtime.tensors import Array, as_tensors


class Original(Protocol):
    """A loaded model. Thread: one."""

    @property
    def described(self) -> str:
        """What answers, for the report: "PyTorch 2.13"."""
        ...

    def run(self, inputs: Mapping[str, Array]) -> list[Array]:
        """Outputs in the order of the converted model's, for inputs in the order of its. Raises ConversionFailed."""
        ...


class Served:
    """An artifact, run by the backend that serves it on a device. `close` at the end."""

    def __init__(self, instance: Instance, described: str) -> None:
        self._instance = instance
        self.described = described

    @property
    def spec(self) -> ModelSpec:
        """What it takes and gives."""
        return self._instance.spec

    def run(self, inputs: Mapping[str, Array]) -> list[Array]:
        """See Original."""
        try:
            return list(self._instance.run(as_tensors(dict(inputs))))
        except BackendError as error:
            raise ConversionFailed(f"{self.described} cannot run it: {error.message}") from error

    def close(self) -> None:
        """Give the memory back."""
        self._instance.close()


_BACKENDS = {".onnx": ("onnxruntime", "ONNX Runtime"), ".xml": ("openvino", "OpenVINO")}


def serve(artifact: Path) -> Served:
    """Load an .onnx or .xml as a device would, in fp32 arithmetic where it holds no other.

    Raises ConversionFailed: no device could load it.
    """
    name, described = _BACKENDS[artifact.suffix]
    # OpenVINO takes bf16 by itself on CPUs that have it; an error of bf16 is no error of the conversion.
    options = LoadOptions(threads=len(os.sched_getaffinity(0)), precision="f32" if name == "openvino" else "")
    try:
        return Served(backend(name).load(artifact, options), described)
    except BackendError as error:
        raise ConversionFailed(error.message) from error


def rows_first(arrays: Sequence[Array]) -> list[Array]:
    """Outputs of one column each get their axis back: [rows] -> [rows, 1]."""
    return [array.reshape(-1, 1) if array.ndim == 1 else array for array in arrays]
