"""Whether a graph that was exported for one row answers several in one run as it answers each alone. Knows no library.

Converters of TensorFlow Lite fix the batch at 1 by default. Backends that can open it ask here
whether they may: a graph may reshape to one row, which fails, or add up over rows, which the comparison shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edge_runtime.tensors import Array


def answers_alike(run: Callable[[list[Array]], list[Array]], rows: Sequence[list[Array]]) -> bool:
    """Return whether rows in one run are answered as each alone.

    run: all inputs, each [n, *inner], to all outputs, which the caller owns; raises what its library does. rows: inputs
    of one row each.
    """
    alone = [run(row) for row in rows]
    together = run([np.concatenate(each) for each in zip(*rows, strict=True)])
    for index, several in enumerate(together):
        each = [results[index] for results in alone]
        if several.shape != (len(rows), *each[0].shape[1:]) or not _agree(several, np.concatenate(each)):
            return False
    return True


def made_up_row(shape: Sequence[int], dtype: Any, random: np.random.Generator, *, is_quantised: bool = False) -> Array:
    """Return a row of small numbers, which indices may be; of the whole range where they are quantised."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu" and is_quantised:
        return random.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    if dtype.kind in "iub":
        return random.integers(0, 2, shape).astype(dtype)
    made: Array = random.random(shape).astype(dtype)
    return made


def _agree(one: Array, other: Array) -> bool:
    """Whether two results are equal but for rounding: kernels of other sizes add in another order."""
    if one.dtype.kind not in "fiu":
        return bool((one == other).all())
    values, wanted = one.astype(np.float64), other.astype(np.float64)
    slack = 1.0 if one.dtype.kind in "iu" else 1e-3 * float(np.abs(wanted).max(initial=0.0, where=np.isfinite(wanted)))
    return bool(np.allclose(values, wanted, rtol=1e-3, atol=slack, equal_nan=True))
