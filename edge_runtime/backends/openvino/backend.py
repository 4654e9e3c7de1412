"""OpenVINO: which devices it has, how a model is compiled for one and run.

Owns: compile properties, reading back device and precision, infer requests and the tensors set on them. Only `probe`
and `load` import the library, without its conversion tools: importing those reports to a web service from a thread,
and takes 14 MiB and three quarters of the import's time. Extensions are never loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from edge_runtime.backends.base import LoadOptions, Probe
from edge_runtime.backends.library_import import import_library, probe_library
from edge_runtime.backends.litert.tflite_names import signature_names, without_ports
from edge_runtime.backends.model_files import (
    SAVED_MODEL_FILE,
    ArtifactFiles,
    check_ir_files,
    check_paddle_files,
    check_saved_model_files,
    check_tflite_files,
)
from edge_runtime.backends.onnx.files import check_onnx_files
from edge_runtime.backends.open_rows import answers_alike, made_up_row
from edge_runtime.backends.openvino import BACKEND
from edge_runtime.backends.openvino.own_states import open_states
from edge_runtime.backends.row_buffers import bound_buffers
from edge_runtime.errors import BackendUnavailable, LoadFailed, RunFailed
from edge_runtime.model_spec import DYNAMIC, ModelSpec, OwnState, TensorSpec
from edge_runtime.sandbox.process_memory import watch_growth
from edge_runtime.tensors import Array, Tensors

_DATATYPES = {
    "boolean": "BOOL", "u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "u64": "UINT64", "i8": "INT8", "i16": "INT16",
    "i32": "INT32", "i64": "INT64", "f16": "FP16", "f32": "FP32", "f64": "FP64", "bf16": "BF16",
}  # fmt: skip
# Text is left out: with OpenVINO 2026.4 a model that takes strings aborts the process when it is freed.

_VIRTUAL_DEVICES = ("AUTO", "HETERO", "MULTI", "BATCH")
"""Devices that choose among others; `available_devices` never has them."""

_CODE_PROPERTIES = ("CONFIG_FILE", "PATH", "EXTENSION", "PLUGIN")
"""Properties with these words read files by path; a model's own `model.toml` may not set them."""

INT8_SHARE = 0.75
"""Share of compute layers in int8 from which on a model counts as int8; the first or the last often stay f32."""

_COMPUTE_LAYERS = frozenset(
    ("Convolution", "Deconvolution", "FullyConnected", "MatMul", "Gemm", "RNNSeq", "RNNCell", "MHA", "LLMMLP")
)
"""A model spends its time in these; their precision is the model's."""


_CHECKS = {
    SAVED_MODEL_FILE: check_saved_model_files,
    "model.tflite": check_tflite_files,
    "model.pdmodel": check_paddle_files,
}
"""Artifacts of other frontends, and what is checked of their files."""

_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, MemoryError)
"""Python's forms of OpenVINO's exceptions."""

_CORE: dict[ModuleType, Any] = {}
_CORE_LOCK = threading.Lock()


