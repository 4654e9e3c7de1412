"""TorchServe's paths over HTTP, as its clients ask them and read the answers."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess

import numpy as np
import pytest

from edge_runtime.doors.http.settings import HttpSettings
from tests.contract.doors.http.test_http import expected
from tests.contract.pictures.test_picture_doors import FORM, form
from tests.contract.pictures.test_pictures import COLOURS, picture
from tests.contract.raw_http import RawHttp, request
from tests.contract.running_daemon import floats, http_url, put_model, running_daemon
from tests.models import onnx_models

PETS = (
    '[input.image]\nrange = "0..1"\nfit = "letterbox"\n[output.boxes]\nlayout = "yolov8"\nlabels = ["cat", "dog"]\n'
    "threshold = 0.0\n"
)
MASK = '[input.image]\nrange = "0..1"\n[output.copy]\nanswer = "mask"\n'

HANDLER = """
import json
import numpy as np

INPUTS = [{"name": name, "datatype": "BYTES", "shape": [-1, 1]} for name in ("body", "request")]
OUTPUTS = [{"name": name, "datatype": "BYTES", "shape": [-1, 1]} for name in ("answer", "response")]

def infer(inputs):
    answers, responses = [], []
    for body, request in zip(inputs["body"].reshape(-1), inputs["request"].reshape(-1)):
        said = json.loads(request)
        at, parts = 0, {}
        for name, kind, size in said["parts"]:
            parts[name] = [kind, body[at : at + size].decode()]
            at += size
        answers.append(json.dumps({"parts": parts, "tag": said["headers"].get("x-tag"), "rows": len(inputs["body"]),
                                   "secret": said["headers"].get("authorization")}).encode())
        status = {"status": 507, "is_error": True} if b"fail" in body + request else {
            "status": 201, "headers": {"x-mine": "yes", "content-type": "text/weird", "bad": "a\\r\\nb: c"}}
        responses.append(json.dumps(status).encode())
    as_array = lambda texts: np.array(texts, object).reshape(-1, 1)
    return {"answer": as_array(answers), "response": as_array(responses)}
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "mlp", onnx_models.mlp)
    put_model(models, "mlp", onnx_models.mlp, version=2, toml="[versions]\nall = true\n")
    put_model(models, "pair", onnx_models.two_in_two_out)
    put_model(models, "text", onnx_models.text_copy)
    put_model(models, "late", onnx_models.mlp, toml="on_demand = true\n")
    put_model(models, "colours", onnx_models.colours, toml=COLOURS)
    (models / "colours" / "labels.txt").write_text("red\ngreen\nblue\n")
    put_model(models, "pets", onnx_models.detector, toml=PETS)
    put_model(models, "segments", onnx_models.picture_copy, toml=MASK)
    put_model(models, "handler", lambda folder: (folder / "model.py").write_text(HANDLER),
              toml="batch = true\nmax_batch_rows = 1\n[warmup]\nruns = 0\n")  # fmt: skip
    (models / "handler" / "1" / "torchserve.json").write_text("{}")  # as an import leaves it beside each handler
    return models


@pytest.fixture(scope="module")
def daemon_here(models, tmp_path_factory):
    settings = HttpSettings(endpoint="127.0.0.1:0", torchserve=True, control=True)
    with running_daemon(models, tmp_path_factory.mktemp("run"), http=settings, python_models=True) as daemon:
        with RawHttp(http_url(daemon)) as raw:  # starts the thread that reads large bodies
            raw.ask("POST", "/predictions/text", b"{" * 70_000, content_type="application/json")
        yield daemon


@pytest.fixture
def http(daemon_here):
    with RawHttp(http_url(daemon_here)) as http:
        yield http


def told(answer) -> tuple[int, str]:
    """Status and type of an error in TorchServe's form."""
    fields = answer.fields
    assert set(fields) == {"code", "type", "message"}
    assert fields["code"] == answer.status
    assert fields["message"]
    return answer.status, fields["type"]


# ---- predictions ----------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_a_picture_is_answered_by_its_best_labels_and_their_scores(http, method):
    answer = http.ask(method, "/predictions/colours", picture("red"))
    assert (answer.status, answer.fields) == (200, {"red": 1.0, "green": 0.0})
    assert answer.headers["content-type"] == "application/json"


def test_a_request_waits_for_its_model_that_is_loaded_on_demand(http):
    x = floats(1, 16)
    answer = http.ask("POST", "/predictions/late", json.dumps(x[0].tolist()).encode(), content_type="application/json")
    np.testing.assert_allclose(answer.fields, expected(x)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["data", "body"])
