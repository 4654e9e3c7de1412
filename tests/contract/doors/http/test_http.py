"""The HTTP door, asked by unmodified clients: Triton's own, and curl."""

from __future__ import annotations

import gzip
import json
import shutil
import socket
import subprocess

import numpy as np
import pytest
import tritonclient.http as triton

from edge_runtime.doors.http.settings import HttpSettings
from tests.contract.raw_http import RawHttp, binary_infer, json_infer, request
from tests.contract.running_daemon import floats, http_url, put_model, running_daemon
from tests.models import onnx_models

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:gevent")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "mlp", onnx_models.mlp)
    put_model(models, "queued", onnx_models.mlp, toml='mode = "workers"\n')
    put_model(models, "pair", onnx_models.two_in_two_out)
    put_model(models, "text", onnx_models.identity, datatype="BYTES")
    return models


@pytest.fixture(scope="module")
def daemon_here(models, tmp_path_factory):
    settings = HttpSettings(endpoint="127.0.0.1:0")
    with running_daemon(models, tmp_path_factory.mktemp("run"), http=settings) as daemon:
        with RawHttp(http_url(daemon)) as raw:  # starts the thread that inflates
            raw.ask("POST", "/v2/models/mlp/infer", gzip.compress(b"{}"), content_encoding="gzip")
        yield daemon


@pytest.fixture
def url(daemon_here):
    return http_url(daemon_here)


@pytest.fixture
def client(url):
    with triton.InferenceServerClient(url.removeprefix("http://")) as client:
        yield client


def expected(x):
    first, second = onnx_models.mlp_weights()
    return np.maximum(x @ first, 0) @ second


def tensor(array, *, binary=True, name="x", datatype="FP32"):
    found = triton.InferInput(name, list(array.shape), datatype)
    found.set_data_from_numpy(array, binary_data=binary)
    return found


def test_health_and_metadata_are_as_triton_reports_them(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("mlp")
    assert not client.is_model_ready("absent")
    assert client.get_server_metadata()["name"] == "edge-runtime"
    assert client.get_model_metadata("mlp")["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 16]}]
    assert [each["name"] for each in client.get_model_repository_index()] == ["mlp", "pair", "queued", "text"]


@pytest.mark.smoke
@pytest.mark.parametrize("model", ["mlp", "queued"])
@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_an_answer_is_the_models_in_each_form(client, model, binary_in, binary_out):
    wanted = [triton.InferRequestedOutput("y", binary_data=binary_out)]
    for seed in range(4):  # the third is of a known header
        x = floats(2, 16, seed=seed)

        result = client.infer(model, [tensor(x, binary=binary_in)], outputs=wanted, request_id=f"my {seed}")

        np.testing.assert_allclose(result.as_numpy("y"), expected(x), rtol=1e-4, atol=1e-4)
        assert result.get_response()["id"] == f"my {seed}"
        assert result.get_response()["model_version"] == "1"


def test_each_request_of_a_burst_gets_its_own_answer(url):
    with triton.InferenceServerClient(url.removeprefix("http://"), concurrency=8) as client:
        inputs = [floats(1, 16, seed=seed) for seed in range(64)]
        pending = [client.async_infer("mlp", [tensor(x)]) for x in inputs]
        for x, each in zip(inputs, pending, strict=True):
            np.testing.assert_allclose(each.get_result().as_numpy("y"), expected(x), rtol=1e-4, atol=1e-4)


@pytest.mark.smoke
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_asks_in_json(url):
    x = floats(1, 16)
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 16], "data": x.tolist()}]}
    told = subprocess.run(
        ["curl", "-s", "--fail-with-body", f"{url}/v2/models/mlp/infer", "-d", json.dumps(body)],
        check=True, capture_output=True, timeout=60,
    ).stdout  # fmt: skip
    fields = json.loads(told)
    assert list(fields) == ["model_name", "model_version", "outputs"]
    np.testing.assert_allclose(fields["outputs"][0]["data"], expected(x)[0], rtol=1e-4, atol=1e-4)


def test_bodies_and_answers_are_compressed_where_the_client_asks(client):
    x = floats(2, 16)
    for coding in ("gzip", "deflate"):
        result = client.infer(
            "mlp", [tensor(x)], request_compression_algorithm=coding, response_compression_algorithm=coding
        )
        np.testing.assert_allclose(result.as_numpy("y"), expected(x), rtol=1e-4, atol=1e-4)