class OpenVinoBackend:
    """Runs `model.xml` (IR, with `model.bin`), `model.onnx`, and what OpenVINO's other frontends read.

    These are a SavedModel's `saved_model.pb`, `model.tflite`, and PaddlePaddle's `model.pdmodel` with `.pdiparams`.
    options.device: CPU (default), GPU, GPU.1, NPU, AUTO. options.precision: f32, bf16, f16, or int8 for a model that
    was quantised; on CPU the default is f32, because OpenVINO's own is bf16 on machines with AMX.
    options.extra: OpenVINO's own properties.
    """

    declaration = BACKEND

    def probe(self) -> Probe:
        """Find the library, its devices and AUTO."""

        def find() -> tuple[str, tuple[str, ...]]:
            library = import_openvino()
            return library.get_version(), (*_the_core(library).available_devices, "AUTO")

        return probe_library(BACKEND.name, find)

    def load(self, artifact: Path, options: LoadOptions) -> OpenVinoInstance:
        """Compile a model, and read back its device and precision."""
        files = _check_files(artifact)
        library = import_openvino()
        core = _the_core(library)
        device = _check_device(core, options.device.upper() or "CPU")
        properties = _properties(device, options)
        growth = watch_growth(files.total_bytes)
        try:
            model = core.read_model(str(artifact.parent if artifact.name == SAVED_MODEL_FILE else artifact))
            inputs, outputs = _declared_names(model, artifact)
            own_states: tuple[OwnState, ...] = ()
            if options.sequence is not None and model.get_variables():
                own_states = open_states(library, core, model)
                inputs += [each.input for each in own_states]
                outputs += [each.output for each in own_states]
            keeps_state = bool(model.get_variables())  # of ReadValue and Assign
            compiled = core.compile_model(model, device, properties)
            if artifact.suffix == ".tflite":
                compiled = _with_open_rows(library, core, model, device, properties) or compiled
        except (RuntimeError, ValueError, TypeError) as error:
            raise LoadFailed(f"OpenVINO cannot load {artifact.name} on {device}: {_reason(error)}") from error
        del model
        spec = ModelSpec(
            tuple(_tensor_spec(*named, "input", artifact) for named in zip(compiled.inputs, inputs, strict=True)),
            tuple(_tensor_spec(*named, "output", artifact) for named in zip(compiled.outputs, outputs, strict=True)),
            own_states=own_states,
        )
        if not spec.outputs:
            raise LoadFailed(f"{artifact.name} has no outputs, so there is nothing to serve")
        precision = _precision_run(compiled, options)
        return OpenVinoInstance(
            library,
            compiled,
            loses_errors=device == "CPU" and _property(compiled, "INFERENCE_NUM_THREADS") == 1,
            keeps_state=keeps_state,
            spec=spec,
            device=_device_run(compiled, device),
            precision=precision,
            concurrency=options.concurrency,
            memory_bytes=growth(),
        )


class OpenVinoInstance:
    """A compiled model with an infer request for each caller; runs release the GIL."""

    backend = BACKEND.name

    def __init__(
        self,
        library: ModuleType,
        model: Any,
        *,
        loses_errors: bool,
        keeps_state: bool,
        spec: ModelSpec,
        device: str,
        precision: str,
        concurrency: int,
        memory_bytes: int,
    ) -> None:
        """Store what was loaded.

        loses_errors: `infer` would swallow exceptions, so it must not be used (a device with one core). keeps_state: a
        run would see values of the one before.
        """
        self.spec = spec
        self.device = device
        self.precision = precision
        self.concurrency = concurrency
        self.memory_bytes = memory_bytes
        self._library = library
        self._model = model  # None once closed
        self._positions = {tensor.name: index for index, tensor in enumerate(spec.outputs)}
        self._keeps_state = keeps_state
        self._requests = deque(model.create_infer_request() for _ in range(concurrency))
        self._infer = None if loses_errors else _native_infer(library)
        self._bounds: weakref.WeakSet[OpenVinoBound] = weakref.WeakSet()

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """Run once. The library reads contiguous arrays in place, read-only ones too."""
        model = self._model
        if model is None:
            raise RunFailed("the instance is closed")
        try:
            request = self._requests.pop()
        except IndexError:  # more callers than `concurrency`: slower, still right
            request = model.create_infer_request()
        try:
            if self._keeps_state:  # each request is for itself, whatever ran before
                request.reset_state()
            for index, tensor in enumerate(self.spec.inputs):
                request.set_input_tensor(index, _to_tensor(self._library, tensor, inputs[tensor.name]))
            if self._infer is None:
                results = _run_and_copy(request, len(self.spec.outputs))
            else:
                results = list(self._infer(request, {}, False, False).values())
        except _ERRORS as error:
            raise _run_failed(error) from error
        finally:
            self._requests.append(request)
        positions = range(len(results)) if outputs is None else [self._positions[name] for name in outputs]
        return [
            results[index].view(np.uint16) if self.spec.outputs[index].datatype == "BF16" else results[index]
            for index in positions
        ]

    def bind(self, max_rows: int) -> OpenVinoBound | None:
        """Make buffers and an infer request of their own. A run that gives other rows raises RunFailed."""
        model = self._model
        buffers = bound_buffers(self.spec, self.run, max_rows) if model is not None else None
        if model is None or buffers is None:
            return None
        bound = OpenVinoBound(
            model.create_infer_request(),
            self.spec,
            *buffers,
            library=self._library,
            infer=self._infer,
            keeps_state=self._keeps_state,
        )
        self._bounds.add(bound)
        return bound

    def close(self) -> None:
        """Drop the model, and close all that was bound."""
        for bound in list(self._bounds):
            bound.close()
        self._model = None
        self._requests.clear()


