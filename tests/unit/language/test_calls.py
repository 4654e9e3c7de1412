"""Calls of tools: read whole from text in pieces, in the form of each family; what is wrong with tools is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.errors import DecodeFailed
from edge_runtime.language.calls import CallReader, call_form, read_tools

TOOL = {"type": "function", "function": {"name": "turn_on", "parameters": {"type": "object"}}}

TEMPLATES = {
    "qwen": "{% if tools %}<tool_call>{% endif %}",
    "mistral": "{% if tools %}[AVAILABLE_TOOLS][TOOL_CALLS]{% endif %}",
    "mistral 2025": "{% if tools %}[TOOL_CALLS]x[ARGS]{% endif %}",
    "phi": "{% if tools %}<|tool_call|><|/tool_call|>{% endif %}",
    "granite": "{% if tools %}<|tool_call|>{% endif %}",
    "llama": "{% if tools %}<|python_tag|>{% endif %}",
}

ROOM = {"room": "Küche", "device": "Lüfter", "to": "21 °C"}
LIST = {"rooms": ["Süd", "a}b", '"]'], "n": {"m": None}}


def answer(family: str, *arguments: dict[str, Any]) -> str:
    """The text in which a family of models writes calls with these arguments."""
    key = "parameters" if family == "llama" else "arguments"
    calls = [json.dumps({"name": "turn_on", key: each}, ensure_ascii=False) for each in arguments]
    return {
        "qwen": "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in calls),
        "mistral": f"[TOOL_CALLS][{', '.join(calls)}]",
        "mistral 2025": "".join(f"[TOOL_CALLS]turn_on[ARGS]{json.dumps(each)}" for each in arguments),
        "phi": f"<|tool_call|>[{', '.join(calls)}]<|/tool_call|>",
        "granite": f"<|tool_call|>[{', '.join(calls)}]",
        "llama": "; ".join(calls),
    }[family]


def read(family: str, pieces: list[str], finish: str = "stop") -> tuple[str, list[dict[str, Any]], str]:
    reader = CallReader(call_form(TEMPLATES[family]), ["turn_on"])
    said = [*(reader.read(each) for each in pieces), reader.close(finish)]
    calls = [json.loads(call.function.arguments) for each in said for call in each.calls]
    return "".join(each.text for each in said), calls, said[-1].finish_reason


@pytest.mark.parametrize("family", TEMPLATES)
@given(data=st.data())
def test_calls_come_whole_however_their_text_is_cut(family: str, data: st.DataObject) -> None:
    text = answer(family, ROOM, LIST)
    ends = sorted(data.draw(st.sets(st.integers(1, len(text) - 1))))
    pieces = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    assert read(family, pieces) == ("", [ROOM, LIST], "tool_calls")


@pytest.mark.parametrize("family", TEMPLATES)
@given(data=st.data())
def test_calls_that_length_cuts_are_given_whole_or_not_at_all(family: str, data: st.DataObject) -> None:
    text = answer(family, ROOM, LIST)
    cut = text[: data.draw(st.integers(0, len(text) - 1))]
    said, calls, finish = read(family, [*cut], "length")
    assert calls in ([], [ROOM], [ROOM, LIST])
    assert (said, finish) == ("", "length")


@pytest.mark.parametrize("family", [each for each in TEMPLATES if each != "llama"])
def test_text_before_a_call_goes_out_at_once(family: str) -> None:
    form = call_form(TEMPLATES[family])
    assert form is not None
    reader = CallReader(form, ["turn_on"])
    assert reader.read("Gern. ").text == "Gern."
    assert reader.read("Moment: " + form.mark[:3]).text == " Moment:"
    call = answer(family, ROOM)[3:]
    assert [len(reader.read(each).calls) for each in (call[:-30], call[-30:])] == [0, 1]


@pytest.mark.parametrize("family", TEMPLATES)
@given(text=st.text(st.sampled_from("<tool_cal>|[TOOL_S]{} \nü"), max_size=30))
def test_text_without_calls_is_said_as_it_is(family: str, text: str) -> None:
    said, calls, finish = read(family, [*text])
    assert (calls, finish) == ([], "stop")
    assert [*said.replace(" ", "").replace("\n", "")] == [*text.replace(" ", "").replace("\n", "")]


def test_call_of_an_unknown_tool_is_text() -> None:
    text = '<tool_call>\n{"name": "turn_off", "arguments": {}}\n</tool_call> x'
    assert read("qwen", [text]) == (text, [], "stop")


def test_calls_have_ids_of_their_own() -> None:
    reader = CallReader(call_form(TEMPLATES["qwen"]), ["turn_on"])
    calls = reader.read(answer("qwen", ROOM, ROOM)).calls
    assert len({each.id for each in calls}) == 2
    assert all((each.type, each.function.name) == ("function", "turn_on") for each in calls)


@pytest.mark.parametrize(
    ("chat", "told"),
    [
        ({"tools": {}}, None),
        ({"tools": "x"}, "wanted a list"),
        ({"tools": [1]}, "tools[0] is 1"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "same name"),
        ({"tools": [TOOL], "tool_choice": "some"}, "tool_choice is 'some'"),
        ({"tool_choice": "required"}, "no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "names 'x'"),
    ],
)
def test_wrong_tools_are_refused_with_their_place(chat: dict[str, Any], told: str | None) -> None:
    if told is None:
        assert read_tools(chat) is None
        return
    with pytest.raises(DecodeFailed, match=told.replace("[", r"\[")):
        read_tools(chat)


def test_choices_of_tools_are_read() -> None:
    assert read_tools({"tools": [TOOL], "tool_choice": "none"}) is None
    named = read_tools({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "turn_on"}}})
    assert named is not None
    assert (named.is_required, named.is_parallel) == (True, False)
    free = read_tools({"tools": [TOOL], "parallel_tool_calls": False})
    assert free is not None
    assert (free.is_required, free.is_parallel) == (False, False)


@pytest.mark.parametrize(
    "template", ["", "{{ messages }}<tool_call>", "{% if tools %}<tool_call><function=x>{% endif %}"]
)
def test_template_without_a_form_that_is_read_has_none(template: str) -> None:
    assert call_form(template) is None
