"""Chats as prompts: OpenAI's messages, tools and wanted formats, by the model's own chat template.

One function does all: `prepare` gives the prompt, what the answer may be, and who reads it. It runs in the host, beside
the tokenizer that has the template. Pictures go to models that see them; any other content that is not text is
refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from edge_runtime.errors import DecodeFailed, Unsupported
from edge_runtime.language.calls import HERMES, AnswerShape, CallReader, ToolChoice, call_form, read_tools
from edge_runtime.language.pictures import MOST_PICTURES, PICTURE_PARTS, SentPicture, picture_of

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")

_TOOLS_IN_WORDS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""The words by which Hermes and Qwen learn of tools, for models whose template has none."""


class TemplateTokenizer(Protocol):
    """The engine's tokenizer, as far as chats need it."""

    chat_template: str

    def apply_chat_template(
        self,
        history: Sequence[dict[str, Any]],
        add_generation_prompt: bool,
        chat_template: str = "",
        tools: Sequence[dict[str, Any]] | None = None,
        extra_context: dict[str, Any] | None = None,
    ) -> str:
        """Return the prompt of messages."""
        ...


class ChatModel:
    """The chats of one model: its template, and the form in which it calls tools. Made once a load."""

    def __init__(self, tokenizer: TemplateTokenizer, mark: str = "") -> None:
        """mark: the text that stands for a picture in a prompt, with {} for its number; "": the model sees none."""
        self.mark = mark
        self._tokenizer = tokenizer
        self.template: str = tokenizer.chat_template or ""
        self.own_form = call_form(self.template)

    def prompt(self, messages: list[dict[str, Any]], tools: ToolChoice | None, variables: dict[str, Any]) -> str:
        """Return the prompt of messages. Raises DecodeFailed: the template does not take them."""
        try:
            return self._tokenizer.apply_chat_template(
                messages, True, tools=list(tools.definitions) if tools else None, extra_context=variables or None
            )
        except (RuntimeError, ValueError, TypeError) as error:
            raise DecodeFailed(f"the model's chat template does not take these messages: {_reason(error)}") from None


class PreparedChat(Struct, frozen=True):
    """A chat ready to be answered. prompt: its special tokens are in it. shape: of the answer; None: any text.

    marks: texts of calls that may be special tokens, which the answer's text must keep. pictures: in the order of their
    marks in the prompt.
    """

    prompt: str
    shape: AnswerShape | None
    reader: CallReader
    marks: tuple[str, ...] = ()
    pictures: tuple[SentPicture, ...] = ()


def prepare(chat: bytes, model: ChatModel) -> PreparedChat:
    """Read a chat, and return what answers it.

    Raises DecodeFailed: the chat is wrong, with the place and what was wanted; Unsupported: it is right, but asks for
    what this model or a grammar cannot do.
    """
    wanted = _object_of(chat)
    if not model.template:
        raise Unsupported(
            "the model has no chat template (chat_template in tokenizer_config.json): add one, or send a text"
        )
    tools = read_tools(wanted)
    form = model.own_form or HERMES
    schema, where = _schema_of(wanted.get("response_format"))
    guided = None if tools is None and schema is None else AnswerShape(tools, form, schema, where)
    contents = _Contents(model.mark)
    messages = _messages_of(wanted.get("messages"), contents)
    if model.own_form is None:
        messages = _with_tools_in_words(messages, tools)
    variables = _variables_of(wanted.get("template"), model, is_forced=guided is not None and guided.is_forced)
    return PreparedChat(
        model.prompt(messages, tools if model.own_form else None, variables),
        guided,
        CallReader(form if tools else None, tools.callable if tools else ()),
        tuple(each for each in (form.mark, form.end.strip().removeprefix("]"), form.divider) if each) if tools else (),
        tuple(contents.pictures),
    )


