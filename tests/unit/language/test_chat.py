"""Chats as prompts: by the model's own template, tools told as it knows them; what is not text is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edge_runtime.errors import DecodeFailed, RequestError, Unsupported
from edge_runtime.language.chat import ChatModel, PreparedChat, prepare
from tests.unit.language.conftest import Writer

PLAIN = (
    "{% for m in messages %}[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}]{{ m.content }}{% endfor %}"
    "{% if mood %}({{ mood }}){% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
QWEN = (
    "{% if tools %}{{ tools | tojson }} write <tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}[assistant]{% if enable_thinking is defined and not enable_thinking %}<no thoughts>{% endif %}"
)

TOOL = {
    "type": "function",
    "function": {"name": "turn_on", "parameters": {"type": "object", "properties": {"Küche": {}}}},
}


class Templated:
    """The real tokenizer with another template."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        self._tokenizer = tokenizer
        self.chat_template = template

    def apply_chat_template(self, *arguments: Any, **named: Any) -> str:
        text: str = self._tokenizer.apply_chat_template(*arguments, chat_template=self.chat_template, **named)
        return text


def prepared(writer: Writer, template: str, chat: Any) -> PreparedChat:
    data = chat if isinstance(chat, bytes) else json.dumps(chat).encode()
    return prepare(data, ChatModel(Templated(writer.tokenizer, template)))


def test_messages_follow_the_template(writer: Writer) -> None:
    messages = [
        {"role": "developer", "content": "Sei kurz."},
        {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "Küche"}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": None},
    ]
    made = prepared(writer, PLAIN, {"messages": messages, "template": {"mood": "froh"}})
    assert made.prompt == "[system]Sei kurz.[user Ann]Küche?[assistant](froh)[assistant]"
    assert made.shape is None


def test_template_that_knows_tools_is_given_them_and_calls_as_objects(writer: Writer) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "turn_on", "arguments": '{"Küche": 21}'}}
    messages = [
        {"role": "user", "content": "Licht"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "an"},
    ]
    made = prepared(writer, QWEN, {"messages": messages, "tools": [TOOL]})
    assert made.prompt.startswith(json.dumps([TOOL], ensure_ascii=False))
    assert '<tool_call>turn_on {"Küche": 21}[tool]an[assistant]' in made.prompt
    assert made.shape is not None
    assert not made.shape.is_forced
    assert "<tool_call>" in made.marks


def test_template_without_tools_is_told_of_them_in_words(writer: Writer) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "turn_on", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Licht"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "an"},
    ]
    prompt = prepared(writer, PLAIN, {"messages": messages, "tools": [TOOL]}).prompt
    assert prompt.startswith("[system]# Tools")
    assert json.dumps(TOOL, ensure_ascii=False) in prompt
    assert (
        '[assistant]<tool_call>\n{"name": "turn_on", "arguments": {}}\n</tool_call>[user]<tool_response>\nan' in prompt
    )


def test_tool_choice_none_leaves_tools_out(writer: Writer) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "tool_choice": "none"}
    made = prepared(writer, QWEN, chat)
    assert made.prompt == "[user]x[assistant]"
    assert made.reader.read("<tool_call>").text == "<tool_call>"


def test_answer_without_a_free_first_character_is_not_thought_about(writer: Writer) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}
    assert prepared(writer, QWEN, chat).prompt.endswith("<no thoughts>")
    assert not prepared(writer, QWEN, {**chat, "template": {"enable_thinking": True}}).prompt.endswith("<no thoughts>")


def _of(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **more}]}


@pytest.mark.parametrize(
    ("chat", "error", "told"),
    [
        (b"{", DecodeFailed, "the chat is not JSON"),
        (b"[]", DecodeFailed, "not an object"),
        (b"[" * 100_000, DecodeFailed, "the chat is not JSON"),
        ({}, DecodeFailed, "messages is empty"),
        ({"messages": [3]}, DecodeFailed, "messages[0] is not an object"),
        ({"messages": [{"role": "god"}]}, DecodeFailed, "messages[0].role is 'god'"),
        (_of(5), DecodeFailed, "messages[0].content"),
        (_of("\ud800"), DecodeFailed, "surrogate"),
        (_of([{"type": "image_url", "image_url": {}}]), Unsupported, "messages[0].content[0] is of type 'image_url'"),
        (
            _of([{"type": "text", "text": "a"}, {"type": "input_audio"}]),
            Unsupported,
            "content[1] is of type 'input_audio'",
        ),
        (_of([{"type": "file"}]), Unsupported, "'file'; this model reads text only"),
        (_of("x", tool_calls=[{"function": {"name": "a", "arguments": "{"}}]), DecodeFailed, "arguments is not JSON"),
        (_of("x") | {"template": {"messages": []}}, DecodeFailed, "template.messages"),
        (_of("x") | {"template": 3}, DecodeFailed, "template is not an object"),
        (_of("x") | {"response_format": {"type": "yaml"}}, DecodeFailed, "response_format.type is 'yaml'"),
        (_of("x") | {"response_format": {"type": "json_schema"}}, DecodeFailed, "has no schema"),
    ],
)
def test_wrong_chat_is_refused_with_its_place(writer: Writer, chat: Any, error: type[RequestError], told: str) -> None:
    with pytest.raises(error) as caught:
        prepared(writer, PLAIN, chat)
    assert told in caught.value.message


def test_model_without_a_template_says_so(writer: Writer) -> None:
    with pytest.raises(Unsupported, match="no chat template"):
        prepared(writer, "", _of("x"))


def test_refusal_of_a_template_is_told(writer: Writer) -> None:
    with pytest.raises(DecodeFailed, match="roles must alternate"):
        prepared(writer, "{{ raise_exception('roles must alternate') }}", _of("x"))
