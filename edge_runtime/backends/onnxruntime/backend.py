"""ONNX Runtime: which providers it has, how a session is made and run.

Owns: session and provider options, reading back device and precision, and the calls that run a session at the least
cost. Only `probe` and `load` import the library. No custom operator library is ever loaded, nothing in a model or in
the environment configures a session, and a missing provider is an error, never a silent fallback.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from edge_runtime.backends.base import LoadOptions, Probe
from edge_runtime.backends.library_import import import_library, probe_library
from edge_runtime.backends.model_files import ArtifactFiles, open_artifact
from edge_runtime.backends.onnx.files import check_onnx_files
from edge_runtime.backends.onnxruntime import BACKEND
from edge_runtime.backends.row_buffers import bound_buffers
from edge_runtime.errors import BackendUnavailable, LoadFailed, RunFailed, UnreadableText
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.sandbox.process_memory import watch_growth
from edge_runtime.tensors import DATATYPES, Array, Tensors

_DATATYPES = {
    "tensor(bool)": "BOOL", "tensor(uint8)": "UINT8", "tensor(uint16)": "UINT16", "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64", "tensor(int8)": "INT8", "tensor(int16)": "INT16", "tensor(int32)": "INT32",
    "tensor(int64)": "INT64", "tensor(float16)": "FP16", "tensor(float)": "FP32", "tensor(double)": "FP64",
    "tensor(bfloat16)": "BF16", "tensor(string)": "BYTES",
}  # fmt: skip

_NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"
"""ONNX Runtime reads this variable at import (1.31: onnxruntime/core/platform/posix/telemetry_1ds.cc). Without it, it
reports to mobile.events.data.microsoft.com from a thread of its own, with a database and a device id in ~/.cache."""

_ANY_CALLERS = 64
"""`Session.run` is thread-safe and shares one copy of the weights; the scheduler's cores are the real bound."""

_FATAL = 4
"""The library prints fatal messages only: it raises all others as exceptions, and would print those too."""

_ONNX_BFLOAT16 = 16
"""TensorProto.DataType.BFLOAT16: numpy has no such dtype, so calls pass the number."""

PROVIDERS = {
    "CPU": "CPUExecutionProvider",
    "CUDA": "CUDAExecutionProvider",
    "TENSORRT": "TensorrtExecutionProvider",
    "OPENVINO": "OpenVINOExecutionProvider",
}

_DICTIONARIES = "seq(map("
"""The type that ZipMap makes, at the end of scikit-learn's classifiers."""

_LOCALE = re.compile(r"Failed to construct locale with name:([\w.@-]+?):")
_LOCALE_ADVICE = (
    "it changes the case of text by the locale {locale}, which this machine has not: on Debian and Ubuntu do "
    "apt-get install locales && localedef -i {language} -f UTF-8 {locale}; or convert it with locale='C.UTF-8', "
    "which every Debian has (skl2onnx: options={{id(vectorizer): {{'locale': 'C.UTF-8'}}}})"
)

NOTHING = (
    b'\x08\x08\x12\x00:7\n\x10\n\x01x\x12\x01y"\x08Identity\x12\x01gZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\x11"
)
"""An ONNX model: y = Identity(x), FP32 [1], opset 17."""

_EXACT_F32 = {"use_tf32": "0"}
"""Of CUDA's provider. By default it rounds what it multiplies to 10 bits: on an H100 an answer of 6.3457 was 6.3472.
Nothing lowers a precision unless it is asked for."""

_OWN_OPTIONS = frozenset(("arena", "allow_cpu_nodes", "optimization"))
_CODE_OPTIONS = ("plugin", "lib_path", "library", "custom_op")
"""Provider options with these words load code by path; a model's own `model.toml` may not set them."""


