"""OpenVINO IR out of the ONNX models: `model.xml` and `model.bin` in a folder."""

from __future__ import annotations

from pathlib import Path

from edge_runtime.backends.openvino_backend import import_openvino


def from_onnx(onnx_file: Path, folder: Path, name: str = "model.xml") -> Path:
    """Convert one ONNX file, weights unchanged; gives `model.xml`, or what it is to be called, back."""
    openvino = import_openvino()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    openvino.save_model(openvino.Core().read_model(str(onnx_file)), str(path), compress_to_fp16=False)
    return path