class OpenVinoBound:
    """Buffers with one infer request; tensors over them are made for each number of rows at its first run."""

    def __init__(
        self,
        request: Any,
        spec: ModelSpec,
        inputs: list[Array],
        outputs: list[Array],
        *,
        library: ModuleType,
        infer: Any,
        keeps_state: bool,
    ) -> None:
        """infer: as `_native_infer` returns it; None: it must not be used. keeps_state: as of the instance."""
        self.inputs: Sequence[Array] = inputs
        self.outputs: Sequence[Array] = outputs
        self.max_rows: int = inputs[0].shape[0]
        self._library = library
        self._request = request  # None once closed
        self._infer = infer
        self._keeps_state = keeps_state
        self._spec = spec
        self._fixed = spec.inputs[0].shape[0] >= 0
        self._tensors: dict[int, tuple[list[Any], list[Any]]] = {}
        self._rows_set: int | None = None

    def run(self, rows: int) -> None:
        """Set the tensors for `rows` where they are not set, and run."""
        try:
            if rows != self._rows_set:
                self._set_rows(rows)
            if self._keeps_state:
                self._request.reset_state()
            if self._infer is None:
                _run_and_wait(self._request)
            else:
                self._infer(self._request, {}, True, True)  # shared results: views of the bound buffers
            if self._has_other_rows(rows):
                raise RunFailed(f"the model gave other rows than the {rows} it got, so its axis 0 is not a batch")
        except _ERRORS as error:
            self._rows_set = None
            raise _run_failed(error) from error

    def close(self) -> None:
        """Drop the request; a run afterwards raises RunFailed."""
        self._request = None
        self._rows_set = None
        self._tensors.clear()

    def _set_rows(self, rows: int) -> None:
        if self._request is None:
            raise RunFailed("the instance is closed")
        if not 1 <= rows <= self.max_rows or (self._fixed and rows != self.max_rows):
            raise RunFailed(f"got {rows} rows, wanted {self.max_rows if self._fixed else f'1 to {self.max_rows}'}")
        tensors = self._tensors.get(rows)
        if tensors is None:
            tensors = (
                [_to_tensor(self._library, t, a[:rows]) for t, a in zip(self._spec.inputs, self.inputs, strict=True)],
                [_to_tensor(self._library, t, a[:rows]) for t, a in zip(self._spec.outputs, self.outputs, strict=True)],
            )
            self._tensors[rows] = tensors
        for index, tensor in enumerate(tensors[0]):
            self._request.set_input_tensor(index, tensor)
        for index, tensor in enumerate(tensors[1]):
            self._request.set_output_tensor(index, tensor)
        self._rows_set = rows

    def _has_other_rows(self, rows: int) -> bool:
        """Whether the model shrank an output below its buffer, which OpenVINO allows silently."""
        if all(tensor.shape[0] == rows for tensor in self._tensors[rows][1]):
            return False
        del self._tensors[rows]
        self._rows_set = None
        return True


