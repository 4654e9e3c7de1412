"""OpenVINO: which devices there are, and how a model is compiled for one.

Owns: compile properties, and reading back device and precision. The library is imported by `probe` and `load` only,
without its conversion tools: importing those reports the import to a web service from a thread, and takes 14 MiB and
three quarters of the import's time. Extensions are never loaded.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

from edge_runtime.backends.base import LoadOptions, Probe
from edge_runtime.backends.ir_files import check_ir_files
from edge_runtime.backends.library_import import import_library, probe_library
from edge_runtime.backends.onnx_files import check_onnx_files
from edge_runtime.backends.openvino_instance import Compiled, OpenVinoInstance
from edge_runtime.backends.process_memory import watch_growth
from edge_runtime.errors import BackendUnavailable, LoadFailed
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec

_DATATYPES = {
    "boolean": "BOOL", "u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "u64": "UINT64", "i8": "INT8", "i16": "INT16",
    "i32": "INT32", "i64": "INT64", "f16": "FP16", "f32": "FP32", "f64": "FP64", "bf16": "BF16",
}  # fmt: skip
# Text is left out: with OpenVINO 2026.4 a model that takes strings aborts the process when it is freed.

_VIRTUAL_DEVICES = ("AUTO", "HETERO", "MULTI", "BATCH")
"""Devices that choose among others; they are never in `available_devices`."""

_CODE_PROPERTIES = ("CONFIG_FILE", "PATH", "EXTENSION", "PLUGIN")
"""Properties with these words read files by path; `model.toml` lies beside the model, so it may not say them."""

INT8_SHARE = 0.75
"""Of compute layers that run in int8, from which a model is one of int8; the first or the last often stay f32."""

_COMPUTE_LAYERS = frozenset(
    ("Convolution", "Deconvolution", "FullyConnected", "MatMul", "Gemm", "RNNSeq", "RNNCell", "MHA", "LLMMLP")
)
"""Where a model's time goes; the precision these ran in is the model's."""


class OpenVinoBackend:
    """Runs `model.xml` (IR, with `model.bin`) and `model.onnx`.

    options.device: CPU (default), GPU, GPU.1, NPU, AUTO. options.precision: f32, bf16, f16, or int8 for a model that
    was quantised; on CPU the default is f32, because left alone OpenVINO picks bf16 on machines with AMX.
    options.extra: OpenVINO's own properties.
    """

    name = "openvino"
    artifacts = ("model.xml", "model.onnx")

    def probe(self) -> Probe:
        """See Backend.probe."""

        def find() -> tuple[str, tuple[str, ...]]:
            library = import_openvino()
            return library.get_version(), (*library.Core().available_devices, "AUTO")

        return probe_library(self.name, find)

    def load(self, artifact: Path, options: LoadOptions) -> OpenVinoInstance:
        """See Backend.load. IR comes without a precision of its own; ONNX keeps the exported one for weights."""
        files = check_ir_files(artifact) if artifact.suffix == ".xml" else check_onnx_files(artifact)
        library = import_openvino()
        core = library.Core()
        device = _check_device(core, options.device.upper() or "CPU")
        properties = _properties(device, options)
        growth = watch_growth(files.total_bytes)
        try:
            # Weights are read, not mapped: a user who copies a new file over a mapped one would end the daemon.
            core.set_property({"ENABLE_MMAP": False})
            model = core.read_model(str(artifact))
            names = [_declared_name(port) for port in (*model.inputs, *model.outputs)]
            compiled = core.compile_model(model, device, properties)
        except (RuntimeError, ValueError, TypeError) as error:
            raise LoadFailed(f"OpenVINO cannot load {artifact.name} on {device}: {_reason(error)}") from error
        del model
        inputs, outputs = names[: len(compiled.inputs)], names[len(compiled.inputs) :]
        spec = ModelSpec(
            tuple(_tensor_spec(*named, "input", artifact) for named in zip(compiled.inputs, inputs, strict=True)),
            tuple(_tensor_spec(*named, "output", artifact) for named in zip(compiled.outputs, outputs, strict=True)),
        )
        if not spec.outputs:
            raise LoadFailed(f"{artifact.name} has no outputs, so there is nothing to serve")
        precision = _precision_run(compiled, options)
        return OpenVinoInstance(
            Compiled(
                library=library,
                loses_errors=device == "CPU" and _property(compiled, "INFERENCE_NUM_THREADS") == 1,
                model=compiled,
                spec=spec,
                device=_device_run(compiled, device),
                precision=precision,
                concurrency=options.concurrency,
                memory_bytes=growth(),
            )
        )


def import_openvino() -> ModuleType:
    """The library without its conversion tools. Raises BackendUnavailable."""
    return import_library("openvino", "openvino", without=("openvino.tools.ovc",))


def _check_device(core: Any, device: str) -> str:
    """The device's name as OpenVINO knows it. Raises BackendUnavailable with the devices that are there."""
    there = core.available_devices
    kind = device.partition(":")[0]
    if kind in _VIRTUAL_DEVICES or device in there or any(name.partition(".")[0] == device for name in there):
        return device
    raise BackendUnavailable(
        f"OpenVINO finds no device {device!r} on this host; it has {', '.join(there)}. Check the device's driver, or "
        "choose another device"
    )


