"""ONNX to a TensorRT engine, for other programs on the same GPU: edge-runtime builds its own of the ONNX model.

Owns: the engine's GPU and its range of shapes. The backend builds the engine, so that it equals a device's. An engine
fits one GPU, driver and version of TensorRT; TensorRT for RTX also builds for a GPU that is not present.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from edge_runtime.backends.base import BuildOrder, LoadOptions
from edge_runtime.backends.onnx.interface import declared_interface
from edge_runtime.backends.tensorrt.backend import TensorRtBackend
from edge_runtime.backends.tensorrt.build import build_engine
from edge_runtime.backends.tensorrt.cuda import find_gpus
from edge_runtime.backends.tensorrt.library import RTX, Library, import_tensorrt
from edge_runtime.backends.tensorrt.plan import ENGINE_ROWS, EnginePlan, Gpu, plan_engine, plan_shapes
from edge_runtime.errors import BackendError, BackendUnavailable, ConversionFailed
from edge_runtime.model_spec import DYNAMIC, TensorSpec
from edge_runtime_converters.onnx_source import check_source
from edge_runtime_converters.options import Shapes
from edge_runtime_converters.original import ServedArtifact
from edge_runtime_converters.output_files import whole

Tell = Callable[[float, str], None]
"""Gets the share done, and the phase by TensorRT's name."""


def convert(source: Path, target: Path, shapes: Shapes, *, gpu: str = "", tell: Tell = lambda *_: None) -> None:
    """Write an ONNX model as an engine, in the precision that the model holds.

    shapes: of inputs with more than their rows open; open rows are 1 to 32. gpu: a compute capability to build for
    ("SM89"), "" for the local GPU. Raises ConversionFailed; `target` is then unchanged.
    Thread: any; takes minutes, and gigabytes.
    """
    check_source(source)
    try:
        library = import_tensorrt()
        plan = _plan(source, shapes, library, _target(library, gpu) if gpu else _gpu_here(library))
        engine = build_engine(plan, tell).engine
    except BackendError as error:
        raise ConversionFailed(error.message) from error
    with whole(target) as output:
        output.write_bytes(engine)


def load(engine: Path, source: Path, shapes: Shapes) -> ServedArtifact | None:
    """Load an engine of `source` on the local GPU; None without a GPU. Raises ConversionFailed: it cannot be loaded."""
    try:
        find_gpus()
    except BackendUnavailable:
        return None
    backend = TensorRtBackend(_Built(engine.read_bytes()))
    try:
        options = LoadOptions(extra=_range(declared_interface(source).inputs, shapes))
        return ServedArtifact(backend.load(source, options), import_tensorrt().title)
    except BackendError as error:
        raise ConversionFailed(error.message) from error


class _Built:
    """A BuildSource that holds one built engine."""

    def __init__(self, engine: bytes) -> None:
        self._engine = engine

    def built(self, order: BuildOrder) -> bytes:
        del order
        return self._engine

    def wait(self, key: str, stop: threading.Event) -> bool:
        """Return at once: no build is ever under way."""
        del key
        return not stop.is_set()


def _plan(source: Path, shapes: Shapes, library: Library, gpu: Gpu) -> EnginePlan:
    inputs = declared_interface(source).inputs
    options = _range(inputs, shapes)
    ranges = plan_shapes(inputs, None, options)
    return plan_engine(str(source.absolute()), (library.name, library.version), "", ranges, options, gpu=gpu)


def _range(inputs: tuple[TensorSpec, ...], shapes: Shapes) -> dict[str, str]:
    """The backend's options for the given shapes of inputs with more than their rows open."""
    said = [shapes.get(tensor.name, tensor) for tensor in inputs if not tensor.has_fixed_inner_shape]
    for tensor in said:
        if DYNAMIC in tensor.shape[1:]:
            example = ",".join(["-1", *("128" if size == DYNAMIC else str(size) for size in tensor.shape[1:])])
            raise ConversionFailed(
                f"input {tensor.name} leaves more than its rows open, and an engine is built for known sizes: say them "
                f"with --shapes {tensor.name}={example}"
            )
    return {
        option: ",".join(f"{tensor.name}:{'x'.join(map(str, _with_rows(tensor, rows)))}" for tensor in said)
        for option, rows in (("min_shapes", 1), ("max_shapes", ENGINE_ROWS))
        if said
    }


def _with_rows(tensor: TensorSpec, rows: int) -> tuple[int, ...]:
    return tuple(rows if size == DYNAMIC else size for size in tensor.shape)


def _gpu_here(library: Library) -> Gpu:
    try:
        return find_gpus()[0]
    except BackendUnavailable as error:
        advice = (
            "; it builds for another GPU with --gpu and its compute capability: --gpu SM89"
            if library.name == RTX
            else "; build it on the device, or install TensorRT for RTX, which builds for a GPU that is not here"
        )
        raise ConversionFailed(f"{library.title} finds no GPU here: {error.message}{advice}") from error


def _target(library: Library, gpu: str) -> Gpu:
    """A GPU known only by its compute capability."""
    if library.name != RTX:
        raise ConversionFailed(f"{library.title} builds for the GPU that is there alone; leave --gpu out")
    numbers = re.fullmatch(r"(?:sm_?)?(\d+)\.?(\d)", gpu.lower())
    known = [name for name in dir(library.module.ComputeCapability) if re.fullmatch(r"SM\d+", name)]
    name = f"SM{numbers[1]}{numbers[2]}" if numbers else ""
    if numbers is None or name not in known:
        raise ConversionFailed(f"--gpu {gpu}: {library.title} builds for {', '.join(known)}")
    return Gpu(0, name, f"{numbers[1]}.{numbers[2]}", "", target=name)


if __name__ == "__main__":
    from edge_runtime_converters.command import main

    sys.exit(main("tensorrt"))
