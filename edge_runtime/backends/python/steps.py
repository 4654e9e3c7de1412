"""Python steps of a pipeline: functions of `steps.py`, imported once, and called in one host.

Owns: the contract below, which docs/pipelines.md describes for users; how a file of Python code is imported, and how
what its functions return is checked, for `model.py` too.

    def join(labels, boxes):        # a parameter for each of the step's `inputs`, by name
        return {"text": ...}        # an array for each of its `outputs`; with one output, the array alone

Arrays are numpy's, whole tensors; BYTES are object arrays of bytes, BF16 is uint16. An exception fails that request
only. `print` and logging go to the daemon's log. One call at a time, all on the main thread of the host, so that
functions may share what the module holds.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from edge_runtime.backends.base import DECODE_PICTURE, StepFunction
from edge_runtime.backends.python import BACKEND
from edge_runtime.errors import LoadFailed, RunFailed, UnreadablePicture, Unsupported
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.pictures.pictures import check_installed, open_picture
from edge_runtime.sandbox.process_memory import watch_growth
from edge_runtime.steps import Form
from edge_runtime.tensors import Array, Tensors, as_empty_datatype, datatype_name


def import_source(name: str, file: Path) -> ModuleType:
    """Import a file of Python code by a name; it may import modules beside it. Raises LoadFailed, and any exception."""
    sys.path.insert(0, str(file.parent))
    found = importlib.util.spec_from_file_location(name, file)
    if found is None or found.loader is None:
        raise LoadFailed("it cannot be imported")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def error_words(error: BaseException, folder: Path) -> str:
    """An exception in a line, with the place in the user's own code that it came through last, as `steps.py:12`.

    folder: where that code lies; where none of it was running, no place is named.
    """
    words = f"{type(error).__name__}: {error}"[:1000]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_relative_to(folder):
            return f"{words} ({file.relative_to(folder)}:{frame.lineno})"
    return words


def checked_output(spec: TensorSpec, results: Mapping[str, Any], function: str, declared: str) -> Array:
    """Return one output of what a function returned. Raises RunFailed: it differs from its declaration.

    declared: the words between what came and what is declared.
    """
    if spec.name not in results:
        raise RunFailed(f"{function} gave no {spec.name!r}; got {', '.join(map(str, results))}")
    array = as_empty_datatype(spec.datatype, np.asarray(results[spec.name]))
    try:
        got = datatype_name(array.dtype)
    except Unsupported as error:
        raise RunFailed(f"{function} gave {spec.name!r}: {error.message}") from None
    if got != spec.datatype and (spec.datatype, got) != ("BF16", "UINT16"):
        raise RunFailed(f"{function} gave {spec.name!r} as {got}{declared} {spec.datatype}")
    if not spec.fits(array.shape):
        raise RunFailed(f"{function} gave {spec.name!r} of shape {list(array.shape)}{declared} {list(spec.shape)}")
    return array


def load_functions(file: Path, functions: Sequence[StepFunction]) -> list[FunctionInstance]:
    """Import `steps.py` and find its functions; the first instance has the memory of all. Raises LoadFailed."""
    growth = watch_growth(0)
    is_own = all(each.name == DECODE_PICTURE for each in functions)
    try:
        module = None if is_own else import_source("steps", file)
    except Exception as error:
        traceback.print_exc()
        raise LoadFailed(f"{file}: {error_words(error, file.parent)}") from error
    found = [_find(module, file, each) for each in functions]
    first = growth()
    return [
        FunctionInstance(each, function, file.parent, 0 if number else first)
        for number, (each, function) in enumerate(zip(functions, found, strict=True))
    ]


class FunctionInstance:
    """One function as an instance: called once a run."""

    backend = BACKEND.name
    device = "CPU"
    precision = "f32"
    concurrency = 1

    def __init__(self, step: StepFunction, function: Callable[..., Any], folder: Path, memory_bytes: int) -> None:
        self.spec: ModelSpec = step.spec
        self.form = Form("tensor", answers=False)
        self.memory_bytes = memory_bytes
        self._name = step.name
        self._function = function
        self._folder = folder

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """Call the function once. Raises RunFailed: it raised, or its results are not what its `outputs` say."""
        try:
            given = self._function(**inputs)
        except UnreadablePicture:
            raise
        except Exception as error:
            traceback.print_exc()
            raise RunFailed(f"{self._name} failed: {error_words(error, self._folder)}") from error
        if not isinstance(given, Mapping):
            if len(self.spec.outputs) > 1:
                raise RunFailed(f"{self._name} gave {type(given).__name__}; wanted a dict of arrays by output")
            given = {self.spec.outputs[0].name: given}
        declared = "; its outputs say"
        results = {spec.name: checked_output(spec, given, self._name, declared) for spec in self.spec.outputs}
        return [results[spec.name] for spec in self.spec.outputs] if outputs is None else [results[n] for n in outputs]

    def bind(self, max_rows: int) -> None:
        """Return None: the function makes its own arrays."""

    def close(self) -> None:
        """Nothing: the module ends with its host."""

    def attach(self, call: object) -> None:
        """Nothing: a function calls no other model."""


def _decode_picture(picture: Array) -> Array:
    """Decode one picture, BYTES [1] -> UINT8 [1, height, width, 3], RGB. Raises UnreadablePicture."""
    if picture.size != 1:
        raise UnreadablePicture(f"{picture.size} pictures came; crops are cut out of one")
    data: bytes = picture.reshape(-1)[0]
    if data.isascii():  # JSON has only base64, which no picture is
        with contextlib.suppress(ValueError):
            data = base64.b64decode(data, validate=True)
    return open_picture(data, "rgb")[None]


def _find(module: ModuleType | None, file: Path, step: StepFunction) -> Callable[..., Any]:
    """Return a function that takes the step's inputs by name. Raises LoadFailed."""
    if step.name == DECODE_PICTURE:
        check_installed()
        return _decode_picture
    function = getattr(module, step.name, None)
    if not callable(function):
        raise LoadFailed(f"{file} has no function {step.name}")
    try:
        inspect.signature(function).bind(**dict.fromkeys(spec.name for spec in step.spec.inputs))
    except TypeError as error:
        names = ", ".join(spec.name for spec in step.spec.inputs)
        raise LoadFailed(f"{file}: {step.name} cannot be called with the inputs {names}: {error}") from None
    return function  # type: ignore[no-any-return]
