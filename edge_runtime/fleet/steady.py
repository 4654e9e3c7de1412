"""Which labels a camera's answers agree on: one that flickers for a frame neither appears nor disappears.

Decides by the last frames alone; camera_source.py asks once a frame. Knows arrays of answers.py, no camera.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from edge_runtime.answers import kind_of
from edge_runtime.steps import AnswerKind, ModelSteps
from edge_runtime.tensors import Array


class SteadyAnswer:
    """The answer that `seen` of the last `of` frames agree on, for one model's declared outputs."""

    def __init__(self, steps: ModelSteps, names: Sequence[str], seen: int, of: int) -> None:
        """names: the outputs that count; empty means all."""
        self._labels = {
            name: SteadyLabels(kind_of(output), seen, of)
            for name, output in steps.outputs.items()
            if kind_of(output) in ("classes", "boxes") and (not names or name in names)
        }

    def agree(self, outputs: Mapping[str, Array]) -> tuple[dict[str, Array], bool]:
        """The outputs of a frame's answer as agreed on, and whether labels changed by it.

        outputs: of one row, by name. Without classes and boxes every frame is a change. Empty while nothing is agreed.
        """
        found: dict[str, Array] = {}
        has_changed = not self._labels.keys() & outputs.keys()
        for name, array in outputs.items():
            labels = self._labels.get(name)
            if labels is None:
                found[name] = array
                continue
            has_changed = labels.look(array[0]) or has_changed
            if labels.steady is None:
                return {}, False
            found[name] = labels.agreed(array)
        return found, has_changed


class SteadyLabels:
    """The labels of one output. steady: how many of each index are agreed on; None until frames agreed once.

    Of boxes all count, of classes the best one. A count rises, or falls, when `seen` of the last `of` frames have it
    so.
    """

    def __init__(self, kind: AnswerKind, seen: int, of: int) -> None:
        self.steady: dict[int, int] | None = None
        self._is_classes = kind == "classes"
        self._seen = seen
        self._last: deque[dict[int, Array]] = deque(maxlen=of)  # of each frame its rows, by index
        self._best: Array | None = None

    def look(self, rows: Array) -> bool:
        """Take one frame's rows (index first, -1 pads). Return whether `steady` changed."""
        found: dict[int, Array] = {}
        for index in dict.fromkeys(int(row[0]) for row in rows if row[0] >= 0):
            found[index] = rows[rows[:, 0] == index]
            if self._is_classes:  # best first
                found[index] = rows[None]
                break
        self._last.append(found)
        if len(self._last) < self._seen:
            return False
        counts = {index: self._agreed(index) for index in set(self.steady or ()).union(*self._last)}
        steady = {index: count for index, count in counts.items() if count}
        if self._is_classes and not steady:  # a model always has a best one: no two frames agree
            return False
        before, self.steady = self.steady, steady
        return steady != before

    def agreed(self, array: Array) -> Array:
        """An output like `array` with the agreed labels, each as the newest frame has it that has as many."""
        assert self.steady is not None
        kept = [
            next(frame[index] for frame in reversed(self._last) if len(frame.get(index, ())) >= count)[:count]
            for index, count in self.steady.items()
            if any(index in frame for frame in self._last)
        ]
        if self._is_classes:
            self._best = kept[0] if kept else self._best
            return array if self._best is None else self._best
        rows = np.concatenate(kept) if kept else array[0][:0]
        rows = rows[np.argsort(np.negative(rows[:, 1]), kind="stable")][: array.shape[1]]
        found = np.zeros_like(array)
        found[:, :, 0] = -1
        found[0, : len(rows)] = rows
        return found

    def _agreed(self, index: int) -> int:
        # Invariant: `seen` is more than half of `of`, so a count cannot rise and fall at once, and a frame has it.
        counts = sorted(len(frame.get(index, ())) for frame in self._last)
        now = (self.steady or {}).get(index, 0)
        most, least = counts[-self._seen], counts[self._seen - 1]
        return most if most > now else min(now, least)
