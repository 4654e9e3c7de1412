"""TensorRT: runs `model.onnx` as an engine that was built on this device.

Owns: what is asked of TensorRT for a model, and reading back what came of it. Builds nothing itself: an `EngineSource`
has the engine, or has it built while another backend serves. The libraries are imported by `probe` and `load` only.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from edge_runtime.backends.base import LoadOptions, Probe
from edge_runtime.backends.library_import import probe_library
from edge_runtime.backends.onnx_files import ArtifactFiles, check_onnx_files
from edge_runtime.backends.onnx_interface import declared_interface
from edge_runtime.backends.process_memory import watch_growth
from edge_runtime.backends.tensorrt_build import build_engine, check_dla, new_logger
from edge_runtime.backends.tensorrt_cuda import Cuda, find_gpus
from edge_runtime.backends.tensorrt_execution import EngineTensor, Execution, engine_tensors
from edge_runtime.backends.tensorrt_inspection import precision_run
from edge_runtime.backends.tensorrt_instance import LoadedEngine, TensorRtInstance
from edge_runtime.backends.tensorrt_library import FULL, Library, import_tensorrt
from edge_runtime.backends.tensorrt_order import EngineOrder, Gpu, engine_key, order_engine, parse_device
from edge_runtime.backends.tensorrt_precision import choose_typing
from edge_runtime.backends.tensorrt_shapes import plan_shapes
from edge_runtime.errors import BackendUnavailable, LoadFailed, NotBuiltYet, RunFailed
from edge_runtime.model_spec import ModelSpec, TensorSpec

_CHUNK_BYTES = 1 << 20

FOREIGN = ("model.plan", "model.engine", "model.trt")
"""Engines that somebody brings: named here so that the reason they are not loaded is told."""


class EngineSource(Protocol):
    """Where engines come from."""

    def engine(self, order: EngineOrder, key: str) -> bytes:
        """The engine that is kept under a key. Raises NotBuiltYet (it is being built), LoadFailed (it cannot be)."""
        ...

    def wait(self, key: str, stop: threading.Event) -> bool:
        """Wait until it is not being built any more; False: `stop` was set before. Not on the loader's thread."""
        ...


class BuildHere:
    """Builds in this process, keeping nothing: for tools, where somebody waits for it."""

    def engine(self, order: EngineOrder, key: str) -> bytes:
        """See EngineSource."""
        del key
        return bytes(build_engine(order).engine)

    def wait(self, key: str, stop: threading.Event) -> bool:
        """See EngineSource: nothing is ever under way."""
        del key
        return not stop.is_set()


