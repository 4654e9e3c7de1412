"""What a file becomes as a tensor of a model's datatype and shape: .npy, .json, pictures.

Owns: how content is read and fitted to a spec; nothing is resized or converted silently where a value would be lost.
Opens no file and trusts none: whatever the content, what is raised is a TensorMismatch. Thread: any.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import PurePath
from typing import IO, Any

import numpy as np

from edge_runtime.client.pictures import PICTURE_SUFFIXES, picture
from edge_runtime.errors import TensorMismatch
from edge_runtime.model_spec import DYNAMIC, TensorSpec
from edge_runtime.tensors import Array, datatype

INPUT_SUFFIXES = (".npy", ".json", *PICTURE_SUFFIXES)
"""Files whose name says what they hold."""


def tensor_from_file(
    content: IO[bytes], name: str, spec: TensorSpec, note: Callable[[str], None] = lambda _: None
) -> Array:
    """One tensor for an input, from a file of this name (its suffix says the format, messages say the name).

    A row without its batch axis gets it, flat data the model's shape. note: told where numbers were converted (.npy).
    Raises TensorMismatch.
    """
    match PurePath(name).suffix.lower():
        case ".npy":
            return _from_npy(content, name, spec, note)
        case ".json":
            return tensor_from_json(json_value(content.read(), name), spec)
        case suffix if suffix in PICTURE_SUFFIXES:
            return picture(content, name, spec)
    raise TensorMismatch(f"{name} is none of {', '.join(INPUT_SUFFIXES)}")


def json_value(text: str | bytes, source: str) -> Any:
    """What a JSON text says. Raises TensorMismatch naming its source."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TensorMismatch(f"{source}: not JSON: {str(error)[:200]}") from None


def tensor_from_json(value: Any, spec: TensorSpec) -> Array:
    """JSON values as the model's datatype. Raises TensorMismatch for what does not fit."""
    kind = datatype(spec.datatype)
    try:
        if kind.name == "BYTES":
            return _with_rows(np.asarray(value, dtype=str).astype(object), spec)
        array = np.asarray(value)
        if array.dtype.kind not in "biuf" or (array.dtype.kind == "f" and kind.dtype.kind != "f"):
            raise TensorMismatch(f"input {spec.name!r}: {array.dtype} values, the model wants {spec.datatype}")
        typed: Array = np.array(value, dtype=kind.dtype)
        return _with_rows(typed, spec)
    except (ValueError, OverflowError) as error:
        raise TensorMismatch(f"input {spec.name!r}: {error}") from None


def filled_shape(spec: TensorSpec, elements: int) -> tuple[int, ...] | None:
    """The spec's shape with its one open dimension worked out; None where that is not the only way."""
    known = math.prod(length for length in spec.shape if length != DYNAMIC)
    open_ = spec.shape.count(DYNAMIC)
    if open_ > 1 or known == 0:
        return None
    return tuple(elements // known if length == DYNAMIC else length for length in spec.shape)


# ---- private --------------------------------------------------------------------------------------------------------


def _from_npy(content: IO[bytes], name: str, spec: TensorSpec, note: Callable[[str], None]) -> Array:
    try:
        array: Array = np.load(content, allow_pickle=False)
    except (ValueError, EOFError, MemoryError) as error:
        raise TensorMismatch(f"{name} is no .npy file of numbers or text: {error}") from None
    if not isinstance(array, np.ndarray):
        raise TensorMismatch(f"{name} holds several arrays; save each into its own .npy file")
    wanted = datatype(spec.datatype).dtype
    if spec.datatype != "BYTES" and array.dtype != wanted and np.can_cast(array.dtype, wanted, "same_kind"):
        note(f"input {spec.name!r}: {array.dtype} read as {spec.datatype}")
        array = array.astype(wanted)
    return _with_rows(array, spec)


def _with_rows(array: Array, spec: TensorSpec) -> Array:
    """One row that was given without its batch axis gets it; flat data gets the model's shape."""
    if array.ndim == len(spec.shape) - 1 and spec.has_dynamic_axis_0:
        return array[None]
    if array.ndim == 1 and len(spec.shape) > 1:
        lengths = filled_shape(spec, array.size)
        if lengths is not None and math.prod(lengths) == array.size:
            return array.reshape(lengths)
    return array
