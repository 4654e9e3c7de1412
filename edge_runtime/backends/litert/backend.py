"""LiteRT, the runtime of TensorFlow Lite: how a model becomes interpreters, and how they are run.

Owns: which signature is served, names and shapes, whether a model of one row takes several, an interpreter for each run
at a time, and reading back what computes. Only `probe` and `load` import the library, and of it the interpreter alone,
which needs no package but numpy: `CompiledModel` knows fewer datatypes, and computes by the same kernels.
"""

from __future__ import annotations

import ctypes
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from edge_runtime.backends.base import LoadOptions, Probe
from edge_runtime.backends.library_import import import_library, probe_library
from edge_runtime.backends.litert import BACKEND
from edge_runtime.backends.litert.tflite_names import DEFAULT_SIGNATURE, without_ports
from edge_runtime.backends.model_files import check_tflite_files
from edge_runtime.backends.open_rows import answers_alike, made_up_row
from edge_runtime.errors import BackendUnavailable, LoadFailed, RunFailed
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.sandbox.process_memory import watch_growth
from edge_runtime.tensors import Array, Tensors

_DATATYPES = {
    "bool": "BOOL", "bool_": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64",
    "int8": "INT8", "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "float32": "FP32",
    "float64": "FP64", "bfloat16": "BF16", "bytes_": "BYTES",
}  # fmt: skip
"""By the name of the scalar type that the library gives."""

_COMPUTE_OPERATORS = frozenset(
    ("BATCH_MATMUL", "CONV_2D", "CONV_3D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "LSTM", "SVDF", "TRANSPOSE_CONV",
     "UNIDIRECTIONAL_SEQUENCE_LSTM")
)  # fmt: skip
"""A model spends its time in these; their precision is the model's."""

_STATE_OPERATORS = frozenset(
    f"{kind}{name}" for name in ("LSTM", "RNN") for kind in ("", "UNIDIRECTIONAL_SEQUENCE_", "BIDIRECTIONAL_SEQUENCE_")
) | {"SVDF"}
"""They leave values in the interpreter for its next run."""

_ASSIGN = "ASSIGN_VARIABLE"
"""Leaves a value too, which nothing resets."""

_INT8_SHARE = 0.75
"""Share of compute operators in int8 from which on a model counts as int8; the first or the last often stay f32."""

_COPIES_BYTES = 1 << 30
"""Bound of the weights in all interpreters: each packs its own copy. A larger model has fewer runs at a time."""

_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, OverflowError, MemoryError)
"""Python's forms of the library's errors."""


