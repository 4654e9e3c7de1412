"""What the backend contract needs of each backend: how to make the test models for it, and what it cannot do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_runtime.backends.base import Backend
from edge_runtime.backends.registry import backend
from tests.models import ir_models, litert_models, onnx_models, python_models


@dataclass(frozen=True)
class Kit:
    """One backend with one kind of artifact.

    make: (model's function name, folder, its arguments) -> artifact. corrupt: bytes that the artifact must not load.
    lacks: datatypes of which no such artifact loads.
    """

    label: str
    backend: Backend
    make: Callable[..., Path]
    corrupt: tuple[bytes, ...]
    has_bytes: bool = True
    bytes_must_be_text: bool = False
    has_bound: bool = True
    lacks: tuple[str, ...] = ()

    def artifact(self, model: str, folder: Path, **arguments: Any) -> Path:
        """Make one of the test models."""
        return self.make(model, folder / model / "1", **arguments)


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


def all_kits() -> list[Kit]:
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
        Kit("onnxruntime", backend("onnxruntime"), _onnx, onnx_corrupt, bytes_must_be_text=True),
        Kit("openvino-onnx", backend("openvino"), _onnx, onnx_corrupt, has_bytes=False),
        Kit("openvino-ir", backend("openvino"), _ir, ir_corrupt, has_bytes=False),
        Kit("openvino-tflite", backend("openvino"), _litert, litert_corrupt, has_bytes=False, lacks=("BF16",)),
        Kit("litert", backend("litert"), _litert, litert_corrupt, has_bound=False),
        Kit("python", backend("python", allows_code=True), _python, python_corrupt, has_bound=False),
    ]
