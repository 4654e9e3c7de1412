"""OpenAI's paths as any client of HTTP asks them: reranking in the forms of the field's servers, errors, refusals."""

from __future__ import annotations

import json
import select
from contextlib import ExitStack

import pytest

from edge_runtime.doors.http.settings import HttpSettings
from tests.contract.raw_http import RawHttp, request
from tests.contract.running_daemon import ANSWER_S, http_url, put_model, running_daemon
from tests.models import text_models

QUERY = "where is the cat"
TEXTS = ["a dog runs", "where is the cat", "the cat is here", "nothing"]
SCORES = [0.0, 1.0, 3 / 5, 0.0]
EMPTY = b'{"model": "minilm", "input": "x"}'


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    return tmp_path_factory.mktemp("gate") / "open"


@pytest.fixture(scope="module")
def url(tmp_path_factory, gate):
    folder = tmp_path_factory.mktemp("run")
    models = folder / "models"
    toml = f"batch = true\nmax_batch_rows = 2\n{text_models.EMBEDDING_TOML}"
    put_model(models, "minilm", text_models.embedding, toml=toml)
    put_model(models, "ranker", text_models.ranking, toml="batch = true\nmax_batch_rows = 3\n")
    put_model(models, "pairs", text_models.pair_embedding, toml=toml)  # takes pairs too, and gives them no score
    put_model(models, "late", text_models.embedding, toml=f"on_demand = true\n{text_models.EMBEDDING_TOML}")
    broken = f"on_demand = true\n{text_models.EMBEDDING_TOML}"
    put_model(models, "lost", lambda folder: (folder / "model.py").write_text("1 / 0"), toml=broken)
    held = f"batch = false\nmax_queue_rows = 1\n{text_models.EMBEDDING_TOML}[limits]\nrun_limit_ms = 600_000\n"
    put_model(models, "held", text_models.held_embedding, toml=held, gate=gate)
    settings = HttpSettings(endpoint="127.0.0.1:0", openai=True)
    with running_daemon(models, folder, http=settings, python_models=True) as daemon:
        with RawHttp(http_url(daemon)) as raw:  # starts the thread that reads large bodies
            raw.ask("POST", "/rerank", b"{" * 70_000)
        yield http_url(daemon)


@pytest.fixture
def http(url):
    with RawHttp(url) as http:
        yield http


def ask(http: RawHttp, path: str, **fields):
    return http.ask("POST", path, json.dumps(fields).encode(), content_type="application/json")


def told(answer) -> tuple[int, str, str, str | None]:
    """Status, type, code and param of an error in OpenAI's form."""
    fields = answer.fields
    assert set(fields) == {"error"}
    assert set(fields["error"]) == {"message", "type", "param", "code"}
    assert fields["error"]["message"]
    return answer.status, fields["error"]["type"], fields["error"]["code"], fields["error"]["param"]


# ---- reranking ------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_back_best_first_with_their_places(http, path):
    answer = ask(http, path, model="ranker", query=QUERY, documents=TEXTS)
    assert answer.status == 200
    assert answer.fields["model"] == "ranker"
    results = answer.fields["results"]
    assert [each["index"] for each in results] == [1, 2, 0, 3]
    assert [each["relevance_score"] for each in results] == pytest.approx([1.0, 3 / 5, 0.0, 0.0])
    assert all(set(each) == {"index", "relevance_score"} for each in results)


def test_the_best_alone_come_back_with_their_texts_where_they_are_asked_for(http):
    documents = [{"text": each} for each in TEXTS]
    answer = ask(http, "/rerank", model="ranker", query=QUERY, documents=documents, top_n=2, return_documents=True)
    assert [each["document"] for each in answer.fields["results"]] == [{"text": TEXTS[1]}, {"text": TEXTS[2]}]


def test_texts_are_answered_by_a_plain_list_and_the_only_ranker_needs_no_name(http):
    answer = ask(http, "/rerank", query=QUERY, texts=TEXTS, return_text=True, truncate=True, raw_scores=False)
    assert [(each["index"], each["text"]) for each in answer.fields] == [
        (index, TEXTS[index]) for index in (1, 2, 0, 3)
    ]
    assert [each["score"] for each in answer.fields] == pytest.approx(sorted(SCORES, reverse=True))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": TEXTS}, "query"),
        ({"query": 5, "documents": TEXTS}, "query"),
        ({"query": "q"}, "documents"),
        ({"query": "q", "documents": []}, "documents"),
        ({"query": "q", "documents": ["x"] * 2049}, "documents"),
        ({"query": "q", "documents": [["a", "b"]]}, "documents"),
        ({"query": "q", "documents": [{"image": "x"}]}, "documents"),
        ({"query": "q", "texts": "x"}, "texts"),
        ({"query": "\ud800", "texts": ["x"]}, "query"),
        ({"query": "q", "texts": ["\ud800"]}, "texts"),
        ({"query": "q", "documents": TEXTS, "top_n": 0}, "top_n"),
        ({"query": "q", "documents": TEXTS, "top_n": True}, "top_n"),
        ({"query": "q", "documents": TEXTS, "return_documents": "yes"}, "return_documents"),
        ({"query": "q", "documents": TEXTS, "model": 5}, "model"),
    ],
)
def test_each_wrong_field_of_a_ranking_is_refused_by_its_name(http, fields, param):
    assert told(ask(http, "/rerank", **fields)) == (400, "invalid_request_error", "decode_failed", param)


