"""Streams of OpenAI's paths, part by part, from a model with a language model's outputs that writes by a script.

The script is in the message: so each part, each end and each fault comes when a test wants it.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.http.settings import HttpSettings
from tests.contract.raw_http import RawHttp, request
from tests.contract.running_daemon import ANSWER_S, http_url, running_daemon
from tests.models.scripted_models import put_scripted

STOP = {"finish_reason": "stop", "usage": [3, 2, 1]}
CALL = {"id": "call_1", "type": "function", "function": {"name": "turn_on", "arguments": '{"room": "Küche"}'}}
PAGE = "http://page.example"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("run")
    put_scripted(folder / "models")
    settings = HttpSettings(endpoint="127.0.0.1:0", openai=True, tensorflow_serving=True, allowed_origins=(PAGE,))
    with running_daemon(folder / "models", folder, http=settings, python_models=True, watch=False) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def url(daemon: Daemon) -> str:
    return http_url(daemon)


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def script(*parts: Any) -> Any:
    return [{"role": "user", "content": json.dumps(parts)}]


def body(*parts: Any, **fields: Any) -> str:
    return json.dumps({"model": "scripted", "messages": script(*parts), "stream": True, **fields})


@pytest.mark.smoke
def test_a_stream_is_events_up_to_the_mark_of_its_end(url: str) -> None:
    place = urlsplit(url).netloc
    connection = http.client.HTTPConnection(place, timeout=ANSWER_S)
    try:
        for _ in range(2):  # the connection goes on
            connection.request("POST", "/v1/chat/completions", body({"text": "He"}, {"text": "llo"}, STOP))
            answer = connection.getresponse()
            assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            assert answer.headers["X-Accel-Buffering"] == "no"
            *events, done, rest = answer.read().decode().split("\n\n")
            assert (done, rest) == ("data: [DONE]", "")
            deltas = [json.loads(each.removeprefix("data: "))["choices"][0]["delta"] for each in events]
            assert deltas == [{"role": "assistant", "content": "He"}, {"content": "llo"}, {}]
    finally:
        connection.close()


def test_a_client_reads_each_part_before_the_next_is_made(client: openai.OpenAI) -> None:
    with client.chat.completions.create(model="scripted", messages=script("endless"), stream=True) as stream:
        first, second = next(stream), next(stream)
    assert first.choices[0].delta.role == "assistant"
    assert (second.choices[0].delta.role, second.choices[0].delta.content) == (None, "x" * 1000)
    # It has left, so the model, which answers one at a time, is free.
    with client.chat.completions.create(model="scripted", messages=script({"text": "y"}, STOP), stream=True) as stream:
        assert "".join(each.choices[0].delta.content or "" for each in stream) == "y"


def test_a_tool_is_called_in_one_chunk_and_the_client_puts_it_together(client: openai.OpenAI) -> None:
    other = {**CALL, "id": "call_2"}
    parts = ({"tool_calls": [CALL]}, {"tool_calls": [other], "finish_reason": "tool_calls", "usage": [3, 2, 1]})
    tools: Any = [{"type": "function", "function": {"name": "turn_on", "parameters": {"type": "object"}}}]
    asked = {"model": "scripted", "messages": script(*parts), "tools": tools}
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        kinds = [each.type for each in stream]
        final = stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == 2
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [(each.id, each.function.name, json.loads(each.function.arguments)) for each in calls] == [
        ("call_1", "turn_on", {"room": "Küche"}),
        ("call_2", "turn_on", {"room": "Küche"}),
    ]
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.usage is not None
    assert final.usage.total_tokens == 5


def test_an_error_behind_parts_is_an_event_and_no_mark_of_an_end_follows(client: openai.OpenAI, url: str) -> None:
    with RawHttp(url) as http:
        text = body({"text": "He"}, "fail").encode()
        http.send(request("POST", "/v1/chat/completions", text, connection="close"))
        whole = b"".join(iter(lambda: http.socket.recv(1 << 16), b""))
    assert b"[DONE]" not in whole
    assert whole.endswith(b"0\r\n\r\n")
    stream = client.chat.completions.create(model="scripted", messages=script({"text": "He"}, "fail"), stream=True)
    assert next(stream).choices[0].delta.content == "He"
    with pytest.raises(openai.APIError, match="the model broke") as caught:
        next(stream)
    assert (caught.value.code, caught.value.type) == ("run_failed", "server_error")


def test_an_error_before_any_part_is_a_status(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="the model broke"):
        client.chat.completions.create(model="scripted", messages=script("fail"), stream=True)
    with pytest.raises(openai.InternalServerError, match="the model broke"):  # nothing was told of the first part
        client.chat.completions.create(model="scripted", messages=script({"text": ""}, "fail"), stream=True)


@pytest.mark.parametrize(
    "headers", [{"Origin": PAGE}, {"Connection": "close"}, {"Origin": PAGE, "Connection": "close"}]
)
def test_parts_come_one_by_one_to_pages_of_other_origins_and_on_a_last_request(
    url: str, headers: dict[str, str]
) -> None:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=ANSWER_S)
    try:
        connection.request("POST", "/v1/chat/completions", body("endless"), headers)
        answer = connection.getresponse()
        assert json.loads(answer.readline().removeprefix(b"data: "))["choices"][0]["delta"]["content"]
        assert answer.headers["Access-Control-Allow-Origin"] == (PAGE if "Origin" in headers else None)
        assert answer.headers["Connection"] == headers.get("Connection")
        answer.close()
    finally:
        connection.close()


def test_a_page_of_another_origin_may_send_its_key_and_read_when_to_ask_again(url: str) -> None:
    asked = {"origin": PAGE, "access_control_request_headers": "authorization, content-type, x-stainless-os"}
    with RawHttp(url) as http:
        allowed = http.ask("OPTIONS", "/v1/chat/completions", **asked)
        assert allowed.headers["access-control-allow-headers"] == asked["access_control_request_headers"]
        refused = http.ask("POST", "/v1/chat/completions", b"{}", origin=PAGE)
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (400, PAGE)
    told = set(refused.headers["access-control-expose-headers"].split(", "))
    assert {"retry-after-ms", "x-should-retry", "traceparent"} <= told


def test_a_client_of_http_1_0_gets_all_at_once(url: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=ANSWER_S)
    connection._http_vsn, connection._http_vsn_str = 10, "HTTP/1.0"  # type: ignore[attr-defined]
    try:
        connection.request("POST", "/v1/chat/completions", body({"text": "He"}, STOP))
        whole = connection.getresponse().read()
    finally:
        connection.close()
    assert whole.count(b"data: ") == 3
    assert whole.endswith(b"data: [DONE]\n\n")


def test_a_client_that_reads_nothing_holds_up_no_other_and_keeps_a_bounded_answer(
    url: str, client: openai.OpenAI
) -> None:
    place = urlsplit(url)
    with socket.socket() as idle:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.settimeout(ANSWER_S)
        idle.connect((place.hostname, place.port))
        idle.sendall(request("POST", "/v1/chat/completions", body("endless").encode()))
        assert idle.recv(1, socket.MSG_PEEK)
        assert client.models.list().data[0].id == "scripted"


def test_models_are_listed_beside_tensorflow_servings(client: openai.OpenAI, url: str) -> None:
    assert [each.id for each in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").object == "model"
    with RawHttp(url) as http:
        fields = http.ask("GET", "/v1/models/scripted").fields
    assert fields["id"] == "scripted"
    assert fields["model_version_status"][0]["state"] == "AVAILABLE"
