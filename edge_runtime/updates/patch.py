"""Applying a patch: an old file and a few bytes become a new file, within its length and a bound of memory.

Owns: the meaning of PATCH_ALGORITHM, and the only import of zstd. A patch is not trusted: callers check the new file's
hash. The publisher makes patches with the same library and tries them with this code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

from edge_runtime.errors import UpdateError

MAX_PATCHED_BYTES = 512 << 20
"""Making a patch needs the old and the new file in memory, applying it the old file and a window."""

_PIECE_BYTES = 1 << 20


def find_zstd() -> ModuleType | None:
    """Return the library; None: it is not installed, and whole files are fetched."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ModuleNotFoundError:
        return None
    return zstd


def window_log(old_bytes: int, new_bytes: int) -> int:
    """Return the window of a patch between files of these lengths: it covers the longer one, as `zstd --patch-from`."""
    return max(old_bytes, new_bytes).bit_length()


def memory_bytes(old_bytes: int, new_bytes: int, patch_bytes: int) -> int:
    """Return the most memory that applying takes: twice the old file (the library copies it), window and patch."""
    return 2 * old_bytes + (1 << window_log(old_bytes, new_bytes)) + patch_bytes


def apply_patch(zstd: ModuleType, old: bytes, patch: bytes, new_bytes: int) -> Iterator[bytes]:
    """Yield the new file in pieces: at most one byte more than its length, whatever the patch says.

    zstd: from `find_zstd`. Raises UpdateError: it is not a patch, ends early, or needs a larger window than its files
    allow.
    """
    options = {zstd.DecompressionParameter.window_log_max: max(window_log(len(old), new_bytes), 10)}
    given = patch
    left = new_bytes + 1
    try:
        unpacker = zstd.ZstdDecompressor(zstd_dict=zstd.ZstdDict(old, is_raw=True).as_prefix, options=options)
        while left and not unpacker.eof:
            piece = unpacker.decompress(given, max_length=min(left, _PIECE_BYTES))
            if not piece and unpacker.needs_input:
                raise UpdateError(f"the patch of {len(patch)} bytes ends in the middle")
            given = b""
            left -= len(piece)
            yield piece
    except (zstd.ZstdError, ValueError) as error:
        raise UpdateError(f"the patch cannot be applied: {error}") from error