def _object_of(chat: bytes) -> dict[str, Any]:
    try:
        found = json.loads(chat)
    except (ValueError, RecursionError) as error:
        raise DecodeFailed(f"the chat is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise DecodeFailed('the chat is not an object, wanted {"messages": [...]}')
    return found


# ---- messages -------------------------------------------------------------------------------------------------------


def _messages_of(given: object, contents: _Contents) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise DecodeFailed("messages is empty, or not a list; send at least one message")
    return [_message_of(each, f"messages[{at}]", contents) for at, each in enumerate(given)]


def _message_of(given: object, where: str, contents: _Contents) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise DecodeFailed(f'{where} is not an object, wanted {{"role", "content"}}')
    role = given.get("role")
    if role not in _ROLES:
        raise DecodeFailed(f"{where}.role is {role!r}, wanted one of {', '.join(_ROLES)}")
    made: dict[str, Any] = {"role": _ROLES[role], "content": contents.read(given.get("content"), f"{where}.content")}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if name in given:
            if not isinstance(given[name], str | None):
                raise DecodeFailed(f"{where}.{name} is not text")
            made[name] = given[name]
    if given.get("tool_calls"):
        made["tool_calls"] = _calls_of(given["tool_calls"], f"{where}.tool_calls")
    return made


class _Contents:
    """Reads the contents of a chat's messages, and collects their pictures. mark: as of `ChatModel`."""

    def __init__(self, mark: str) -> None:
        self.pictures: list[SentPicture] = []
        self._mark = mark

    def read(self, content: object, where: str) -> str:
        """Return a content as text, with marks for its pictures. Raises DecodeFailed, Unsupported."""
        if content is None:
            return ""
        if isinstance(content, str):
            return _whole(content, where)
        if not isinstance(content, list):
            raise DecodeFailed(f"{where} is neither text nor a list of parts")
        return "".join(self._part(part, f"{where}[{at}]") for at, part in enumerate(content))

    def _part(self, part: object, where: str) -> str:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, dict) and kind in PICTURE_PARTS and self._mark:
            if len(self.pictures) == MOST_PICTURES:
                raise DecodeFailed(f"{where} is one picture more than the {MOST_PICTURES} of one chat; send fewer")
            self.pictures.append(picture_of(part, where))
            return self._mark.format(len(self.pictures) - 1)
        if not isinstance(part, dict) or kind not in _TEXT_PARTS:
            reads = "text and pictures" if self._mark else "text"
            raise Unsupported(f"{where} is of type {kind!r}; this model reads {reads} only: leave the part out")
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise DecodeFailed(f"{where}.text is not text")
        return _whole(text, f"{where}.text")


def _whole(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DecodeFailed(
            f"{where} has half of a surrogate pair, which no text can have; send the whole character"
        ) from None
    return text


def _calls_of(given: object, where: str) -> list[dict[str, Any]]:
    """Calls of an assistant, with arguments as objects: templates write them as JSON themselves."""
    if not isinstance(given, list):
        raise DecodeFailed(f"{where} is not a list")
    made = []
    for at, each in enumerate(given):
        function = each.get("function") if isinstance(each, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DecodeFailed(f"{where}[{at}].function has no name")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise DecodeFailed(f"{where}[{at}].function.arguments is not JSON") from None
        made.append(
            {
                "id": str(each.get("id", "")),
                "type": "function",
                "function": {"name": function["name"], "arguments": arguments},
            }
        )
    return made


def _with_tools_in_words(messages: list[dict[str, Any]], tools: ToolChoice | None) -> list[dict[str, Any]]:
    """Put tools, calls and their results into words, for a template that has no place for them."""
    made = []
    for message in messages:
        if message["role"] == "tool":
            made.append({"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"})
            continue
        calls = [
            f"<tool_call>\n{json.dumps(each['function'], ensure_ascii=False)}\n</tool_call>"
            for each in message.pop("tool_calls", ())
        ]
        made.append({**message, "content": "\n".join([*([message["content"]] if message["content"] else []), *calls])})
    if tools is not None:
        told = _TOOLS_IN_WORDS.format(
            tools="\n".join(json.dumps(each, ensure_ascii=False) for each in tools.definitions)
        )
        if made[0]["role"] == "system":
            made[0]["content"] += f"\n\n{told}"
        else:
            made.insert(0, {"role": "system", "content": told})
    return made


# ---- formats and variables ------------------------------------------------------------------------------------------


def _schema_of(given: object) -> tuple[Any, str]:
    """Return the schema of a wanted format, and its place. None: any text; True: any JSON object."""
    if given is None:
        return None, ""
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return None, ""
    if kind == "json_object":
        return True, ""
    if kind != "json_schema" or not isinstance(given, dict):
        raise DecodeFailed(f'response_format.type is {kind!r}, wanted "text", "json_object" or "json_schema"')
    inner = given.get("json_schema")
    if not isinstance(inner, dict) or "schema" not in inner:
        raise DecodeFailed("response_format.json_schema has no schema")
    where = "response_format.json_schema.schema"
    return {"type": "object"} if inner["schema"] is True else inner["schema"], where


def _variables_of(given: object, model: ChatModel, *, is_forced: bool) -> dict[str, Any]:
    """Variables of the template. An answer whose first character is not free leaves no room to think first."""
    if not isinstance(given, Mapping | None):
        raise DecodeFailed("template is not an object of variables")
    made = dict(given or {})
    for name in _OWN_VARIABLES:
        if name in made:
            raise DecodeFailed(f"template.{name} is the daemon's own to say; leave it out")
    if is_forced and "enable_thinking" in model.template:
        made.setdefault("enable_thinking", False)
    return made


def _reason(error: Exception) -> str:
    """The library's words, without places in its source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(("Exception from", "Check '", "*", "Minja failed", "^"))]
    return " ".join(told or lines)[-400:]
