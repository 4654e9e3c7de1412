"""ONNX Runtime: which providers there are, and how a session is made.

Owns: session and provider options, and reading back what really runs. The library is imported by `probe` and `load`
only. Custom operator libraries are never loaded, nothing in a model or in the environment configures a session, and a
provider that is missing is an error, never a quiet fallback.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

from edge_runtime.backends.base import LoadOptions, Probe
from edge_runtime.backends.library_import import import_library, probe_library
from edge_runtime.backends.onnx_files import check_onnx_files
from edge_runtime.backends.onnxruntime_instance import Loaded, OnnxRuntimeInstance
from edge_runtime.backends.onnxruntime_providers import PROVIDERS, choose_providers, device_name, precision_run
from edge_runtime.backends.process_memory import watch_growth
from edge_runtime.errors import BackendUnavailable, LoadFailed
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec

_DATATYPES = {
    "tensor(bool)": "BOOL", "tensor(uint8)": "UINT8", "tensor(uint16)": "UINT16", "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64", "tensor(int8)": "INT8", "tensor(int16)": "INT16", "tensor(int32)": "INT32",
    "tensor(int64)": "INT64", "tensor(float16)": "FP16", "tensor(float)": "FP32", "tensor(double)": "FP64",
    "tensor(bfloat16)": "BF16", "tensor(string)": "BYTES",
}  # fmt: skip

_NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"
"""ONNX Runtime reads it when it is imported (1.31: onnxruntime/core/platform/posix/telemetry_1ds.cc). Without it, it
reports to mobile.events.data.microsoft.com from a thread of its own, with a database and a device id in ~/.cache."""

_ANY_CALLERS = 64
"""`Session.run` is thread-safe and shares one copy of the weights; the scheduler's cores are the real bound."""

_FATAL = 4
"""Only fatal messages: everything else comes back as an exception, and would otherwise be printed as well."""


class OnnxRuntimeBackend:
    """Runs `model.onnx`.

    options.device: CPU (default), CUDA, TENSORRT, OPENVINO, each with `:index` or `:name` where there are several.
    options.extra: `arena` "0" gives activations back after each run; `allow_cpu_nodes` "1" lets an accelerator leave
    operators to the CPU; `optimization` "disabled", "basic", "extended" or "all"; every other key is an option of the
    device's provider, in the provider's words.
    """

    name = "onnxruntime"
    artifacts = ("model.onnx",)

    def probe(self) -> Probe:
        """See Backend.probe. Devices are the providers built in; whether their drivers work shows at load."""

        def find() -> tuple[str, tuple[str, ...]]:
            library = _library()
            there = library.get_available_providers()
            return library.__version__, tuple(device for device, provider in PROVIDERS.items() if provider in there)

        return probe_library(self.name, find)

    def load(self, artifact: Path, options: LoadOptions) -> OnnxRuntimeInstance:
        """See Backend.load."""
        files = check_onnx_files(artifact)
        library = _library()
        kind, _, which = options.device.upper().partition(":")
        providers = choose_providers(library, kind or "CPU", which, options, files)
        growth = watch_growth(files.total_bytes)
        session = _session(library, artifact, options, providers)
        _check_providers(session, providers[0][0], artifact)
        errors = _errors(library)
        spec = ModelSpec(
            tuple(_tensor_spec(node, artifact) for node in session.get_inputs()),
            tuple(_tensor_spec(node, artifact) for node in session.get_outputs()),
        )
        if not spec.outputs:
            raise LoadFailed(f"{artifact.name} has no outputs, so there is nothing to serve")
        run_options = library.RunOptions()
        run_options.log_severity_level = _FATAL
        return OnnxRuntimeInstance(
            Loaded(
                session=session,
                run_options=run_options,
                errors=errors,
                value_of=library.OrtValue.ortvalue_from_numpy_with_onnx_type,
                spec=spec,
                device=device_name(kind or "CPU", which),
                precision=precision_run(options.precision, files.precision, kind or "CPU"),
                concurrency=_ANY_CALLERS if kind in ("", "CPU", "CUDA") else 1,
                memory_bytes=growth(),
            )
        )


def _library() -> ModuleType:
    """ONNX Runtime, which is told before it is imported to report nothing; who wants that sets the variable to 0."""
    os.environ.setdefault(_NO_TELEMETRY, "1")
    return import_library("onnxruntime", "onnxruntime")


def _session(
    library: ModuleType, artifact: Path, options: LoadOptions, providers: list[tuple[str, dict[str, str]]]
) -> Any:
    """Make the session. Raises LoadFailed with the library's reason."""
    settings = _session_options(library, options, providers[0][0])
    # The C++ side reads this variable whatever the argument below says, and would let a model configure its session.
    os.environ.pop("ORT_LOAD_CONFIG_FROM_MODEL", None)
    try:
        return library.InferenceSession(
            str(artifact),
            settings,
            providers=providers,
            enable_fallback=0,  # or a provider that fails is replaced by the CPU with a printed line
            read_config_from_model=0,
        )
    except _errors(library) as error:
        reason = " ".join(str(error).split())[:600]
        if "disable_cpu_ep_fallback" in reason or "explicitly disabled by the user" in reason:
            reason += '; allow_cpu_nodes = "1" in the options lets the CPU run them'
        raise LoadFailed(f"ONNX Runtime cannot load {artifact.name}: {reason}") from error


def _session_options(library: ModuleType, options: LoadOptions, provider: str) -> Any:
    settings = library.SessionOptions()
    settings.log_severity_level = _FATAL
    settings.intra_op_num_threads = options.threads
    settings.inter_op_num_threads = 1
    # The arena stays on: off, MobileNetV2 grew to 210 MiB instead of 130 after a batch of 8, and nothing became smaller
    # for a tiny model (12 MiB either way).
    settings.enable_cpu_mem_arena = options.extra.get("arena", "1") != "0"
    settings.add_session_config_entry("session.load_model_format", "ONNX")
    settings.add_session_config_entry("session.intra_op.allow_spinning", "1" if options.spin else "0")
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
    """Read back which providers the session got: a library that cannot find its driver drops one with a log line."""
    got = session.get_providers()
    if wanted not in got:
        raise BackendUnavailable(
            f"{artifact.name} was to run on {wanted}, but ONNX Runtime could only start {', '.join(got)}; "
            "check the driver and the libraries that this provider needs"
        )


def _tensor_spec(node: Any, artifact: Path) -> TensorSpec:
    """One input or output. Raises LoadFailed for what has no wire datatype (sequences, maps, complex, float8)."""
    datatype = _DATATYPES.get(node.type)
    if datatype is None:
        raise LoadFailed(
            f"{artifact.name}: {node.name!r} is {node.type}, which cannot be sent; wanted a tensor of a known datatype "
            "(scikit-learn's converter: zipmap=False)"
        )
    shape = tuple(size if isinstance(size, int) and size >= 0 else DYNAMIC for size in node.shape)
    return TensorSpec(node.name, datatype, shape)


def _errors(library: ModuleType) -> tuple[type[Exception], ...]:
    """Every exception the library raises: its own have no base class in common but Exception."""
    native = library.capi.onnxruntime_pybind11_state
    own = [kind for kind in vars(native).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return (*own, RuntimeError, ValueError, TypeError, KeyError, MemoryError, OSError)
