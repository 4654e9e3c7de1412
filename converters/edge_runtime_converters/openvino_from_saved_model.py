"""A TensorFlow SavedModel to OpenVINO IR, by OpenVINO's own reader: no TensorFlow, so nothing of the model runs.

Owns: which folders are read. OpenVINO refuses operators that call Python (py_function), which it does not know.
"""

from __future__ import annotations

import sys
from pathlib import Path

from edge_runtime.backends.model_files import SAVED_MODEL_FILE, check_saved_model_files
from edge_runtime.errors import ConversionFailed, LoadFailed
from edge_runtime_converters.openvino_from_onnx import read_model, write_ir
from edge_runtime_converters.options import Shapes
from edge_runtime_converters.original import Original

MAX_BYTES = 8_000_000_000


def convert(source: Path, target: Path, shapes: Shapes) -> Original | None:
    """Write a SavedModel's default signature as fp32 IR. shapes: unused. Raises ConversionFailed.

    Returns None: TensorFlow would run the model's operators, also those on files, so only OpenVINO reads it.
    """
    check_folder(source)
    write_ir(read_model(source), source, target, "f32", None)
    return None


def check_folder(source: Path) -> None:
    """Raise ConversionFailed unless a SavedModel consists of plain files inside its folder."""
    try:
        total = check_saved_model_files(source / SAVED_MODEL_FILE).total_bytes
    except (LoadFailed, OSError) as error:
        raise ConversionFailed(f"{source}: {error}") from error
    if total > MAX_BYTES:
        raise ConversionFailed(f"{source}: {total} bytes; wanted at most {MAX_BYTES}")


if __name__ == "__main__":
    from edge_runtime_converters.command import main

    sys.exit(main("openvino"))
