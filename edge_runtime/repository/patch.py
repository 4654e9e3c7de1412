"""A patch applied: an old file and a few bytes become a new file, never a longer one and never in more memory.

Owns: what PATCH_ALGORITHM means, and the only import of zstd. Believes nothing of a patch: whoever applies one checks
the new file's hash. The publisher makes patches with the same library and tries them with this very code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

from edge_runtime.errors import UpdateError

MAX_PATCHED_BYTES = 512 << 20
"""Old and new file are in memory where a patch is made, and the old one and a window where it is applied."""

_PIECE_BYTES = 1 << 20


def find_zstd() -> ModuleType | None:
    """The library; None: it is not installed, which leaves whole files."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ModuleNotFoundError:
        return None
    return zstd


def window_log(old_bytes: int, new_bytes: int) -> int:
    """The window of a patch between files of these lengths: over the longer one, as `zstd --patch-from` has it."""
    return max(old_bytes, new_bytes).bit_length()


def memory_bytes(old_bytes: int, new_bytes: int, patch_bytes: int) -> int:
    """What applying takes at most: the old file, which the library copies, the window, and the patch."""
    return 2 * old_bytes + (1 << window_log(old_bytes, new_bytes)) + patch_bytes


def apply_patch(zstd: ModuleType, old: bytes, patch: bytes, new_bytes: int) -> Iterator[bytes]:
    """The new file in pieces: at most one byte more than it is to have, whatever the patch says.

    zstd: from `find_zstd`. Raises UpdateError: the patch is none, ends early, or wants a larger window than its files
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
