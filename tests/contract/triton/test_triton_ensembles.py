"""Ensembles of a Triton repository, asked by Triton's clients, and refused in Triton's words where they do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from edge_runtime.doors.http.settings import HttpSettings
from tests.contract.running_daemon import floats, http_url, put_model, running_daemon
from tests.models import onnx_models

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:gevent")

ADDED = """
backend: "onnxruntime"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""

CHAIN = """
name: "chain"
platform: "ensemble"
max_batch_size: 8
input [ { name: "RAW" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [
  { name: "LEFT" data_type: TYPE_FP32 dims: [ 2 ] },
  { name: "RIGHT" data_type: TYPE_FP32 dims: [ 2 ] }
]
ensemble_scheduling {
  step [
    {
      model_name: "one"
      model_version: -1
      input_map { key: "x" value: "RAW" }
      output_map { key: "y" value: "prepared" }
    },
    {
      model_name: "ten"
      model_version: -1
      input_map { key: "x" value: "prepared" }
      output_map { key: "y" value: "LEFT" }
    },
    {
      model_name: "one"
      model_version: 1
      input_map { key: "x" value: "prepared" }
      output_map { key: "y" value: "RIGHT" }
    }
  ]
}
"""
"""As Triton's page on ensembles has it: one step feeds two."""


def ensemble(step: str, *, rows: int = 8, given: str = "FP32", dims: str = "2") -> str:
    return (
        f'platform: "ensemble" max_batch_size: {rows} input [{{name: "RAW" data_type: TYPE_{given} dims: [{dims}]}}] '
        f'output [{{name: "OUT" data_type: TYPE_FP32 dims: [2]}}] ensemble_scheduling {{ step [{{ {step} }}] }}'
    )


def step(given: str = "x", written: str = "y", model: str = "one") -> str:
    maps = f'input_map {{key: "{given}" value: "RAW"}} output_map {{key: "{written}" value: "OUT"}}'
    return f'model_name: "{model}" model_version: -1 {maps}'


REFUSED = {
    "too_many_rows": (
        ensemble(step(), rows=16),
        ("ensemble too_many_rows allows maximum batch size 16, but it contains model one which only allows maximum "
        "batch size to be 8"),
    ),
    "no_such_input": (
        ensemble(step(given="z")),
        "in ensemble no_such_input, ensemble tensor RAW is mapping to non-existing input z in model one",
    ),
    "no_such_output": (
        ensemble(step(written="z")),
        "in ensemble no_such_output, ensemble tensor OUT is mapped from non-existing output z in model one",
    ),
    "other_type": (
        ensemble(step(), given="INT32"),
        ("in ensemble other_type, ensemble tensor RAW: inconsistent data type: TYPE_INT32 is inferred from model "
        "other_type while TYPE_FP32 is inferred from model one"),
    ),
    "other_shape": (
        ensemble(step(), dims="3"),
        ("in ensemble other_shape, ensemble tensor RAW: inconsistent shape: [-1,3] is inferred from model other_shape "
        "while [-1,2] is inferred from model one"),
    ),
    "missing": (ensemble(step(model="nobody")), "there is no model 'nobody'"),
}  # fmt: skip


LABELLED = {
    "labelled": ensemble(step(model="words")).replace("output [{", 'output [{label_filename: "labels.txt" '),
    "labelled_by_step": ensemble(step(model="words")),
}


@pytest.fixture(scope="module")
def client(tmp_path_factory) -> Iterator[triton.InferenceServerClient]:
    models: Path = tmp_path_factory.mktemp("models")
    for name, constant in (("one", 1.0), ("ten", 10.0)):
        put_model(models, name, onnx_models.added, constant=constant)
        (models / name / "config.pbtxt").write_text(ADDED)
    put_model(models, "rowless", onnx_models.added, constant=100.0)
    (models / "rowless" / "config.pbtxt").write_text(
        ADDED.replace("max_batch_size: 8", "max_batch_size: 0").replace("dims: [ 2 ]", "dims: [ -1, 2 ]")
    )
    for name, text in {"chain": CHAIN, **{name: text for name, (text, _) in REFUSED.items()}}.items():
        (models / name / "1").mkdir(parents=True)
        (models / name / "config.pbtxt").write_text(text)
    for name, text in LABELLED.items():
        (models / name / "1").mkdir(parents=True)
        (models / name / "config.pbtxt").write_text(text)
    put_model(models, "words", onnx_models.added, constant=0.0)
    (models / "words" / "config.pbtxt").write_text(
        ADDED.replace('name: "y" data_type: TYPE_FP32', 'name: "y" data_type: TYPE_FP32 label_filename: "words.txt"')
    )
    (models / "words" / "words.txt").write_text("of the step\nof the step, too\n")
    (models / "labelled" / "labels.txt").write_text("a\nb\n")
    (models / "bare").mkdir()  # a clone by git has no empty folder
    (models / "bare" / "config.pbtxt").write_text(ensemble(step(model="rowless")))
    http = HttpSettings(endpoint="127.0.0.1:0", control=True)
    with (
        running_daemon(models, tmp_path_factory.mktemp("run"), calibrate=False, http=http) as daemon,
        triton.InferenceServerClient(http_url(daemon).removeprefix("http://")) as client,
    ):
        assert client.is_server_live()  # which connects, before a test could leave a socket behind
        yield client