def test_a_model_of_single_texts_ranks_nothing_and_one_of_pairs_embeds_nothing(http):
    answer = ask(http, "/rerank", model="minilm", query=QUERY, documents=TEXTS)
    assert told(answer) == (400, "invalid_request_error", "tensor_mismatch", None)
    answer = ask(http, "/v1/embeddings", model="ranker", input="x")
    assert told(answer) == (400, "invalid_request_error", "tensor_mismatch", None)


# ---- models on demand -----------------------------------------------------------------------------------------------


def test_a_request_waits_for_its_model_that_is_loaded_on_demand(http):
    assert "late" in {each["id"] for each in http.ask("GET", "/v1/models").fields["data"]}
    assert ask(http, "/v1/embeddings", model="late", input=["x"] * 20).status == 200


def test_a_model_on_demand_that_cannot_be_loaded_is_told_so(http):
    status, kind, code, _ = told(ask(http, "/v1/embeddings", model="lost", input="x"))
    assert (status, kind, code) == (503, "server_error", "not_ready")
    status, kind, code, _ = told(ask(http, "/v1/embeddings", model="lost", input="x"))
    assert (status, kind, code) == (404, "invalid_request_error", "not_ready")


# ---- errors and refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body", "error"),
    [
        ("POST", "/v1/embeddings", b"{", (400, "invalid_request_error", "decode_failed", None)),
        ("POST", "/v1/embeddings", b"", (400, "invalid_request_error", "decode_failed", None)),
        ("POST", "/v1/embeddings", b"[]", (400, "invalid_request_error", "decode_failed", None)),
        ("POST", "/v1/embeddings", b"[" * 200_000, (400, "invalid_request_error", "decode_failed", None)),
        ("POST", "/v1/embeddings", b"{}", (400, "invalid_request_error", "decode_failed", "model")),
        ("POST", "/v1/embeddings", b'{"model": "minilm"}', (400, "invalid_request_error", "decode_failed", "input")),
        ("POST", "/v1/embeddings", b'{"model": "minilm", "input": "\\ud800"}',
         (400, "invalid_request_error", "decode_failed", "input")),
        ("POST", "/v1/embeddings", b'{"model": "minilm", "input": "x", "encoding_format": "hex"}',
         (400, "invalid_request_error", "decode_failed", "encoding_format")),
        ("POST", "/v1/embeddings", b'{"model": "minilm", "input": "x", "dimensions": 1.5}',
         (400, "invalid_request_error", "decode_failed", "dimensions")),
        ("POST", "/v1/embeddings", b'{"model": "../minilm", "input": "x"}',
         (404, "invalid_request_error", "model_not_found", "model")),
        ("GET", "/v1/embeddings", b"", (405, "invalid_request_error", "decode_failed", None)),
        ("GET", "/v1/models/absent", b"", (404, "invalid_request_error", "model_not_found", "model")),
        ("DELETE", "/v1/models/minilm", b"", (405, "invalid_request_error", "decode_failed", None)),
    ],
)  # fmt: skip
def test_errors_are_in_openais_form(http, method, path, body, error):
    assert told(http.ask(method, path, body)) == error
    assert http.ask("POST", "/v1/embeddings", EMPTY).status == 200


def test_a_full_queue_refuses_with_when_to_ask_again_and_the_others_are_answered(url, gate):
    body = b'{"model": "held", "input": "held"}'
    with ExitStack() as stack:
        clients = {client.socket: client for client in (stack.enter_context(RawHttp(url)) for _ in range(6))}
        for each in clients.values():
            each.send(request("POST", "/v1/embeddings", body))
        ready, _, _ = select.select([*clients], [], [], ANSWER_S)
        answer = clients.pop(ready[0]).response()
        assert told(answer) == (429, "rate_limit_error", "queue_full", None)
        assert int(answer.headers["retry-after-ms"]) > 0
        gate.touch()
        statuses = [each.response().status for each in clients.values()]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 2


def test_a_list_longer_than_the_queue_is_answered_once_its_own_texts_have_made_room(http):
    answer = ask(http, "/v1/embeddings", model="held", input=[f"{each}" for each in range(50)])
    assert answer.status == 200
    assert [each["index"] for each in answer.fields["data"]] == [*range(50)]


def test_a_client_that_leaves_takes_the_rest_of_its_list_back(url, http, gate):
    gate.unlink(missing_ok=True)
    texts = ["held"] * 100
    before = runs(http)
    with RawHttp(url) as leaving:
        leaving.send(request("POST", "/v1/embeddings", json.dumps({"model": "held", "input": texts}).encode()))
        for _ in range(3):  # it is read before these
            assert http.ask("GET", "/v2/health/live").status == 200
    gate.touch()
    assert ask(http, "/v1/embeddings", model="held", input="x").status == 200
    assert runs(http) - before <= 4, "one runs, one is handed ahead, one waits; and the last question"


def runs(http: RawHttp) -> int:
    """How many runs `held` had."""
    (stats,) = http.ask("GET", "/v2/models/held/stats").fields["model_stats"]
    return int(stats["execution_count"])


def test_paths_of_openai_are_not_there_while_it_is_off(tmp_path):
    put_model(tmp_path / "models", "minilm", text_models.embedding, toml=text_models.EMBEDDING_TOML)
    settings = HttpSettings(endpoint="127.0.0.1:0")
    daemon_here = running_daemon(tmp_path / "models", tmp_path / "run", http=settings, python_models=True)
    with daemon_here as daemon, RawHttp(http_url(daemon)) as http:
        assert http.ask("POST", "/v1/embeddings", EMPTY).status == 404
        assert http.ask("GET", "/v1/models").status == 404
