"""Large JSON over HTTP: its numbers become arrays beside the door's thread, and answers keep their order."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.wire import json_codec
from tests.contract.raw_http import RawHttp, request
from tests.contract.running_daemon import floats, http_url, put_model, running_daemon
from tests.models import onnx_models

LARGE_ROWS = 16
"""Some 300 KB of JSON: floats of 20 characters."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    models = tmp_path_factory.mktemp("models")
    put_model(models, "doubled", onnx_models.scaled, factor=2.0)
    settings = HttpSettings(endpoint="127.0.0.1:0", tensorflow_serving=True)
    with running_daemon(models, tmp_path_factory.mktemp("run"), http=settings) as daemon:
        with RawHttp(http_url(daemon)) as raw:  # its thread for large bodies starts here
            assert raw.ask("POST", "/v2/models/doubled/infer", body_of(floats(LARGE_ROWS, 1024))).status == 200
        yield daemon


@pytest.fixture
def raw(daemon: Daemon) -> Iterator[RawHttp]:
    with RawHttp(http_url(daemon)) as raw:
        yield raw


def body_of(x: np.ndarray, shape: tuple[int, ...] | None = None, **fields: object) -> bytes:
    inputs = [{"name": "x", "datatype": "FP32", "shape": shape or x.shape, "data": x.ravel().tolist()}]
    return json.dumps({**fields, "inputs": inputs}).encode()


def result(body: bytes) -> np.ndarray:
    fields = json.loads(body)
    if "predictions" in fields:
        return np.array(fields["predictions"], np.float32)
    (output,) = fields["outputs"]
    return np.array(output["data"], np.float32).reshape(output["shape"])


@pytest.mark.smoke
@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("path", ["/v2/models/doubled/infer", "/v1/models/doubled:predict"])
def test_numbers_of_a_large_body_become_arrays_beside_the_doors_thread(raw, monkeypatch, path, is_known):
    makers = []
    for name in ("array_from_json", "pack_tensors"):
        real = getattr(json_codec, name)

        def noting(*args, real=real, **options):
            makers.append(threading.current_thread().name)
            return real(*args, **options)

        monkeypatch.setattr(json_codec, name, noting)
    x = floats(LARGE_ROWS, 1024)
    for _ in range(4 if is_known else 1):
        body = body_of(x) if path.startswith("/v2") else json.dumps({"instances": x.tolist()}).encode()
        answer = raw.ask("POST", path, body)
        np.testing.assert_allclose(result(answer.body), x * 2, rtol=1e-6)
    assert {name.partition("_")[0] for name in makers} == {"edge-http-body"}


def test_answers_of_a_connection_keep_their_order_around_large_bodies(raw):
    sent = [floats(rows, 1024, seed=seed) for seed, rows in enumerate((LARGE_ROWS, 1, LARGE_ROWS, 1, 1))]
    path = "/v2/models/doubled/infer"
    raw.send(b"".join(request("POST", path, body_of(x, id=str(at))) for at, x in enumerate(sent)))
    for at, x in enumerate(sent):
        answer = raw.response()
        assert json.loads(answer.body)["id"] == str(at)
        np.testing.assert_allclose(result(answer.body), x * 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "shape", "status", "code"),
    [
        ("doubled", (LARGE_ROWS, 1023), 400, "tensor_mismatch"),
        ("doubled", (LARGE_ROWS * 1024,), 400, "tensor_mismatch"),
        ("absent", (LARGE_ROWS, 1023), 404, "model_not_found"),
    ],
)
def test_a_large_body_that_does_not_fit_is_refused_as_a_small_one_is(raw, model, shape, status, code):
    answer = raw.ask("POST", f"/v2/models/{model}/infer", body_of(floats(LARGE_ROWS, 1024), shape))
    assert (answer.status, answer.code) == (status, code)
