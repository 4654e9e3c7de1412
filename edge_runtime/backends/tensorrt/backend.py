"""TensorRT: runs `model.onnx` as an engine that was built on this device.

Owns: the plan of a model's engine, its loading, and reading back its precision. Builds nothing itself: an
`BuildSource` has the engine, or builds it while another backend serves. Only `probe` and `load` import the libraries.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from edge_runtime.backends.base import BuildOrder, BuildSource, LoadOptions, Probe
from edge_runtime.backends.library_import import probe_library
from edge_runtime.backends.model_files import ArtifactFiles
from edge_runtime.backends.onnx.files import check_onnx_files
from edge_runtime.backends.onnx.interface import declared_interface
from edge_runtime.backends.tensorrt import BACKEND
from edge_runtime.backends.tensorrt.build import build_engine, check_dla, new_logger
from edge_runtime.backends.tensorrt.cuda import Cuda, find_gpus
from edge_runtime.backends.tensorrt.instance import (
    EngineTensor,
    LoadedEngine,
    TensorRtInstance,
    engine_tensors,
)
from edge_runtime.backends.tensorrt.library import FULL, Library, import_tensorrt
from edge_runtime.backends.tensorrt.plan import (
    EnginePlan,
    Gpu,
    choose_typing,
    engine_key,
    order_of,
    parse_device,
    plan_engine,
    plan_of,
    plan_shapes,
)
from edge_runtime.errors import BackendUnavailable, LoadFailed, NotBuiltYet, RunFailed
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.sandbox.process_memory import watch_growth

_CHUNK_BYTES = 1 << 20

FOREIGN = ("model.plan", "model.engine", "model.trt")
"""Foreign engines, named here so that their refusal has a reason."""


class BuildHere:
    """Builds in this process and stores nothing: for tools, whose user waits."""

    def built(self, order: BuildOrder) -> bytes:
        """Build the engine. Raises LoadFailed, BackendUnavailable."""
        return bytes(build_engine(plan_of(order)).engine)

    def wait(self, key: str, stop: threading.Event) -> bool:
        """Return at once: no build is ever under way."""
        del key
        return not stop.is_set()


class TensorRtBackend:
    """Runs `model.onnx`; engines are never loaded from the models folder.

    options.device: GPU (default), GPU:1, DLA:0 (Xavier, Orin). options.precision: "" as exported (TF32 off), f16 and
    bf16 where the version can lower a model, int8 for one that holds it. options.max_rows: most rows of a run, 32
    by default. options.extra: tensorrt_plan.KNOWN_OPTIONS; those shared with ONNX Runtime's provider
    have trtexec's names. builds: the source of engines; None builds in this process. gpus: in place of `find_gpus`.
    """

    declaration = BACKEND

    def __init__(self, builds: BuildSource | None = None, gpus: Callable[[], Sequence[Gpu]] | None = None) -> None:
        self._builds: BuildSource = builds or BuildHere()
        self._gpus = gpus or find_gpus

    def probe(self) -> Probe:
        """Report the library, with the GPUs that CUDA finds and the board's DLA cores as devices."""

        def find() -> tuple[str, tuple[str, ...]]:
            library = import_tensorrt()
            gpus = self._gpus()
            cores = _dla_cores(library) if any(gpu.is_integrated for gpu in gpus) else 0
            devices = [f"GPU:{gpu.index}" for gpu in gpus] + [f"DLA:{core}" for core in range(cores)]
            return f"{library.version}" if library.name == FULL else f"RTX {library.version}", tuple(devices)

        return probe_library(BACKEND.name, find)

    def load(self, artifact: Path, options: LoadOptions) -> TensorRtInstance:
        """Load the engine of a model. Raises NotBuiltYet: it is being built, and `load` succeeds afterwards."""
        wanted = self._want(artifact, options)
        engine = self._builds.built(order_of(wanted.plan, wanted.key))
        try:
            return TensorRtInstance(_load_engine(wanted, engine))
        except RunFailed as error:  # no memory left on the GPU, most likely
            raise LoadFailed(error.message) from error

    def prepare(self, artifact: Path, options: LoadOptions, stop: threading.Event) -> None:
        """Wait until the engine is built, or `stop` is set. Raises LoadFailed, BackendUnavailable."""
        wanted = self._want(artifact, options)
        while True:
            try:
                self._builds.built(order_of(wanted.plan, wanted.key))
            except NotBuiltYet:
                if not self._builds.wait(wanted.key, stop):
                    return
            else:
                return

    def _want(self, artifact: Path, options: LoadOptions) -> _PlannedEngine:
        """Plan the engine; every certain failure shows now rather than minutes later."""
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
        plan = plan_engine(
            str(artifact.absolute()),
            (library.name, library.version),
            options.precision,
            plan_shapes(declared.inputs, max_rows, options.extra),
            options.extra,
            gpu=gpu,
            dla_core=dla_core,
        )
        typing = choose_typing(options.precision, files, library.traits, library.title)
        check_dla(library, plan, typing)
        key = engine_key(plan, _digest(artifact, files), gpu)
        return _PlannedEngine(library, gpu, plan, key, declared, typing.precision)