class TensorRtBackend:
    """Runs `model.onnx`; engines are never loaded from the models folder.

    options.device: GPU (default), GPU:1, DLA:0 (Xavier, Orin). options.precision: "" as exported (TF32 off), f16 and
    bf16 where the version can lower a model, int8 for one that holds it. options.max_rows: most rows of a run, 32
    where it is not said. options.extra: see tensorrt_order.KNOWN_OPTIONS; those shared with ONNX Runtime's provider
    have trtexec's names. engines: None builds in this process. gpus: what `find_gpus` would find.
    """

    name = "tensorrt"
    artifacts = ("model.onnx", *FOREIGN)

    def __init__(self, engines: EngineSource | None = None, gpus: Callable[[], Sequence[Gpu]] | None = None) -> None:
        self._engines: EngineSource = engines or BuildHere()
        self._gpus = gpus or find_gpus

    def probe(self) -> Probe:
        """See Backend.probe. Devices are the GPUs that CUDA finds, and DLA where the board has some."""

        def find() -> tuple[str, tuple[str, ...]]:
            library = import_tensorrt()
            gpus = self._gpus()
            cores = _dla_cores(library) if any(gpu.is_integrated for gpu in gpus) else 0
            devices = [f"GPU:{gpu.index}" for gpu in gpus] + [f"DLA:{core}" for core in range(cores)]
            return f"{library.version}" if library.name == FULL else f"RTX {library.version}", tuple(devices)

        return probe_library(self.name, find)

    def load(self, artifact: Path, options: LoadOptions) -> TensorRtInstance:
        """See Backend.load. Raises NotBuiltYet too: the engine is being built, and `load` will succeed when it is."""
        wanted = self._want(artifact, options)
        engine = self._engines.engine(wanted.order, wanted.key)
        try:
            return TensorRtInstance(_load_engine(wanted, engine))
        except RunFailed as error:  # no memory left on the GPU, most likely
            raise LoadFailed(error.message) from error

    def prepare(self, artifact: Path, options: LoadOptions, stop: threading.Event) -> None:
        """See Compiler."""
        wanted = self._want(artifact, options)
        while True:
            try:
                self._engines.engine(wanted.order, wanted.key)
            except NotBuiltYet:
                if not self._engines.wait(wanted.key, stop):
                    return
            else:
                return

    def _want(self, artifact: Path, options: LoadOptions) -> _Wanted:
        """What to build, with everything that is sure to fail found now rather than in minutes."""
        files, declared = _check(artifact)
        library = import_tensorrt()
        index, dla_core = parse_device(options.device)
        gpus = self._gpus()
        gpu = next((each for each in gpus if each.index == index), None)
        if gpu is None:
            raise BackendUnavailable(
                f"there is no GPU {index}; CUDA finds {', '.join(str(each.index) for each in gpus)}"
            )
        # A DLA takes shapes of one size only, and a request of one row always fits.
        max_rows = 1 if dla_core is not None else options.max_rows
        order = order_engine(
            str(artifact.absolute()),
            (library.name, library.version),
            options.precision,
            plan_shapes(declared.inputs, max_rows, options.extra),
            options.extra,
            gpu=gpu,
            dla_core=dla_core,
        )
        typing = choose_typing(options.precision, files, library.traits, library.title)
        check_dla(library, order, typing)
        key = engine_key(order, _digest(artifact, files), gpu)
        return _Wanted(library, gpu, order, key, declared, typing.precision)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a model asks for. declared: what it takes and gives; planned: the precision that it is built in."""

    library: Library
    gpu: Gpu
    order: EngineOrder
    key: str
    declared: ModelSpec
    planned: str


def _check(artifact: Path) -> tuple[ArtifactFiles, ModelSpec]:
    if artifact.suffix != ".onnx":
        raise LoadFailed(
            f"{artifact.name} is refused: an engine fits one GPU, driver and version of TensorRT, and is code of "
            "whoever built it. Put the model.onnx that it was made of there; its engine is built on this device"
        )
    files = check_onnx_files(artifact)
    declared = declared_interface(artifact)
    if not declared.outputs or not declared.inputs:
        raise LoadFailed(
            f"{artifact.name} has no {'outputs' if declared.inputs else 'inputs'}; TensorRT runs no such model"
        )
    return files, declared


def _load_engine(wanted: _Wanted, engine: bytes) -> LoadedEngine:
    """Make an engine of its bytes. Raises LoadFailed with TensorRT's reason."""
    library, gpu, order, declared = wanted.library, wanted.gpu, wanted.order, wanted.declared
    module = library.module
    cuda = Cuda(gpu)
    cuda.use()
    growth = watch_growth(len(engine))
    logger = new_logger(library)
    runtime = module.Runtime(logger)
    if order.dla_core is not None:
        runtime.DLA_core = order.dla_core
    loaded = runtime.deserialize_cuda_engine(engine)
    if loaded is None:
        raise LoadFailed(f"{library.title} cannot load the engine that it built: {logger.reason()}")
    context = loaded.create_execution_context()
    if context is None:
        raise LoadFailed(f"{library.title} cannot make an execution context: {logger.reason()}")
    most = {name: tuple(shapes[2]) for name, shapes in order.shapes.items()}
    inputs, outputs = engine_tensors(module, loaded, context, most)
    inspector = loaded.create_engine_inspector()
    information = inspector.get_engine_information(module.LayerInformationFormat.JSON)
    del context
    # RTX records graphs itself, where it can tell which of its kernels will be replaced.
    graphs = library.name == FULL and order.dla_core is None
    spec = _spec(declared, inputs, outputs, order)
    mine, theirs = _in_order(spec.inputs, inputs), _in_order(spec.outputs, outputs)
    buffers = sum(tensor.most_bytes for tensor in (*mine, *theirs))
    return LoadedEngine(
        spec=spec,
        inputs=mine,
        outputs=theirs,
        execution=lambda: Execution(cuda, loaded, mine, theirs, graphs=graphs),
        device=f"GPU:{gpu.index}" if order.dla_core is None else f"DLA:{order.dla_core}",
        precision=precision_run(information, wanted.planned),
        # Budgets are of the host's memory: a discrete GPU's own is not in them, a Jetson's is the same.
        memory_bytes=growth() + buffers + (_context_bytes(loaded) if gpu.is_integrated else 0),
        keep=(loaded, runtime, logger),
    )


