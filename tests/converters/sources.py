"""One small trained model of each format, made by its own library. A missing library skips the test that asks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from demo.digits import load_held_out, load_training
from edge_runtime_converters.formats import SourceFormat
from tests.models.graphdefs import softmax_graph

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "demo" / "models" / "digits" / "1" / "model.onnx"
TENSORFLOW = ROOT / "tests" / "models" / "tensorflow"
FEATURES = 64

Floats = npt.NDArray[np.float32]


def needs(*modules: str) -> list[Any]:
    """Import libraries, or skip naming the one that is missing and how it comes."""
    reason = "is not installed; make test-converters has it"
    return [pytest.importorskip(name, reason=f"{name} {reason}") for name in modules]


def present(*modules: str) -> None:
    """Skip where a library is missing, without importing it: some start threads of their own."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed; make test-converters has it")


def images(rows: int) -> Floats:
    """Scanned digits, [rows, 64], ink 0 to 16."""
    return load_training().images[:rows].astype(np.float32)


def write_samples(folder: Path, name: str, rows: int = 64) -> Path:
    """An .npz of real inputs."""
    path = folder / "samples.npz"
    np.savez(path, **{name: images(rows)})
    return path


def write_held_out(folder: Path, name: str) -> tuple[Path, Path]:
    """Images that no training has seen, and what they show."""
    digits = load_held_out()
    np.savez(folder / "held_out.npz", **{name: digits.images.astype(np.float32)})
    np.save(folder / "held_out.npy", digits.labels)
    return folder / "held_out.npz", folder / "held_out.npy"


def network(torch: Any) -> Any:
    """A convolutional network over digits, weights of a fixed seed."""

    class Network(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.edges = torch.nn.Conv2d(1, 4, 3, padding=1)
            self.norm = torch.nn.BatchNorm2d(4)
            self.dense = torch.nn.Linear(256, 10)

        def forward(self, image: Any) -> Any:
            picture = image.reshape(-1, 1, 8, 8) / 16
            found = torch.relu(self.norm(self.edges(picture)))
            return torch.softmax(4 * self.dense(found.flatten(1)), 1)

    torch.manual_seed(3)
    return Network().eval()


def _pytorch(folder: Path) -> Path:
    (torch,) = needs("torch")
    path = folder / "network.pt2"
    program = torch.export.export(
        network(torch), (torch.zeros(2, FEATURES),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)
    )
    torch.export.save(program, str(path))
    return path


@pytest.mark.filterwarnings("ignore")
def _torchscript(folder: Path) -> Path:
    (torch,) = needs("torch")
    path = folder / "network.pt"
    torch.jit.trace(network(torch), torch.zeros(2, FEATURES)).save(str(path))
    return path


def _sklearn(folder: Path) -> Path:
    ensemble, skops = needs("sklearn.ensemble", "skops.io")
    digits = load_training()
    path = folder / "forest.skops"
    skops.dump(ensemble.RandomForestClassifier(10, random_state=1).fit(digits.images, digits.labels), path)
    return path


def _xgboost(folder: Path) -> Path:
    (xgboost,) = needs("xgboost")
    digits = load_training()
    path = folder / "boosted.json"
    settings = {"objective": "multi:softprob", "num_class": 10, "max_depth": 3, "nthread": 1}
    xgboost.train(settings, xgboost.DMatrix(digits.images, digits.labels), 5).save_model(path)
    return path


def _lightgbm(folder: Path) -> Path:
    (lightgbm,) = needs("lightgbm")
    digits = load_training()
    path = folder / "boosted.txt"
    settings = {"objective": "multiclass", "num_class": 10, "num_leaves": 7, "verbose": -1, "num_threads": 1}
    data = lightgbm.Dataset(digits.images.astype(np.float32), digits.labels.astype(int))
    lightgbm.train(settings, data, 5).save_model(path)
    return path


def _catboost(folder: Path) -> Path:
    (catboost,) = needs("catboost")
    digits = load_training()
    path = folder / "boosted.cbm"
    model = catboost.CatBoostClassifier(
        iterations=10, depth=4, verbose=0, thread_count=1, allow_writing_files=False, random_seed=1
    )
    model.fit(digits.images.astype(np.float32), digits.labels.astype(int)).save_model(str(path))
    return path


_MAKERS: dict[SourceFormat, Callable[[Path], Path]] = {
    SourceFormat.PYTORCH: _pytorch,
    SourceFormat.TORCHSCRIPT: _torchscript,
    SourceFormat.SKLEARN: _sklearn,
    SourceFormat.XGBOOST: _xgboost,
    SourceFormat.LIGHTGBM: _lightgbm,
    SourceFormat.CATBOOST: _catboost,
    SourceFormat.KERAS: lambda _: TENSORFLOW / "digits.keras",
    SourceFormat.SAVED_MODEL: lambda _: TENSORFLOW / "saved_model",
    SourceFormat.GRAPHDEF: lambda folder: softmax_graph(folder / "frozen.pb", "image", FEATURES),
    SourceFormat.TFLITE: lambda _: TENSORFLOW / "model.tflite",
    SourceFormat.ONNX: lambda _: DIGITS,
}

INPUT = {
    SourceFormat.SKLEARN: "features", SourceFormat.XGBOOST: "features", SourceFormat.LIGHTGBM: "features",
    SourceFormat.CATBOOST: "features",
}  # fmt: skip
"""What the converted model's input is called; `image` where not said."""

MODULES = {
    SourceFormat.PYTORCH: ("torch", "onnxscript"),
    SourceFormat.TORCHSCRIPT: ("torch",),
    SourceFormat.KERAS: ("keras", "h5py", "torch", "onnxscript"),
    SourceFormat.SKLEARN: ("skops", "skl2onnx"),
    SourceFormat.XGBOOST: ("xgboost",),
    SourceFormat.LIGHTGBM: ("lightgbm",),
    SourceFormat.CATBOOST: ("catboost",),
}
"""What a conversion from a format needs beyond what every checkout has."""


@cache
def _made(source_format: SourceFormat, folder: Path) -> Path:
    return _MAKERS[source_format](folder)


def source_of(source_format: SourceFormat, folder: Path) -> Path:
    """A model of a format, made once for a folder."""
    present(*MODULES.get(source_format, ()))
    return _made(source_format, folder)
