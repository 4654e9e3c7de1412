"""The SHA-256 of an artifact: the key under which its measurements are kept."""

from __future__ import annotations

import hashlib
from pathlib import Path

_CHUNK_BYTES = 1 << 20
"""Large enough that the loop costs nothing beside the hash, small enough not to matter beside a model."""


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hex digits. Reads it in pieces, so that its size does not matter.

    Thread: any; other threads run meanwhile. Raises OSError when the file cannot be read.
    """
    digest = hashlib.sha256()
    piece = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
    return digest.hexdigest()
