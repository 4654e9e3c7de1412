"""Outputs of the parts of rows, put together: windows of a long text, labels to choose from. Pure arithmetic.

The rule by kind of answer: scores of classes, numbers and vectors are the mean over windows, each as heavy as it has
tokens; of pairs a number is the largest, since a passage is as good as its best part; tokens stand one behind the
other, so that tags and means are of the whole text. Thread: any runner of the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from edge_runtime.answers import kind_of
from edge_runtime.errors import LoadFailed, RunFailed
from edge_runtime.hosts.steps_instance import ModelRun
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.steps import ModelSteps, OutputSteps
from edge_runtime.tensors import Array, Tensors
from edge_runtime.text.text_steps import TextSteps

ATTENTION_MASK = "attention_mask"
"""The name by which makers of answers know which tokens count."""

MOST_TOKENS = 1 << 14
"""Of one run of a text in parts: 32 windows of 512, whose attention takes 100 MB in each layer of BERT's."""

MOST_LABELS = 100
"""Of one text, to choose from."""

OF_TOKENS = 3
"""Axes of an output with something for each token."""


class SentText(NamedTuple):
    """A row that was sent, as it was read; `text` and `offsets` as of a `TextRow`, of the tokens of all its parts.

    lengths: tokens of each part, which is a row of the model. is_pair: of texts. labels: to choose from.
    """

    text: str
    offsets: Sequence[tuple[int, int]]
    lengths: tuple[int, ...]
    is_pair: bool = False
    labels: Sequence[str] = ()


