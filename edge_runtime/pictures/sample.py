"""Made-up pictures for a model's first runs: as large as cameras send. Thread: the loader's."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from edge_runtime.model_spec import DYNAMIC, TensorSpec
from edge_runtime.steps import InputKind
from edge_runtime.tensors import Array

HEIGHT, WIDTH = 480, 640
"""What most cameras send."""


def made_up(sent: TensorSpec, kind: InputKind) -> Array:
    """A black picture, encoded or as frames, once for each row that the model has at least."""
    rows = max(sent.shape[0], 1)
    if kind == "picture":
        return np.full((rows,), _png(WIDTH, HEIGHT), object)
    # nv12 has half as many lines again.
    inner = (HEIGHT if len(sent.shape) == 4 else HEIGHT * 3 // 2, WIDTH, *sent.shape[3:])
    return np.zeros((rows, *(side if side != DYNAMIC else 3 for side in inner)), np.uint8)


def _png(width: int, height: int) -> bytes:
    """A black picture, RGB. Source: the PNG specification, 5 and 11.2."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    lines = zlib.compress(bytes((1 + 3 * width) * height), 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", lines) + chunk(b"IEND", b"")
