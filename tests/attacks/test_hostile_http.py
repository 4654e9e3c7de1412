"""What strangers send to the HTTP door: each gets one clear answer or a closed connection, and nobody else notices."""

from __future__ import annotations

import gzip
import json
import resource
import socket
import zlib
from contextlib import ExitStack

import numpy as np
import pytest

from tests.contract.raw_http import RawHttp, binary_infer, json_infer, request
from tests.contract.running_daemon import floats, put_model
from tests.fakes.daemon_process import GROWTH_BYTES, DaemonProcess
from tests.models import onnx_models

INFER = "/v2/models/mlp/infer"
BODY_TIMEOUT_S = 2.0
"""More than a busy machine needs for the bodies here that come whole."""
MAX_BODY_BYTES = 8 << 20
MANY = 600
INFLATED_BYTES = 16 << 20
"""Of bodies under inflation: two of the largest."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """A process of its own: what strangers hold is not part of its memory."""
    folder = tmp_path_factory.mktemp("run")
    put_model(folder / "models", "mlp", onnx_models.mlp)
    put_model(folder / "models", "queued", onnx_models.mlp, toml='mode = "workers"\n')
    put_model(folder / "models", "text", onnx_models.identity, datatype="BYTES")
    config = f"""[http]
endpoint = "127.0.0.1:0"
max_body_bytes = {MAX_BODY_BYTES}
body_timeout_s = {BODY_TIMEOUT_S}
max_connections = 256
control = true
[shared_memory]
client_named = true
[limits]
message_bytes = {INFLATED_BYTES}
"""
    with DaemonProcess(folder, config=config) as daemon:
        daemon.wait_ready()
        with RawHttp(daemon.address("http")) as client:  # starts the thread that inflates
            client.ask("POST", INFER, gzip.compress(b"{}"), content_encoding="gzip")
        yield daemon


@pytest.fixture
def url(daemon):
    return daemon.address("http")


@pytest.fixture
def honest(url):
    """A client that was there before, and is answered as before afterwards."""
    with RawHttp(url) as client:
        assert is_answered(client)
        yield client
        assert is_answered(client)


@pytest.fixture
def stranger(url, honest):
    with RawHttp(url) as client:
        yield client


def is_answered(client: RawHttp) -> bool:
    x = floats(1, 16)
    body, length = binary_infer(x.tobytes())
    answer = client.ask("POST", INFER, body, inference_header_content_length=length)
    return answer.status == 200 and len(answer.body) == int(answer.headers["inference-header-content-length"]) + 16


POST = b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
BAD_HEADS = {
    "both lengths": POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "both, the other way": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n",
    "two lengths": POST + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\n",
    "two equal lengths": POST + b"Content-Length: 4\r\nContent-Length: 4\r\n\r\nabcd",
    "a list of lengths": POST + b"Content-Length: 4, 4\r\n\r\nabcd",
    "a negative length": POST + b"Content-Length: -1\r\n\r\n",
    "a length over 64 bits": POST + b"Content-Length: 99999999999999999999\r\n\r\n",
    "a folded header": POST + b"A: b\r\n c\r\n\r\n",
    "a bare line feed": b"GET /v2 HTTP/1.1\nHost: localhost\r\n\r\n",
    "bare line feeds only": b"GET /v2 HTTP/1.1\nHost: localhost\n\n",
    "a bare carriage return": POST + b"A: b\rC: d\r\n\r\n",
    "a space before the colon": POST + b"A : b\r\n\r\n",
    "a NUL": POST + b"A: b\0c\r\n\r\n",
    "an unknown transfer encoding": POST + b"Transfer-Encoding: xchunked\r\n\r\n",
    "two transfer encodings": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
    "a transfer encoding more": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
    "two hosts": POST + b"Host: evil\r\n\r\n",
    "no host": b"GET /v2 HTTP/1.1\r\n\r\n",
    "HTTP/0.9": b"GET /v2\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "a bad chunk size": CHUNKED + b"0x4\r\nabcd\r\n0\r\n\r\n",
    "a negative chunk size": CHUNKED + b"-4\r\n",
    "a chunk size over 64 bits": CHUNKED + b"fffffffffffffffff\r\n",
    "a chunk size behind a bare line feed": CHUNKED + b"4\nabcd\r\n0\r\n\r\n",
    "a chunk longer than it says": CHUNKED + b"2\r\nabcd\r\n",
}


@pytest.mark.parametrize("head", BAD_HEADS.values(), ids=BAD_HEADS)
def test_a_head_that_smuggles_is_refused_and_its_connection_closed(stranger, head):
    stranger.send(head + b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")

    answer = stranger.response()
    assert answer.status in {400, 501, 505}, answer
    assert answer.code == "decode_failed"
    assert answer.headers["connection"] == "close"
    assert stranger.has_ended()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/index.php", 404),
        ("GET", "/v2/", 404),
        ("GET", "/V2", 404),
        ("GET", "/v2/models/mlp/versions/x", 404),
        ("GET", "/v2/../../etc/passwd", 404),
        ("POST", "/v2", 405),
        ("HEAD", "/v2/health/live", 405),
        ("DELETE", "/v2/models/mlp", 405),
        ("GET", INFER, 405),
    ],
)
def test_an_unknown_path_is_404_and_a_wrong_verb_405(stranger, method, path, status):
    answer = stranger.ask(method, path)

    assert answer.status == status
    assert method == "HEAD" or answer.fields["error"]


def test_a_flood_of_headers_is_refused(stranger):
    stranger.send(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 5000)

    assert stranger.response().status == 431
    assert stranger.has_ended()


def test_a_body_over_the_bound_is_refused_by_its_head(stranger):
    stranger.send(request("POST", INFER, content_length=MAX_BODY_BYTES + 1))

    assert stranger.response().status == 413
    assert stranger.has_ended()


def test_chunks_over_the_bound_are_refused(stranger):
    stranger.send(request("POST", INFER, transfer_encoding="chunked") + b"%x\r\n" % (MAX_BODY_BYTES + 1))

    assert stranger.response().status == 413


def test_a_trailer_without_an_end_is_refused(stranger):
    stranger.send(request("POST", INFER, transfer_encoding="chunked") + b"0\r\n" + b"a: b\r\n" * 5000)

    assert stranger.response().status == 431


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_bomb_is_refused_before_it_fills_the_memory(daemon, stranger, coding):
    zeros = bytes(96 << 20)
    bomb = gzip.compress(zeros, 9) if coding == "gzip" else zlib.compress(zeros, 9)
    before = daemon.resident_bytes()

    answer = stranger.ask("POST", INFER, bomb, content_encoding=coding)

    assert answer.status == 413
    assert daemon.resident_bytes() - before < 64 << 20


@pytest.mark.parametrize("is_json", [pytest.param(True, id="JSON"), pytest.param(False, id="binary")])
def test_many_bodies_that_inflate_share_one_budget(daemon, url, honest, is_json):
    size = MAX_BODY_BYTES // 64 * 60
    tensor = {"name": "x", "datatype": "FP32", "shape": [size // 64, 16], "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [tensor]}).encode()
    text, headers = (b'{"inputs":[' + b"0," * (size // 2) + b"0]}", {}) if is_json else (head + bytes(size), {})
    if not is_json:
        headers["inference_header_content_length"] = len(head)
    whole = request("POST", INFER, gzip.compress(text, 1), content_encoding="gzip", **headers)
    before, peak = daemon.resident_bytes(), 0
    with ExitStack() as stack:
        strangers = [stack.enter_context(RawHttp(url)) for _ in range(16)]
        for each in strangers:
            each.send(whole * 4)
        for each in strangers:
            for _ in range(4):
                assert each.response().code in {"decode_failed", "tensor_mismatch", "queue_full"}
                peak = max(peak, daemon.resident_bytes())
            assert is_answered(honest)
    # Twice the budget: a body is copied where it is read, and free memory is returned late.
    assert peak - before < 2 * INFLATED_BYTES + GROWTH_BYTES


NO_UNICODE = ("\ud800", "x\udfff", "\udc80", "\0", "\ud83d\ude00\ud83d")
"""Text that JSON may have and no file, and no UTF-8, can: halves of surrogate pairs, and a NUL."""


def calls_with(odd: str):
    """Every call of the protocol with this text in each place that a client fills in."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [0.0] * 16}
    region = {"shared_memory_region": odd, "shared_memory_byte_size": 64}
    yield "/v2/systemsharedmemory/region/r/register", {"key": odd, "offset": 0, "byte_size": 64}
    yield "/v2/cudasharedmemory/region/r/register", {"raw_handle": {"b64": odd}, "device_id": 0, "byte_size": 64}
    for key in tensor:
        yield INFER, {"inputs": [{**tensor, key: odd}]}
    for parameters in ({odd: odd}, region):
        yield INFER, {"inputs": [{**tensor, "parameters": parameters}]}
        yield INFER, {"inputs": [tensor], "outputs": [{"name": odd, "parameters": parameters}]}
        yield INFER, {"inputs": [tensor], "parameters": parameters}
    yield INFER, {"inputs": [tensor], "id": odd}
    yield INFER, {"picture": odd}
    yield "/v2/models/text/infer", {"inputs": [{**tensor, "datatype": "BYTES", "shape": [1, 2], "data": [odd, odd]}]}
    yield "/v2/models/text/generate", {"x": odd, odd: odd, "id": odd}
    yield "/v2/repository/index", {odd: odd, "ready": odd}
    yield "/v2/repository/models/mlp/load", {"parameters": {"config": odd, odd: odd}}
    yield "/v2/repository/models/mlp/load", {"parameters": {"config": "{}", f"file:1/{odd}": odd}}
    yield "/v2/repository/models/none/unload", {"parameters": {"unload_dependents": odd, odd: odd}}
    yield "/v2/trace/setting", {odd: odd, "trace_level": odd, "trace_file": odd}
    yield "/v2/logging", {"log_file": odd, "log_format": odd, odd: odd}


