"""Models that a door received, kept by what they are: the digest of their bytes, which is their name too.

Owns: their folders below the state folder, which survive a restart; each is a model's folder of one version. Whose they
are, and how many stay, is the door's to say. Thread: the loader's, but for `names`, before that starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path

from edge_runtime.durable import write_atomically
from edge_runtime.errors import LoadFailed

DIGEST_DIGITS = 32
"""Of SHA-256 in a name: 128 bits, of which no two are ever equal."""

_FILE = Path("1", "model.onnx")


class ReceivedModels:
    """The folder of a door's models. prefix: of their names."""

    def __init__(self, folder: Path | None, prefix: str) -> None:
        """folder: None where the daemon has no state folder."""
        self._folder = folder
        self._prefix = prefix

    def names(self) -> list[str]:
        """Names of the models that are there, the one used last first; what was cut off by a crash is removed."""
        if self._folder is None or not self._folder.is_dir():
            return []
        found: list[tuple[float, str]] = []
        for place in self._folder.iterdir():
            try:
                (place / _FILE).stat()
                found.append((place.stat().st_mtime, place.name))
            except OSError:
                shutil.rmtree(place, ignore_errors=True)
        return [name for _, name in sorted(found, reverse=True)]

    def place_of(self, name: str) -> Path:
        """The folder of a model that is kept."""
        assert self._folder is not None
        return self._folder / name

    def keep(self, data: memoryview) -> str:
        """Write a model unless it is there, whole, and note that it was used. Returns its name.

        Raises LoadFailed: there is no state folder; StorageFailed.
        """
        if self._folder is None:
            raise LoadFailed("there is no state folder to keep the model in; name one with --state")
        digest = hashlib.sha256(data).hexdigest()
        name = f"{self._prefix}{digest[:DIGEST_DIGITS]}"
        file = self.place_of(name) / _FILE
        if _digest_of(file) != digest:
            write_atomically(file, bytes(data))
        with contextlib.suppress(OSError):
            os.utime(file.parent.parent)  # never the file: it would count as another one, and be loaded again
        return name

    def remove(self, name: str) -> None:
        """Remove a model's folder."""
        if self._folder is not None:
            shutil.rmtree(self._folder / name, ignore_errors=True)


def _digest_of(file: Path) -> str:
    """Of a file's content; "" where it cannot be read."""
    found = hashlib.sha256()
    try:
        with file.open("rb") as opened:
            while part := opened.read(1 << 20):
                found.update(part)
    except OSError:
        return ""
    return found.hexdigest()
