"""Loads that lay a configuration or files over a model, asked by Triton's own clients."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest
import tritonclient.grpc
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from tests.contract.running_daemon import grpc_url, http_url, put_model, running_daemon
from tests.contract.updates.updated_device import update_settings
from tests.fakes.update_site import UpdateSite
from tests.models import onnx_models

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:gevent")


@contextmanager
def serving(tmp_path, *, control=True, **settings):
    (tmp_path / "models").mkdir(exist_ok=True)
    with (
        running_daemon(
            tmp_path / "models",
            tmp_path / "run",
            http=HttpSettings(endpoint="127.0.0.1:0", control=control),
            calibrate=False,
            **settings,
        ) as daemon,
        triton.InferenceServerClient(http_url(daemon).removeprefix("http://")) as client,
    ):
        yield client


@pytest.fixture
def client(tmp_path):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    with serving(tmp_path) as client:
        yield client


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return onnx_models.mlp(tmp_path_factory.mktemp("model")).read_bytes()


def refused(call, *words, **fields) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        call(*words, **fields)
    return caught.value.status(), caught.value.message()


def test_a_config_is_laid_over_the_model_until_it_is_loaded_again(client):
    config = {"max_batch_size": 3, "dynamic_batching": {"max_queue_delay_microseconds": "250"}}
    client.load_model("mlp", config=json.dumps(config))
    found = client.get_model_config("mlp")
    assert found["max_batch_size"] == 3
    assert found["dynamic_batching"]["max_queue_delay_microseconds"] == 250
    client.load_model("mlp")
    assert client.get_model_config("mlp")["max_batch_size"] > 3


def test_max_batch_size_0_means_that_the_model_does_not_batch(client):
    client.load_model("mlp", config='{"max_batch_size": 0}')
    assert client.get_model_config("mlp")["input"][0]["dims"] == [-1, 16]
    client.load_model("mlp")


BAD_CONFIGS = (
    ('{"sequence_batching": {"iterative_sequence": true}}', "501", "sequence_batching.iterative_sequence of mlp"),
    ('{"dynamic_batching": {"priority_levels": 2}}', "400", "default priority level must be in range [1, 2] for mlp"),
    ('{"max_batch_size": -1}', "400", "'max_batch_size' must be non-negative value for mlp"),
    ('{"name": "other"}', "400", "model 'other', directory name must equal model name"),
    ('{"version_policy": {"specific": {"versions": ["x"]}}}', "400", "config:"),
    ('{"max_batch_size": 2, "dynamic_batching": {"preferred_batch_size": [4]}}', "400", "must be <= max batch size"),
    ('{"no_such_field": 1}', "400", "no_such_field"),
    ("[", "400", "config: not JSON"),
    ("[" * 100_000, "400", "config: not JSON"),
)


def test_a_config_that_cannot_be_is_refused_by_name_and_the_model_serves_on(client):
    for config, status, words in BAD_CONFIGS:
        got, message = refused(client.load_model, "mlp", config=config)
        assert (got, words in message) == (status, True), (config[:80], message)
    assert client.is_model_ready("mlp")


def test_files_are_a_model_outside_of_the_models_folder(client, tmp_path, model):
    client.load_model("brought", config="{}", files={"file:7/model.onnx": model})
    assert client.is_model_ready("brought", "7")
    assert client.get_model_metadata("brought")["versions"] == ["7"]
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["mlp"]
    assert len(list((tmp_path / "run" / "state" / "overrides").iterdir())) == 1
    assert refused(client.load_model, "brought")[0] == "404"
    assert client.is_model_ready("brought")  # what could not be replaced serves on
    client.unload_model("brought")
    assert not client.is_model_ready("brought")


def test_files_stand_in_for_those_of_the_folder_until_a_plain_load(client, model):
    client.load_model("mlp", config="{}", files={"file:4/model.onnx": model})
    assert client.get_model_metadata("mlp")["versions"] == ["4"]
    client.load_model("mlp")
    assert client.get_model_metadata("mlp")["versions"] == ["1"]


def test_files_that_do_not_load_leave_the_model_as_it_was(client):
    status, message = refused(client.load_model, "mlp", config="{}", files={"file:1/model.onnx": b"no model"})
    assert status == "500", message
    assert client.is_model_ready("mlp")
    client.load_model("mlp")


def test_paths_that_are_not_files_of_a_version_are_refused(client):
    folders = ("../1/model.onnx", "1/../model.onnx", "/1/model.onnx", "1/a/model.onnx", "model.onnx")
    for path in (*folders, "1/model.py", "1/.onnx"):
        status, message = refused(client.load_model, "mlp", config="{}", files={f"file:{path}": b""})
        assert (status, "wanted VERSION/NAME" in message) == ("400", True), path


def test_without_control_neither_is_taken(tmp_path, model):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    with serving(tmp_path, control=False) as client:
        for words in ({"config": "{}"}, {"config": "{}", "files": {"file:1/model.onnx": model}}):
            assert refused(client.load_model, "mlp", **words)[0] == "403"


def test_while_only_signed_releases_are_served_neither_is_taken(tmp_path, model):
    with serving(tmp_path, update=update_settings(tmp_path, UpdateSite().root)) as client:
        for words in ({"config": "{}", "files": {"file:1/model.onnx": model}}, {"config": '{"max_batch_size": 1}'}):
            status, message = refused(client.load_model, "mlp", **words)
            assert (status, "require_signed" in message) == ("403", True)
        assert not (tmp_path / "run" / "state" / "overrides").exists()


def test_grpc_brings_a_config_and_files_too(tmp_path, model):
    (tmp_path / "models").mkdir()
    grpc = GrpcSettings(endpoint="127.0.0.1:0", control=True)
    with (
        running_daemon(tmp_path / "models", tmp_path / "run", grpc=grpc, calibrate=False) as daemon,
        tritonclient.grpc.InferenceServerClient(grpc_url(daemon).removeprefix("grpc://")) as client,
    ):
        client.load_model("brought", config='{"max_batch_size": 3}', files={"file:7/model.onnx": model})
        assert client.get_model_metadata("brought").versions == ["7"]
        assert client.get_model_config("brought").config.max_batch_size == 3
        status, message = refused(client.load_model, "brought", config='{"batch_input": [{}]}')
        assert (status, "batch_input" in message) == ("StatusCode.UNIMPLEMENTED", True), (status, message)