def _properties(device: str, options: LoadOptions) -> dict[str, Any]:
    """Compile properties for a device. Raises LoadFailed for properties that name code."""
    for key in options.extra:
        if any(word in key.upper() for word in _CODE_PROPERTIES):
            raise LoadFailed(f"property {key!r} names a file, which a model's options may not do")
    properties: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY"}
    streams, threads = options.concurrency, options.threads * options.concurrency
    hint = _hint(options)
    if threads == 1:
        # With one thread in all, OpenVINO 2026.4 loses exceptions of `infer` and leaves the outputs as they were. A
        # second stream makes it tell; each run still takes one thread.
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
    """The precision of what is not quantised: a quantised model says itself which layers run in int8."""
    return "" if options.precision == "int8" else options.precision


def _precision_run(compiled: Any, options: LoadOptions) -> str:
    """The precision the compute layers were compiled to, else the device's hint.

    Raises BackendUnavailable when a precision was asked for that the device did not take.
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
    """What the compute layers run in, else "mixed". Quantisers leave a layer or two of an int8 model as they were."""
    (name, count), *others = layers.most_common()
    return name if not others or (name == "int8" and count >= INT8_SHARE * layers.total()) else "mixed"


def _precision_name(value: Any) -> str:
    """`f32` for OpenVINO's Type or text, `int8` for 8-bit integers."""
    name: str = value.get_type_name() if hasattr(value, "get_type_name") else str(value or "").lower()
    name = {"fp32": "f32", "fp16": "f16"}.get(name, name)
    return "int8" if name in ("i8", "u8") else name


def _device_run(compiled: Any, asked: str) -> str:
    devices = _property(compiled, "EXECUTION_DEVICES")
    if isinstance(devices, (list, tuple)) and devices:
        return "+".join(str(device).strip("()") for device in devices)
    return str(devices or asked)


def _property(compiled: Any, name: str) -> Any:
    """A property read back, None where the device does not know it."""
    try:
        return compiled.get_property(name)
    except RuntimeError:
        return None


def _declared_name(port: Any) -> str:
    """What the model calls an input or output. Asked before it is compiled, which adds names of what it folds away."""
    names: set[str] = port.get_names()
    friendly: str = port.get_node().get_friendly_name()
    return friendly if friendly in names or not names else min(names)


def _tensor_spec(port: Any, name: str, direction: str, artifact: Path) -> TensorSpec:
    """One input or output. Raises LoadFailed for element types with no wire datatype."""
    element: str = port.get_element_type().get_type_name()
    if element not in _DATATYPES:
        raise LoadFailed(
            f"{artifact.name}: {direction} {name!r} is {element}, which cannot be sent; wanted one of "
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
    """OpenVINO's message without the source places that begin most of its lines."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith("Exception from")]
    return " ".join(told or lines)[:600]
