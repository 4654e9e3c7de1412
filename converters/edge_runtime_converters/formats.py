"""Which model a file holds, and what it converts to: the table of the command line, the documents and the tests.

Owns: the formats that are taken, of the kinds in `models/kinds.py`; the refusal of those whose reading runs
code; the steps of each conversion, why a cell is empty, and the names of artifacts. Loads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from edge_runtime.backends.model_files import artifact_size
from edge_runtime.errors import ConversionFailed, LoadFailed
from edge_runtime.models import kinds


class SourceFormat(Enum):
    """A format that a conversion starts from; the value names it in reports and tables."""

    PYTORCH = "PyTorch program (.pt2)"
    TORCHSCRIPT = "TorchScript (.pt)"
    SKLEARN = "scikit-learn (.skops)"
    XGBOOST = "XGBoost (.json, .ubj)"
    LIGHTGBM = "LightGBM (.txt)"
    CATBOOST = "CatBoost (.cbm, .json)"
    KERAS = "Keras (.keras, .h5)"
    SAVED_MODEL = "TensorFlow SavedModel"
    GRAPHDEF = "TensorFlow frozen graph (.pb, .graphdef)"
    TFLITE = "TensorFlow Lite (.tflite)"
    ONNX = "ONNX (.onnx)"


_PICKLE_ADVICE = (
    "is a pickle, and reading a pickle runs the code in it (weights alone, a state_dict, have no program to convert). "
    "Nothing was read. Save the model in a format that holds no code: torch.export.save(program, 'model.pt2'), "
    "skops.io.dump(model, 'model.skops'), XGBoost's save_model('model.json'), LightGBM's save_model('model.txt'); or "
    "convert it in the program that has it, with edge_runtime_converters"
)
_FORMATS = {
    kinds.PYTORCH_PROGRAM: SourceFormat.PYTORCH,
    kinds.TORCHSCRIPT: SourceFormat.TORCHSCRIPT,
    kinds.SKOPS: SourceFormat.SKLEARN,
    kinds.XGBOOST: SourceFormat.XGBOOST,
    kinds.LIGHTGBM: SourceFormat.LIGHTGBM,
    kinds.CATBOOST: SourceFormat.CATBOOST,
    kinds.KERAS: SourceFormat.KERAS,
    kinds.SAVED_MODEL: SourceFormat.SAVED_MODEL,
    kinds.FROZEN_GRAPH: SourceFormat.GRAPHDEF,
    kinds.LITERT: SourceFormat.TFLITE,
    kinds.ONNX: SourceFormat.ONNX,
}
_REFUSED = {
    kinds.PICKLE: _PICKLE_ADVICE,
    kinds.PYTORCH_WEIGHTS: _PICKLE_ADVICE,
}


def format_of(source: Path) -> SourceFormat:
    """The format of a model. Raises ConversionFailed: unknown, unreadable, or reading it runs code."""
    kind = kinds.kind_of(source)
    if source.is_dir():
        if kind is not kinds.SAVED_MODEL:
            reason = "is a folder without saved_model.pb; wanted a TensorFlow SavedModel, or a file"
            raise ConversionFailed(f"{source} {reason}")
        return SourceFormat.SAVED_MODEL
    head = _head(source)
    if kind in _REFUSED:
        raise ConversionFailed(f"{source} {_REFUSED[kind]}")
    if kind in _FORMATS and kind is not kinds.SAVED_MODEL:
        return _FORMATS[kind]
    if kind is not None and kind is not kinds.NOT_AS_NAMED:
        raise ConversionFailed(f"{source} {kind.sentence(str(source))}")
    if not head:
        raise ConversionFailed(f"{source} {kinds.EMPTY.sentence(str(source))}")
    known = ", ".join(each.value for each in SourceFormat)
    raise ConversionFailed(f"{source}: begins with {head[:8]!r}, which is none of: {known}")


def _head(source: Path) -> bytes:
    """The first bytes of a file. Raises ConversionFailed unless it is a plain file that can be read."""
    try:
        artifact_size(source)
        return kinds.head_of(source)
    except LoadFailed as error:
        raise ConversionFailed(error.message) from error
    except OSError as error:
        raise ConversionFailed(f"{source}: {error.strerror}; wanted a model's file or folder") from error


TARGETS = ("onnx", "openvino", "ort", "tensorrt")
PRECISIONS = ("fp32", "fp16", "bf16", "int8")

_ONNX_BY = {
    SourceFormat.PYTORCH: "onnx_from_pytorch",
    SourceFormat.TORCHSCRIPT: "onnx_from_torchscript",
    SourceFormat.SKLEARN: "onnx_from_sklearn",
    SourceFormat.XGBOOST: "onnx_from_xgboost",
    SourceFormat.LIGHTGBM: "onnx_from_lightgbm",
    SourceFormat.CATBOOST: "onnx_from_catboost",
    SourceFormat.KERAS: "onnx_from_keras",
}
_OPENVINO_BY = {
    SourceFormat.SAVED_MODEL: "openvino_from_saved_model",
    SourceFormat.GRAPHDEF: "openvino_from_graphdef",
    SourceFormat.TFLITE: "openvino_from_tflite",
}
TABULAR = frozenset((SourceFormat.SKLEARN, SourceFormat.XGBOOST, SourceFormat.LIGHTGBM, SourceFormat.CATBOOST))
"""Formats whose models take a row of unrelated numbers; only ONNX Runtime has the operators of their ONNX."""

_SUFFIXES = {"onnx": ".onnx", "openvino": ".xml", "ort": ".ort", "tensorrt": ".engine"}
_INFIXES = {"fp32": "", "fp16": ".f16", "bf16": ".bf16", "int8": ".int8"}
"""As a version folder names variants (`model.int8.onnx`)."""


@dataclass(frozen=True, slots=True)
class ConversionRoute:
    """The steps of one conversion. first: the module that reads the source, "" for ONNX, which needs none.

    base: the output of the first step, "onnx" or "openvino". then: the further steps in order, by target and precision.
    """

    first: str
    base: str
    then: tuple[tuple[str, str], ...]


def route(source: SourceFormat, target: str, precision: str) -> ConversionRoute:
    """The steps of a conversion. Raises ConversionFailed for an empty cell: why, and what to do."""
    reason = why_empty(source, target, precision)
    if reason:
        raise ConversionFailed(f"{source.value} does not convert to {target} in {precision}: {reason}")
    if source in _OPENVINO_BY:
        return ConversionRoute(_OPENVINO_BY[source], "openvino", (("openvino", precision),))
    first = _ONNX_BY.get(source, "")
    steps: list[tuple[str, str]] = []
    if precision != "fp32" and target in ("onnx", "ort", "tensorrt"):
        steps.append(("onnx", precision))
    if target != "onnx":
        steps.append((target, precision))
    return ConversionRoute(first, "onnx", tuple(steps))


def why_empty(source: SourceFormat, target: str, precision: str) -> str:  # noqa: PLR0911 (one line a rule)
    """Why a conversion does not exist; "" where it does."""
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
    """The path of the artifact beside its source, by the source's name."""
    stem = source.name if source.is_dir() else source.stem
    return source.parent / artifact_name(stem, target, precision)


def suffix_of(target: str) -> str:
    """The suffix of an artifact's name."""
    return _SUFFIXES[target]
