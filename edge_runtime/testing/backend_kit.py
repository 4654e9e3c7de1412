"""The kit of a backend for its contract: how to make the test models for it, and what it cannot do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.backends.base import Backend
from edge_runtime.tensors import Array

MODELS = {
    "mlp": "x FP32 [rows, 16] -> y FP32 [rows, 4] = relu(x @ first) @ second (`mlp_weights`). rows=N: axis 0 is N; "
    "output_shape: what the file says of y's shape, where it can",
    "wide": "x FP32 [rows, 1024] -> y FP32 [rows, 1024] through one matrix of 4 MiB",
    "running_sum": "x FP32 [steps, 4] -> y FP32 [steps, 4], summed along axis 0",
    "where_nonzero": "x FP32 [rows, 2] -> places INT64 [found, 2] of what is not 0",
    "two_in_two_out": "a FP32 [rows, 3], b INT64 [rows, 2] -> sum = a + a, twice = b + b",
    "identity": "x [rows, 2] -> y [rows, 2], of datatype=",
    "product": "a FP32 [n, k], b FP32 [l, m] -> y FP32 [n, m] = a @ b",
}
"""The test models. The first is needed; tests of others are skipped for a backend that has no such models."""


@dataclass(frozen=True)
class BackendKit:
    """One backend with one kind of artifact.

    make: (name in MODELS, folder, its arguments) -> the artifact, made there; None where the format holds no such
    model. corrupt: bytes that the artifact must not load. has_bytes: whether BYTES load; bytes_must_be_text: only
    UTF-8 does. has_bound: whether instances bind buffers. lacks: datatypes of which no such artifact loads. device,
    precision: what an instance reads back. measures_memory: whether it says at least the weights' size. cycles: loads
    in a row, after which memory is as before.
    """

    label: str
    backend: Backend
    make: Callable[..., Path | None]
    corrupt: tuple[bytes, ...]
    has_bytes: bool = True
    bytes_must_be_text: bool = False
    has_bound: bool = True
    lacks: tuple[str, ...] = ()
    device: str = "CPU"
    precision: str = "f32"
    measures_memory: bool = True
    cycles: int = 60

    def artifact(self, model: str, folder: Path, **arguments: Any) -> Path:
        """Make one of the test models; skips the test where the format holds no such model."""
        place = folder / model / "1"
        place.mkdir(parents=True, exist_ok=True)
        made = self.make(model, place, **arguments)
        if made is None:
            assert model != "mlp" or arguments, f"{self.label}: make('mlp', folder) must make a model"
            pytest.skip(f"{self.label} has no {model} {arguments or ''}")
        return made

    def need_bound(self) -> None:
        """Skip the test where instances bind no buffers."""
        if not self.has_bound:
            pytest.skip(f"{self.label} binds no buffers")


def mlp_weights() -> tuple[Array, Array]:
    """Return the weights of `mlp`: relu(x @ first) @ second."""
    random = np.random.default_rng(0)
    return random.normal(size=(16, 32)).astype(np.float32), random.normal(size=(32, 4)).astype(np.float32)


def mlp_input(rows: int) -> Array:
    """Return an input of `mlp`, [rows, 16]."""
    return np.random.default_rng(rows).normal(size=(rows, 16)).astype(np.float32)


def mlp_answer(x: Array) -> Array:
    """Return what `mlp` answers."""
    first, second = mlp_weights()
    answer: Array = np.maximum(x @ first, 0) @ second
    return answer
