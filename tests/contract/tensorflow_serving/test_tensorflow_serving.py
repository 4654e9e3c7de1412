"""TensorFlow Serving's paths over HTTP, as its clients and KServe's first protocol ask them and read the answers."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.doors.http.settings import HttpSettings
from tests.contract.doors.http.test_http import expected
from tests.contract.pictures.test_pictures import COLOURS, picture
from tests.contract.raw_http import RawHttp
from tests.contract.running_daemon import floats, http_url, put_model, running_daemon
from tests.contract.torchserve.test_torchserve_paths import HANDLER
from tests.models import onnx_models, text_models

DIGITS = Path(__file__).parents[3] / "demo/models/digits/1/model.onnx"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "mlp", onnx_models.mlp)
    put_model(models, "mlp", onnx_models.mlp, version=2, toml="max_batch_rows = 4\n[versions]\nall = true\n")
    put_model(models, "pair", onnx_models.two_in_two_out)
    put_model(models, "digits", lambda folder: shutil.copyfile(DIGITS, folder / "model.onnx"))
    put_model(models, "text", text_models.copy, toml="batch = true\n")
    put_model(models, "colours", onnx_models.colours, toml=COLOURS)
    (models / "colours" / "labels.txt").write_text("red\ngreen\nblue\n")
    put_model(models, "minilm", text_models.embedding, toml=f"batch = true\n{text_models.EMBEDDING_TOML}")
    put_model(models, "single", onnx_models.mlp, rows=1)
    put_model(models, "late", onnx_models.mlp, toml="on_demand = true\n")
    put_model(models, "handler", lambda folder: (folder / "model.py").write_text(HANDLER),
              toml="batch = true\nmax_batch_rows = 1\n[warmup]\nruns = 0\n")  # fmt: skip
    (models / "handler" / "1" / "torchserve.json").write_text("{}")  # as an import leaves it beside each handler
    (models / "broken" / "1").mkdir(parents=True)
    (models / "broken" / "1" / "model.onnx").write_bytes(b"no model")
    return models


@pytest.fixture(scope="module")
def url(models, tmp_path_factory):
    settings = HttpSettings(endpoint="127.0.0.1:0", tensorflow_serving=True)
    with running_daemon(models, tmp_path_factory.mktemp("run"), http=settings, python_models=True) as daemon:
        with RawHttp(http_url(daemon)) as raw:  # starts the thread that reads large bodies
            raw.ask("POST", "/v1/models/text:predict", b"{" * 70_000)
        yield http_url(daemon)


@pytest.fixture
def http(url):
    with RawHttp(url) as http:
        yield http


def ask(http: RawHttp, model: str, **fields):
    return http.ask("POST", f"/v1/models/{model}:predict", json.dumps(fields).encode())


def told(answer) -> int:
    """The status of an error in TensorFlow Serving's form."""
    assert set(answer.fields) == {"error"}
    assert answer.fields["error"]
    return answer.status


def b64(data: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(data).decode()}


# ---- predictions ----------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("model", ["mlp", "mlp/versions/1"])
@pytest.mark.parametrize("rows", [1, 3, 11])
def test_each_instance_has_its_prediction_however_many_a_run_takes(http, model, rows):
    x = floats(rows, 16)
    for instances in (x.tolist(), [{"x": row} for row in x.tolist()]):
        answer = ask(http, model, instances=instances, signature_name="serving_default")
        assert answer.status == 200
        np.testing.assert_allclose(answer.fields["predictions"], expected(x), rtol=1e-4, atol=1e-4)


def test_inputs_are_whole_tensors_and_the_only_output_stands_by_itself(http):
    x = floats(3, 16)
    for inputs in (x.tolist(), {"x": x.tolist()}):
        answer = ask(http, "mlp", inputs=inputs)
        assert set(answer.fields) == {"outputs"}
        np.testing.assert_allclose(answer.fields["outputs"], expected(x), rtol=1e-4, atol=1e-4)


def test_several_inputs_and_outputs_go_by_name(http):
    answer = ask(http, "pair", instances=[{"a": [1.0, 2.0, 3.0], "b": [4, 5]}, {"a": [0.0, 0.0, 1.0], "b": [6, 7]}])
    assert answer.fields["predictions"] == [
        {"sum": [2.0, 4.0, 6.0], "twice": [8, 10]},
        {"sum": [0.0, 0.0, 2.0], "twice": [12, 14]},
    ]
    answer = ask(http, "pair", inputs={"a": [[1.0, 2.0, 3.0]], "b": [[4, 5]]})
    assert answer.fields["outputs"] == {"sum": [[2.0, 4.0, 6.0]], "twice": [[8, 10]]}


def test_a_model_of_one_row_is_asked_once_an_instance(http):
    x = floats(3, 16)
    answer = ask(http, "single", instances=x.tolist())
    np.testing.assert_allclose(answer.fields["predictions"], expected(x), rtol=1e-4, atol=1e-4)


def test_text_may_be_base64_and_comes_back_as_text_or_in_base64_where_it_is_none(http):
    answer = ask(http, "text", instances=["snow", b64("\N{SNOWMAN}".encode()), b64(b"\xff\0")])
    assert answer.fields["predictions"] == ["snow", "\N{SNOWMAN}", b64(b"\xff\0")]


