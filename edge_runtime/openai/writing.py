"""Chats and completions in common: the fields that steer the writing, and answers whole or as server-sent events.

Owns: names and ranges of those fields, ids, chunks, usage, and the end `[DONE]`, which says that an answer is whole: no
error is followed by it. chat.py and completions.py know their bodies and choices. Pure. Thread: the door's; answers are
made on any.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from edge_runtime.doors.http.answer import EVENTS_TYPE, event, json_response
from edge_runtime.doors.http.call import HttpCall
from edge_runtime.doors.http.connection import Frames
from edge_runtime.errors import DecodeFailed, EdgeRuntimeError
from edge_runtime.language.asking import FIRST_TOKEN_MS, BadField, WrittenPart, least_ms, part_of
from edge_runtime.language.texts import whole
from edge_runtime.models.servable import Servable
from edge_runtime.openai.errors import error_body, refusal
from edge_runtime.request.request import Request
from edge_runtime.wire import json_codec
from edge_runtime.wire.codec import short

MOST_STOPS = 4
"""Of one body, as OpenAI has it."""

MOST_LOGPROBS = 20
"""Beside each token, as OpenAI has it."""

SEEDS = 1 << 63
"""Seeds are below it: a negative one counts from there."""

RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}
"""Numbers that steer the choice of a token: OpenAI's ranges, but of temperature, which clients of others set higher;
and the penalty that other servers have."""


class Choices(Protocol):
    """How one kind of answer is worded.

    prefix: of ids. kind, chunk_kind: the field `object` of a whole answer and of a chunk. prompt_param: the field that
    has the prompt.
    """

    prefix: str
    kind: str
    chunk_kind: str
    prompt_param: str

    def choice(self, part: WrittenPart) -> dict[str, Any]:
        """Return the choice of a whole answer, but its index."""
        ...

    def deltas(self, part: WrittenPart) -> Iterator[dict[str, Any]]:
        """Give the choices of the chunks of one part, in their order; none where it has nothing to tell."""
        ...


class Steering(NamedTuple):
    """The fields that both kinds of bodies have. timeout_ms: None without a deadline."""

    parameters: dict[str, Any]
    timeout_ms: float | None
    is_stream: bool
    includes_usage: bool


class WritingAnswer:
    """The answer to a chat or to a prompt, whole or in chunks. Made for one request, whose parts come one by one.

    created_s: seconds since 1970.
    """

    kind, end = EVENTS_TYPE, b"data: [DONE]\n\n"

    def __init__(
        self, servable: Servable, choices: Choices, steering: Steering, created_s: float, deflates: str | None
    ) -> None:
        self.is_stream = steering.is_stream
        self._choices = choices
        self._includes_usage = steering.includes_usage
        self._deflates = deflates
        self._fields = {
            "id": f"{choices.prefix}-{uuid.uuid4().hex}",
            "object": choices.chunk_kind if self.is_stream else choices.kind,
            "created": int(created_s),
            "model": servable.model,
            "system_fingerprint": f"{servable.model}-{servable.number}",
        }

    def answer(self, request: Request, request_id: Any) -> Frames:  # noqa: ARG002 (answers have an id of their own)
        """The whole answer."""
        part = part_of(request)
        choices = [{"index": 0, **self._choices.choice(part)}]
        return json_response({**self._fields, "choices": choices, "usage": _usage(part)}, deflates=self._deflates)

    def event(self, request: Request, request_id: Any) -> bytes:  # noqa: ARG002 (as above)
        """The chunks of one part; of the last one the usage, too, where it is asked for."""
        part = part_of(request)
        more: dict[str, Any] = {"usage": None} if self._includes_usage else {}
        chunks = [
            event({**self._fields, "choices": [{"index": 0, **each}], **more}) for each in self._choices.deltas(part)
        ]
        if part.finish_reason and self._includes_usage:
            chunks.append(event({**self._fields, "choices": [], "usage": _usage(part)}))
        return b"".join(chunks)

    def failed_event(self, error: EdgeRuntimeError) -> bytes:
        """The event of an error."""
        return event(error_body(error, self._choices.prompt_param))

    def refusal(self, error: EdgeRuntimeError, request_id: Any) -> Frames:  # noqa: ARG002 (as above)
        """An error."""
        return refusal(error, self._choices.prompt_param)

    def result(self, result: Any, request_id: Any) -> Frames:  # noqa: ARG002 (as above)
        """Any other result."""
        return json_response(*result)


def steering_of(fields: Mapping[str, Any], call: HttpCall, max_tokens: Sequence[str]) -> Steering:
    """Read the fields that steer the writing. max_tokens: names of that field, the first that is there counts.

    Raises BadField.
    """
    parameters: dict[str, Any] = {}
    for name in max_tokens:
        most = whole(fields, name)
        if most is not None:
            parameters.setdefault("max_tokens", most)
    for name, (low, high) in RANGES.items():
        value = number(fields, name, low, high)
        if value is not None:
            parameters[name] = value
    if parameters.get("top_p") == 0:  # the best token alone
        parameters |= {"top_p": 1.0, "temperature": 0.0}
    most = whole_or_none(fields, "top_k", -1, 1 << 31)
    if most is not None and most > 0:  # 0, and -1 of other servers: all
        parameters["top_k"] = most
    seed = whole_or_none(fields, "seed", -SEEDS, SEEDS - 1)
    if seed is not None:
        parameters["seed"] = seed % SEEDS
    stops = _stops(fields.get("stop"))
    if stops:
        parameters["stop"] = json_codec.dumps(stops).decode()
    if boolean(fields, "ignore_eos"):
        parameters["ignore_eos"] = True
    first_ms = _milliseconds(fields, FIRST_TOKEN_MS, call.values.get(FIRST_TOKEN_MS))
    if first_ms is not None:
        parameters[FIRST_TOKEN_MS] = first_ms
    _refuse_unoffered(fields)
    options = fields.get("stream_options")
    if not isinstance(options, dict | None):
        raise BadField("stream_options", "wanted an object")
    includes_usage = boolean(options or {}, "include_usage", "stream_options.include_usage")
    timeout_ms = _milliseconds(fields, "timeout_ms", call.timeout_ms)
    return Steering(parameters, timeout_ms, boolean(fields, "stream"), includes_usage)


def boolean(fields: Mapping[str, Any], key: str, param: str = "") -> bool:
    """Return a field that is true or false; False where it is absent. Raises BadField."""
    value = fields.get(key)
    if not isinstance(value, bool | None):
        raise BadField(param or key, f"got {short(value)}, wanted true or false")
    return bool(value)


def number(fields: Mapping[str, Any], key: str, low: float, high: float) -> float | None:
    """Return a field that is a number within a range; None where it is absent. Raises BadField."""
    value = fields.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadField(key, f"got {short(value)}, wanted a number from {low:g} to {high:g}")
    return float(value)


def whole_or_none(fields: Mapping[str, Any], key: str, low: int, high: int, param: str = "") -> int | None:
    """Return a field that is a whole number within a range; None where it is absent. Raises BadField."""
    value = fields.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadField(param or key, f"got {short(value)}, wanted a whole number from {low} to {high}")
    return value


# ---- private --------------------------------------------------------------------------------------------------------


def _refuse_unoffered(fields: Mapping[str, Any]) -> None:
    """Raise BadField for a field that would change the answer and that no model here knows."""
    for name in ("n", "best_of"):
        if whole(fields, name) not in {None, 1}:
            raise BadField(name, f"got {fields[name]}, wanted 1: a request has one answer; send one for each")
    if fields.get("logit_bias"):
        raise BadField("logit_bias", "is not offered here; leave it out")


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise BadField("stop", "wanted a text, or a list of texts, none of them empty")
    if len(stops) > MOST_STOPS:
        raise BadField("stop", f"got {len(stops)} texts, wanted at most {MOST_STOPS}")
    return stops


def _milliseconds(fields: Mapping[str, Any], key: str, of_header: Any) -> float | None:
    try:
        return least_ms(key, fields.get(key), of_header)
    except DecodeFailed as error:
        raise BadField(key, error.message.removeprefix(f"{key}: ")) from None


def _usage(part: WrittenPart) -> dict[str, Any]:
    return {
        "prompt_tokens": part.prompt_tokens,
        "completion_tokens": part.completion_tokens,
        "total_tokens": part.prompt_tokens + part.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": part.cached_tokens},
    }