def test_a_form_may_hold_the_picture(http, name):
    answer = http.ask("POST", "/predictions/colours", form((name, "a.png", picture("lime"))), content_type=FORM)
    assert answer.fields == {"green": 1.0, "red": 0.0}


def test_a_picture_may_be_base64_in_json(http):
    body = json.dumps({"data": base64.b64encode(picture("red")).decode()}).encode()
    assert http.ask("POST", "/predictions/colours", body, content_type="application/json").fields["red"] == 1.0


def test_a_list_of_numbers_stands_for_the_picture_already_scaled(http):
    body = json.dumps(np.stack([np.ones((8, 8)), np.zeros((8, 8)), np.zeros((8, 8))]).tolist()).encode()
    assert http.ask("POST", "/predictions/colours", body, content_type="application/json").fields["red"] == 1.0


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_sends_pictures_as_torchserves_documentation_shows(daemon_here, tmp_path):
    (tmp_path / "red.png").write_bytes(picture("red"))
    url = f"{http_url(daemon_here)}/predictions/colours"
    for options in (["-T", "red.png"], ["-F", "data=@red.png"], ["--data-binary", "@red.png"]):
        told = subprocess.run(
            ["curl", "-s", "--fail-with-body", url, *options], cwd=tmp_path, check=True, capture_output=True, timeout=60
        ).stdout
        assert json.loads(told)["red"] == 1.0, options


def test_boxes_are_a_list_of_a_label_with_its_corners_and_a_score(http):
    found = http.ask("PUT", "/predictions/pets", picture("white")).fields
    assert found
    for each in found:
        label = next(name for name in each if name != "score")
        assert set(each) == {label, "score"}
        assert label in {"cat", "dog"}
        assert len(each[label]) == 4


def test_a_mask_is_class_and_probability_of_each_pixel(http):
    mask = np.array(http.ask("PUT", "/predictions/segments", picture("lime")).fields)
    assert mask.shape == (8, 8, 2)
    assert (mask[..., 0] == 1).all()
    np.testing.assert_allclose(mask[..., 1], np.e / (np.e + 2), rtol=1e-5)


@pytest.mark.parametrize("path", ["/predictions/mlp", "/predictions/mlp/1", "/predictions/mlp/2.0"])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"data": x}, lambda x: {"x": x}])
def test_numbers_come_as_json_and_go_back_as_the_rows_list(http, path, wrap):
    x = floats(1, 16)
    answer = http.ask("POST", path, json.dumps(wrap(x[0].tolist())).encode(), content_type="application/json")
    np.testing.assert_allclose(answer.fields, expected(x)[0], rtol=1e-4, atol=1e-4)


def test_numbers_come_as_the_tensors_bytes_too(http):
    x = floats(1, 16)
    answer = http.ask("POST", "/predictions/mlp", x.tobytes(), content_type="application/octet-stream")
    np.testing.assert_allclose(answer.fields, expected(x)[0], rtol=1e-4, atol=1e-4)


def test_inputs_and_outputs_of_several_tensors_go_by_name(http):
    body = json.dumps({"a": [1.0, 2.0, 3.0], "b": [4, 5]}).encode()
    answer = http.ask("POST", "/predictions/pair", body, content_type="application/json")
    assert answer.fields == {"sum": [2.0, 4.0, 6.0], "twice": [8, 10]}


@pytest.mark.parametrize("kind", [None, "text/plain", "application/octet-stream"])
def test_text_goes_in_as_it_is_and_comes_out_as_text(http, kind):
    answer = http.ask("POST", "/predictions/text", "\N{SNOWMAN} snow".encode(), content_type=kind)
    assert answer.body.decode() == "\N{SNOWMAN} snow"
    assert answer.headers["content-type"].startswith("text/plain")


def test_numbers_that_are_not_finite_are_names(http):
    body = json.dumps(["NaN", *[0.0] * 15]).encode()
    assert "NaN" in http.ask("POST", "/predictions/mlp", body, content_type="application/json").fields