@pytest.mark.parametrize("odd", NO_UNICODE, ids=ascii)
def test_text_that_is_not_unicode_is_refused_or_answered_and_never_a_bug(daemon, stranger, odd):
    for path, fields in calls_with(odd):
        answer = stranger.ask("POST", path, json.dumps(fields).encode())
        assert answer.status == 200 or answer.code != "internal", (path, fields, answer)
    assert not [line for line in daemon.log() if "Traceback" in json.dumps(line)]


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"no gzip", {"content_encoding": "gzip"}, 400),
        (gzip.compress(json_infer([0.0] * 16), mtime=0)[:-6], {"content_encoding": "gzip"}, 400),
        (gzip.compress(json_infer([0.0] * 16), mtime=0) + b"more", {"content_encoding": "gzip"}, 400),
        (b"{}", {"content_encoding": "br"}, 501),
        (b"{}", {"expect": "a miracle"}, 417),
        (b"{}", {"inference_header_content_length": "3"}, 400),
        (b"{}", {"inference_header_content_length": "-1"}, 400),
        (b"{}", {"inference_header_content_length": "two"}, 400),
        (b"{}", {"x_request_timeout_ms": "nan"}, 400),
        (b"", {}, 400),
        (b"[1]", {}, 400),
        (b"\xff\xfe", {}, 400),
        (b'{"inputs": 7}', {}, 400),
        (b'{"inputs": [7]}', {}, 400),
    ],
)
def test_a_request_that_cannot_be_read_is_refused_with_a_reason(stranger, body, headers, status):
    answer = stranger.ask("POST", INFER, body, **headers)

    assert answer.status == status, answer
    assert answer.code in {"decode_failed", "unsupported"}


