"""What an engine is to be built of, and the name that it is kept under.

Owns: the options that a model may say, and the key: everything that an engine depends on. Pure; imports no TensorRT.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from edge_runtime.backends.tensorrt_shapes import OPTIONS as SHAPE_OPTIONS
from edge_runtime.backends.tensorrt_shapes import ShapeRange
from edge_runtime.errors import BackendUnavailable, LoadFailed

FORMAT = 1
"""Of the key: a change in how engines are built that the fields below do not show raises it."""

WORKSPACE_BYTES = 1 << 30
"""Memory that one kernel may use beside the tensors. ONNX Runtime's TensorRT provider has the same default; TensorRT's
own, all that the device has, would be taken from what serves meanwhile."""

KNOWN_OPTIONS = (*SHAPE_OPTIONS, "tf32", "workspace_mb", "gpu_fallback", "optimization_level")

MAX_LEVEL = 5
"""IBuilderConfig.builder_optimization_level: 0 is quickest to build, 5 looks longest for quick kernels; default 3."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU that engines are built for and run on.

    index: CUDA's number. capability: "8.7". driver: its version, as the system says it. is_integrated: it shares
    memory with the CPU, as on a Jetson. target: another capability that is built for ("SM89"), by RTX alone; then the
    engine cannot be run here.
    """

    index: int
    name: str
    capability: str
    driver: str
    is_integrated: bool = False
    target: str = ""


class EngineOrder(Struct, frozen=True, forbid_unknown_fields=True):
    """One engine to be built; goes to the building process as JSON.

    shapes: smallest, tuned-for and largest shape by input. dla_core: the DLA's number, None for the GPU. device: the
    GPU's index. library: what must be imported there, by name and version.
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


def order_engine(
    artifact: str,
    library: tuple[str, str],
    precision: str,
    ranges: Mapping[str, ShapeRange],
    options: Mapping[str, str],
    *,
    gpu: Gpu,
    dla_core: int | None = None,
) -> EngineOrder:
    """An order from the options of a model. library: name, version. Raises LoadFailed for an option that is wrong."""
    for key in options:
        if key not in KNOWN_OPTIONS:
            near = difflib.get_close_matches(key, KNOWN_OPTIONS, 1)
            raise LoadFailed(
                f"TensorRT has no option {key!r}{f' (did you mean {near[0]}?)' if near else ''}; "
                f"known: {', '.join(KNOWN_OPTIONS)}"
            )
    level = _number(options, "optimization_level", 0, MAX_LEVEL)
    workspace_mb = _number(options, "workspace_mb", 1, 1 << 20)
    return EngineOrder(
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


def engine_key(order: EngineOrder, model_digest: str, gpu: Gpu) -> str:
    """64 hexadecimal digits that change with anything the engine depends on: a changed driver or GPU builds anew.

    model_digest: of the model and its data. Where the model lies and which of two equal GPUs it is do not matter.
    """
    depends_on = (
        FORMAT, model_digest, gpu.name, gpu.capability, gpu.driver,
        *(getattr(order, field) for field in order.__struct_fields__ if field not in ("artifact", "device")),
    )  # fmt: skip
    return hashlib.sha256(msgspec.json.encode(depends_on)).hexdigest()


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
