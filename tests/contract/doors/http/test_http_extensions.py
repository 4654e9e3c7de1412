"""Triton's extensions over HTTP, asked by its own client: classes, configuration, statistics, memory, settings."""

from __future__ import annotations

import json
import logging
import os
import secrets
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException, shared_memory

from edge_runtime.config.settings import SharedMemorySettings
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.telemetry.logs import log_level
from tests.contract.running_daemon import http_url, put_model, running_daemon
from tests.models import onnx_models

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:gevent")

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "mlp", onnx_models.mlp, toml="max_batch_rows = 8\nmax_queue_delay_ms = 1.5\n")
    put_model(models, "running_sum", onnx_models.running_sum)
    put_model(models, "text", onnx_models.identity, datatype="BYTES")
    put_model(models, "line", onnx_models.text_copy, toml="max_batch_rows = 8\nmax_queue_delay_ms = 1.5\n")
    settings = HttpSettings(endpoint="127.0.0.1:0", control=True)
    memory = SharedMemorySettings(client_named=True)
    with running_daemon(
        models, tmp_path_factory.mktemp("run"), http=settings, shared_memory=memory, calibrate=False
    ) as daemon:
        yield http_url(daemon).removeprefix("http://")


@pytest.fixture
def client(address):
    with triton.InferenceServerClient(address) as client:
        yield client


@pytest.fixture
def region(client):
    """A region of Triton's own client: 128 bytes of input, then 32 of output."""
    name = f"edge-runtime-{secrets.token_hex(4)}"
    handle = shared_memory.create_shared_memory_region("frames", f"/{name}", 160)
    shared_memory.set_shared_memory_region(handle, [X])
    client.register_system_shared_memory("frames", f"/{name}", 160)
    try:
        yield handle, Path("/dev/shm", name)
    finally:
        client.unregister_system_shared_memory("frames")
        shared_memory.destroy_shared_memory_region(handle)


def given():
    found = triton.InferInput("x", [2, 16], "FP32")
    found.set_data_from_numpy(X)
    return found


def expected():
    first, second = onnx_models.mlp_weights()
    return np.maximum(X @ first, 0) @ second


@pytest.mark.parametrize("binary", [True, False])
def test_classes_are_the_best_first_with_six_decimals(client, binary):
    wanted = triton.InferRequestedOutput("y", binary_data=binary, class_count=3)
    found = client.infer("mlp", [given()], outputs=[wanted]).as_numpy("y")
    assert found.shape == (2, 3)
    for texts, row in zip(found, expected(), strict=True):
        best = np.argsort(-row)[:3]
        read = [(text.decode() if isinstance(text, bytes) else text).split(":") for text in texts]
        assert [int(index) for _, index in read] == best.tolist()
        assert [len(value.partition(".")[2]) for value, _ in read] == [6, 6, 6]
        np.testing.assert_allclose([float(value) for value, _ in read], row[best], atol=1e-5)


def test_more_classes_than_there_are_give_all(client):
    wanted = triton.InferRequestedOutput("y", class_count=99)
    assert client.infer("mlp", [given()], outputs=[wanted]).as_numpy("y").shape == (2, 4)


def test_the_configuration_is_what_was_found_out(client):
    config = client.get_model_config("mlp")
    assert (config["name"], config["backend"], config["max_batch_size"]) == ("mlp", "onnxruntime", 8)
    assert config["input"][0]["dims"] == [16]
    assert config["input"][0]["data_type"] == "TYPE_FP32"
    assert config["dynamic_batching"]["preferred_batch_size"] == [8]
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 1500
    assert config["version_policy"] == {"latest": {"num_versions": 1}}
    assert config["default_model_filename"] == "model.onnx"
    unbatched = client.get_model_config("running_sum", "1")
    assert unbatched["max_batch_size"] == 0
    assert "dynamic_batching" not in unbatched
    assert [spec["dims"] for spec in unbatched["input"]] == [
        spec["shape"] for spec in client.get_model_metadata("running_sum")["inputs"]
    ]


