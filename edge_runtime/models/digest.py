"""The SHA-256 of an artifact: the key under which its measurements are kept."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from edge_runtime.durable import open_within

_CHUNK_BYTES = 1 << 20
"""Large enough that the loop costs nothing beside the hash, small enough not to matter beside a model."""


def sha256_of_file(path: Path, within: Sequence[str] = ()) -> str:
    """Return the SHA-256 of a plain file as 64 hex digits. Reads it in pieces, so that its size does not matter.

    Of one that grows, it takes what was there at the beginning. within: as of `open_within`. Thread: any; other threads
    run meanwhile. Raises OSError: it is not a plain file, or cannot be read.
    """
    digest = hashlib.sha256()
    piece = memoryview(bytearray(_CHUNK_BYTES))
    with open_within(path, within) as file:
        left = os.fstat(file.fileno()).st_size
        while left > 0 and (count := os.readv(file.fileno(), [piece[:left]])):
            digest.update(piece[:count])
            left -= count
    return digest.hexdigest()