class _PlannedEngine(Struct, frozen=True):
    """A planned engine. declared: the model's inputs and outputs; planned: the precision that it is built in."""

    library: Library
    gpu: Gpu
    plan: EnginePlan
    key: str
    declared: ModelSpec
    planned: str


def _check(artifact: Path) -> tuple[ArtifactFiles, ModelSpec]:
    if artifact.suffix != ".onnx":
        raise LoadFailed(
            f"{artifact.name} is refused: an engine fits one GPU, driver and version of TensorRT, and is code of "
            "its builder. Put its model.onnx there instead; the engine is built on this device"
        )
    files = check_onnx_files(artifact)
    declared = declared_interface(artifact)
    if not declared.outputs or not declared.inputs:
        raise LoadFailed(
            f"{artifact.name} has no {'outputs' if declared.inputs else 'inputs'}; TensorRT runs no such model"
        )
    return files, declared


def _load_engine(wanted: _PlannedEngine, engine: bytes) -> LoadedEngine:
    """Load an engine from its bytes. Raises LoadFailed with TensorRT's reason."""
    library, gpu, plan, declared = wanted.library, wanted.gpu, wanted.plan, wanted.declared
    module = library.module
    cuda = Cuda(gpu)
    cuda.use()
    growth = watch_growth(len(engine))
    logger = new_logger(library)
    runtime = module.Runtime(logger)
    if plan.dla_core is not None:
        runtime.DLA_core = plan.dla_core
    loaded = runtime.deserialize_cuda_engine(engine)
    if loaded is None:
        raise LoadFailed(f"{library.title} cannot load the engine that it built: {logger.reason()}")
    context = loaded.create_execution_context()
    if context is None:
        raise LoadFailed(f"{library.title} cannot make an execution context: {logger.reason()}")
    most = {name: tuple(shapes[2]) for name, shapes in plan.shapes.items()}
    inputs, outputs = engine_tensors(module, loaded, context, most)
    inspector = loaded.create_engine_inspector()
    information = inspector.get_engine_information(module.LayerInformationFormat.JSON)
    del context
    # RTX records graphs itself, because it knows which of its kernels it will replace.
    graphs = library.name == FULL and plan.dla_core is None
    spec = _spec(declared, inputs, outputs, plan)
    mine, theirs = _in_order(spec.inputs, inputs), _in_order(spec.outputs, outputs)
    buffers = sum(tensor.most_bytes for tensor in (*mine, *theirs))
    return LoadedEngine(
        cuda=cuda,
        engine=loaded,
        spec=spec,
        inputs=mine,
        outputs=theirs,
        device=f"GPU:{gpu.index}" if plan.dla_core is None else f"DLA:{plan.dla_core}",
        precision=precision_run(information, wanted.planned),
        # Budgets count the host's memory: not a discrete GPU's own, but a Jetson's, which is the same.
        memory_bytes=growth() + buffers + (_context_bytes(loaded) if gpu.is_integrated else 0),
        graphs=graphs,
        keep=(runtime, logger),
    )


