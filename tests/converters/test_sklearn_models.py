"""What scikit-learn's exporter leaves out is mended: missing values, histogram boosting, logarithms, texts, names."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.registry import backend
from edge_runtime.errors import ConversionFailed
from edge_runtime.pictures.model_metadata import read_metadata
from edge_runtime_converters.conversion import convert
from edge_runtime_converters.onnx_from_sklearn import convert_model
from edge_runtime_converters.options import ConversionOptions
from edge_runtime_converters.original import serve
from edge_runtime_converters.tree_rows import tree_runs
from tests.converters.sources import needs
from tests.converters.test_trees import Floats, table, wanted

NAMES = np.array(["cold", "mild", "hot"])

Labels = npt.NDArray[Any]


def labels(rows: Floats) -> Labels:
    return NAMES[wanted(rows, 3).astype(int)]


TREES = {
    "a tree": ("sklearn.tree.DecisionTreeClassifier", {}, True),
    "an estimate by a tree": ("sklearn.tree.DecisionTreeRegressor", {}, False),
    "a forest": ("sklearn.ensemble.RandomForestClassifier", {"n_estimators": 10}, True),
    "an estimate by a forest": ("sklearn.ensemble.RandomForestRegressor", {"n_estimators": 10}, False),
    "extra trees": ("sklearn.ensemble.ExtraTreesClassifier", {"n_estimators": 10}, True),
    "histogram boosting": ("sklearn.ensemble.HistGradientBoostingClassifier", {"max_iter": 8}, True),
    "an estimate by histogram boosting": ("sklearn.ensemble.HistGradientBoostingRegressor", {"max_iter": 8}, False),
    "a count by histogram boosting": (
        "sklearn.ensemble.HistGradientBoostingRegressor", {"max_iter": 8, "loss": "poisson"}, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_trees_answer_as_scikit_learn_at_thresholds_and_without_values(name: str, tmp_path: Path) -> None:
    needs("sklearn", "skl2onnx")
    where, settings, classifies = TREES[name]
    module, _, kind = where.rpartition(".")
    model = getattr(importlib.import_module(module), kind)(random_state=1, **settings)
    rows = table()
    model.fit(rows, labels(rows) if classifies else wanted(rows))
    original = convert_model(model, tmp_path / "model.onnx")
    served = serve(tmp_path / "model.onnx")
    try:
        for missing in (False, True):
            runs = tree_runs(tmp_path / "model.onnx", served.spec, missing=missing)
            assert runs
            for run in runs:
                right, got = original.run(run), served.run(run)
                np.testing.assert_allclose(got[-1], right[-1], rtol=1e-4, atol=1e-5)
                assert np.array_equal(got[0], right[0]) or not classifies
    finally:
        served.close()
    assert read_metadata(tmp_path / "model.onnx").names == (tuple(model.classes_) if classifies else ())


def test_splits_by_category_are_refused_with_what_to_do(tmp_path: Path) -> None:
    ensemble, _ = needs("sklearn.ensemble", "skl2onnx")
    rows = np.nan_to_num(table())
    model = ensemble.HistGradientBoostingRegressor(max_iter=3, categorical_features=[3]).fit(rows, wanted(rows))
    with pytest.raises(ConversionFailed, match="encode it before training"):
        convert_model(model, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_several_labels_a_row_are_refused_with_what_to_do(tmp_path: Path) -> None:
    ensemble, _ = needs("sklearn.ensemble", "skl2onnx")
    rows = np.nan_to_num(table())
    both = np.stack([rows[:, 0] > 0, rows[:, 1] > 0], axis=1)
    model = ensemble.RandomForestClassifier(3).fit(rows, both)
    with pytest.raises(ConversionFailed, match="answers 2 labels a row"):
        convert_model(model, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("where", "settings"),
    [
        ("sklearn.ensemble.IsolationForest", {"n_estimators": 10, "random_state": 1}),
        ("sklearn.svm.OneClassSVM", {}),
        ("sklearn.linear_model.SGDOneClassSVM", {}),
        ("sklearn.cluster.KMeans", {"n_clusters": 3, "n_init": 1, "random_state": 1}),
        ("sklearn.mixture.GaussianMixture", {"n_components": 2, "random_state": 1}),
    ],
)
def test_outliers_clusters_and_mixtures_are_found_as_scikit_learn_does(
    where: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    skops, _ = needs("skops.io", "skl2onnx")
    module, _, kind = where.rpartition(".")
    rows = np.nan_to_num(table()) / np.float32((1, 100, 1e-3, 10))
    model = getattr(importlib.import_module(module), kind)(**settings).fit(rows)
    original = convert_model(model, tmp_path / "model.onnx")
    served = serve(tmp_path / "model.onnx")
    right, got = original.run({"features": rows}), served.run({"features": rows})
    served.close()
    assert [each.shape for each in got] == [each.shape for each in right]
    assert (got[0] == right[0]).mean() > 0.99
    np.testing.assert_allclose(got[1], right[1], rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(right[0].reshape(-1), model.predict(rows))
    if kind != "GaussianMixture":  # skops does not know its types
        skops.dump(model, tmp_path / "model.skops")
        report = convert(ConversionOptions(source=str(tmp_path / "model.skops"), target="onnx", overwrite=True))
        assert report.is_near_enough, report.faults


@pytest.mark.parametrize("settings", [{}, {"ngram_range": (1, 2)}, {"lowercase": False}, {"stop_words": ["dog"]}])
@pytest.mark.parametrize("vectorizer", ["TfidfVectorizer", "CountVectorizer"])
def test_a_pipeline_of_texts_takes_texts(vectorizer: str, settings: dict[str, Any], tmp_path: Path) -> None:
    text, linear, pipeline, _ = needs(
        "sklearn.feature_extraction.text", "sklearn.linear_model", "sklearn.pipeline", "skl2onnx"
    )
    texts = ["Good dog ÄÖ", "bad cat", "good cat, nice", "awful Dog a1 don't"] * 10
    model = pipeline.make_pipeline(getattr(text, vectorizer)(**settings), linear.LogisticRegression())
    model.fit(texts, ["p", "n", "p", "n"] * 10)
    original = convert_model(model, tmp_path / "model.onnx")
    asked = ["GOOD dog äö", "Äö ÄÖ", "cat NICE ÉÉ", "", "bad, cat; a b c good-dog", "don't"]
    held_texts = np.array([each.encode() for each in asked], object).reshape(-1, 1)
    served = serve(tmp_path / "model.onnx")
    label, chances = served.run({"text": held_texts})
    served.close()
    np.testing.assert_allclose(chances, model.predict_proba(asked), atol=1e-5)
    assert label.tolist() == [word.encode() for word in model.predict(asked)]
    right = original.run({"text": held_texts})
    np.testing.assert_allclose(right[1], chances, atol=1e-5)


def test_a_file_with_a_pipeline_of_texts_is_compared_on_texts_of_its_words(tmp_path: Path) -> None:
    text, linear, pipeline, skops, _ = needs(
        "sklearn.feature_extraction.text", "sklearn.linear_model", "sklearn.pipeline", "skops.io", "skl2onnx"
    )
    model = pipeline.make_pipeline(text.TfidfVectorizer(), linear.LogisticRegression())
    skops.dump(model.fit(["good dog", "bad cat", "good cat today"] * 9, ["p", "n", "p"] * 9), tmp_path / "model.skops")
    report = convert(ConversionOptions(source=str(tmp_path / "model.skops"), target="onnx"))
    assert report.is_near_enough, report.faults
    assert report.compared_on == "128 made-up texts"


@pytest.mark.parametrize("name", ["classes", "numbers"])
def test_the_default_export_with_its_dictionaries_is_served_as_tensors(name: str, tmp_path: Path) -> None:
    ensemble, exporter, types = needs("sklearn.ensemble", "skl2onnx", "skl2onnx.common.data_types")
    rows = np.nan_to_num(table())
    wanted_labels = labels(rows) if name == "classes" else wanted(rows, 3).astype(int) * 5
    model = ensemble.RandomForestClassifier(5, random_state=1).fit(rows, wanted_labels)
    made = exporter.convert_sklearn(model, initial_types=[("x", types.FloatTensorType([None, 4]))])
    (tmp_path / "model.onnx").write_bytes(made.SerializeToString())
    assert [node.op_type for node in made.graph.node][-1] == "ZipMap"
    instance = backend("onnxruntime").load(tmp_path / "model.onnx", LoadOptions())
    label, chances = instance.run({"x": rows})
    instance.close()
    np.testing.assert_allclose(chances, model.predict_proba(rows), atol=1e-5)
    said = [each.decode() if isinstance(each, bytes) else each for each in label.tolist()]
    assert said == model.predict(rows).tolist()
    assert read_metadata(tmp_path / "model.onnx").names == tuple(map(str, model.classes_))
