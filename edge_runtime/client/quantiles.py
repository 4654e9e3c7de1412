"""Quantiles of measured values."""

from __future__ import annotations

import math
from collections.abc import Sequence


def quantile(values: Sequence[float], q: float) -> float | None:
    """The smallest value that a share `q` of all values does not exceed (nearest rank); None of nothing."""
    if not values:
        return None
    return sorted(values)[max(math.ceil(q * len(values)) - 1, 0)]
