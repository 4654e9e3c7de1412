"""Ordinary scikit-learn files are served as their library answers; what could run code in one is refused unread."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edge_runtime.errors import ConversionFailed
from edge_runtime.tensors import Array
from edge_runtime_converters.onnx_from_sklearn import convert
from edge_runtime_converters.original import serve
from edge_runtime_converters.skops_files import load_skops
from tests.converters.sources import needs, present

ROWS = 200

Floats = npt.NDArray[np.float32]


def numbers() -> Floats:
    random = np.random.default_rng(1)
    return random.standard_normal((400, 6)).astype(np.float32) + np.arange(6, dtype=np.float32)


def answers(rows: Floats) -> npt.NDArray[np.int64]:
    return np.digitize(rows[:, 0] - rows[:, 1] * rows[:, 2] / 4, [-1.5, -0.5]).astype(np.int64)


def estimates(rows: Floats) -> Floats:
    return (2 * rows[:, 0] + np.sin(rows[:, 1])).astype(np.float32)


def pipeline(*steps: Any) -> Any:
    (made,) = needs("sklearn.pipeline")
    return made.make_pipeline(*steps)


def of(where: str, *words: Any, **settings: Any) -> Any:
    module, _, name = where.rpartition(".")
    package = module if module.startswith(("xgboost", "lightgbm")) else f"sklearn.{module}"
    return getattr(needs(package)[0], name)(*words, **settings)


def scaler() -> Any:
    return of("preprocessing.StandardScaler")


CLASSIFIERS: dict[str, Callable[[], Any]] = {
    "logistic regression": lambda: pipeline(scaler(), of("linear_model.LogisticRegression")),
    "a forest": lambda: of("ensemble.RandomForestClassifier", 10, random_state=1),
    "gradient boosting": lambda: of("ensemble.GradientBoostingClassifier", n_estimators=5, random_state=1),
    "histogram boosting": lambda: of("ensemble.HistGradientBoostingClassifier", max_iter=5, random_state=1),
    "a network by adam": lambda: pipeline(
        scaler(), of("neural_network.MLPClassifier", hidden_layer_sizes=(8,), max_iter=20, random_state=1)
    ),
    "neighbors by a KDTree": lambda: of("neighbors.KNeighborsClassifier", algorithm="kd_tree"),
    "neighbors by a BallTree": lambda: of("neighbors.KNeighborsClassifier", algorithm="ball_tree"),
    "an SVC": lambda: of("svm.SVC", random_state=1),
    "a calibrated SVC": lambda: of("calibration.CalibratedClassifierCV", of("svm.LinearSVC", random_state=1), cv=3),
    "an imputer": lambda: pipeline(of("impute.SimpleImputer"), scaler(), of("linear_model.LogisticRegression")),
    "XGBoost in a pipeline": lambda: pipeline(scaler(), of("xgboost.XGBClassifier", n_estimators=5, n_jobs=1)),
    "LightGBM in a pipeline": lambda: pipeline(
        scaler(), of("lightgbm.LGBMClassifier", n_estimators=5, n_jobs=1, verbose=-1)
    ),
    "principal components": lambda: pipeline(of("decomposition.PCA", 3), of("linear_model.LogisticRegression")),
    "a soft vote": lambda: of(
        "ensemble.VotingClassifier",
        [("a", of("linear_model.LogisticRegression")), ("b", of("naive_bayes.GaussianNB"))], voting="soft",
    ),
    "a stack": lambda: of(
        "ensemble.StackingClassifier",
        [("a", of("ensemble.RandomForestClassifier", 3, random_state=1)),
         ("b", pipeline(scaler(), of("linear_model.LogisticRegression")))], cv=2,
    ),
    "a bag": lambda: of("ensemble.BaggingClassifier", of("tree.DecisionTreeClassifier"), 3, random_state=1),
    "a search": lambda: of(
        "model_selection.GridSearchCV", of("linear_model.LogisticRegression"), {"C": [0.1, 1]}, cv=2
    ),
    "chosen features": lambda: pipeline(
        of("feature_selection.SelectKBest", k=3), of("linear_model.LogisticRegression")
    ),
}  # fmt: skip
ESTIMATORS: dict[str, Callable[[], Any]] = {
    "a Gaussian process": lambda: of(
        "gaussian_process.GaussianProcessRegressor",
        of("gaussian_process.kernels.RBF") + of("gaussian_process.kernels.WhiteKernel"),
    ),
    "an estimate by XGBoost": lambda: pipeline(scaler(), of("xgboost.XGBRegressor", n_estimators=5, n_jobs=1)),
    "an estimate by a network": lambda: of(
        "neural_network.MLPRegressor", hidden_layer_sizes=(8,), max_iter=20, random_state=1
    ),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "clusters": lambda: of("cluster.KMeans", 3, n_init=1, random_state=1),
    "outliers": lambda: of("ensemble.IsolationForest", n_estimators=5, random_state=1),
}


def dumped(model: Any, folder: Path) -> Path:
    _, skops, _ = needs("sklearn", "skops.io", "skl2onnx")
    path = folder / "model.skops"
    skops.dump(model, path)
    return path


def served(source: Path, inputs: Mapping[str, Array]) -> list[Array]:
    """Convert a file, and run its ONNX form as a device does."""
    target = source.with_suffix(".onnx")
    original = convert(source, target, {})
    instance = serve(target)
    try:
        assert [each.name for each in instance.spec.inputs] == [*inputs]
        got = instance.run(inputs)
        for asked in (inputs, *original.made_up()[:2]):  # what the conversion is judged by
            for ours, theirs in zip(instance.run(asked), original.run(asked), strict=True):
                assert ours.shape == theirs.shape
                if ours.dtype.kind == "f":
                    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)
        return got
    finally:
        instance.close()


def words(labels: Array) -> list[Any]:
    return [each.decode() if isinstance(each, bytes) else each for each in labels.reshape(-1).tolist()]


@pytest.mark.filterwarnings("ignore:.*(Optimization|probA_|probB_|ConvergenceWarning|feature names).*")
@pytest.mark.parametrize("name", [*CLASSIFIERS, *ESTIMATORS, *OTHERS])
def test_an_ordinary_file_is_served_as_its_library_answers(name: str, tmp_path: Path) -> None:
    present(*(module for word, module in (("XGBoost", "xgboost"), ("LightGBM", "lightgbm")) if word in name))
    needs("sklearn", "skops.io", "skl2onnx")
    rows = numbers()
    if name in ESTIMATORS:
        model = ESTIMATORS[name]().fit(rows[:ROWS], estimates(rows[:ROWS]))
        (got,) = served(dumped(model, tmp_path), {"features": rows[:ROWS]})
        np.testing.assert_allclose(got.reshape(-1), model.predict(rows[:ROWS]), rtol=1e-4, atol=1e-4)
        return
    model = {**CLASSIFIERS, **OTHERS}[name]().fit(rows, answers(rows))
    label, scores = served(dumped(model, tmp_path), {"features": rows[:ROWS]})
    assert words(label) == model.predict(rows[:ROWS]).tolist()
    by = next(each for each in ("predict_proba", "decision_function", "transform") if hasattr(model, each))
    right = np.asarray(getattr(model, by)(rows[:ROWS]))
    np.testing.assert_allclose(scores.reshape(right.shape), right, rtol=1e-4, atol=1e-4)


def table() -> Any:
    (pandas,) = needs("pandas")
    rows = numbers()
    return pandas.DataFrame({
        "age": (rows[:, 0] * 10 + 40).astype(np.float32),
        "monthly income": rows[:, 1] * 1000,
        "city": np.array(["Rome", "Oslo", "Lima"])[answers(rows)],
        "notes": ["never read"] * len(rows),
        "label": np.array(["a", "b"])[(rows[:, 3] > 3).astype(int)],
    })  # fmt: skip


def by_column(frame: Any, names: list[str]) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for name in names:
        values = frame[name]
        is_text = name in ("city", "label")
        held = np.array([each.encode() for each in values], object) if is_text else values.to_numpy(np.float32)
        found[name] = held.reshape(-1, 1)
    return found


@pytest.mark.parametrize("chosen", ["by name", "by selector", "with the rest"])
def test_a_transformer_of_named_columns_takes_one_input_a_column(chosen: str, tmp_path: Path) -> None:
    compose, preprocessing, impute, _ = needs("sklearn.compose", "sklearn.preprocessing", "sklearn.impute", "skl2onnx")
    frame, target = table(), np.array(["cold", "mild", "hot"])[answers(numbers())]
    frame.loc[::7, "age"] = np.nan
    fill, code = pipeline(impute.SimpleImputer(), scaler()), preprocessing.OneHotEncoder(handle_unknown="ignore")
    if chosen == "by name":
        parts = [(fill, ["age", "monthly income"]), (code, ["city", "label"])]
        first = compose.make_column_transformer(*parts)
    elif chosen == "by selector":
        frame = frame.drop(columns="notes")
        select = compose.make_column_selector
        parts = [(code, select(dtype_exclude=np.number)), (fill, select(dtype_include=np.number))]
        first = compose.make_column_transformer(*parts)
    else:
        frame = frame.drop(columns="notes")
        codes = preprocessing.OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
        parts = [(codes, ["city", "label"]), (impute.SimpleImputer(), ["age"])]
        first = compose.make_column_transformer(*parts, remainder="passthrough")
    last = "linear_model.LogisticRegression" if chosen != "with the rest" else "ensemble.RandomForestClassifier"
    model = pipeline(first, of(last)).fit(frame, target)
    asked = frame[:ROWS]
    inputs = by_column(asked, ["age", "monthly income", "city", "label"])
    inputs["label_column"] = inputs.pop("label")  # one of the outputs is called so
    label, chances = served(dumped(model, tmp_path), inputs)
    assert words(label) == model.predict(asked).tolist()
    np.testing.assert_allclose(chances, model.predict_proba(asked), rtol=1e-3, atol=1e-4)
    inputs["city"] = np.array([[b"Atlantis"]] * ROWS, object)
    elsewhere = asked.assign(city="Atlantis")
    _, chances = served(dumped(model, tmp_path), inputs)
    np.testing.assert_allclose(chances, model.predict_proba(elsewhere), rtol=1e-3, atol=1e-4)


def test_categories_without_names_are_one_input_of_text(tmp_path: Path) -> None:
    (preprocessing,) = needs("sklearn.preprocessing")
    held = table()[["city", "label"]].to_numpy(object)
    model = pipeline(preprocessing.OneHotEncoder(), of("linear_model.LogisticRegression")).fit(held, answers(numbers()))
    inputs = {"features": np.array([[word.encode() for word in row] for row in held[:ROWS]], object)}
    label, chances = served(dumped(model, tmp_path), inputs)
    assert words(label) == model.predict(held[:ROWS]).tolist()
    np.testing.assert_allclose(chances, model.predict_proba(held[:ROWS]), atol=1e-4)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: pipeline(of("preprocessing.FunctionTransformer", np.abs), of("linear_model.LinearRegression")),
         "FunctionTransformer is not supported"),
        (lambda: of("gaussian_process.GaussianProcessClassifier"), "solves equations"),
        (lambda: of("compose.TransformedTargetRegressor", of("linear_model.LinearRegression")), "TransformedTarget"),
    ],
)  # fmt: skip
def test_a_model_that_onnx_cannot_express_is_refused_with_a_way_out(
    make: Callable[[], Any], match: str, tmp_path: Path
) -> None:
    needs("sklearn", "skl2onnx")
    rows = numbers()[:60]
    source = dumped(make().fit(rows, answers(rows) > 1), tmp_path)
    with pytest.raises(ConversionFailed, match=rf"(?s)({match}.*)?model\.py.*") as caught:
        convert(source, tmp_path / "model.onnx", {})
    assert match in str(caught.value)
    assert not (tmp_path / "model.onnx").exists()


# ---- hostile files --------------------------------------------------------------------------------------------------


def text(value: object) -> dict[str, Any]:
    return {"__class__": "str", "__module__": "builtins", "__loader__": "JsonNode", "content": json.dumps(value)}


def node(loader: str, name: str, **words: Any) -> dict[str, Any]:
    module, _, kind = name.rpartition(".")
    return {"__loader__": loader, "__module__": module, "__class__": kind, **words}


def listed(*values: Any, kind: str = "list") -> dict[str, Any]:
    return node("ListNode" if kind == "list" else "TupleNode", f"builtins.{kind}", content=list(values))


def attributes(**values: Any) -> dict[str, Any]:
    return node(
        "DictNode", "builtins.dict", content=values,
        key_types=listed(*(node("TypeNode", "builtins.str") for _ in values)),
    )  # fmt: skip


def hostile(folder: Path, planted: dict[str, Any], protocol: int = 2) -> Path:
    """A sound scaler's file with something else beside its attributes."""
    rows = numbers()
    path = dumped(scaler().fit(rows), folder)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    schema = json.loads(members["schema.json"]) | {"protocol": protocol}
    schema["content"]["content"]["planted"] = planted
    schema["content"]["key_types"]["content"].append(node("TypeNode", "builtins.str"))
    members["schema.json"] = json.dumps(schema).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


