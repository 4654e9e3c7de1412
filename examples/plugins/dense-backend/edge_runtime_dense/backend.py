"""Loads and runs `model.dense`: a .npz file of w0, b0, w1, b1 …, each FP32, without pickles."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edge_runtime.backends.base import LoadOptions, Probe
from edge_runtime.errors import BackendUnavailable, LoadFailed, RunFailed
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.tensors import Array, Tensors
from edge_runtime_dense import BACKEND

DEVICE = "CPU"


class DenseBackend:
    """The backend. A backend of an accelerator opens its device in `probe` and `load`, and names its driver there."""

    declaration = BACKEND

    def probe(self) -> Probe:
        """Say that it is usable; one of a device says here which driver and firmware it found, or what is missing."""
        return Probe(BACKEND.name, is_available=True, version=np.__version__, devices=(DEVICE,))

    def load(self, artifact: Path, options: LoadOptions) -> DenseInstance:
        """Load one file. Raises LoadFailed: it is broken; BackendUnavailable: the device is not there."""
        if options.device not in ("", DEVICE):
            raise BackendUnavailable(f"dense: there is no device {options.device!r}; wanted {DEVICE}")
        try:
            with artifact.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                layers = [(arrays[f"w{i}"], arrays[f"b{i}"]) for i in range(len(arrays.files) // 2)]
            return DenseInstance(layers)
        except OSError as error:
            raise LoadFailed(f"{artifact}: {error.strerror or error}") from error
        except (ValueError, KeyError, EOFError, TypeError, AttributeError, zipfile.BadZipFile) as error:
            raise LoadFailed(f"{artifact}: not a .npz of w0, b0, w1, b1 …: {error}") from error


class DenseInstance:
    """One loaded model. x: FP32 [rows, inputs] -> y: FP32 [rows, outputs]."""

    backend, device, precision, concurrency = BACKEND.name, DEVICE, "f32", 4

    def __init__(self, layers: Sequence[tuple[Array, Array]]) -> None:
        """Raises ValueError: the layers do not fit together."""
        if not layers:
            raise ValueError("there is no layer")
        width = layers[0][0].shape[0] if layers[0][0].ndim == 2 else 0
        self.spec = ModelSpec((TensorSpec("x", "FP32", (-1, width)),), ())
        for weights, bias in layers:
            if (weights.dtype, bias.dtype) != (np.float32, np.float32) or weights.shape != (width, *bias.shape):
                raise ValueError(f"got weights {weights.shape} and bias {bias.shape} behind a width of {width}")
            width = bias.shape[0]
        self.spec = ModelSpec(self.spec.inputs, (TensorSpec("y", "FP32", (-1, width)),))
        self.memory_bytes = sum(array.nbytes for layer in layers for array in layer)
        self._layers: Sequence[tuple[Array, Array]] | None = layers

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """Run once. Raises RunFailed: x has another width, or the model is closed."""
        if self._layers is None:
            raise RunFailed("dense: the model is closed")
        y = np.asarray(inputs["x"])
        try:
            for i, (weights, bias) in enumerate(self._layers):
                y = (np.maximum(y, 0) if i else y) @ weights + bias
        except ValueError as error:
            raise RunFailed(f"dense: {error}") from error
        if y.ndim != 2:
            raise RunFailed(f"dense: x has shape {np.shape(inputs['x'])}, wanted [rows, width]")
        return [y] if outputs is None else [y for _ in outputs]

    def bind(self, max_rows: int) -> None:
        """Bind nothing: it runs in hosts."""

    def close(self) -> None:
        """Free the weights."""
        self._layers = None