def test_kserves_first_protocol_asks_several_rows_at_once(http):
    x = floats(3, 16)
    answer = http.ask("POST", "/v1/models/mlp:predict", json.dumps({"instances": x.tolist()}).encode())
    np.testing.assert_allclose(answer.fields["predictions"], expected(x), rtol=1e-4, atol=1e-4)
    pictures = [{"data": base64.b64encode(picture(each)).decode()} for each in ("red", "lime")]
    answer = http.ask("POST", "/v1/models/colours:predict", json.dumps({"instances": pictures}).encode())
    assert answer.fields == {"predictions": [{"red": 1.0, "green": 0.0}, {"green": 1.0, "red": 0.0}]}
    assert http.ask("GET", "/v1/models/mlp").fields == {"name": "mlp", "ready": True}
    assert told(http.ask("POST", "/v1/models/mlp:predict", b"{}")) == (400, "BadRequestException")


# ---- models that run a handler --------------------------------------------------------------------------------------


def test_a_handler_gets_every_part_with_its_type_and_sets_status_and_headers(http):
    parts = form(("data", "a.txt", b"one"), ("more", None, b"two"))
    answer = http.ask("POST", "/predictions/handler", parts, content_type=FORM, x_tag="7", authorization="Bearer x")
    assert answer.status == 201
    assert answer.fields["parts"] == {"data": ["application/octet-stream", "one"], "more": ["", "two"]}
    assert (answer.fields["tag"], answer.fields["secret"]) == ("7", None)
    assert answer.headers["content-type"] == "text/weird"
    assert answer.headers["x-mine"] == "yes"
    assert "bad" not in answer.headers


@pytest.mark.parametrize(
    ("kind", "body", "parts"),
    [
        ("application/json", b'{"a": 1}', {"body": ["application/json", '{"a": 1}']}),
        ("text/plain; charset=utf-8", b"hello", {"body": ["text/plain", "hello"]}),
        ("application/x-www-form-urlencoded", b"data=a+b&k=", {"data": ["", "a b"], "k": ["", ""]}),
    ],
)
def test_a_handler_gets_a_plain_body_as_such(http, kind, body, parts):
    assert http.ask("POST", "/predictions/handler", body, content_type=kind).fields["parts"] == parts


def test_a_handlers_own_error_is_answered_with_its_code(http):
    assert told(http.ask("POST", "/predictions/handler", b"fail", content_type="text/plain")) == (
        507, "InternalServerException",
    )  # fmt: skip


def test_a_handler_gets_each_instance_by_itself(http):
    answer = http.ask("POST", "/v1/models/handler:predict", b'{"instances": [1, {"b": 2}]}')
    kind = "application/json"
    assert [each["parts"] for each in answer.fields["predictions"]] == [{"body": [kind, "1"]}, {"b": [kind, "2"]}]
    many = json.dumps({"instances": [*range(200)]}).encode()
    answers = http.ask("POST", "/v1/models/handler:predict", many).fields["predictions"]
    assert [each["parts"]["body"][1] for each in answers] == [str(each) for each in range(200)]
    assert {each["rows"] for each in answers} == {200}
    http.send(b"".join(request("POST", "/predictions/handler", b"x", content_type="text/plain") for _ in range(16)))
    assert [http.response().fields["rows"] for _ in range(16)] == [1] * 16, "its max_batch_rows bounds other requests"
    answer = http.ask("POST", "/v1/models/handler:predict", b'{"instances": [{"fail": 1}, {"b": 2}]}')
    assert told(answer) == (507, "InternalServerException")
    too_many = json.dumps({"instances": [0] * 2_000}).encode()
    assert told(http.ask("POST", "/v1/models/handler:predict", too_many)) == (400, "BadRequestException")


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body", "error"),
    [
        ("POST", "/predictions/absent", b"x", (404, "ModelNotFoundException")),
        ("POST", "/predictions/mlp/9.0", b"x", (404, "ModelVersionNotFoundException")),
        ("POST", "/predictions/mlp/1.5", b"x", (404, "ModelVersionNotFoundException")),
        ("POST", "/predictions/mlp", b"abc", (400, "BadRequestException")),
        ("POST", "/predictions/mlp", b"[1, [2]]", (400, "BadRequestException")),
        ("POST", "/predictions/mlp", b"{", (400, "BadRequestException")),
        ("POST", "/predictions/mlp", b"[" * 200_000, (400, "BadRequestException")),
        ("POST", "/v1/models/mlp:predict", json.dumps({"instances": [[0] * 16, [0] * 10, [0] * 22]}).encode(),
         (400, "BadRequestException")),
        ("POST", "/predictions/colours", b"no picture", (400, "BadRequestException")),
        ("POST", "/predictions/pair", b'{"a": [1]}', (400, "BadRequestException")),
        ("DELETE", "/predictions/mlp", b"", (405, "MethodNotAllowedException")),
        ("POST", "/explanations/mlp", b"x", (501, "InternalServerException")),
        ("GET", "/models/absent", b"", (404, "ModelNotFoundException")),
        ("GET", "/models/mlp/7", b"", (404, "ModelVersionNotFoundException")),
        ("GET", "/models?limit=many", b"", (400, "BadRequestException")),
        ("POST", "/models?url=https://example.com/a.mar", b"", (501, "InternalServerException")),
        ("POST", "/models", b"", (400, "BadRequestException")),
        ("PUT", "/models/mlp?min_worker=0", b"", (400, "BadRequestException")),
        ("PUT", "/models/absent?min_worker=1", b"", (404, "ModelNotFoundException")),
        ("PUT", "/models/mlp/1.0/set-default", b"", (501, "InternalServerException")),
    ],
)  # fmt: skip
def test_errors_are_in_torchserves_form(http, method, path, body, error):
    assert told(http.ask(method, path, body)) == error


