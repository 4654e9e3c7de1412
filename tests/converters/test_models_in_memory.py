"""Models that a program has in memory convert by one call, and answer as they did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.digits import load_training
from edge_runtime.errors import ConversionFailed
from edge_runtime_converters import (
    int8_from_onnx,
    onnx_from_lightgbm,
    onnx_from_pytorch,
    onnx_from_sklearn,
    onnx_from_xgboost,
)
from edge_runtime_converters.comparison import TOLERANCES, Comparison, OutputComparison
from edge_runtime_converters.original import Original, serve
from tests.converters.sources import images, needs, network

ROWS = 32


def features() -> np.ndarray:
    return load_training().images[:400].astype(np.float32)


def labels(classes: int) -> np.ndarray:
    return load_training().labels[:400].astype(int) % classes


def agrees(original: Original, made: Path) -> list[str]:
    """Hold that a model and its ONNX answer alike on real inputs; the names of the outputs."""
    served = serve(made)
    try:
        assert served.spec.may_batch
        comparison = Comparison([OutputComparison(output.name) for output in served.spec.outputs])
        inputs = {served.spec.inputs[0].name: images(ROWS)}
        comparison.add(original.run(inputs), served.run(inputs), None, ROWS)
        assert comparison.faults(TOLERANCES["fp32"]) == []
        return [output.name for output in served.spec.outputs]
    finally:
        served.close()


def sklearn_models() -> dict[str, Any]:
    return {
        "two classes": ("linear_model.LogisticRegression", {}, labels(2)),
        "ten classes behind a scaler": ("pipeline linear_model.LogisticRegression", {"max_iter": 50}, labels(10)),
        "words as classes": ("linear_model.LogisticRegression", {}, np.array(["even", "odd"])[labels(2)]),
        "a decision without chances": ("svm.LinearSVC", {}, labels(2)),
        "ten decisions without chances": ("svm.LinearSVC", {}, labels(10)),
        "a decision by kernels": ("svm.SVC", {}, labels(2)),
        "ten decisions by kernels": ("svm.SVC", {}, labels(10)),
        "a decision by gradients": ("linear_model.SGDClassifier", {"random_state": 1}, labels(2)),
        "ten decisions by gradients": ("linear_model.Perceptron", {}, labels(10)),
        "a decision by ridge": ("linear_model.RidgeClassifier", {}, labels(2)),
        "a decision behind a scaler": ("pipeline svm.LinearSVC", {}, labels(2)),
        "ten decisions behind a scaler": ("pipeline svm.SVC", {}, labels(10)),
        "boosted trees": ("ensemble.GradientBoostingClassifier", {"n_estimators": 3}, labels(3)),
        "an estimate": ("ensemble.RandomForestRegressor", {"n_estimators": 5}, labels(10) * 1.5),
        "a perceptron": ("neural_network.MLPClassifier", {"max_iter": 20}, labels(10)),
        "a transformation": ("decomposition.PCA", {"n_components": 4}, None),
    }


@pytest.mark.filterwarnings("ignore")  # that so few steps do not converge
@pytest.mark.parametrize("name", sklearn_models())
def test_a_scikit_learn_model_converts(name: str, tmp_path: Path) -> None:
    needs("sklearn", "skl2onnx")
    import importlib

    where, settings, wanted = sklearn_models()[name]
    module, _, kind = where.removeprefix("pipeline ").partition(".")
    model = getattr(importlib.import_module(f"sklearn.{module}"), kind)(**settings)
    if where.startswith("pipeline "):
        pipeline, scaling = needs("sklearn.pipeline", "sklearn.preprocessing")
        model = pipeline.make_pipeline(scaling.StandardScaler(), model)
    model.fit(features(), wanted)
    agrees(onnx_from_sklearn.convert_model(model, tmp_path / "model.onnx"), tmp_path / "model.onnx")


def test_a_path_may_be_text(tmp_path: Path) -> None:
    linear, _ = needs("sklearn.linear_model", "skl2onnx")
    model = linear.LinearRegression().fit(features(), labels(3))
    agrees(onnx_from_sklearn.convert_model(model, str(tmp_path / "model.onnx")), tmp_path / "model.onnx")


def test_a_classifier_that_gives_its_label_alone_is_refused(tmp_path: Path) -> None:
    ensemble, svm, _ = needs("sklearn.ensemble", "sklearn.svm", "skl2onnx")
    model = ensemble.VotingClassifier([("a", svm.LinearSVC()), ("b", svm.SVC())]).fit(features(), labels(2))
    with pytest.raises(ConversionFailed, match="VotingClassifier gives neither chances nor a decision function"):
        onnx_from_sklearn.convert_model(model, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_scikit_learn_model_that_was_not_fitted_is_refused(tmp_path: Path) -> None:
    (linear,) = needs("sklearn.linear_model")
    with pytest.raises(ConversionFailed, match="wanted a fitted model"):
        onnx_from_sklearn.convert_model(linear.LogisticRegression(), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_trees_have_nothing_to_quantise_and_are_reported_so(tmp_path: Path) -> None:
    trees, _ = needs("sklearn.ensemble", "skl2onnx")
    model = trees.RandomForestClassifier(2).fit(features(), labels(3))
    onnx_from_sklearn.convert_model(model, tmp_path / "model.onnx")
    with pytest.raises(ConversionFailed, match="trees or linear models alone"):
        int8_from_onnx.quantise(tmp_path / "model.onnx", tmp_path / "model.int8.onnx", [{"features": images(1)}])
    assert not (tmp_path / "model.int8.onnx").exists()


@pytest.mark.parametrize(
    ("objective", "classes"),
    [("multi:softprob", 10), ("multi:softmax", 3), ("binary:logistic", 2), ("reg:squarederror", 0)],
)
def test_an_xgboost_booster_converts(objective: str, classes: int, tmp_path: Path) -> None:
    (xgboost,) = needs("xgboost")
    wanted = labels(classes) if classes else labels(10) * 1.5
    settings = {"objective": objective, "max_depth": 3, "nthread": 1, **({"num_class": classes} if classes > 2 else {})}
    names = [f"pixel {place}" for place in range(64)]
    booster = xgboost.train(settings, xgboost.DMatrix(features(), wanted, feature_names=names), 4)
    outputs = agrees(onnx_from_xgboost.convert_model(booster, tmp_path / "model.onnx"), tmp_path / "model.onnx")
    assert len(outputs) == (2 if classes else 1)
    assert booster.feature_names == names, "the caller's model is as it was"


def test_an_xgboost_wrapper_for_scikit_learn_converts(tmp_path: Path) -> None:
    xgboost, _ = needs("xgboost", "sklearn")
    model = xgboost.XGBClassifier(n_estimators=3, max_depth=3, n_jobs=1).fit(features(), labels(3))
    agrees(onnx_from_xgboost.convert_model(model, str(tmp_path / "model.onnx")), tmp_path / "model.onnx")


@pytest.mark.parametrize(("objective", "classes"), [("multiclass", 10), ("binary", 2), ("regression", 0)])
def test_a_lightgbm_booster_converts(objective: str, classes: int, tmp_path: Path) -> None:
    (lightgbm,) = needs("lightgbm")
    wanted = labels(classes) if classes else labels(10) * 1.5
    settings = {"objective": objective, "num_leaves": 7, "verbose": -1, "num_threads": 1}
    settings |= {"num_class": classes} if classes > 2 else {}
    booster = lightgbm.train(settings, lightgbm.Dataset(features(), wanted), 4)
    agrees(onnx_from_lightgbm.convert_model(booster, tmp_path / "model.onnx"), tmp_path / "model.onnx")


@pytest.mark.long
@pytest.mark.parametrize("rows", [1, 2])
def test_a_pytorch_module_converts_with_an_open_batch_axis(tmp_path: Path, rows: int) -> None:
    (torch,) = needs("torch")
    needs("onnxscript")
    tqdm = needs("tqdm")[0].tqdm
    tqdm.monitor_interval = 0  # its thread would outlive the test
    original = onnx_from_pytorch.convert_module(network(torch), [torch.zeros(rows, 64)], str(tmp_path / "model.onnx"))
    assert agrees(original, tmp_path / "model.onnx")