class LiteRtBackend:
    """Runs `model.tflite`, on the CPU by XNNPACK and the library's own kernels, or by a delegate.

    options.extra: `signature`, the key of the one that is served; without it `serving_default`, else the first.
    options.delegate: a library that takes operators to an accelerator; those that it leaves run on the CPU.
    """

    declaration = BACKEND

    def probe(self) -> Probe:
        """Find the library. What a delegate finds shows at load."""

        def find() -> tuple[str, tuple[str, ...]]:
            import_litert()
            return str(import_library("ai_edge_litert", BACKEND).__version__), ("CPU",)

        return probe_library(BACKEND.name, find)

    def load(self, artifact: Path, options: LoadOptions) -> LiteRtInstance:
        """Make an interpreter for each run at a time, and read back device and precision."""
        content = _content(artifact)
        _check_options(options)
        interpreters = _Interpreters(import_litert(), artifact.name, content, options)
        growth = watch_growth(len(content))
        first = interpreters.make()
        device = _device_run(first, options)
        precision = _precision_run(first, options)
        runner = _Runner(first, _graph_of(first, artifact.name, options.extra.get("signature", "")))
        try:
            runner.prepare(runner.graph.file_shapes)
        except _ERRORS as error:
            raise LoadFailed(f"LiteRT cannot prepare {artifact.name}: {_reason(error)}") from error
        graph = _with_open_rows(runner) or _with_learnt_outputs(runner)
        # An accelerator has one queue; copies of weights are bounded.
        most = 1 if options.delegate else max(_COPIES_BYTES // len(content), 1)
        concurrency = min(max(options.concurrency, 1), most)
        runners = [_Runner(each, graph) for each in (first, *(interpreters.make() for _ in range(concurrency - 1)))]
        try:
            for each in runners:
                each.prepare(graph.file_shapes)
        except _ERRORS as error:
            raise LoadFailed(f"LiteRT cannot prepare {artifact.name}: {_reason(error)}") from error
        return LiteRtInstance(interpreters, runners, device=device, precision=precision, memory_bytes=growth())


class LiteRtInstance:
    """Interpreters of one model, one for each run that is on; runs release the GIL.

    Each run resizes its interpreter where it has other shapes than the one before: XNNPACK keeps its packed weights, so
    that takes 2 us for a tiny model and 0.1 ms for MobileNetV2, and no interpreter has to be kept for a number of rows.
    """

    backend = BACKEND.name

    def __init__(
        self,
        interpreters: _Interpreters,
        runners: Sequence[_Runner],
        *,
        device: str,
        precision: str,
        memory_bytes: int,
    ) -> None:
        self._graph = runners[0].graph
        self.spec = ModelSpec(
            tuple(each.spec for each in self._graph.inputs), tuple(each.spec for each in self._graph.outputs)
        )
        self.device = device
        self.precision = precision
        self.concurrency = len(runners)
        self.memory_bytes = memory_bytes
        self._interpreters: _Interpreters | None = interpreters  # None once closed
        self._free = deque(runners)
        self._positions = {tensor.name: index for index, tensor in enumerate(self.spec.outputs)}

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """Run once, on copies of the inputs."""
        if self._interpreters is None:
            raise RunFailed("the instance is closed")
        arrays = [inputs[tensor.name] for tensor in self.spec.inputs]
        for tensor, array in zip(self.spec.inputs, arrays, strict=True):
            if not tensor.fits(array.shape):  # the library would resize any dimension
                raise RunFailed(f"input {tensor.name!r} has shape {list(array.shape)}, wanted {list(tensor.shape)}")
        try:
            runner = self._free.pop()
        except IndexError:  # more callers than `concurrency`: slower, still right
            runner = _Runner(self._interpreters.make(), self._graph)
        try:
            results = runner.run(arrays)
        except _ERRORS as error:
            raise RunFailed(f"LiteRT: {_reason(error)}") from error
        finally:
            self._free.append(runner)
        return results if outputs is None else [results[self._positions[name]] for name in outputs]

    def bind(self, max_rows: int) -> None:
        """Return None: buffers are for models inside the daemon, and these run in hosts."""
        del max_rows

    def close(self) -> None:
        """Drop the interpreters."""
        self._interpreters = None
        self._free.clear()


def import_litert() -> ModuleType:
    """Import the library's interpreter. Raises BackendUnavailable."""
    import_library("ai_edge_litert", BACKEND)
    return import_library("ai_edge_litert.interpreter", BACKEND)


# ---- loading --------------------------------------------------------------------------------------------------------


class _GraphTensor(Struct, frozen=True):
    """An input or output of the served graph. dtype: the library's scalar type. size: its shape in the file."""

    spec: TensorSpec
    index: int
    dtype: Any
    size: tuple[int, ...]


class _Graph(Struct, frozen=True):
    """The served part of a file. subgraph: its number. keeps_state: a run would see values of the one before."""

    subgraph: int
    inputs: tuple[_GraphTensor, ...]
    outputs: tuple[_GraphTensor, ...]
    keeps_state: bool

    @property
    def file_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the inputs as the file has them: 1 for an open dimension."""
        return tuple(each.size for each in self.inputs)


class _Interpreters:
    """Makes interpreters over one copy of the file, which is read, not mapped: files are replaced while they serve."""

    def __init__(self, library: ModuleType, name: str, content: bytes, options: LoadOptions) -> None:
        self._library = library
        self._name = name
        self._content = content
        self._options = options

    def make(self) -> Any:
        """Make one. Raises LoadFailed, BackendUnavailable: the delegate cannot be loaded."""
        threads, delegates = self._options.threads, self._delegates()
        try:
            return self._library.Interpreter(
                model_content=self._content, num_threads=threads, experimental_delegates=delegates
            )
        except _ERRORS as error:
            raise LoadFailed(f"LiteRT cannot load {self._name}: {_reason(error)}") from error

    def _delegates(self) -> list[Any]:
        path = self._options.delegate
        if not path:
            return []
        try:
            # Looked at first: the library's class for it prints a traceback when one that was not loaded is freed.
            ctypes.CDLL(path).tflite_plugin_create_delegate  # noqa: B018
            return [self._library.load_delegate(path, dict(self._options.delegate_options))]
        except (OSError, AttributeError, *_ERRORS) as error:
            raise BackendUnavailable(f"LiteRT cannot load the delegate {path}: {_reason(error)}") from error


def _content(artifact: Path) -> bytes:
    """Read a file. Raises LoadFailed unless it is a regular one and begins as a TensorFlow Lite file does."""
    check_tflite_files(artifact)
    try:
        return artifact.read_bytes()
    except OSError as error:
        raise LoadFailed(f"cannot read {artifact}: {error.strerror}") from error


def _check_options(options: LoadOptions) -> None:
    """Raise LoadFailed for unknown options, BackendUnavailable for a device that only a delegate would be."""
    for key in options.extra:
        if key.startswith("delegate"):
            raise LoadFailed(
                f"option {key!r} names a library, which is code, and a model's options may not; [[backends]] of a "
                "profile or of config.toml may, as delegate"
            )
        if key != "signature":
            raise LoadFailed(f"LiteRT has no option {key!r}; known: signature")
    if options.device.upper() not in ("", "CPU") and options.device.upper() != _delegate_name(options.delegate):
        raise BackendUnavailable(
            f"LiteRT has no device {options.device!r}; it has CPU, and a delegate where [[backends]] names one"
        )


def _graph_of(interpreter: Any, name: str, wanted: str) -> _Graph:
    """Return the signature that is served, with its tensors in the graph's order. Raises LoadFailed."""
    signatures: Mapping[str, Any] = interpreter._get_full_signature_list()  # noqa: SLF001  the public one has no indices
    if wanted and wanted not in signatures:
        raise LoadFailed(f"{name} has no signature {wanted!r}; it has {', '.join(sorted(signatures)) or 'none'}")
    key = wanted or (DEFAULT_SIGNATURE if DEFAULT_SIGNATURE in signatures else next(iter(signatures), ""))
    native = interpreter._interpreter  # noqa: SLF001  the public calls know the first subgraph alone
    sides: list[tuple[_GraphTensor, ...]] = []
    try:
        subgraph = native.GetSubgraphIndexFromSignature(key) if key else 0
        for kind, order in (("inputs", native.InputIndices()), ("outputs", native.OutputIndices())):
            named = _in_order(signatures[key][kind], subgraph, order) if key else _by_tensor(native, order)
            sides.append(tuple(_graph_tensor(interpreter, subgraph, *each, name) for each in named))
        operators = {native.NodeName(index) for index in range(native.NumNodes())}
    except _ERRORS as error:
        raise LoadFailed(f"LiteRT cannot describe {name}: {_reason(error)}") from error
    inputs, outputs = sides
    if not outputs:
        raise LoadFailed(f"{name} has no outputs, so there is nothing to serve")
    if _ASSIGN in operators:
        raise LoadFailed(
            f"{name} keeps values from run to run ({_ASSIGN}), which one caller would see of another; convert it with "
            "its state as inputs and outputs"
        )
    keeps_state = subgraph != 0 or not operators.isdisjoint(_STATE_OPERATORS)  # only the first one's are listed
    return _Graph(subgraph, inputs, outputs, keeps_state=keeps_state)


def _in_order(named: Mapping[str, int], subgraph: int, order: Sequence[int]) -> list[tuple[str, int]]:
    """A signature's names and tensors, in the order of the first subgraph; the library sorts them by name."""
    places = {int(index): place for place, index in enumerate(order)} if subgraph == 0 else {}
    return sorted(named.items(), key=lambda each: places.get(each[1], len(places)))


def _by_tensor(native: Any, order: Sequence[int]) -> list[tuple[str, int]]:
    """Names of tensors, which may be empty or come twice: then the place is added."""
    names = without_ports([str(native.TensorName(int(index), 0)) for index in order])
    return [
        (name if name and names.count(name) == 1 else f"{name or 'tensor'}_{place}", int(index))
        for place, (name, index) in enumerate(zip(names, order, strict=True))
    ]


def _graph_tensor(interpreter: Any, subgraph: int, name: str, index: int, file: str) -> _GraphTensor:
    details = interpreter._get_tensor_details(index, subgraph)  # noqa: SLF001  as above
    kind = details["dtype"].__name__
    if kind not in _DATATYPES:
        raise LoadFailed(f"{file}: {name!r} is {kind}, which cannot be sent; wanted one of {', '.join(_DATATYPES)}")
    size = tuple(int(length) for length in details["shape"])
    shape = tuple(int(length) if length >= 0 else DYNAMIC for length in details["shape_signature"])
    parameters = details["quantization_parameters"]
    scales, zeros = parameters["scales"], parameters["zero_points"]
    quantisation = (float(scales[0]), int(zeros[0])) if len(scales) == len(zeros) == 1 else None
    spec = TensorSpec(name, _DATATYPES[kind], shape if len(shape) == len(size) else size, quantisation)
    return _GraphTensor(spec, index, details["dtype"], size)


def _with_open_rows(runner: _Runner) -> _Graph | None:
    """Open axis 0 of a graph of one row, where two rows in one run answer as each alone; None where they do not."""
    graph = runner.graph
    shapes = [each.spec.shape for each in (*graph.inputs, *graph.outputs)]
    if not graph.inputs or any(DYNAMIC in shape or shape[:1] != (1,) for shape in shapes):
        return None
    random = np.random.default_rng(0)
    rows = [[_made_up(each, random) for each in graph.inputs] for _ in range(2)]
    try:
        if not answers_alike(runner.run, rows):
            return None
    except _ERRORS:
        return None
    return replace(graph, inputs=_opened(graph.inputs), outputs=_opened(graph.outputs))


def _opened(tensors: Sequence[_GraphTensor]) -> tuple[_GraphTensor, ...]:
    return tuple(replace(each, spec=replace(each.spec, shape=(DYNAMIC, *each.spec.shape[1:]))) for each in tensors)


def _made_up(tensor: _GraphTensor, random: np.random.Generator) -> Array:
    """One row of an input."""
    if tensor.spec.datatype == "BYTES":
        return np.full(tensor.size, b"a", dtype=object)
    made = made_up_row(tensor.size, tensor.dtype, random, is_quantised=tensor.spec.quantisation is not None)
    return made.view(np.uint16) if tensor.spec.datatype == "BF16" else made


def _with_learnt_outputs(runner: _Runner) -> _Graph:
    """Open the dimensions of outputs that follow those of the inputs, where the file says that of the inputs alone."""
    graph = runner.graph
    if not any(DYNAMIC in each.spec.shape for each in graph.inputs):
        return graph
    found: list[list[tuple[int, ...]]] = []
    try:
        for length in (2, 3):
            shapes = [tuple(length if size == DYNAMIC else size for size in each.spec.shape) for each in graph.inputs]
            runner.prepare(shapes)
            found.append([runner.size_of(each) for each in graph.outputs])
    except _ERRORS:
        return graph  # lengths that must agree with one another; the file's word counts
    outputs = tuple(
        each
        if DYNAMIC in each.spec.shape or len(two) != len(three)
        else replace(each, spec=replace(each.spec, shape=_where_equal(two, three)))
        for each, two, three in zip(graph.outputs, *found, strict=True)
    )
    return replace(graph, outputs=outputs)


def _where_equal(two: Sequence[int], three: Sequence[int]) -> tuple[int, ...]:
    return tuple(one if one == other else DYNAMIC for one, other in zip(two, three, strict=True))


def _device_run(interpreter: Any, options: LoadOptions) -> str:
    """Name what runs the graph, before XNNPACK takes its part. Raises BackendUnavailable: the delegate took nothing."""
    if not options.delegate:
        return "CPU"
    native = interpreter._interpreter  # noqa: SLF001  the public calls read every tensor of every node
    if not any(native.NodeName(index) == "DELEGATE" for index in range(native.NumNodes())):
        raise BackendUnavailable(
            f"the delegate {options.delegate} took no operator of this model: compile the model for it, or leave it out"
        )
    return _delegate_name(options.delegate)


def _delegate_name(path: str) -> str:
    """The device's name: EDGETPU for libedgetpu.so.1."""
    return Path(path).name.partition(".")[0].removeprefix("lib").upper()


def _precision_run(interpreter: Any, options: LoadOptions) -> str:
    """The precision of most compute operators, as the file has them: LiteRT changes none.

    Raises LoadFailed: it is not quantised, and int8 is wanted. BackendUnavailable: another one is wanted.
    """
    kinds = Counter(_kinds(interpreter))
    name, count = kinds.most_common(1)[0] if kinds else ("f32", 0)
    held = name if len(kinds) < 2 or (name == "int8" and count >= _INT8_SHARE * kinds.total()) else "mixed"
    if options.precision in ("", "f32", held) or (options.precision == "int8" and kinds.keys() & {"int8", "mixed"}):
        return held
    if options.precision == "int8":
        raise LoadFailed(
            f"precision int8 was asked for, and the model computes in {held}: no backend quantises at load. Put a "
            "quantised model.int8.tflite beside it, or leave precision out"
        )
    raise BackendUnavailable(
        f"LiteRT runs a model in the precision that it was converted in, {held}, and cannot run it in "
        f"{options.precision}; convert it so, leave precision out, or use another backend"
    )


def _kinds(interpreter: Any) -> list[str]:
    """The precision of each compute operator of the first subgraph: of what it takes, then of its weights."""
    native, found = interpreter._interpreter, []  # noqa: SLF001  as above
    for node in range(native.NumNodes()):
        if native.NodeName(node) not in _COMPUTE_OPERATORS:
            continue
        types = [native.TensorType(int(index), 0) for index in native.NodeInputs(node)[:2] if index >= 0]
        names = [getattr(each, "__name__", "int4") for each in types]
        if names[:1] and names[0].startswith(("int", "uint")):
            found.append("int8")
        elif any(name.startswith(("int", "uint")) for name in names):
            found.append("mixed")
        else:
            found.append("f16" if "float16" in names[:1] else "f32")
    return found


def _reason(error: BaseException) -> str:
    """The library's message on one line, cut to 600 characters; it has none for tensors that no memory is left for."""
    return " ".join(str(error).split())[:600] or "it gives no reason; are its tensors too large for this memory?"


# ---- running --------------------------------------------------------------------------------------------------------


class _Runner:
    """An interpreter, and the shapes that it is prepared for. One run at a time."""

    def __init__(self, interpreter: Any, graph: _Graph) -> None:
        self.graph = graph
        self._interpreter = interpreter  # holds its delegates
        # The public calls refuse while any view is about, know one subgraph, and cost a dictionary of each tensor.
        self._native = interpreter._interpreter  # noqa: SLF001
        self._shapes: tuple[tuple[int, ...], ...] | None = None

    def prepare(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Resize the inputs and plan memory. Raises the library's errors."""
        self._shapes = None
        for tensor, shape in zip(self.graph.inputs, shapes, strict=True):
            self._native.ResizeInputTensor(tensor.index, np.array(shape, np.int32), False, self.graph.subgraph)
        self._native.AllocateTensors(self.graph.subgraph)
        self._shapes = tuple(shapes)

    def size_of(self, tensor: _GraphTensor) -> tuple[int, ...]:
        """The shape that a tensor has now."""
        return tuple(int(length) for length in self._native.TensorSize(tensor.index, self.graph.subgraph))

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Run once; the results are copies. Raises the library's errors."""
        shapes = tuple(array.shape for array in arrays)
        if shapes != self._shapes:
            self.prepare(shapes)
        native, subgraph = self._native, self.graph.subgraph
        try:
            if self.graph.keeps_state:  # each request is for itself, whatever ran before
                native.ResetVariableTensors()
            for tensor, array in zip(self.graph.inputs, arrays, strict=True):
                value = array.view(tensor.dtype) if tensor.spec.datatype == "BF16" else array
                native.SetTensor(tensor.index, value, subgraph)
            native.Invoke(subgraph)
            return [self._result(tensor) for tensor in self.graph.outputs]
        except BaseException:
            self._shapes = None
            raise

    def _result(self, tensor: _GraphTensor) -> Array:
        """A copy of an output; BF16 as its bits."""
        size = self.size_of(tensor)
        if 0 in size:  # GetTensor fails for what has no memory
            return np.empty(size, object if tensor.spec.datatype == "BYTES" else np.dtype(tensor.dtype))
        result: Array = self._native.GetTensor(tensor.index, self.graph.subgraph)
        return result.view(np.uint16) if tensor.spec.datatype == "BF16" else result
