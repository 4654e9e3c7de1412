"""A Triton repository served as it stands, asked by Triton's own clients: configs in the forms of its documentation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from tests.contract.running_daemon import floats, grpc_url, http_url, put_model, running_daemon
from tests.models import onnx_models, triton_repository

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:gevent")

MLP = """
platform: "%s"
max_batch_size: 8
input [
  {
    name: "%s"
    data_type: TYPE_FP32
    dims: [ 16 ]
  }
]
output [
  {
    name: "%s"
    data_type: TYPE_FP32
    dims: [ 4 ]
    label_filename: "labels.txt"
  }
]
"""

FULL = (
    MLP % ("tensorrt_plan", "x", "y")
    + """
version_policy: { specific { versions: [1] } }
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }
instance_group [ { count: 1 kind: KIND_GPU gpus: [ 0 ] } ]
parameters { key: "metadata" value: { string_value: "{\\"task\\": \\"classify\\"}" } }
response_cache { enable: true }
"""
)

RESHAPED = """
name: "reshaped"
backend: "onnxruntime"
max_batch_size: 4
input [ { name: "image" data_type: TYPE_FP32 dims: [ 192 ] reshape { shape: [ 3, 8, 8 ] } } ]
output [ { name: "copy" data_type: TYPE_FP32 dims: [ 64, 3 ] reshape { shape: [ 3, 8, 8 ] } } ]
"""

TENSOR = 'input [{name: "%s" data_type: TYPE_%s dims: [%s]}]'

WARM = """
backend: "onnxruntime"
max_batch_size: 8
model_warmup [
  {
    name: "real"
    batch_size: 2
    inputs { key: "x" value: { data_type: TYPE_FP32 dims: [ 16 ] input_data_file: "x.raw" } }
  }
]
"""

REFUSED = {
    "other_type": (
        "max_batch_size: 8 " + TENSOR % ("x", "INT32", "16"),
        (
            "unable to load model 'other_type', configuration expects datatype TYPE_INT32 for input 'x', model "
            "provides TYPE_FP32"
        ),
    ),
    "other_shape": (
        "max_batch_size: 8 " + TENSOR % ("x", "FP32", "3, 16"),
        (
            "model 'other_shape', tensor 'x': the model expects 2 dimensions (shape [-1,16]) but the model "
            "configuration specifies 3 dimensions (an initial batch dimension because max_batch_size > 0 followed by "
            "the explicit tensor shape, making complete shape [-1,3,16])"
        ),
    ),
    "other_whole_shape": (
        TENSOR % ("x", "FP32", "15, 16, 1"),
        (
            "the model expects 2 dimensions (shape [-1,16]) but the model configuration specifies 3 dimensions (shape "
            "[15,16,1])"
        ),
    ),
    "other_name": (
        "max_batch_size: 8 " + TENSOR % ("data", "FP32", "16"),
        "unexpected inference input 'data', allowed inputs are: x",
    ),
    "too_many": (
        "max_batch_size: 8 " + TENSOR % ("x", "FP32", "16") + TENSOR % ("z", "FP32", "16"),
        "unable to load model 'too_many', configuration expects 2 inputs, model provides 1",
    ),
    "no_labels": ('output [{name: "y" data_type: TYPE_FP32 dims: [4] label_filename: "gone.txt"}]', "gone.txt"),
    "agents": (
        'model_repository_agents { agents [ { name: "checksum" } ] }',
        "model_repository_agents: whom to trust is not the model's to configure",
    ),
    "iterative": (
        "sequence_batching { iterative_sequence: true }",
        "sequence_batching.iterative_sequence of iterative: a request is not scheduled again here",
    ),
    "elsewhere": ('name: "mlp"', "unexpected directory name 'elsewhere' for model 'mlp'"),
    "cold": (WARM, "warmup/x.raw: No such file or directory"),
    "broken": ("max_batch_size: [", "broken/config.pbtxt: 1:"),
}
"""By model: its config, and why it is failed."""


def write_config(models: Path, name: str, text: str) -> None:
    (models / name / "config.pbtxt").write_text(text)
    (models / name / "labels.txt").write_text("one\ntwo\nthree\nfour\n")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory) -> Iterator[Daemon]:
    models = tmp_path_factory.mktemp("models")
    for name in ("full", "named_by_place", "plain", "half", *REFUSED):
        put_model(models, name, onnx_models.mlp)
    put_model(models, "full", onnx_models.mlp, version=2)
    write_config(models, "full", FULL)
    write_config(models, "named_by_place", MLP % ("pytorch_libtorch", "INPUT__0", "OUTPUT__0"))
    write_config(models, "half", 'backend: "onnxruntime" dynamic_batching { }')
    for name, (text, _) in REFUSED.items():
        write_config(models, name, text)
    put_model(models, "warm", onnx_models.mlp)
    write_config(models, "warm", WARM)
    (models / "warm" / "warmup").mkdir()
    (models / "warm" / "warmup" / "x.raw").write_bytes(floats(16).tobytes())
    put_model(models, "reshaped", onnx_models.picture_copy)
    write_config(models, "reshaped", RESHAPED)
    triton_repository.densenet(models)
    put_model(models, "fixed", onnx_models.mlp, rows=1)
    write_config(models, "fixed", "max_batch_size: 4 " + TENSOR % ("x", "FP32", "16"))
    folder = put_model(models, "renamed", onnx_models.mlp)
    (folder / "model.onnx").rename(folder / "best-weights.bin")
    write_config(models, "renamed", 'backend: "onnxruntime" default_model_filename: "best-weights.bin"')
    (models / "plan" / "1").mkdir(parents=True)
    (models / "plan" / "1" / "model.plan").write_bytes(b"\0" * 64)
    write_config(models, "plan", 'platform: "tensorrt_plan"')
    doors = {"http": HttpSettings(endpoint="127.0.0.1:0"), "grpc": GrpcSettings(endpoint="127.0.0.1:0")}
    with running_daemon(models, tmp_path_factory.mktemp("run"), calibrate=False, **doors) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def client(daemon) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(http_url(daemon).removeprefix("http://")) as client:
        assert client.is_server_live()  # which connects, before a test could leave a socket behind
        yield client


@pytest.fixture(scope="module")
def grpc_client(daemon) -> Iterator[tritonclient.grpc.InferenceServerClient]:
    with tritonclient.grpc.InferenceServerClient(grpc_url(daemon).removeprefix("grpc://")) as client:
        assert client.is_server_live()  # which connects, before a test could leave a socket behind
        yield client


def ask(client, model, array, name="x", output="y", **words):
    given = triton.InferInput(name, list(array.shape), "FP32")
    given.set_data_from_numpy(array)
    outputs = [triton.InferRequestedOutput(output, **words)]
    return client.infer(model, [given], outputs=outputs).as_numpy(output)


def expected(x):
    first, second = onnx_models.mlp_weights()
    return np.maximum(x @ first, 0) @ second


def reason(client, model: str) -> str:
    return next(each.get("reason", "") for each in client.get_model_repository_index() if each["name"] == model)


@pytest.mark.parametrize(("model", "name", "output"), [("full", "x", "y"), ("named_by_place", "INPUT__0", "OUTPUT__0")])
def test_a_config_for_another_backend_is_served_by_what_the_profile_has(client, model, name, output):
    x = floats(3, 16)
    np.testing.assert_allclose(ask(client, model, x, name, output), expected(x), rtol=1e-4, atol=1e-4)
    metadata = client.get_model_metadata(model)
    assert metadata["inputs"] == [{"name": name, "datatype": "FP32", "shape": [-1, 16]}]
    assert metadata["outputs"] == [{"name": output, "datatype": "FP32", "shape": [-1, 4]}]
    assert metadata["versions"] == ["1"]


def test_a_setting_without_meaning_here_is_reported_once_of_the_version(client):
    told = reason(client, "full")
    assert "config.pbtxt: response_cache: no answer is kept" in told
    assert "config.pbtxt: instance_group[0].gpus: the device profile chooses the device" in told
    assert "config.pbtxt: it says tensorrt_plan; " in told
    assert "config.pbtxt: instance_group says KIND_GPU; the profile serves it on CPU" in told
    assert reason(client, "plain") == ""


def test_the_config_comes_back_to_the_letter_with_defaults_filled_in(client):
    config = client.get_model_config("full")
    assert config["platform"] == "tensorrt_plan"
    assert config["backend"] == "tensorrt"
    assert config["max_batch_size"] == 8
    assert config["version_policy"] == {"specific": {"versions": [1]}}
    assert config["output"][0]["label_filename"] == "labels.txt"
    assert config["dynamic_batching"]["preferred_batch_size"] == [4, 8]
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 100
    (group,) = config["instance_group"]
    assert (group["name"], group["kind"], group["count"], group["gpus"]) == ("full_0", "KIND_GPU", 1, [0])
    assert json.loads(config["parameters"]["metadata"]["string_value"]) == {"task": "classify"}
    assert config["response_cache"] == {"enable": True}
    assert config["optimization"]["input_pinned_memory"] == {"enable": True}
    assert config["default_model_filename"] == "model.plan"


def test_the_config_over_grpc_is_the_same(client, grpc_client):
    config = grpc_client.get_model_config("full", as_json=True)["config"]
    assert config["dynamic_batching"]["preferred_batch_size"] == [4, 8]
    assert config["parameters"] == client.get_model_config("full")["parameters"]
    assert config["instance_group"][0]["name"] == "full_0"


def test_a_config_without_tensors_is_completed_with_the_models(client):
    config = client.get_model_config("half")
    assert (config["backend"], config["platform"]) == ("onnxruntime", "onnxruntime_onnx")
    assert [each["name"] for each in (*config["input"], *config["output"])] == ["x", "y"]
    assert config["max_batch_size"] > 1
    assert config["dynamic_batching"]["preferred_batch_size"] == [config["max_batch_size"]]
    assert config["version_policy"] == {"latest": {"num_versions": 1}}
    assert config["instance_group"][0]["kind"] == "KIND_CPU"
    assert config["default_model_filename"] == "model.onnx"


def test_labels_of_the_config_are_in_classes(client):
    x = floats(1, 16)
    best = int(np.argmax(expected(x)[0]))
    (found,) = ask(client, "full", x, class_count=1)[0]
    assert found.decode().split(":")[1:] == [str(best), ("one", "two", "three", "four")[best]]


def test_more_rows_than_max_batch_size_are_refused_as_triton_does(client):
    with pytest.raises(InferenceServerException, match="inference request batch-size must be <= 8 for 'full'"):
        ask(client, "full", floats(9, 16))


def test_reshape_is_between_callers_and_the_model(client):
    x = floats(2, 192)
    np.testing.assert_array_equal(ask(client, "reshaped", x, "image", "copy"), x.reshape(2, 64, 3))
    assert client.get_model_metadata("reshaped")["inputs"][0]["shape"] == [-1, 192]
    y = floats(3, 64).reshape(3, 8, 8)
    means = ask(client, "densenet_onnx", y, "data_0", "fc6_1")
    np.testing.assert_allclose(means, y.mean((1, 2)), rtol=1e-4, atol=1e-5)
    assert client.get_model_metadata("densenet_onnx")["inputs"][0]["shape"] == [3, 8, 8]


def test_a_warm_up_runs_on_the_files_that_the_config_names(client):
    assert client.is_model_ready("warm")
    (told,) = client.get_inference_statistics("warm")["model_stats"]
    assert told["name"] == "warm"
    np.testing.assert_allclose(ask(client, "warm", floats(1, 16)), expected(floats(1, 16)), rtol=1e-4, atol=1e-4)


def test_the_file_that_the_config_names_is_served(client):
    x = floats(1, 16)
    np.testing.assert_allclose(ask(client, "renamed", x), expected(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", REFUSED)
def test_a_config_that_does_not_fit_is_refused_in_tritons_words(client, model):
    assert REFUSED[model][1] in reason(client, model)
    assert not client.is_model_ready(model)


def test_a_model_of_fixed_rows_does_not_batch(client):
    words = "for the model to support batching the shape should have at least 1 dimension and the first dimension must"
    assert f"model 'fixed', tensor 'x': {words} be -1; but shape expected by the model is [1,16]" in reason(
        client, "fixed"
    )


def test_a_plan_alone_is_refused_with_the_reason(client):
    assert "it runs on one machine and version only; put the .onnx here" in reason(client, "plan")
