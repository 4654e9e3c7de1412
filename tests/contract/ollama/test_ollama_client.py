"""Ollama's own client, unmodified: chats, texts, tools, vectors and models, from a model that writes by a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import pytest

from edge_runtime.doors.http.settings import HttpSettings
from tests.contract.doors.http.test_http_access import tokens
from tests.contract.running_daemon import http_url, put_model, running_daemon
from tests.models import onnx_models, text_models
from tests.models.scripted_models import put_scripted

STOP = {"finish_reason": "stop", "usage": [3, 2, 1]}
CALL = {"id": "call_7", "type": "function", "function": {"name": "turn_on", "arguments": '{"room": "Küche"}'}}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("run")
    put_scripted(folder / "models")
    put_model(folder / "models", "minilm", text_models.embedding, toml=f"batch = true\n{text_models.EMBEDDING_TOML}")
    put_model(folder / "models", "mlp", onnx_models.mlp)
    settings = HttpSettings(endpoint="127.0.0.1:0", ollama=True)
    with running_daemon(folder / "models", folder, http=settings, python_models=True, watch=False) as daemon:
        yield http_url(daemon)


@pytest.fixture
def client(url: str) -> Iterator[ollama.Client]:
    with ollama.Client(url) as client:
        yield client


def script(*parts: Any) -> list[dict[str, Any]]:
    """Messages whose last one is a script."""
    return [{"role": "user", "content": json.dumps(parts)}]


def asked(client: ollama.Client, **more: Any) -> dict[str, Any]:
    """What the model was asked by a chat with these fields."""
    told = client.chat("scripted", **{"messages": script("asked"), **more})
    found: dict[str, Any] = json.loads(told.message.content or "")
    return found


@pytest.mark.smoke
def test_a_chat_comes_in_lines_and_the_last_says_why_it_ended_and_what_it_took(client: ollama.Client) -> None:
    *parts, last = client.chat("scripted", script({"text": "He"}, {"text": "llo"}, STOP), stream=True)
    assert [(each.message.role, each.message.content, each.done) for each in parts] == [
        ("assistant", "He", False),
        ("assistant", "llo", False),
    ]
    assert (last.message.content, last.done, last.done_reason) == ("", True, "stop")
    assert (last.model, last.prompt_eval_count, last.eval_count) == ("scripted", 3, 2)
    spent_ns = (last.load_duration or 0) + (last.prompt_eval_duration or 0) + (last.eval_duration or 0)
    assert last.total_duration == spent_ns


def test_a_chat_that_does_not_stream_is_one_object(client: ollama.Client) -> None:
    answer = client.chat("scripted", script({"text": "Hello", **STOP, "finish_reason": "length"}))
    assert (answer.message.content, answer.done, answer.done_reason) == ("Hello", True, "length")
    assert (answer.prompt_eval_count, answer.eval_count) == (3, 2)


def test_an_asynchronous_chat_is_answered_alike(url: str) -> None:
    async def ask() -> str:
        async with ollama.AsyncClient(url) as client:
            stream = await client.chat("scripted", script({"text": "He"}, {"text": "llo", **STOP}), stream=True)
            return "".join([each.message.content or "" async for each in stream])

    assert asyncio.run(ask()) == "Hello"


def test_a_text_is_gone_on_with_by_the_model_s_template_or_as_it_is(client: ollama.Client) -> None:
    *parts, last = client.generate("scripted", json.dumps([{"text": "a"}, {"text": "b", **STOP}]), stream=True)
    assert [each.response for each in parts] == ["a", "b"]
    assert (last.response, last.done_reason, last.eval_count) == ("", "stop", 2)
    told = json.loads(client.generate("scripted", '["asked"]', system="Be brief.").response)
    assert told["chat"]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": '["asked"]'},
    ]
    told = json.loads(client.generate("scripted", '["asked"]', raw=True).response)
    assert (told["text"], "chat" in told) == ('["asked"]', False)


def test_calls_of_tools_have_their_arguments_as_objects(client: ollama.Client) -> None:
    parts = list(client.chat("scripted", script({"tool_calls": [CALL]}, {"finish_reason": "tool_calls"}), stream=True))
    (call,) = parts[0].message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("turn_on", {"room": "Küche"})
    assert parts[-1].done_reason == "stop"
    whole = client.chat("scripted", script({"tool_calls": [CALL], "finish_reason": "tool_calls"}))
    assert [each.function.name for each in whole.message.tool_calls or ()] == ["turn_on"]


def test_a_round_of_tools_is_told_to_the_model_as_openai_has_it(client: ollama.Client) -> None:
    def turn_on(room: str) -> str:
        """Turn the light on.

        Args:
            room: The room's name.
        """
        return room

    messages = [
        {"role": "user", "content": "Light in both!"},
        {
            "role": "assistant",
            "content": "",
            "thinking": "Two rooms.",
            "tool_calls": [
                {"function": {"name": "turn_on", "arguments": {"room": "Küche"}}},
                {"function": {"name": "dim", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_name": "dim", "content": "dimmed"},
        {"role": "tool", "content": "on"},
        *script("asked"),
    ]
    told = asked(client, messages=messages, tools=[turn_on])["chat"]
    assert told["tools"][0]["function"]["name"] == "turn_on"
    assert told["tools"][0]["function"]["parameters"]["required"] == ["room"]
    _, assistant, first, second, _ = told["messages"]
    assert assistant["reasoning_content"] == "Two rooms."
    assert [json.loads(each["function"]["arguments"]) for each in assistant["tool_calls"]] == [{"room": "Küche"}, {}]
    assert [each["id"] for each in assistant["tool_calls"]] == [second["tool_call_id"], first["tool_call_id"]]
    assert (first["name"], second["name"]) == ("dim", "turn_on")


def test_options_are_the_parameters_of_a_request(client: ollama.Client) -> None:
    options = {
        "temperature": 0, "top_p": 0.5, "top_k": 40, "seed": 7, "num_predict": 9, "stop": ["a", "b"], "num_ctx": 8192,
        "repeat_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.25, "num_thread": 4, "mirostat": 1,
    }  # fmt: skip
    told = asked(client, options=options, keep_alive=-1, logprobs=True, top_logprobs=2)["parameters"]
    assert json.loads(told.pop("stop")) == ["a", "b"]
    assert told == {
        "temperature": 0, "top_p": 0.5, "seed": 7, "max_tokens": 9, "repetition_penalty": 1.1,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "logprobs": 2,
    }  # fmt: skip
    unbounded = {"num_predict": -1, "top_k": 0, "stop": []}
    assert asked(client, options=unbounded, keep_alive="5m", logprobs=False)["parameters"] == {}


def test_a_format_is_json_or_a_schema(client: ollama.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    told = asked(client, format=schema)["chat"]["response_format"]
    assert (told["type"], told["json_schema"]["schema"]) == ("json_schema", schema)
    assert asked(client, format="json")["chat"]["response_format"] == {"type": "json_object"}
    assert "response_format" not in asked(client, format="")["chat"]


def test_pictures_of_a_message_are_parts_of_its_content(client: ollama.Client) -> None:
    message = {"role": "user", "content": '["asked"]', "images": [b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n"]}
    _, first, second = asked(client, messages=[message])["chat"]["messages"][0]["content"]
    assert first == {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,/9j/4A=="}}
    assert second["image_url"]["url"].startswith("data:image/png;base64,iVBOR")


@pytest.mark.parametrize("think", [True, "high"])
def test_thoughts_come_beside_the_answer(client: ollama.Client, think: bool | str) -> None:
    parts = (
        {"text": "<thi"},
        {"text": "nk>\nIt is"},
        {"text": " so.</th"},
        {"text": "ink>\n\nYes"},
        {"text": "."},
        STOP,
    )
    lines = list(client.chat("scripted", script(*parts), think=think, stream=True))
    assert "".join(each.message.thinking or "" for each in lines) == "It is so."
    assert [each.message.content for each in lines if each.message.content] == ["Yes", "."]
    told = asked(client, think=think)["chat"]["template"]
    assert told == {"enable_thinking": True, **({"reasoning_effort": "high"} if think == "high" else {})}


def test_thoughts_are_left_out_where_they_are_not_wanted(client: ollama.Client) -> None:
    parts = script({"text": "<think>\n\n</think>\n\nYes", **STOP})
    answer = client.chat("scripted", parts, think=False)
    assert (answer.message.content, answer.message.thinking) == ("Yes", None)
    assert asked(client, think=False)["chat"]["template"] == {"enable_thinking": False}


def test_a_chat_or_text_that_is_empty_has_the_model_loaded_alone(client: ollama.Client) -> None:
    for keep_alive in (-1, 0, "300s"):
        loaded = client.chat("scripted", [], keep_alive=keep_alive)
        assert (loaded.message.content, loaded.done, loaded.done_reason) == ("", True, "load")
        loaded = client.generate("scripted", keep_alive=keep_alive)
        assert (loaded.response, loaded.done, loaded.done_reason) == ("", True, "load")
    assert [each.done_reason for each in client.generate("scripted", stream=True)] == ["load"]
    with pytest.raises(ollama.ResponseError, match="mlp is not a language model"):
        client.chat("mlp", [])


def test_texts_become_vectors(client: ollama.Client) -> None:
    texts = ["a cat", "the weather", "snow"]
    answer = client.embed("minilm", texts)
    np.testing.assert_allclose(answer.embeddings, [text_models.vector(each) for each in texts], rtol=1e-6)
    assert answer.model == "minilm"
    (one,) = client.embed("minilm:latest", "a cat", dimensions=2, truncate=True).embeddings
    np.testing.assert_allclose(one, text_models.vector("a cat", 2), rtol=1e-6)
    np.testing.assert_allclose(client.embeddings("minilm", "a cat").embedding, text_models.vector("a cat"), rtol=1e-6)
    assert client.embed("minilm", []).embeddings == []
    many = [f"{'a' * (index % 5)}{index}" for index in range(100)]
    found = client.embed("minilm", many).embeddings
    np.testing.assert_allclose(found, [text_models.vector(each) for each in many], rtol=1e-6)


def test_models_are_listed_by_names_with_their_tag(client: ollama.Client) -> None:
    listed = client.list().models
    assert {each.model for each in listed} == {"scripted:latest", "minilm:latest"}
    assert all(len(each.digest or "") == 64 and each.size is not None for each in listed)
    running = client.ps().models
    assert {each.name for each in running} == {"scripted:latest", "minilm:latest"}
    assert client.chat("scripted:latest", script({"text": "x", **STOP})).model == "scripted:latest"


def test_a_model_is_shown_with_what_it_can_do(client: ollama.Client) -> None:
    assert client.show("scripted").capabilities == ["completion", "tools"]
    assert client.show("minilm:latest").capabilities == ["embedding"]
    with pytest.raises(ollama.ResponseError, match="'absent' not found") as caught:
        client.show("absent")
    assert caught.value.status_code == 404


def test_a_pull_of_a_model_that_is_here_succeeds_and_any_other_says_how_models_come(client: ollama.Client) -> None:
    assert client.pull("scripted").status == "success"
    assert [each.status for each in client.pull("minilm:latest", stream=True)] == ["success"]
    with pytest.raises(ollama.ResponseError, match="optimum-cli export openvino") as caught:
        client.pull("llama3.2")
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="not found"):
        list(client.pull("llama3.2:3b", stream=True))


def test_calls_that_would_change_models_are_refused(client: ollama.Client, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    for ask in (
        lambda: client.push("scripted"),
        lambda: client.create("new", from_="scripted"),
        lambda: client.copy("scripted", "new"),
        lambda: client.create_blob(tmp_path / "x.gguf"),
    ):
        with pytest.raises(ollama.ResponseError, match="is not offered: models come and go as folders") as caught:
            ask()
        assert caught.value.status_code == 501
    with pytest.raises(ollama.ResponseError) as caught:
        client.delete("scripted")
    assert caught.value.status_code == 501


def test_a_model_that_is_not_here_is_not_found(client: ollama.Client) -> None:
    for ask in (client.chat, client.generate):
        with pytest.raises(ollama.ResponseError, match="not found") as caught:
            ask("absent")
        assert caught.value.status_code == 404


def test_a_fault_in_mid_stream_is_a_line_with_the_error(client: ollama.Client) -> None:
    stream = client.chat("scripted", script({"text": "He"}, "fail"), stream=True)
    assert next(stream).message.content == "He"
    with pytest.raises(ollama.ResponseError, match="the model broke"):
        next(stream)
    with pytest.raises(ollama.ResponseError, match="the model broke") as caught:
        client.chat("scripted", script("fail"))
    assert caught.value.status_code == 500


def test_a_client_reads_each_part_before_the_next_is_made_and_may_leave(client: ollama.Client) -> None:
    stream = client.chat("scripted", script("endless"), stream=True)
    assert len(next(stream).message.content or "") == 1000
    stream.close()  # type: ignore[attr-defined]
    assert client.chat("scripted", script({"text": "next", **STOP})).message.content == "next"


def test_a_deadline_is_a_header_or_a_field(url: str, client: ollama.Client) -> None:
    with ollama.Client(url, headers={"x-first-token-ms": "900", "x-request-timeout-ms": "60000"}) as hurried:
        assert asked(hurried)["parameters"] == {"first_token_ms": 900}
    with ollama.Client(url, headers={"x-request-timeout-ms": "0"}) as late:
        with pytest.raises(ollama.ResponseError) as caught:
            late.chat("scripted", script("asked"))
        assert caught.value.status_code == 429


def test_a_token_is_what_clients_send_as_their_key(tmp_path: Path) -> None:
    put_scripted(tmp_path / "models")
    path, bearer = tokens(tmp_path)
    settings = HttpSettings(endpoint="127.0.0.1:0", ollama=True, tokens_file=path)
    with running_daemon(tmp_path / "models", tmp_path / "run", http=settings, python_models=True) as daemon:
        with ollama.Client(http_url(daemon), headers={"Authorization": bearer["asker"]}) as client:
            assert client.chat("scripted", script({"text": "x", **STOP})).message.content == "x"
            assert [each.model for each in client.list().models] == ["scripted:latest"]
        with ollama.Client(http_url(daemon)) as client, pytest.raises(ollama.ResponseError) as caught:
            client.list()
        assert caught.value.status_code == 401
