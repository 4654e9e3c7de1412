"""Which model a file holds, and what it converts to: the table of the command line, the documents and the tests.

Owns: the formats that are taken, told by first bytes and a zip's list of names; the refusal of those whose reading runs
code; the steps of each conversion, why a cell is empty, and the names of artifacts. Loads nothing.
"""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from edge_runtime.backends.model_files import open_artifact
from edge_runtime.errors import ConversionFailed, LoadFailed


class SourceFormat(Enum):
    """A format that a conversion starts from; the value names it in reports and tables."""

    PYTORCH = "PyTorch program (.pt2)"
    TORCHSCRIPT = "TorchScript (.pt)"
    SKLEARN = "scikit-learn (.skops)"
    XGBOOST = "XGBoost (.json, .ubj)"
    LIGHTGBM = "LightGBM (.txt)"
    SAVED_MODEL = "TensorFlow SavedModel"
    TFLITE = "TensorFlow Lite (.tflite)"
    ONNX = "ONNX (.onnx)"


_HEAD_BYTES = 64
_MAX_NAMES = 100_000
"""Of a zip: a PyTorch program has one member a weight."""

_PICKLE_ADVICE = (
    "is a pickle, and reading a pickle runs the code in it (weights alone, a state_dict, have no program to convert). "
    "Nothing was read. Save the model in a format that holds no code: torch.export.save(program, 'model.pt2'), "
    "skops.io.dump(model, 'model.skops'), XGBoost's save_model('model.json'), LightGBM's save_model('model.txt'); or "
    "convert it in the program that has it, with edge_runtime_converters"
)
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"x\x01", b"x\x9c", b"x\xda")
"""gzip, bzip2, xz, zlib, in which joblib wraps a pickle. Source: joblib.numpy_pickle_utils."""


def format_of(source: Path) -> SourceFormat:
    """The format of a model. Raises ConversionFailed: unknown, unreadable, or reading it runs code."""
    try:
        if source.is_dir():
            return _of_folder(source)
        descriptor, _ = open_artifact(source)
        with os.fdopen(descriptor, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except LoadFailed as error:
        raise ConversionFailed(error.message) from error
    except OSError as error:
        raise ConversionFailed(f"{source}: {error.strerror}; wanted a model's file or folder") from error
    if not head:
        raise ConversionFailed(f"{source} is empty; copy it again")
    if head.startswith(b"PK"):
        return _of_zip(source)
    return _of_bytes(source, head)


def _of_folder(source: Path) -> SourceFormat:
    if (source / "saved_model.pb").is_file():
        return SourceFormat.SAVED_MODEL
    raise ConversionFailed(f"{source} is a folder without saved_model.pb; wanted a TensorFlow SavedModel, or a file")


def _of_bytes(source: Path, head: bytes) -> SourceFormat:
    suffix = source.suffix.lower()
    if head[4:8] == b"TFL3":
        return SourceFormat.TFLITE
    if head.startswith((b"tree\n", b"tree\r\n")):
        return SourceFormat.LIGHTGBM
    if head[0] == 0x80 and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        raise ConversionFailed(f"{source} {_PICKLE_ADVICE}")
    if head.startswith(_COMPRESSED) and suffix in (".joblib", ".pkl", ".pickle", ".gz", ".z", ".bz2", ".xz"):
        raise ConversionFailed(f"{source} {_PICKLE_ADVICE}")
    if head.startswith(b"\x89HDF"):
        raise ConversionFailed(_keras(source))
    if suffix == ".onnx":
        return SourceFormat.ONNX
    if head.startswith(b"{") and b"learner" in head:
        return SourceFormat.XGBOOST
    if suffix in (".json", ".ubj") and head.startswith(b"{"):
        return SourceFormat.XGBOOST
    known = ", ".join(each.value for each in SourceFormat)
    raise ConversionFailed(f"{source}: begins with {head[:8]!r}, which is none of: {known}")


def _of_zip(source: Path) -> SourceFormat:
    try:
        with zipfile.ZipFile(source) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise ConversionFailed(f"{source}: a damaged zip archive ({error}); copy it again") from error
    if len(names) > _MAX_NAMES:
        raise ConversionFailed(f"{source}: a zip archive of {len(names)} files; wanted at most {_MAX_NAMES}")
    if "schema.json" in names:
        return SourceFormat.SKLEARN
    if "config.json" in names and any(name.endswith(".h5") for name in names):
        raise ConversionFailed(_keras(source))
    inner = [name.partition("/")[2] for name in names]
    if "archive_format" in inner and any(name.startswith("models/") for name in inner):
        return SourceFormat.PYTORCH
    if any(name.startswith("code/") for name in inner):
        return SourceFormat.TORCHSCRIPT
    if "data.pkl" in inner:
        raise ConversionFailed(f"{source} {_PICKLE_ADVICE}")
    raise ConversionFailed(f"{source}: a zip archive that is no PyTorch program, TorchScript or skops file")


def _keras(source: Path) -> str:
    return (
        f"{source} is a Keras file, whose layers may hold Python code. Nothing was read. Where it was made, do: "
        "model.export('folder'), which writes a SavedModel, and convert that"
    )


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
