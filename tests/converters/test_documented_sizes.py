"""What the handbook says that libraries take on disk is what they take here."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARE, LEAST_MB = 0.05, 2.0
"""A library grows from release to release: how far a document may be off."""

SHOWN = {
    ("models.md", r"ONNX Runtime, OpenVINO, TensorRT .* (\d+) MB; \d+ MB; an engine"): ("onnxruntime",),
    ("models.md", r"OpenVINO IR .* (\d+) MB \|"): ("openvino",),
    ("models.md", r"TensorFlow Lite, LiteRT .* (\d+) MB; \d+ MB \|"): ("ai-edge-litert",),
    ("models.md", r"TorchScript \| .* (\d+) MB \(CPU\)"): ("torch",),
    ("models.md", r"of XGBoost .* (\d+) MB, and \d+ MB of `onnx`"): ("xgboost",),
    ("models.md", r"of XGBoost .* and (\d+) MB of `onnx`"): ("onnx",),
    ("models.md", r"of LightGBM .* (\d+) MB, and as"): ("lightgbm",),
    ("models.md", r"of CatBoost .* (\d+) MB;"): ("catboost",),
    ("models.md", r"scikit-learn .* (\d+) MB with scipy"): ("scikit-learn", "scipy", "joblib", "skl2onnx", "skops"),
    ("models.md", r"Keras, .* (\d+) MB with Keras"): (
        "keras", "h5py", "optree", "ml-dtypes", "rich", "pygments", "markdown-it-py", "absl-py",
    ),
    ("cameras.md", r"PyAV, .* (\d+) MB on disk"): ("av",),
}  # fmt: skip


@pytest.mark.parametrize(("place", "names"), SHOWN.items(), ids=[" ".join(names) for names in SHOWN.values()])
def test_a_library_takes_what_its_page_says(place: tuple[str, str], names: tuple[str, ...]) -> None:
    page, pattern = place
    told = [int(each) for each in re.findall(pattern, (ROOT / "docs" / page).read_text(encoding="utf-8"))]
    assert len(told) == 1, f"docs/{page}: {pattern} says it in {len(told)} places, wanted one"
    taken = sum(_megabytes(name) for name in names)
    assert abs(told[0] - taken) <= max(SHARE * taken, LEAST_MB), (
        f"docs/{page}: say {taken:.0f} MB in place of {told[0]}"
    )


def _megabytes(name: str) -> float:
    """On disk, without what Python compiles. Skips the test where the library is not here, or is for another device."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    if name == "torch" and not found.version.endswith("+cpu"):
        pytest.skip("this PyTorch is for a GPU")
    files = (Path(str(file.locate())) for file in found.files or () if file.suffix != ".pyc")
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6