def _spec(
    declared: ModelSpec, inputs: Sequence[EngineTensor], outputs: Sequence[EngineTensor], order: EngineOrder
) -> ModelSpec:
    """What the model declares, so that nothing changes for clients when an engine takes over, and the engine's bound.

    Raises LoadFailed: the engine has other tensors. Inputs that nothing uses are not in an engine, and none is made up.
    """
    for kind, wanted, there in (("input", declared.inputs, inputs), ("output", declared.outputs, outputs)):
        missing = {tensor.name for tensor in wanted} - {tensor.name for tensor in there}
        if missing:
            raise LoadFailed(f"the engine has no {kind} {min(missing)!r}; TensorRT left it out, since nothing uses it")
    if order.dla_core is not None:
        return ModelSpec(_one_row(declared.inputs), _one_row(declared.outputs))
    bounds = {name: shapes[2][0] for name, shapes in order.shapes.items() if shapes[2]}
    rows = [bounds[tensor.name] for tensor in declared.inputs if tensor.has_dynamic_axis_0 and tensor.name in bounds]
    return ModelSpec(declared.inputs, declared.outputs, min(rows, default=None))


def _one_row(tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """As a DLA takes them: one size only."""
    return tuple(
        replace(tensor, shape=(1, *tensor.shape[1:])) if tensor.has_dynamic_axis_0 else tensor for tensor in tensors
    )


def _in_order(wanted: Sequence[TensorSpec], there: Sequence[EngineTensor]) -> tuple[EngineTensor, ...]:
    by_name = {tensor.name: tensor for tensor in there}
    return tuple(by_name[tensor.name] for tensor in wanted)


def _context_bytes(engine: Any) -> int:
    """What one context takes of the GPU's memory; the name changed in TensorRT 10."""
    for name in ("device_memory_size_v2", "device_memory_size"):
        found = getattr(engine, name, None)
        if found is not None:
            return int(found)
    return 0


def _dla_cores(library: Library) -> int:
    if not library.traits.weak_typing:
        return 0
    logger = new_logger(library)
    runtime = library.module.Runtime(logger)
    return int(runtime.num_DLA_cores)


def _digest(artifact: Path, files: ArtifactFiles) -> str:
    """SHA-256 over the model and its data files, each with its name and length before it."""
    whole = hashlib.sha256()
    for path in (artifact, *(artifact.parent / location for location in files.locations)):
        part = hashlib.sha256()
        try:
            with path.open("rb", buffering=0) as file:
                while piece := file.read(_CHUNK_BYTES):
                    part.update(piece)
        except OSError as error:
            raise LoadFailed(f"cannot read {path}: {error.strerror}") from error
        name = b"" if path == artifact else str(path.relative_to(artifact.parent)).encode()
        whole.update(len(name).to_bytes(4, "little") + name + part.digest())
    return whole.hexdigest()
