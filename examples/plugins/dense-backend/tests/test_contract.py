"""The contract of a backend, held against this one: pytest tests/test_contract.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edge_runtime_dense.backend import DenseBackend

from edge_runtime.testing import BackendContract, BackendKit, mlp_weights


def make(model: str, folder: Path, **arguments: Any) -> Path | None:
    """Make a test model; None for those that dense layers cannot be."""
    if arguments or model not in ("mlp", "wide"):
        return None
    wide = np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32)
    layers = mlp_weights() if model == "mlp" else (wide,)
    weights = {f"w{i}": layer for i, layer in enumerate(layers)}
    biases = {f"b{i}": np.zeros(layer.shape[1], np.float32) for i, layer in enumerate(layers)}
    with (folder / "model.dense").open("wb") as file:
        np.savez(file, **weights, **biases)
    return folder / "model.dense"


class TestDense(BackendContract):
    @pytest.fixture
    def kit(self) -> BackendKit:
        corrupt = (b"", b"not a model", b"PK\x05\x06" + bytes(18), b"\x93NUMPY\x01\x00" + bytes(100))
        return BackendKit("dense", DenseBackend(), make, corrupt, has_bytes=False, has_bound=False)
