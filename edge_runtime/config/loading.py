"""Where settings come from: `config.toml`, the command line laid over it, and each model's `model.toml`.

Owns: which file is read, and the order in which one lies over another. What the keys are is settings.py's; how a
mistake is said is typed_toml's. Reads files, keeps nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_runtime.config.service import CONFIGURATION
from edge_runtime.config.settings import Config, ModelSettings
from edge_runtime.errors import ConfigError
from edge_runtime.typed_toml import build, parse_toml

COMMAND_LINE = "command line"

MAX_FILE_BYTES = 1 << 20
"""No settings file comes near 1 MiB; a model's folder is written by others, and must not fill the memory."""


def load_config(path: Path | None, overrides: Mapping[str, object], default_path: Path = CONFIGURATION) -> Config:
    """The daemon's settings: the file, with what the command line said laid over it.

    path: None reads `default_path` when something is there, whatever it is. overrides: nested like the file, or with
    dotted keys ("zmq.endpoints"); a value of None was not said and leaves the file's. Raises ConfigError: the file is
    missing, unreadable or not TOML, or a key is unknown, of the wrong type or out of range; the message names each.
    """
    if path is None and _is_there(default_path):
        path = default_path
    values = {} if path is None else parse_toml(_read(path), str(path))
    # Judged alone first: what the file says wrong is the file's fault, whatever lies over it.
    in_file = build(Config, values, str(path))
    said = _nested(overrides)
    return build(Config, _laid_over(values, said), COMMAND_LINE) if said else in_file


def load_model_settings(path: Path) -> ModelSettings:
    """The settings in a model's `model.toml`; all defaults when it is not there.

    Raises ConfigError: as `load_config`, and for a `model.toml` that is not a plain file.
    """
    if not path.exists() and not path.is_symlink():
        return ModelSettings()
    if not path.is_file():
        raise ConfigError(f"{path}: wanted a plain file")
    return build(ModelSettings, parse_toml(_read(path), str(path)), str(path))


# ---- private --------------------------------------------------------------------------------------------------------


def _is_there(path: Path) -> bool:
    """Whether there is anything of that name. What cannot be looked at may be there: reading it says what is wrong."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        advice = "; let the daemon's user read it" if isinstance(error, PermissionError) else ""
        raise ConfigError(f"{path}: cannot be read: {error.strerror}{advice}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: is over {MAX_FILE_BYTES} bytes; a settings file is smaller")
    try:
        # TOML is UTF-8; a mark at its beginning is what some editors leave.
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: byte {error.start} is not UTF-8, which TOML is written in") from None


def _nested(overrides: Mapping[str, object]) -> dict[str, Any]:
    """Dotted keys as nested tables, without what was not said."""
    tree: dict[str, Any] = {}
    for key, value in overrides.items():
        if value is None:
            continue
        *outer, last = key.split(".")
        table = tree
        for name in outer:
            inner = table.setdefault(name, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{COMMAND_LINE}: {key}: {name} was given a value of its own")
            table = inner
        said = _nested(value) if isinstance(value, Mapping) else value
        is_table = isinstance(said, dict) and isinstance(table.get(last), dict)
        table[last] = _laid_over(table[last], said) if is_table and isinstance(said, dict) else said
    return tree


def _laid_over(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables are merged key by key; anything else replaces what was there."""
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        is_table = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = _laid_over(below, value) if is_table and isinstance(below, Mapping) else value
    return merged
