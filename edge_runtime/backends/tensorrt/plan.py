"""How an engine is built: its options, shapes and precision, and its key in the cache. Pure; imports no TensorRT.

Owns: the options of a model, the rule for the range of shapes (one optimisation profile), the table of precisions, and
the key, which holds everything that an engine depends on. Precision is never lowered unless asked for, and never
silently kept higher: a precision that a version cannot run is an error with advice.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from edge_runtime.backends.base import BuildOrder
from edge_runtime.backends.model_files import ArtifactFiles
from edge_runtime.backends.tensorrt import BACKEND
from edge_runtime.backends.tensorrt.library import Traits
from edge_runtime.errors import BackendUnavailable, LoadFailed
from edge_runtime.model_spec import DYNAMIC, TensorSpec

FORMAT = 1
"""Of the key; raised when engines are built differently and no field of the plan shows it."""

WORKSPACE_BYTES = 1 << 30
"""Memory that one kernel may use beside the tensors. ONNX Runtime's TensorRT provider has the same default; TensorRT's
own default, the device's whole memory, would starve the models that serve meanwhile."""

SHAPE_OPTIONS = ("min_shapes", "opt_shapes", "max_shapes")
"""By trtexec's names and in its form: `ids:1x1,mask:1x1`."""

KNOWN_OPTIONS = (*SHAPE_OPTIONS, "tf32", "workspace_mb", "gpu_fallback", "optimization_level")

MAX_LEVEL = 5
"""IBuilderConfig.builder_optimization_level: 0 builds quickest, 5 searches longest for quick kernels; default 3."""


class Gpu(Struct, frozen=True):
    """The GPU that engines are built for and run on.

    index: CUDA's number. capability: "8.7". driver: its version, as the system says it. is_integrated: it shares
    memory with the CPU, as on a Jetson. target: another capability to build for ("SM89"), only with RTX; that engine
    does not run here.
    """

    index: int
    name: str
    capability: str
    driver: str
    is_integrated: bool = False
    target: str = ""


class EnginePlan(Struct, frozen=True, forbid_unknown_fields=True):
    """The sources of one engine; goes to the building process as JSON.

    shapes: smallest, tuned-for and largest shape by input. dla_core: the DLA's number, None for the GPU. device: the
    GPU's index. library, version: those that must build it.
    """

    artifact: str
    library: str
    version: str
    precision: str
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
    tf32: bool = False
    workspace_bytes: int = WORKSPACE_BYTES
    gpu_fallback: bool = False
    optimization_level: int | None = None
    device: int = 0
    dla_core: int | None = None
    target: str = ""


def plan_engine(
    artifact: str,
    library: tuple[str, str],
    precision: str,
    ranges: Mapping[str, ShapeRange],
    options: Mapping[str, str],
    *,
    gpu: Gpu,
    dla_core: int | None = None,
) -> EnginePlan:
    """An order from the options of a model. library: name, version. Raises LoadFailed for an option that is wrong."""
    for key in options:
        if key not in KNOWN_OPTIONS:
            import difflib

            near = difflib.get_close_matches(key, KNOWN_OPTIONS, 1)
            raise LoadFailed(
                f"TensorRT has no option {key!r}{f' (did you mean {near[0]}?)' if near else ''}; "
                f"known: {', '.join(KNOWN_OPTIONS)}"
            )
    level = _number(options, "optimization_level", 0, MAX_LEVEL)
    workspace_mb = _number(options, "workspace_mb", 1, 1 << 20)
    return EnginePlan(
        artifact=artifact,
        library=library[0],
        version=library[1],
        precision=precision,
        shapes={name: (each.least, each.tuned, each.most) for name, each in sorted(ranges.items())},
        tf32=_switch(options, "tf32"),
        workspace_bytes=WORKSPACE_BYTES if workspace_mb is None else workspace_mb << 20,
        gpu_fallback=_switch(options, "gpu_fallback"),
        optimization_level=level,
        device=gpu.index,
        dla_core=dla_core,
        target=gpu.target,
    )


def engine_key(plan: EnginePlan, model_digest: str, gpu: Gpu) -> str:
    """64 hexadecimal digits that change with anything the engine depends on: a changed driver or GPU builds anew.

    model_digest: of the model and its data. The model's path and the index of equal GPUs are left out.
    """
    depends_on = (
        FORMAT, model_digest, gpu.name, gpu.capability, gpu.driver,
        *(getattr(plan, field) for field in plan.__struct_fields__ if field not in ("artifact", "device")),
    )  # fmt: skip
    return hashlib.sha256(msgspec.json.encode(depends_on)).hexdigest()


def order_of(plan: EnginePlan, key: str) -> BuildOrder:
    """Return the order for an engine. key: of `engine_key`."""
    return BuildOrder(BACKEND.name, plan.artifact, key, msgspec.json.encode(plan))


def plan_of(order: BuildOrder) -> EnginePlan:
    """Return the plan of an order, of the order's own file. Raises LoadFailed: it has none."""
    try:
        return replace(msgspec.json.decode(order.plan, type=EnginePlan), artifact=order.artifact)
    except msgspec.MsgspecError as error:
        raise LoadFailed(f"the order of an engine cannot be read: {error}") from error


