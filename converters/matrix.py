"""What converts to what: the table that the command line, the README and the tests share. Pure.

Owns: the steps of each conversion, why a cell is empty, and how an artifact is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge_runtime.errors import ConversionFailed
from edge_runtime_converters.source_format import SourceFormat

TARGETS = ("onnx", "openvino", "ort", "tensorrt")
PRECISIONS = ("fp32", "fp16", "bf16", "int8")

_ONNX_BY = {
    SourceFormat.PYTORCH: "onnx_from_pytorch",
    SourceFormat.TORCHSCRIPT: "onnx_from_torchscript",
    SourceFormat.SKLEARN: "onnx_from_sklearn",
    SourceFormat.XGBOOST: "onnx_from_xgboost",
    SourceFormat.LIGHTGBM: "onnx_from_lightgbm",
}
_OPENVINO_BY = {
    SourceFormat.SAVED_MODEL: "openvino_from_saved_model",
    SourceFormat.TFLITE: "openvino_from_tflite",
}
TABULAR = frozenset((SourceFormat.SKLEARN, SourceFormat.XGBOOST, SourceFormat.LIGHTGBM))
"""Formats whose models take a row of unrelated numbers; their ONNX uses operators that only ONNX Runtime has."""

_SUFFIXES = {"onnx": ".onnx", "openvino": ".xml", "ort": ".ort", "tensorrt": ".engine"}
_INFIXES = {"fp32": "", "fp16": ".f16", "bf16": ".bf16", "int8": ".int8"}
"""As a version folder names variants (`model.int8.onnx`)."""


@dataclass(frozen=True, slots=True)
class Route:
    """The steps of one conversion. first: the module that reads the source, "" for ONNX, which needs none.

    base: what the first step writes, "onnx" or "openvino". then: what is made of it in order, by target and precision.
    """

    first: str
    base: str
    then: tuple[tuple[str, str], ...]


def route(source: SourceFormat, target: str, precision: str) -> Route:
    """The steps. Raises ConversionFailed for an empty cell, saying why and what to do."""
    reason = why_empty(source, target, precision)
    if reason:
        raise ConversionFailed(f"{source.value} does not convert to {target} in {precision}: {reason}")
    if source in _OPENVINO_BY:
        return Route(_OPENVINO_BY[source], "openvino", (("openvino", precision),))
    first = _ONNX_BY.get(source, "")
    steps: list[tuple[str, str]] = []
    if precision != "fp32" and target in ("onnx", "ort", "tensorrt"):
        steps.append(("onnx", precision))
    if target != "onnx":
        steps.append((target, precision))
    return Route(first, "onnx", tuple(steps))


def why_empty(source: SourceFormat, target: str, precision: str) -> str:  # noqa: PLR0911 (one line a rule)
    """Why there is no such conversion; "" where there is one."""
    if precision == "bf16":
        return 'bf16 is how a device runs an fp32 model: put precision = "bf16" into model.toml'
    if target == "tensorrt" and source is not SourceFormat.ONNX:
        return "an engine is built of an ONNX model; convert with --to onnx first, where there is such a conversion"
    if source in _OPENVINO_BY and target != "openvino":
        return "no kept library does it without all of TensorFlow; --to openvino does"
    if source in TABULAR and target == "openvino":
        return "OpenVINO has none of ONNX's operators for trees and linear models; --to onnx does"
    if source in TABULAR and precision != "fp32":
        return "thresholds and coefficients are not what those precisions are for; --precision fp32 does"
    if source is SourceFormat.ONNX and target == "onnx" and precision == "fp32":
        return "it is that already"
    return ""


def artifact_name(stem: str, target: str, precision: str) -> str:
    """`model`, "onnx", "int8" -> `model.int8.onnx`."""
    return f"{stem}{_INFIXES[precision]}{_SUFFIXES[target]}"


def default_output(source: Path, target: str, precision: str) -> Path:
    """Beside the source, by its name."""
    stem = source.name if source.is_dir() else source.stem
    return source.parent / artifact_name(stem, target, precision)


def suffix_of(target: str) -> str:
    """What an artifact's name ends in."""
    return _SUFFIXES[target]
