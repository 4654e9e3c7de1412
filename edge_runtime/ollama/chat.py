"""`POST /api/chat` and `/api/generate`: what their bodies ask of a language model. Pure. Thread: the door's, or any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge_runtime.doors.http.call import HttpCall
from edge_runtime.doors.http.head import HttpHead
from edge_runtime.doors.http.protocols import CallRequests
from edge_runtime.errors import DecodeFailed, Unsupported
from edge_runtime.language.asking import FIRST_TOKEN_MS, chat_request, check_writes_text, least_ms, text_request
from edge_runtime.models.servable import Servable
from edge_runtime.ollama.fields import content_of, parameters_of, response_format, template_of, text
from edge_runtime.ollama.written import Words, WrittenAnswer, message_fields, response_fields
from edge_runtime.wire import json_codec
from edge_runtime.wire.codec import short, typed

ROLES = ("system", "user", "assistant", "tool")


def chat_requests(servable: Servable, fields: Mapping[str, Any], head: HttpHead, call: HttpCall) -> CallRequests:
    """Return the request that a body of `/api/chat` means; none where it only has the model loaded.

    Raises EdgeRuntimeError.
    """
    messages = _messages(typed(fields, "messages", list, []))
    chat: dict[str, Any] = {"messages": messages, "template": template_of(fields)}
    tools = typed(fields, "tools", list, [])
    if tools:
        chat["tools"] = tools
    return _asked(servable, fields, head, call, message_fields, chat if messages else None)


def generate_requests(servable: Servable, fields: Mapping[str, Any], head: HttpHead, call: HttpCall) -> CallRequests:
    """Return the request that a body of `/api/generate` means; none where it only has the model loaded.

    Raises EdgeRuntimeError.
    """
    for key in ("suffix", "template", "context"):
        if fields.get(key):
            raise Unsupported(
                f"{key} is not offered: the model's own template is used, and nothing is kept between requests; "
                "send all messages to /api/chat"
            )
    prompt, system = text(fields, "prompt"), text(fields, "system")
    if typed(fields, "raw", bool, False):
        if fields.get("images") or response_format(fields) is not None:
            raise Unsupported("raw takes neither images nor format; leave raw out")
        return _asked(servable, fields, head, call, response_fields, prompt or None)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": content_of(prompt, fields.get("images"))})
    chat = {"messages": messages, "template": template_of(fields)}
    return _asked(servable, fields, head, call, response_fields, chat if prompt or fields.get("images") else None)


# ---- private --------------------------------------------------------------------------------------------------------


def _asked(  # noqa: PLR0917 (all of a body and of what it asks for)
    servable: Servable,
    fields: Mapping[str, Any],
    head: HttpHead,
    call: HttpCall,
    words: Words,
    asks: dict[str, Any] | str | None,
) -> CallRequests:
    """The request for a chat, or for a text as it is; none for None."""
    check_writes_text(servable)
    is_chat = isinstance(asks, dict)
    encoding = WrittenAnswer(
        str(fields.get("model") or fields.get("name")),
        words,
        call.deflates,
        is_stream=typed(fields, "stream", bool, True),
        parts_thoughts=is_chat,
        shows=fields.get("think") is not False,
    )
    parameters = parameters_of(fields)
    first_ms = least_ms("x-first-token-ms", head.headers.get("x-first-token-ms"), fields.get(FIRST_TOKEN_MS))
    if first_ms is not None:
        parameters[FIRST_TOKEN_MS] = first_ms
    timeout_ms = least_ms("x-request-timeout-ms", call.timeout_ms, fields.get("request_timeout_ms"))
    if asks is None:
        return CallRequests(encoding, ())
    if isinstance(asks, str):
        try:
            request = text_request(servable, asks.encode(), parameters, timeout_ms)
        except UnicodeEncodeError:
            raise DecodeFailed("prompt: got half a surrogate pair, which no text has") from None
    else:
        form = response_format(fields)
        if form is not None:
            asks["response_format"] = form
        request = chat_request(servable, asks, parameters, timeout_ms)
    return CallRequests(encoding, (request,))


def _messages(given: list[Any]) -> list[dict[str, Any]]:
    """Messages in OpenAI's form. Its calls of tools have ids, by which results name them: made up here, in order."""
    found: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []
    count = 0
    for index, message in enumerate(given):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise DecodeFailed(f"messages[{index}]: wanted an object with a role, {', '.join(ROLES)}")
        role = message["role"]
        made: dict[str, Any] = {"role": role, "content": content_of(text(message, "content"), message.get("images"))}
        if role == "assistant":
            thoughts = text(message, "thinking")
            if thoughts:
                made["reasoning_content"] = thoughts
            calls = [_call(each, f"call_{count + at}") for at, each in enumerate(message.get("tool_calls") or ())]
            count += len(calls)
            open_calls = [(each["id"], each["function"]["name"]) for each in calls]
            if calls:
                made["tool_calls"] = calls
        elif role == "tool":
            named = text(message, "tool_name"), text(message, "name"), text(message, "tool_call_id")
            fitting = next((each for each in open_calls if not {*each}.isdisjoint(named)), (*open_calls, None)[0])
            if fitting is not None:
                open_calls.remove(fitting)
                made["tool_call_id"], made["name"] = fitting
        found.append(made)
    return found


def _call(call: Any, number: str) -> dict[str, Any]:
    """A call of a tool in OpenAI's form: its arguments are text. Raises DecodeFailed."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DecodeFailed(f'tool_calls: got {short(call)}, wanted {{"function": {{"name": …, "arguments": {{…}}}}}}')
    arguments = function.get("arguments") or {}
    written = arguments if isinstance(arguments, str) else json_codec.dumps(arguments).decode()
    named = call.get("id") if isinstance(call.get("id"), str) else None
    return {"id": named or number, "type": "function", "function": {"name": function["name"], "arguments": written}}
