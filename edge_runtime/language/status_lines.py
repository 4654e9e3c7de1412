"""The line of each language model in `edge-runtime status`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def status_fields(stats: Mapping[str, Any]) -> dict[str, str]:
    """Return a line for each language model, by its name. stats: a daemon's, of any version."""
    models: Mapping[str, Mapping[str, Any]] = (stats.get("metrics") or {}).get("models") or {}
    return {name: _line(numbers) for name, numbers in models.items() if "kv_total_tokens" in numbers}


def _line(numbers: Mapping[str, Any]) -> str:
    streams, waiting = numbers.get("streams", 0), numbers.get("queue_rows", 0)
    parts = [f"{streams} {'stream' if streams == 1 else 'streams'}, {waiting} waiting"]
    if total := numbers["kv_total_tokens"]:
        parts.append(f"cache {numbers.get('kv_used_tokens', 0):,} of {total:,} tokens")
    for key, words in (
        ("prefill_tokens_s", "reads {:,.0f} tokens/s"), ("step_ms", "step {:.1f} ms"),
        ("first_token_ms", "first token {:,.0f} ms"),
    ):  # fmt: skip
        if value := numbers.get(key):
            parts.append(words.format(value))
    return ", ".join(parts)
