"""A TorchScript archive made safe to load: its code may compute, not touch files.

Owns: the rules. `torch.jit.load` compiles the code in the archive to PyTorch's own operators and runs `__setstate__`;
no Python runs, and its unpickler (C++) makes only tensors, containers and the archive's own classes. But two operators
read and write files (found by the argument `filename` in all schemas of PyTorch 2.13), and custom classes and operators
are whatever a loaded library registered. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from edge_runtime.errors import ConversionFailed
from edge_runtime_converters.zip_copy import Fate, copy_checked

_DATA = re.compile(r"(data|constants|traced_inputs)(\.pkl|/\d+)|version|byteorder|\.data/(version|serialization_id)")
_CODE = re.compile(r"code/[\w./-]+\.py")
_DROPPED = re.compile(r"code/[\w./-]+\.debug_pkl|extra/.*")
_FILES = re.compile(r"\.\s*(save|from_file)\b")
_SPLIT = re.compile(r"\.\s*[#\\]")
"""A comment or a continued line between a dot and a name, which would hide the name from the rules here."""
_GETATTR = re.compile(r"getattr\b(?!\(\s*[\w.]+,\s*\"(?!save\"|from_file\")[^\"\\]*\"\s*\))")
"""Other than as TorchScript prints it, `getattr(self, "0")`."""
_NAMESPACES = re.compile(r"\bops\s*\.\s*(\w+)")
_KNOWN_NAMESPACES = frozenset(("aten", "prim", "prims", "quantized"))
_CUSTOM_CLASS = re.compile(r"__torch__\s*\.\s*torch\s*\.\s*classes")
_MAX_CODE_BYTES = 64 << 20


def write_safe_archive(source: Path, target: Path) -> None:
    """Write a copy that only computes. Raises ConversionFailed saying what else is there."""

    def check(name: str, read: Callable[[], bytes]) -> bytes | Fate | None:
        if _DATA.fullmatch(name):
            return None
        if _CODE.fullmatch(name):
            return _code(name, read())
        if _DROPPED.fullmatch(name):
            return Fate.LEFT_OUT  # an empty one would fail PyTorch where it says what is wrong
        raise ConversionFailed(
            f"{source}: holds {name[:80]!r}, which is none of TorchScript's own files; save it again"
        )

    copy_checked(source, target, check)


def _code(name: str, content: bytes) -> bytes:
    if len(content) > _MAX_CODE_BYTES:
        raise ConversionFailed(f"{name} is {len(content)} bytes of code; wanted at most {_MAX_CODE_BYTES}")
    try:
        text = content.decode("ascii")  # as TorchScript's printer writes it; no look-alikes
    except UnicodeDecodeError as error:
        raise ConversionFailed(f"{name} is no TorchScript: not ASCII at byte {error.start}") from error
    found = _FILES.search(text)
    if found:
        raise _refused(name, f"calls {found.group(1)!r}, which is how TorchScript reads and writes files")
    if _SPLIT.search(text) or _GETATTR.search(text):
        raise _refused(name, "names what it calls in a way that TorchScript never prints")
    strange = sorted(set(_NAMESPACES.findall(text)) - _KNOWN_NAMESPACES)
    if strange:
        raise _refused(name, f"calls operators of {', '.join(strange)[:80]}, which are not PyTorch's own")
    if _CUSTOM_CLASS.search(text):
        raise _refused(name, "holds objects of a C++ class")
    return content


def _refused(name: str, what: str) -> ConversionFailed:
    return ConversionFailed(f"{name} {what}; nothing of it was loaded. Export the model again without, to .pt2")
