"""The range of shapes that an engine is built for: one optimisation profile.

Owns: the rule that makes it of the model's declared shapes, the most rows of a run, and the owner's options. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edge_runtime.errors import LoadFailed
from edge_runtime.model_spec import DYNAMIC, TensorSpec

ENGINE_ROWS = 32
"""Most rows of a run where nobody says it. Memory for activations grows with it: ResNet-50 in f32 keeps some 10 MB a
row, and a Jetson shares that memory with its CPU."""

TUNED_ROWS = 8
"""The rows that kernels are chosen for, unless said otherwise: what forms under load on a device, not the largest."""

OPTIONS = ("min_shapes", "opt_shapes", "max_shapes")
"""In trtexec's words and form: `ids:1x1,mask:1x1`."""

_MAX_DIMENSION = (1 << 31) - 1
_ENTRY = re.compile(r"(?P<name>.+):(?P<shape>\d+(x\d+)*)")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShapeRange:
    """Smallest, tuned-for and largest shape of one input."""

    least: Shape
    tuned: Shape
    most: Shape


def plan_shapes(
    inputs: Sequence[TensorSpec], max_rows: int | None, options: Mapping[str, str]
) -> dict[str, ShapeRange]:
    """The profile: a range for each input that is dynamic, nothing for those of fixed shape.

    Axis 0, where dynamic, is rows: 1 to `max_rows` (32). Another dynamic axis needs `min_shapes` and `max_shapes` in
    the options; `opt_shapes` defaults to the largest. Raises LoadFailed: an axis without bounds, an option for an input
    that is not there or that does not fit its shape.
    """
    given = {option: _parse(option, options.get(option, ""), inputs) for option in OPTIONS}
    rows = max_rows or ENGINE_ROWS
    return {
        tensor.name: _range_of(tensor, rows, given) for tensor in inputs if DYNAMIC in tensor.shape
    }  # fmt: skip


def _range_of(tensor: TensorSpec, rows: int, given: Mapping[str, Mapping[str, Shape]]) -> ShapeRange:
    least, tuned, most = (given[option].get(tensor.name) for option in OPTIONS)
    if not tensor.has_fixed_inner_shape and (least is None or most is None):
        shape = "x".join("?" if size == DYNAMIC else str(size) for size in tensor.shape)
        raise LoadFailed(
            f"input {tensor.name!r} leaves more than its rows open ({shape}), and an engine is built for a range of "
            f'shapes: say it in the options of model.toml, "tensorrt.min_shapes" = "{tensor.name}:'
            f'{_example(tensor, 1)}" and "tensorrt.max_shapes" = "{tensor.name}:{_example(tensor, 128)}"'
        )
    least = least or _with_rows(tensor, 1)
    most = most or _with_rows(tensor, max(rows, least[0]))
    tuned = tuned or (_with_rows(tensor, min(TUNED_ROWS, most[0])) if tensor.has_fixed_inner_shape else most)
    if not all(low <= middle <= high for low, middle, high in zip(least, tuned, most, strict=True)):
        shown = " <= ".join("x".join(map(str, shape)) for shape in (least, tuned, most))
        raise LoadFailed(f"input {tensor.name!r}: wanted min_shapes <= opt_shapes <= max_shapes, got {shown}")
    return ShapeRange(least, tuned, most)


def _with_rows(tensor: TensorSpec, rows: int) -> Shape:
    return tuple(rows if size == DYNAMIC else size for size in tensor.shape)


def _example(tensor: TensorSpec, size: int) -> str:
    return "x".join(
        str((1 if axis == 0 else size) if have == DYNAMIC else have) for axis, have in enumerate(tensor.shape)
    )


def _parse(option: str, text: str, inputs: Sequence[TensorSpec]) -> dict[str, Shape]:
    """`name:1x16,other:1x3` by name. Raises LoadFailed."""
    shapes: dict[str, Shape] = {}
    known = {tensor.name: tensor for tensor in inputs}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        found = _ENTRY.fullmatch(entry)
        if found is None:
            raise LoadFailed(
                f"option {option}: got {entry[:80]!r}, wanted NAME:1x3x224x224, several separated by commas"
            )
        name, shape = found["name"], tuple(int(size) for size in found["shape"].split("x"))
        tensor = known.get(name)
        if tensor is None:
            raise LoadFailed(f"option {option}: the model has no input {name[:80]!r}; it has {', '.join(known)}")
        if not tensor.fits(shape) or not all(1 <= size <= _MAX_DIMENSION for size in shape):
            raise LoadFailed(f"option {option}: {found['shape']} does not fit input {name!r}, which is {tensor.shape}")
        shapes[name] = shape
    return shapes