def test_statistics_count_rows_and_runs_and_an_unknown_model_is_400(client):
    def counts():
        (entry,) = client.get_inference_statistics("mlp")["model_stats"]
        return entry["inference_count"], entry["execution_count"], entry["inference_stats"]["success"]["count"]

    def runs_of_two_rows():
        (entry,) = client.get_inference_statistics("mlp")["model_stats"]
        batches = entry["batch_stats"]
        assert sum(each["batch_size"] * each["compute_infer"]["count"] for each in batches) == entry["inference_count"]
        return sum(each["compute_infer"]["count"] for each in batches if each["batch_size"] == 2)

    before, of_two = counts(), runs_of_two_rows()
    client.infer("mlp", [given()])
    wanted = tuple(count + more for count, more in zip(before, (2, 1, 1), strict=True))
    for _ in range(1000):  # an answer is counted after it is sent
        if counts() == wanted:
            break
    assert counts() == wanted
    assert runs_of_two_rows() == of_two + 1
    assert {entry["name"] for entry in client.get_inference_statistics()["model_stats"]} == {
        "line",
        "mlp",
        "running_sum",
        "text",
    }
    with pytest.raises(InferenceServerException) as caught:
        client.get_inference_statistics("none")
    assert caught.value.status() == "400"


def test_tensors_are_read_and_written_in_memory_that_the_client_names(client, region):
    handle, _ = region
    given = triton.InferInput("x", [2, 16], "FP32")
    given.set_shared_memory("frames", 128)
    wanted = triton.InferRequestedOutput("y")
    wanted.set_shared_memory("frames", 32, offset=128)
    answer = client.infer("mlp", [given], outputs=[wanted])
    assert answer.get_output("y") == {"name": "y", "datatype": "FP32", "shape": [2, 4]}
    np.testing.assert_allclose(
        shared_memory.get_contents_as_numpy(handle, np.float32, [2, 4], offset=128), expected(), rtol=1e-5
    )


def test_regions_are_reported_registered_once_and_gone_when_unregistered(client, region):
    _, path = region
    (entry,) = client.get_system_shared_memory_status("frames")
    assert entry == {"name": "frames", "key": f"/{path.name}", "offset": 0, "byte_size": 160}
    with pytest.raises(InferenceServerException, match="already in manager") as caught:
        client.register_system_shared_memory("frames", entry["key"], 160)
    assert caught.value.status() == "400"
    client.unregister_system_shared_memory("frames")
    assert client.get_system_shared_memory_status() == []
    with pytest.raises(
        InferenceServerException, match="Unable to find system shared memory region: 'frames'"
    ) as caught:
        client.get_system_shared_memory_status("frames")
    assert caught.value.status() == "404"


def test_a_region_that_its_owner_shrinks_faults_nothing(client, region):
    _, path = region
    os.truncate(path, 64)
    inside = triton.InferInput("x", [2, 16], "FP32")
    inside.set_shared_memory("frames", 128)
    with pytest.raises(InferenceServerException, match="was shrunk") as caught:
        client.infer("mlp", [inside])
    assert caught.value.status() == "400"
    wanted = triton.InferRequestedOutput("y")
    wanted.set_shared_memory("frames", 32, offset=128)
    with pytest.raises(InferenceServerException, match="was shrunk"):
        client.infer("mlp", [given()], outputs=[wanted])
    assert path.stat().st_size == 64
    assert client.is_server_live()


@pytest.mark.parametrize(
    ("key", "offset", "nbytes", "words"),
    [
        ("/edge-runtime-none", 0, 8, "Unable to open shared memory region: '/edge-runtime-none'"),
        ("/../etc/passwd", 0, 8, "cannot register shared memory region 'other' - invalid shm key '/../etc/passwd'"),
        ("/..", 0, 8, "cannot register shared memory region 'other' - invalid shm key '/..'"),
        ("/", 0, 8, "cannot register shared memory region 'other' - invalid shm key '/'"),
        ("///triton_python_backend_shm_region_1", 0, 8, "contains the reserved prefix 'triton_python_backend_shm"),
        ("/triton_python_backend_shm_region_1", 0, 8, "contains the reserved prefix 'triton_python_backend_shm_region"),
        (None, 0, 161, "failed to register shared memory region.*invalid args"),
        (None, 0, 161, "which has 160"),
        (None, 1 << 47, 8, "which has 160"),
        (None, 0, 0, "which has 160"),
    ],
)
def test_memory_that_is_not_a_region_of_a_client_is_not_registered(client, region, key, offset, nbytes, words):
    key = key or f"/{region[1].name}"
    with pytest.raises(InferenceServerException, match=words) as caught:
        client.register_system_shared_memory("other", key, nbytes, offset=offset)
    assert caught.value.status() == ("500" if "open" in words else "400")  # as by Triton


@pytest.mark.parametrize(("nbytes", "offset"), [(128, 64), (161, 0), (1 << 47, 0)])
def test_a_tensor_outside_its_region_is_400(client, region, nbytes, offset):
    outside = triton.InferInput("x", [2, 16], "FP32")
    outside.set_shared_memory("frames", nbytes, offset=offset)
    with pytest.raises(InferenceServerException, match="Invalid offset") as caught:
        client.infer("mlp", [outside])
    assert caught.value.status() == "400"


