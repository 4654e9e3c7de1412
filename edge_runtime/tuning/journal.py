"""What was measured, kept in the state folder, so that a tune that was broken off goes on where it was.

Owns: one small file for each result, named by a digest of all that it depends on: the artifact, the inputs, the
objective, the engine or candidate, the device, and the backend's version. Durable: a result that was shown is kept
through a power cut. A damaged file counts as none. Thread: one owner.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TypeVar

import msgspec

from edge_runtime.errors import StorageFailed
from edge_runtime.repository.durable import make_folder, write_atomically
from edge_runtime.tuning.conversion import digest_of

log = logging.getLogger(__name__)

FORMAT = "1"
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
            return msgspec.json.decode(self._path(kind, subject).read_bytes(), type=kind)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    def write(self, result: msgspec.Struct, *subject: str) -> None:
        """Keep a result. A full or read-only disk is said, and costs nothing but the next measurement."""
        if self._folder is None:
            return
        try:
            make_folder(self._folder)
            write_atomically(self._path(type(result), subject), msgspec.json.encode(result))
        except (OSError, StorageFailed) as error:
            log.warning("a result is not kept: %s", error)

    def _path(self, kind: type[msgspec.Struct], subject: tuple[str, ...]) -> Path:
        assert self._folder is not None
        return self._folder / f"{digest_of((FORMAT, kind.__name__, *self._about, *subject))}.json"
