"""Calls that nearly fit a model: what a caller should write instead, in numpy's words.

Pure. The daemon's refusal stays as it is; what is said here stands behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edge_runtime.errors import TensorMismatch
from edge_runtime.model_spec import TensorSpec
from edge_runtime.tensors import Array, datatype, datatype_name

CHANNELS_FIRST, CHANNELS_LAST = (0, 3, 1, 2), (0, 2, 3, 1)


def advised(error: TensorMismatch, inputs: Mapping[str, Array], metadata: Mapping[str, Any]) -> TensorMismatch:
    """The error, with what would fit the model behind it where an input nearly does.

    metadata: the model's, as a daemon sends it.
    """
    specs = {
        str(spec["name"]): TensorSpec(str(spec["name"]), str(spec["datatype"]), tuple(map(int, spec["shape"])))
        for spec in metadata.get("inputs", ())
    }
    advice = [
        text for name, array in inputs.items() if name in specs for text in (_advice(name, array, specs[name]),) if text
    ]
    return TensorMismatch("; ".join([error.message, *advice])) if advice else error


# ---- private --------------------------------------------------------------------------------------------------------


def _advice(name: str, array: Array, spec: TensorSpec) -> str:
    if array.dtype.kind not in "biuf" or not datatype(spec.datatype).itemsize:
        return ""
    text, shaped = name, array
    for code, changed in _shapes(array, spec):
        text, shaped = name + code, changed
    wanted = datatype(spec.datatype).dtype
    if spec.datatype == "BF16" or datatype_name(array.dtype) == spec.datatype:
        pass
    elif spec.fits(shaped.shape):
        text += f".astype(np.{wanted.name})"
        if np.can_cast(array.dtype, wanted, "same_kind") and text == f"{name}.astype(np.{wanted.name})":
            text += ", or cast=True"
    return f"send {text}" if text != name and spec.fits(shaped.shape) else ""


def _shapes(array: Array, spec: TensorSpec) -> list[tuple[str, Array]]:
    """The first change of shape that makes an array fit, as code behind its name; none where it fits, or none does."""
    if spec.fits(array.shape):
        return []
    tries: list[tuple[str, Array]] = [("[None]", array[None])]
    if array.ndim == len(CHANNELS_FIRST):
        tries += [(f".transpose{axes}", array.transpose(axes)) for axes in (CHANNELS_FIRST, CHANNELS_LAST)]
    if array.ndim == len(CHANNELS_FIRST) - 1:
        tries += [(f"[None].transpose{axes}", array[None].transpose(axes)) for axes in (CHANNELS_FIRST, CHANNELS_LAST)]
    return next(([each] for each in tries if spec.fits(each[1].shape)), [])