def test_numbers_that_are_not_finite_are_names(http):
    answer = ask(http, "mlp", instances=[["NaN", *[0.0] * 15]])
    assert "NaN" in answer.fields["predictions"][0]


def test_declared_steps_answer_in_words(http):
    answer = ask(http, "colours", instances=[b64(picture("red")), b64(picture("lime"))])
    assert [each["classes"][0]["label"] for each in answer.fields["predictions"]] == ["red", "green"]
    numbers = np.stack([np.ones((8, 8)), np.zeros((8, 8)), np.zeros((8, 8))])
    assert np.shape(ask(http, "colours", instances=[numbers.tolist()]).fields["predictions"]) == (1, 3)
    answer = ask(http, "minilm", instances=["a cat"])
    np.testing.assert_allclose(answer.fields["predictions"], [[5, 2, 0, 1]])


def test_a_request_waits_for_its_model_that_is_loaded_on_demand(http):
    x = floats(2, 16)
    answer = ask(http, "late", instances=x.tolist())
    np.testing.assert_allclose(answer.fields["predictions"], expected(x), rtol=1e-4, atol=1e-4)


def test_an_answer_may_be_compressed(http):
    body = json.dumps({"instances": floats(1, 16).tolist()}).encode()
    assert (
        http.ask("POST", "/v1/models/mlp:predict", body, accept_encoding="gzip").headers["content-encoding"] == "gzip"
    )


# ---- models ---------------------------------------------------------------------------------------------------------


def test_a_models_versions_have_states_the_newest_first(http):
    answer = http.ask("GET", "/v1/models/mlp").fields
    fine = {"error_code": "OK", "error_message": ""}
    assert answer["model_version_status"] == [
        {"version": "2", "state": "AVAILABLE", "status": fine},
        {"version": "1", "state": "AVAILABLE", "status": fine},
    ]
    assert (answer["name"], answer["ready"]) == ("mlp", True)
    (only,) = http.ask("GET", "/v1/models/mlp/versions/1").fields["model_version_status"]
    assert only["version"] == "1"


def test_a_model_that_failed_says_why(http):
    answer = http.ask("GET", "/v1/models/broken").fields
    (only,) = answer["model_version_status"]
    assert (only["state"], only["status"]["error_code"], answer["ready"]) == ("END", "UNKNOWN", False)
    assert only["status"]["error_message"]
    assert told(ask(http, "broken", instances=[1])) == 404


