"""What a load added to a process's memory is told."""

from __future__ import annotations

import ctypes

import pytest

from edge_runtime.sandbox.process_memory import allocated_bytes, watch_growth

BLOCK_BYTES, BLOCKS = 64 << 10, 256
"""Each below the size from which on malloc maps a block by itself, and gives it back when it is freed."""


@pytest.mark.skipif(not allocated_bytes(), reason="the C library has no mallinfo2")
def test_memory_that_an_earlier_load_freed_counts_when_it_is_taken_again() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        (ctypes.c_size_t,),
        (ctypes.c_void_p,),
    )

    def take() -> list[int]:
        blocks = [libc.malloc(BLOCK_BYTES) for _ in range(BLOCKS)]
        for block in blocks:
            ctypes.memset(block, 1, BLOCK_BYTES)
        return blocks

    earlier, above = take(), libc.malloc(BLOCK_BYTES)  # what lies above keeps the heap from shrinking
    try:
        for block in earlier:
            libc.free(block)
        growth = watch_growth(0)
        again = take()
        assert growth() >= BLOCK_BYTES * BLOCKS
        for block in again:
            libc.free(block)
    finally:
        libc.free(above)


def test_no_less_is_reported_than_the_artifact_has() -> None:
    assert watch_growth(1 << 40)() == 1 << 40
