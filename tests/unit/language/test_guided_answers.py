"""Chats with tools and schemas by the writer of a host: calls come whole, and others go on whatever one asks."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from edge_runtime.backends.openvino_genai.trials import MOST_WAITING
from edge_runtime.backends.openvino_genai.writer import Writer
from edge_runtime.errors import RunFailed
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


@pytest.fixture
def made_again(writer: RandomWriter) -> Iterator[tuple[Writer, list[Any]]]:
    """A writer with room for the grammars of a few schemas, and what became of each making of its pipeline.

    What a test adds as an error is raised by the next.
    """
    made: list[Any] = []

    def make() -> Any:
        if made and isinstance(made[-1], Exception):
            made[-1] = str(made[-1])
            raise RuntimeError(made[-1])
        made.append("made")
        schedule = writer.library.SchedulerConfig()
        schedule.num_kv_blocks = 128
        return writer.library.ContinuousBatchingPipeline(
            str(writer.trials.folder), schedule, "CPU", {"INFERENCE_NUM_THREADS": 1}
        )

    writing = Writer(
        writer.library,
        make,
        folder=writer.trials.folder,
        context=4096,
        prefill_tokens=128,
        streams=8,
        block_tokens=32,
        blocks=128,
        grammar_bytes=1 << 20,
    )
    yield writing, made
    writing.close()


def new_schema(number: int) -> bytes:
    """A chat with a schema that no other has: the library keeps some 300 kB of it, of a vocabulary of 512."""
    keys = [f"of_{number}_{key}" for key in range(4)]
    schema = {
        "type": "object",
        "properties": {key: {"type": "string", "maxLength": 20} for key in keys},
        "required": keys,
        "additionalProperties": False,
    }
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "new", "schema": schema}})


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


def test_new_schemas_are_forgotten_where_nothing_is_under_way(made_again: tuple[Writer, list[Any]]) -> None:
    writing, made = made_again
    for number in range(12):
        (last,) = written(writing, Begin(number, None, new_schema(number), seeded(number, 2)))[number][-1:]
        assert (last.code, last.finish_reason) == ("", "length")
        assert not writing.step(Orders()).wants_rest

    assert 3 <= len(made) <= 8


def test_new_schemas_are_refused_while_an_answer_keeps_the_others_from_being_forgotten(
    made_again: tuple[Writer, list[Any]],
) -> None:
    writing, made = made_again
    long = Parameters(max_tokens=3000, temperature=0.0, ignore_eos=True)
    writing.step(Orders((Begin(1000, b"Hallo", None, long),)))
    ends: list[TextEvent] = []
    for number in range(12):
        begins: tuple[Begin, ...] = (Begin(number, None, new_schema(number), seeded(number, 2)),)
        while not (ends and ends[-1].id == number):
            live = (1000,) if begins else (1000, number)
            ends += [event for event in writing.step(Orders(begins, live=live)).events if event.is_last]
            begins = ()

    codes = [event.code for event in ends]
    assert 5 <= codes.index("queue_full") <= 10
    assert set(codes[codes.index("queue_full") :]) == {"queue_full"}
    assert all(event.retry_after_ms > 0 for event in ends if event.code)
    used_before = Begin(2000, None, new_schema(0), seeded(0, 2))
    begins, known = (used_before,), ""
    while not known:
        live = (1000,) if begins else (1000, 2000)
        found = writing.step(Orders(begins, live=live)).events
        begins, known = (), next((event.finish_reason for event in found if event.id == 2000), "")
    assert known == "length"
    assert len(made) == 1

    assert writing.step(Orders(cancels=(1000,))).wants_rest is False
    assert len(made) == 2
    assert written(writing, Begin(3000, None, new_schema(11), seeded(0, 2)))[3000][-1].finish_reason == "length"


def test_model_that_cannot_be_loaded_again_is_loaded_by_the_next_step(made_again: tuple[Writer, list[Any]]) -> None:
    writing, made = made_again
    for number in range(6):
        written(writing, Begin(number, None, new_schema(number), seeded(number, 2)))
    made.append(RuntimeError("no memory"))
    with pytest.raises(RunFailed, match="cannot load the model again: no memory"):
        writing.step(Orders())

    assert written(writing, Begin(7, b"Hallo", None, seeded(7, 2)))[7][-1].finish_reason == "length"
    assert made == ["made", "no memory", "made"]


def test_more_trials_than_may_wait_are_refused_and_cancelled_ones_are_not_tried(writing: Writer) -> None:
    asked = [Begin(number, None, slow_schema(number), seeded(1, 2)) for number in range(MOST_WAITING + 1)]
    found = writing.step(Orders(tuple(asked))).events
    assert [(event.id, event.code) for event in found] == [(MOST_WAITING, "queue_full")]
    assert found[0].retry_after_ms > 0

    left = written_on(writing, live=(0,))
    assert left[-1].finish_reason == "length"
    assert written(writing, Begin(99, None, new_schema(99), seeded(1, 2)))[99][-1].finish_reason == "length"


def slow_schema(number: int) -> bytes:
    """A chat with a schema whose grammar takes some hundred ms."""
    chance = random.Random(number)
    texts = ["".join(chance.choices("abcdefgh", k=20)) for _ in range(900)]
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "slow", "schema": {"enum": texts}}})


def written_on(writing: Writer, live: tuple[int, ...]) -> list[TextEvent]:
    """Make steps until none of these is live."""
    events: list[TextEvent] = []
    while live:
        events += (step := writing.step(Orders(live=live))).events
        live = tuple(number for number in live if number not in {event.id for event in step.events if event.is_last})
    return events
