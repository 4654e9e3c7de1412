"""CatBoost's files with categories and text are served as they are and answer alike; hostile ones harm nobody."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edge_runtime.backends.base import Instance, LoadOptions
from edge_runtime.backends.registry import backend
from edge_runtime.config.settings import Config
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.errors import BackendUnavailable, EdgeRuntimeError, LoadFailed, RunFailed, TensorMismatch
from edge_runtime.models import kinds
from edge_runtime.models.kinds import kind_of
from edge_runtime.tensors import Array
from edge_runtime_converters.importing.artifacts import artifact_pieces
from edge_runtime_converters.importing.source_folder import SourceFolder
from tests.converters.sources import needs
from tests.models import onnx_models
from tests.models.mutated_files import mutated

ROWS = 240

Table = dict[str, npt.NDArray[Any]]

WORDS = ("good", "bad", "fine", "awful", "great")


def table(seed: int = 0) -> Table:
    """Columns of numbers, of two sorts of categories, one of many values, and of text."""
    chance = np.random.default_rng(seed)
    return {
        "age": chance.normal(40, 10, ROWS).astype(np.float32),
        "city": chance.choice(np.array(["Rome", "Oslo", "Lima", "Tromsø"], object), ROWS),
        "code": chance.integers(0, 40, ROWS),
        "label": chance.normal(0, 1, ROWS).astype(np.float32),
        "said": np.array([" ".join(chance.choice(WORDS, 6)) for _ in range(ROWS)], object),
    }


def truth(columns: Table) -> npt.NDArray[np.float64]:
    good: npt.NDArray[np.float64] = np.array([text.count("good") for text in columns["said"]], float)
    found: npt.NDArray[np.float64] = columns["age"] / 10 + 3 * (columns["city"] == "Oslo") + columns["code"] % 7 + good
    return found


def frame(columns: Mapping[str, npt.NDArray[Any]]) -> Any:
    (pandas,) = needs("pandas")
    return pandas.DataFrame(dict(columns))


def trained(kind: str, columns: Table, answers: Any, **settings: Any) -> Any:
    (catboost,) = needs("catboost")
    fixed = {"iterations": 12, "depth": 4, "verbose": 0, "thread_count": 1, "allow_writing_files": False}
    model = getattr(catboost, f"CatBoost{kind}")(**fixed, random_seed=1, **settings)
    return model.fit(
        frame(columns), answers,
        cat_features=[name for name in ("city", "code") if name in columns],
        text_features=[name for name in ("said",) if name in columns],
    )  # fmt: skip


def without(columns: Table, *names: str) -> Table:
    return {name: values for name, values in columns.items() if name not in names}


def asked(columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, Array]:
    """A request's inputs: words as bytes, and the column that is called as an output under its other name."""
    found: dict[str, Array] = {}
    for name, values in columns.items():
        is_number = values.dtype == np.float32
        held = values if is_number else np.array([str(each).encode() for each in values], object)
        found["label_column" if name == "label" else name] = held.reshape(-1, 1)
    return found


def words(labels: Array) -> list[Any]:
    return [each.decode() if isinstance(each, bytes) else each for each in labels.tolist()]


def loaded(path: Path, **options: Any) -> Instance:
    return backend("catboost").load(path, LoadOptions(**options))


def steps(columns: Table) -> npt.NDArray[np.int64]:
    return np.digitize(truth(columns), [6, 9])


