"""Trees of XGBoost, LightGBM and CatBoost answer in ONNX as in their library: at thresholds, beside, without values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.declaration import why_not_inside
from edge_runtime.backends.registry import declaration_of
from edge_runtime.errors import ConversionFailed
from edge_runtime.pictures.model_metadata import read_metadata
from edge_runtime_converters import onnx_from_catboost, onnx_from_lightgbm, onnx_from_xgboost
from edge_runtime_converters.conversion import convert
from edge_runtime_converters.forest import float32_below
from edge_runtime_converters.formats import SourceFormat, format_of
from edge_runtime_converters.options import ConversionOptions
from edge_runtime_converters.original import Original, serve
from tests.converters.sources import needs, source_of, write_held_out

ROWS = 600
CATEGORIES = 40

Floats = npt.NDArray[np.float32]


def table(*, missing: bool = True, zeros: bool = False) -> Floats:
    """Columns of unlike magnitudes; column 3 counts categories, and is never missing."""
    random = np.random.default_rng(5)
    rows = random.normal(size=(ROWS, 4)) * (1, 100, 1e-3, 0)
    rows[:, 3] = random.integers(0, CATEGORIES, ROWS)
    if missing:
        rows[random.random((ROWS, 4)) < (0.1, 0.1, 0.1, 0)] = np.nan
    if zeros:
        rows[random.random((ROWS, 4)) < (0.3, 0.3, 0.3, 0)] = 0
    return rows.astype(np.float32)


def wanted(rows: Floats, classes: int = 0) -> npt.NDArray[np.float64]:
    """What to learn: a number, or one of so many classes."""
    filled = np.where(np.isnan(rows), np.float32((0.3, 30, 3e-4, 0)), rows)
    value = filled[:, 0] + filled[:, 1] / 100 * (rows[:, 3] % 3 - 1) + 1000 * filled[:, 2] + (rows[:, 3] % 7 > 3)
    if not classes:
        return np.abs(value.astype(np.float64)) + 0.1
    return np.digitize(value, np.quantile(value, np.linspace(0, 1, classes + 1)[1:-1])).astype(np.float64)


def edge_rows(rows: Floats, thresholds: Mapping[int, Sequence[float]]) -> Floats:
    """Rows of thresholds: each value is one, or the float32 just below or above, or missing, 0, an infinity."""
    random = np.random.default_rng(6)
    found = rows[random.integers(0, len(rows), 4000)].copy()
    for column, values in thresholds.items():
        near = np.array(values, np.float64).astype(np.float32)
        steps = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
        odd = np.array([np.nan, 0, -0.0, 1e-36, -1e-35, 1e-30, -0.5, 2.5, 1e9, -1e9], np.float32)
        pool = np.concatenate([*steps * 4, odd])
        found[:, column] = np.where(random.random(4000) < 0.8, random.choice(pool, 4000), found[:, column])
    return found


def held(original: Original, made: Path, rows: Floats, leaves: int = 5) -> list[str]:
    """Hold that ONNX answers as the library does, row by row, in more ways than `leaves`; the names of the outputs."""
    served = serve(made)
    try:
        right, got = original.run({"features": rows}), served.run({"features": rows})
        names = [output.name for output in served.spec.outputs]
        for name, one, other in zip(names, right, got, strict=True):
            assert one.shape == other.shape, name
            if name == "label":
                scores = np.sort(right[1], axis=1)
                sure = scores[:, -1] - scores[:, -2] > 1e-5  # float32 may break a tie otherwise than double
                np.testing.assert_array_equal(one[sure], other[sure])
                assert sure.mean() > 0.5
            else:
                np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-5 * np.nanmax(np.abs(one)))
                assert len(np.unique(one, axis=0)) > leaves, "the rows reach different leaves"
        return names
    finally:
        served.close()


# ---- XGBoost --------------------------------------------------------------------------------------------------------


def xgboost_cuts(booster: Any) -> dict[int, list[float]]:
    """Thresholds by feature."""
    gradient_booster = json.loads(bytes(booster.save_raw("json")))["learner"]["gradient_booster"]
    cuts: dict[int, list[float]] = {}
    for tree in gradient_booster.get("gbtree", gradient_booster)["model"]["trees"]:
        columns = (tree["left_children"], tree["split_indices"], tree["split_conditions"])
        for left, feature, value in zip(*columns, strict=True):
            if left >= 0:
                cuts.setdefault(feature, []).append(value)
    return cuts


XGBOOST = {
    "two classes": ({"objective": "binary:logistic"}, 2),
    "two classes as sums": ({"objective": "binary:logitraw"}, 2),
    "two classes, a step": ({"objective": "binary:hinge"}, 2),
    "classes": ({"objective": "multi:softprob", "num_class": 5}, 5),
    "classes, the label alone": ({"objective": "multi:softmax", "num_class": 3}, 3),
    "an estimate": ({"objective": "reg:squarederror"}, 0),
    "a count": ({"objective": "count:poisson"}, 0),
    "gamma": ({"objective": "reg:gamma"}, 0),
    "tweedie": ({"objective": "reg:tweedie"}, 0),
    "a share": ({"objective": "reg:logistic"}, 2),
    "dart": ({"objective": "reg:squarederror", "booster": "dart", "rate_drop": 0.5}, 0),
    "a forest": ({"objective": "reg:squarederror", "num_parallel_tree": 5, "subsample": 0.6}, 0),
    "quantiles": ({"objective": "reg:quantileerror", "quantile_alpha": [0.1, 0.5, 0.9]}, 0),
    "a base score": ({"objective": "binary:logistic", "base_score": 0.05}, 2),
    "a rank": ({"objective": "rank:ndcg"}, 4),
}


def xgboost_trained(settings: Mapping[str, Any], classes: int, **words: Any) -> Any:
    (xgboost,) = needs("xgboost")
    rows = table()
    data = xgboost.DMatrix(rows, wanted(rows, classes), nthread=1, **words)
    if str(settings["objective"]).startswith("rank"):
        data.set_group([ROWS // 4] * 4)
    return xgboost.train({"max_depth": 4, "nthread": 1, "seed": 1, **settings}, data, 12)


@pytest.mark.parametrize("name", XGBOOST)
def test_an_xgboost_model_answers_as_xgboost_at_its_thresholds_and_without_values(name: str, tmp_path: Path) -> None:
    booster = xgboost_trained(*XGBOOST[name])
    original = onnx_from_xgboost.convert_model(booster, tmp_path / "model.onnx")
    rows = edge_rows(table(), xgboost_cuts(booster))
    names = held(original, tmp_path / "model.onnx", rows, 1 if "step" in name else 5)
    is_labelled = XGBOOST[name][0]["objective"] in ("binary:logistic", "multi:softprob", "multi:softmax")
    assert names == (["label", "probabilities"] if is_labelled else ["variable"])


@pytest.mark.parametrize("strategy", ["one_output_per_tree", "multi_output_tree"])
def test_an_xgboost_model_of_several_outputs_answers_all(strategy: str, tmp_path: Path) -> None:
    (xgboost,) = needs("xgboost")
    rows = table()
    several = np.stack([wanted(rows), -wanted(rows) * 3, np.nan_to_num(rows[:, 0])], axis=1)
    settings = {"objective": "reg:squarederror", "multi_strategy": strategy, "nthread": 1, "max_depth": 4}
    booster = xgboost.train(settings, xgboost.DMatrix(rows, several, nthread=1), 5)
    original = onnx_from_xgboost.convert_model(booster, tmp_path / "model.onnx")
    held(original, tmp_path / "model.onnx", edge_rows(table(), xgboost_cuts(booster)))


@pytest.mark.parametrize("onehot", [1, 100])
def test_xgboosts_splits_by_category_answer_as_xgboost(onehot: int, tmp_path: Path) -> None:
    settings = {"objective": "reg:squarederror", "max_cat_to_onehot": onehot, "tree_method": "hist"}
    booster = xgboost_trained(settings, 0, feature_types=["q", "q", "q", "c"], enable_categorical=True)
    original = onnx_from_xgboost.convert_model(booster, tmp_path / "model.onnx")
    cuts = xgboost_cuts(booster)
    assert 3 in cuts, "some split is by category"
    held(original, tmp_path / "model.onnx", edge_rows(table(), {**cuts, 3: list(range(-2, CATEGORIES + 3))}))


@pytest.mark.parametrize("suffix", ["json", "ubj"])
def test_a_file_of_xgboosts_scikit_learn_interface_answers_by_its_best_rounds(suffix: str, tmp_path: Path) -> None:
    xgboost, _ = needs("xgboost", "sklearn")
    rows = table()
    labels = wanted(rows, 3).astype(int)
    model = xgboost.XGBClassifier(n_estimators=40, early_stopping_rounds=2, n_jobs=1, learning_rate=1.0)
    model.fit(rows[:300], labels[:300], eval_set=[(rows[300:], np.roll(labels[300:], 7))], verbose=False)
    assert model.best_iteration + 1 < model.get_booster().num_boosted_rounds()
    model.save_model(tmp_path / f"model.{suffix}")
    onnx_from_xgboost.convert(tmp_path / f"model.{suffix}", tmp_path / "model.onnx", {})
    served = serve(tmp_path / "model.onnx")
    np.testing.assert_allclose(served.run({"features": rows})[1], model.predict_proba(rows), atol=1e-5)
    served.close()


def test_an_xgboost_model_without_trees_is_refused(tmp_path: Path) -> None:
    booster = xgboost_trained({"objective": "reg:squarederror", "booster": "gbtree"}, 0)
    (xgboost,) = needs("xgboost")
    rows = np.nan_to_num(table())
    linear = xgboost.train({"booster": "gblinear", "nthread": 1}, xgboost.DMatrix(rows, wanted(rows)), 2)
    with pytest.raises(ConversionFailed, match="linear model"):
        onnx_from_xgboost.convert_model(linear, tmp_path / "model.onnx")
    assert booster.num_boosted_rounds() == 12
    assert list(tmp_path.iterdir()) == []


def test_a_missing_value_that_is_not_nan_is_refused_with_what_to_do(tmp_path: Path) -> None:
    xgboost, _ = needs("xgboost", "sklearn")
    rows = np.nan_to_num(table(), nan=-999)
    model = xgboost.XGBRegressor(n_estimators=2, missing=-999, n_jobs=1).fit(rows, wanted(rows))
    with pytest.raises(ConversionFailed, match="missing value is -999"):
        onnx_from_xgboost.convert_model(model, tmp_path / "model.onnx")


def test_a_forest_of_xgboost_may_run_inside_the_daemon(tmp_path: Path) -> None:
    booster = xgboost_trained({"objective": "multi:softprob", "num_class": 3}, 3)
    onnx_from_xgboost.convert_model(booster, tmp_path / "model.onnx")
    assert why_not_inside(declaration_of("onnxruntime"), tmp_path / "model.onnx", LoadOptions()) is None


# ---- LightGBM -------------------------------------------------------------------------------------------------------


def lightgbm_cuts(booster: Any) -> dict[int, list[float]]:
    """Thresholds by feature."""
    cuts: dict[int, list[float]] = {}
    for tree in booster.model_to_string().split("\nTree=")[1:]:
        lines = dict(line.partition("=")[::2] for line in tree.splitlines())
        if int(lines["num_leaves"]) > 1:
            for feature, value in zip(lines["split_feature"].split(), lines["threshold"].split(), strict=True):
                cuts.setdefault(int(feature), []).append(float(value))
    return cuts


LIGHTGBM = {
    "two classes": ({"objective": "binary"}, 2),
    "two classes, steeper": ({"objective": "binary", "sigmoid": 2.5}, 2),
    "classes": ({"objective": "multiclass", "num_class": 5}, 5),
    "classes, each by itself": ({"objective": "multiclassova", "num_class": 3}, 3),
    "an estimate": ({"objective": "regression"}, 0),
    "an estimate of roots": ({"objective": "regression", "reg_sqrt": True}, 0),
    "a count": ({"objective": "poisson"}, 0),
    "tweedie": ({"objective": "tweedie"}, 0),
    "a share": ({"objective": "cross_entropy"}, 2),
    "a share, weighed": ({"objective": "cross_entropy_lambda"}, 2),
    "a rank": ({"objective": "lambdarank"}, 4),
    "a forest": ({"objective": "binary", "boosting": "rf", "bagging_freq": 1, "bagging_fraction": 0.6}, 2),
    "an estimate by a forest": (
        {"objective": "regression", "boosting": "rf", "bagging_freq": 1, "bagging_fraction": 0.6}, 0,
    ),
    "dart": ({"objective": "regression", "boosting": "dart", "drop_rate": 0.5}, 0),
    "zero is missing": ({"objective": "regression", "zero_as_missing": True}, 0),
    "nothing is missing": ({"objective": "regression", "use_missing": False}, 0),
    "splits by category": ({"objective": "regression", "min_data_per_group": 5}, 0),
    "splits by one category": ({"objective": "regression", "max_cat_to_onehot": 99}, 0),
}  # fmt: skip


def lightgbm_trained(settings: Mapping[str, Any], classes: int, categories: Sequence[int] = ()) -> Any:
    (lightgbm,) = needs("lightgbm")
    rows = table(zeros="zero_as_missing" in settings)
    fixed = {"num_leaves": 12, "min_data_in_leaf": 5, "verbose": -1, "num_threads": 1, "seed": 1, "deterministic": True}
    group = [ROWS // 4] * 4 if settings["objective"] == "lambdarank" else None
    rows_of_doubles = rows.astype(np.float64) * (1 + 1e-10)  # thresholds between them are not float32
    data = lightgbm.Dataset(
        rows_of_doubles, wanted(rows, classes), group=group, categorical_feature=list(categories), params=dict(settings)
    )
    return lightgbm.train({**fixed, **settings}, data, 12)


@pytest.mark.parametrize("name", LIGHTGBM)
def test_a_lightgbm_model_answers_as_lightgbm_at_its_thresholds_and_without_values(name: str, tmp_path: Path) -> None:
    booster = lightgbm_trained(*LIGHTGBM[name], categories=[3] if "category" in name else [])
    original = onnx_from_lightgbm.convert_model(booster, tmp_path / "model.onnx")
    cuts = lightgbm_cuts(booster)
    if "category" in name:
        assert 3 in cuts, "some split is by category"
        cuts[3] = list(range(-2, CATEGORIES + 3))
    names = held(original, tmp_path / "model.onnx", edge_rows(table(zeros="zero" in name), cuts))
    is_labelled = name.startswith(("two classes", "classes", "a forest"))
    assert names == (["label", "probabilities"] if is_labelled else ["variable"])


def test_a_lightgbm_threshold_between_two_float32_keeps_both_sides(tmp_path: Path) -> None:
    (lightgbm,) = needs("lightgbm")
    low = np.float32(0.1)
    high = np.nextafter(low, np.float32(1))
    rows = np.repeat(np.array([[low], [high]], np.float32), 50, axis=0)
    settings = {"min_data_in_leaf": 1, "num_leaves": 2, "verbose": -1, "num_threads": 1, "min_data_in_bin": 1}
    data = lightgbm.Dataset(rows.astype(np.float64), np.repeat([0.0, 1.0], 50))
    booster = lightgbm.train(settings, data, 1)
    (threshold,) = lightgbm_cuts(booster)[0]
    assert float(low) <= threshold < float(high)
    original = onnx_from_lightgbm.convert_model(booster, tmp_path / "model.onnx")
    served = serve(tmp_path / "model.onnx")
    got = served.run({"features": rows})[0]
    np.testing.assert_allclose(got, original.run({"features": rows})[0], atol=1e-6)
    assert len(np.unique(got)) == 2
    served.close()


@pytest.mark.parametrize("threshold", [0.1, -0.1, 1 / 3, 1e300, -1e300, 1e-30, -1e-30, 0.5])
def test_a_double_threshold_becomes_the_float32_that_divides_float32_alike(threshold: float) -> None:
    below = np.float32(float32_below(threshold))
    with np.errstate(over="ignore"):
        above = np.nextafter(below, np.float32(np.inf))
    assert float(below) <= threshold
    assert threshold < float(above) or np.isinf(above)


def test_linear_leaves_are_refused_with_what_to_do(tmp_path: Path) -> None:
    (lightgbm,) = needs("lightgbm")
    rows = np.nan_to_num(table()).astype(np.float64)
    settings = {"linear_tree": True, "verbose": -1, "num_threads": 1}
    booster = lightgbm.train(settings, lightgbm.Dataset(rows, wanted(rows.astype(np.float32)), params=settings), 2)
    with pytest.raises(ConversionFailed, match="linear_tree"):
        onnx_from_lightgbm.convert_model(booster, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_lightgbm_model_whose_loss_is_the_trainers_own_answers_its_sums(tmp_path: Path) -> None:
    (lightgbm,) = needs("lightgbm")
    rows = table()

    def loss(predicted: npt.NDArray[np.float64], data: Any) -> tuple[Any, Any]:
        return predicted - data.get_label(), np.ones_like(predicted)

    settings = {"objective": loss, "verbose": -1, "num_threads": 1}
    booster = lightgbm.train(settings, lightgbm.Dataset(rows, wanted(rows)), 5)
    original = onnx_from_lightgbm.convert_model(booster, tmp_path / "model.onnx")
    held(original, tmp_path / "model.onnx", edge_rows(rows, lightgbm_cuts(booster)))


def test_the_names_of_classes_of_lightgbms_scikit_learn_interface_are_kept(tmp_path: Path) -> None:
    lightgbm, _ = needs("lightgbm", "sklearn")
    rows = np.nan_to_num(table())
    names = np.array(["cold", "mild", "hot"])[wanted(rows, 3).astype(int)]
    model = lightgbm.LGBMClassifier(n_estimators=5, num_leaves=7, n_jobs=1, verbose=-1).fit(rows, names)
    original = onnx_from_lightgbm.convert_model(model, tmp_path / "model.onnx")
    held(original, tmp_path / "model.onnx", edge_rows(rows, lightgbm_cuts(model.booster_)))
    served = serve(tmp_path / "model.onnx")
    assert [word.decode() for word in served.run({"features": rows})[0]] == model.predict(rows).tolist()
    served.close()
    assert read_metadata(tmp_path / "model.onnx").names == tuple(model.classes_)


# ---- CatBoost -------------------------------------------------------------------------------------------------------

CATBOOST = {
    "two classes": ("Classifier", {}, 2),
    "classes": ("Classifier", {}, 4),
    "classes, each by itself": ("Classifier", {"loss_function": "MultiClassOneVsAll"}, 4),
    "an estimate": ("Regressor", {}, 0),
    "a count": ("Regressor", {"loss_function": "Poisson"}, 0),
    "a quantile": ("Regressor", {"loss_function": "Quantile:alpha=0.9"}, 0),
    "missing values are the largest": ("Regressor", {"nan_mode": "Max"}, 0),
    "trees that are not symmetric": ("Regressor", {"grow_policy": "Lossguide"}, 0),
    "several outputs": ("Regressor", {"loss_function": "MultiRMSE"}, -1),
    "several outputs, not symmetric": ("Classifier", {"grow_policy": "Depthwise"}, 4),
    "several labels": ("Classifier", {"loss_function": "MultiLogloss"}, -2),
    "a rank": ("Ranker", {}, 3),
}


def catboost_trained(kind: str, settings: Mapping[str, Any], classes: int, names: Sequence[Any] = ()) -> Any:
    (catboost,) = needs("catboost")
    rows = table()
    labels: npt.NDArray[Any] = wanted(rows, max(classes, 0))
    if classes > 0:
        labels = np.array(names)[labels.astype(int)] if len(names) else labels.astype(int)
    elif classes < 0:
        labels = np.stack([labels, -labels], axis=1) if classes == -1 else np.stack([labels > 1, labels > 2], 1) * 1
    words = {"group_id": np.repeat(range(4), ROWS // 4)} if kind == "Ranker" else {}
    fixed = {"iterations": 12, "depth": 4, "verbose": 0, "thread_count": 1, "allow_writing_files": False}
    return getattr(catboost, f"CatBoost{kind}")(**fixed, random_seed=1, **settings).fit(rows, labels, **words)


def catboost_cuts(model: Any) -> dict[int, list[float]]:
    """Thresholds by feature."""
    found = {feature: list(values) for feature, values in model.get_borders().items() if len(values)}
    return {feature: [value for value in values if abs(value) < 1e30] for feature, values in found.items()}


@pytest.mark.parametrize("name", CATBOOST)
def test_a_catboost_file_answers_as_catboost_at_its_thresholds_and_without_values(name: str, tmp_path: Path) -> None:
    model = catboost_trained(*CATBOOST[name])
    model.save_model(str(tmp_path / "model.cbm"))
    original = onnx_from_catboost.convert(tmp_path / "model.cbm", tmp_path / "model.onnx", {})
    rows = edge_rows(table(), catboost_cuts(model))
    names = held(original, tmp_path / "model.onnx", rows)
    is_labelled = CATBOOST[name][2] > 0 and CATBOOST[name][0] == "Classifier"
    assert names == (["label", "probabilities"] if is_labelled else ["variable"])
    got = original.run({"features": rows})[-1]
    right = model.predict_proba(rows) if is_labelled else model.predict(rows)
    if name != "several labels":  # its wrapper answers labels alone
        np.testing.assert_allclose(got.reshape(right.shape), right, rtol=1e-6)


@pytest.mark.parametrize("names", [["cold", "mild", "hot"], [7, 2, -1], [False, True]])
def test_catboosts_classes_keep_their_names(names: Sequence[Any], tmp_path: Path) -> None:
    model = catboost_trained("Classifier", {}, len(names), names)
    original = onnx_from_catboost.convert_model(model, tmp_path / "model.onnx")
    rows = edge_rows(table(), catboost_cuts(model))
    held(original, tmp_path / "model.onnx", rows)
    served = serve(tmp_path / "model.onnx")
    label, chances = served.run({"features": rows})
    served.close()
    said = [word.decode() if isinstance(word, bytes) else word for word in label.tolist()]
    order = [str(name) if isinstance(name, str) else int(name) for name in model.classes_]
    assert set(said) == set(order)
    assert [order[place] for place in chances.argmax(axis=1)] == said
    assert read_metadata(tmp_path / "model.onnx").names == tuple(map(str, order))


def test_catboosts_label_follows_the_threshold_that_its_owner_set(tmp_path: Path) -> None:
    for names in ([], ["no", "yes"]):
        model = catboost_trained("Classifier", {}, 2, names)
        rows = edge_rows(table(), catboost_cuts(model))
        model.set_probability_threshold(0.8)
        original = onnx_from_catboost.convert_model(model, tmp_path / "model.onnx")
        held(original, tmp_path / "model.onnx", rows)
        served = serve(tmp_path / "model.onnx")
        label, _ = served.run({"features": rows})
        served.close()
        said = [word.decode() if isinstance(word, bytes) else word for word in label.tolist()]
        assert said == model.predict(rows).tolist()
        assert 0 < (model.predict_proba(rows)[:, 1] > 0.8).sum() < (model.predict_proba(rows)[:, 1] > 0.5).sum()


def test_a_catboost_model_as_json_converts_as_the_cbm(tmp_path: Path) -> None:
    model = catboost_trained("Classifier", {}, 4)
    for name, kind in (("model.cbm", "cbm"), ("model.json", "json")):
        model.save_model(str(tmp_path / name), format=kind)
    assert format_of(tmp_path / "model.json") is SourceFormat.CATBOOST
    rows = edge_rows(table(), catboost_cuts(model))
    original = onnx_from_catboost.convert(tmp_path / "model.json", tmp_path / "model.onnx", {})
    held(original, tmp_path / "model.onnx", rows)
    np.testing.assert_allclose(original.run({"features": rows})[1], model.predict_proba(rows), rtol=1e-6)


def test_catboosts_categories_are_refused_with_what_to_do(tmp_path: Path) -> None:
    (catboost,) = needs("catboost")
    rows = np.concatenate([table()[:, :2].astype(object), np.array([["red"], ["green"]] * (ROWS // 2))], axis=1)
    settings = {"iterations": 2, "verbose": 0, "thread_count": 1, "allow_writing_files": False}
    model = catboost.CatBoostRegressor(**settings).fit(rows, wanted(table()), cat_features=[2])
    with pytest.raises(ConversionFailed, match="features are categories"):
        onnx_from_catboost.convert_model(model, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


# ---- real data ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source", [SourceFormat.XGBOOST, SourceFormat.LIGHTGBM, SourceFormat.CATBOOST, SourceFormat.SKLEARN]
)
def test_trees_of_the_digits_are_as_accurate_as_their_source(source: SourceFormat, tmp_path: Path) -> None:
    model = source_of(source, tmp_path)
    data, truth = write_held_out(tmp_path, "features")
    options = ConversionOptions(
        source=str(model), target="onnx", output=str(tmp_path / "model.onnx"), data=str(data), labels=str(truth)
    )
    report = convert(options)
    assert report.is_near_enough, report.faults
    assert report.accuracy == report.source_accuracy
    assert report.accuracy is not None
    assert report.accuracy > 0.7