def test_a_raw_request_is_one_inputs_data_and_nothing_else(url):
    x = floats(1, 16)
    with RawHttp(url) as raw:
        answer = raw.ask("POST", "/v2/models/mlp/infer", x.tobytes(), inference_header_content_length=0)

        length = int(answer.headers["inference-header-content-length"])
        y = np.frombuffer(answer.body[length:], np.float32)
        np.testing.assert_allclose(y, expected(x)[0], rtol=1e-4, atol=1e-4)
        assert raw.ask("POST", "/v2/models/mlp/infer", b"abc", inference_header_content_length=0).status == 400
        assert raw.ask("POST", "/v2/models/pair/infer", b"abc", inference_header_content_length=0).status == 400


def test_text_goes_both_ways_in_each_form(client):
    words = np.array([[b"a", "\N{SNOWMAN}".encode()], [b"", b"c"]], dtype=object)
    for binary in (True, False):
        asked = triton.InferInput("x", [2, 2], "BYTES").set_data_from_numpy(words, binary_data=binary)
        result = client.infer("text", [asked], outputs=[triton.InferRequestedOutput("y", binary_data=binary)])
        got = [each if isinstance(each, bytes) else each.encode() for each in result.as_numpy("y").reshape(-1)]
        assert got == words.reshape(-1).tolist()


def test_a_chunked_body_and_one_that_waits_for_leave_are_read(url):
    body = json_infer([1.0] * 16)
    chunks = b"".join(
        b"%x;ext=1\r\n%b\r\n" % (len(body[at : at + 7]), body[at : at + 7]) for at in range(0, len(body), 7)
    )
    live = request("GET", "/v2/health/live")
    with RawHttp(url) as raw:
        raw.send(request("POST", "/v2/models/mlp/infer", transfer_encoding="chunked") + chunks + b"0\r\n\r\n" + live)
        assert raw.response().status == 200
        assert raw.response().fields == {"live": True}

        raw.send(request("POST", "/v2/models/mlp/infer", content_length=len(body), expect="100-continue"))
        assert raw.response().status == 100
        raw.send(body)
        assert raw.response().status == 200
        assert raw.ask("POST", "/v2/models/mlp/infer", body).status == 200


def test_a_body_in_pieces_is_the_same_request(url):
    x = floats(1, 16)
    body, length = binary_infer(x.tobytes())
    whole = request("POST", "/v2/models/mlp/infer", body, inference_header_content_length=length)
    with RawHttp(url) as raw:
        raw.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for cut in (10, len(whole) - len(body), len(whole) - 64, len(whole) - 1):
            raw.send(whole[:cut])
            assert raw.is_silent(0.02)
            raw.send(whole[cut:])
            answer = raw.response()
            assert answer.status == 200
            y = np.frombuffer(answer.body[-16:], np.float32)
            np.testing.assert_allclose(y, expected(x)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("body", "length"),
    [(b"", None), (b"{}", None), (b'{"inputs":[]}', None), (b'{"inputs":[]}abcd', 13), (b"abcd", 0), (b"abcd", 4)],
)
def test_a_bad_version_is_404_however_its_request_is_cut(url, body, length):
    """However little of the body makes sense: a request is refused by its head where the rest is still to come."""
    more = {} if length is None else {"inference_header_content_length": length}
    whole = request("POST", "/v2/models/mlp/versions/9/infer", body, **more)
    for pieces in (*((whole[:cut], whole[cut:]) for cut in range(len(whole))), [bytes([each]) for each in whole]):
        with RawHttp(url) as raw:  # each by its own: what is refused before its end closes the connection
            raw.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for piece in pieces:
                raw.send(piece)
            answer = raw.response()
            assert (answer.status, answer.code) == (404, "model_not_found")


def test_a_large_body_lies_in_its_place_and_is_answered(url, daemon_here):
    words = [bytes([97 + index % 26]) * 6000 for index in range(512)]
    data = b"".join(len(word).to_bytes(4, "little") + word for word in words)
    item = {"name": "x", "datatype": "BYTES", "shape": [256, 2], "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [item], "parameters": {"binary_data_output": True}}).encode()
    with RawHttp(url) as raw:
        for _ in range(3):
            answer = raw.ask("POST", "/v2/models/text/infer", head + data, inference_header_content_length=len(head))
            assert answer.status == 200
            assert answer.body.endswith(data)


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v2/models/absent/infer", json_infer([0.0] * 16), 404, "model_not_found"),
        ("/v2/models/mlp/versions/9/infer", json_infer([0.0] * 16), 404, "model_not_found"),
        ("/v2/models/mlp/infer", json_infer([0.0] * 15), 400, "tensor_mismatch"),
        ("/v2/models/mlp/infer", json_infer([0.0] * 15, (1, 15)), 400, "tensor_mismatch"),
        ("/v2/models/mlp/infer", b"{}", 400, "tensor_mismatch"),
        ("/v2/repository/models/mlp/unload", b"{}", 403, "forbidden"),
    ],
)
def test_an_error_has_tritons_status_and_our_code(url, path, body, status, code):
    with RawHttp(url) as raw:
        answer = raw.ask("POST", path, body)

    assert (answer.status, answer.code) == (status, code)