MODELS = {
    "two classes": ("Classifier", lambda columns: truth(columns) > 8, {}),
    "classes by name": ("Classifier", lambda columns: np.array(["low", "mid", "high"])[steps(columns)], {}),
    "classes by number": ("Classifier", lambda columns: np.array([7, 2, -1])[steps(columns)], {}),
    "classes, each by itself": ("Classifier", steps, {"loss_function": "MultiClassOneVsAll"}),
    "an estimate": ("Regressor", truth, {}),
    "a count": ("Regressor", lambda columns: truth(columns).round(), {"loss_function": "Poisson"}),
    "quantiles": ("Regressor", truth, {"loss_function": "MultiQuantile:alpha=0.1,0.9"}),
    "trees that are not symmetric": ("Classifier", steps, {"grow_policy": "Lossguide"}),
    "many values as one": ("Regressor", truth, {"one_hot_max_size": 100}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_file_with_categories_and_text_answers_as_its_library(name: str, tmp_path: Path) -> None:
    kind, answers, settings = MODELS[name]
    columns = table()
    columns["age"][::9] = np.nan
    if name == "trees that are not symmetric":
        columns.pop("said")
        made_up = {**table(), "said": np.array([""] * ROWS, object)}
        model = trained(kind, columns, answers(made_up), **settings)
    else:
        model = trained(kind, columns, answers(table()), **settings)
    model.save_model(str(tmp_path / "model.cbm"))
    assert kind_of(tmp_path / "model.cbm") is kinds.CATBOOST_WORDS
    instance = loaded(tmp_path / "model.cbm")
    assert [(each.name, each.datatype, each.shape) for each in instance.spec.inputs] == [
        ("age", "FP32", (-1, 1)), ("city", "BYTES", (-1, 1)), ("code", "BYTES", (-1, 1)),
        ("label_column" if kind == "Classifier" else "label", "FP32", (-1, 1)), ("said", "BYTES", (-1, 1)),
    ][: len(columns)]  # fmt: skip
    assert instance.spec.may_batch
    new = {name: values for name, values in table(1).items() if name in columns}
    new["city"][:5] = "Atlantis"  # which training never saw
    inputs = asked(new)
    if kind != "Classifier":
        inputs["label"] = inputs.pop("label_column")
    found = instance.run(inputs)
    for spec, array in zip(instance.spec.outputs, found, strict=True):
        assert spec.fits(array.shape), spec
    if kind == "Classifier":
        assert [each.name for each in instance.spec.outputs] == ["label", "probabilities"]
        assert words(found[0]) == model.predict(frame(new)).reshape(-1).tolist()
        np.testing.assert_allclose(found[1], model.predict_proba(frame(new)), rtol=1e-6, atol=1e-7)
    else:
        assert [each.name for each in instance.spec.outputs] == ["variable"]
        np.testing.assert_allclose(found[0], model.predict(frame(new)).reshape(ROWS, -1), rtol=1e-6)
    rows = np.arange(3)
    for one, whole in zip(instance.run({name: each[rows] for name, each in inputs.items()}), found, strict=True):
        np.testing.assert_array_equal(one, whole[rows])
    instance.close()
    with pytest.raises(RunFailed, match="closed"):
        instance.run(inputs)


def test_a_label_follows_the_threshold_that_its_owner_set(tmp_path: Path) -> None:
    columns = without(table(), "said")
    model = trained("Classifier", columns, table()["code"] % 7 > 3)
    chances = model.predict_proba(frame(columns))[:, 1]
    model.set_probability_threshold(float(np.median(chances)))
    model.save_model(str(tmp_path / "model.cbm"))
    (label, _) = loaded(tmp_path / "model.cbm").run(asked(columns))
    assert 0.2 < label.mean() < 0.8
    assert label.astype(bool).tolist() == [str(each) == "True" for each in model.predict(frame(columns))]


@pytest.mark.parametrize("names", [["1"], ["0", "1"]])
def test_columns_without_names_are_x0_and_so_on_or_features_where_all_are_words(
    names: Sequence[str], tmp_path: Path
) -> None:
    (catboost,) = needs("catboost")
    columns = table()
    rows = [[float(columns["age"][row]) if len(names) == 1 else str(columns["code"][row]), columns["city"][row]]
            for row in range(ROWS)]  # fmt: skip
    model = catboost.CatBoostRegressor(iterations=3, verbose=0, thread_count=1, allow_writing_files=False)
    model.fit(rows, truth(columns), cat_features=[int(each) for each in names]).save_model(str(tmp_path / "model.cbm"))
    instance = loaded(tmp_path / "model.cbm")
    city = np.array([[each.encode()] for each in columns["city"]], object)
    if len(names) == 1:
        inputs = {"x0": columns["age"].reshape(-1, 1), "x1": city}
    else:
        code = np.array([[str(each).encode()] for each in columns["code"]], object)
        inputs = {"features": np.concatenate([code, city], axis=1)}
        assert instance.spec.inputs[0].shape == (-1, 2)
    assert [each.name for each in instance.spec.inputs] == [*inputs]
    np.testing.assert_allclose(instance.run(inputs)[0][:, 0], model.predict(rows), rtol=1e-6)


@pytest.mark.parametrize("most", [1, 255])
def test_a_model_as_json_is_recognised_by_its_content_and_answers_as_the_cbm(most: int, tmp_path: Path) -> None:
    (catboost,) = needs("catboost")
    columns = without(table(), "said")
    model = trained("Classifier", columns, steps(table()), one_hot_max_size=most)
    pool = catboost.Pool(frame(columns), steps(table()), cat_features=["city", "code"])
    model.save_model(str(tmp_path / "churn.json"), format="json", pool=pool)
    assert kind_of(tmp_path / "churn.json") is kinds.CATBOOST_WORDS
    _, found = loaded(tmp_path / "churn.json").run(asked(columns))
    np.testing.assert_allclose(found, model.predict_proba(frame(columns)), atol=1e-7)


def test_runs_from_several_threads_keep_their_answers(tmp_path: Path) -> None:
    model = trained("Regressor", table(), truth(table()))
    model.save_model(str(tmp_path / "model.cbm"))
    instance = loaded(tmp_path / "model.cbm", concurrency=3, threads=2)
    assert instance.concurrency == 3
    wrong: list[int] = []

    def many(seed: int) -> None:
        columns = table(seed)
        inputs = asked(columns)
        inputs["label"] = inputs.pop("label_column")
        right = model.predict(frame(columns))
        for _ in range(20):
            if not np.allclose(instance.run(inputs)[0][:, 0], right, rtol=1e-6):
                wrong.append(seed)

    threads = [threading.Thread(target=many, args=(seed,)) for seed in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []


def test_inputs_of_other_shapes_fail_and_leave_the_instance_usable(tmp_path: Path) -> None:
    columns = without(table(), "said", "label")
    trained("Regressor", columns, truth(table())).save_model(str(tmp_path / "model.cbm"))
    instance = loaded(tmp_path / "model.cbm")
    good = asked(columns)
    for wrong in ({**good, "age": good["age"][:1]}, {**good, "age": np.zeros((ROWS, 2), np.float32)}):
        with pytest.raises(RunFailed, match="wanted"):
            instance.run(wrong)
    assert instance.run(good)[0].shape == (ROWS, 1)
    assert instance.run({**good, "city": np.array([[b"\xff\x00"]] * ROWS, object)})[0].shape == (ROWS, 1)


def test_embeddings_are_refused_with_what_to_do(tmp_path: Path) -> None:
    (catboost,) = needs("catboost")
    chance = np.random.default_rng(0)
    rows = frame({"age": table()["age"], "face": [chance.normal(size=3).tolist() for _ in range(ROWS)]})
    settings = {"iterations": 3, "verbose": 0, "thread_count": 1, "allow_writing_files": False}
    model = catboost.CatBoostClassifier(**settings).fit(rows, table()["age"] > 40, embedding_features=["face"])
    model.save_model(str(tmp_path / "model.cbm"))
    assert kind_of(tmp_path / "model.cbm") is kinds.CATBOOST_WORDS
    with pytest.raises(LoadFailed, match=r"features face are embeddings.*model\.py"):
        loaded(tmp_path / "model.cbm")


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"extra": {"a": "b"}}, LoadFailed, "no option 'a'"),
        ({"device": "CUDA"}, BackendUnavailable, "run on the CPU"),
        ({"precision": "bf16"}, BackendUnavailable, "leave precision out"),
        ({"precision": "int8"}, LoadFailed, "leave it out"),
    ],
)
def test_an_option_that_the_library_does_not_have_is_refused(
    options: dict[str, Any], error: type[EdgeRuntimeError], match: str, tmp_path: Path
) -> None:
    needs("catboost")
    (tmp_path / "model.cbm").write_bytes(b"CBM1")
    with pytest.raises(error, match=match):
        loaded(tmp_path / "model.cbm", **options)


