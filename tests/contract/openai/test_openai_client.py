"""OpenAI's own client, unmodified, asks for embeddings and models."""

from __future__ import annotations

import asyncio
import base64
import json

import numpy as np
import openai
import pytest

from edge_runtime.doors.http.settings import HttpSettings
from tests.contract.doors.http.test_http_access import tokens
from tests.contract.raw_http import RawHttp
from tests.contract.running_daemon import http_url, put_model, running_daemon
from tests.models import onnx_models, text_models

TEXTS = ["a cat", "the weather", "", "\N{SNOWMAN} snow"]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    toml = f"batch = true\nmax_batch_rows = 8\n{text_models.EMBEDDING_TOML}"
    put_model(folder / "models", "minilm", text_models.embedding, toml=toml)
    alone = f"batch = false\n{text_models.EMBEDDING_TOML}"
    put_model(folder / "models", "alone", text_models.embedding, toml=alone, shape=(1, 1))
    put_model(folder / "models", "mlp", onnx_models.mlp)
    put_model(folder / "models", "bare", text_models.embedding)
    ranker = 'batch = true\n[output.score]\nanswer = "number"\n'
    put_model(folder / "models", "ranker", text_models.ranking, toml=ranker)
    settings = HttpSettings(endpoint="127.0.0.1:0", openai=True)
    with running_daemon(folder / "models", folder, http=settings, python_models=True) as daemon:
        with RawHttp(http_url(daemon)) as raw:  # starts the thread that reads large bodies
            raw.ask("POST", "/v1/embeddings", b"{" * 70_000)
        yield http_url(daemon)


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.smoke
def test_texts_become_vectors_of_length_one_in_their_order(client):
    answer = client.embeddings.create(model="minilm", input=TEXTS)
    assert (answer.object, answer.model) == ("list", "minilm")
    assert [each.index for each in answer.data] == [0, 1, 2, 3]
    for text, each in zip(TEXTS, answer.data, strict=True):
        assert each.object == "embedding"
        np.testing.assert_allclose(each.embedding, text_models.vector(text), rtol=1e-6)


def test_numbers_are_the_same_as_in_base64(client):
    for text in TEXTS:
        (by_default,) = client.embeddings.create(model="minilm", input=text).data  # base64, which the client decodes
        (as_numbers,) = client.embeddings.create(model="minilm", input=text, encoding_format="float").data
        (as_text,) = client.embeddings.create(model="minilm", input=text, encoding_format="base64").data
        given = np.frombuffer(base64.b64decode(as_text.embedding), "<f4")
        np.testing.assert_array_equal(np.float32(as_numbers.embedding), given)
        np.testing.assert_array_equal(np.float32(by_default.embedding), given)


def test_fewer_dimensions_are_cut_and_have_the_length_one_again(client):
    for text in TEXTS:
        found = client.embeddings.create(model="minilm", input=text, dimensions=2, user="me").data[0].embedding
        np.testing.assert_allclose(found, text_models.vector(text, 2) if text else [0, 0], rtol=1e-6)
    with pytest.raises(openai.BadRequestError, match="dimensions: model minilm has 4") as caught:
        client.embeddings.create(model="minilm", input="x", dimensions=5)
    assert (caught.value.param, caught.value.code, caught.value.type) == (
        "dimensions", "decode_failed", "invalid_request_error",
    )  # fmt: skip


@pytest.mark.parametrize("model", ["minilm", "alone"])
def test_a_list_longer_than_a_run_is_answered_as_one(client, model):
    texts = [f"{'a' * (index % 7)}{index}" for index in range(300)]
    answer = client.embeddings.create(model=model, input=texts)
    found = [each.embedding for each in answer.data]
    np.testing.assert_allclose(found, [text_models.vector(each) for each in texts], rtol=1e-6)


def test_tokens_of_a_model_that_does_not_count_them_are_none_and_say_so(client):
    usage = client.embeddings.create(model="minilm", input="x").usage
    assert (usage.prompt_tokens, usage.total_tokens, usage.counted) == (0, 0, False)