def test_a_path_that_is_not_there_names_those_that_are(url):
    with RawHttp(url) as raw:
        below, beside = raw.ask("GET", "/v2/models"), raw.ask("GET", "/models")
    assert (below.status, beside.status) == (404, 404)
    assert b"repository/index (POST; it lists the models)" in below.body
    assert b"the protocol's paths begin with /v2" in beside.body


@pytest.mark.parametrize(
    ("headers", "parameters"),
    [
        ({"x_request_timeout_ms": "0"}, {}),
        ({"x_request_timeout_seconds": "0"}, {}),
        ({}, {"timeout_ms": 0}),
        ({"x_request_timeout_ms": "5000", "x_request_timeout_seconds": "0"}, {"timeout": 10_000_000}),
    ],
)
def test_the_smallest_timeout_counts_and_a_refusal_says_when_to_ask_again(url, headers, parameters):
    with RawHttp(url) as raw:
        answer = raw.ask("POST", "/v2/models/queued/infer", json_infer([0.0] * 16, parameters=parameters), **headers)

    assert (answer.status, answer.code) == (503, "deadline_unmeetable")
    assert int(answer.headers["retry-after"]) >= 1
    assert int(answer.headers["retry-after-ms"]) >= 0


def test_http_1_0_and_close_end_the_connection(url):
    for head in (b"GET /v2/health/live HTTP/1.0\r\n\r\n", request("GET", "/v2/health/live", connection="close")):
        with RawHttp(url) as raw:
            raw.send(head)
            answer = raw.response()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert raw.has_ended()
    with RawHttp(url) as raw:
        raw.send(b"GET /v2/health/live HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" * 2)
        assert [raw.response().headers["connection"] for _ in range(2)] == ["keep-alive"] * 2


def test_a_large_body_is_refused_by_its_head_where_the_forecast_says_so(url):
    with RawHttp(url) as raw:
        raw.send(request("POST", "/v2/models/queued/infer", content_length=1 << 20, x_request_timeout_ms="0.001"))
        answer = raw.response()
        assert (answer.status, answer.code) == (503, "deadline_unmeetable")
        assert raw.has_ended()
    with RawHttp(url) as raw:
        raw.send(request("POST", "/v2/models/absent/infer", content_length=1 << 20))
        assert raw.response().code == "model_not_found"


def test_a_deadline_counts_from_the_head(url):
    body, length = binary_infer(bytes(64))
    whole = request(
        "POST", "/v2/models/mlp/infer", body, inference_header_content_length=length, x_request_timeout_ms="100"
    )
    with RawHttp(url) as raw:
        for _ in range(3):
            raw.send(whole)
            assert raw.response().status == 200
        raw.send(whole[:-64])
        assert raw.is_silent(0.3)
        raw.send(whole[-64:])
        assert raw.response().code in {"deadline_unmeetable", "deadline_exceeded"}


@pytest.mark.parametrize("request_id", [b"line\nbreak", b"\x01", b"\xff\xfe"], ids=["line feed", "control", "no UTF-8"])
def test_an_id_that_is_not_json_text_is_refused_beside_known_requests_too(url, request_id):
    x = floats(1, 16).tobytes()
    tail = (
        b'"inputs":[{"name":"x","datatype":"FP32","shape":[1,16],"parameters":{"binary_data_size":64}}],'
        b'"parameters":{"binary_data_output":true}}'
    )

    def asked(text: bytes):
        head = b'{"id":"' + text + b'",' + tail
        return raw.ask("POST", "/v2/models/mlp/infer", head + x, inference_header_content_length=str(len(head)))

    with RawHttp(url) as raw:
        for number in range(4):  # known from the third on
            assert asked(b"id %d %s" % (number, b"x" * len(request_id))).status == 200
        refused = asked(b"id 9 " + request_id)
        assert (refused.status, refused.code) == (400, "decode_failed")
