"""ONNX to .ort, ONNX Runtime's own format for phones and small builds of it.

Owns: how far it is optimised: by what holds on every CPU, since the file may go to another one. edge-runtime itself
serves ONNX.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_runtime.errors import ConversionFailed
from edge_runtime.tensors import Array
from edge_runtime_converters.libraries import import_library, reason_of
from edge_runtime_converters.onnx_source import check_source
from edge_runtime_converters.output_files import whole

EXTRA = "convert-onnx"


class OrtModel:
    """An .ort file in ONNX Runtime. See Original."""

    def __init__(self, session: Any) -> None:
        self.described = "ONNX Runtime (.ort)"
        self._session = session

    def run(self, inputs: Mapping[str, Array]) -> list[Array]:
        """See Original."""
        try:
            return list(self._session.run(None, dict(inputs)))
        except Exception as error:
            raise ConversionFailed(f"ONNX Runtime cannot run it: {reason_of(error)}") from error


def convert(source: Path, target: Path) -> None:
    """Write an ONNX model as .ort. Raises ConversionFailed; `target` is as it was then."""
    check_source(source)
    onnxruntime = import_library("onnxruntime", EXTRA)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED  # no layout of this CPU
    options.add_session_config_entry("session.save_model_format", "ORT")
    try:
        with whole(target) as output:
            options.optimized_model_filepath = str(output)
            onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    except ConversionFailed:
        raise
    except Exception as error:
        raise ConversionFailed(f"{source}: cannot be written as .ort: {reason_of(error)}") from error


def load(artifact: Path) -> OrtModel:
    """Load an .ort file. Raises ConversionFailed."""
    onnxruntime = import_library("onnxruntime", EXTRA)
    try:
        return OrtModel(onnxruntime.InferenceSession(str(artifact), providers=["CPUExecutionProvider"]))
    except Exception as error:
        raise ConversionFailed(f"ONNX Runtime cannot load {artifact.name}: {reason_of(error)}") from error


if __name__ == "__main__":
    from edge_runtime_converters.command import main

    sys.exit(main("ort"))
