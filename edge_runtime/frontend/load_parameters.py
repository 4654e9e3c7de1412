"""The parameters of a load in Triton's words: a ModelConfig (repository/triton_config.py), and files. Pure."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from edge_runtime.errors import DecodeFailed
from edge_runtime.repository.names import NAME_RULE, is_model_name
from edge_runtime.repository.overrides import MAX_FILES, Override, check_file, check_settings
from edge_runtime.repository.triton_config import TritonConfig, read_config_json
from edge_runtime.wire.codec import short

CONFIG, FILE = "config", "file:"

MAX_CONFIG_BYTES = 1 << 20


def read_override(model: str, parameters: Mapping[str, Any]) -> Override:
    """Read what a load lays over its model. Raises DecodeFailed, Unsupported.

    parameters: `config`, JSON text, and `file:VERSION/NAME`, bytes or base64 text.
    """
    if not is_model_name(model):
        raise DecodeFailed(f"{short(model)} is no model name; wanted {NAME_RULE}")
    triton: TritonConfig | None = None
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if key == CONFIG:
            triton = _config(model, value)
        elif key.startswith(FILE):
            files[check_file(key.removeprefix(FILE))] = _content(key, value)
        else:
            raise DecodeFailed(f"parameters: load does not know {short(key)}; wanted {CONFIG} and {FILE}VERSION/NAME")
    if len(files) > MAX_FILES:
        raise DecodeFailed(f"parameters: got {len(files)} files, wanted at most {MAX_FILES}")
    settings = triton.settings if triton is not None else {}
    check_settings(settings)
    return Override(settings, files, triton)


def _content(key: str, value: Any) -> bytes:
    if isinstance(value, str):
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise DecodeFailed(f"{short(key)}: wanted base64") from None
    if not isinstance(value, bytes):
        raise DecodeFailed(f"{short(key)}: got {type(value).__name__}, wanted base64 over HTTP, bytes over gRPC")
    return value


def _config(model: str, text: Any) -> TritonConfig:
    """The ModelConfig of a load."""
    if not isinstance(text, str) or len(text) > MAX_CONFIG_BYTES:
        raise DecodeFailed("config: wanted a ModelConfig as JSON text")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DecodeFailed(f"config: not JSON: {str(error)[:200]}") from None
    if not isinstance(config, dict):
        raise DecodeFailed(f"config: got {type(config).__name__}, wanted an object")
    try:
        return read_config_json(config, model)
    except DecodeFailed as error:
        raise DecodeFailed(f"config: {error.message}") from None
