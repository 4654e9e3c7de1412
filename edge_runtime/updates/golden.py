"""A golden input and output as bytes, and whether another run's output is near enough.

Owns: the layout of `golden.bin` and the rule of comparison. Pure. A publisher writes its own with it, a device checks a
version with it before it serves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from edge_runtime.errors import TensorMismatch, Unsupported, UpdateError
from edge_runtime.tensors import Array, array_from_wire, array_to_wire, bf16_to_fp32, datatype_name
from edge_runtime.updates.manifest import Golden, TensorForm, Tolerance

TOLERANCES = {
    "f32": Tolerance(1e-3, 1e-4, exact=True),
    "f16": Tolerance(2e-2, 2e-2, exact=False),
    "bf16": Tolerance(5e-2, 5e-2, exact=False),
    "int8": Tolerance(5e-2, 5e-2, exact=False),
    "mixed": Tolerance(5e-2, 5e-2, exact=False),
}
"""By the precision read back after the load. The first three as in models/warmup.py; kernels for int8 round and
saturate differently from CPU to CPU (with and without VNNI), by about as much as bf16 rounds."""

DEFAULT_TOLERANCE = TOLERANCES["bf16"]

WRITTEN_TOLERANCES = {**TOLERANCES, "f32": Tolerance(1e-3, 1e-4, exact=False, begins_alike=("text",))}
"""Of what a language model writes. Its precision is that of its weights; a library may compute in another one. OpenVINO
does so in bf16 where a CPU has that (AVX512-BF16, AMX), and in f16 on ARM. A token is the highest of its scores: one of
two near ones is another there, and so is all behind it. Of 100 prompts, 27 had another text in f32 than in bf16 within
16 tokens, and none another first token (OpenVINO GenAI 2026.4, a Xeon with AMX, random weights, whose scores are the
nearest of all)."""

MAX_GOLDEN_BYTES = 64 << 20
"""Devices hold it in memory beside two versions of the model."""


class Packed(Struct, frozen=True):
    """Tensors as one run of bytes: their forms with concrete shapes, and the bytes of each."""

    forms: tuple[TensorForm, ...]
    lengths: tuple[int, ...]
    data: bytes


def pack(tensors: Mapping[str, Array], datatypes: Mapping[str, str] | None = None) -> Packed:
    """Pack tensors one after another, each as on the wire. datatypes: unknown to numpy (BF16 is uint16)."""
    said = datatypes or {}
    pieces = [bytes(array_to_wire(array)) for array in tensors.values()]
    forms = [
        TensorForm(name, said.get(name) or datatype_name(array.dtype), array.shape) for name, array in tensors.items()
    ]
    return Packed(tuple(forms), tuple(map(len, pieces)), b"".join(pieces))


def unpack(golden: Golden, data: bytes) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the inputs and outputs by name, read-only. Raises UpdateError: the bytes do not fit the manifest."""
    forms = (*golden.inputs, *golden.outputs)
    if len(forms) != len(golden.lengths) or sum(golden.lengths) != len(data):
        raise UpdateError(f"{golden.path}: {len(data)} bytes for {len(forms)} tensors; the manifest says otherwise")
    arrays: list[Array] = []
    start = 0
    for form, length in zip(forms, golden.lengths, strict=True):
        try:
            arrays.append(array_from_wire(form.datatype, form.shape, memoryview(data)[start : start + length]))
        except (TensorMismatch, Unsupported) as error:
            raise UpdateError(f"{golden.path}: {form.name!r}: {error.message}") from error
        start += length
    named = [(form.name, array) for form, array in zip(forms, arrays, strict=True)]
    count = len(golden.inputs)
    return dict(named[:count]), dict(named[count:])


class GoldenTensors(Struct, frozen=True):
    """A release's golden input and output by name, as on the wire, with the tolerance for each precision.

    min_agreement: the share of the rows of scores whose highest one must be the golden one's; 0: any.
    """

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    forms: tuple[TensorForm, ...]
    tolerance: Mapping[str, Tolerance]
    min_agreement: float = 0.0

    def tolerance_at(self, precision: str) -> Tolerance:
        """Return the tolerance at a precision: the publisher's own, else ours."""
        return self.tolerance.get(precision) or TOLERANCES.get(precision, DEFAULT_TOLERANCE)


def read_golden(golden: Golden, data: bytes, min_agreement: float = 0.0) -> GoldenTensors:
    """Return the tensors that a manifest describes and its file holds. Raises UpdateError: the two do not fit.

    min_agreement: as of `GoldenTensors`.
    """
    inputs, outputs = unpack(golden, data)
    return GoldenTensors(inputs, outputs, golden.outputs, golden.tolerance, min_agreement)


