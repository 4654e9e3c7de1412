"""Clients of OpenAI's protocol, unmodified, and the calls of Home Assistant, Open WebUI and Continue, of a model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

pytest.importorskip("openvino_genai", reason="the extra llm is not installed")

from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.zmq.client import Client
from tests.contract.doors.http.test_http_access import tokens
from tests.contract.language.served_words import until
from tests.contract.raw_http import RawHttp, request
from tests.contract.running_daemon import ANSWER_S, http_url, put_model, running_daemon
from tests.models import text_models
from tests.models.language_models import tiny_model

SAID = "Howdy, sir"
"""The answer of the model `assistant` to every chat, greedily."""

QUESTION: Any = [{"role": "user", "content": "Who is there?"}]
ROOMS = {"type": "object", "properties": {"room": {"type": "string", "enum": ["Küche", "Bad"]}}, "required": ["room"]}
TOOLS: Any = [{"type": "function", "function": {"name": "turn_on", "description": "Turn on", "parameters": ROOMS}}]
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "rooms", "strict": True, "schema": ROOMS}}

LIBRARY = """
import sys
import openvino_genai

model = openvino_genai.LLMPipeline(sys.argv[1], "CPU")
settings = model.get_generation_config()
settings.max_new_tokens, settings.do_sample, settings.apply_chat_template = 24, False, False
print(ascii(str(model.generate(sys.argv[2], settings))))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    tiny_model(models / "assistant" / "1", follows=SAID, context=1024)
    tiny_model(models / "writer" / "1")
    put_model(models, "minilm", text_models.embedding, toml=f"batch = true\n{text_models.EMBEDDING_TOML}")
    return models


