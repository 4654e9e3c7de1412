"""A language model as doors ask it: names of tensors, the request of a text or a chat, and the parts of its answer.

Owns: how a text or a chat becomes a request to the plain form of a language model, and the meaning of its outputs.
Which fields a protocol has for it is the protocol's. Pure. Thread: any.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from edge_runtime.errors import DecodeFailed, TensorMismatch
from edge_runtime.messages import RequestHeader, TensorHeader
from edge_runtime.models.servable import Servable
from edge_runtime.request.request import Request
from edge_runtime.tensors import Array
from edge_runtime.wire import json_codec
from edge_runtime.wire.codec import short

TEXT_INPUT, CHAT_INPUT = "text", "chat"
"""The inputs, BYTES [1], of which a request has one: a prompt as it is, or the JSON of a chat."""

OUTPUTS = ("text", "finish_reason", "usage", "tool_calls", "logprobs")
"""The outputs, in the order in which a request of this module asks for them."""

FIRST_TOKEN_MS = "first_token_ms"  # noqa: S105 (no secret: the word is of a language)
"""The parameter of a request that says when its first token is due at the latest."""


class BadField(DecodeFailed):
    """A field of a body is wrong. param: its name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


class WrittenPart(NamedTuple):
    """One part of an answer. text: the new text; of an answer that does not stream, all of it.

    finish_reason: "stop", "length" or "tool_calls" with the last part, else "". The counts of tokens come with it, too;
    cached_tokens: those of the prompt that came from the cache. tool_calls, logprobs: as OpenAI writes them in a
    message and in `logprobs.content`.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    tool_calls: Sequence[Mapping[str, Any]]
    logprobs: Sequence[Mapping[str, Any]]


def writes_text(servable: Servable) -> bool:
    """Whether a model is a language model: it takes a text or a chat, and has the outputs of one."""
    inputs = {each.name for each in servable.spec.inputs}
    outputs = {each.name for each in servable.spec.outputs}
    return inputs >= {TEXT_INPUT, CHAT_INPUT} and outputs >= set(OUTPUTS)


def sees_pictures(servable: Servable) -> bool:
    """Whether a language model takes pictures in its chats."""
    told = servable.chain.fields() if servable.chain is not None else {}
    return bool(told.get("language", {}).get("pictures"))


def check_writes_text(servable: Servable) -> None:
    """Check that a model is a language model. Raises TensorMismatch."""
    if not writes_text(servable):
        own = ", ".join(f"{each.name} {each.datatype} {list(each.shape)}" for each in servable.spec.inputs)
        raise TensorMismatch(
            f"model {servable.model} is not a language model: it takes {own}, and writes no text; "
            "ask it by the paths of its own kind, or name a language model"
        )


def text_request(
    servable: Servable, text: bytes, parameters: Mapping[str, Any], timeout_ms: float | None
) -> tuple[RequestHeader, Sequence[Any]]:
    """Return the request that goes on with a text. text: UTF-8. Raises TensorMismatch: it is not a language model."""
    return _request(servable, TEXT_INPUT, text, parameters, timeout_ms)


def chat_request(
    servable: Servable, chat: Mapping[str, Any], parameters: Mapping[str, Any], timeout_ms: float | None
) -> tuple[RequestHeader, Sequence[Any]]:
    """Return the request that answers a chat. Raises TensorMismatch: it is not a language model; DecodeFailed.

    chat: `messages` as OpenAI has them; `tools`, `tool_choice`, `parallel_tool_calls`, `response_format`; `template`:
    further variables of the model's chat template.
    """
    try:
        data = json_codec.dumps(chat)
        if b"\\ud" in data:
            json.dumps(chat, ensure_ascii=False).encode()
    except RecursionError:
        raise DecodeFailed("the chat is nested too deeply; send a flatter schema") from None
    except UnicodeEncodeError:
        raise DecodeFailed("a text of the chat has half a surrogate pair, which no text has") from None
    return _request(servable, CHAT_INPUT, data, parameters, timeout_ms)


def part_of(request: Request) -> WrittenPart:
    """Read the outputs of a request of this module. Called when it is answered, or has a part."""
    text, reason, usage, tool_calls, logprobs = (array.reshape(-1) for array in request.plan.select(request.outputs))
    prompt, completion, cached = (int(each) for each in usage)
    calls, logs = _list(tool_calls[0]), _list(logprobs[0])
    return WrittenPart(_text(text[0]), _text(reason[0]), prompt, completion, cached, calls, logs)


def least_ms(name: str, *values: Any) -> float | None:
    """Return the shortest of times that a client may give twice, in a header and in its body; None without any.

    values: numbers, or their text. Raises DecodeFailed.
    """
    found: list[float] = []
    for value in values:
        if value is None:
            continue
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and number >= 0):
            raise DecodeFailed(f"{name}: got {short(value)}, wanted a number of milliseconds, 0 or more")
        found.append(number)
    return min(found, default=None)


# ---- private --------------------------------------------------------------------------------------------------------


def _request(
    servable: Servable, name: str, data: bytes, parameters: Mapping[str, Any], timeout_ms: float | None
) -> tuple[RequestHeader, Sequence[Any]]:
    check_writes_text(servable)
    element: Array = np.empty(1, object)
    element[0] = data
    header = RequestHeader(
        model=servable.model,
        inputs=(TensorHeader(name, "BYTES", (1,)),),
        outputs=OUTPUTS,
        timeout_ms=timeout_ms,
        parameters=parameters,
    )
    return header, (element,)


def _text(element: Any) -> str:
    return element if isinstance(element, str) else bytes(element).decode()


def _list(element: Any) -> Sequence[Mapping[str, Any]]:
    text = _text(element)
    found: list[Mapping[str, Any]] = [] if text == "[]" else json_codec.load_value(text.encode())
    return found
