"""The keys of `[language]` in `model.toml`. Values: knows no thread, no library, no wire."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from edge_runtime.config.settings import TableDeclaration

TABLE = TableDeclaration("language", "edge_runtime.language.settings:LanguageSettings")

MAX_STREAMS = 8
"""Streams at once, where none are named: on two cores a step of eight takes about twice one of one (bench/language)."""

PREFILL_TOKENS = 128
"""Prompt tokens of a step, where none are named: a stream under way then waits 70 ms for a new one's prompt, at 88
million parameters on one core of a server, and the prompt loses a tenth of its speed."""

GRAMMARS_MB = 256
"""Ten to twenty schemas of a model with 150 000 tokens, where no bound is named."""


class LanguageSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """How a language model writes: how many streams at once, how much of a prompt between two tokens of the others."""

    max_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    """Most tokens of an answer whose request does not say. When absent: what the prompt leaves of the context."""

    inter_token_ms: Annotated[float, Meta(gt=0, le=60_000)] | None = None
    """The bound that 99 of 100 steps are to keep: `edge-runtime tune` chooses `prefill_tokens` by it."""

    prefill_tokens: Annotated[int, Meta(ge=16, le=1 << 16)] = PREFILL_TOKENS
    """Prompt tokens that one step reads beside the tokens that it writes: fewer let a new prompt hold the streams under
    way up for less long, more read it sooner."""

    max_streams: Annotated[int, Meta(ge=1, le=256)] = MAX_STREAMS
    """Answers that are written at the same time; further requests wait, four for each of these at most unless
    `max_queue_rows` says otherwise."""

    kv_cache_mb: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    """Memory for the prompts and answers under way and for prompts that come again, counted in the memory budget. When
    absent: as much as `max_streams` answers of 2048 tokens need, prompt included."""

    grammars_mb: Annotated[int, Meta(ge=1, le=1 << 20)] = GRAMMARS_MB
    """Memory for what is prepared of new JSON schemas and tools. When it is used up, the model is loaded anew as soon
    as no answer is under way, and at twice as much new schemas are refused until then."""

    prefix_caching: bool = True
    """Whether a prompt that begins as one before reads only what is new in it."""