class JoinedParts:
    """Joins what a model gave of texts. Its methods are those of an `OutputJoin`.

    finds_places: whether an answer says where in the text it is.
    """

    def __init__(self, steps: TextSteps, declared: ModelSteps, model: ModelSpec) -> None:
        """Raises LoadFailed: with a hypothesis, an output does not have classes, or not the one that it follows."""
        self._steps = steps
        self._outputs = declared.outputs
        self._ids = next((each for each in model.inputs if each.name == steps.ids), None)
        self._has_mask = any(each.name == steps.mask for each in model.inputs)
        self._is_zero_shot = steps.hypothesis is not None
        self._in_parts = steps.windows or self._is_zero_shot
        self.finds_places = any(kind_of(each) == "tags" for each in declared.outputs.values())
        if self._is_zero_shot:
            for each in model.outputs:
                self._check_classes(each)

    def spec(self, model: ModelSpec) -> ModelSpec:
        """With a hypothesis, outputs have a score for each label that is sent."""
        if not self._is_zero_shot:
            return model
        outputs = tuple(
            replace(each, shape=(each.shape[0], MOST_LABELS)) if each.name in self._outputs else each
            for each in model.outputs
        )
        return replace(model, outputs=outputs)

    def run(self, run: ModelRun, tensors: Tensors, places: Sequence[SentText]) -> list[Array]:
        """Run the model, on some rows at a time where there are many, or where it has no way to tell padding."""
        lengths = [length for each in places for length in each.lengths]
        rows, width = tensors[self._steps.ids].shape
        takes_one = self._ids is not None and self._ids.shape[0] == 1
        is_padded = not self._has_mask and len(set(lengths)) > 1 and self._is_open
        most = 1 if takes_one or is_padded else max(MOST_TOKENS // max(width, 1), 1) if self._in_parts else rows
        if rows <= most:
            return run(tensors)
        found = [
            run({
                name: each[at : at + most, : lengths[at] if is_padded else width] for name, each in tensors.items()
            })
            for at in range(0, rows, most)
        ]  # fmt: skip
        return [_stacked(each) for each in zip(*found, strict=True)]

    def join(
        self, results: Mapping[str, Array], tensors: Tensors, places: Sequence[SentText]
    ) -> tuple[Mapping[str, Array], Tensors]:
        """Return outputs with a row for each text, and the model's attention mask of the same rows."""
        mask = tensors.get(self._steps.mask)
        counts = {ATTENTION_MASK: mask} if mask is not None else {}
        if self._is_zero_shot and places:
            parts = _Parts(places)
            return {
                name: self._chosen(name, each, places) if name in self._outputs else each[parts.firsts]
                for name, each in results.items()
            }, {}
        if not self._in_parts or all(len(each.lengths) == 1 for each in places):
            return results, {**tensors, **counts}
        parts = _Parts(places)
        joined = {name: self._of_windows(name, each, parts) for name, each in results.items()}
        return joined, {name: parts.in_line(each) for name, each in counts.items()}

    def bare(self, outputs: Sequence[Array], places: Sequence[SentText]) -> list[Array]:
        """Return the model's own outputs of the first part of each text."""
        if not places or all(len(each.lengths) == 1 for each in places):
            return list(outputs)
        return [each[_Parts(places).firsts] for each in outputs]

    # ---- private ----------------------------------------------------------------------------------------------------

    @property
    def _is_open(self) -> bool:
        return self._ids is not None and self._ids.shape[1] == DYNAMIC

    def _check_classes(self, output: TensorSpec) -> None:
        if output.name not in self._outputs:
            return
        classes = output.shape[1] if len(output.shape) == 2 else DYNAMIC
        if classes < 2 or (self._steps.entailment or 0) >= classes:
            raise LoadFailed(
                f"[output.{output.name}]: its shape is {list(output.shape)}; a hypothesis wants the scores of a model "
                "of entailment, [rows, 2 or more]"
            )

    def _chosen(self, name: str, array: Array, places: Sequence[SentText]) -> Array:
        """For each row the scores of its labels: how much the model says that the hypothesis follows.

        One label is right, so they add up to 1; with `sigmoid` several may be, and each is held against contradiction,
        as `transformers` does. Behind the last are NaNs.
        """
        if array.ndim != 2:
            raise RunFailed(f"the model gave {list(array.shape)} for hypotheses; wanted [rows, classes]")
        said = self._steps.entailment
        entailment = array.shape[1] - 1 if said is None else said
        follows = array[:, entailment].astype(np.float32, copy=False).reshape(len(places), -1)
        if self._outputs[name].sigmoid:
            against = array[:, -1 if entailment == 0 else 0].astype(np.float32, copy=False)
            follows = follows - against.reshape(len(places), -1)
        else:
            follows = np.exp(follows - follows.max(axis=1, keepdims=True))
            follows /= follows.sum(axis=1, keepdims=True)
        found: Array = np.full((len(places), MOST_LABELS), np.nan, np.float32)
        found[:, : follows.shape[1]] = follows
        return found

    def _of_windows(self, name: str, array: Array, parts: _Parts) -> Array:
        output = self._outputs.get(name, OutputSteps())
        if array.ndim == OF_TOKENS and output.pool == "cls":
            return parts.mean(array[:, 0])[:, None]
        if array.ndim == OF_TOKENS:
            return parts.in_line(array)
        if array.dtype.kind != "f" or name not in self._outputs:
            return array[parts.firsts]
        return parts.best(array) if kind_of(output) == "number" and parts.are_pairs else parts.mean(array)


class _Parts:
    """Which rows of the model are of which text. firsts: the first of each."""

    def __init__(self, places: Sequence[SentText]) -> None:
        counts = [len(each.lengths) for each in places]
        self._most = max(counts)
        self.firsts: npt.NDArray[np.int64] = np.cumsum([0, *counts[:-1]])
        self._owners = np.repeat(np.arange(len(places)), counts)
        self._numbers = np.concatenate([np.arange(count) for count in counts])
        self._weights = np.array([length for each in places for length in each.lengths], np.float32)
        self.are_pairs = places[0].is_pair

    def mean(self, array: Array) -> Array:
        """The mean of each text's parts, [texts, …], each as heavy as it has tokens."""
        weights = self._weights.reshape(-1, *(1,) * (array.ndim - 1))
        sums = np.add.reduceat(array.astype(np.float32, copy=False) * weights, self.firsts)
        found: Array = sums / np.add.reduceat(weights, self.firsts)
        return found

    def best(self, array: Array) -> Array:
        """The largest of each text's parts."""
        found: Array = np.maximum.reduceat(array, self.firsts)
        return found

    def in_line(self, array: Array) -> Array:
        """The tokens of each text's parts one behind the other, [texts, tokens, …]; zeros behind the last."""
        _, width, *inner = array.shape
        found: Array = np.zeros((len(self.firsts), self._most, width, *inner), array.dtype)
        found[self._owners, self._numbers] = array
        return found.reshape(len(self.firsts), self._most * width, *inner)


def _stacked(arrays: Sequence[Array]) -> Array:
    """Rows of several runs together; those with fewer tokens have zeros behind them."""
    if len({each.shape[1:] for each in arrays}) == 1:
        return np.concatenate(arrays)
    width = max(each.shape[1] for each in arrays)
    return np.concatenate(
        [np.pad(each, [(0, 0), (0, width - each.shape[1]), *[(0, 0)] * (each.ndim - 2)]) for each in arrays]
    )
