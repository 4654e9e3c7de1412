"""Calls that nearly fit a model: what a caller should write instead, in numpy's words.

Pure. The daemon's refusal stays as it is; what is said here stands behind it.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edge_runtime.client.frames import Options
from edge_runtime.errors import TensorMismatch
from edge_runtime.model_spec import TensorSpec
from edge_runtime.tensors import Array, datatype, datatype_name

CHANNELS_FIRST, CHANNELS_LAST = (0, 3, 1, 2), (0, 2, 3, 1)


def checked_options(
    version: object, outputs: Sequence[str] | Mapping[str, Array] | None, timeout_ms: object, priority: object,
    *, timing: bool,
) -> Options:  # fmt: skip
    """The options of a call. A text as outputs is one name. Raises TypeError for values of another kind."""
    if outputs is not None:
        outputs = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    if type(timeout_ms) not in (float, int, type(None)):
        if isinstance(timeout_ms, bool) or not isinstance(timeout_ms, numbers.Real):
            raise TypeError(f"timeout_ms: got {timeout_ms!r}, wanted milliseconds as a number, or None")
        timeout_ms = float(timeout_ms)
    return Options(
        _whole_number("version", version, "a number such as 2, or None for the newest"),
        outputs,
        timeout_ms,  # type: ignore[arg-type]
        _whole_number("priority", priority, "1 (first) to 9, or 0 for the model's default") or 0,
        timing,
    )


def advised(error: TensorMismatch, inputs: Mapping[str, Array], metadata: Mapping[str, Any]) -> TensorMismatch:
    """The error, with what would fit the model behind it where an input nearly does.

    metadata: the model's, as a daemon tells it.
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


def _whole_number(name: str, value: object, wanted: str) -> int | None:
    if value is None or type(value) is int:
        return value
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: got {value!r}, wanted {wanted}") from None


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
