"""Loads settings: `config.toml` with the command line's on top, and each model's `model.toml`.

Owns: which file is read, and how the command line overrides it. settings.py defines the keys, typed_toml.py words the
mistakes. Reads files, keeps nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from edge_runtime import plugins
from edge_runtime.config.endpoints import CONFIGURATION, settings_file
from edge_runtime.config.settings import Config, ModelSettings
from edge_runtime.errors import ConfigError
from edge_runtime.typed_toml import build, parse_toml

COMMAND_LINE = "command line"

MAX_FILE_BYTES = 1 << 20
"""No settings file comes near 1 MiB. Others write a model's folder, and must not fill the memory."""


def load_config(path: Path | None, overrides: Mapping[str, object], default_path: Path = CONFIGURATION) -> Config:
    """The daemon's settings: the file's, overridden by the command line's.

    path: None reads the file that `$EDGE_RUNTIME_CONFIG` names, else `default_path` if anything is there. overrides:
    nested like the file, or with dotted keys on top ("zmq.endpoints"); None leaves the file's value. Raises
    ConfigError: the file is missing, unreadable or not TOML, or a key is unknown, of the wrong type or out of range;
    the message names each.
    """
    path = settings_file(path, default_path)
    values = {} if path is None else parse_toml(read_settings(path), str(path))
    if "plugins" in values:
        plugins.use(build(Config, {"plugins": values["plugins"]}, str(path)).plugins)
    # The file is checked alone first, so that its mistakes are reported as its own.
    in_file = _build(values, str(path))
    tree = _nested(overrides)
    return _build(_merged(values, tree), COMMAND_LINE) if tree else in_file


def configured(**settings: Any) -> Config:
    """Return a configuration with these settings, tables of doors included, by name. Raises TypeError."""
    return config_kind(settings)(**settings)


def config_kind(keys: Iterable[str]) -> type[Config]:
    """The type of a configuration that has these keys: each door of ours that one of them names adds its table.

    The table of a plug-in's door stays as it is: the daemon tries plug-ins before it imports one.
    """
    named, strange = set(keys), _strange_doors(keys)
    ours = tuple(name for name in plugins.names("doors") if name in named and name not in strange)
    return _kind(ours, tuple(name for name in strange if name in named))


def named_plugins(path: Path | None, default_path: Path = CONFIGURATION) -> tuple[str, ...]:
    """The distributions that `plugins` in `config.toml` names, whatever else is in the file. path: as of `load_config`.

    Raises ConfigError.
    """
    path = settings_file(path, default_path)
    text = "" if path is None else read_settings(path)
    if "plugins" not in text:  # most files, and every verb asks
        return ()
    keys = parse_toml(text, str(path))
    return build(Config, {"plugins": keys["plugins"]}, str(path)).plugins if "plugins" in keys else ()


def read_model_keys(path: Path) -> dict[str, Any]:
    """The keys that a model's `model.toml` sets, checked; none without a file.

    Raises ConfigError as `load_config`, and for a `model.toml` that is not a plain file.
    """
    if not path.exists() and not path.is_symlink():
        return {}
    if not path.is_file():
        raise ConfigError(f"{path}: wanted a plain file")
    keys = parse_toml(read_settings(path), str(path))
    build(ModelSettings, keys, str(path))
    return keys


def lay_over(keys: Mapping[str, Any], over: Mapping[str, Any], source: str) -> ModelSettings:
    """Settings of a model from two places: of a key that both have, the second's. source: for messages.

    Tables by name (`options`, `[input.NAME]`, `[output.NAME]`) have the names of both, and `[versions]` that says none
    leaves the first's. Raises ConfigError where they do not go together.
    """
    merged = {**keys, **over}
    if "versions" in keys and isinstance(said := over.get("versions"), dict) and said.keys() <= {"hold_interface"}:
        merged["versions"] = {**keys["versions"], **said}
    for name in ("options", "input", "output"):
        if name in keys and name in over:
            merged[name] = {**keys[name], **over[name]}
    return build(ModelSettings, merged, source)


def read_settings(path: Path) -> str:
    """The text of a settings file. Raises ConfigError: it cannot be read, is too large, or is not UTF-8."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        advice = "; let the daemon's user read it" if isinstance(error, PermissionError) else ""
        raise ConfigError(f"{path}: cannot be read: {error.strerror}{advice}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: has over {MAX_FILE_BYTES} bytes; a settings file is smaller")
    try:
        # TOML is UTF-8; some editors begin it with a byte order mark.
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: byte {error.start} is not UTF-8, which this file has to be") from None


# ---- private --------------------------------------------------------------------------------------------------------


@cache
def _kind(tables: tuple[str, ...], others: tuple[str, ...]) -> type[Config]:
    """Config with the tables of these doors. others: names of tables that are known, whatever is in them."""
    fields = [(name, plugins.declared("doors", name).settings | None, None) for name in tables]
    fields += [(name, Any, None) for name in others]
    if not fields:
        return Config
    kind: type[Config] = msgspec.defstruct(  # type: ignore[assignment]
        "Config", fields, bases=(Config,), frozen=True, forbid_unknown_fields=True
    )
    return kind


def _strange_doors(keys: Iterable[str]) -> tuple[str, ...]:
    """The names of doors that plug-ins bring, usable or not; where one is missing, each key that is not ours."""
    named = tuple(each.name for each in plugins.used() if each.kind == "doors")
    if all(each.kind for each in plugins.used()):
        return named
    ours = {*Config.__struct_fields__, *plugins.names("doors")}
    return (*named, *(key for key in keys if key not in ours))


def _build(values: Mapping[str, Any], source: str) -> Config:
    try:
        return build(config_kind(values), values, source)
    except ConfigError:
        strange, doors = _strange_doors(values), plugins.names("doors")
        ours = tuple(name for name in doors if name in values and name not in strange)
        # The text names the tables that there might be.
        build(_kind(ours, tuple(dict.fromkeys((*doors, *strange)).keys() - set(ours))), values, source)
        raise


def _nested(overrides: Mapping[str, object]) -> dict[str, Any]:
    """Dotted keys as nested tables, without the values that are None."""
    tree: dict[str, Any] = {}
    for key, value in overrides.items():
        if value is None:
            continue
        *outer, last = key.split(".")
        table = tree
        for name in outer:
            inner = table.setdefault(name, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{COMMAND_LINE}: {key}: {name} has a value and cannot be a table")
            table = inner
        new, old = _given(value), table.get(last)
        table[last] = _merged(old, new) if isinstance(new, dict) and isinstance(old, dict) else new
    return tree


def _given(value: object) -> object:
    """The value without entries that are None; the keys inside it are whole names, dots included."""
    if not isinstance(value, Mapping):
        return value
    return {name: _given(inner) for name, inner in value.items() if inner is not None}


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables are merged key by key; any other value of `over` replaces the base's."""
    merged = dict(base)
    for key, new in over.items():
        old = merged.get(key)
        merged[key] = _merged(old, new) if isinstance(new, Mapping) and isinstance(old, Mapping) else new
    return merged