def test_the_signature_of_a_model_is_told(http):
    answer = http.ask("GET", "/v1/models/mlp/metadata").fields
    assert answer["model_spec"] == {"name": "mlp", "signature_name": "", "version": "2"}
    signature = answer["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert signature["inputs"]["x"]["dtype"] == "DT_FLOAT"
    dims = [each["size"] for each in signature["inputs"]["x"]["tensor_shape"]["dim"]]
    assert dims == ["-1", "16"]
    assert set(signature["outputs"]) == {"y"}


def test_models_that_answer_are_listed(http):
    names = ["colours", "digits", "handler", "late", "minilm", "mlp", "pair", "single", "text"]
    assert http.ask("GET", "/v1/models").fields == {"models": names}


def test_outputs_of_one_whole_number_a_row_are_predictions(http):
    """ONNX Runtime's INT64 [rows]: C's long long, of which orjson writes no single number."""
    answer = ask(http, "digits", instances=[[0] * 64, [1] * 64])
    assert answer.status == 200
    assert [set(each) for each in answer.fields["predictions"]] == [{"scores", "digit"}] * 2
    assert all(isinstance(each["digit"], int) for each in answer.fields["predictions"])


def test_kserves_first_protocol_is_answered_as_its_client_asks_it(http):
    """The requests of kserve 0.21's InferenceRESTClient with protocol v1, and what it reads of the answers."""
    assert http.ask("GET", "/").fields["status"].lower() == "alive"
    assert http.ask("GET", "/v1/models/mlp").fields["ready"] is True
    assert http.ask("GET", "/v1/models/broken").fields["ready"] is False
    x = floats(2, 16)
    answer = http.ask("POST", "/v1/models/mlp:predict", json.dumps({"instances": x.tolist()}).encode())
    np.testing.assert_allclose(answer.fields["predictions"], expected(x), rtol=1e-4, atol=1e-4)
    failed = http.ask("POST", "/v1/models/absent:predict", b'{"instances": [1]}')
    assert failed.headers["content-type"] == "application/json"
    assert isinstance(failed.fields["error"], str)


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/models/absent:predict", b'{"instances": [1]}', 404),
        ("POST", "/v1/models/mlp/versions/9:predict", b'{"instances": [1]}', 404),
        ("POST", "/v1/models/mlp/versions/0:predict", b'{"instances": [1]}', 400),
        ("POST", "/v1/models/mlp/versions/99999999999999999999:predict", b'{"instances": [1]}', 400),
        ("POST", "/v1/models/mlp/labels/stable:predict", b'{"instances": [1]}', 400),
        ("POST", "/v1/models/mlp:predict", b"{", 400),
        ("POST", "/v1/models/mlp:predict", b"[1]", 400),
        ("POST", "/v1/models/mlp:predict", b"[" * 200_000, 400),
        ("POST", "/v1/models/mlp:predict", b"{}", 400),
        ("POST", "/v1/models/mlp:predict", b'{"instances": []}', 400),
        ("POST", "/v1/models/mlp:predict", b'{"instances": 5}', 400),
        ("POST", "/v1/models/mlp:predict", b'{"instances": [1], "inputs": [1]}', 400),
        ("POST", "/v1/models/mlp:predict", b'{"instances": [1], "signature_name": "other"}', 400),
        ("POST", "/v1/models/mlp:predict", b'{"instances": [[1, 2], [3]]}', 400),
        ("POST", "/v1/models/mlp:predict", b'{"instances": [[1, 2], [3, 4, 5], [6]]}', 400),
        ("POST", "/v1/models/mlp:predict", b'{"instances": ["abc"]}', 400),
        ("POST", "/v1/models/mlp:predict", b'{"instances": [{"z": 1}]}', 400),
        ("POST", "/v1/models/mlp:predict", b'{"instances": [{"x": 1}, 2]}', 400),
        ("POST", "/v1/models/mlp:predict", b'{"instances": [{"x": 1}, {"y": 2}]}', 400),
        ("POST", "/v1/models/mlp:predict", b'{"instances": [{}]}', 400),
        ("POST", "/v1/models/mlp:predict", b'{"inputs": {}}', 400),
        ("POST", "/v1/models/mlp:predict", b'{"inputs": {"x": {"b64": "AAAA"}}}', 400),
        ("POST", "/v1/models/text:predict", b'{"instances": [{"b64": "A"}]}', 400),
        ("POST", "/v1/models/text:predict", b'{"instances": [{"b64": 5}]}', 400),
        ("POST", "/v1/models/text:predict", b'{"instances": ["\\ud800"]}', 400),
        ("POST", "/v1/models/text:predict", b'{"instances": [[["x"]]]}', 400),
        ("POST", "/v1/models/pair:predict", b'{"instances": [[1, 2, 3]]}', 400),
        ("POST", "/v1/models/pair:predict", b'{"inputs": [[1, 2, 3]]}', 400),
        ("POST", "/v1/models/pair:predict", b'{"instances": [{"a": [1, 2, 3]}]}', 400),
        ("POST", "/v1/models/mlp:classify", b"{}", 501),
        ("POST", "/v1/models/mlp/versions/1:regress", b"{}", 501),
        ("GET", "/v1/models/mlp:predict", b"", 405),
        ("GET", "/v1/models/absent", b"", 404),
        ("GET", "/v1/models/mlp/versions/9", b"", 404),
        ("GET", "/v1/models/absent/metadata", b"", 404),
        ("POST", "/v1/models", b"", 405),
    ],
)
def test_errors_are_in_tensorflow_servings_form(http, method, path, body, status):
    assert told(http.ask(method, path, body)) == status
    assert ask(http, "mlp", instances=floats(1, 16).tolist()).status == 200


def test_a_deadline_is_the_headers(http):
    body = json.dumps({"instances": floats(1, 16).tolist()}).encode()
    answer = http.ask("POST", "/v1/models/mlp:predict", body, x_request_timeout_ms="0")
    assert told(answer) == 503
    assert int(answer.headers["retry-after-ms"]) > 0


# ---- beside other protocols -----------------------------------------------------------------------------------------


def test_an_answer_of_several_protocols_has_the_fields_of_each(models, tmp_path):
    settings = HttpSettings(endpoint="127.0.0.1:0", tensorflow_serving=True, openai=True, torchserve=True)
    with (
        running_daemon(models, tmp_path, http=settings, python_models=True) as daemon,
        RawHttp(http_url(daemon)) as http,
    ):
        listed = http.ask("GET", "/v1/models").fields
        assert set(listed) == {"object", "data", "models"}
        assert [each["id"] for each in listed["data"]] == listed["models"]
        one = http.ask("GET", "/v1/models/mlp").fields
        assert set(one) == {"id", "object", "created", "owned_by", "model_version_status", "name", "ready"}
        assert http.ask("GET", "/v1/models/absent").status == 404
        assert http.ask("GET", "/v1/models/mlp/versions/1").fields["model_version_status"][0]["version"] == "1"
        assert http.ask("DELETE", "/v1/models/mlp").status == 405

        x = floats(1, 16)
        assert set(ask(http, "mlp", inputs=x.tolist()).fields) == {"outputs"}, "instances are TensorFlow Serving's"
        assert told(ask(http, "mlp")) == 400
        given = ask(http, "handler", instances=[1, {"b": 2}]).fields["predictions"]
        assert [each["parts"] for each in given] == [
            {"body": ["application/json", "1"]},
            {"b": ["application/json", "2"]},
        ]
        assert set(ask(http, "handler").fields) == {"code", "type", "message"}, "its errors are TorchServe's"
