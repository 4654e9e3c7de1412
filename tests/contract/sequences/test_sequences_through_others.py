"""Sequences that go on through other models: pipelines, ensembles, calls of code."""

from __future__ import annotations

import numpy as np
import pytest

from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import RunFailed, SequenceLost, TensorMismatch, Unsupported
from tests.contract.running_daemon import put_model, running_daemon
from tests.contract.sequences.test_sequences_of_clients import total, x
from tests.contract.sequences.test_stateful_models import TOML
from tests.models import onnx_models, python_models

PIPELINE = """
[[step]]
name = "first"
model = "acc"
inputs = {x = "input.x"}

[[step]]
name = "second"
model = "other"
inputs = {x = "first.total"}

[output]
total = "second.total"
"""

MAPPED = """
[[step]]
name = "each"
model = "acc"
inputs = {x = "input.x"}
map = "input.x"

[output]
total = "each.total"
"""

ENSEMBLE = """
name: "ensemble"
platform: "ensemble"
max_batch_size: 4
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "total" data_type: TYPE_FP32 dims: [ 1 ] } ]
ensemble_scheduling { step [
  { model_name: "acc" model_version: -1 input_map { key: "x" value: "IN" } output_map { key: "total" value: "sum" } },
  { model_name: "other" model_version: -1 input_map { key: "x" value: "sum" }
    output_map { key: "total" value: "total" } }
] }
"""

CALLS = """
def infer(model, inputs, context):
    step = {"sequence_id": int(inputs["id"][0, 0]), "sequence_start": bool(inputs["start"][0, 0])}
    return {"total": context.infer("acc", {"x": inputs["x"]}, parameters=step)["total"]}
"""

BLS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            asked = pb_utils.InferenceRequest(
                model_name="acc",
                requested_output_names=["total"],
                inputs=[pb_utils.Tensor("x", pb_utils.get_input_tensor_by_name(request, "x").as_numpy())],
                correlation_id=request.correlation_id(),
                flags=request.flags(),
            )
            answer = asked.exec()
            if answer.has_error():
                responses.append(pb_utils.InferenceResponse(error=answer.error()))
                continue
            sums = pb_utils.get_output_tensor_by_name(answer, "total").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("total", sums)]))
        return responses
"""

BLS_CONFIG = """
name: "bls"
backend: "python"
max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "total" data_type: TYPE_FP32 dims: [ 1 ] } ]
sequence_batching { max_sequence_idle_microseconds: 60000000 oldest { max_candidate_sequences: 4 } }
"""


def calling(folder):
    column = [-1, 1]
    inputs = [("x", "FP32", column), ("id", "INT64", column), ("start", "BOOL", column)]
    return python_models.write(folder, inputs, [("total", "FP32", column)], CALLS)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    for name in ("acc", "other"):
        put_model(models, name, onnx_models.accumulator, toml=TOML)
    put_model(models, "calls", calling, toml="[warmup]\nruns = 0\n")
    put_model(models, "alone", onnx_models.accumulator, toml=f"max_batch_rows = 1\n{TOML}")
    mapped = {"mapped": MAPPED, "mapped_alone": MAPPED.replace('"acc"', '"alone"')}
    for name, text in {"pipeline": PIPELINE, **mapped}.items():
        (models / name).mkdir()
        (models / name / "pipeline.toml").write_text(text)
    (models / "ensemble" / "1").mkdir(parents=True)
    (models / "ensemble" / "config.pbtxt").write_text(ENSEMBLE)
    (models / "bls" / "1").mkdir(parents=True)
    (models / "bls" / "1" / "model.py").write_text(BLS)
    (models / "bls" / "config.pbtxt").write_text(BLS_CONFIG)
    with running_daemon(models, tmp_path_factory.mktemp("run"), python_models=True) as daemon:
        yield daemon


@pytest.fixture
def client(daemon):
    with Client(daemon.endpoints[0]) as client:
        yield client


@pytest.mark.smoke
@pytest.mark.parametrize(("model", "name"), [("pipeline", "x"), ("ensemble", "IN")])
def test_each_step_that_keeps_state_goes_on_with_the_sequence_of_the_whole(client, model, name):
    steps = client.sequence(model)
    sent = [{name: x(value)["x"]} for value in (1, 2, 3)]
    assert [total(steps.infer(each)) for each in sent] == [1, 1 + 3, 1 + 3 + 6]
    assert total(steps.infer(sent[0], end=True)) == 1 + 3 + 6 + 7
    lost = client.sequence(model, steps.id)
    lost.infer(sent[0], end=True)
    with pytest.raises(SequenceLost):
        client.infer(model, sent[0], parameters={"sequence_id": steps.id})


def test_a_step_that_asks_a_model_with_state_more_than_once_is_refused(client):
    rows = {"x": np.ones((2, 1), np.float32)}
    with pytest.raises(TensorMismatch, match="batch-size 1"):
        client.sequence("mapped").infer(rows)
    with pytest.raises(Unsupported, match="which keeps state, 2 times for one request"):
        client.sequence("mapped_alone").infer(rows)
    assert total(client.sequence("mapped_alone").infer(x(1), end=True)) == 1


def test_a_request_of_no_sequence_is_refused_by_the_step_that_wants_one(client):
    with pytest.raises(TensorMismatch, match="must specify a non-zero or non-empty correlation ID"):
        client.infer("pipeline", x(1))


def test_code_names_the_sequence_of_what_it_calls(client):
    def ask(value, *, start=False):
        marks = {"id": np.array([[77]], np.int64), "start": np.array([[start]])}
        return total(client.infer("calls", {**x(value), **marks}))

    with pytest.raises(RunFailed, match="must specify the START flag"):
        ask(1)
    assert [ask(1, start=True), ask(2), ask(3)] == [1, 3, 6]


def test_a_python_model_of_tritons_passes_its_sequence_on(client):
    with client.sequence("bls") as steps:
        assert [total(steps.infer(x(value))) for value in (1, 2)] == [1, 3]
        assert total(steps.infer(x(3), end=True)) == 6