def test_a_loss_that_nothing_is_known_of_is_refused(tmp_path: Path) -> None:
    columns = without(table(), "said")
    model = trained("Regressor", columns, truth(table()), loss_function="RMSEWithUncertainty")
    model.save_model(str(tmp_path / "model.cbm"))
    with pytest.raises(LoadFailed, match=r"loss 'RMSEWithUncertainty'.*is not known; known: CrossEntropy, "):
        loaded(tmp_path / "model.cbm")


@pytest.mark.parametrize(("name", "place"), [("model.cb", "1/model.cbm"), ("model.json", "1/model.json")])
def test_an_import_copies_such_a_file_as_it_is(name: str, place: str, tmp_path: Path) -> None:
    (catboost,) = needs("catboost")
    columns = without(table(), "said")
    pool = catboost.Pool(frame(columns), truth(table()), cat_features=["city", "code"])
    kind = "json" if name.endswith("json") else "cbm"
    trained("Regressor", columns, truth(table())).save_model(str(tmp_path / name), format=kind, pool=pool)
    (piece,) = artifact_pieces(SourceFolder(tmp_path, tmp_path), tmp_path / name)
    assert (piece.place, piece.target) == (place, "")


# ---- in a daemon ----------------------------------------------------------------------------------------------------


def runtime(tmp_path: Path) -> Runtime:
    config = Config(state=str(tmp_path / "state"), watch=False, calibrate=False)
    return Runtime(tmp_path / "models", config=config)


