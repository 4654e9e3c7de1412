"""ONNX to .ort, ONNX Runtime's own format for phones and small builds of it.

Owns: the optimisation level: only what holds on every CPU, because the file may go to another one. edge-runtime itself
serves ONNX.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_runtime.tensors import Array
from edge_runtime_converters.libraries import failing_as, import_library
from edge_runtime_converters.onnx_source import check_source
from edge_runtime_converters.output_files import whole

EXTRA = "convert-onnx"


class OrtModel:
    """An .ort file in ONNX Runtime. An `Original`."""

    def __init__(self, session: Any) -> None:
        self.described = "ONNX Runtime (.ort)"
        self._session = session

    def run(self, inputs: Mapping[str, Array]) -> list[Array]:
        """Return the outputs in the converted model's order. Raises ConversionFailed."""
        with failing_as("ONNX Runtime cannot run it"):
            return list(self._session.run(None, dict(inputs)))


def convert(source: Path, target: Path) -> None:
    """Write an ONNX model as .ort. Raises ConversionFailed; `target` is then unchanged."""
    check_source(source)
    onnxruntime = import_library("onnxruntime", EXTRA)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED  # no layout of this CPU
    options.add_session_config_entry("session.save_model_format", "ORT")
    with failing_as(f"{source}: cannot be written as .ort"), whole(target) as output:
        options.optimized_model_filepath = str(output)
        onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


def load(artifact: Path) -> OrtModel:
    """Load an .ort file. Raises ConversionFailed."""
    onnxruntime = import_library("onnxruntime", EXTRA)
    with failing_as(f"ONNX Runtime cannot load {artifact.name}"):
        return OrtModel(onnxruntime.InferenceSession(str(artifact), providers=["CPUExecutionProvider"]))


if __name__ == "__main__":
    from edge_runtime_converters.command import main

    sys.exit(main("ort"))
