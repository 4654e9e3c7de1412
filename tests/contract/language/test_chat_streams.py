"""Chats through a daemon: a call of a tool comes whole, and a wrong schema is an error of its own stream alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import DecodeFailed
from tests.contract.running_daemon import ANSWER_S, running_daemon
from tests.models.language_models import tiny_model

pytest.importorskip("openvino_genai", reason="the extra llm is not installed: pip install edge-runtime[llm]")

ROOMS = {
    "type": "object",
    "properties": {"Küche": {"enum": ["Lüfter", "Süd"]}, "to": {"enum": ["21 °C", "22 °C"]}},
    "required": ["Küche", "to"],
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder: Path = tmp_path_factory.mktemp("chats")
    tiny_model(folder / "models" / "words" / "1", context=2048)
    (folder / "models" / "words" / "model.toml").write_text(
        "[language]\nmax_streams = 2\nkv_cache_mb = 16\ngrammars_mb = 1\n"
    )
    with running_daemon(folder / "models", folder / "daemon") as daemon, Client(daemon.endpoints[0]) as client:
        client.wait_ready(ANSWER_S)
        yield client


def chat(parameters: object) -> dict[str, object]:
    tool = {"type": "function", "function": {"name": "HassTurnOn", "parameters": parameters}}
    return {
        "messages": [{"role": "user", "content": "Küche, 21 °C"}],
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }


@pytest.mark.smoke
def test_tool_call_comes_whole_through_a_stream(client: Client) -> None:
    parts = list(client.stream("words", chat=chat(ROOMS), max_tokens=200, temperature=1.0, seed=3))
    calls = [call for part in parts for call in json.loads(part["tool_calls"][0])]
    assert [call["function"]["name"] for call in calls] == ["HassTurnOn"]
    assert Draft202012Validator(ROOMS).is_valid(json.loads(calls[0]["function"]["arguments"]))
    assert parts[-1]["finish_reason"][0] == b"tool_calls"


def test_ever_new_schemas_are_answered_as_those_before_are_forgotten(client: Client) -> None:
    """The library keeps some 300 kB of each, and at 2 MB new ones would be refused."""
    for number in range(14):
        keys = [f"of_{number}_{key}" for key in range(4)]
        properties = {key: {"type": "string", "maxLength": 20} for key in keys}
        asked = chat({"type": "object", "properties": properties, "required": keys})
        assert list(client.stream("words", chat=asked, max_tokens=2))[-1]["finish_reason"][0] == b"length"


def test_wrong_schema_is_an_error_of_its_own_stream(client: Client) -> None:
    other = client.stream("words", text="Hello", max_tokens=30, ignore_eos=True)
    next(other)
    with pytest.raises(DecodeFailed, match="not a JSON schema"):
        list(client.stream("words", chat=chat({"type": "object", "properties": {"a": {"type": 5}}})))
    assert list(other)[-1].final
