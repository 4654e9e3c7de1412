"""The child process of one `model.py`: load it, then answer runs until the daemon goes away.

Owns: the contract below. Started by python_process.py as `python -m edge_runtime.backends.python_child FD PARENT
FOLDER`; imports nothing of the daemon but tensors and errors, so that a model pays for itself only.

The contract of `model.py`:

    INPUTS = [{"name": "image", "datatype": "FP32", "shape": [-1, 64]}]     # wire datatypes; -1 is open
    OUTPUTS = [{"name": "scores", "datatype": "FP32", "shape": [-1, 10]}]

    def load(folder):            # optional; folder: pathlib.Path of the version. What it returns is kept as `model`.
    def infer(model, inputs):    # inputs: name -> numpy array, whole batches. Returns name -> array for every output.

Without `load`, or for those who prefer it, `infer(inputs)` takes the inputs alone. BYTES are object arrays of bytes,
BF16 is uint16. When axis 0 is -1 everywhere it is rows, and `infer` must give each row the same answer in any batch. An
exception in `infer` fails that run only. `print` and logging go to the daemon's log. One run at a time.
"""

from __future__ import annotations

import importlib.util
import inspect
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from edge_runtime.backends.parent_death import die_with
from edge_runtime.backends.python_frames import BrokenMessage, Named, receive_message, send_message
from edge_runtime.errors import EdgeRuntimeError, LoadFailed, RunFailed
from edge_runtime.model_spec import TensorSpec
from edge_runtime.tensors import Array, datatype, datatype_name

_Infer = Callable[[dict[str, Array]], Mapping[str, Any]]


def main(arguments: Sequence[str]) -> int:
    """Serve one folder over the socket that was inherited. Exit status 0 when the daemon closed it."""
    descriptor, parent, folder = int(arguments[0]), int(arguments[1]), Path(arguments[2])
    die_with(parent)
    with socket.socket(fileno=descriptor) as channel:
        try:
            module = _import_model(folder)
            inputs, outputs = _specs(module, "INPUTS"), _specs(module, "OUTPUTS")
            infer = _infer_of(module, folder)
        except Exception as error:  # noqa: BLE001  any code of the model's author; told to the daemon and logged
            traceback.print_exc()
            send_message(channel, {"error": _words(error)}, [])
            return 1
        send_message(channel, {"inputs": _described(inputs), "outputs": _described(outputs)}, [])
        try:
            while True:
                _, arrays = receive_message(channel, None)
                header, tensors = _answer(infer, arrays, outputs)
                send_message(channel, header, tensors)
        except BrokenMessage:
            return 0


def _answer(
    infer: _Infer, arrays: dict[str, Array], outputs: Sequence[TensorSpec]
) -> tuple[dict[str, Any], list[Named]]:
    """One run: its result or its error, as a message."""
    try:
        return {}, _checked(infer(arrays), outputs)
    except Exception as error:  # noqa: BLE001  any code of the model's author; it fails this run only
        traceback.print_exc()
        return {"error": _words(error)}, []


def _checked(results: Mapping[str, Any], outputs: Sequence[TensorSpec]) -> list[Named]:
    """The results in OUTPUTS' order. Raises RunFailed where they are not what OUTPUTS declares."""
    if not isinstance(results, Mapping):
        raise RunFailed(f"infer gave {type(results).__name__}; wanted a dict of arrays by name")
    tensors: list[Named] = []
    for spec in outputs:
        if spec.name not in results:
            raise RunFailed(f"infer gave no {spec.name!r}; got {', '.join(map(str, results))}")
        array = np.asarray(results[spec.name])
        got = datatype_name(array.dtype)
        if got != spec.datatype and not (spec.datatype == "BF16" and got == "UINT16"):
            raise RunFailed(f"infer gave {spec.name!r} as {got}, OUTPUTS says {spec.datatype}")
        if not spec.fits(array.shape):
            raise RunFailed(f"infer gave {spec.name!r} of shape {list(array.shape)}, OUTPUTS says {list(spec.shape)}")
        tensors.append((spec.name, spec.datatype, array))
    return tensors


def _import_model(folder: Path) -> ModuleType:
    sys.path.insert(0, str(folder))  # a model may have modules beside it
    found = importlib.util.spec_from_file_location("model", folder / "model.py")
    if found is None or found.loader is None:
        raise LoadFailed(f"{folder / 'model.py'} cannot be imported")
    module = importlib.util.module_from_spec(found)
    sys.modules["model"] = module
    found.loader.exec_module(module)
    return module


def _infer_of(module: ModuleType, folder: Path) -> _Infer:
    """`infer` as a function of the inputs alone, after `load` has run."""
    infer: Any = getattr(module, "infer", None)
    if not callable(infer):
        raise LoadFailed("model.py has no function infer(model, inputs)")
    load = getattr(module, "load", None)
    model = load(folder) if callable(load) else None
    if len(inspect.signature(infer).parameters) == 1:
        on_inputs: _Infer = infer
        return on_inputs
    return lambda inputs: infer(model, inputs)


def _specs(module: ModuleType, constant: str) -> list[TensorSpec]:
    """INPUTS or OUTPUTS. Raises LoadFailed with the form that is wanted."""
    try:
        specs = [
            TensorSpec(
                str(entry["name"]), datatype(entry["datatype"]).name, tuple(int(size) for size in entry["shape"])
            )
            for entry in getattr(module, constant)
        ]
    except (AttributeError, KeyError, TypeError, ValueError, EdgeRuntimeError) as error:
        wanted = f'{constant} = [{{"name": "x", "datatype": "FP32", "shape": [-1, 4]}}]'
        raise LoadFailed(f"model.py must say {wanted}; got {_words(error)}") from error
    if not specs or len({spec.name for spec in specs}) != len(specs):
        raise LoadFailed(f"{constant} of model.py must hold at least one tensor, each name once")
    return specs


def _described(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    return [{"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in specs]


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
