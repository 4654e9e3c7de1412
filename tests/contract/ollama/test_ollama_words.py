"""Ollama's client and a real engine: a tiny model with random weights."""

from __future__ import annotations

from collections.abc import Iterator

import ollama
import pytest

from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.zmq.client import Client
from tests.contract.running_daemon import ANSWER_S, http_url, running_daemon
from tests.models.language_models import tiny_model

pytest.importorskip("openvino_genai", reason="the extra llm is not installed: pip install edge-runtime[llm]")

GREEDY = {"temperature": 0, "num_predict": 12}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("words")
    tiny_model(folder / "models" / "words" / "1")
    (folder / "models" / "words" / "model.toml").write_text("[language]\nmax_streams = 2\nkv_cache_mb = 16\n")
    settings = HttpSettings(endpoint="127.0.0.1:0", ollama=True)
    with running_daemon(folder / "models", folder / "daemon", http=settings) as daemon:
        with Client(daemon.endpoints[0]) as client:
            client.wait_ready(ANSWER_S)
        yield daemon


@pytest.fixture
def client(daemon: Daemon) -> Iterator[ollama.Client]:
    with ollama.Client(http_url(daemon)) as client:
        yield client


@pytest.mark.smoke
def test_a_text_streamed_is_the_text_whole_and_that_of_other_doors(client: ollama.Client, daemon: Daemon) -> None:
    *parts, last = client.generate("words", "Hello", raw=True, stream=True, options=GREEDY)
    whole = client.generate("words", "Hello", raw=True, options=GREEDY)
    assert "".join(each.response for each in parts) == whole.response
    with Client(daemon.endpoints[0]) as other:
        answer = other.infer("words", {"text": [b"Hello"]}, parameters={"max_tokens": 12, "temperature": 0})
    assert answer["text"][0].decode() == whole.response
    for told in (last, whole):
        assert (told.done_reason, told.prompt_eval_count, told.eval_count) == ("length", *answer["usage"].tolist()[:2])
        assert (told.prompt_eval_duration or 0) > 0
        assert (told.eval_duration or 0) > 0


def test_a_prompt_longer_than_the_context_is_refused_and_not_cut(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="the context of the model holds") as caught:
        client.generate("words", "Hello " * 5000, raw=True)
    assert caught.value.status_code == 400


def test_answers_of_two_slots_that_are_left_make_room(client: ollama.Client) -> None:
    for _ in range(4):
        stream = client.generate("words", "Hello", raw=True, stream=True)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    assert client.generate("words", "Hello", raw=True, options=GREEDY).done


def test_the_model_is_listed_and_shown_as_one_that_writes(client: ollama.Client) -> None:
    assert [each.model for each in client.list().models] == ["words:latest"]
    assert client.show("words").capabilities == ["completion", "tools"]
