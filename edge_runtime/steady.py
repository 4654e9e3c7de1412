"""Labels that the last frames of a camera, or windows of a sound, agree on: one that flickers neither comes nor goes.

Thread: one at a time, each value by itself.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from edge_runtime.answers import kind_of
from edge_runtime.steps import ModelSteps
from edge_runtime.tensors import Array


class SteadyAnswer:
    """The answer that `seen` of the last `of` frames agree on, for one model's declared outputs."""

    def __init__(self, steps: ModelSteps, names: Sequence[str], seen: int, of: int) -> None:
        """names: the outputs that count; empty means all."""
        self._labels = {
            name: SteadyLabels(kind_of(output), seen, of)
            for name, output in steps.outputs.items()
            if kind_of(output) in ("classes", "boxes", "keypoints") and (not names or name in names)
        }

    def agree(self, outputs: Mapping[str, Array], *, is_wanted: bool = True) -> tuple[dict[str, Array], bool]:
        """The outputs of a frame's answer as agreed on, and whether labels changed by it.

        outputs: of one row, by name. is_wanted: also where nothing changed; else {} then. Without classes and boxes
        every frame is a change. Empty while nothing is agreed.
        """
        known = [(name, labels) for name, labels in self._labels.items() if name in outputs]
        has_changed = not known
        for name, labels in known:
            has_changed = labels.look(outputs[name][0]) or has_changed
            if labels.steady is None:
                return {}, False
        if not (has_changed or is_wanted):
            return {}, False
        return {**outputs, **{name: labels.agreed(outputs[name]) for name, labels in known}}, has_changed


class SteadyLabels:
    """The labels of one output. steady: how many of each index are agreed on; None until frames agreed once.

    Of boxes all count, of classes the best one. A count rises, or falls, when `seen` of the last `of` frames have it
    so.
    """

    def __init__(self, kind: str, seen: int, of: int) -> None:
        self.steady: dict[int, int] | None = None
        self._is_classes = kind == "classes"
        self._seen, self._of = seen, of
        # Of each frame its rows, and by index which of them: of so few, lists cost less than arrays.
        self._last: deque[tuple[Array, dict[int, list[int]]]] = deque(maxlen=of)
        self._best: Array | None = None

    def look(self, rows: Array) -> bool:
        """Take one frame's rows (index first, -1 pads). Return whether `steady` changed."""
        self._last.append((rows, self._found(rows)))
        if len(self._last) < self._seen:
            return False
        known = set(self.steady or ()).union(*(found for _, found in self._last))
        counts = {index: self._agreed(index) for index in known}
        steady = {index: count for index, count in counts.items() if count}
        if self._is_classes and not steady:  # a model always has a best one: no two frames agree
            return False
        before, self.steady = self.steady, steady
        return steady != before

    def agreed(self, array: Array) -> Array:
        """An output like `array` with the agreed labels, each as the newest frame has it that has as many."""
        assert self.steady is not None
        kept: list[Array] = []
        for index, count in self.steady.items():
            newest = (each for each in reversed(self._last) if len(each[1].get(index, ())) >= count)
            for rows, found in itertools.islice(newest, 1):
                kept.append(rows[None] if self._is_classes else rows[found[index][:count]])
        if self._is_classes:
            self._best = kept[0] if kept else self._best
            return array if self._best is None else self._best
        rows = np.concatenate(kept) if kept else array[0][:0]
        rows = rows[np.argsort(np.negative(rows[:, 1]), kind="stable")][: array.shape[1]]
        agreed = np.zeros_like(array)
        agreed[:, :, 0] = -1
        agreed[0, : len(rows)] = rows
        return agreed

    def copy(self) -> SteadyLabels:
        """Return one that goes on from here by itself."""
        made = SteadyLabels("classes" if self._is_classes else "", self._seen, self._of)
        made.steady, made._best = self.steady, self._best
        made._last.extend(self._last)
        return made

    def history(self) -> list[Array]:
        """Of classes, return what it goes on from: rows of the last frames, and of the agreed, [frames, rows, 2]."""
        last = [rows for rows, _ in self._last]
        nothing = np.zeros((0, 0, 2), np.float32)
        best = self._best if self._best is not None and self.steady else nothing
        return [np.stack(last) if last else nothing, best]

    def take(self, last: Array, best: Array) -> None:
        """Go on from what `history` gave."""
        self._last.extend((rows, self._found(rows)) for rows in last)
        if len(best):
            self._best, self.steady = best, {int(best[0, 0, 0]): 1}

    def _found(self, rows: Array) -> dict[int, list[int]]:
        """Which rows each index has."""
        found: dict[int, list[int]] = {}
        for row, index in enumerate(rows[: 1 if self._is_classes else None, 0].tolist()):  # best first
            if index < 0:
                break
            found.setdefault(int(index), []).append(row)
        return found

    def _agreed(self, index: int) -> int:
        # Invariant: `seen` is more than half of `of`, so a count cannot rise and fall at once, and a frame has it.
        counts = sorted(len(found.get(index, ())) for _, found in self._last)
        now = (self.steady or {}).get(index, 0)
        most, least = counts[-self._seen], counts[self._seen - 1]
        return most if most > now else min(now, least)
