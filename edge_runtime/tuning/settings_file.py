"""`model.toml` with a choice in it: what the owner wrote stays, line by line, comments included.

Pure: text in, text out. A library that keeps comments would be a dependency of every device for six keys; what is
changed here is checked by reading both texts with the parser, and a text that this cannot change safely is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from edge_runtime.errors import ConfigError
from edge_runtime.typed_toml import parse_toml

MARK = "# tune: "
"""Begins each comment of ours; a later tune takes them out again."""

BEFORE = "# before tune: "
"""Begins a line that the owner wrote and the choice replaced."""

Value = str | int | bool

_KEY = re.compile(r"\s*([A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')\s*=")
_TABLE = re.compile(r"\s*\[")


def with_choice(text: str, values: Mapping[str, Value | None], why: Sequence[str], source: str) -> str:
    """The text with these keys set, None taken out, and `why` as comments above them.

    source: the file's name, for messages. Raises ConfigError: it is no TOML, or cannot be changed line by line.
    """
    before = parse_toml(text, source)
    lines = text.splitlines()
    first_table = next((number for number, line in enumerate(lines) if _TABLE.match(line)), len(lines))
    kept = [line for line in _without(lines[:first_table], values) if not line.startswith(MARK)]
    while kept and not kept[-1].strip():
        kept.pop()
    said = [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
    block = [*(f"{MARK}{sentence}" for sentence in why), *said]
    rest = lines[first_table:]
    blank = [""]
    pieces = [*kept, *(blank if kept else []), *block, *(blank if rest else []), *rest]
    changed = "\n".join(pieces) + "\n"
    _check(before, values, changed, source)
    return changed


# ---- private --------------------------------------------------------------------------------------------------------


def _without(lines: Sequence[str], values: Mapping[str, Value | None]) -> list[str]:
    """The lines, without those that set these keys; what the owner had set stays as a comment."""
    kept: list[str] = []
    was_ours = False
    for line in lines:
        found = _KEY.match(line)
        if found is not None and found[1].strip("\"'") in values:
            if not was_ours:
                kept.append(f"{BEFORE}{line.strip()}")
            continue
        was_ours = line.startswith(MARK)
        kept.append(line)
    return kept


def _check(before: Mapping[str, object], values: Mapping[str, Value | None], changed: str, source: str) -> None:
    """What was not to change has not, and what was to has: else a key stands where a line cannot tell."""
    wanted = {key: value for key, value in before.items() if key not in values}
    wanted |= {key: value for key, value in values.items() if value is not None}
    try:
        is_right = parse_toml(changed, source) == wanted
    except ConfigError:
        is_right = False
    if not is_right:
        lines = "; ".join(f"{key} = {_toml(value)}" for key, value in values.items() if value is not None)
        raise ConfigError(f"{source}: cannot be changed without losing something; write into it yourself: {lines}")


def _toml(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else json.dumps(value)