def test_cuda_memory_is_501_and_forgetting_it_is_not_an_error(client):
    assert client.get_cuda_shared_memory_status() == []
    client.unregister_cuda_shared_memory()
    with pytest.raises(InferenceServerException) as caught:
        client.register_cuda_shared_memory("r", b"handle", 0, 64)
    assert caught.value.status() == "501"


def test_traces_are_reported_as_off_and_stay_so(client):
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    assert client.update_trace_settings("mlp", {"trace_level": ["OFF"]})["trace_mode"] == "triton"
    with pytest.raises(InferenceServerException) as caught:
        client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]})
    assert caught.value.status() == "501"


def test_log_settings_change_the_daemons_level(client):
    assert client.update_log_settings({"log_verbose_level": 1})["log_verbose_level"] == 1
    assert log_level() == logging.DEBUG
    told = client.update_log_settings({"log_verbose_level": 0, "log_info": False})
    assert (told["log_info"], told["log_warning"]) == (False, True)
    assert log_level() == logging.WARNING
    with pytest.raises(InferenceServerException, match="Unknown log setting"):
        client.update_log_settings({"log_colour": True})


def test_unloading_what_is_not_there_is_no_error(client):
    client.unload_model("none")


def test_shared_memory_is_off_unless_it_is_allowed(tmp_path):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    settings = HttpSettings(endpoint="127.0.0.1:0")
    with (
        running_daemon(tmp_path / "models", tmp_path / "run", http=settings, calibrate=False) as daemon,
        triton.InferenceServerClient(http_url(daemon).removeprefix("http://")) as client,
    ):
        assert "system_shared_memory" not in client.get_server_metadata()["extensions"]
        with pytest.raises(InferenceServerException, match="--client-shared-memory") as caught:
            client.register_system_shared_memory("frames", "/frames", 8)
        assert caught.value.status() == "501"
        with pytest.raises(InferenceServerException, match="--allow-control") as caught:
            client.update_log_settings({"log_info": False})
        assert caught.value.status() == "403"


def post(address, path, body, headers=()) -> tuple[int, str, bytes]:
    """Post bytes, or anything else as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{address}{path}", data, dict(headers))
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read()


def test_generate_takes_inputs_by_name_and_answers_outputs_by_name(address):
    answer = {"model_name": "text", "model_version": "1", "y": ["hello", "you"]}
    body = {"x": ["hello", "you"], "parameters": {"timeout_ms": 10_000}}
    assert post(address, "/v2/models/text/generate", body) == (200, "application/json", json_bytes(answer))
    status, kind, event = post(address, "/v2/models/text/versions/1/generate_stream", {"id": "a", **body})
    assert (status, kind, event) == (
        200,
        "text/event-stream; charset=utf-8",
        b"data: " + json_bytes({"id": "a", **answer}) + b"\n\n",
    )


def test_generate_names_no_empty_id_and_takes_no_key_twice(address):
    body = {"id": "", "x": ["hello", "you"]}
    for more in ({}, {"a": 1}, {str(each): each for each in range(40)}):
        status, _, answer = post(address, "/v2/models/text/generate", {**body, **more})
        assert (status, json.loads(answer)) == (
            200,
            {"model_name": "text", "model_version": "1", "y": ["hello", "you"]},
        )
        for name in ("x", "id", *more):
            doubled = json_bytes({**body, **more})[:-1] + b',"%s":"again"}' % name.encode()
            status, _, answer = post(address, "/v2/models/text/generate", doubled)
            assert (status, f"input '{name}' already exists in request" in json.loads(answer)["error"]) == (400, True)


def raw(address, model, body):
    """Send a body that is one input's data: the status, and the bytes of the only output, or the error."""
    status, _, answer = post(address, f"/v2/models/{model}/infer", body, {"Inference-Header-Content-Length": "0"})
    if status != 200:
        return status, json.loads(answer)["error"]
    return status, answer[answer.index(b"}]}") + 3 :]


@pytest.mark.parametrize("body", [b"", b"427", b"\x01\x00\x00\x00", "\u00e4".encode(), b"a" * 100_000])
def test_a_raw_body_of_bytes_is_the_one_element_as_it_is(address, body):
    assert raw(address, "line", body) == (200, len(body).to_bytes(4, "little") + body)


