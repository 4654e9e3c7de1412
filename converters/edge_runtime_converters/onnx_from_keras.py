"""A Keras model (`model.save`, .keras or .h5) to ONNX with an open batch axis, by Keras on PyTorch.

Owns: the calls of Keras, and before them the rule for layers that a file may have: Keras's own, and none that holds
Python code or reads other files. `safe_mode` of Keras alone was passed by in CVE-2025-1550, CVE-2025-8747,
CVE-2025-9905, CVE-2025-9906 and CVE-2025-49655: each names something that is not a layer, or a layer of the lists
below. Not by TensorFlow: what that exports is a SavedModel, which OpenVINO serves as it is.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.errors import ConversionFailed
from edge_runtime.tensors import Array
from edge_runtime_converters.libraries import failing_as, import_library
from edge_runtime_converters.onnx_from_pytorch import import_torch, quiet
from edge_runtime_converters.options import Shapes
from edge_runtime_converters.original import Original
from edge_runtime_converters.output_files import whole

EXTRA = "convert-keras"

MAX_CONFIG_BYTES = 64 << 20
"""Of the description of all layers; one of a thousand layers has 1 MB."""

_MODULES = frozenset(
    ("", "keras", "keras.layers", "keras.models", "keras.initializers", "keras.regularizers", "keras.constraints",
     "keras.dtype_policies", "keras.quantizers", "keras.src.models.functional", "keras.src.models.sequential")
)  # fmt: skip
"""Modules of Keras that have layers and what layers are made of; "" in the format of Keras 2, which names none."""

_CODE = frozenset(("Lambda", "__lambda__", "function", "TorchModuleWrapper", "TFSMLayer", "JaxLayer", "FlaxLayer"))
"""Python code, functions by name, or a program of another library."""

_READERS = frozenset(("StringLookup", "IntegerLookup", "TextVectorization", "Hashing", "IndexLookup"))
"""Layers of text, which may take their words from a file anywhere; none becomes ONNX."""

_ADVICE = "Nothing of it was run. Where it was made, model.export('FOLDER') writes a SavedModel, which OpenVINO serves"


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


def is_zip(source: Path) -> bool:
    """Return whether a file is in Keras's own format (.keras), rather than HDF5 (.h5)."""
    with source.open("rb") as file:
        return file.read(2) == b"PK"


def check_keras(source: Path) -> None:
    """Raise ConversionFailed unless all that a file has are layers of Keras, none of which runs what is in the file.

    HDF5 is read by h5py, which comes with Keras: only in a confined process.
    """
    config = _config_of(source)
    if isinstance(config, dict):
        config.pop("compile_config", None)  # losses and metrics, which are never read
    for each in _classes(config):
        name, module = str(each.get("class_name")), str(each.get("module") or "")
        registered = str(each.get("registered_name") or name)
        if name in _CODE:
            raise ConversionFailed(
                f"{source}: {_called(each)} is a {name}, which holds or names Python code. {_ADVICE}"
            )
        if name in _READERS:
            raise ConversionFailed(f"{source}: {_called(each)} is a {name}, which is not arithmetic. {_ADVICE}")
        if not name.isidentifier() or module not in _MODULES or registered != name:
            shown = f"{module}.{name}" if module else name
            raise ConversionFailed(
                f"{source}: {_called(each)} is {shown[:100]!r} ({registered[:100]!r}), which is not of Keras "
                f"itself, so it is somebody's Python code. {_ADVICE}"
            )


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


# ---- what a file would run -------------------------------------------------------------------------------------------


def _config_of(source: Path) -> Any:
    """Return the description of a model's layers. Raises ConversionFailed: damaged, or weights alone."""
    text = _zip_config(source) if is_zip(source) else _hdf5_config(source)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConversionFailed(
            f"{source}: the description of its layers is damaged ({error}); copy it again"
        ) from error


def _zip_config(source: Path) -> bytes:
    try:
        with zipfile.ZipFile(source) as archive, archive.open("config.json") as member:
            text = member.read(MAX_CONFIG_BYTES + 1)
    except (zipfile.BadZipFile, KeyError, OSError, ValueError, NotImplementedError, EOFError, RuntimeError) as error:
        raise ConversionFailed(f"{source}: a damaged Keras file ({error}); copy it again") from error
    if len(text) > MAX_CONFIG_BYTES:
        raise ConversionFailed(f"{source}: the description of its layers has more than {MAX_CONFIG_BYTES} bytes")
    return text


def _hdf5_config(source: Path) -> bytes:
    h5py = import_library("h5py", EXTRA)
    with failing_as(f"{source}: cannot be read as HDF5"), h5py.File(source, "r") as file:
        found = file.attrs.get("model_config")
    if not isinstance(found, (bytes, str)):
        raise ConversionFailed(
            f"{source}: holds weights alone, without a program; where it was made, model.save('model.keras')"
        )
    return found if isinstance(found, bytes) else found.encode()


def _classes(config: Any) -> Iterator[dict[str, Any]]:
    """Yield every object that names a class, however deep."""
    waiting = [config]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            if "class_name" in each:
                yield each
            waiting.extend(each.values())
        elif isinstance(each, list):
            waiting.extend(each)


def _called(entry: dict[str, Any]) -> str:
    """Name a layer by what its maker called it."""
    config = entry.get("config")
    name = config.get("name") if isinstance(config, dict) else None
    return f"its layer {name[:100]!r}" if isinstance(name, str) else "a part of it"


if __name__ == "__main__":
    from edge_runtime_converters.command import main

    sys.exit(main("onnx"))