def test_a_dropped_file_is_served_in_a_host_and_wrong_kinds_are_refused(tmp_path: Path) -> None:
    columns = table()
    model = trained("Classifier", columns, np.array(["low", "mid", "high"])[steps(columns)])
    (tmp_path / "models").mkdir()
    model.save_model(str(tmp_path / "models" / "churn.cbm"))
    with runtime(tmp_path) as serving:
        (told,) = serving.models()
        assert (told["state"], told["backend"], told["device"]) == ("ready", "catboost", "CPU"), told
        assert told["host"]["pid"]
        inputs = asked(columns)
        found = dict(serving.infer("churn", inputs).outputs)
        assert words(found["label"]) == model.predict(frame(columns)).reshape(-1).tolist()
        np.testing.assert_allclose(found["probabilities"], model.predict_proba(frame(columns)), rtol=1e-6, atol=1e-7)
        for wrong in (
            {**inputs, "city": np.zeros((ROWS, 1), np.float32)},
            {**inputs, "age": inputs["city"]},
            {**inputs, "age": inputs["age"].astype(np.float64)},
            {**inputs, "city": inputs["city"][:1]},
            {**inputs, "city": np.concatenate([inputs["city"]] * 2, axis=1)},
            without(inputs, "said"),
        ):
            with pytest.raises(TensorMismatch):
                serving.infer("churn", wrong)
        assert serving.models()[0]["host"]["restarts"] == 0


def test_a_model_of_numbers_is_converted_though_the_library_could_serve_it(tmp_path: Path) -> None:
    columns = without(table(), "said", "city", "code")
    place = tmp_path / "models" / "m" / "1" / "churn.cbm"
    place.parent.mkdir(parents=True)
    trained("Regressor", columns, truth(table())).save_model(str(place))
    with runtime(tmp_path) as serving:
        (told,) = serving.models()
        assert told["state"] == "converting", told


def test_damaged_files_end_as_failed_or_serve_and_harm_no_neighbour(tmp_path: Path) -> None:
    chance = random.Random(4)
    columns = table()
    trained("Classifier", columns, steps(columns)).save_model(str(tmp_path / "sound.cbm"))
    sound = (tmp_path / "sound.cbm").read_bytes()
    damaged = [mutated(sound, chance) for _ in range(12)]
    damaged += [sound[: len(sound) * share // 10] for share in (1, 5, 9)]
    core = int.from_bytes(sound[4:8], "little")
    statistics = bytearray(sound)
    for at in range(8 + core, len(sound) - 8, 8):
        statistics[at : at + 8] = b"\xff" * 7 + b"\x0f"  # counts and lengths beyond every memory
    damaged.append(bytes(statistics))
    damaged.append(sound[:200] + chance.randbytes(len(sound)))
    for number, content in enumerate(damaged):
        place = tmp_path / "models" / f"m{number}" / "1" / "model.cbm"
        place.parent.mkdir(parents=True)
        place.write_bytes(content)
        (place.parents[1] / "model.toml").write_text('convert = "never"\n')
    onnx_models.mlp(tmp_path / "models" / "good" / "1")
    with runtime(tmp_path) as serving:
        told = {each["name"]: each for each in serving.models()}
        assert {each["state"] for each in told.values()} <= {"ready", "failed"}
        assert all(each["reason"] for each in told.values() if each["state"] == "failed")
        assert "failed" in {each["state"] for each in told.values()}
        for name in (name for name, each in told.items() if each["state"] == "ready" and name != "good"):
            with contextlib.suppress(EdgeRuntimeError):
                serving.infer(name, asked(columns))
        x = np.ones((2, 16), np.float32)
        assert serving.infer("good", {"x": x})["y"].shape == (2, 4)
