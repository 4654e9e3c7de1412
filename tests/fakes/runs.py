"""Runs of models that are plain functions of arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge_runtime.scheduling.dispatcher import Run
from edge_runtime.scheduling.worker import join
from edge_runtime.tensors import Array


def run_of(function: Callable[[Sequence[Array]], list[Array]]) -> Run:
    """A run as the dispatcher calls it, of a function on the joined arrays."""
    return lambda parts, limit_s, alone: function(join(parts))
