"""MLflow's and BentoML's packages whose models are converted: each is served, and answers as its library does."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.digits import load_held_out
from edge_runtime.config.settings import Config
from edge_runtime.daemon.runtime import Runtime
from edge_runtime_converters.formats import TABULAR, SourceFormat
from edge_runtime_converters.importing.writing import ImportOptions, import_source
from tests.converters.sources import INPUT, MODULES, needs, present, source_of

pytest.importorskip("yaml", reason="pyyaml is not installed; make test-converters has it")

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit")

IMAGES = load_held_out().images[:64].astype(np.float32)

SIGNATURE = """
signature:
  inputs: '[{"type": "tensor", "tensor-spec": {"dtype": "float32", "shape": [-1, 64]}}]'
"""

MLFLOW = {
    "mlflow-xgboost": (SourceFormat.XGBOOST, "model.xgb", "xgboost: {data: model.xgb, model_format: xgb}"),
    "mlflow-lightgbm": (SourceFormat.LIGHTGBM, "model.lgb", "lightgbm: {data: model.lgb, lgb_version: 4.5.0}"),
    "mlflow-catboost": (SourceFormat.CATBOOST, "model.cb", "catboost: {data: model.cb, save_format: cbm}"),
    "mlflow-sklearn": (
        SourceFormat.SKLEARN, "model.skops", "sklearn: {pickled_model: model.skops, serialization_format: skops}",
    ),
    "mlflow-pytorch": (
        SourceFormat.TORCHSCRIPT, "data/model.pth", "pytorch: {model_data: data, pytorch_version: 2.5.1}",
    ),
    "mlflow-keras": (SourceFormat.KERAS, "data/model.keras", "keras: {data: data, keras_version: 3.11.0}"),
    "mlflow-tensorflow": (
        SourceFormat.SAVED_MODEL, "tf2model", "tensorflow: {saved_model_dir: tf2model, model_type: tf2-module}",
    ),
}  # fmt: skip
"""By name: what was trained, where the flavor's `save_model` puts it, and the flavor in MLmodel."""

BENTOML = {
    "bento-xgboost": (SourceFormat.XGBOOST, "saved_model.json", "bentoml.xgboost"),
    "bento-lightgbm": (SourceFormat.LIGHTGBM, "saved_model.txt", "bentoml.lightgbm"),
    "bento-catboost": (SourceFormat.CATBOOST, "saved_model.cbm", "bentoml.catboost"),
}  # fmt: skip


def copied(source: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, place)
    else:
        shutil.copyfile(source, place)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """A daemon that serves what was imported of every package."""
    for modules in MODULES.values():
        present(*modules)
    sources, run = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("run")
    for name, (source_format, file, flavor) in MLFLOW.items():
        copied(source_of(source_format, sources), sources / "mlflow" / name / file)
        (sources / "mlflow" / name / "MLmodel").write_text(f"flavors:\n  {flavor}\n{SIGNATURE}")
    for name, (source_format, file, module) in BENTOML.items():
        folder = sources / "store" / name / "abc"
        copied(source_of(source_format, sources), folder / file)
        (folder / "model.yaml").write_text(f"name: {name}\nversion: abc\nmodule: {module}\nsignatures: {{}}\n")
    for source in (sources / "mlflow", sources / "store"):
        report = import_source(ImportOptions(source=str(source), models=str(run / "models")))
        assert report.is_whole, [(model.name, model.reason) for model in report.models if model.reason]
        assert all(model.conversions for model in report.models)
    config = Config(state=str(run / "state"), watch=False, calibrate=False)
    with Runtime(run / "models", config=config) as runtime:
        yield runtime


def of_xgboost(source: Path) -> Any:
    (xgboost,) = needs("xgboost")
    return xgboost.Booster(model_file=source).predict(xgboost.DMatrix(IMAGES)).argmax(axis=1)


def of_lightgbm(source: Path) -> Any:
    (lightgbm,) = needs("lightgbm")
    return lightgbm.Booster(model_file=source).predict(IMAGES).argmax(axis=1)


@pytest.mark.parametrize("name", [*MLFLOW, *BENTOML])
def test_the_model_of_a_package_is_served_and_recognises_most_digits(served: Runtime, name: str) -> None:
    (entry,) = [each for each in served.models() if each["name"] == name]
    assert entry["state"] == "ready", entry
    source_format = {**MLFLOW, **BENTOML}[name][0]
    image = "input_0" if name == "mlflow-pytorch" else INPUT.get(source_format, "image")
    outputs = list(served.infer(name, {image: IMAGES}).outputs.values())
    chances = next(each for each in outputs if each.ndim == 2 and each.shape[1] > 2)
    if source_format in TABULAR:  # the others are made with weights of a fixed seed, not trained
        assert (chances.argmax(axis=1) == load_held_out().labels[:64]).mean() > 0.8
    assert np.isfinite(chances).all()


@pytest.mark.parametrize(
    ("name", "source_format", "said_by"),
    [
        ("mlflow-xgboost", SourceFormat.XGBOOST, of_xgboost),
        ("bento-lightgbm", SourceFormat.LIGHTGBM, of_lightgbm),
    ],
)
def test_labels_are_those_of_the_library(
    served: Runtime, tmp_path: Path, name: str, source_format: SourceFormat, said_by: Callable[[Path], Any]
) -> None:
    found = served.infer(name, {"features": IMAGES}).outputs["label"]
    assert (found.reshape(-1) == said_by(source_of(source_format, tmp_path))).mean() >= 0.98
