"""A TensorFlow Lite file to OpenVINO IR, by OpenVINO's own reader.

Owns: the comparison with TensorFlow Lite's own runtime (ai-edge-litert), where that is installed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_runtime.errors import ConversionFailed
from edge_runtime.tensors import Array
from edge_runtime_converters.libraries import failing_as, import_library, reason_of
from edge_runtime_converters.openvino_from_onnx import read_model, write_ir
from edge_runtime_converters.options import Shapes
from edge_runtime_converters.original import Original

_RUNTIME = "ai_edge_litert"


class TfliteModel:
    """A model in TensorFlow Lite's interpreter, which runs its built-in operators only. An `Original`."""

    def __init__(self, interpreter: Any) -> None:
        self.described = "TensorFlow Lite"
        self._interpreter = interpreter

    def run(self, inputs: Mapping[str, Array]) -> list[Array]:
        """Return the outputs in the converted model's order. Raises ConversionFailed."""
        interpreter = self._interpreter
        with failing_as("TensorFlow Lite cannot run it"):
            for detail, array in zip(interpreter.get_input_details(), inputs.values(), strict=True):
                interpreter.resize_tensor_input(detail["index"], array.shape)
            interpreter.allocate_tensors()
            for detail, array in zip(interpreter.get_input_details(), inputs.values(), strict=True):
                interpreter.set_tensor(detail["index"], array)
            interpreter.invoke()
            return [interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()]


def convert(source: Path, target: Path, shapes: Shapes) -> Original | None:
    """Write a .tflite as fp32 IR. shapes: unused. Raises ConversionFailed.

    Returns the source in TensorFlow Lite's interpreter, or None without it (pip install ai-edge-litert).
    """
    write_ir(read_model(source), source, target, "f32", None)
    if importlib.util.find_spec(_RUNTIME) is None:
        return None
    try:
        return TfliteModel(import_library(f"{_RUNTIME}.interpreter", _RUNTIME).Interpreter(model_path=str(source)))
    except ValueError as error:
        raise ConversionFailed(f"{source}: TensorFlow Lite cannot read it: {reason_of(error)}") from error


if __name__ == "__main__":
    from edge_runtime_converters.command import main

    sys.exit(main("openvino"))
