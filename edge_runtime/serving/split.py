"""Which of two versions answers a request that names none, while a release is tried on some of them (canary).

Owns: the count that spreads them evenly, and whether two versions can stand in for one another. Thread: any.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from edge_runtime.model_spec import DYNAMIC, TensorSpec
from edge_runtime.serving.servable import Servable


class Split:
    """So many percent of requests for a newcomer, the rest for the incumbent: at 5 % the 20th, the 40th and so on."""

    def __init__(self, incumbent: Servable, newcomer: Servable, percent: float) -> None:
        self.incumbent = incumbent
        self.newcomer = newcomer
        self._share = percent / 100
        self._turns = count(1)

    def is_newcomers_turn(self) -> bool:
        """Count one request, and say whose it is."""
        turn = next(self._turns)  # atomic: a call into C
        return int(turn * self._share) > int((turn - 1) * self._share)


def why_not_alike(incumbent: Servable, newcomer: Servable) -> str | None:
    """Why a request for the incumbent may not be one for the newcomer, or its answer not be read alike; None: it is."""
    if incumbent.batches and not newcomer.batches:
        return "rows were a batch, and are none now"
    if newcomer.max_rows < incumbent.max_rows:
        return f"a request may have {newcomer.max_rows} rows, and might have {incumbent.max_rows} before"
    return _difference("input", incumbent.spec.inputs, newcomer.spec.inputs) or _difference(
        "output", incumbent.spec.outputs, newcomer.spec.outputs
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