# ---- loading --------------------------------------------------------------------------------------------------------


def import_openvino() -> ModuleType:
    """Import the library without its conversion tools. Raises BackendUnavailable."""
    return import_library("openvino", BACKEND, without=("openvino.tools.ovc",))


def prepare_openvino() -> None:
    """Import the library and map what a model on the CPU needs, so that forked processes share it; starts no thread."""
    libraries = Path(import_openvino().__file__ or "").parent / "libs"
    for name in ("intel_cpu_plugin", "arm_cpu_plugin", "onnx_frontend", "ir_frontend"):
        for file in libraries.glob(f"libopenvino_{name}.so*"):
            with contextlib.suppress(OSError):  # a load says why
                ctypes.CDLL(str(file))


def _the_core(library: ModuleType) -> Any:
    """The process's one Core, which lives as long as the process.

    The CPU plugin of each Core gives the thread that loads it a signal stack, and when it ends puts back the one from
    before, which may be that of a Core that has ended. With several, the next signal with a handler ended the process.
    """
    with _CORE_LOCK:
        if library not in _CORE:
            core = library.Core()
            # Weights are read, not mapped: a new file copied over a mapped one would end the daemon.
            core.set_property({"ENABLE_MMAP": False})
            _CORE[library] = core
        return _CORE[library]


def _check_device(core: Any, device: str) -> str:
    """Return the device's name. Raises BackendUnavailable with the devices that OpenVINO finds."""
    if device == "CPU":
        with contextlib.suppress(RuntimeError):
            core.get_property(device, "FULL_DEVICE_NAME")
            return device  # to look for all devices loads the plugin of each, which takes time and 4 MiB
    there = core.available_devices
    kind = device.partition(":")[0]
    if kind in _VIRTUAL_DEVICES or device in there or any(name.partition(".")[0] == device for name in there):
        return device
    raise BackendUnavailable(
        f"OpenVINO finds no device {device!r} here; it has {', '.join(there)}. Check the device's driver, or "
        "choose another device"
    )


def _properties(device: str, options: LoadOptions) -> dict[str, Any]:
    """Return the compile properties for a device. Raises LoadFailed for properties that name files."""
    for key in options.extra:
        if any(word in key.upper() for word in _CODE_PROPERTIES):
            raise LoadFailed(f"property {key!r} names a file, which a model's options may not do")
    properties: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}
    streams, threads = options.concurrency, options.threads * options.concurrency
    hint = _hint(options)
    if threads == 1:
        # With one thread in all, OpenVINO 2026.4 loses exceptions of `infer` and leaves the outputs unchanged. With a
        # second stream it raises them; each run still takes one thread.
        streams = threads = 2
    cpu = {
        "INFERENCE_PRECISION_HINT": hint or "f32",
        "NUM_STREAMS": str(streams),
        "INFERENCE_NUM_THREADS": str(threads),
        # The scheduler shares the cores among models; a pinned thread would wait for its core beside an idle one.
        "ENABLE_CPU_PINNING": "NO",
    }
    if device == "CPU":
        properties |= cpu
    elif device.partition(":")[0] in _VIRTUAL_DEVICES:
        properties["DEVICE_PROPERTIES"] = {"CPU": cpu}
        if hint:
            properties["INFERENCE_PRECISION_HINT"] = hint
    elif hint:
        properties["INFERENCE_PRECISION_HINT"] = hint
    return properties | dict(options.extra)


def _hint(options: LoadOptions) -> str:
    """The precision of layers that are not quantised: a quantised model says itself which run in int8."""
    return "" if options.precision == "int8" else options.precision


