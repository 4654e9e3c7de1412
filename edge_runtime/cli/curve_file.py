"""CURVE keys of a client from a TOML file: server_key, public_key, secret_key, each 40 characters of Z85."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from edge_runtime.client.zmq_client import CurveKeys
from edge_runtime.errors import ConfigError
from edge_runtime.typed_toml import build, parse_toml


class CurveFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The file's keys, as `CurveKeys` names them."""

    server_key: str
    public_key: str
    secret_key: str


def load_curve_keys(path: Path) -> CurveKeys:
    """The keys in a file. Raises ConfigError naming the file and the key."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    found = build(CurveFile, parse_toml(text, str(path)), str(path))
    return CurveKeys(found.server_key, found.public_key, found.secret_key)