class OnnxRuntimeBackend:
    """Runs `model.onnx`.

    options.device: CPU (default), CUDA, TENSORRT, OPENVINO, each with `:index` or `:name` where there are several; with
    options.delegate, the library of a plug-in provider, NPU, GPU or CPU.
    options.extra: `arena` "0" frees activations after each run; `allow_cpu_nodes` "1" lets an accelerator leave
    operators to the CPU; `optimization` "disabled", "basic", "extended" or "all"; every other key is an option of the
    device's provider, in the provider's words.
    """

    declaration = BACKEND

    def probe(self) -> Probe:
        """Find the library. Devices are its built-in providers; whether their drivers work shows at load."""

        def find() -> tuple[str, tuple[str, ...]]:
            library = _library()
            there = library.get_available_providers()
            return library.__version__, tuple(device for device, provider in PROVIDERS.items() if provider in there)

        return probe_library(BACKEND.name, find)

    def load(self, artifact: Path, options: LoadOptions) -> OnnxRuntimeInstance:
        """Make a session, and read back its device and precision."""
        return self.load_opened(artifact, options, -1)

    def load_opened(self, artifact: Path, options: LoadOptions, opened: int) -> OnnxRuntimeInstance:
        """Load a file that this process may not open by its path. opened: as of `open_artifact`.

        Raises as `load`; HasMoreFiles: it is not the only file.
        """
        files = check_onnx_files(artifact, opened)
        library = _library()
        kind, _, which = options.device.upper().partition(":")
        plugin = None
        if options.delegate:
            from edge_runtime.backends.onnxruntime import plugin_provider

            plugin = plugin_provider.plugin_device(library, options)
            _check_own(options, files, plugin.ep_name)
            providers = [(plugin.ep_name, dict(options.delegate_options))]
        else:
            providers = choose_providers(library, kind or "CPU", which, options, files)
        growth = watch_growth(files.total_bytes)
        session = _session(
            library, artifact, _content(artifact, opened) or str(artifact), options, providers, plugin=plugin
        )
        if any(node.type.startswith(_DICTIONARIES) for node in session.get_outputs()):
            from edge_runtime.backends.onnx.zipmap import without_zipmaps

            model = without_zipmaps(artifact, opened)
            if model is not None:
                session = _session(library, artifact, model, options, providers, plugin=plugin)
        _check_providers(session, providers[0][0], artifact)
        spec = ModelSpec(
            tuple(_tensor_spec(node, artifact) for node in session.get_inputs()),
            tuple(_tensor_spec(node, artifact) for node in session.get_outputs()),
        )
        if not spec.outputs:
            raise LoadFailed(f"{artifact.name} has no outputs, so there is nothing to serve")
        return OnnxRuntimeInstance(
            library,
            session,
            spec=spec,
            device=_device_name(kind or "CPU", which) if plugin is None else plugin_provider.device_name(plugin),
            precision=_precision_run(options.precision, files.precision, kind or "CPU"),
            concurrency=_ANY_CALLERS if kind in ("", "CPU", "CUDA") and plugin is None else 1,
            memory_bytes=growth(),
        )


