"""Good and odd requests of several models in one burst: each has exactly one reply, and nothing is kept of any."""

from __future__ import annotations

import gc
import json
import random

import msgpack
import numpy as np
import pytest

from edge_runtime.models.servable import Servable
from edge_runtime.request.infer_frontend import InferRoute
from edge_runtime.request.scheduled_model import LatencyModel
from tests.contract.running_daemon import RawClient, error_code, floats, header, op, put_model, running_daemon
from tests.models import onnx_models

X = floats(1, 16).tobytes()
PAIR = [{"name": "a", "datatype": "FP32", "shape": [1, 3]}, {"name": "b", "datatype": "INT64", "shape": [1, 2]}]
A, B = floats(1, 3).tobytes(), np.array([[4, 5]]).tobytes()
SUM = header("sum", (3, 4))

GOOD = [
    ([header(), X], 1),
    ([header(shape=(4, 16)), X * 4], 1),
    ([header("queued"), X], 1),
    ([header("hosted"), X], 1),
    ([header("pair", inputs=PAIR), A, B], 2),
    ([header("pair", inputs=PAIR, outputs=["twice"]), A, B], 1),
    ([SUM, floats(3, 4).tobytes()], 1),
    ([header(timing=True), X], 1),
    # Odd, and as valid: no outputs are wanted.
    ([header(outputs=[]), X], 0),
    ([header("queued", outputs=[]), X], 0),
    ([header("hosted", outputs=[]), X], 0),
    ([header("pair", inputs=PAIR, outputs=[]), A, B], 0),
    ([header("sum", (3, 4), outputs=[]), floats(3, 4).tobytes()], 0),
]
"""Header and tensors, and how many output frames come back."""

BAD = [
    ([header(), X[:-1]], "tensor_mismatch"),
    ([header("pair", inputs=PAIR), A], "tensor_mismatch"),
    ([header("pair", inputs=PAIR), A, B[:-1]], "tensor_mismatch"),
    ([header("queued"), X, X], "tensor_mismatch"),
    ([header("hosted"), X[:-1]], "tensor_mismatch"),
    ([header(outputs=["z"]), X], "tensor_mismatch"),
    ([header(shape=(0, 16)), b""], "tensor_mismatch"),
    ([header(timeout_ms=0), X], "deadline_unmeetable"),
    ([header("nobody"), X], "model_not_found"),
    ([op("fly"), X], "unsupported"),
    ([b"\xc1", X], "decode_failed"),
]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "mlp", onnx_models.mlp)
    put_model(models, "queued", onnx_models.mlp, toml='mode = "workers"\n')
    put_model(models, "hosted", onnx_models.mlp, toml='isolation = "always"\n')
    put_model(models, "pair", onnx_models.two_in_two_out)
    put_model(models, "sum", onnx_models.running_sum)
    with running_daemon(models, tmp_path_factory.mktemp("run")) as daemon:
        for each in servables("hosted"):
            # A busy machine may have found its runs longer than those which are put together.
            each.scheduled.layout.run_times = LatencyModel({1: 1e-4, 32: 1e-4})
        yield daemon


@pytest.fixture
def client(daemon):
    with RawClient(daemon.endpoints[1]) as client:
        yield client


def burst(client, generator, count):
    """Send requests without reading between them; then each has its reply, and there is no other."""
    expected = {}
    for index in range(count):
        frames, want = generator.choice(GOOD if generator.random() < 0.7 else BAD)
        request_id = b"%d" % index
        expected[request_id] = want
        client.send(frames[0], request_id, *frames[1:])
    for _ in range(count):
        reply = client.receive()
        want = expected.pop(reply[1])
        if isinstance(want, str):
            assert error_code(reply) == want
        else:
            assert len(msgpack.unpackb(reply[0])["outputs"]) == len(reply) - 2 == want
    assert not expected
    assert client.is_silent()


def servables(model):
    """Those of a model; closed ones of other tests may be among them, until they are collected."""
    return [each for each in gc.get_objects() if isinstance(each, Servable) and each.model == model]


def kept():
    """Requests that some known header holds on to."""
    return sum(len(each.burst) for each in gc.get_objects() if isinstance(each, InferRoute))


@pytest.mark.parametrize("seed", range(20))
def test_each_request_of_a_mixed_burst_has_exactly_one_reply(client, seed):
    generator = random.Random(seed)
    for _ in range(10):
        burst(client, generator, 100)
    assert kept() == 0
    for frames, outputs in GOOD:
        reply = client.ask(frames[0], b"after", *frames[1:])
        assert (reply[1], len(reply)) == (b"after", 2 + outputs)


def test_an_inline_model_is_not_silenced_by_a_request_that_wants_no_outputs(daemon, client):
    with RawClient(daemon.endpoints[1]) as odd:
        for _ in range(3):
            client.ask(header(), b"", X)
            odd.ask(header(outputs=[]), b"", X)
        for index in range(200):
            odd.send(header(outputs=[]), b"%d" % index, X)
            client.send(header(), b"%d" % index, X)
            client.send(header("pair", inputs=PAIR), b"%d" % index, A, B)
        for _ in range(200):
            assert len(odd.receive()) == 2
        assert sorted(len(client.receive()) for _ in range(400)) == [3] * 200 + [4] * 200
    assert kept() == 0


@pytest.mark.parametrize("stage", ["run_single", "unpack"])
def test_an_exception_in_one_models_run_is_the_answer_of_its_own_requests_alone(client, stage, monkeypatch):
    for _ in range(3):
        client.ask(header(), b"", X)
        client.ask(header("pair", inputs=PAIR), b"", A, B)

    def fail(*_):
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        for each in servables("mlp"):
            if each.inline is not None:
                patch.setattr(each.inline, stage, fail)
        for index in range(50):
            client.send(header(), b"m%d" % index, X)
            client.send(header("pair", inputs=PAIR), b"p%d" % index, A, B)
        replies = {reply[1]: reply for reply in (client.receive() for _ in range(100))}
    assert {error_code(reply) for request_id, reply in replies.items() if request_id[:1] == b"m"} == {"run_failed"}
    assert all(len(reply) == 4 for request_id, reply in replies.items() if request_id[:1] == b"p")
    assert len(replies) == 100
    assert kept() == 0
    assert len(client.ask(header(), b"", X)) == 3


@pytest.mark.parametrize("model", ["mlp", "queued", "hosted", "sum"])
def test_json_that_wants_no_outputs_is_answered_too(client, model):
    shape = [3, 4] if model == "sum" else [1, 16]
    data = np.zeros(shape).tolist()
    request = {"model": model, "id": "j", "inputs": [{"name": "x", "datatype": "FP32", "shape": shape, "data": data}]}
    for _ in range(3):
        (frame,) = client.ask(json.dumps({**request, "outputs": []}).encode())
        assert json.loads(frame)["outputs"] == []
        assert json.loads(frame)["id"] == "j"
