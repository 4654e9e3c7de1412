"""Which ONNX Runtime providers a device name means, with their options. Imports no library: it is handed in."""

from __future__ import annotations

import platform
from types import ModuleType

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.onnx_files import ArtifactFiles
from edge_runtime.errors import BackendUnavailable, LoadFailed

PROVIDERS = {
    "CPU": "CPUExecutionProvider",
    "CUDA": "CUDAExecutionProvider",
    "TENSORRT": "TensorrtExecutionProvider",
    "OPENVINO": "OpenVINOExecutionProvider",
}

_OWN_OPTIONS = frozenset(("arena", "allow_cpu_nodes", "optimization"))
_CODE_OPTIONS = ("plugin", "lib_path", "library", "custom_op")
"""Provider options with these words load code by path; `model.toml` lies beside the model, so it may not say them."""


def choose_providers(
    library: ModuleType, kind: str, which: str, options: LoadOptions, files: ArtifactFiles
) -> list[tuple[str, dict[str, str]]]:
    """Providers with their options, first choice first.

    Raises BackendUnavailable for what is not built in, LoadFailed for an int8 that the model does not hold.
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
    chosen = [(wanted, extra)]
    if kind == "TENSORRT" and PROVIDERS["CUDA"] in there:
        # What TensorRT cannot build an engine for runs on the same GPU.
        chosen.append((PROVIDERS["CUDA"], {"device_id": which} if which else {}))
    return chosen


def _precision_options(kind: str, precision: str, files: ArtifactFiles) -> dict[str, str]:
    """Provider options for a precision. Raises BackendUnavailable where the provider cannot change it."""
    if precision in ("", "f32", files.precision) or (precision == "int8" and files.holds_int8):
        return {}
    if precision == "int8":
        raise LoadFailed(not_int8(files))
    if kind == "TENSORRT":
        return {"trt_fp16_enable": "1"} if precision == "f16" else {"trt_bf16_enable": "1"}
    if kind == "OPENVINO" and precision == "f16":
        return {"precision": "FP16"}
    if kind == "CPU" and precision == "bf16" and platform.machine() == "aarch64":
        return {}
    raise BackendUnavailable(
        f"ONNX Runtime on {kind} runs a model in the precision it was exported in, and cannot run it in {precision}; "
        "export it so, leave precision out, or use another backend"
    )


def device_name(kind: str, which: str) -> str:
    """Where a session on this provider runs, for people: "CPU", "CUDA:0"."""
    if kind == "CPU":
        return kind
    return f"{kind}:{which or ('AUTO' if kind == 'OPENVINO' else '0')}"


def precision_run(asked: str, exported: str, kind: str) -> str:
    """What runs: the CPU runs what the model holds; `_precision_options` refused what cannot be changed."""
    if asked in ("bf16", "f16") and exported in ("f32", "mixed", ""):
        return asked
    return exported or ("f32" if kind == "CPU" else asked or "f32")


def not_int8(files: ArtifactFiles) -> str:
    """Why an artifact is not loaded as int8."""
    return (
        f"precision int8 was asked for, and the model holds {files.precision or 'no weights'}: int8 is never made at "
        "load. Put model.int8.onnx beside it (`edge-runtime convert`, `edge-runtime tune`), or leave precision out"
    )