@pytest.fixture(scope="module")
def bearer(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The file of tokens, and one that may ask."""
    path, bearer = tokens(tmp_path_factory.mktemp("tokens"))
    return path, bearer["asker"].removeprefix("Bearer ")


@pytest.fixture(scope="module")
def daemon(models: Path, bearer: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    settings = HttpSettings(endpoint="127.0.0.1:0", openai=True, tensorflow_serving=True, tokens_file=bearer[0])
    with running_daemon(models, tmp_path_factory.mktemp("run"), http=settings, python_models=True) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def url(daemon: Daemon) -> str:
    return f"{http_url(daemon)}/v1"


@pytest.fixture
def client(url: str, bearer: tuple[str, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=bearer[1], max_retries=0) as client:
        yield client


def text_of(stream: Any) -> str:
    return "".join(each.choices[0].delta.content or "" for each in stream if each.choices)


# ---- openai ---------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_chat_is_answered_whole_and_in_parts_alike(client: openai.OpenAI) -> None:
    asked: Any = {"model": "assistant", "messages": QUESTION, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == SAID
    assert (whole.choices[0].message.role, whole.choices[0].finish_reason) == ("assistant", "stop")
    assert whole.usage is not None
    assert whole.usage.completion_tokens >= len(SAID)
    *parts, last = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert text_of(parts) == SAID
    assert len(parts) > 5
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_greedy_text_is_that_of_the_library_whole_and_streamed(client: openai.OpenAI, models: Path) -> None:
    prompt = "Once upon a time"
    done = subprocess.run(
        [sys.executable, "-c", LIBRARY, str(models / "writer" / "1"), prompt],
        capture_output=True, text=True, timeout=ANSWER_S, check=True,
    )  # fmt: skip
    asked: Any = {"model": "writer", "prompt": prompt, "temperature": 0, "max_tokens": 24}
    (whole,) = client.completions.create(**asked).choices
    streamed = [each.choices[0] for each in client.completions.create(**asked, stream=True)]
    assert ascii(whole.text) == done.stdout.strip()
    assert "".join(each.text for each in streamed) == whole.text
    assert streamed[-1].finish_reason == whole.finish_reason == "length"


def test_the_asynchronous_client_has_many_streams_at_once(url: str, bearer: tuple[str, str]) -> None:
    async def ask(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model="assistant", messages=QUESTION, temperature=0, stream=True)
        return "".join([each.choices[0].delta.content or "" async for each in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key=bearer[1], max_retries=0) as client:
            return await asyncio.gather(*(ask(client) for _ in range(4)))

    assert asyncio.run(ask_all()) == [SAID] * 4


def test_an_answer_ends_at_its_stop_text_or_at_its_length(client: openai.OpenAI) -> None:
    for stop in (",", ["x", "ir"]):
        choice = client.chat.completions.create(model="assistant", messages=QUESTION, temperature=0, stop=stop).choices[
            0
        ]
        wanted = SAID.partition(stop if isinstance(stop, str) else stop[-1])[0]
        assert (choice.message.content, choice.finish_reason) == (wanted, "stop")
    choice = client.chat.completions.create(
        model="assistant", messages=QUESTION, temperature=0, max_completion_tokens=2
    ).choices[0]
    assert (choice.message.content, choice.finish_reason) == (SAID[:2], "length")


def test_the_same_seed_writes_the_same(client: openai.OpenAI) -> None:
    asked: Any = {"model": "writer", "prompt": "Once", "temperature": 1.5, "max_tokens": 12}
    texts = [client.completions.create(**asked, seed=seed).choices[0].text for seed in (7, 7, -8)]
    assert texts[0] == texts[1] != texts[2]


def test_probabilities_of_each_token_are_told_where_they_are_asked_for(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(
        model="assistant", messages=QUESTION, temperature=0, max_tokens=4, logprobs=True
    ).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(each.token for each in choice.logprobs.content) == choice.message.content == SAID[:4]
    assert all(each.logprob <= 0 for each in choice.logprobs.content)
    legacy = client.completions.create(model="writer", prompt="Once", temperature=0, max_tokens=3, logprobs=0).choices[
        0
    ]
    assert legacy.logprobs is not None
    assert legacy.logprobs.token_logprobs is not None
    assert len(legacy.logprobs.token_logprobs) == 3


def test_arguments_of_a_tool_that_has_to_be_called_keep_its_schema(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "assistant",
        "messages": QUESTION,
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls[:1]
    assert call.type == "function"
    assert call.function.name == "turn_on"
    assert json.loads(call.function.arguments)["room"] in {"Küche", "Bad"}
    with client.chat.completions.stream(**asked) as stream:
        assert len(list(stream)) > 2
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls is not None
    assert json.loads(final.message.tool_calls[0].function.arguments)["room"] in {"Küche", "Bad"}


def test_an_answer_keeps_its_schema(client: openai.OpenAI) -> None:
    asked: Any = {"model": "assistant", "messages": QUESTION, "response_format": SCHEMA, "temperature": 0}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.message.content is not None
    assert json.loads(choice.message.content)["room"] in {"Küche", "Bad"}
    assert json.loads(text_of(client.chat.completions.create(**asked, stream=True)))["room"] in {"Küche", "Bad"}


def test_a_prompt_beyond_the_context_is_refused_by_openais_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="assistant", messages=[{"role": "user", "content": "x" * 2000}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="writer", prompt="x" * 2000, stream=True)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_a_deadline_that_cannot_be_met_is_refused_at_once_with_when_to_ask_again(client: openai.OpenAI) -> None:
    asked: Any = {"model": "assistant", "messages": QUESTION, "stream": True}
    client.chat.completions.create(model="assistant", messages=QUESTION)  # a forecast wants a step that was measured
    for late in (
        {"extra_headers": {"x-request-timeout-ms": "0"}},
        {"extra_headers": {"x-first-token-ms": "0.001"}},
        {"extra_body": {"timeout_ms": 0.001}},
        {"extra_body": {"first_token_ms": 0.001}},
    ):
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(**asked, **late)
        assert caught.value.type == "rate_limit_error"
        assert int(caught.value.response.headers["retry-after-ms"]) > 0
        assert caught.value.response.headers["x-should-retry"] == "true"


def test_models_of_each_kind_are_asked_by_their_own_paths(client: openai.OpenAI) -> None:
    assert {each.id for each in client.models.list()} == {"assistant", "writer", "minilm"}
    assert len(client.embeddings.create(model="minilm", input="x").data) == 1
    with pytest.raises(openai.BadRequestError, match="model minilm is not a language model"):
        client.chat.completions.create(model="minilm", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="assistant is a language model, which writes text"):
        client.embeddings.create(model="assistant", input="x")
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="absent", messages=QUESTION)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_key_that_is_no_token_is_refused(url: str) -> None:
    stranger = openai.OpenAI(base_url=url, api_key="other", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(model="assistant", messages=QUESTION)


def test_a_client_that_leaves_frees_its_slot_and_its_cache(client: openai.OpenAI, url: str, daemon: Daemon) -> None:
    """In the middle of a stream, and while it waits for a whole answer."""

    def numbers() -> Any:
        return zmq.stats()["metrics"]["models"]["writer"]

    def cancelled() -> int:
        return int(numbers()["refused"].get("cancelled", 0))

    with Client(daemon.endpoints[0]) as zmq:
        before = cancelled()
        body: dict[str, Any] = {"prompt": "Once", "temperature": 0, "max_tokens": 1000}
        for _ in range(10):  # more than a model has places for
            with client.completions.create(
                model="writer", **body, extra_body={"ignore_eos": True}, stream=True
            ) as stream:
                next(iter(stream))
        until(lambda: cancelled() == before + 10)
        with RawHttp(url.removesuffix("/v1")) as http:
            headers = {"authorization": f"Bearer {client.api_key}"}
            http.send(_request("/v1/completions", {"model": "writer", "ignore_eos": True, **body}, headers))
            until(lambda: numbers()["streams"] == 1)
        until(lambda: cancelled() == before + 11)
        until(lambda: not numbers()["streams"] and not numbers()["kv_used_tokens"])


# ---- other clients --------------------------------------------------------------------------------------------------


def test_langchain_chats_streams_calls_tools_and_keeps_schemas(url: str, bearer: tuple[str, str]) -> None:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(base_url=url, api_key=bearer[1], model="assistant", temperature=0, max_retries=0)
    assert model.invoke("Who is there?").content == SAID
    parts = list(model.stream([("system", "Be brief."), ("user", "Who is there?")]))
    assert "".join(each.content for each in parts) == SAID
    called = model.bind_tools(TOOLS, tool_choice="turn_on").invoke("Turn on the light").tool_calls
    assert [each["name"] for each in called] == ["turn_on"]
    assert called[0]["args"]["room"] in {"Küche", "Bad"}
    schema = {"title": "rooms", **ROOMS}
    found = model.with_structured_output(schema, method="json_schema").invoke("Which room?")
    assert found["room"] in {"Küche", "Bad"}
    model.root_client.close()


def test_the_command_llm_asks_by_its_own_file_of_models(url: str, bearer: tuple[str, str], tmp_path: Path) -> None:
    program = shutil.which("llm", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("llm is not installed")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: assistant\n  model_name: assistant\n  api_base: {url}\n  api_key_name: edge-runtime\n"
    )
    asked = [program, "-m", "assistant", "-o", "temperature", "0", "--key", bearer[1], "--no-log", "Who is there?"]
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
    done = subprocess.run(
        asked, env=environment, capture_output=True, text=True, timeout=ANSWER_S, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == SAID


def test_curl_prints_events_as_they_come(url: str, bearer: tuple[str, str]) -> None:
    body = json.dumps({"model": "assistant", "messages": QUESTION, "temperature": 0, "stream": True})
    asked = ["curl", "-sN", f"{url}/chat/completions", "-H", f"Authorization: Bearer {bearer[1]}", "-d", body]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=ANSWER_S, check=True)
    *events, end, _ = done.stdout.split("\n\n")
    assert end == "data: [DONE]"
    said = [json.loads(each.removeprefix("data: "))["choices"][0]["delta"].get("content", "") for each in events]
    assert "".join(said) == SAID


def test_the_set_up_and_the_talks_of_home_assistants_llama_cpp_are_answered(url: str, bearer: tuple[str, str]) -> None:
    """Its fields, and what it reads: the first call of a chunk, arguments joined by index, until there is an end."""
    function: Any = {
        "name": "test_function",
        "description": "Test function.",
        "parameters": {"type": "object", "properties": {}},
    }
    first: Any = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is the capital of France?"},
    ]

    async def talk() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key=bearer[1]) as client:
            assert "assistant" in [each.id async for each in await client.with_options(timeout=10.0).models.list()]
            for stream in (False, True):
                told: Any = await client.chat.completions.create(
                    model="assistant", messages=first, tools=[{"type": "function", "function": function}], max_tokens=3,
                    stream=stream,
                )  # fmt: skip
                if stream:
                    reasons = [each.choices[0].finish_reason async for each in told if each.choices]
                    assert reasons[-1] == "length"
            messages = [*first, {"role": "assistant", "content": "Paris"}, *QUESTION]
            asked: Any = {
                "model": "assistant",
                "max_tokens": 3000,
                "top_p": 1.0,
                "temperature": 1.0,
                "user": "01K",
                "stream": True,
            }
            assert await said(client, messages=messages, **asked) != ("", [])
            _, (call,) = await said(client, messages=messages, tools=TOOLS, tool_choice="required", **asked)
            assert json.loads(call["arguments"])["room"] in {"Küche", "Bad"}
            messages += [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"type": "function", "id": call["id"], "function": {k: call[k] for k in ("name", "arguments")}}
                    ],
                },
                {"role": "tool", "tool_call_id": call["id"], "content": '{"data":{"success":true},"error":null}'},
            ]
            text, _ = await said(client, messages=messages, response_format=SCHEMA, **asked)
            assert json.loads(text)["room"] in {"Küche", "Bad"}

    async def said(client: Any, **asked: Any) -> tuple[str, list[dict[str, str]]]:
        text, calls = "", {}
        async for chunk in await client.chat.completions.create(**asked):
            if not chunk.choices:
                continue
            if chunk.choices[0].finish_reason:
                break
            delta = chunk.choices[0].delta
            text += delta.content or ""
            if delta.tool_calls:
                told = delta.tool_calls[0]
                call = calls.setdefault(told.index, {"id": told.id, "name": told.function.name, "arguments": ""})
                call["arguments"] += told.function.arguments or ""
        return text, list(calls.values())

    asyncio.run(talk())


def test_open_webui_verifies_its_address_and_streams(url: str, bearer: tuple[str, str]) -> None:
    headers = {"authorization": f"Bearer {bearer[1]}", "content_type": "application/json"}
    body = {
        "stream": True, "model": "assistant", "messages": QUESTION, "temperature": 0, "metadata": {}, "options": {},
        "stream_options": {"include_usage": True}, "logit_bias": {}, "stop": [], "files": None, "params": {},
    }  # fmt: skip
    with RawHttp(url.removesuffix("/v1")) as http:
        found = http.ask("GET", "/v1/models", **headers).fields["data"]
        assert {each["object"] for each in found} == {"model"}
        http.send(_request("/v1/chat/completions", body, headers))
        assert _events(http)[-1]["usage"]["completion_tokens"] > 0


def test_continue_completes_by_the_legacy_path(url: str, bearer: tuple[str, str]) -> None:
    body = {
        "model": "writer", "prompt": "def add(a, b):\n    return", "max_tokens": 8, "temperature": 0.01, "stream": True,
        "stop": ["\n\n", "def ", "class "], "suffix": None, "presence_penalty": None, "frequency_penalty": None,
    }  # fmt: skip
    with RawHttp(url.removesuffix("/v1")) as http:
        http.send(_request("/v1/completions", body, {"authorization": f"Bearer {bearer[1]}"}))
        choices = [each["choices"][0] for each in _events(http)]
    assert choices[-1]["finish_reason"] in {"length", "stop"}
    assert all(isinstance(each["text"], str) for each in choices)


def test_the_handbooks_programs_run(url: str, bearer: tuple[str, str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "clients.md").read_text(encoding="utf-8")
    section = page.partition("## OpenAI's client")[2].partition("\n## ")[0]
    program = "".join(each for each in section.split("```")[1::2] if "import" in each)
    there = program.replace("http://127.0.0.1:8000/v1", url).replace('api_key="none"', f"api_key={bearer[1]!r}")
    done = subprocess.run(
        [sys.executable, "-c", there.replace("dimensions=256", "dimensions=2")],
        capture_output=True, text=True, timeout=ANSWER_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{SAID}\n{SAID}{SAID}\n[2, 2]\n"


def _request(path: str, body: dict[str, Any], headers: dict[str, str]) -> bytes:
    return request("POST", path, json.dumps(body).encode(), connection="close", **headers)


def _events(http: RawHttp) -> list[Any]:
    """The events of a stream that ends with its connection, without the mark of its end."""
    text = b"".join(iter(lambda: http.socket.recv(1 << 16), b"")).decode()
    events = re.findall(r"^data: (.*)$", text, re.MULTILINE)
    assert events.pop() == "[DONE]"
    return [json.loads(each) for each in events]
