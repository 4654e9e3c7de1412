"""Triton repositories whose models are converted: what their clients ask for by name, they get, as from the library."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.digits import load_held_out
from edge_runtime.cli.main import main
from edge_runtime.config.settings import Config
from edge_runtime.daemon.runtime import Runtime
from edge_runtime_converters.formats import SourceFormat
from edge_runtime_converters.importing.writing import ImportOptions, import_source
from tests.converters.sources import FEATURES, needs, network, present, source_of
from tests.models.graphdefs import weights

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit")

IMAGES = load_held_out().images[:64].astype(np.float32)

TORCHSCRIPT = """
platform: "pytorch_libtorch"
max_batch_size: 64
input [ { name: "INPUT__0" data_type: TYPE_FP32 dims: [ 64 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 10 ] } ]
instance_group [ { kind: KIND_GPU count: 1 } ]
"""

SAVED_MODEL = """
platform: "tensorflow_savedmodel"
max_batch_size: 8
"""

GRAPHDEF = """
platform: "tensorflow_graphdef"
max_batch_size: 64
input [ { name: "image" data_type: TYPE_FP32 dims: [ 64 ] } ]
output [ { name: "scores" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""

FIL = """
backend: "fil"
max_batch_size: 32768
input [ {{ name: "input__0" data_type: TYPE_FP32 dims: [ 64 ] }} ]
output [ {{ name: "output__0" data_type: TYPE_FP32 dims: [ {columns} ] }} ]
instance_group [ {{ kind: KIND_AUTO }} ]
parameters [
  {{ key: "model_type" value: {{ string_value: "{kind}" }} }},
  {{ key: "predict_proba" value: {{ string_value: "{proba}" }} }},
  {{ key: "output_class" value: {{ string_value: "true" }} }}
]
dynamic_batching {{}}
"""


def put(repository: Path, name: str, source: Path, file: str, config: str) -> None:
    """A model's file or folder under Triton's name for it, with its config."""
    place = repository / name / "1" / file
    place.parent.mkdir(parents=True)
    if source.is_dir():
        shutil.copytree(source, place)
    else:
        shutil.copyfile(source, place)
    (repository / name / "config.pbtxt").write_text(config)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """A daemon that serves what was imported of a repository of every converted kind."""
    sources, run = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("run")
    repository = sources / "repository"
    boosted, light = (source_of(each, sources) for each in (SourceFormat.XGBOOST, SourceFormat.LIGHTGBM))
    put(repository, "classes", boosted, "xgboost.json", FIL.format(kind="xgboost_json", columns=1, proba="false"))
    put(repository, "chances", light, "model.txt", FIL.format(kind="lightgbm", columns=10, proba="true"))
    put(repository, "network", source_of(SourceFormat.TORCHSCRIPT, sources), "model.pt", TORCHSCRIPT)
    put(repository, "saved", source_of(SourceFormat.SAVED_MODEL, sources), "model.savedmodel", SAVED_MODEL)
    put(repository, "frozen", source_of(SourceFormat.GRAPHDEF, sources), "model.graphdef", GRAPHDEF)
    (repository / "network" / "labels.txt").write_text("zero\n")
    report = import_source(ImportOptions(source=str(repository), models=str(run / "models")))
    assert report.is_whole, [model.reason for model in report.models]
    config = Config(state=str(run / "state"), watch=False, calibrate=False)
    with Runtime(run / "models", config=config) as runtime:
        assert {entry["state"] for entry in runtime.models()} == {"ready"}, runtime.models()
        yield runtime


def test_a_torchscript_model_keeps_the_names_of_its_config(served: Runtime) -> None:
    (torch,) = needs("torch")
    found = served.infer("network", {"INPUT__0": IMAGES}).outputs
    assert list(found) == ["OUTPUT__0"]
    with torch.no_grad():
        assert np.allclose(found["OUTPUT__0"], network(torch)(torch.from_numpy(IMAGES)).numpy(), atol=1e-4)


def test_a_forest_answers_one_float_tensor_as_the_fil_backend_does(served: Runtime) -> None:
    found = served.infer("classes", {"input__0": IMAGES}).outputs
    assert list(found) == ["output__0"]
    assert (found["output__0"].shape, found["output__0"].dtype) == ((64, 1), np.float32)
    assert (found["output__0"][:, 0] == load_held_out().labels[:64]).mean() > 0.8


def test_a_forest_that_predicts_chances_answers_them(served: Runtime) -> None:
    found = served.infer("chances", {"input__0": IMAGES}).outputs["output__0"]
    assert found.shape == (64, 10)
    assert np.allclose(found.sum(axis=1), 1, atol=1e-5)
    assert (found.argmax(axis=1) == load_held_out().labels[:64]).mean() > 0.8


def test_a_saved_model_is_served_by_its_signature(served: Runtime) -> None:
    entry = next(each for each in served.models() if each["name"] == "saved")
    assert entry["backend"] == "openvino"


def test_a_frozen_graph_is_served_by_the_names_of_its_nodes(served: Runtime) -> None:
    found = served.infer("frozen", {"image": IMAGES}).outputs["scores"]
    sums = np.exp(IMAGES @ weights(FEATURES) - (IMAGES @ weights(FEATURES)).max(axis=1, keepdims=True))
    assert np.allclose(found, sums / sums.sum(axis=1, keepdims=True), atol=1e-4)


@pytest.mark.parametrize(
    ("parameters", "columns", "expected"),
    [
        ('{ key: "output_class" value: { string_value: "true" } }', 1, lambda p: (p > 0.5).astype(np.float32)),
        (
            (
                '{ key: "output_class" value: { string_value: "true" } }, '
                '{ key: "threshold" value: { string_value: "0.9" } }'
            ),
            1,
            lambda p: (p > 0.9).astype(np.float32),
        ),
        ('{ key: "predict_proba" value: { string_value: "true" } }', 1, lambda p: p),
        ("", 1, lambda p: p),
    ],
    ids=["class", "threshold", "chance", "neither"],
)
def test_a_forest_of_two_classes_answers_as_its_config_says(
    tmp_path: Path, parameters: str, columns: int, expected: Any
) -> None:
    (xgboost,) = needs("xgboost")
    rows = IMAGES[:, :8]
    booster = xgboost.train(
        {"objective": "binary:logistic", "max_depth": 3, "nthread": 1}, xgboost.DMatrix(rows, IMAGES[:, 20] > 8), 8
    )
    booster.save_model(tmp_path / "two.json")
    config = FIL.format(kind="xgboost_json", columns=columns, proba="false").replace("dims: [ 64 ]", "dims: [ 8 ]")
    head, _, _ = config.partition("parameters")
    put(tmp_path / "repository", "two", tmp_path / "two.json", "xgboost.json", f"{head}parameters [{parameters}]")
    report = import_source(ImportOptions(source=str(tmp_path / "repository"), models=str(tmp_path / "models")))
    assert report.is_whole, report.models[0].reason
    with Runtime(
        tmp_path / "models", config=Config(state=str(tmp_path / "state"), watch=False, calibrate=False)
    ) as runtime:
        found = runtime.infer("two", {"input__0": rows}).outputs["output__0"]
    assert found.shape == (64, 1)
    assert np.allclose(found[:, 0], expected(booster.predict(xgboost.DMatrix(rows))), atol=1e-5)


def test_shapley_values_are_refused_by_name(tmp_path: Path) -> None:
    source = source_of(SourceFormat.LIGHTGBM, tmp_path)
    config = FIL.format(kind="lightgbm", columns=10, proba="true").replace(
        "instance_group", 'output [ { name: "treeshap_output" data_type: TYPE_FP32 dims: [ 65 ] } ]\ninstance_group'
    )
    put(tmp_path / "repository", "explained", source, "model.txt", config)
    report = import_source(ImportOptions(source=str(tmp_path / "repository"), models=str(tmp_path / "models")))
    assert "Shapley" in report.models[0].reason


def test_too_far_from_its_source_leaves_nothing_and_names_the_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    present("torch")
    put(tmp_path / "repository", "network", source_of(SourceFormat.TORCHSCRIPT, tmp_path), "model.pt", TORCHSCRIPT)
    words = [str(tmp_path / "repository"), "--models", str(tmp_path / "models"), "--tolerance", "1e-12", "--json"]
    assert main(["import", *words]) == 1
    (model,) = json.loads(capsys.readouterr().out)["models"]
    assert model["state"] == "refused"
    assert "answers otherwise than its source" in model["reason"]
    assert list((tmp_path / "models").iterdir()) == []


def test_a_torchscript_model_without_a_config_says_how_to_give_its_shapes(tmp_path: Path) -> None:
    present("torch")
    source = source_of(SourceFormat.TORCHSCRIPT, tmp_path)
    put(tmp_path / "repository", "network", source, "model.pt", "")
    words = {"source": str(tmp_path / "repository"), "models": str(tmp_path / "models")}
    (model,) = import_source(ImportOptions(**words)).models
    assert "--shapes" in model.reason
    (model,) = import_source(ImportOptions(**words, shapes=(f"image=-1,{FEATURES}",))).models
    assert model.state == "taken", model.reason
    assert model.conversions[0].source_format == "TorchScript (.pt)"