def test_an_unknown_model_is_named_as_torchserve_names_it(http):
    assert http.ask("POST", "/predictions/absent", b"x").fields["message"] == "Model not found: absent"
    message = http.ask("POST", "/predictions/mlp/9.0", b"x").fields["message"]
    assert message == "Model version: 9.0 does not exist for model: mlp"


# ---- models and health ----------------------------------------------------------------------------------------------


def test_ping_is_healthy(http):
    answer = http.ask("GET", "/ping")
    assert (answer.status, answer.fields) == (200, {"status": "Healthy"})


def test_models_are_listed_in_pages(http):
    names = ["colours", "handler", "late", "mlp", "pair", "pets", "segments", "text"]
    assert [each["modelName"] for each in http.ask("GET", "/models").fields["models"]] == names
    page = http.ask("GET", "/models?limit=2&next_page_token=2").fields
    assert [each["modelName"] for each in page["models"]] == names[2:4]
    assert page["nextPageToken"] == "4"


def test_a_model_is_described_with_its_newest_a_named_or_all_versions(http):
    for path, versions in (("", ["2.0"]), ("/1.0", ["1.0"]), ("/all", ["1.0", "2.0"])):
        found = http.ask("GET", f"/models/mlp{path}").fields
        assert [each["modelVersion"] for each in found] == versions
    assert found[0]["workers"][0]["status"] == "READY"


def test_a_model_is_unregistered_and_registered_by_who_may_control(http):
    assert http.ask("DELETE", "/models/text").fields == {"status": 'Model "text" unregistered'}
    assert told(http.ask("POST", "/predictions/text", b"x"))[0] in {404, 503}
    answer = http.ask("POST", "/models?url=text.mar&initial_workers=1&synchronous=true")
    runs = http.ask("GET", "/models/text").fields[0]["minWorkers"]
    assert answer.fields == {"status": f'Model "text" registered with {runs} initial workers'}
    assert http.ask("POST", "/predictions/text", b"x").body == b"x"
    told_so = http.ask("PUT", "/models/text?min_worker=1").fields["status"]
    assert told_so == f"Workers scaled to {runs} for model: text"
    assert f"Workers scaled to {runs} (9999 were asked for; cores" in http.ask(
        "PUT", "/models/text?min_worker=9999"
    ).fields["status"]  # fmt: skip


def test_workers_are_reported_where_the_device_has_no_room_for_them(http):
    status = http.ask("POST", "/models?url=handler.mar&initial_workers=4&synchronous=true").fields["status"]
    assert 'Model "handler" registered with 1 (4 were asked for; cores, backend' in status


def test_without_the_setting_and_without_control_the_paths_give_nothing_away(models, tmp_path):
    off, on = HttpSettings(endpoint="127.0.0.1:0"), HttpSettings(endpoint="127.0.0.1:0", torchserve=True)
    with running_daemon(models, tmp_path / "off", http=off) as daemon, RawHttp(http_url(daemon)) as http:
        assert http.ask("GET", "/ping").status == 404
        assert http.ask("POST", "/predictions/mlp", b"[]").status == 404
    with running_daemon(models, tmp_path / "on", http=on) as daemon, RawHttp(http_url(daemon)) as http:
        assert told(http.ask("DELETE", "/models/mlp"))[0] == 403
        assert told(http.ask("POST", "/models?url=mlp.mar"))[0] == 403
        assert http.ask("GET", "/models").status == 200
        evil = {"origin": "https://evil.example", "content_type": "text/plain"}
        assert told(http.ask("POST", "/predictions/mlp", b"[]", **evil))[0] == 403
