"""`POST /v1/chat/completions`: messages in, the next one out.

Owns: the forms of messages and tools, and how a choice is written, whole or as deltas. Templates, calls of tools and
schemas are the model's. Pure. Thread: the door's; answers are made on any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edge_runtime.doors.http.call import HttpCall
from edge_runtime.doors.http.protocols import CallRequests
from edge_runtime.language.asking import BadField, WrittenPart, chat_request
from edge_runtime.models.servable import Servable
from edge_runtime.openai.writing import MOST_LOGPROBS, WritingAnswer, boolean, steering_of, whole_or_none
from edge_runtime.wire.codec import short

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

CHOICES = ("none", "auto", "required")
"""The values of `tool_choice` that are text; an object names one tool."""

FORMATS = ("text", "json_object", "json_schema")
"""The types of `response_format`; the first is what an answer is without it."""


def chat_requests(servable: Servable, fields: Mapping[str, Any], call: HttpCall, now_s: float) -> CallRequests:
    """Return the request that a body means. Raises EdgeRuntimeError."""
    chat: dict[str, Any] = {"messages": _messages(fields.get("messages"))}
    tools = _tools(fields.get("tools"))
    chosen = _choice(fields.get("tool_choice"), tools)
    if tools:
        chat["tools"] = tools
        chat["parallel_tool_calls"] = fields.get("parallel_tool_calls") is None or boolean(
            fields, "parallel_tool_calls"
        )
        if chosen is not None:
            chat["tool_choice"] = chosen
    answered = _format(fields.get("response_format"))
    if answered is not None:
        chat["response_format"] = answered
    variables = fields.get("chat_template_kwargs")
    if not isinstance(variables, dict | None):
        raise BadField("chat_template_kwargs", "wanted an object of variables for the model's chat template")
    if variables:
        chat["template"] = variables
    steering = steering_of(fields, call, ("max_completion_tokens", "max_tokens"))
    beside = whole_or_none(fields, "top_logprobs", 0, MOST_LOGPROBS)
    if boolean(fields, "logprobs"):
        steering.parameters["logprobs"] = beside or 0
    elif beside:
        raise BadField("top_logprobs", "wanted it beside logprobs: true")
    asked = chat_request(servable, chat, steering.parameters, steering.timeout_ms)
    return CallRequests(WritingAnswer(servable, ChatChoices(), steering, now_s, call.deflates), [asked])


class ChatChoices:
    """A message, or its deltas: the first has the role, each other one a text or one call of a tool."""

    prefix, kind, chunk_kind, prompt_param = "chatcmpl", "chat.completion", "chat.completion.chunk", "messages"

    def __init__(self) -> None:
        self._has_begun = False
        self._calls = 0

    def choice(self, part: WrittenPart) -> dict[str, Any]:
        """Return the choice of a whole answer, but its index."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": part.text if part.text or not part.tool_calls else None,
            "refusal": None,
        }
        if part.tool_calls:
            message["tool_calls"] = list(part.tool_calls)
        return {"message": message, "logprobs": _logprobs(part), "finish_reason": part.finish_reason}

    def deltas(self, part: WrittenPart) -> Iterator[dict[str, Any]]:
        """Give the choices of one part's chunks: one a call, since some clients read the first of a chunk alone."""
        if part.text or part.logprobs or (part.finish_reason and not self._has_begun and not part.tool_calls):
            yield self._delta({"content": part.text}, _logprobs(part))
        if part.tool_calls and not self._has_begun:
            yield self._delta({"content": None})  # Home Assistant takes no role from a delta with calls
        for call in part.tool_calls:
            yield self._delta({"tool_calls": [{"index": self._calls, **call}]})
            self._calls += 1
        if part.finish_reason:
            yield {"delta": {}, "logprobs": None, "finish_reason": part.finish_reason}

    def _delta(self, said: dict[str, Any], logprobs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        if not self._has_begun:
            self._has_begun = True
            said = {"role": "assistant", **said}
        return {"delta": said, "logprobs": logprobs, "finish_reason": None}


# ---- private --------------------------------------------------------------------------------------------------------


def _logprobs(part: WrittenPart) -> dict[str, Any] | None:
    return {"content": list(part.logprobs), "refusal": None} if part.logprobs else None


def _messages(value: Any) -> list[Any]:
    """The messages of a body. Raises BadField."""
    if not isinstance(value, list) or not value:
        raise BadField("messages", f"got {short(value)}, wanted a list of at least one message")
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise BadField(where, f"got {short(message)}, wanted an object with role and content")
        role = message.get("role")
        if role not in ROLES:
            raise BadField(f"{where}.role", f"got {short(role)}, wanted {', '.join(ROLES)}")
        calls = message.get("tool_calls")
        _check_calls(f"{where}.tool_calls", calls)
        if not isinstance(message.get("tool_call_id"), str | None):
            raise BadField(f"{where}.tool_call_id", "wanted a text")
        if role != "assistant" or message.get("content") is not None:
            _check_content(f"{where}.content", message.get("content"))
    return value


def _check_content(where: str, content: Any) -> None:
    """Raise BadField unless a content is text, or a list of parts of which each text has one."""
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise BadField(where, f"got {short(content)}, wanted a text or a list of parts")
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise BadField(f"{where}[{index}]", f"got {short(part)}, wanted an object with type")
        if kind == "text" and not isinstance(part.get("text"), str):
            raise BadField(f"{where}[{index}].text", "wanted a text")


def _check_calls(where: str, calls: Any) -> None:
    """Raise BadField unless these are calls of tools as an earlier answer had them, or none."""
    if not isinstance(calls, list | None):
        raise BadField(where, f"got {short(calls)}, wanted a list of calls")
    for index, call in enumerate(calls or ()):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadField(f"{where}[{index}]", f"got {short(call)}, wanted id, type and a function with its name")
        if not isinstance(function.get("arguments", ""), str):
            raise BadField(f"{where}[{index}].function.arguments", "wanted JSON as a text")


def _tools(value: Any) -> list[Any]:
    """The tools of a body. Raises BadField."""
    if not isinstance(value, list | None):
        raise BadField("tools", f"got {short(value)}, wanted a list of tools")
    names = set()
    for index, tool in enumerate(value or ()):
        where = f"tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            raise BadField(where, f"got {short(tool)}, wanted a tool of type function")
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise BadField(f"{where}.function", f"got {short(function)}, wanted an object with a name")
        if not isinstance(function.get("parameters"), dict | None):
            raise BadField(f"{where}.function.parameters", "wanted a JSON schema, which is an object")
        if name in names:
            raise BadField(f"{where}.function.name", f"got {short(name)} a second time, wanted each name once")
        names.add(name)
    return value or []


def _choice(value: Any, tools: Sequence[Mapping[str, Any]]) -> Any:
    """The choice among tools; None where it is absent. Raises BadField."""
    if value is None:
        return None
    if isinstance(value, str):
        if value not in CHOICES:
            raise BadField("tool_choice", f"got {short(value)}, wanted {', '.join(CHOICES)}, or an object with a name")
        if value == "required" and not tools:
            raise BadField("tool_choice", "got required, and no tools; wanted tools beside it")
        return value
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name is None:
        raise BadField("tool_choice", f'got {short(value)}, wanted {{"type": "function", "function": {{"name": …}}}}')
    names = [each["function"]["name"] for each in tools]
    if name not in names:
        raise BadField(
            "tool_choice", f"got {short(name)}, wanted one of the tools: {', '.join(names) or 'none is there'}"
        )
    return value


def _format(value: Any) -> Mapping[str, Any] | None:
    """The form that the answer has to have; None where it is text. Raises BadField."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in FORMATS:
        raise BadField("response_format", f"got {short(value)}, wanted an object whose type is {', '.join(FORMATS)}")
    if kind == FORMATS[0]:
        return None
    declared = value.get("json_schema")
    if kind == "json_schema" and not (isinstance(declared, dict) and isinstance(declared.get("schema"), dict)):
        raise BadField("response_format.json_schema", "wanted an object with a schema, which is an object")
    found: Mapping[str, Any] = value
    return found
