"""A model's format is told by its bytes, and what would run code is refused before a library sees it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from edge_runtime.errors import ConversionFailed
from edge_runtime_converters.formats import SourceFormat, format_of
from edge_runtime_converters.libraries import reason_of
from tests.converters.sources import DIGITS, TENSORFLOW, present


def archive(*names: str) -> bytes:
    """A zip with empty members."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as made:
        for name in names:
            made.writestr(name, b"")
    return content.getvalue()


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (archive("m/archive_format", "m/models/model.json"), SourceFormat.PYTORCH),
        (archive("m/data.pkl", "m/code/__torch__.py"), SourceFormat.TORCHSCRIPT),
        (archive("schema.json", "1.npy"), SourceFormat.SKLEARN),
        (json.dumps({"learner": {}}).encode(), SourceFormat.XGBOOST),
        (b"{L\x00\x00\x00\x00\x00\x00\x00\x07learner{", SourceFormat.XGBOOST),
        (b"tree\nversion=v4\n", SourceFormat.LIGHTGBM),
        ((TENSORFLOW / "model.tflite").read_bytes(), SourceFormat.TFLITE),
        (b"\x89HDF\r\n\x1a\n", SourceFormat.KERAS),
        (archive("config.json", "metadata.json", "model.weights.h5"), SourceFormat.KERAS),
    ],
)
def test_a_format_is_recognised_by_bytes_whatever_the_name(
    tmp_path: Path, content: bytes, wanted: SourceFormat
) -> None:
    path = tmp_path / "thing.bin"
    path.write_bytes(content)
    assert format_of(path) is wanted


def test_onnx_and_saved_models_are_recognised_by_their_names(tmp_path: Path) -> None:
    assert format_of(DIGITS) is SourceFormat.ONNX
    assert format_of(TENSORFLOW / "saved_model") is SourceFormat.SAVED_MODEL


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("model.pkl", b"\x80\x04\x95", "pickle"),
        ("model.joblib", b"\x78\x9c\x00", "pickle"),
        ("model.pt", b"\x80\x02\x8a\x0alF", "pickle"),
        ("model.pt", archive("m/data.pkl", "m/data/0", "m/version"), "state_dict"),
        ("model.zip", archive("a", "b"), "zip archive"),
        ("model.pt2", b"PK\x03\x04 and no more", "damaged"),
        ("model.bin", b"", "empty"),
        ("model.bin", b"nothing known", "none of"),
    ],
)
def test_a_file_that_is_refused_says_its_kind_and_what_to_do(
    tmp_path: Path, name: str, content: bytes, word: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConversionFailed, match=word):
        format_of(path)


def test_a_folder_that_is_not_a_saved_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversionFailed, match=r"saved_model\.pb"):
        format_of(tmp_path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConversionFailed, match="No such file"):
        format_of(tmp_path / "gone.onnx")


def test_of_a_librarys_message_its_stack_is_left_out() -> None:
    error = ValueError('Expecting: ",", got: "EOF"\n  ~~~^\nStack trace:\n  [bt] (0) libxgboost.so(+0x1)\n')
    assert reason_of(error) == 'Expecting: ",", got: "EOF" ~~~^'


@pytest.mark.parametrize(
    ("library", "companions"),
    [
        ("xgboost", ["pandas", "sklearn"]),
        ("lightgbm", ["pandas", "sklearn"]),
        ("skops.io", ["torch"]),
        ("nncf", ["torch"]),
    ],
)
def test_a_library_is_imported_without_those_that_no_conversion_hands_it(library: str, companions: list[str]) -> None:
    present(library.partition(".")[0], *companions)
    program = f"""
import sys
from edge_runtime_converters.libraries import import_library
import_library({library!r}, "convert")
print([name for name in {companions} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-2] == "[]"