def golden_faults(golden: GoldenTensors, got: Mapping[str, Array], precision: str) -> list[str]:
    """Return a sentence for each output of the golden input that is wrong at a precision; [] where all are right."""
    found = differences(golden.forms, golden.outputs, got, golden.tolerance_at(precision))
    if found or not golden.min_agreement:
        return found
    rows, alike = count_agreements(golden.forms, golden.outputs, got)
    if not rows or alike >= golden.min_agreement * rows:
        return []
    bound = f"{golden.min_agreement:.1%}"
    return [f"the highest score is the golden one's in {alike} of {rows} rows; its signed bound is {bound}"]


def count_agreements(
    forms: Sequence[TensorForm], golden: Mapping[str, Array], got: Mapping[str, Array]
) -> tuple[int, int]:
    """Return the number of rows of scores, and of those whose highest score is where the golden one's is."""
    rows = alike = 0
    for form in forms:
        first, second = highest_scores(form, golden[form.name]), highest_scores(form, got[form.name])
        if first is not None and second is not None and first.shape == second.shape:
            rows += first.size
            alike += int(np.count_nonzero(first == second))
    return rows, alike


def highest_scores(form: TensorForm, array: Array) -> Array | None:
    """Return the place of the highest score of each row; None where an output holds no scores."""
    values = float_values(form.datatype, array)
    if values is None or values.ndim < 2 or values.shape[-1] < 2:
        return None
    highest: Array = np.argmax(values, axis=-1)
    return highest


def differences(
    forms: Sequence[TensorForm], golden: Mapping[str, Array], got: Mapping[str, Array], tolerance: Tolerance
) -> list[str]:
    """Return a sentence for each output that is not near the golden one.

    Floats: |got - golden| <= relative * |golden| + absolute * max |golden|; NaN is never near. Other datatypes must be
    equal where the tolerance is exact; shapes always.
    """
    return [found for form in forms if (found := _difference(form, golden[form.name], got.get(form.name), tolerance))]


def not_finite(forms: Sequence[TensorForm], tensors: Mapping[str, Array]) -> str | None:
    """Return the name of the first float tensor with NaN or infinite values: nothing is near those."""
    for form in forms:
        values = float_values(form.datatype, tensors[form.name]) if form.name in tensors else None
        if values is not None and not bool(np.isfinite(values).all()):
            return form.name
    return None


def float_values(datatype: str, array: Array) -> npt.NDArray[np.float64] | None:
    """Return the values of a float tensor in double precision, those of BF16 too; None for other datatypes."""
    if datatype == "BF16" and array.dtype == np.uint16:
        return bf16_to_fp32(array.astype(np.uint16)).astype(np.float64)
    return array.astype(np.float64) if array.dtype.kind == "f" else None


def _difference(form: TensorForm, golden: Array, got: Array | None, tolerance: Tolerance) -> str | None:
    if got is None:
        return f"{form.name}: is missing"
    if got.shape != golden.shape:
        return f"{form.name}: got shape {list(got.shape)}, wanted {list(golden.shape)}"
    wanted_values, got_values = float_values(form.datatype, golden), float_values(form.datatype, got)
    if wanted_values is None or got_values is None:
        return _other_values(form.name, golden, got, tolerance)
    if wanted_values.size == 0:
        return None
    magnitude = np.abs(wanted_values)
    allowed = tolerance.relative * magnitude + tolerance.absolute * magnitude.max()
    distance = np.abs(got_values - wanted_values)
    if bool((distance <= allowed).all()):
        return None
    bad = int(np.count_nonzero(~(distance <= allowed)))
    worst = float(np.nanmax(distance)) if np.isfinite(distance).any() else float("nan")
    return f"{form.name}: {bad} of {distance.size} values are too far from the golden ones, at most {worst:.3g} away"


def _other_values(name: str, golden: Array, got: Array, tolerance: Tolerance) -> str | None:
    """Return a sentence for whole numbers or texts that are not as the tolerance wants them."""
    if tolerance.exact:
        return None if np.array_equal(golden, got) else f"{name}: differs from the golden output"
    for wanted, written in zip(golden.flat, got.flat, strict=True) if name in tolerance.begins_alike else ():
        first, second = (_text_of(each)[:1] for each in (wanted, written))
        if first and first != second:
            return f"{name}: begins with {second!r}, the golden output with {first!r}"
    return None


def _text_of(element: str | bytes) -> str:
    return element if isinstance(element, str) else bytes(element).decode(errors="replace")