def parse_device(device: str) -> tuple[int, int | None]:
    """`GPU`, `GPU:1`, `DLA`, `DLA:1` or "" as the GPU's index and the DLA's core. Raises BackendUnavailable."""
    kind, _, which = device.upper().partition(":")
    if kind in ("", "GPU", "CUDA", "DLA") and (not which or (which.isascii() and which.isdigit() and len(which) <= 3)):
        number = int(which or 0)
        return (0, number) if kind == "DLA" else (number, None)
    raise BackendUnavailable(f"TensorRT has no device {device!r}; wanted GPU, GPU:1, DLA:0 or DLA:1")


def _switch(options: Mapping[str, str], key: str) -> bool:
    value = options.get(key, "0")
    if value not in ("0", "1"):
        raise LoadFailed(f'option {key}: got {value[:40]!r}, wanted "0" or "1"')
    return value == "1"


def _number(options: Mapping[str, str], key: str, least: int, most: int) -> int | None:
    value = options.get(key)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 9 and least <= int(value) <= most):
        raise LoadFailed(f"option {key}: got {value[:40]!r}, wanted a whole number from {least} to {most}")
    return int(value)


ENGINE_ROWS = 32
"""Default for the most rows of a run. Memory for activations grows with it: ResNet-50 in f32 keeps some 10 MB a row,
and a Jetson shares that memory with its CPU."""

TUNED_ROWS = 8
"""Default for the rows that kernels are chosen for: batches that form under load on a device, not the largest."""

_MAX_DIMENSION = (1 << 31) - 1
_ENTRY = re.compile(r"(?P<name>.+):(?P<shape>\d+(x\d+)*)")

Shape = tuple[int, ...]


class ShapeRange(Struct, frozen=True):
    """Smallest, tuned-for and largest shape of one input."""

    least: Shape
    tuned: Shape
    most: Shape


def plan_shapes(
    inputs: Sequence[TensorSpec], max_rows: int | None, options: Mapping[str, str]
) -> dict[str, ShapeRange]:
    """The profile: a range for each dynamic input; inputs of fixed shape have none.

    Axis 0, where dynamic, is rows: 1 to `max_rows` (32). Another dynamic axis needs `min_shapes` and `max_shapes` in
    the options; `opt_shapes` defaults to the largest. Raises LoadFailed: an axis without bounds, an option for an
    unknown input or one that does not fit its shape.
    """
    given = {option: _parse(option, options.get(option, ""), inputs) for option in SHAPE_OPTIONS}
    rows = max_rows or ENGINE_ROWS
    return {
        tensor.name: _range_of(tensor, rows, given) for tensor in inputs if DYNAMIC in tensor.shape
    }  # fmt: skip


def _range_of(tensor: TensorSpec, rows: int, given: Mapping[str, Mapping[str, Shape]]) -> ShapeRange:
    least, tuned, most = (given[option].get(tensor.name) for option in SHAPE_OPTIONS)
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


_KEPT = ("", "f32")
"""Precisions that keep the model's own types, with f32 as f32 (TF32 is off unless an option turns it on)."""

_LOWERING = {"f16": "FP16", "bf16": "BF16"}
"""Precision -> the builder flag that lets a weakly typed network run in it."""


class Typing(Struct, frozen=True):
    """How a network is typed. is_strong: by the model's own types. flags: builder flags that allow lower ones.

    precision: the expected one, for the report until the built engine is inspected.
    """

    is_strong: bool
    flags: tuple[str, ...]
    precision: str


def choose_typing(precision: str, files: ArtifactFiles, traits: Traits, title: str) -> Typing:
    """How to type the network of a model. Pure.

    precision: "", "f32", "f16", "bf16" or "int8". title: the library, for messages. Raises LoadFailed: int8 that the
    model does not hold. BackendUnavailable: this version cannot run that precision.
    """
    exported = files.precision or "f32"
    if "bf16" in (precision, exported) and not traits.bf16:
        raise BackendUnavailable(f"{title} has no bf16; export the model in f32 or f16, or install TensorRT 10")
    if precision == "int8" and not files.holds_int8:
        raise LoadFailed(
            f"precision int8 was asked for, and the model holds {exported}: an engine runs in int8 where the model has "
            "quantise and dequantise nodes. `edge-runtime convert --to onnx --precision int8 --for-tensorrt` makes it; "
            "or leave precision out"
        )
    if precision in (*_KEPT, exported, "int8"):
        return _kept(files, exported, traits)
    if not traits.weak_typing:
        raise BackendUnavailable(
            f"{title} runs a model in the precision it was exported in: this one holds {exported}, and {precision} was "
            f"asked for. Put a model in {precision} beside it (`edge-runtime convert --precision {_long(precision)}`), "
            "or leave precision out"
        )
    flags = (_LOWERING[precision], *(("INT8",) if files.holds_int8 else ()))
    return Typing(is_strong=False, flags=flags, precision="mixed" if files.holds_int8 else precision)


def _kept(files: ArtifactFiles, exported: str, traits: Traits) -> Typing:
    """Keep the model's own types. A version without that flag is allowed the types that the model holds."""
    precision = "int8" if files.holds_int8 and exported == "mixed" else exported
    if traits.always_strong or traits.strong_flag:
        return Typing(is_strong=True, flags=(), precision=precision)
    flags = (
        *(("INT8",) if files.holds_int8 else ()),
        *(("FP16",) if exported == "f16" or (exported == "mixed" and not files.holds_int8) else ()),
    )
    return Typing(is_strong=False, flags=flags, precision=precision)


def _long(precision: str) -> str:
    return precision.replace("f", "fp", 1) if precision.startswith("f") else precision
