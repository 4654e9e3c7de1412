"""What kind of model a file or folder is, from its first bytes and a zip's list of names. Nothing is loaded.

Owns: which formats are taken, and what is said to those that are refused because reading them runs code.
"""

from __future__ import annotations

import os
import zipfile
from enum import Enum
from pathlib import Path

from edge_runtime.backends.plain_files import open_artifact
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
"""Members of a zip: a PyTorch program has one a weight."""

_PICKLE_ADVICE = (
    "is a pickle, and reading a pickle runs the code in it (weights alone, a state_dict, have no program to convert). "
    "Nothing was read. Save the model in a format that holds no code: torch.export.save(program, 'model.pt2'), "
    "skops.io.dump(model, 'model.skops'), XGBoost's save_model('model.json'), LightGBM's save_model('model.txt'); or "
    "convert it in the program that has it, with edge_runtime_converters"
)
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"x\x01", b"x\x9c", b"x\xda")
"""gzip, bzip2, xz, zlib: what joblib wraps a pickle in. Source: joblib.numpy_pickle_utils."""


def format_of(source: Path) -> SourceFormat:
    """The format of a model. Raises ConversionFailed: unknown, unreadable, or one whose reading runs code."""
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