def test_a_raw_body_that_is_not_a_single_element_or_no_text_is_400(address):
    status, words = raw(address, "text", b"427")
    assert (status, "For BYTE datatype raw input 'x', the model must have input shape [1]" in words) == (400, True)
    status, words = raw(address, "line", b"\xff")
    assert (status, "input 'x': ONNX Runtime takes BYTES as UTF-8 text only" in words) == (400, True)


def test_text_that_is_none_fails_its_own_request_only(address, caplog):
    """Its neighbours in the batch are answered, and no bug is logged."""
    texts = [b"ok", b"\xff\xfe", "\u00e4".encode(), b"\xed\xa0\x80"] * 8
    with triton.InferenceServerClient(address, concurrency=len(texts)) as client:
        waiting = []
        for text in texts:
            tensor = triton.InferInput("x", [1], "BYTES")
            tensor.set_data_from_numpy(np.array([text], object))
            waiting.append(client.async_infer("line", [tensor]))
        for text, each in zip(texts, waiting, strict=True):
            if text[0] > 0xE0:
                with pytest.raises(InferenceServerException, match="UTF-8 text only") as caught:
                    each.get_result()
                assert caught.value.status() == "400"
            else:
                assert each.get_result().as_numpy("y").tolist() == [text]
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


def json_bytes(value) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("model", "body", "words"),
    [
        ("text", {}, "expected 1 inputs but got 0 inputs for model 'text'"),
        ("text", {"x": None}, "got NoneType"),
        ("text", {"x": {}}, "attempt to access JSON non-string as string"),
        ("text", {"x": [7, 8]}, "attempt to access JSON non-string as string"),
        ("text", {"x": "a", "parameters": 1}, "Expected JSON object for keyword: 'parameters'"),
        ("mlp", {"x": [1.0] * 15}, "holds 16 elements"),
    ],
)
def test_a_body_that_generate_cannot_make_tensors_of_is_400(address, model, body, words):
    status, _, answer = post(address, f"/v2/models/{model}/generate", body)
    assert (status, words in json.loads(answer)["error"]) == (400, True), answer


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"shape": [16, (1 << 60) + 2]}, "causes total element count to exceed maximum size of"),
        ({"shape": [4, (1 << 60) + 2]}, "byte size overflow for input 'x'"),
        ({"shape": [4, -1]}, "wanted integers of 0 or more"),
        (
            {"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": (1 << 64) - 32}},
            "Integer overflow detected: byte_size for shared memory region: 'r'",
        ),
        (
            {
                "parameters": {
                    "shared_memory_region": "r",
                    "shared_memory_byte_size": 64,
                    "shared_memory_offset": (1 << 64) - 32,
                }
            },
            "Invalid offset for shared memory region: 'r'",
        ),
    ],
)
def test_numbers_too_large_for_a_tensor_are_refused_in_tritons_words(address, fields, words):
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [1.0], **fields}
    status, _, answer = post(address, "/v2/models/mlp/infer", {"inputs": [tensor]})
    assert (status, words in json.loads(answer)["error"]) == (400, True), answer


def test_an_output_that_is_wanted_twice_is_refused_in_tritons_words(address):
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}
    status, _, answer = post(
        address, "/v2/models/mlp/infer", {"inputs": [tensor], "outputs": [{"name": "y"}, {"name": "y"}]}
    )
    assert (status, "output 'y' already exists in request" in json.loads(answer)["error"]) == (400, True), answer


@pytest.mark.parametrize(
    ("model", "version", "name", "shape", "datatype", "words"),
    [
        ("none", "", "x", [1, 16], "FP32", "Request for unknown model: 'none' is not found"),
        ("mlp", "9", "x", [1, 16], "FP32", "Request for unknown model: 'mlp' version 9 is not found"),
        ("mlp", "", "z", [1, 16], "FP32", "unexpected inference input 'z' for model 'mlp'"),
        (
            "mlp",
            "",
            "x",
            [1, 15],
            "FP32",
            "unexpected shape for input 'x' for model 'mlp'. Expected [-1,16], got [1,15]",
        ),
        ("mlp", "", "x", [1, 16], "INT32", "inference input 'x' data-type is 'INT32', but model 'mlp' expects 'FP32'"),
        ("mlp", "", "x", [9, 16], "FP32", "inference request batch-size must be <= 8 for 'mlp'"),
    ],
)
def test_messages_that_scripts_search_for_are_tritons(client, model, version, name, shape, datatype, words):
    tensor = triton.InferInput(name, shape, datatype)
    tensor.set_data_from_numpy(np.zeros(shape, np.int32 if datatype == "INT32" else np.float32))
    with pytest.raises(InferenceServerException) as caught:
        client.infer(model, [tensor], model_version=version)
    assert words in caught.value.message()
