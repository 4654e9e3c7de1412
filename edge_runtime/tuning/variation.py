"""How much a model's answers differ over the rows of some data, and how much of that a copy of it keeps. Pure.

Owns: the two measures that tell a good copy from an answer that ignores its input: the number of distinct answers, and
the error as a share of the spread. `convert` and `tune` judge by them. Thread: one owner.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator

import numpy as np
import numpy.typing as npt

from edge_runtime.tensors import Array

ROUNDING = 1e-6
"""A spread below this share of the largest magnitude is rounding of float32, whose steps are 1.2e-7."""

Doubles = npt.NDArray[np.float64]


class Variation:
    """The distinct answers and the spread of one output of a model, and the distance of a copy's, over all rows so far.

    spread: root of the mean square of a value's distance from its mean over the rows, position by position: an answer
    that ignores its input is at least that far away. Values of the model that are not finite numbers count as equal.
    """

    def __init__(self) -> None:
        self.largest = 0.0
        self._rows = 0
        self._values = 0
        self._mean: Doubles | None = None
        self._squared_deviations = 0.0
        self._squared_distances = 0.0
        self._answers: Counter[Hashable] = Counter()

    def add_values(self, wanted: Doubles, got: Doubles) -> None:
        """Add rows of the model and of its copy, both [rows, ...]; where rows differ in shape, what all have counts."""
        finite = np.isfinite(wanted)
        values = np.where(finite, wanted, 0.0)
        with np.errstate(invalid="ignore", over="ignore"):
            distances = np.where(finite, got - values, 0.0)
            self._squared_distances += float(np.square(distances).sum())
            self._add_deviations(values)
        self._values += values.size
        self.largest = max(self.largest, float(np.abs(values).max(initial=0.0)))

    def add_answers(self, answers: Array) -> None:
        """Add the model's answers, a row each: a class, a label, or whatever a row of them is."""
        self._answers.update(_keys(answers))

    @property
    def distinct(self) -> int:
        """Number of distinct answers; 0 where none were added."""
        return len(self._answers)

    @property
    def commonest(self) -> float:
        """Share of rows with the commonest answer, which one and the same answer for all rows would reach."""
        return max(self._answers.values()) / sum(self._answers.values()) if self._answers else 0.0

    @property
    def spread(self) -> float:
        """The spread as a share of the largest magnitude; 0 where it is no more than rounding."""
        if not self._values or not self.largest:
            return 0.0
        share = math.sqrt(self._squared_deviations / self._values) / self.largest
        return share if share > ROUNDING else 0.0

    @property
    def error(self) -> float | None:
        """The copy's distance as a share of the spread, both as roots of mean squares; None without a spread.

        1 is as bad as an answer that ignores its input; its square is the share of the variance that is lost.
        """
        if not self.spread:
            return None
        error = math.sqrt(self._squared_distances / self._squared_deviations)
        return error if math.isfinite(error) else math.inf

    def _add_deviations(self, values: Doubles) -> None:
        """Chan's rule for the squares of two sets of rows: no difference of large sums."""
        rows, mean = len(values), values.mean(axis=0) if len(values) else None
        if mean is None:
            return
        deviations = float(np.square(values - mean).sum())
        if self._mean is not None and self._mean.ndim == mean.ndim:
            region = tuple(slice(min(lengths)) for lengths in zip(self._mean.shape, mean.shape, strict=True))
            before, delta = self._mean[region], mean[region] - self._mean[region]
            share = rows / (self._rows + rows)
            deviations += float(np.square(delta).sum()) * self._rows * share
            mean = before + delta * share
        self._mean = mean
        self._rows += rows
        self._squared_deviations += deviations


def _keys(answers: Array) -> Iterator[Hashable]:
    if answers.dtype.kind == "O":
        for row in answers:
            yield tuple(np.ravel(row).tolist()) if isinstance(row, np.ndarray) else row
    else:
        for row in answers:
            yield hash(row.tobytes())  # a row may be a whole mask
