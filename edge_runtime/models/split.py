"""Chooses the version for a request that names none, while a release answers a share of them (canary).

Owns: the count that spreads them evenly, and whether two versions can stand in for one another. Thread: any.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from edge_runtime.model_spec import DYNAMIC, TensorSpec
from edge_runtime.models.servable import Servable


class Split:
    """A percentage of requests for a candidate, the rest for the current version: at 5 % the 20th, the 40th and on."""

    def __init__(self, current: Servable, candidate: Servable, percent: float) -> None:
        self.current = current
        self.candidate = candidate
        self._share = percent / 100
        self._turns = count(1)

    def is_candidates_turn(self) -> bool:
        """Count one request; True when the candidate answers it."""
        turn = next(self._turns)  # atomic: a call into C
        return int(turn * self._share) > int((turn - 1) * self._share)


def why_not_alike(current: Servable, candidate: Servable) -> str | None:
    """Why the candidate cannot answer the current version's requests alike; None: it can."""
    if current.batches and not candidate.batches:
        return "rows were a batch, and are none now"
    if candidate.max_rows < current.max_rows:
        return f"a request may have {candidate.max_rows} rows, and might have {current.max_rows} before"
    return _difference("input", current.spec.inputs, candidate.spec.inputs) or _difference(
        "output", current.spec.outputs, candidate.spec.outputs
    )


def _difference(kind: str, before: Sequence[TensorSpec], now: Sequence[TensorSpec]) -> str | None:
    known = {tensor.name: tensor for tensor in now}
    if [tensor.name for tensor in before] != [tensor.name for tensor in now]:
        return f"{kind}s were {_names(before)}, and are {_names(now)}"
    for tensor in before:
        new = known[tensor.name]
        if new.datatype != tensor.datatype or not _takes(new.shape, tensor.shape):
            was, got = f"{tensor.datatype} {list(tensor.shape)}", f"{new.datatype} {list(new.shape)}"
            return f"{kind} {tensor.name!r} was {was}, and is {got}"
    return None


def _takes(new: Sequence[int], old: Sequence[int]) -> bool:
    """Whether every shape that fitted fits still."""
    return len(new) == len(old) and all(now in {DYNAMIC, before} for now, before in zip(new, old, strict=True))


def _names(tensors: Sequence[TensorSpec]) -> str:
    return ", ".join(tensor.name for tensor in tensors)
