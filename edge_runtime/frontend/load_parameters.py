"""The parameters of a load in Triton's words: a ModelConfig, and files.

Pure. Takes of the config what has a setting here, and refuses all else by name.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import DecodeFailed, Unsupported
from edge_runtime.repository.names import NAME_RULE, is_model_name
from edge_runtime.repository.overrides import MAX_FILES, Override, check_file
from edge_runtime.wire.codec import short, typed

CONFIG, FILE = "config", "file:"

MAX_CONFIG_BYTES = 1 << 20

KNOWN = ("name", "max_batch_size", "version_policy", "dynamic_batching")
"""Fields of a ModelConfig that a load takes."""


def read_override(model: str, parameters: Mapping[str, Any]) -> Override:
    """Read what a load lays over its model. Raises DecodeFailed, Unsupported.

    parameters: `config`, JSON text, and `file:VERSION/NAME`, bytes or base64 text.
    """
    if not is_model_name(model):
        raise DecodeFailed(f"{short(model)} is no model name; wanted {NAME_RULE}")
    settings: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if key == CONFIG:
            settings = _settings(model, value)
        elif key.startswith(FILE):
            files[check_file(key.removeprefix(FILE))] = _content(key, value)
        else:
            raise DecodeFailed(f"parameters: load does not know {short(key)}; wanted {CONFIG} and {FILE}VERSION/NAME")
    if len(files) > MAX_FILES:
        raise DecodeFailed(f"parameters: got {len(files)} files, wanted at most {MAX_FILES}")
    override = Override(settings, files)
    override.over(ModelSettings())  # raises for values that no model can have
    return override


def _content(key: str, value: Any) -> bytes:
    if isinstance(value, str):
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise DecodeFailed(f"{short(key)}: wanted base64") from None
    if not isinstance(value, bytes):
        raise DecodeFailed(f"{short(key)}: got {type(value).__name__}, wanted base64 over HTTP, bytes over gRPC")
    return value


def _settings(model: str, text: Any) -> dict[str, Any]:
    """The settings that a ModelConfig stands for."""
    if not isinstance(text, str) or len(text) > MAX_CONFIG_BYTES:
        raise DecodeFailed("config: wanted a ModelConfig as JSON text")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DecodeFailed(f"config: not JSON: {str(error)[:200]}") from None
    if not isinstance(config, dict):
        raise DecodeFailed(f"config: got {type(config).__name__}, wanted an object")
    for key in config:
        if key not in KNOWN:
            raise Unsupported(f"config: {short(key)} cannot be set by a load; wanted {', '.join(KNOWN)}")
    if config.get("name", model) not in {model, ""}:
        raise DecodeFailed(f"config: name: got {short(config['name'])}, wanted {short(model)}")
    settings: dict[str, Any] = {}
    if (rows := _number(config, "max_batch_size", 0)) is not None:
        settings |= {"max_batch_rows": rows, "batch": True} if rows else {"batch": False}
    if (policy := _fields(config, "version_policy", ("latest", "all", "specific"))) is not None:
        settings["versions"] = _versions(policy)
    batching = _fields(config, "dynamic_batching", ("preferred_batch_size", "max_queue_delay_microseconds"))
    if batching is not None:
        if batching.get("preferred_batch_size"):
            settings["preferred_batch_rows"] = batching["preferred_batch_size"]
        settings["max_queue_delay_ms"] = (_number(batching, "max_queue_delay_microseconds", 0) or 0) / 1e3
    return settings


def _versions(policy: Mapping[str, Any]) -> dict[str, Any]:
    if "specific" in policy:
        specific = _fields(policy, "specific", ("versions",)) or {}
        return {"specific": specific.get("versions")}
    if "all" in policy:
        return {"all": True}
    latest = _fields(policy, "latest", ("num_versions",)) or {}
    return {"latest": _number(latest, "num_versions", 1) or 1}


def _fields(config: Mapping[str, Any], key: str, known: tuple[str, ...]) -> dict[str, Any] | None:
    found: dict[str, Any] | None = typed(config, key, dict, None)
    for each in found or ():
        if each not in known:
            raise Unsupported(f"config: {key}.{short(each)} cannot be set by a load; wanted {', '.join(known)}")
    return found


def _number(config: Mapping[str, Any], key: str, least: int) -> int | None:
    """A whole number, also as text, in which JSON of protobuf has 64 bits."""
    value = config.get(key)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        value = int(value)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 40):
        raise DecodeFailed(f"config: {key}: got {short(value)}, wanted a whole number of {least} or more")
    return value
