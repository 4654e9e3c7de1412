"""Prints an answer in parts as it is written, and keeps it for a result in JSON.

Owns: which outputs of a part are text, and what is told beside it. Used by the verbs `infer` and `chat`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edge_runtime.cli.arguments import UsageError
from edge_runtime.cli.screen import Screen
from edge_runtime.messages import TEXT, InferResult

FINISH_REASON, USAGE = "finish_reason", "usage"
"""Outputs of a language model with its last part; other models that write text may lack them."""


@dataclass(slots=True)
class WrittenText:
    """The part of an answer that has come. first_s, whole_s: seconds since it was asked; usage: tokens, where told."""

    pieces: list[str] = field(default_factory=list)
    model: str = ""
    version: int = 0
    finish_reason: str = ""
    usage: Mapping[str, int] = field(default_factory=dict)
    timing: Any = None
    first_s: float | None = None
    whole_s: float = 0.0

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.pieces)

    def fields(self) -> dict[str, Any]:
        """The result in JSON."""
        told: dict[str, Any] = {"model_name": self.model, "model_version": str(self.version), "text": self.text}
        told |= {"finish_reason": self.finish_reason} if self.finish_reason else {}
        told |= {"usage": dict(self.usage)} if self.usage else {}
        first_ms = None if self.first_s is None else round(self.first_s * 1e3, 3)
        return {**told, "latency_ms": {"first": first_ms, "whole": round(self.whole_s * 1e3, 3)}}

    def summary(self) -> str:
        """One line of times for a person."""
        first = "nothing came" if self.first_s is None else f"the first part after {self.first_s * 1e3:.0f} ms"
        count = self.usage.get("completion_tokens", 0)
        rate = f"{count} tokens, {count / self.whole_s:.1f} a second, " if count and self.whole_s else ""
        end = f", ended by {self.finish_reason}" if self.finish_reason else ""
        return f"{rate}{first}, all after {self.whole_s:.2f} s{end}"


def write_parts(parts: Iterable[InferResult], written: WrittenText, screen: Screen) -> None:
    """Print each part as it comes, and add it to `written`, which has what came where this raises."""
    began_s = time.monotonic()
    try:
        for part in parts:
            if written.first_s is None:
                written.first_s = time.monotonic() - began_s
            written.model, written.version = part.model, part.version
            written.timing = part.timing or written.timing
            written.finish_reason = _text(part, FINISH_REASON) or written.finish_reason
            if USAGE in part and part[USAGE].size == 3 and part[USAGE].any():
                names = ("prompt_tokens", "completion_tokens", "cached_tokens")
                written.usage = dict(zip(names, map(int, part[USAGE].reshape(-1)), strict=True))
            piece = _text(part, TEXT)
            written.pieces.append(piece)
            if not screen.wants_json:
                screen.piece(piece)
    finally:
        written.whole_s = time.monotonic() - began_s


def check_writes(metadata: Mapping[str, Any], name: str, option: str) -> None:
    """Raise UsageError where a model takes no input of this name, or writes no text."""
    inputs = [str(each["name"]) for each in metadata.get("inputs", ())]
    outputs = [str(each["name"]) for each in metadata.get("outputs", ())]
    if name not in inputs or TEXT not in outputs:
        raise UsageError(
            f"{option}: model {metadata.get('name')!r} takes {', '.join(inputs)} and gives {', '.join(outputs)}; "
            f"wanted a language model, which takes {name} and gives {TEXT}; edge-runtime models list has the models"
        )


def parameters_of(pairs: Iterable[str]) -> dict[str, Any]:
    """Parameters of a request from NAME=VALUE, each value as JSON, else as text. Raises UsageError."""
    found: dict[str, Any] = {}
    for each in pairs:
        name, equals, value = each.partition("=")
        if not name or not equals:
            raise UsageError(f"--parameter: got {each!r}, wanted NAME=VALUE such as temperature=0.2")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _text(part: InferResult, name: str) -> str:
    """The text of an output; "" where there is none."""
    if name not in part or not part[name].size:
        return ""
    element = part[name].reshape(-1)[0]
    return element.decode("utf-8", "replace") if isinstance(element, bytes) else str(element)
