"""The source of a conversion, loaded so that it can answer: the result is compared with it.

Owns: the protocol, and its implementation by the backends of edge-runtime.
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
        """The name of what answers, for the report: "PyTorch 2.13"."""
        ...

    def run(self, inputs: Mapping[str, Array]) -> list[Array]:
        """Run inputs in the converted model's order, and return outputs in its order. Raises ConversionFailed."""
        ...


class ServedArtifact:
    """An artifact, run by the backend that serves it on a device. `close` at the end."""

    def __init__(self, instance: Instance, described: str) -> None:
        self._instance = instance
        self.described = described

    @property
    def spec(self) -> ModelSpec:
        """Its inputs and outputs."""
        return self._instance.spec

    def run(self, inputs: Mapping[str, Array]) -> list[Array]:
        """Return the outputs in the converted model's order. Raises ConversionFailed."""
        try:
            return list(self._instance.run(as_tensors(dict(inputs))))
        except BackendError as error:
            raise ConversionFailed(f"{self.described} cannot run it: {error.message}") from error

    def close(self) -> None:
        """Free the memory."""
        self._instance.close()


_BACKENDS = {".onnx": ("onnxruntime", "ONNX Runtime"), ".xml": ("openvino", "OpenVINO")}


def serve(artifact: Path) -> ServedArtifact:
    """Load an .onnx or .xml as a device does, in fp32 arithmetic unless it holds another.

    Raises ConversionFailed: no device can load it.
    """
    name, described = _BACKENDS[artifact.suffix]
    # OpenVINO uses bf16 by itself on CPUs that have it; an error of bf16 is not an error of the conversion.
    options = LoadOptions(threads=len(os.sched_getaffinity(0)), precision="f32" if name == "openvino" else "")
    try:
        return ServedArtifact(backend(name).load(artifact, options), described)
    except BackendError as error:
        raise ConversionFailed(error.message) from error


def rows_first(arrays: Sequence[Array]) -> list[Array]:
    """Give outputs of one column their axis back: [rows] -> [rows, 1]."""
    return [array.reshape(-1, 1) if array.ndim == 1 else array for array in arrays]
