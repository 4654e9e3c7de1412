"""The files of a bug report of a daemon, without its secrets.

Owns: which parts there are, and how passwords, tokens and keys are taken out of every text. Thread: any.
"""

from __future__ import annotations

import io
import json
import platform
import re
import sys
import tarfile
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from edge_runtime import __version__, plugins
from edge_runtime.daemon.doors import DoorContext
from edge_runtime.profiles.facts import facts_as_json

NAME = "edge-runtime-report"

HIDDEN = "(taken out)"

_SECRET_KEY = re.compile(r"password|passphrase|secret|token|credential|(^|_)key$", re.IGNORECASE)
_USER = re.compile(r"(?<=://)[^/\s@\"']+@")
_QUERY = re.compile(r"(?i)([?&][^=&\s\"']*(?:password|pwd|token|key|secret|auth)[^=&\s\"']*=)[^&\s\"']+")
_TOKEN = re.compile(r"\bert_[A-Za-z0-9_-]{8,}|(?i:bearer) +[A-Za-z0-9._~+/=-]{8,}")
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)", re.DOTALL)


def without_secrets(value: Any) -> Any:
    """Return JSON values without passwords, tokens, keys, and what URLs say of users. Paths of files stay."""
    if isinstance(value, Mapping):
        return {str(key): _field_without_secrets(str(key), each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(each) for each in value]
    return _text_without_secrets(value) if isinstance(value, str) else value


def report_files(context: DoorContext, parts: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """Return the texts of a report by the names of its files. parts: of the daemon, by name."""
    core = context.core
    made: dict[str, Callable[[], Any]] = {
        "about.json": lambda: {
            "version": __version__,
            "python": platform.python_version(),
            "kernel": platform.release(),
            "machine": platform.machine(),
            "profile": core.profile.name,
            "libraries": _libraries(),
            "plugins": [each.as_json() for each in plugins.used()],
        },
        "device.json": lambda: facts_as_json(core.facts),
        "configuration.json": lambda: msgspec.to_builtins(core.config, str_keys=True, enc_hook=str),
        **{f"{name}.json": tell for name, tell in parts.items()},
    }
    return {name: _text(make) for name, make in made.items()}


def bundle(files: Mapping[str, str]) -> bytes:
    """Pack the files of a report as a tar.gz."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
        for name, text in files.items():
            body = text.encode()
            entry = tarfile.TarInfo(f"{NAME}/{name}")
            entry.size, entry.mode = len(body), 0o600
            archive.addfile(entry, io.BytesIO(body))
    return packed.getvalue()


def _text(make: Callable[[], Any]) -> str:
    """The text of one part; the reason where it cannot be made, since a broken daemon needs a report most."""
    try:
        value = without_secrets(make())
    except Exception as error:  # noqa: BLE001 (as said)
        value = {"not_told": f"{type(error).__name__}: {_text_without_secrets(str(error))}"}
    return msgspec.json.format(json.dumps(value, default=str), indent=1) + "\n"


def _libraries() -> dict[str, str]:
    """The versions of the libraries that are imported."""
    tops = {name: module for name, module in list(sys.modules.items()) if "." not in name and not name.startswith("_")}
    # Not by getattr: a module may compute the name, and warn, or fail.
    found = {name: getattr(module, "__dict__", {}).get("__version__") for name, module in tops.items()}
    return {name: version for name, version in sorted(found.items()) if isinstance(version, str)}


def _field_without_secrets(key: str, value: Any) -> Any:
    is_secret = _SECRET_KEY.search(key) is not None and not key.endswith("_file")
    return HIDDEN if is_secret and isinstance(value, str | list) and value else without_secrets(value)


def _text_without_secrets(text: str) -> str:
    text = _PEM.sub(HIDDEN, text)
    text = _USER.sub(f"{HIDDEN}@", text)
    text = _QUERY.sub(rf"\1{HIDDEN}", text)
    return _TOKEN.sub(HIDDEN, text)