class OnnxRuntimeInstance:
    """A session. Any number of threads may call `run`; `concurrency` is the number that the provider can use."""

    backend = BACKEND.name

    def __init__(
        self,
        library: ModuleType,
        session: Any,
        *,
        spec: ModelSpec,
        device: str,
        precision: str,
        concurrency: int,
        memory_bytes: int,
    ) -> None:
        self.spec = spec
        self.device = device
        self.precision = precision
        self.concurrency = concurrency
        self.memory_bytes = memory_bytes
        self._session = session  # None once closed
        self._errors = _errors(library)
        self._value_of = library.OrtValue.ortvalue_from_numpy_with_onnx_type
        self._new_options = library.RunOptions
        self._options = _run_options(library.RunOptions)
        self._options_of: dict[int, Any] = {}
        self._run: Any = _native_run(session)
        self._all_outputs = [tensor.name for tensor in spec.outputs]
        self._text_inputs = {tensor.name for tensor in spec.inputs if tensor.datatype == "BYTES"}
        self._text_outputs = {tensor.name for tensor in spec.outputs if tensor.datatype == "BYTES"}
        self._has_bfloat16 = any(t.datatype == "BF16" for t in (*spec.inputs, *spec.outputs))
        self._bounds: weakref.WeakSet[OnnxRuntimeBound] = weakref.WeakSet()

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """Run once. The library reads contiguous arrays in place, read-only ones too."""
        names = self._all_outputs if outputs is None else list(outputs)
        options = self._options_of.get(threading.get_ident(), self._options) if self._options_of else self._options
        try:
            if self._has_bfloat16:
                return self._run_bfloat16(inputs, names, options)
            if self._text_inputs:
                inputs = {name: _to_text(name, a) if name in self._text_inputs else a for name, a in inputs.items()}
            results: list[Array] = self._run(names, inputs, options)
        except self._errors as error:
            if options.terminate:
                self.attach(None)  # options that were set once would end every run at once
            raise _run_failed(error) from error
        if self._text_outputs:
            return [_to_bytes(a) if n in self._text_outputs else a for n, a in zip(names, results, strict=True)]
        return results

    def interrupt(self, thread: int) -> None:
        """End the run of a thread (`threading.get_ident`), between two nodes; that run raises RunFailed.

        For hosts, whose runners `attach` has named. Thread: any.
        """
        options = self._options_of.get(thread)
        if options is not None:
            options.terminate = True

    def attach(self, call: object) -> None:
        """Give the runs of this thread options of their own, so that `interrupt` ends no other's."""
        del call
        self._options_of[threading.get_ident()] = _run_options(self._new_options)

    def bind(self, max_rows: int) -> OnnxRuntimeBound | None:
        """Make buffers and bindings over them. Where axis 0 is not rows after all, a run raises RunFailed."""
        buffers = bound_buffers(self.spec, self.run, max_rows)
        if buffers is None or self._session is None:
            return None
        bound = OnnxRuntimeBound(self._session, self.spec, *buffers, run_options=self._options, errors=self._errors)
        self._bounds.add(bound)
        return bound

    def close(self) -> None:
        """Drop the session, and close all that was bound."""
        for bound in list(self._bounds):
            bound.close()
        self._session = None
        self._run = _run_closed

    def _run_bfloat16(self, inputs: Tensors, names: list[str], options: Any) -> list[Array]:
        """Bind values and copy results out: the library's plain call takes no BF16."""
        session = self._session
        if session is None:
            raise RunFailed("the instance is closed")
        binding = session.io_binding()
        for tensor in self.spec.inputs:
            array = np.ascontiguousarray(inputs[tensor.name])
            if tensor.datatype == "BF16":
                binding.bind_ortvalue_input(tensor.name, self._value_of(array.view(np.uint16), _ONNX_BFLOAT16))
            else:
                binding.bind_cpu_input(tensor.name, array)
        for name in names:
            binding.bind_output(name, "cpu")
        session.run_with_iobinding(binding, options)
        return [_copy_out(value) for value in binding.get_outputs()]


class OnnxRuntimeBound:
    """Buffers with a binding for each number of rows, made at its first run (13 us) and kept."""

    def __init__(
        self,
        session: Any,
        spec: ModelSpec,
        inputs: list[Array],
        outputs: list[Array],
        *,
        run_options: Any,
        errors: tuple[type[Exception], ...],
    ) -> None:
        self.inputs: Sequence[Array] = inputs
        self.outputs: Sequence[Array] = outputs
        self.max_rows: int = inputs[0].shape[0]
        self._session = session  # None once closed
        self._spec = spec
        self._options = run_options
        self._errors = errors
        self._fixed = spec.inputs[0].shape[0] >= 0
        self._run, self._handle = _native_run_bound(session)
        self._bindings: dict[int, Any] = {}
        # Invariant: bindings point into the buffers, so both live exactly as long as this object.
        self._keep: list[Any] = []

    def run(self, rows: int) -> None:
        """Run with the binding for `rows`."""
        binding = self._bindings.get(rows)
        if binding is None:
            binding = self._prepare(rows)
        try:
            # One RunOptions for all calls, or the library makes one for each: 2.3 -> 1.7 us.
            self._run(binding, self._options)
        except self._errors as error:
            # On a GPU a binding that once got other rows keeps them, and fails for good.
            self._bindings.pop(rows, None)
            raise _run_failed(error) from error

    def close(self) -> None:
        """Drop the session; a run afterwards raises RunFailed."""
        self._session = None
        self._run = None
        self._bindings.clear()
        self._keep.clear()

    def _prepare(self, rows: int) -> Any:
        if self._session is None:
            raise RunFailed("the instance is closed")
        if not 1 <= rows <= self.max_rows or (self._fixed and rows != self.max_rows):
            raise RunFailed(f"got {rows} rows, wanted {self.max_rows if self._fixed else f'1 to {self.max_rows}'}")
        binding = self._session.io_binding()
        for bind, tensors, arrays in (
            (binding.bind_input, self._spec.inputs, self.inputs),
            (binding.bind_output, self._spec.outputs, self.outputs),
        ):
            for tensor, array in zip(tensors, arrays, strict=True):
                shape = (rows, *array.shape[1:])
                bind(tensor.name, "cpu", 0, _element_type(tensor), shape, array.ctypes.data)
        self._keep.append(binding)
        self._bindings[rows] = self._handle(binding)
        return self._bindings[rows]


