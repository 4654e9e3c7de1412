"""The messages between the daemon and the host of a language model: orders of a step, and the events that it made.

Owns: the values, their bytes, and the form in which a host is asked for a step. One run of that form is one step of the
library: it begins and ends what the orders say, gives every live generation its share, and returns what is new.
Knows no library and no reply.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from edge_runtime.errors import EdgeRuntimeError, PromptTooLong, error_from_wire
from edge_runtime.language.parameters import Parameters
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.steps import Form

ORDERS, EVENTS = "orders", "events"

TOO_LONG = "prompt_too_long"
"""The code of an event whose prompt, with the answer that it asks for, is longer than the model's context."""

STEP_FORM = Form("step", answers=False)
"""The form in which a host is asked for a step: ORDERS in, EVENTS out, each BYTES [1]."""

STEP_SPEC = ModelSpec((TensorSpec(ORDERS, "BYTES", (1,)),), (TensorSpec(EVENTS, "BYTES", (1,)),))

SEES = "sees"
"""An output that is always empty: only the steps of a model that sees pictures have it, by which the daemon knows."""

SEEING_STEP_SPEC = ModelSpec(STEP_SPEC.inputs, (*STEP_SPEC.outputs, TensorSpec(SEES, "BYTES", (1,), is_optional=True)))

LANGUAGE_SPEC = ModelSpec(
    (
        TensorSpec("text", "BYTES", (1,), is_optional=True),
        TensorSpec("chat", "BYTES", (1,), is_optional=True),
    ),
    (
        TensorSpec("text", "BYTES", (1,)),
        TensorSpec("finish_reason", "BYTES", (1,)),
        TensorSpec("usage", "INT32", (3,)),
        TensorSpec("tool_calls", "BYTES", (1,)),
        TensorSpec("logprobs", "BYTES", (1,)),
    ),
)
"""The tensors of a language model, as clients see them. usage: tokens of the prompt, of the answer, and of the prompt
those that were in the prefix cache."""


class Begin(Struct, frozen=True, array_like=True):
    """Begin a generation. id: the daemon's number for it, never used again. Exactly one of text and chat is given.

    text: the prompt as it is. chat: a JSON object, as the model's input `chat` has it. Neither has been read yet.
    """

    id: int
    text: bytes | None
    chat: bytes | None
    parameters: Parameters = Parameters()


class Orders(Struct, frozen=True, array_like=True):
    """The orders of one step.

    cancels: generations whose callers are gone; no event of them follows. live: those that the daemon counts as
    begun and not ended, without `begins` and `cancels`: the host ends any other, and tells a failure for one that it
    does not have, such as after a host's death.
    """

    begins: tuple[Begin, ...] = ()
    cancels: tuple[int, ...] = ()
    live: tuple[int, ...] = ()


class FunctionCall(Struct, frozen=True):
    """The function that a model calls. arguments: JSON text."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True):
    """One whole call of a tool, in OpenAI's words."""

    id: str
    function: FunctionCall
    type: str = "function"


class TokenScore(Struct, frozen=True):
    """One token with the logarithm of its probability. bytes: of its text, as numbers."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class TokenScores(Struct, frozen=True):
    """A token of an answer as an element of OpenAI's `logprobs.content`. top_logprobs: the likeliest in its place."""

    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[TokenScore, ...] = ()


class TextEvent(Struct, frozen=True, array_like=True):
    """News of one generation. With a finish_reason or a code it is the last of it.

    text: new since the event before, whole characters. completion_tokens: so far. prompt_tokens, cached_tokens: of the
    prompt, and those of them that came from the prefix cache; known once the prompt was read, 0 before. tool_calls: new
    since the event before, each whole. logprobs: of the new tokens, where they were asked for. finish_reason: "" while
    it goes on; "stop", "length", "tool_calls". code, message: of the error that ended it; retry_after_ms: when to ask
    again after it, 0.0 where nothing is known.
    """

    id: int
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenScores, ...] = ()
    finish_reason: str = ""
    code: str = ""
    message: str = ""
    retry_after_ms: float = 0.0

    @property
    def is_last(self) -> bool:
        """Whether the generation has ended."""
        return bool(self.finish_reason or self.code)


class StepEvents(Struct, frozen=True, array_like=True):
    """The news of one step. All counts are of tokens, but live, of generations.

    events: at most one of each generation. prefill_tokens, decode_tokens: that this step read of prompts, and wrote.
    step_s: seconds of the library's step in the host; 0.0 where nothing was to be done. waiting_prefill: of prompts
    that are begun, and not read yet. kv_used, kv_total: of the cache of keys and values: held by live generations now,
    and room for. context: the longest prompt with its answer. wants_rest: nothing is live, and a step without orders
    is wanted before something is: it gives memory back. number: of the step, from 1 in each life of the host.
    picture_tokens, picture_s: about what one picture takes of a prompt, and of a step; 0: the model sees none.
    looked_s: seconds that this step spent on pictures, beside `step_s`.
    """

    events: tuple[TextEvent, ...] = ()
    prefill_tokens: int = 0
    decode_tokens: int = 0
    step_s: float = 0.0
    waiting_prefill: int = 0
    live: int = 0
    kv_used: int = 0
    kv_total: int = 0
    context: int = 0
    wants_rest: bool = False
    number: int = 0
    picture_tokens: int = 0
    picture_s: float = 0.0
    looked_s: float = 0.0


_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(Orders)
_events = msgspec.msgpack.Decoder(StepEvents)


def error_of(event: TextEvent) -> EdgeRuntimeError:
    """Return the error of an event that has a code."""
    if event.code == TOO_LONG:
        return PromptTooLong(event.message)
    return error_from_wire(event.code, event.message, event.retry_after_ms or None)


def encoded(message: Orders | StepEvents) -> bytes:
    """Return the bytes of orders or events."""
    return _encoder.encode(message)


def orders_of(data: Any) -> Orders:
    """Read orders. Raises msgspec.MsgspecError."""
    return _orders.decode(data)


def events_of(data: Any) -> StepEvents:
    """Read events, of a host that is not trusted. Raises msgspec.MsgspecError."""
    return _events.decode(data)
