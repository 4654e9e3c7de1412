"""The plan of an import, as values: the models found in a source, the pieces of each, and the report on it.

Owns: the plan that every reader of a source system makes, and how settings are written as TOML. Does no I/O: a reader
runs in a child process and sends its plan to writing.py as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from edge_runtime.errors import ConversionFailed
from edge_runtime.models.names import NAME_RULE, is_model_name

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_FIRST = re.compile(r"[A-Za-z0-9]")


class CallersOutput(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An output of a converted model as its callers know it.

    name: what they call it. made: what the conversion calls it, the first that is there; none: the one at `place`, else
    at the same place. columns: they get FP32 [rows, columns], the last columns where there are more; 0: as it is.
    above: they get 1 where it is above this, else 0.
    """

    name: str
    made: tuple[str, ...] = ()
    place: int = -1
    columns: int = 0
    above: float | None = None


class Piece(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file or folder of an imported model.

    place: its path below the model's folder, "1/model.onnx". source: the absolute path that it comes from, "" where
    `text` is all of it. target: what it is converted to, "" where it is copied as it is; shapes: of inputs that it
    leaves out, as `convert --shapes` takes them. inputs, outputs: of a converted ONNX model, as its callers know them;
    none: as the conversion names them.
    """

    place: str
    source: str = ""
    text: str = ""
    target: Literal["", "onnx", "openvino"] = ""
    shapes: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[CallersOutput, ...] = ()


class PlannedModel(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model of a source. was: what the source calls it and is, for the report.

    needs: other models that it calls, which must be there before it is. remarks: what became of each part that is
    neither kept nor dropped as a whole, such as a handler's methods: (part, what is done). refused: why it cannot be
    taken, and what to do; nothing is written then.
    """

    name: str
    was: str
    pieces: tuple[Piece, ...] = ()
    needs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    remarks: tuple[tuple[str, str], ...] = ()
    refused: str = ""


class ImportPlan(Struct, frozen=True, omit_defaults=True):
    """A source and its models. notes: about the source as a whole."""

    system: str
    models: tuple[PlannedModel, ...]
    notes: tuple[str, ...] = ()


def refusal(name: str, was: str, reason: str) -> PlannedModel:
    """Return a model that cannot be taken. reason: why, and what to do."""
    return PlannedModel(name=name, was=was, refused=reason)


def model_name(text: str) -> str:
    """Return a name that the models folder takes, near the one in the source. Raises ConversionFailed: none is near."""
    near = re.sub(r"[^A-Za-z0-9._-]+", "-", text)
    begins = _FIRST.search(near)
    near = near[begins.start() :][:64] if begins else ""
    if not is_model_name(near):
        raise ConversionFailed(f"{text[:80]!r} is not a model name; wanted {NAME_RULE}; give one with --name")
    return near


def settings_text(settings: Mapping[str, Any], comment: str = "") -> str:
    """Write `model.toml`. settings: keys with text, numbers, lists, or tables of tables. comment: first lines."""
    lines = [f"# {line}" for line in comment.splitlines()]
    lines += _table((), settings)
    return "\n".join(lines) + "\n"


def settings_piece(settings: Mapping[str, Any], system: str) -> tuple[Piece, ...]:
    """Return `model.toml` as a piece; none where there is nothing to say. system: what the model came from."""
    if not settings:
        return ()
    return (Piece(place="model.toml", text=settings_text(settings, f"Imported from {system}.")),)


def key_lines(table: Mapping[str, Any]) -> list[str]:
    """Write the keys of one table, a line each; tables within it are inline."""
    return [f"{_key(key)} = {_value(value)}" for key, value in table.items()]


def labels_text(labels: Sequence[str]) -> str:
    """Write a file of labels, one a line; a line's end within a label becomes a space."""
    return "".join(f"{' '.join(str(label).split())}\n" for label in labels)


# ---- private --------------------------------------------------------------------------------------------------------


def _table(path: tuple[str, ...], table: Mapping[str, Any]) -> list[str]:
    """Lines of a table: its own keys first, since a line after another table's head would belong to that."""
    lines = key_lines({key: value for key, value in table.items() if not _is_table(value)})
    for key, value in table.items():
        if _is_table(value):
            below = (*path, key)
            own = _table(below, value)
            lines += ["", f"[{'.'.join(map(_key, below))}]", *own] if own and own[0] != "" else own
    return lines


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(key_lines(value)) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")
