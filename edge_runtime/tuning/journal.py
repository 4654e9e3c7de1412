"""What was measured, kept in the state folder, so that a tune that was broken off goes on where it was.

Owns: one small file for each result, named by a digest of all that it depends on: the artifact, the inputs, the
objective, the engine or candidate, the device, and the backend's version. Durable: a result that was shown is kept
through a power cut. A file carries the hash of what is in it; a damaged one counts as none. Thread: one owner.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import TypeVar

import msgspec

from edge_runtime.errors import StorageFailed
from edge_runtime.repository.durable import make_folder, write_atomically
from edge_runtime.tuning.conversion import digest_of

log = logging.getLogger(__name__)

FORMAT = "2"
"""Part of every name: a release that measures differently begins anew."""

T = TypeVar("T", bound=msgspec.Struct)


class Journal:
    """Results by what they are of. folder None: nothing is kept. about: what all of them depend on."""

    def __init__(self, folder: Path | None, about: tuple[str, ...]) -> None:
        self._folder = folder
        self._about = about

    def read(self, kind: type[T], *subject: str) -> T | None:
        """What was kept; None where nothing was, or where it cannot be read."""
        if self._folder is None:
            return None
        try:
            kept = msgspec.json.decode(self._path(kind, subject).read_bytes(), type=_Kept)
            return msgspec.json.decode(kept.result, type=kind) if kept.digest == _digest(kept.result) else None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    def write(self, result: msgspec.Struct, *subject: str) -> None:
        """Keep a result. A full or read-only disk is said, and costs nothing but the next measurement."""
        if self._folder is None:
            return
        try:
            make_folder(self._folder)
            content = msgspec.json.encode(result)
            kept = _Kept(_digest(content), msgspec.Raw(content))
            write_atomically(self._path(type(result), subject), msgspec.json.encode(kept))
        except (OSError, StorageFailed) as error:
            log.warning("a result is not kept: %s", error)

    def _path(self, kind: type[msgspec.Struct], subject: tuple[str, ...]) -> Path:
        assert self._folder is not None
        return self._folder / f"{digest_of((FORMAT, kind.__name__, *self._about, *subject))}.json"


class _Kept(msgspec.Struct, frozen=True):
    """A result's file. digest: of the result's JSON, SHA-256 in hexadecimal digits."""

    digest: str
    result: msgspec.Raw


def _digest(content: bytes | msgspec.Raw) -> str:
    return hashlib.sha256(content).hexdigest()
