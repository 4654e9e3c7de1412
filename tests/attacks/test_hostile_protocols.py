"""What strangers send to OpenAI's and TensorFlow Serving's paths: one clear answer each, and nobody else notices."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack

import pytest

from tests.contract.raw_http import RawHttp, request
from tests.contract.running_daemon import put_model
from tests.fakes.daemon_process import DaemonProcess
from tests.models import text_models

EMBED, PREDICT, RERANK = "/v1/embeddings", "/v1/models/text:predict", "/rerank"
GOOD = {
    EMBED: {"model": "minilm", "input": ["a", "b", "c"]},
    PREDICT: {"instances": ["a", "b"]},
    RERANK: {"query": "a b", "texts": ["a", "b"]},
}
BAD = {EMBED: {"model": "minilm", "input": [1]}, PREDICT: {"instances": [1]}, RERANK: {"query": "a", "texts": [1]}}
CLIENTS, EACH = 20, 33
"""Ten times what the model answers within the deadline."""

CONFIG = """python_models = true
[http]
endpoint = "127.0.0.1:0"
openai = true
tensorflow_serving = true
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    models = folder / "models"
    put_model(models, "minilm", text_models.embedding, toml=f"batch = true\n{text_models.EMBEDDING_TOML}")
    put_model(models, "slow", text_models.slow_embedding, toml=f"batch = false\n{text_models.EMBEDDING_TOML}")
    put_model(models, "ranker", text_models.ranking, toml="batch = true\n")
    put_model(models, "text", text_models.copy, toml="batch = true\n")
    with DaemonProcess(folder, config=CONFIG) as daemon:
        daemon.wait_ready()
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


def is_answered(client: RawHttp) -> bool:
    return all(client.ask("POST", path, json.dumps(fields).encode()).status == 200 for path, fields in GOOD.items())


def message(path: str, fields, **headers) -> bytes:
    return request("POST", path, json.dumps(fields).encode(), **headers)


def test_good_and_bad_requests_of_one_connection_get_one_reply_each_in_their_order(url, honest):
    messages, statuses = [], []
    for number in range(60):
        path = (EMBED, PREDICT, RERANK)[number % 3]
        is_good = number % 7 not in {2, 5}
        messages.append(message(path, GOOD[path] if is_good else BAD[path]))
        statuses.append(200 if is_good else 400)
    with RawHttp(url) as stranger:
        stranger.send(b"".join(messages))
        assert [stranger.response().status for _ in messages] == statuses


@pytest.mark.parametrize("path", [EMBED, PREDICT, RERANK])
@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"minilm","input":[' + b'"",' * 1_000_000 + b'""]}',
        b'{"model":"minilm","query":"a","documents":[' + b'"",' * 1_000_000 + b'""]}',
        b'{"instances":[' + b"[]," * 1_000_000 + b"[]]}",
        b'{"instances":[' + b"{}," * 1_000_000 + b"{}]}",
        b'{"inputs":' + b"[" * 500_000 + b"]" * 500_000 + b"}",
        b'{"inputs":' + b"[" * 900 + b"1" + b"]" * 900 + b"}",
        b"{" + b",".join(b'"%d":0' % number for number in range(300_000)) + b"}",
        b'{"instances":[' + b"1" * 1_000_000 + b"]}",
        b'{"model":"' + b"x" * 1_000_000 + b'","input":"x","query":"x","documents":["x"],"inputs":"x"}',
        b"\xff\xfe" * 1_000,
        b"",
    ],
    ids=["many texts", "many documents", "many lists", "many objects", "deep", "deep but read", "many keys",
         "a long number", "a long name", "no UTF-8", "nothing"],
)  # fmt: skip
def test_a_body_that_is_too_much_is_refused_and_the_connection_goes_on(url, honest, path, body):
    with RawHttp(url) as stranger:
        answer = stranger.ask("POST", path, body)
        if path == PREDICT and answer.status == 200:
            assert body.startswith(b'{"model"'), "one text is an answer"
        else:
            assert answer.status in {400, 404}, answer
            assert len(answer.body) < 5_000
        assert is_answered(stranger)


def test_clients_that_leave_within_a_body_or_before_the_answer_harm_nobody(url, honest):
    whole = message(EMBED, {"model": "minilm", "input": ["text"] * 2048})
    for length in (10, 100, len(whole) // 2, len(whole) - 1, len(whole)):
        for _ in range(5):
            with RawHttp(url) as stranger:
                stranger.send(whole[:length])


def test_ten_times_the_load_gets_one_reply_each(url, honest):
    asked = message(EMBED, {"model": "slow", "input": ["a", "b", "c"]}, x_request_timeout_ms="2000")
    statuses: Counter[int] = Counter()
    with ExitStack() as stack:
        clients = [stack.enter_context(RawHttp(url)) for _ in range(CLIENTS)]
        for client in clients:
            client.send(asked * EACH)
        for client in clients:
            for _ in range(EACH):
                answer = client.response()
                statuses[answer.status] += 1
                assert answer.status in {200, 429, 504}, answer
                assert answer.status != 429 or int(answer.headers["retry-after-ms"]) >= 0
        assert all(client.is_silent(0) for client in clients)
    assert statuses.total() == CLIENTS * EACH
    assert statuses[200] > 0
    assert statuses[429] > 0