# ---- loading --------------------------------------------------------------------------------------------------------


def prepare_onnxruntime() -> None:
    """Import the library and make its first session, for hosts that are forked from this process.

    What that makes once for all, the tables of operators above all, they share: 1.9 MiB less of each. It starts no
    thread.
    """
    session = _session(_library(), Path("nothing.onnx"), NOTHING, LoadOptions(threads=1), [(PROVIDERS["CPU"], {})])
    session.run(None, {"x": np.zeros(1, np.float32)})


def _library() -> ModuleType:
    """Import ONNX Runtime with its telemetry off, unless the environment sets the variable to 0."""
    os.environ.setdefault(_NO_TELEMETRY, "1")
    return import_library("onnxruntime", BACKEND)


def _content(artifact: Path, opened: int) -> bytes:
    """The whole of a file that was opened; nothing without one."""
    if opened < 0:
        return b""
    descriptor, _ = open_artifact(artifact, opened)
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


def _session(
    library: ModuleType,
    artifact: Path,
    model: str | bytes,
    options: LoadOptions,
    providers: list[tuple[str, dict[str, str]]],
    *,
    plugin: Any = None,
) -> Any:
    """Make the session. model: the artifact's path, or its content, changed. plugin: the device of a plug-in provider.

    Raises LoadFailed with a reason.
    """
    settings = _session_options(library, options, providers[0][0])
    if plugin is not None:
        settings.add_provider_for_devices([plugin], providers[0][1])
    # The C++ side reads this variable despite the argument below, and would let a model configure its session.
    os.environ.pop("ORT_LOAD_CONFIG_FROM_MODEL", None)
    try:
        session = library.InferenceSession(
            model,
            settings,
            providers=None if plugin is not None else providers,
            enable_fallback=0,  # else the CPU replaces a provider that fails, with a printed line
            read_config_from_model=0,
        )
        if hasattr(session, "_model_bytes"):
            session._model_bytes = b""  # noqa: SLF001  it keeps the whole file for a fallback, which is off
        return session
    except _errors(library) as error:
        reason = " ".join(str(error).split())[:600]
        if "disable_cpu_ep_fallback" in reason or "explicitly disabled by the user" in reason:
            reason += '; allow_cpu_nodes = "1" in the options lets the CPU run them'
        if (lacking := _LOCALE.search(reason)) is not None:
            locale = lacking[1]
            reason = _LOCALE_ADVICE.format(locale=locale, language=locale.partition(".")[0])
        raise LoadFailed(f"ONNX Runtime cannot load {artifact.name}: {reason}") from error


def _session_options(library: ModuleType, options: LoadOptions, provider: str) -> Any:
    settings = library.SessionOptions()
    settings.log_severity_level = _FATAL
    settings.intra_op_num_threads = options.threads
    settings.inter_op_num_threads = 1
    # The arena stays on: without it MobileNetV2 grew to 210 MiB instead of 130 after a batch of 8, and a tiny model
    # took 12 MiB either way.
    settings.enable_cpu_mem_arena = options.extra.get("arena", "1") != "0"
    settings.add_session_config_entry("session.load_model_format", "ONNX")
    settings.add_session_config_entry(
        "session.intra_op.allow_spinning", "1" if options.spin or options.spins_in_runs else "0"
    )
    if options.spins_in_runs and not options.spin:
        settings.add_session_config_entry("session.force_spinning_stop", "1")
    if options.precision == "bf16" and provider == PROVIDERS["CPU"]:
        settings.add_session_config_entry("mlas.enable_gemm_fastmath_arm64_bfloat16", "1")
    if provider != PROVIDERS["CPU"] and options.extra.get("allow_cpu_nodes", "0") != "1":
        settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    levels = {
        "disabled": library.GraphOptimizationLevel.ORT_DISABLE_ALL,
        "basic": library.GraphOptimizationLevel.ORT_ENABLE_BASIC,
        "extended": library.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
        "all": library.GraphOptimizationLevel.ORT_ENABLE_ALL,
    }
    level = options.extra.get("optimization", "all")
    if level not in levels:
        raise LoadFailed(f"optimization is {level!r}; wanted one of {', '.join(levels)}")
    settings.graph_optimization_level = levels[level]
    return settings


