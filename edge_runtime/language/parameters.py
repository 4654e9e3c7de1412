"""Parameters of a request to a language model: their names, their bounds, and what is wrong with one.

Owns: what each parameter means to every engine. They are checked before a request is admitted, so that no library sees
what it cannot use. Pure. Thread: any.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert

from edge_runtime.errors import DecodeFailed

MAX_STOPS = 16
"""Texts that end an answer. OpenAI takes 4; Ollama's clients send more."""

MAX_STOP_CHARACTERS = 256
"""Of each: as much of an answer may be held back, until it is known that it is none of them."""

MAX_LOGPROBS = 20
"""As OpenAI has it."""

MAX_TOKENS = (1 << 31) - 1

Penalty = Annotated[float, Meta(ge=-2, le=2)]
"""OpenAI's bounds."""


class Parameters(Struct, frozen=True, omit_defaults=True):
    """How a text is to be written. None: as the model's own configuration says.

    max_tokens: most tokens of the answer; None: the model's setting, else what its context leaves. temperature: 0 takes
    the likeliest token each time. top_k: 0 for any number. seed: of the random numbers. stop: texts that end the answer
    and are left out of it. ignore_eos: goes on behind the token that ends a text, for measurements. logprobs: tokens of
    each place whose probabilities are told, beside the one that was taken; None: none is told, not of that either.
    first_token_ms: the first token is due after so long; the daemon keeps that, as it does the request's deadline.
    """

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 30)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    first_token_ms: Annotated[float, Meta(gt=0, le=1e12)] | None = None


def parameters_of(parameters: Mapping[str, Any]) -> Parameters:
    """Return the parameters of a request; those that are not of a language model are left out.

    Raises DecodeFailed with the name, what was given, and what may be.
    """
    known = {name: parameters[name] for name in Parameters.__struct_fields__ if parameters.get(name) is not None}
    if "stop" in known:
        known["stop"] = _stops(known["stop"])
    for name, value in known.items():
        if isinstance(value, float) and math.isnan(value):  # NaN passes every bound
            raise DecodeFailed(f"parameter {name}: got NaN, wanted a number")
        try:
            convert({name: value}, Parameters)
        except ValidationError as error:
            words = str(error).split(" - at ")[0]
            raise DecodeFailed(f"parameter {name}: {words}; got {_short(value)}") from None
    return convert(known, Parameters)


def _stops(given: Any) -> tuple[str, ...]:
    """Read `stop`: one text, or a list of them, or the JSON of such a list as text. Empty texts end nothing."""
    found = given
    if isinstance(given, str) and given.lstrip().startswith("["):
        try:
            found = json.loads(given)
        except ValueError:
            found = given  # a text that begins with a bracket
    texts = [found] if isinstance(found, str) else found
    if not isinstance(texts, (list, tuple)) or not all(isinstance(each, str) for each in texts):
        raise DecodeFailed(f"parameter stop: wanted a text, or a list of texts; got {_short(given)}")
    kept = tuple(dict.fromkeys(each for each in texts if each))
    if len(kept) > MAX_STOPS or any(len(each) > MAX_STOP_CHARACTERS for each in kept):
        raise DecodeFailed(
            f"parameter stop: wanted at most {MAX_STOPS} texts of at most {MAX_STOP_CHARACTERS} characters; got "
            f"{len(kept)}, the longest with {max(map(len, kept))}"
        )
    return kept


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]} …"
