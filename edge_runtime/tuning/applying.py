"""A choice written to the models folder: the variant into the version's folder, then `model.toml`, then the picture.

Owns: the order (a daemon that serves the folder sees a variant first, then the settings that name it), and how
`model.toml` changes: the owner's lines stay, comments included. A library that keeps comments would be a dependency of
every device for six keys; here both texts are parsed and compared, and a text that cannot be changed safely is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_runtime.durable import PART_SUFFIX, growing, sync_folder, write_atomically
from edge_runtime.errors import ConfigError, StorageFailed
from edge_runtime.models.folder import ModelFolder
from edge_runtime.models.names import SETTINGS_FILE
from edge_runtime.models.table_choice import Value
from edge_runtime.typed_toml import parse_toml

MARK = "# tune: "
"""Begins each comment that a tune writes; the next tune removes them."""

BEFORE = "# before tune: "
"""Begins a line of the owner that the choice replaced."""

PICTURE_FILE = "tune.svg"
"""Beside `model.toml`, where a choice was written."""

_KEY = re.compile(r"\s*([A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')\s*=")
_TABLE = re.compile(r"\s*\[")
_PIECE_BYTES = 1 << 20


def check_can_apply(model: ModelFolder) -> Path:
    """Return the path of `model.toml`. Raises ConfigError: the model has no folder of its own, or it is read-only.

    Called before anything is measured, because minutes later is too late.
    """
    if model.path.name != model.name:
        raise ConfigError(
            f"{model.path}: {model.name} is a file there, and settings belong into a folder: move it to "
            f"{model.name}/1/, or look only, with --dry-run"
        )
    if not os.access(model.path, os.W_OK):
        raise ConfigError(
            f"{model.path}: cannot be written, and {SETTINGS_FILE} belongs there; look only, with --dry-run (and "
            "--output F for the picture), or make it writable"
        )
    return model.path / SETTINGS_FILE


def apply_choice(
    model: ModelFolder,
    folder: Path,
    values: Mapping[str, Value | None],
    made: Sequence[Path],
    why: Sequence[str],
    *,
    table: str = "",
) -> list[Path]:
    """Write a choice and return the written files. Raises StorageFailed, ConfigError: the old files are unchanged.

    folder: the version's. values: keys of `model.toml`, None to remove one. made: the variant's files, the graph first.
    table: where the keys are, "" at the top.
    """
    settings = check_can_apply(model)
    # Read again: the owner may have written it during the tune.
    text = settings.read_text(encoding="utf-8-sig") if settings.is_file() else ""
    changed = with_choice(text, values, why, str(settings), table)
    placed = place(made, folder)
    write_atomically(settings, changed.encode())
    return [*placed, settings]


def write_picture(path: Path, svg: str) -> None:
    """Write the picture's file, whole. Raises StorageFailed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageFailed(f"{path.parent}: cannot be made: {error.strerror}") from error
    write_atomically(path, svg.encode())


# ---- the variant ----------------------------------------------------------------------------------------------------


def place(files: Sequence[Path], folder: Path) -> list[Path]:
    """Copy a variant's files into a version's folder, each whole and durable, the graph last; returns the copies.

    files: the graph first. An old graph is removed before its weights change: it would read the new ones at the old
    offsets. Raises StorageFailed: no half-written file stays, and the old files are unchanged, except where the message
    says otherwise.
    """
    if not files:  # the plain model
        return []
    destinations = [folder / source.name for source in reversed(files)]
    parts = [destination.with_name(f"{destination.name}{PART_SUFFIX}") for destination in destinations]
    try:
        for source, part in zip(reversed(files), parts, strict=True):
            _copy(source, part)
        _rename(parts, destinations)
    finally:
        for part in parts:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
    return destinations


def _copy(source: Path, part: Path) -> None:
    try:
        with source.open("rb") as content, growing(part, keep=False) as file:
            while piece := content.read(_PIECE_BYTES):
                file.write(piece)
            file.commit(part)
    except OSError as error:
        raise StorageFailed(f"{part}: cannot be written: {error.strerror}; the model is as it was") from error


def _rename(parts: Sequence[Path], destinations: Sequence[Path]) -> None:
    *_, graph = destinations
    try:
        if len(destinations) > 1:
            graph.unlink(missing_ok=True)
            sync_folder(graph.parent)
        for part, destination in zip(parts, destinations, strict=True):
            part.replace(destination)
        sync_folder(graph.parent)
    except OSError as error:
        raise StorageFailed(f"{graph}: cannot be written: {error.strerror}; the variant may be missing") from error


# ---- model.toml -----------------------------------------------------------------------------------------------------


def with_choice(text: str, values: Mapping[str, Value | None], why: Sequence[str], source: str, table: str = "") -> str:
    """The text with these keys set, those with None removed, and `why` as comments above them. Pure.

    source: the file's name, for messages. table: where the keys are, "" at the top. Raises ConfigError: it is not TOML,
    or cannot be changed line by line.
    """
    before = parse_toml(text, source)
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if _TABLE.match(line)] + [len(lines)]
    header = [number for number in starts[:-1] if lines[number].split("#")[0].strip() == f"[{table}]"]
    if table and not header:
        lines += [*([""] if lines else []), f"[{table}]"]
        header = [len(lines) - 1]
        starts.append(len(lines))
    first = header[0] + 1 if table else 0
    end = next(number for number in starts if number >= first)
    kept = [line for line in _without(lines[first:end], values) if not line.startswith(MARK)]
    while kept and not kept[-1].strip():
        kept.pop()
    said = [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
    block = [*(f"{MARK}{sentence}" for sentence in why), *said]
    rest = lines[end:]
    blank = [""]
    pieces = [*lines[:first], *kept, *(blank if kept else []), *block, *(blank if rest else []), *rest]
    changed = "\n".join(pieces) + "\n"
    _check(before, values, changed, source, table)
    return changed


def _without(lines: Sequence[str], values: Mapping[str, Value | None]) -> list[str]:
    """The lines without those that set these keys; a line of the owner stays as a comment."""
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


def _check(
    before: Mapping[str, Any], values: Mapping[str, Value | None], changed: str, source: str, table: str
) -> None:
    """Raise ConfigError unless these keys changed and no others: a key may stand where a line cannot show it."""
    among = before.get(table, {}) if table else before
    wanted = {key: value for key, value in among.items() if key not in values}
    wanted |= {key: value for key, value in values.items() if value is not None}
    wanted = {**before, table: wanted} if table else wanted
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
