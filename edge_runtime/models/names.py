"""Which names are models, versions and artifacts, and which are ignored.

Owns: every rule about a name inside the models folder and about a release's files. Pure: touches no file. A name that
passes has no separator, no dot at its start and no character beyond ASCII, so it can be joined to the root safely.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from functools import lru_cache

from edge_runtime import plugins
from edge_runtime.errors import ConfigError, ModelNotFound

SETTINGS_FILE = "model.toml"

PART_FOLDERS = ("initial_state", "warmup", "1_Pooling")
"""Folders beside a model's settings that are a part of them: their files are read at load. The last is that of
sentence-transformers."""

NAME_RULE = "a letter or digit, then at most 63 letters, digits, '.', '_' or '-'"

FILE_RULE = "a letter, digit or '_', then at most 127 letters, digits, '.', '_' or '-'"

MAX_VERSION = (1 << 63) - 1
"""Versions travel as msgpack and JSON integers and end up in databases: a signed 64-bit integer holds them all."""

LOOSE_SUFFIXES = (
    ".onnx", ".xml", ".plan", ".tflite", ".pdmodel", ".pt", ".pt2", ".skops", ".ubj", ".cbm", ".keras", ".h5",
)  # fmt: skip
"""Kinds of artifact that may have another name than the canonical one; code (`model.py`) never does. See
`loose_suffixes`."""

VARIANTS = ("int8", "f16", "bf16")
"""Precisions that a file's name may say, before its suffix: `model.int8.onnx`. Such a file is a variant of the model
without the word, and is loaded only where that precision is asked for (artifacts.py)."""

_CODE = re.compile(
    r".*(\.py[cdow]?|\.so(\.[0-9.]+)?|\.dll|\.dylib|\.plan|\.engine|\.trt|\.sh|\.pt2?|\.pth)|saved_model\.pb(txt)?",
    re.IGNORECASE,
)
_SOURCE = re.compile(r".*\.(ubj|bst|skops|cbm|keras|h5|hdf5|pkl|pickle|joblib|mar)", re.IGNORECASE)
"""Files that are converted before a backend loads them, or are of kinds (.cbm) most of which are. Not .json and .txt,
because labels and data are called so too: a device loads neither."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_VERSION = re.compile(r"[1-9][0-9]{0,18}")
_SHOWN_CHARACTERS = 80


def is_model_name(text: str) -> bool:
    """Return whether a whole text is a model name: `[A-Za-z0-9][A-Za-z0-9._-]{0,63}`."""
    # fullmatch, because `$` would let a trailing newline through.
    return _NAME.fullmatch(text) is not None


def is_file_name(text: str) -> bool:
    """Return whether a text may name a file of a release or of a build."""
    return _FILE.fullmatch(text) is not None


def is_code(name: str) -> bool:
    """Return whether a file is code, or was compiled for one machine: no release carries either."""
    return _CODE.fullmatch(name) is not None


def is_source(name: str) -> bool:
    """Return whether a file is converted before it is served: a release carries its conversion, never the file."""
    return _SOURCE.fullmatch(name) is not None


def check_model_name(text: str) -> str:
    """Return a requested name that may be looked up. Raises ModelNotFound: it is not a model name."""
    if is_model_name(text):
        return text
    shown = repr(text[:_SHOWN_CHARACTERS]) + ("…" if len(text) > _SHOWN_CHARACTERS else "")
    raise ModelNotFound(f"{shown} is not a model name; wanted {NAME_RULE}")


def parse_version(text: str) -> int | None:
    """Return the number of a version folder, or None: positive, ASCII digits, no leading zero, up to `MAX_VERSION`."""
    if _VERSION.fullmatch(text) is None:
        return None
    number = int(text)
    return number if number <= MAX_VERSION else None


def is_ignored(name: str) -> bool:
    """Return whether a file or folder is ignored without a report: hidden, or still being written."""
    return name.startswith(".") or name.endswith((".part", ".tmp"))


def artifact_candidates(names: Collection[str], wanted: str) -> tuple[str, ...]:
    """Return the file names that can stand for the artifact `wanted`: itself, else all of its kind, sorted.

    One: that is the artifact. None: there is none. Several: ambiguous, only the owner can choose. An OpenVINO IR under
    another name counts only with its weights beside it, since other files are `.xml` too. Variants are kinds of their
    own: `net.int8.onnx` stands for `model.int8.onnx`, never for `model.onnx`.
    """
    if wanted in names:
        return (wanted,)
    suffix, precision = suffix_of(wanted), variant_of(wanted)
    if suffix not in loose_suffixes():
        return ()
    found = (
        name
        for name in names
        if suffix_of(name) == suffix and len(name) > len(suffix) and variant_of(name) == precision
    )
    return tuple(sorted(name for name in found if suffix != ".xml" or weights_name(name) in names))


def variant_of(name: str) -> str:
    """Return the precision in an artifact's name: "int8" for `model.int8.onnx`, "" where there is none."""
    stem, dot, _ = name.rpartition(".")
    before, has_word, word = stem.rpartition(".") if dot else ("", "", "")
    return word if has_word and before and word in VARIANTS else ""


def variant_name(name: str, precision: str) -> str:
    """Return the name of an artifact's variant: `model.onnx` at "int8" is `model.int8.onnx`; at "" it is itself."""
    stem, dot, ending = name.rpartition(".")
    return f"{stem}.{precision}{dot}{ending}" if precision else name


def plugged_artifacts() -> tuple[str, ...]:
    """Return the artifacts of plug-in backends in use, which no table of ours has. Imports their declarations."""
    used = plugins.used()
    return _artifacts_of(used) if used else ()


def loose_suffixes() -> tuple[str, ...]:
    """Return `LOOSE_SUFFIXES` and the suffixes of the artifacts of plug-in backends."""
    more = plugged_artifacts()
    return (*LOOSE_SUFFIXES, *map(suffix_of, more)) if more else LOOSE_SUFFIXES


def suffix_of(name: str) -> str:
    """Return the part of a name from its last dot on, "" without one."""
    _, dot, ending = name.rpartition(".")
    return dot + ending if dot else ""


@lru_cache(maxsize=2)
def _artifacts_of(used: tuple[plugins.Plugin, ...]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for each in used:
        if each.kind == "backends" and each.is_usable:
            with suppress(ConfigError):  # its state has why
                found.update(dict.fromkeys(plugins.declared("backends", each.name).artifacts))
    return tuple(found)


def weights_name(name: str) -> str:
    """Return the name of the weights file that belongs to an IR's `.xml`."""
    return name[: -len(".xml")] + ".bin"
