"""A model's outputs as answers that a person understands, by its declared steps: classes, boxes, embeddings.

Owns: the arrays that answers.py describes. Pure: it runs no model. Called by steps_instance.py, in hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from edge_runtime.answers import kind_of
from edge_runtime.backends.picture_fit import Placed
from edge_runtime.errors import LoadFailed
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.steps import ModelSteps, OutputSteps
from edge_runtime.tensors import Array, Tensors


class AnswerSteps:
    """The answers of one model. needs: the outputs they are made of. specs: what comes out, one an answer."""

    def __init__(self, spec: ModelSpec, steps: ModelSteps) -> None:
        """Raises LoadFailed: a table names an output that is not there, or does not fit its shape."""
        unknown = set(steps.outputs) - {each.name for each in spec.outputs}
        if unknown:
            there = ", ".join(each.name for each in spec.outputs)
            raise LoadFailed(f"[output.{min(unknown)}]: the model has no such output; it has {there}")
        self._steps = steps
        self._outputs = tuple(each for each in spec.outputs if each.name in steps.outputs or not steps.outputs)
        self.needs = [each.name for each in self._outputs]
        self.specs = tuple(self._answer_spec(each) for each in self._outputs)

    def make(self, results: Mapping[str, Array], inputs: Tensors, places: Sequence[Placed]) -> list[Array]:
        """The answers of one run, in the order of `specs`.

        results: by name, all that `needs` names. inputs: what the model was given. places: where each row's picture
        lies in it; empty where the model was given its own tensor.
        """
        del inputs, places
        return [self._answer(each, results[each.name]) for each in self._outputs]

    def _answer_spec(self, spec: TensorSpec) -> TensorSpec:
        output = self._steps.outputs.get(spec.name)
        if output is None:
            return spec
        match kind_of(output):
            case "classes":
                return TensorSpec(spec.name, "FP32", (DYNAMIC, min(output.top_k, _last(spec)), 2))
            case "embedding":
                return TensorSpec(spec.name, "FP32", (DYNAMIC, _last(spec)))
            case kind:
                raise LoadFailed(f'[output.{spec.name}]: answer = "{kind}" is not built yet')

    def _answer(self, spec: TensorSpec, array: Array) -> Array:
        output = self._steps.outputs.get(spec.name)
        if output is None:
            return array
        rows: npt.NDArray[np.float32] = array.reshape(array.shape[0], -1).astype(np.float32)
        if kind_of(output) == "embedding":
            vectors: Array = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
            return vectors
        return _classes(rows, output)


def _classes(rows: npt.NDArray[np.float32], output: OutputSteps) -> Array:
    """FP32 [rows, top, 2]: index and score, best first."""
    is_probability = rows.min() >= 0.0 and rows.max() <= 1.0 + 1e-3
    if output.softmax or (output.softmax is None and not is_probability):
        rows = np.exp(rows - rows.max(axis=1, keepdims=True))
        rows = rows / rows.sum(axis=1, keepdims=True)
    best = np.argsort(np.negative(rows), axis=1, kind="stable")[:, : output.top_k]
    return np.stack([best.astype(np.float32), np.take_along_axis(rows, best, 1)], axis=2)


def _last(spec: TensorSpec) -> int:
    count = 1
    for side in spec.shape[1:]:
        count = DYNAMIC if DYNAMIC in (side, count) else count * side
    if count == DYNAMIC:
        raise LoadFailed(f"[output.{spec.name}]: its shape is {list(spec.shape)}; wanted known lengths behind axis 0")
    return count