def test_a_number_that_a_model_declares_is_the_score_of_a_pair(url):
    body = json.dumps({"model": "ranker", "query": "a cat", "documents": ["a dog", "a cat"]}).encode()
    with RawHttp(url) as http:
        results = http.ask("POST", "/rerank", body).fields["results"]
    assert [each["index"] for each in results] == [1, 0]
    assert [each["relevance_score"] for each in results] == pytest.approx([1.0, 1 / 3])


def test_the_asynchronous_client_is_answered_alike(url):
    async def ask() -> list[list[float]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            asked = (client.embeddings.create(model="minilm", input=each) for each in TEXTS)
            return [each.data[0].embedding for each in await asyncio.gather(*asked)]

    np.testing.assert_allclose(asyncio.run(ask()), [text_models.vector(each) for each in TEXTS], rtol=1e-6)


def test_models_are_listed_and_described(client):
    assert {each.id for each in client.models.list()} == {"minilm", "alone", "mlp", "bare", "ranker"}
    found = client.models.retrieve("minilm")
    assert (found.id, found.object, found.owned_by) == ("minilm", "model", "edge-runtime")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("absent")


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="absent", input="x")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"model": "minilm", "input": [1, 2, 3]}, "input: got tokens"),
        ({"model": "minilm", "input": [[1, 2], [3]]}, "input: got tokens"),
        ({"model": "minilm", "input": []}, "wanted 1 to 2048"),
        ({"model": "minilm", "input": ["x"] * 2049}, "wanted 1 to 2048"),
        ({"model": "minilm", "input": [None]}, "wanted text or a list of texts"),
        ({"model": "mlp", "input": "x"}, "answers with no embedding"),
        ({"model": "bare", "input": "x"}, r'\[output.vector\] answer = \\?"embedding\\?"'),
    ],
)
def test_an_input_that_cannot_be_embedded_is_refused_with_what_to_do(client, asked, words):
    with pytest.raises(openai.BadRequestError, match=words):
        client.embeddings.create(**asked)


def test_a_model_that_raises_or_gives_no_numbers_is_the_servers_fault_and_not_tried_again(client):
    for text in ("break", "nan"):
        with pytest.raises(openai.InternalServerError) as caught:
            client.embeddings.create(model="minilm", input=["x", text])
        assert (caught.value.code, caught.value.type) == ("run_failed", "server_error")
        assert caught.value.response.headers["x-should-retry"] == "false"


def test_a_deadline_that_cannot_be_met_is_refused_as_too_busy_with_when_to_ask_again(client):
    with pytest.raises(openai.RateLimitError) as caught:
        client.embeddings.create(model="minilm", input="x", extra_headers={"x-request-timeout-ms": "0"})
    assert (caught.value.code, caught.value.type) == ("deadline_unmeetable", "rate_limit_error")
    assert int(caught.value.response.headers["retry-after-ms"]) > 0


def test_the_api_key_is_a_token_where_the_door_wants_one(tmp_path):
    put_model(tmp_path / "models", "minilm", text_models.embedding, toml=text_models.EMBEDDING_TOML)
    path, bearer = tokens(tmp_path)
    settings = HttpSettings(endpoint="127.0.0.1:0", openai=True, tokens_file=path)
    with running_daemon(tmp_path / "models", tmp_path / "run", http=settings, python_models=True) as daemon:
        address = f"{http_url(daemon)}/v1"
        with openai.OpenAI(base_url=address, api_key=bearer["asker"].removeprefix("Bearer "), max_retries=0) as client:
            assert len(client.embeddings.create(model="minilm", input=["x"] * 20).data) == 20
            assert [each.id for each in client.models.list()] == ["minilm"]
        with openai.OpenAI(base_url=address, api_key="other", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                client.embeddings.create(model="minilm", input="x")
            assert caught.value.code == "unauthenticated"
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
