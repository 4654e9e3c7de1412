"""The small models of the backends' contract, as PyTorch saves them. Imported only where torch is installed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from edge_runtime.backends.base import Instance, LoadOptions, Probe
from edge_runtime.backends.registry import backend
from edge_runtime.model_spec import ModelSpec, TensorSpec
from tests.models.onnx_models import mlp_weights

DTYPES = {
    "BOOL": torch.bool, "UINT8": torch.uint8, "UINT16": torch.uint16, "UINT32": torch.uint32, "UINT64": torch.uint64,
    "INT8": torch.int8, "INT16": torch.int16, "INT32": torch.int32, "INT64": torch.int64, "FP16": torch.float16,
    "FP32": torch.float32, "FP64": torch.float64, "BF16": torch.bfloat16,
}  # fmt: skip


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first, second = mlp_weights()
        self.first, self.second = torch.nn.Buffer(torch.tensor(first)), torch.nn.Buffer(torch.tensor(second))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": torch.relu(x @ self.first) @ self.second}


class RunningSum(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x.cumsum(0)}


class WhereNonzero(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"places": x.nonzero()}


class TwoInTwoOut(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": a + a, "twice": b + b}


class Identity(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x.clone()}


class Product(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": a @ b}


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.nn.Buffer(
            torch.tensor(np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32))
        )

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x @ self.matrix}


def made(
    model: str, rows: int | str = "rows", datatype: str = "FP32"
) -> tuple[torch.nn.Module, tuple[TensorSpec, ...]]:
    """One of the contract's models, and what it takes."""
    open_rows = -1 if rows == "rows" else int(rows)
    inputs: dict[str, tuple[Callable[[], torch.nn.Module], tuple[TensorSpec, ...]]] = {
        "mlp": (Mlp, (TensorSpec("x", "FP32", (open_rows, 16)),)),
        "running_sum": (RunningSum, (TensorSpec("x", "FP32", (-1, 4)),)),
        "where_nonzero": (WhereNonzero, (TensorSpec("x", "FP32", (-1, 2)),)),
        "two_in_two_out": (TwoInTwoOut, (TensorSpec("a", "FP32", (-1, 3)), TensorSpec("b", "INT64", (-1, 2)))),
        "identity": (Identity, (TensorSpec("x", datatype, (-1, 2)),)),
        "product": (Product, (TensorSpec("a", "FP32", (-1, 3)), TensorSpec("b", "FP32", (3, 4)))),
        "wide": (Wide, (TensorSpec("x", "FP32", (-1, 1024)),)),
    }
    make, specs = inputs[model]
    return make().eval(), specs


def script(model: str, folder: Path, **arguments: Any) -> Path:
    """Scripted: it says no shapes."""
    module, _ = made(model, **arguments)
    return save_script(module, folder)


def save_script(module: torch.nn.Module, folder: Path, *example: torch.Tensor, name: str = "model.pt") -> Path:
    """Save a module as TorchScript: traced with the example, scripted without one."""
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch keeps TorchScript for existing models
        saved = torch.jit.trace(module, example) if example else torch.jit.script(module)
        saved.save(str(folder / name))
    return folder / name


def program(model: str, folder: Path, **arguments: Any) -> Path:
    """Exported."""
    module, specs = made(model, **arguments)
    return save_program(module, folder, specs)


def save_program(module: torch.nn.Module, folder: Path, specs: tuple[TensorSpec, ...]) -> Path:
    """Export a module for inputs of these shapes."""
    folder.mkdir(parents=True, exist_ok=True)
    example = tuple(
        torch.zeros([3 if size == -1 else size for size in each.shape], dtype=DTYPES[each.datatype]) for each in specs
    )
    shapes = tuple(
        {axis: torch.export.Dim.DYNAMIC for axis, size in enumerate(each.shape) if size == -1} for each in specs
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(module, example, dynamic_shapes=shapes)
        torch.export.save(exported, str(folder / "model.pt2"))
    return folder / "model.pt2"


class DeclaringBackend:
    """The backend, for scripted modules whose model.toml says what they take."""

    def __init__(self) -> None:
        self._backend = backend("pytorch")
        self.declaration = self._backend.declaration
        self._declared: dict[Path, tuple[TensorSpec, ...]] = {}

    def probe(self) -> Probe:
        return self._backend.probe()

    def load(self, artifact: Path, options: LoadOptions) -> Instance:
        declared = ModelSpec(self._declared.get(artifact, ()), ())
        return self._backend.load(artifact, replace(options, declared=declared))

    def make(self, model: str, folder: Path, **arguments: Any) -> Path:
        artifact = script(model, folder, **arguments)
        _, self._declared[artifact] = made(model, **arguments)
        return artifact
