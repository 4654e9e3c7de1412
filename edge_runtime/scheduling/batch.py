"""Requests to one batch and back. Pure array work, no decisions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_runtime.scheduling.queue import Pending
from edge_runtime.tensors import Array


def join(requests: Sequence[Pending]) -> Sequence[Array]:
    """Stack request inputs along axis 0.

    Shapes: each input [rows_i, *inner] -> [sum(rows_i), *inner], same dtype, C-contiguous; one request alone is passed
    through without a copy. Thread: any. Raises: nothing; specs were checked before admission.
    """
    if len(requests) == 1:
        return requests[0].inputs
    return [np.concatenate(parts) for parts in zip(*(request.inputs for request in requests), strict=True)]


def split(outputs: Sequence[Array], rows: Sequence[int]) -> list[list[Array]]:
    """Cut batch outputs [sum(rows), *inner] into each request's own, as views in the order of `rows`.

    One request gets the outputs whole, whatever their axis 0 is.
    """
    if len(rows) == 1:
        return [list(outputs)]
    parts: list[list[Array]] = []
    start = 0
    for count in rows:
        parts.append([output[start : start + count] for output in outputs])
        start += count
    return parts