BOOSTER = "xgboost.core.Booster"
ESTIMATOR = "sklearn.calibration._SigmoidCalibration"
NEVER = {
    "a function": node("FunctionNode", "os.system"),
    "a function of numpy": node("FunctionNode", "numpy.load"),
    "a built-in": node("TypeNode", "builtins.eval"),
    "a method": node("MethodNode", ESTIMATOR, content={"func": "predict", "obj": node("ObjectNode", ESTIMATOR)}),
    "an operator": node("OperatorFuncNode", "operator.methodcaller", attrs=listed(text("x"), kind="tuple")),
    "a partial call": node(
        "PartialNode", "functools.partial",
        content={"func": node("FunctionNode", "os.system"), "args": listed(text("id"), kind="tuple"),
                 "kwds": attributes(), "namespace": attributes()},
    ),
    "a class that removes a folder at its end": node(
        "ObjectNode", "numpy.lib._datasource.DataSource",
        content=attributes(_istmpdest=text(value=True), _destpath=text("canary")),
    ),
    "a class that is called": node(
        "ConstructorFromReduceNode", "sklearn.utils._bunch.Bunch", content=listed(kind="tuple")
    ),
    "an estimator that is called": node(
        "ConstructorFromReduceNode", ESTIMATOR, content=listed(kind="tuple")
    ),
    "an estimator's class as a value": node("TypeNode", ESTIMATOR),
    "a name that is sound once and called once": listed(
        node("ObjectNode", ESTIMATOR), node("LossNode", ESTIMATOR, content=attributes(),
                                            __reduce__={"args": listed(text("x"), kind="tuple")})
    ),
    "a name that is sound once, and a function in the first skops": listed(
        node("ObjectNode", ESTIMATOR),
        node("FunctionNode", "builtins.str",
             content={"module_path": "sklearn.calibration", "function": "_SigmoidCalibration"}),
    ),
    "a dictionary's class that is called with keys": listed(
        node("DictNode", "numpy.memmap", content={"canary": text(1)},
             key_types=listed(node("TypeNode", "builtins.str"))),
    ),
    "a module that is not there yet": node("ObjectNode", "sklearn.datasets._openml.OpenMLError"),
    "somebody's own class": node("ObjectNode", "tests.converters.sources.Own"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEVER)
def test_a_file_that_could_run_code_is_refused_and_nothing_of_it_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "canary").mkdir()
    source = hostile(tmp_path, NEVER[name], protocol=0 if "first skops" in name else 2)
    with pytest.raises(ConversionFailed, match=r"which could run code; nothing was loaded|skops cannot read it"):
        load_skops(source)
    assert (tmp_path / "canary").is_dir()


def test_a_part_that_only_training_needs_is_left_out_unread(tmp_path: Path) -> None:
    model = CLASSIFIERS["neighbors by a KDTree"]().fit(numbers(), answers(numbers()))
    source = dumped(model, tmp_path)
    assert model._tree is not None
    restored = load_skops(source)
    assert restored._tree is None
    np.testing.assert_allclose(restored.predict_proba(numbers()), model.predict_proba(numbers()))


def test_a_histogram_tree_that_leads_out_of_itself_is_refused(tmp_path: Path) -> None:
    rows = numbers()
    model = CLASSIFIERS["histogram boosting"]().fit(rows, answers(rows))
    model._predictors[0][0].nodes["left"][0] = 1 << 30
    with pytest.raises(ConversionFailed, match="leads out of itself"):
        load_skops(dumped(model, tmp_path))
    model._predictors[0][0].nodes["left"][0] = 1
    model._predictors[0][0].nodes["feature_idx"][0] = 6
    with pytest.raises(ConversionFailed, match="leads out of itself"):
        load_skops(dumped(model, tmp_path))
