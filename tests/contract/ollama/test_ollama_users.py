"""Programs that speak Ollama's protocol, by their own calls: Home Assistant's integration, Open WebUI, and curl."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import aiohttp
import ollama
import pytest

from edge_runtime.doors.http.settings import HttpSettings
from tests.contract.raw_http import RawHttp
from tests.contract.running_daemon import http_url, running_daemon
from tests.models.scripted_models import put_scripted

STOP = {"finish_reason": "stop", "usage": [3, 2, 1]}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("run")
    put_scripted(folder / "models")
    settings = HttpSettings(endpoint="127.0.0.1:0", ollama=True, page=False)
    with running_daemon(folder / "models", folder, http=settings, python_models=True, watch=False) as daemon:
        yield http_url(daemon)


class HomeAssistant:
    """The calls of Home Assistant's integration `ollama`, and what it reads of the answers."""

    def __init__(self, client: ollama.AsyncClient) -> None:
        self._client = client

    async def set_up(self, model: str) -> None:
        """List the models; pull the one that was chosen where it is not among them."""
        listed = await self._client.list()
        if model not in {each["model"] for each in listed["models"]}:
            await self._client.pull(model)

    async def say(self, messages: list[ollama.Message], tools: list[Any] | None) -> ollama.Message:
        """One round: what was said, and the calls of tools."""
        stream = await self._client.chat(
            model="scripted:latest",
            messages=messages,
            tools=tools,
            stream=True,
            keep_alive="-1s",
            options={"num_ctx": 8192},
            think=False,
            format=None,
        )
        said, calls, ended = "", [], 0
        async for response in stream:
            message = response["message"]
            calls += message.get("tool_calls") or []
            said += message.get("content") or ""
            ended += bool(response.get("done"))
        assert ended == 1
        return ollama.Message(role="assistant", content=said, tool_calls=calls)


def test_home_assistant_sets_up_asks_runs_a_tool_and_gets_its_answer(url: str) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "HassTurnOn",
            "description": "Turns on a device.",
            "parameters": {"type": "object", "properties": {"area": {"type": "string"}}, "required": []},
        },
    }
    call = {"id": "a", "type": "function", "function": {"name": "HassTurnOn", "arguments": '{"area": "Küche"}'}}

    async def talk() -> tuple[ollama.Message, ollama.Message]:
        asks = json.dumps([{"tool_calls": [call]}, {"finish_reason": "tool_calls", "usage": [9, 5, 0]}])
        messages = [
            ollama.Message(role="system", content="You control a home."),
            ollama.Message(role="user", content=asks),
        ]
        result = ollama.Message(role="tool", content=json.dumps([{"text": "It "}, {"text": "is on."}, STOP]))
        async with ollama.AsyncClient(host=url) as client:
            home = HomeAssistant(client)
            await home.set_up("scripted:latest")
            await home.set_up("scripted")
            first = await home.say(messages, [tool])
            return first, await home.say([*messages, first, result], [tool])

    first, second = asyncio.run(talk())
    assert [dict(each.function.arguments) for each in first.tool_calls or ()] == [{"area": "Küche"}]
    assert (second.content, second.tool_calls) == ("It is on.", [])


def test_home_assistant_is_told_why_a_model_cannot_be_pulled(url: str) -> None:
    async def set_up() -> None:
        async with ollama.AsyncClient(host=url) as client:
            await HomeAssistant(client).set_up("llama3.2")

    with pytest.raises(ollama.ResponseError, match="none is fetched from a registry"):
        asyncio.run(set_up())


def test_open_webui_finds_the_models_and_streams_lines(url: str) -> None:
    async def use() -> list[dict[str, Any]]:
        async with aiohttp.ClientSession(base_url=url) as session:
            async with session.get("/api/tags") as answer:
                (model,) = (await answer.json())["models"]
            for path in ("/api/version", "/api/ps"):
                async with session.get(path) as answer:
                    assert answer.status == 200
            assert (model["name"], model["details"]["format"]) == ("scripted:latest", "openvino")
            script = json.dumps([{"text": "He"}, {"text": "llo"}, STOP])
            body = {
                "model": model["model"],
                "messages": [{"role": "user", "content": script}],
                "stream": True,
                "options": {},
                "metadata": {"chat_id": "x"},
            }
            async with session.post("/api/chat", json=body) as answer:
                assert answer.content_type == "application/x-ndjson"
                return [json.loads(line) async for line in answer.content]

    *parts, last = asyncio.run(use())
    assert [each["message"]["content"] for each in parts] == ["He", "llo"]
    assert last["eval_count"] == 2
    assert last["eval_duration"] >= 0


def test_curl_reads_a_stream_as_it_comes(url: str) -> None:
    body = json.dumps({"model": "scripted", "prompt": json.dumps([{"text": "a"}, STOP])})
    done = subprocess.run(
        ["curl", "-sN", f"{url}/api/generate", "-d", body], capture_output=True, text=True, timeout=60, check=True
    )
    assert [json.loads(line)["response"] for line in done.stdout.splitlines()] == ["a", ""]


def test_the_root_says_that_the_server_runs_and_any_path_that_is_not_there_is_refused(url: str) -> None:
    with RawHttp(url) as http:
        assert http.ask("HEAD", "/").status == 200
        answer = http.ask("GET", "/")
        assert (answer.status, answer.body) == (200, b"Ollama is running")
        assert http.ask("GET", "/api/version").fields["version"].count(".") == 2
        for method, path, status in (
            ("GET", "/api/chat", 405),
            ("GET", "/api/none", 404),
            ("DELETE", "/api/delete", 501),
            ("HEAD", "/api/blobs/sha256:00", 501),
        ):
            assert http.ask(method, path).status == status


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("chat", {"messages": "x"}, "messages"),
        ("chat", {"messages": [{"role": "robot"}]}, "messages[0]"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls"),
        ("chat", {"messages": [{"role": "user", "content": "\ud800"}]}, "half a surrogate"),
        ("chat", {"messages": [], "stream": "yes"}, "stream"),
        ("generate", {"prompt": 5}, "prompt"),
        ("generate", {"prompt": "\ud800", "raw": True}, "half a surrogate"),
        ("embed", {"input": "x"}, "gives no embeddings"),
        ("embed", {"input": [5]}, "wanted text or a list"),
        ("chat", {"messages": [{"role": "user", "content": "[]"}], "x": 1, "first_token_ms": "soon"}, "first-token-ms"),
    ],
)
def test_each_wrong_field_is_refused_with_its_name(url: str, path: str, fields: dict[str, Any], words: str) -> None:
    with RawHttp(url) as http:
        answer = http.ask("POST", f"/api/{path}", json.dumps({"model": "scripted", **fields}).encode())
    assert (answer.status, set(answer.fields)) == (400, {"error", "code"})
    assert words in answer.fields["error"]


@pytest.mark.parametrize(
    "fields", [{"suffix": "x"}, {"context": [1]}, {"template": "x"}, {"raw": True, "format": "json"}]
)
def test_fields_that_no_model_here_heeds_are_refused_where_that_would_be_wrong(
    url: str, fields: dict[str, Any]
) -> None:
    with RawHttp(url) as http:
        answer = http.ask("POST", "/api/generate", json.dumps({"model": "scripted", "prompt": "[]", **fields}).encode())
    assert (answer.status, answer.code) == (501, "unsupported")