def ask(client, model, array, *outputs):
    given = triton.InferInput("RAW", list(array.shape), "FP32")
    given.set_data_from_numpy(array)
    result = client.infer(model, [given], outputs=[triton.InferRequestedOutput(each) for each in outputs])
    return [result.as_numpy(each) for each in outputs]


def reason(client, model: str) -> str:
    return next(each.get("reason", "") for each in client.get_model_repository_index() if each["name"] == model)


@pytest.mark.smoke
def test_an_ensemble_answers_as_its_steps_one_after_another(client):
    x = floats(3, 2)
    left, right = ask(client, "chain", x, "LEFT", "RIGHT")
    np.testing.assert_array_equal(left, x + 1 + 10)
    np.testing.assert_array_equal(right, x + 1 + 1)
    (alone,) = ask(client, "chain", x, "RIGHT")
    np.testing.assert_array_equal(alone, right)


def test_an_ensemble_is_reported_as_triton_reports_it(client):
    metadata = client.get_model_metadata("chain")
    assert metadata["platform"] == "ensemble"
    assert metadata["versions"] == ["1"]
    assert metadata["inputs"] == [{"name": "RAW", "datatype": "FP32", "shape": [-1, 2]}]
    assert [each["name"] for each in metadata["outputs"]] == ["LEFT", "RIGHT"]
    config = client.get_model_config("chain")
    assert (config["platform"], config["backend"], config["max_batch_size"]) == ("ensemble", "", 8)
    steps = config["ensemble_scheduling"]["step"]
    assert [(each["model_name"], each["model_version"]) for each in steps] == [("one", -1), ("ten", -1), ("one", 1)]
    assert steps[0]["input_map"] == {"x": "RAW"}
    assert config["instance_group"] == []
    assert "optimization" not in config


def test_an_ensemble_and_each_step_count_for_themselves(client):
    before = {name: counted(client, name) for name in ("chain", "one", "ten")}
    ask(client, "chain", floats(2, 2), "LEFT", "RIGHT")
    after = {name: counted(client, name) for name in ("chain", "one", "ten")}
    assert {name: after[name] - before[name] for name in after} == {"chain": 2, "one": 4, "ten": 2}


def counted(client, model: str) -> int:
    (told,) = client.get_inference_statistics(model)["model_stats"]
    return told["inference_count"]


def test_more_rows_than_an_ensemble_allows_are_refused(client):
    with pytest.raises(InferenceServerException, match="inference request batch-size must be <= 8 for 'chain'"):
        ask(client, "chain", floats(9, 2), "LEFT")


def test_an_ensemble_that_batches_may_have_a_step_that_does_not(client):
    x = floats(3, 2)
    np.testing.assert_array_equal(ask(client, "bare", x, "OUT")[0], x + 100)


@pytest.mark.parametrize("model", REFUSED)
def test_an_ensemble_that_does_not_fit_is_refused_in_tritons_words(client, model):
    assert REFUSED[model][1] in reason(client, model)
    assert not client.is_model_ready(model)


def test_an_ensembles_load_brings_its_steps(client):
    client.unload_model("chain")
    assert not client.is_model_ready("chain")
    client.load_model("chain")
    assert client.is_model_ready("chain")
    assert client.is_model_ready("ten")


@pytest.mark.parametrize(
    ("model", "labels"), [("labelled", ["b", "a"]), ("labelled_by_step", ["of the step, too", "of the step"])]
)
def test_classes_of_an_ensemble_have_its_own_labels_else_those_of_its_step(client, model, labels):
    x = np.array([[0.25, 0.5]], np.float32)
    given = triton.InferInput("RAW", [1, 2], "FP32")
    given.set_data_from_numpy(x)
    answer = client.infer(model, [given], outputs=[triton.InferRequestedOutput("OUT", class_count=2)])
    assert answer.as_numpy("OUT").tolist() == [[f"0.500000:1:{labels[0]}".encode(), f"0.250000:0:{labels[1]}".encode()]]
