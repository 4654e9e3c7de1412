"""Models whose tokenizer lies beside them, asked by OpenAI's paths and TensorFlow Serving's with plain texts."""

from __future__ import annotations

import json

import numpy as np
import openai
import pytest

from edge_runtime.doors.http.settings import HttpSettings
from tests.contract.raw_http import RawHttp
from tests.contract.running_daemon import http_url, running_daemon
from tests.models import bert_models
from tests.models.bert_models import PlainModel

TEXTS = bert_models.texts(40)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    bert_models.encoder(models / "sentences", length=16)
    bert_models.classifier(models / "reranker", labels=("LABEL_0",))
    return models


@pytest.fixture(scope="module")
def url(models, tmp_path_factory):
    settings = HttpSettings(endpoint="127.0.0.1:0", openai=True, tensorflow_serving=True)
    with running_daemon(models, tmp_path_factory.mktemp("run"), http=settings) as daemon:
        yield http_url(daemon)


@pytest.mark.smoke
def test_embeddings_are_those_of_the_tokenizer_and_the_raw_run(url, models):
    plain = PlainModel(models / "sentences", length=16)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        found = [each.embedding for each in client.embeddings.create(model="sentences", input=TEXTS).data]
    np.testing.assert_allclose(found, [plain.sentence(text) for text in TEXTS], atol=1e-5)


def test_usage_counts_the_tokens_that_the_model_ran(url, models):
    plain = PlainModel(models / "sentences", length=16)
    wanted = sum(len(plain._tokenizer.encode(text).ids) for text in TEXTS)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        usage = client.embeddings.create(model="sentences", input=TEXTS).usage
        alone = client.embeddings.create(model="sentences", input=TEXTS[0]).usage
    assert usage.model_dump() == {"prompt_tokens": wanted, "total_tokens": wanted}
    assert 2 < alone.prompt_tokens == len(plain._tokenizer.encode(TEXTS[0]).ids) < wanted


def test_usage_of_a_ranking_counts_the_question_with_each_text(url, models):
    encode = PlainModel(models / "reranker")._tokenizer.encode
    with RawHttp(url) as http:
        answer = http.ask("POST", "/rerank", json.dumps({"query": TEXTS[0], "documents": TEXTS[1:9]}).encode())
    wanted = sum(len(encode(TEXTS[0], each).ids) for each in TEXTS[1:9])
    assert answer.fields["usage"] == {"prompt_tokens": wanted, "total_tokens": wanted}


def test_tokens_are_told_by_name_and_are_no_part_of_other_answers(url):
    sent = {"text": TEXTS[:2]}
    with RawHttp(url) as http:
        said = http.ask("GET", "/v2/models/sentences").body
        plain = http.ask("POST", "/v2/models/sentences/infer", json.dumps(sent).encode())
        named = http.ask(
            "POST",
            "/v2/models/sentences/infer",
            json.dumps({**sent, "outputs": [{"name": "token_counts"}]}).encode(),
        )
    assert b"token_counts" not in said + plain.body
    assert b"tokens" not in plain.body
    assert [each["tokens"] > 2 for each in named.fields["answers"]] == [True, True]


def test_a_reranker_is_the_only_model_that_ranks_and_its_scores_lie_between_0_and_1(url, models):
    plain = PlainModel(models / "reranker")
    with RawHttp(url) as http:
        answer = http.ask("POST", "/rerank", json.dumps({"query": TEXTS[0], "documents": TEXTS[1:]}).encode())
    assert answer.fields["model"] == "reranker"
    logits = np.ravel([plain.output(TEXTS[0], each) for each in TEXTS[1:]])
    wanted = 1 / (1 + np.exp(-logits))
    found = {each["index"]: each["relevance_score"] for each in answer.fields["results"]}
    np.testing.assert_allclose([found[index] for index in range(len(wanted))], wanted, atol=1e-5)
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_texts_and_pairs_are_instances(url, models):
    with RawHttp(url) as http:
        body = json.dumps({"instances": TEXTS[:3]}).encode()
        (first, *_) = http.ask("POST", "/v1/models/sentences:predict", body).fields["predictions"]
        np.testing.assert_allclose(
            first["embedding"], PlainModel(models / "sentences", length=16).sentence(TEXTS[0]), atol=1e-5
        )
        body = json.dumps({"instances": [TEXTS[:2], TEXTS[2:4]]}).encode()
        predictions = http.ask("POST", "/v1/models/reranker:predict", body).fields["predictions"]
        assert [0 < each["number"]["value"] < 1 for each in predictions] == [True, True]
