"""Chats with tools and schemas by the writer of a host: calls come whole, and others go on whatever one asks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from edge_runtime.backends.openvino_genai.writer import Writer
from edge_runtime.language.messages import Begin, Orders, TextEvent
from edge_runtime.language.parameters import Parameters
from tests.unit.language.conftest import Writer as RandomWriter

ROOMS = {
    "type": "object",
    "properties": {
        "Küche": {"enum": ["Lüfter", "Kühlschrank", "Süd"]},
        "temperature": {"enum": ["21 °C", "22 °C"]},
        "brightness": {"type": "integer", "minimum": 0, "maximum": 100},
    },
    "required": ["Küche", "temperature"],
}


@pytest.fixture
def writing(writer: RandomWriter) -> Iterator[Writer]:
    """A host's writer over the random model."""
    made = Writer(
        writer.library,
        lambda: writer.pipeline,
        folder=writer.trials.folder,
        context=4096,
        prefill_tokens=128,
        streams=8,
        block_tokens=32,
        blocks=256,
    )
    yield made
    made.close()


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "Küche, 21 °C"}], **fields}).encode()


def of_tool(parameters: Any, **fields: Any) -> bytes:
    tool = {"type": "function", "function": {"name": "HassTurnOn", "parameters": parameters, "strict": True}}
    return chat(tools=[tool], **fields)


def written(writing: Writer, *begins: Begin) -> dict[int, list[TextEvent]]:
    """Have all answers written to their ends. Returns the events of each."""
    found: dict[int, list[TextEvent]] = {each.id: [] for each in begins}
    orders = Orders(begins)
    while live := [number for number, events in found.items() if not (events and events[-1].is_last)]:
        for event in writing.step(orders).events:
            found[event.id].append(event)
        orders = Orders(live=tuple(number for number in live if not (found[number] and found[number][-1].is_last)))
    return found


def seeded(seed: int, max_tokens: int = 200) -> Parameters:
    return Parameters(max_tokens=max_tokens, temperature=1.0, seed=seed)


@pytest.mark.parametrize("seed", range(3))
def test_required_call_comes_whole_and_fits(writing: Writer, seed: int) -> None:
    asked = of_tool(ROOMS, tool_choice="required", parallel_tool_calls=False)
    events = written(writing, Begin(1, None, asked, seeded(seed)))[1]
    calls = [call for event in events for call in event.tool_calls]
    assert [call.function.name for call in calls] == ["HassTurnOn"]
    assert Draft202012Validator(ROOMS).is_valid(json.loads(calls[0].function.arguments))
    assert events[-1].finish_reason == "tool_calls"
    assert "".join(event.text for event in events) == ""


def test_call_that_max_tokens_cuts_is_no_call(writing: Writer) -> None:
    asked = of_tool(ROOMS, tool_choice="required")
    events = written(writing, Begin(1, None, asked, seeded(0, 30)))[1]
    assert events[-1].finish_reason == "length"
    assert not any(event.tool_calls or event.text for event in events)


def test_json_of_a_schema_streams_as_text(writing: Writer) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "rooms", "schema": ROOMS, "strict": True}}
    events = written(writing, Begin(1, None, chat(response_format=wanted), seeded(4)))[1]
    assert events[-1].finish_reason == "stop"
    assert len([event for event in events if event.text]) > 3
    assert Draft202012Validator(ROOMS).is_valid(json.loads("".join(event.text for event in events)))


BAD = {
    "no schema": (of_tool({"type": 5}), "decode_failed"),
    "no schema of an answer": (
        chat(response_format={"type": "json_schema", "json_schema": {"schema": {"type": 5}}}),
        "decode_failed",
    ),
    "not kept to": (of_tool({"not": {}}), "unsupported"),
    "too deep": (of_tool(json.loads('{"type": "object", "properties": {"a":' * 60 + "{}" + "}}" * 60)), "unsupported"),
    "too long a string": (of_tool({"properties": {"a": {"maxLength": 10**9}}}), "unsupported"),
    "endless": (of_tool({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}), "unsupported"),
}


@pytest.mark.parametrize("name", BAD)
def test_others_go_on_beside_a_bad_schema(writing: Writer, name: str) -> None:
    asked, code = BAD[name]
    others = [Begin(number, b"Hallo", None, seeded(number, 12)) for number in (1, 2)]
    good = Begin(3, None, of_tool(ROOMS, tool_choice="required", parallel_tool_calls=False), seeded(3))
    found = written(writing, *others, Begin(9, None, asked, seeded(9)), good)
    assert [(event.code, event.finish_reason) for event in found[9]] == [(code, "")]
    assert [found[number][-1].finish_reason for number in (1, 2, 3)] == ["length", "length", "tool_calls"]
    assert writing.step(Orders()).live == 0


def test_answer_cancelled_during_its_trial_leaves_nothing(writing: Writer) -> None:
    asked = of_tool({**ROOMS, "title": "of its own"})
    assert writing.step(Orders((Begin(1, None, asked, seeded(1)),))).live in (0, 1)
    last = writing.step(Orders(cancels=(1,)))
    assert (last.live, last.events) == (0, ())