def _precision_run(compiled: Any, options: LoadOptions) -> str:
    """The precision that the compute layers were compiled to, else the device's hint.

    Raises BackendUnavailable: the device did not take the wanted precision.
    """
    hint = _precision_name(_property(compiled, "INFERENCE_PRECISION_HINT"))
    if _hint(options) and hint != options.precision:
        raise BackendUnavailable(
            f"precision {options.precision} was asked for, but this device runs in {hint or 'its own'}; "
            "leave precision out or choose another"
        )
    layers: Counter[str] = Counter()
    try:
        nodes = compiled.get_runtime_model().get_ordered_ops()
    except RuntimeError:
        return hint
    for node in nodes:
        facts = node.rt_info
        if "layerType" in facts and "runtimePrecision" in facts and facts["layerType"].value in _COMPUTE_LAYERS:
            layers[_precision_name(facts["runtimePrecision"].value)] += 1
    if options.precision == "int8" and "int8" not in layers:
        raise LoadFailed(
            f"precision int8 was asked for, and no layer runs in int8 on this device ({', '.join(layers) or hint}): "
            "the model was not quantised, or the device has no int8. Put model.int8.xml and .bin beside it "
            "(`edge-runtime convert`, `edge-runtime tune`), or leave precision out"
        )
    return _most(layers) if layers else hint


def _most(layers: Counter[str]) -> str:
    """The precision of the compute layers, else "mixed". Quantisers leave a layer or two of an int8 model unchanged."""
    (name, count), *others = layers.most_common()
    return name if not others or (name == "int8" and count >= INT8_SHARE * layers.total()) else "mixed"


def _precision_name(value: Any) -> str:
    """Name a precision of OpenVINO's Type or text: `f32`, `int8` for 8-bit integers."""
    name: str = value.get_type_name() if hasattr(value, "get_type_name") else str(value or "").lower()
    name = {"fp32": "f32", "fp16": "f16"}.get(name, name)
    return "int8" if name in ("i8", "u8") else name


def _device_run(compiled: Any, asked: str) -> str:
    devices = _property(compiled, "EXECUTION_DEVICES")
    if isinstance(devices, (list, tuple)) and devices:
        return "+".join(str(device).strip("()") for device in devices)
    return str(devices or asked)


def _with_open_rows(library: ModuleType, core: Any, model: Any, device: str, properties: Mapping[str, Any]) -> Any:
    """Compile a graph of one row for any number of them, where it answers each as alone; None where it does not.

    Reshapes `model`, which was compiled as it is before.
    """
    ports = [*model.inputs, *model.outputs]
    shapes = [port.get_partial_shape() for port in ports]
    if not model.inputs or not all(shape.is_static and len(shape) and shape[0] == 1 for shape in shapes):
        return None
    inner = [[length.get_length() for length in list(shape)[1:]] for shape in shapes]
    try:
        count = len(model.inputs)
        model.reshape({port: [DYNAMIC, *rest] for port, rest in zip(model.inputs, inner, strict=False)})
        if any(
            port.get_partial_shape() != library.PartialShape([DYNAMIC, *rest])
            for port, rest in zip(ports, inner, strict=True)
        ):
            return None
        opened = core.compile_model(model, device, properties)
        request = opened.create_infer_request()
        random = np.random.default_rng(0)
        kinds = [port.get_element_type().to_dtype() for port in model.inputs]
        rows = [
            [made_up_row((1, *rest), kind, random) for rest, kind in zip(inner, kinds, strict=False)] for _ in range(2)
        ]

        def run(arrays: list[Array]) -> list[Array]:
            request.reset_state()
            for index, array in enumerate(arrays):
                request.set_input_tensor(index, library.Tensor(array, shared_memory=True))
            return _run_and_copy(request, len(ports) - count)

        return opened if answers_alike(run, rows) else None
    except _ERRORS:
        return None


def _property(compiled: Any, name: str) -> Any:
    """Read a property back; None where the device does not know it."""
    try:
        return compiled.get_property(name)
    except RuntimeError:
        return None


