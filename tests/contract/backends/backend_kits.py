"""What the backend contract needs of each backend: how to make the test models for it, and what it cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge_runtime.backends.registry import backend
from edge_runtime.testing import BackendKit
from tests.models import ir_models, litert_models, onnx_models, python_models


def _onnx(model: str, folder: Path, **arguments: Any) -> Path:
    made: Path = getattr(onnx_models, model)(folder, **arguments)
    return made


def _ir(model: str, folder: Path, **arguments: Any) -> Path:
    return ir_models.from_onnx(_onnx(model, folder / "onnx", **arguments), folder)


def _litert(model: str, folder: Path, **arguments: Any) -> Path:
    made: Path = getattr(litert_models, model)(folder, **arguments)
    return made


def _python(model: str, folder: Path, **arguments: Any) -> Path:
    made: Path = getattr(python_models, model)(folder, **arguments)
    return made


def all_kits() -> list[BackendKit]:
    """Every backend that the development extra installs; one that is missing is an error, never a skip."""
    onnx_corrupt = (b"", b"\x00", b"not a model at all", b"\x08\x08\x3a\xff\xff\xff\xff\x0f")
    ir_corrupt = (b"", b"<net>", b"<html></html>", b'<?xml version="1.0"?><net version="11"/>')
    litert_head = b"\x1c\0\0\0TFL3"
    litert_corrupt = (
        b"",
        litert_head,
        bytes(64),
        b"PK\3\4TFL3" + b"\xff" * 100,
        litert_head + bytes(range(256)),
    )
    python_corrupt = (
        b"",
        b"def infer(:",
        b"INPUTS = OUTPUTS = []\ndef infer(inputs): pass",
        b"raise SystemError('no')",
    )
    return [
        BackendKit("onnxruntime", backend("onnxruntime"), _onnx, onnx_corrupt, bytes_must_be_text=True),
        BackendKit("openvino-onnx", backend("openvino"), _onnx, onnx_corrupt, has_bytes=False),
        BackendKit("openvino-ir", backend("openvino"), _ir, ir_corrupt, has_bytes=False),
        BackendKit("openvino-tflite", backend("openvino"), _litert, litert_corrupt, has_bytes=False, lacks=("BF16",)),
        BackendKit("litert", backend("litert"), _litert, litert_corrupt, has_bound=False),
        BackendKit(
            "python",
            backend("python", allows_code=True),
            _python,
            python_corrupt,
            has_bound=False,
            # It is measured in its host: here its arrays may lie in memory that earlier tests have freed.
            measures_memory=False,
            cycles=24,
        ),
    ]