def _spec(
    declared: ModelSpec, inputs: Sequence[EngineTensor], outputs: Sequence[EngineTensor], plan: EnginePlan
) -> ModelSpec:
    """The model's declared spec with the engine's row bound, so that clients see no change when an engine is promoted.

    Raises LoadFailed: the engine lacks a tensor. TensorRT drops unused inputs, and they are not made up.
    """
    for kind, wanted, there in (("input", declared.inputs, inputs), ("output", declared.outputs, outputs)):
        missing = {tensor.name for tensor in wanted} - {tensor.name for tensor in there}
        if missing:
            raise LoadFailed(f"the engine has no {kind} {min(missing)!r}; TensorRT left it out, since nothing uses it")
    if plan.dla_core is not None:
        return ModelSpec(_one_row(declared.inputs), _one_row(declared.outputs))
    bounds = {name: shapes[2][0] for name, shapes in plan.shapes.items() if shapes[2]}
    rows = [bounds[tensor.name] for tensor in declared.inputs if tensor.has_dynamic_axis_0 and tensor.name in bounds]
    return ModelSpec(declared.inputs, declared.outputs, min(rows, default=None))


def _one_row(tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The specs with one row, the only size that a DLA takes."""
    return tuple(
        replace(tensor, shape=(1, *tensor.shape[1:])) if tensor.has_dynamic_axis_0 else tensor for tensor in tensors
    )


def _in_order(wanted: Sequence[TensorSpec], there: Sequence[EngineTensor]) -> tuple[EngineTensor, ...]:
    by_name = {tensor.name: tensor for tensor in there}
    return tuple(by_name[tensor.name] for tensor in wanted)


def _context_bytes(engine: Any) -> int:
    """The GPU memory of one context; the attribute's name changed in TensorRT 10."""
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


# ---- the precision of an engine --------------------------------------------------------------------------------------

_WORDS = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "f16", "half": "f16", "float16": "f16",
    "fp8": "f8", "int8": "int8", "fp4": "f4", "int4": "int4", "fp32": "f32", "float32": "f32", "float": "f32",
}  # fmt: skip
"""Name of a type in the inspector's JSON -> its precision, longer names before names that they contain.

A tensor has "Format/Datatype": "Row major linear FP16 format" in 8 and 10, "Datatype": "Half" in RTX, "DataType" in
11."""

_LOWEST_FIRST = ("f4", "int4", "int8", "f8", "bf16", "f16", "f32")

_COMPUTE = ("conv", "gemm", "matrix", "matmul", "fully", "mha", "attention", "rnn", "caskdeconv", "myelin", "kgen")
"""Words in the type of layers that compute rather than move data."""

_HEAVY = ("conv", "gemm", "matrix", "matmul", "fully", "mha", "attention", "rnn")
"""Those of them that take most time; the others count where there are none of these."""

INT8_SHARE = 0.75
"""Share of int8 compute layers from which a model is int8: quantisers leave the first or the last layer unchanged."""


def precision_run(information: str, planned: str) -> str:
    """The precision of an engine's compute layers, "mixed" where they differ; `planned` where it is unknown. Pure.

    information: `EngineInspector.get_engine_information(JSON)` of an engine built with detailed verbosity.
    """
    try:
        layers = json.loads(information)["Layers"]
    except (ValueError, KeyError, TypeError):
        return planned
    if not isinstance(layers, list):
        return planned
    described = [layer for layer in layers if isinstance(layer, Mapping)]
    for words in (_HEAVY, _COMPUTE):
        found = Counter(filter(None, (_of_layer(layer, words) for layer in described)))
        if found:
            (name, count), *others = found.most_common()
            return name if not others or (name == "int8" and count >= INT8_SHARE * found.total()) else "mixed"
    return planned


def _of_layer(layer: Mapping[str, Any], words: tuple[str, ...]) -> str:
    """The lowest precision among a compute layer's inputs; "" for other layers."""
    kind = f"{layer.get('LayerType', '')} {layer.get('ParameterType', '')}".lower()
    if not any(word in kind for word in words):
        return ""
    types = set(_types(layer.get("Inputs"))) or set(_types(layer.get("Outputs")))
    return next((precision for precision in _LOWEST_FIRST if precision in types), "")


def _types(tensors: Any) -> Iterator[str]:
    for tensor in tensors if isinstance(tensors, list) else ():
        if isinstance(tensor, Mapping):
            text = str(tensor.get("Format/Datatype") or tensor.get("Datatype") or tensor.get("DataType") or "").lower()
            found = next((precision for word, precision in _WORDS.items() if word in text), None)
            if found is not None:
                yield found
