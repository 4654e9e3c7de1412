"""Tokens that are wrong, odd or doubled, paths that are spelled oddly, and a file of tokens that changes under load."""

from __future__ import annotations

import signal

import grpc
import pytest
from tritonclient.grpc import service_pb2

from edge_runtime.doors.access.tokens import TokenFile
from tests.contract.raw_http import RawHttp, json_infer
from tests.contract.running_daemon import ANSWER_S, floats, put_model
from tests.fakes.daemon_process import DaemonProcess
from tests.models import onnx_models

FILE, GOOD = TokenFile().with_token("reader", ("infer",))
INFER, BODY = "/v2/models/mlp/infer", json_infer([0.0] * 16)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    path.write_text(FILE.text())
    return path


@pytest.fixture(scope="module")
def daemon(tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    put_model(folder / "models", "mlp", onnx_models.mlp)
    doors = "".join(
        f'[{door}]\nendpoint = "127.0.0.1:0"\ntokens_file = "{tokens}"\n{more}'
        for door, more in (("http", "torchserve = true\n"), ("grpc", ""))
    )
    with DaemonProcess(folder, config=doors) as daemon:
        daemon.wait_ready()
        yield daemon


def asked(daemon, *headers: bytes, method: str = "POST", path: str = INFER, body: bytes = BODY) -> int:
    lines = (
        f"{method} {path} HTTP/1.1".encode(),
        b"Host: localhost",
        b"Content-Length: %d" % len(body),
        *headers,
        b"",
        b"",
    )
    with RawHttp(daemon.address("http")) as http:
        http.send(b"\r\n".join(lines) + body)
        return http.response().status


BEARER = b"Authorization: Bearer "


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 401), ([BEARER], 401), ([b"Authorization:"], 401), ([BEARER + GOOD[:-1].encode()], 401),
        ([BEARER + GOOD.encode() + b"a"], 401), ([BEARER + GOOD.lower().encode()], 401),
        ([BEARER + b"\xe4\xff\x80"], 401), ([BEARER + b"x" * 8000], 401), ([BEARER + b"x" * 100_000], 431),
        ([BEARER + b"a\0b"], 400), ([b"Authorization: Basic " + GOOD.encode()], 401),
        ([BEARER + GOOD.encode()] * 2, 400), ([BEARER + b"x", BEARER + GOOD.encode()], 400),
        ([BEARER + GOOD.encode(), BEARER + b"x"], 400), ([BEARER + GOOD.encode() + b", Bearer x"], 401),
        ([b"aUTHORIZATION: bEARER " + GOOD.encode()], 200),
    ],
)  # fmt: skip
def test_http_answers_a_whole_token_alone(daemon, headers, status):
    assert asked(daemon, *headers) == status
    assert asked(daemon, BEARER + GOOD.encode()) == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v2/repository/models/mlp/unload", "/v2/repository/models/mlp/unload/", "/V2/repository/models/mlp/unload",
        "/v2/%72epository/models/mlp/unload", "/v2/repository/models/mlp/%75nload", "//v2/repository/models/mlp/unload",
        "/v2/./repository/models/mlp/unload", "/v2/health/live/../../repository/models/mlp/unload",
        "/v2/repository/models/mlp%2Funload", "/v2/repository/models/mlp/unload?x=/v2/health/live",
        "/v2/repository/models/mlp/unload#/v2/health/live", "/v2/repository/models/mlp/unload;a=b",
        "/v2\\repository/models/mlp/unload", "/models?url=mlp.mar", "/models?url=http%3A%2F%2F127.0.0.1%2Fa.mar",
    ],
)  # fmt: skip
def test_no_spelling_of_a_path_gives_a_right(daemon, path):
    assert asked(daemon, path=path, body=b"{}") == 401
    assert asked(daemon, BEARER + GOOD.encode(), path=path, body=b"{}") in {403, 404}
    assert asked(daemon, BEARER + GOOD.encode(), method="DELETE", path="/models/%6dlp", body=b"") == 403
    assert asked(daemon, BEARER + GOOD.encode()) == 200


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ([], "UNAUTHENTICATED"), (["Bearer x"], "UNAUTHENTICATED"), (["Bearer " + GOOD[:-1]], "UNAUTHENTICATED"),
        (["Bearer " + "x" * 8000], "UNAUTHENTICATED"), (["Bearer " + "x" * 100_000], "RESOURCE_EXHAUSTED"),
        (["Bearer x", "Bearer " + GOOD], "UNAUTHENTICATED"), (["Bearer " + GOOD, "Bearer x"], "UNAUTHENTICATED"),
        (["Bearer " + GOOD] * 2, "UNAUTHENTICATED"), (["bearer " + GOOD], "OK"),
    ],
)  # fmt: skip
def test_grpc_answers_a_whole_token_alone(daemon, given, status):
    with grpc.insecure_channel(daemon.address("grpc").removeprefix("grpc://")) as channel:
        assert asked_grpc(channel, given) == status
        assert asked_grpc(channel, ["Bearer " + GOOD]) == "OK"


def asked_grpc(channel, tokens) -> str:
    request = service_pb2.ModelInferRequest(model_name="mlp", raw_input_contents=[floats(1, 16).tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 16])
    ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    metadata = [("authorization", each) for each in tokens]
    return ask.future(request.SerializeToString(), metadata=metadata, timeout=ANSWER_S).code().name


def test_a_file_that_changes_or_breaks_under_load_costs_no_holder_of_a_token_an_answer(daemon, tokens):
    texts = (FILE.text(), FILE.with_token("another", ("infer",))[0].text(), "broken [")
    try:
        with (
            RawHttp(daemon.address("http")) as http,
            RawHttp(daemon.address("http")) as stranger,
            grpc.insecure_channel(daemon.address("grpc").removeprefix("grpc://")) as channel,
        ):
            for index in range(60):
                part = tokens.with_suffix(".part")
                part.write_text(texts[index % len(texts)])
                part.replace(tokens)
                daemon.process.send_signal(signal.SIGHUP)
                for _ in range(5):
                    assert http.ask("POST", INFER, BODY, authorization=f"Bearer {GOOD}").status == 200
                    assert stranger.ask("POST", INFER, BODY, authorization=f"Bearer ert_{'z' * 43}").status == 401
                assert asked_grpc(channel, ["Bearer " + GOOD]) == "OK"
    finally:
        tokens.write_text(FILE.text())
    assert GOOD not in str(daemon.log())