def _check_providers(session: Any, wanted: str, artifact: Path) -> None:
    """Raise BackendUnavailable unless the session has the wanted provider: the library drops one without a driver."""
    got = session.get_providers()
    if wanted not in got:
        raise BackendUnavailable(
            f"{artifact.name} was to run on {wanted}, but ONNX Runtime could only start {', '.join(got)}; "
            "check the driver and the libraries that this provider needs"
        )


def _tensor_spec(node: Any, artifact: Path) -> TensorSpec:
    """Describe an input or output. Raises LoadFailed for types without a wire datatype (sequences, maps, float8 …)."""
    datatype = _DATATYPES.get(node.type)
    if datatype is None:
        raise LoadFailed(
            f"{artifact.name}: {node.name!r} is {node.type}, which cannot be sent; wanted a tensor of a known datatype "
            "(a dictionary is served where ZipMap writes it at the model's end)"
        )
    shape = tuple(size if isinstance(size, int) and size >= 0 else DYNAMIC for size in node.shape)
    return TensorSpec(node.name, datatype, shape)


def _errors(library: ModuleType) -> tuple[type[Exception], ...]:
    """Every exception that the library raises: its own ones have no common base class but Exception."""
    native = library.capi.onnxruntime_pybind11_state
    own = [kind for kind in vars(native).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return (*own, RuntimeError, ValueError, TypeError, KeyError, MemoryError, OSError)


def choose_providers(
    library: ModuleType, kind: str, which: str, options: LoadOptions, files: ArtifactFiles
) -> list[tuple[str, dict[str, str]]]:
    """Return providers with their options, first choice first.

    Raises BackendUnavailable: the provider is not built in. LoadFailed: the model does not hold the wanted int8.
    """
    wanted = PROVIDERS.get(kind)
    if wanted is None:
        raise BackendUnavailable(f"ONNX Runtime has no device {kind!r}; known: {', '.join(PROVIDERS)}")
    there = library.get_available_providers()
    if wanted not in there:
        raise BackendUnavailable(
            f"this ONNX Runtime ({library.__version__}) was built without {wanted}; it has {', '.join(there)}. "
            f"Install the onnxruntime package for {kind}, or choose another device"
        )
    extra = {key: value for key, value in options.extra.items() if key not in _OWN_OPTIONS}
    for key in extra:
        if any(word in key.lower() for word in _CODE_OPTIONS):
            raise LoadFailed(f"option {key!r} loads code from a path, which a model's options may not do")
        if kind == "CPU":
            raise LoadFailed(f"ONNX Runtime on CPU has no option {key!r}; known: {', '.join(sorted(_OWN_OPTIONS))}")
    if which:
        extra["device_type" if kind == "OPENVINO" else "device_id"] = which
    extra.update(_precision_options(kind, options.precision, files))
    if kind == "CUDA":
        extra = {**_EXACT_F32, **extra}
    chosen = [(wanted, extra)]
    if kind == "TENSORRT" and PROVIDERS["CUDA"] in there:
        # Operators that TensorRT has no engine for run on the same GPU.
        chosen.append((PROVIDERS["CUDA"], {**_EXACT_F32, **({"device_id": which} if which else {})}))
    return chosen


def _check_own(options: LoadOptions, files: ArtifactFiles, provider: str) -> None:
    """Raise LoadFailed, BackendUnavailable: options that are not for a plug-in provider, which has its own."""
    if strange := sorted(set(options.extra) - _OWN_OPTIONS):
        raise LoadFailed(f"option {strange[0]!r} is not ONNX Runtime's own; those of {provider} are delegate_options")
    if options.precision not in ("", "f32", files.precision) and not (options.precision == "int8" and files.holds_int8):
        raise BackendUnavailable(
            f"{provider} runs a model as it was exported, unless its delegate_options say otherwise; leave out "
            f"precision {options.precision!r}"
        )


def _precision_options(kind: str, precision: str, files: ArtifactFiles) -> dict[str, str]:
    """Return the provider's options for a precision. Raises BackendUnavailable where it cannot change precision."""
    if precision in ("", "f32", files.precision) or (precision == "int8" and files.holds_int8):
        return {}
    if precision == "int8":
        raise LoadFailed(
            f"precision int8 was asked for, and the model holds {files.precision or 'no weights'}: no backend "
            "quantises at load. Put model.int8.onnx beside it (`edge-runtime convert`, `edge-runtime tune`), or leave "
            "precision out"
        )
    if kind == "TENSORRT":
        return {"trt_fp16_enable": "1"} if precision == "f16" else {"trt_bf16_enable": "1"}
    if kind == "OPENVINO" and precision == "f16":
        return {"precision": "FP16"}
    if kind == "CPU" and precision == "bf16" and platform.machine() == "aarch64":
        return {}
    raise BackendUnavailable(
        f"ONNX Runtime on {kind} runs a model in the precision that it was exported in, and cannot run it in "
        f"{precision}; export it in that precision, leave precision out, or use another backend"
    )


def _device_name(kind: str, which: str) -> str:
    """Name the device of a session on this provider: "CPU", "CUDA:0"."""
    if kind == "CPU":
        return kind
    return f"{kind}:{which or ('AUTO' if kind == 'OPENVINO' else '0')}"


def _precision_run(asked: str, exported: str, kind: str) -> str:
    """The precision that runs: as exported, except where `_precision_options` let the provider change it."""
    if asked in ("bf16", "f16") and exported in ("f32", "mixed", ""):
        return asked
    return exported or ("f32" if kind == "CPU" else asked or "f32")


# ---- running --------------------------------------------------------------------------------------------------------


def _native_run(session: Any) -> Any:
    """Return `run(output_names, feeds, run_options)` of the C session: without the wrapper's checks, 4.5 -> 3.6 us."""
    native: Any = getattr(session, "_sess", session)
    return getattr(native, "run", session.run)


def _native_run_bound(session: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return `run(binding, run_options)` of the C session and a function to its binding; else the public call."""
    native: Any = getattr(session, "_sess", None)
    if hasattr(native, "run_with_iobinding") and hasattr(session.io_binding(), "_iobinding"):
        return native.run_with_iobinding, lambda binding: binding._iobinding  # noqa: SLF001  looked up above
    return session.run_with_iobinding, lambda binding: binding


def _run_failed(error: Exception) -> RunFailed:
    """Wrap the library's message, on one line, cut to 600 characters."""
    return RunFailed(f"ONNX Runtime: {' '.join(str(error).split())[:600]}")


def _run_options(new: Callable[[], Any]) -> Any:
    options = new()
    options.log_severity_level = _FATAL
    return options


def _run_closed(*_: object) -> list[Array]:
    raise RunFailed("the instance is closed")


def _element_type(tensor: TensorSpec) -> Any:
    return _ONNX_BFLOAT16 if tensor.datatype == "BF16" else DATATYPES[tensor.datatype].dtype


def _copy_out(value: Any) -> Array:
    """Copy a value of the library into an array; BF16 as its bit pattern."""
    array: Array
    if value.data_type() != "tensor(bfloat16)":
        array = value.numpy()
        return array
    shape = tuple(value.shape())
    count = int(np.prod(shape))
    if count == 0:
        return np.empty(shape, np.uint16)
    memory: Array = np.ctypeslib.as_array((ctypes.c_uint16 * count).from_address(value.data_ptr()))
    array = memory.reshape(shape).copy()
    return array


def _to_text(name: str, array: Array) -> Array:
    """Decode elements to str: the library would take the repr of `b'x'`. Raises UnreadableText: one is not UTF-8."""
    try:
        flat = [item.decode() if isinstance(item, bytes) else str(item) for item in array.reshape(-1).tolist()]
    except UnicodeDecodeError as error:
        raise UnreadableText(
            f"input {name!r}: ONNX Runtime takes BYTES as UTF-8 text only, and an element is none: {error.reason} at "
            f"byte {error.start} of it; send text, or base64 of the bytes where the model reads that"
        ) from None
    text: Array = np.empty(len(flat), dtype=object)
    text[:] = flat
    return text.reshape(array.shape)


def _to_bytes(array: Array) -> Array:
    flat = [item.encode() if isinstance(item, str) else bytes(item) for item in array.reshape(-1).tolist()]
    raw: Array = np.empty(len(flat), dtype=object)
    raw[:] = flat
    return raw.reshape(array.shape)