def _check_files(artifact: Path) -> ArtifactFiles:
    """Check the files of an artifact, by its suffix. Raises LoadFailed."""
    if artifact.suffix == ".xml":
        return check_ir_files(artifact)
    for name, check in _CHECKS.items():
        if artifact.suffix == Path(name).suffix:
            return check(artifact)
    return check_onnx_files(artifact)


def _declared_names(model: Any, artifact: Path) -> tuple[list[str], list[str]]:
    """The model's names of its inputs and outputs. Read before compiling, which adds names of folded nodes.

    Of TensorFlow: those of its signature, else tensors' own names without the number of the first output, `:0`.
    """
    inputs, outputs = [[_declared_name(port) for port in ports] for ports in (model.inputs, model.outputs)]
    if artifact.suffix == ".tflite":
        named = signature_names(artifact)
        inputs = [named.inputs.get(name, name) for name in inputs]
        outputs = [named.outputs.get(name, name) for name in outputs]
    if artifact.suffix in (".tflite", ".pb"):
        inputs, outputs = without_ports(inputs), without_ports(outputs)
    return inputs, outputs


def _declared_name(port: Any) -> str:
    names: set[str] = port.get_names()
    friendly: str = port.get_node().get_friendly_name()
    return friendly if friendly in names or not names else min(names)


def _tensor_spec(port: Any, name: str, direction: str, artifact: Path) -> TensorSpec:
    """Describe an input or output. Raises LoadFailed for element types without a wire datatype."""
    element: str = port.get_element_type().get_type_name()
    if element not in _DATATYPES:
        shown = "untyped or string" if element == "dynamic" else element  # frontends leave text untyped
        raise LoadFailed(
            f"{artifact.name}: {direction} {name!r} is {shown}, which cannot be sent; wanted one of "
            f"{', '.join(_DATATYPES)}"
        )
    partial = port.get_partial_shape()
    if partial.rank.is_dynamic:
        if direction == "input":
            raise LoadFailed(f"{artifact.name}: input {name!r} has no known rank; export the model with one")
        return TensorSpec(name, _DATATYPES[element], ())
    shape = tuple(DYNAMIC if size.is_dynamic else size.get_length() for size in partial)
    return TensorSpec(name, _DATATYPES[element], shape)


def _reason(error: Exception) -> str:
    """OpenVINO's message without its lines of source locations, cut to 600 characters; operators it lacks first."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith("Exception from")]
    lacking = [line.removeprefix("-- ") for line in told if "No conversion rule" in line]
    return " ".join(lacking or told or lines)[:600]


# ---- running --------------------------------------------------------------------------------------------------------


def _native_infer(library: Any) -> Any:
    """Return `infer(request, {}, share_outputs, decode_strings)` of the C++ class; None where this version has none.

    For a tiny model it takes 7 us; 26 through the library's wrapper, which copies inputs. start_async and wait, which
    go through a thread pool, take 65. For large models there is no difference.
    """
    for base in library.InferRequest.__mro__[1:]:
        if base.__module__.endswith("_pyopenvino") and hasattr(base, "infer"):
            return base.infer
    return None


def _run_and_wait(request: Any) -> None:
    request.start_async()
    request.wait()


def _run_and_copy(request: Any, count: int) -> list[Array]:
    _run_and_wait(request)
    return [np.array(request.get_output_tensor(index).data) for index in range(count)]


def _to_tensor(library: Any, tensor: TensorSpec, array: Array) -> Any:
    """Make a tensor over the array's own memory; a strided array is copied."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    if not array.flags.writeable:
        array = np.asarray(_Writeable(array))
    if tensor.datatype == "BF16":
        return library.Tensor(array.view(np.uint16), array.shape, library.Type.bf16)
    return library.Tensor(array, shared_memory=True)


class _Writeable:
    """The same memory marked writeable: OpenVINO insists, though it never writes to an input."""

    def __init__(self, array: Array) -> None:
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}
        self._keep = array


def _run_failed(error: Exception) -> RunFailed:
    return RunFailed(f"OpenVINO: {_reason(error)}")
