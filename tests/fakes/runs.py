"""Runs of models that are plain functions of arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge_runtime.request.worker import join
from edge_runtime.tensors import Array


class FunctionRunner:
    """Runs a function on the joined arrays, as an instance inside the daemon runs."""

    def __init__(self, function: Callable[[Sequence[Array]], list[Array]]) -> None:
        self._function = function

    def run_parts(self, parts: Sequence[Sequence[Array]], limit_s: float, *, alone: bool) -> list[Array]:
        return self._function(join(parts))

    def restore(self) -> None:
        """There is no host."""