def test_json_nested_a_million_deep_is_refused(stranger):
    for body in (b"[" * 1_000_000, b'{"a":' * 300_000, json_infer("deep").replace(b'"deep"', b"[" * 1_000_000)):
        answer = stranger.ask("POST", INFER, body)

        assert answer.status == 400
        assert answer.code == "decode_failed"


@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [
        ([-1, 16], None), ([1, -16], None), ([2**62, 2**62], None), ([2**63, 16], None), ([1, 16.5], None),
        ([1] * 33, None), ([1, 15], None), ("16", None), ([1, 16], 2**40), ([1, 16], -1), ([1, 16], "64"),
        ([1, 16], 63), ([1, 16], 0), ([1, 16], 1e3),
    ],
)  # fmt: skip
def test_shapes_and_sizes_that_lie_are_refused(stranger, shape, nbytes):
    body, length = binary_infer(bytes(64), shape, nbytes=nbytes)

    answer = stranger.ask("POST", INFER, body, inference_header_content_length=length)

    assert answer.status == 400, answer
    assert answer.code in {"decode_failed", "tensor_mismatch"}


def test_lengths_within_bytes_that_lie_are_refused(stranger):
    data = (2**32 - 1).to_bytes(4, "little") + b"short"
    tensor = {"name": "x", "datatype": "BYTES", "shape": [1, 2], "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"inputs": [tensor]}).encode()

    answer = stranger.ask("POST", "/v2/models/text/infer", head + data, inference_header_content_length=len(head))

    assert answer.status == 400
    assert answer.code == "tensor_mismatch"


@pytest.mark.parametrize("part", [b"GET /v2", request("POST", INFER, b"{}")[:-1], b"POST / HTTP/1.1\r\nHost: x\r\n"])
def test_a_request_that_does_not_arrive_gets_an_error_and_is_closed(stranger, part):
    stranger.send(part)

    answer = stranger.response()

    assert answer.status == 408
    assert stranger.has_ended()


def test_a_length_that_was_announced_takes_no_memory_before_it_comes(daemon, url, honest):
    before = daemon.resident_bytes()
    with ExitStack() as stack:
        for _ in range(100):
            client = stack.enter_context(RawHttp(url))
            client.send(request("POST", INFER, b"x", content_length=MAX_BODY_BYTES))
        assert is_answered(honest)
        assert daemon.resident_bytes() - before < 100 << 20


def test_idle_connections_give_way_to_new_ones(url, honest):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * MANY), hard))
    try:
        with ExitStack() as stack:
            for index in range(MANY):
                stack.enter_context(RawHttp(url))
                if index % 100 == 0:
                    assert is_answered(honest)  # never the one that is idle for longest
            with RawHttp(url) as newcomer:
                assert is_answered(newcomer)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_peer_that_reads_nothing_is_held_to_a_bound(daemon, url, honest):
    """Requests of which it reads no answer: after some, no more are taken from it."""
    text = b"x" * 50_000
    data = (len(text).to_bytes(4, "little") + text) * 2
    tensor = {"name": "x", "datatype": "BYTES", "shape": [1, 2], "parameters": {"binary_data_size": len(data)}}
    head = json.dumps({"parameters": {"binary_data_output": True}, "inputs": [tensor]}).encode()
    whole = request("POST", "/v2/models/text/infer", head + data, inference_header_content_length=len(head))
    before = daemon.resident_bytes()
    with RawHttp(url) as deaf:
        deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.socket.settimeout(2.0)
        with pytest.raises(TimeoutError):
            deaf.send(whole * 400)
        assert is_answered(honest)
        assert daemon.resident_bytes() - before < 64 << 20


def test_pipelined_requests_are_answered_in_their_order(stranger):
    models = ("mlp", "queued")
    stranger.send(
        b"".join(
            request("POST", f"/v2/models/{models[index % 2]}/infer", json_infer([0.0] * 16, id=str(index)))
            for index in range(200)
        )
    )

    assert [stranger.response().fields["id"] for _ in range(200)] == [str(index) for index in range(200)]


def test_random_bytes_end_no_daemon(url, honest):
    random = np.random.default_rng(7)
    good, length = binary_infer(floats(1, 16).tobytes())
    whole = bytearray(request("POST", INFER, good, inference_header_content_length=length))
    for _ in range(200):
        broken = bytearray(whole)
        for place in random.integers(0, len(broken), 3):
            broken[place] = random.integers(0, 256)
        with RawHttp(url) as client:
            client.send(bytes(broken[: random.integers(1, len(broken) + 1)]))
            client.socket.shutdown(socket.SHUT_WR)
            while client._more():
                pass
    assert is_answered(honest)
