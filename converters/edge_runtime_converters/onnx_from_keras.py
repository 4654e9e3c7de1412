"""A Keras model (`model.save`, .keras or .h5) to ONNX with an open batch axis, by Keras on PyTorch.

Owns: the calls of Keras. keras_files.py refuses files that may hold code before Keras is imported. Not by TensorFlow:
what that exports is a SavedModel, which OpenVINO serves as it is.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.errors import ConversionFailed
from edge_runtime.tensors import Array
from edge_runtime_converters.keras_files import EXTRA, check_keras, is_zip
from edge_runtime_converters.libraries import failing_as, import_library
from edge_runtime_converters.onnx_from_pytorch import import_torch, quiet
from edge_runtime_converters.options import Shapes
from edge_runtime_converters.original import Original
from edge_runtime_converters.output_files import whole


class KerasModel:
    """A model in Keras. An `Original`."""

    def __init__(self, keras: Any, torch: Any, model: Any) -> None:
        self.described = f"Keras {keras.__version__}"
        self._torch = torch
        self._model = model

    def run(self, inputs: Mapping[str, Array]) -> list[Array]:
        """Return the outputs in the converted model's order. Raises ConversionFailed."""
        return [array for _, array in self.named(inputs)]

    def named(self, inputs: Mapping[str, Array]) -> list[tuple[str, Array]]:
        """Return the outputs with their names: the keys of a dictionary, else the names of their layers."""
        with failing_as("Keras cannot run it"), self._torch.inference_mode():
            given = self._given([self._torch.from_numpy(np.array(array)) for array in inputs.values()])
            found = self._model(given, training=False)
        if isinstance(found, Mapping):
            return [(name, _array(found[name])) for name in sorted(found)]
        several = found if isinstance(found, Sequence) else [found]
        # A Sequential has no names of outputs; it is called by its last layer's, as any other model.
        names = getattr(self._model, "output_names", None) or [self._model.layers[-1].name]
        return list(zip(names, map(_array, several), strict=True))

    def inputs(self) -> dict[str, tuple[tuple[int | None, ...], str]]:
        """Return shape and datatype of each input, by its name."""
        return {each.name: (tuple(each.shape), str(each.dtype)) for each in self._model.inputs}

    def _given(self, tensors: list[Any]) -> Any:
        """Give inputs the structure that the model was made with."""
        structure = getattr(self._model, "input", None)
        if isinstance(structure, Mapping):
            return dict(zip(self.inputs(), tensors, strict=True))
        return tensors if isinstance(structure, (list, tuple)) else tensors[0]


def convert(source: Path, target: Path, shapes: Shapes) -> Original:
    """Write a Keras file as ONNX; returns the source, loaded. shapes: unused, the file holds them.

    Raises ConversionFailed: it may hold code, it is damaged, or Keras cannot export it.
    """
    check_keras(source)
    with tempfile.TemporaryDirectory(prefix="keras-") as folder:
        torch, keras = import_keras(folder)
        if keras.config.backend() != "torch":
            raise ConversionFailed(f"Keras was imported with {keras.config.backend()}; convert in a process of its own")
        named = Path(folder) / ("model.keras" if is_zip(source) else "model.h5")  # Keras goes by the suffix
        named.symlink_to(source.absolute())
        with failing_as(f"{source}: Keras {keras.__version__} cannot load it"), quiet():
            model = keras.saving.load_model(str(named), compile=False, safe_mode=True)
    original = KerasModel(keras, torch, model)
    with failing_as(f"{source}: its inputs are not known"):
        names = [name for name, _ in original.named(_zeros(original))]
    with failing_as(f"{source}: Keras {keras.__version__} cannot export it"), quiet(), whole(target) as output:
        model.export(str(output), format="onnx", verbose=False)
        _name_outputs(output, names)
    return original


def import_keras(home: str) -> tuple[Any, Any]:
    """Import PyTorch, and Keras that runs on it. home: a folder for Keras to write to. Raises ConversionFailed."""
    torch = import_torch()
    import_library("onnxscript", EXTRA)
    os.environ |= {"KERAS_BACKEND": "torch", "KERAS_HOME": home, "CUDA_VISIBLE_DEVICES": ""}
    return torch, import_library("keras", EXTRA)


def _zeros(model: KerasModel) -> dict[str, Array]:
    """Two rows of zeros: Keras exports only what was called, and takes a single row for a fixed length."""
    return {
        name: np.zeros([2, *(size or 1 for size in shape[1:])], kind) for name, (shape, kind) in model.inputs().items()
    }


def _array(tensor: Any) -> Array:
    found: Array = tensor.detach().cpu().numpy()
    return found


def _name_outputs(path: Path, names: Sequence[str]) -> None:
    """Give a graph's outputs these names: the exporter's are numbers that change with each change of a model."""
    onnx = import_library("onnx", EXTRA)
    model = onnx.load(str(path))
    graph = model.graph
    taken = {each.name for each in (*graph.input, *graph.initializer)} | {
        name for node in graph.node for name in node.output
    }
    renamed = {
        each.name: name
        for each, name in zip(graph.output, names, strict=True)
        if name not in taken and names.count(name) == 1
    }
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    for each in graph.output:
        each.name = renamed.get(each.name, each.name)
    onnx.save(model, str(path))


if __name__ == "__main__":
    from edge_runtime_converters.command import main

    sys.exit(main("onnx"))
