"""ONNX Runtime's plug-in execution providers: libraries of chip makers, which a profile names as `delegate`.

Owns: registering a library once a process, choosing one of its devices, and naming that. Imported where a profile names
one. Source: onnxruntime.ai, "Plugin Execution Provider Libraries, Usage". Thread: any.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from edge_runtime.backends.base import LoadOptions
from edge_runtime.errors import BackendUnavailable

FIRST_RELEASE = (1, 24)
"""Of ONNX Runtime, that takes providers as plug-ins; Python 3.10 ends at 1.23."""

_SUFFIX = "ExecutionProvider"
_FILE = re.compile(r"(?:lib)?(?:onnxruntime_providers_)?(.+?)(?:_plugin)?\.so(?:\.[0-9.]+)?")

_lock = threading.Lock()
_registered: dict[str, list[Any]] = {}
"""The devices of each library that this process has, by its path: a library stays until the process ends."""


def plugin_device(library: ModuleType, options: LoadOptions) -> Any:
    """Return the device that a model is to run on, of the library that `options.delegate` names.

    options.device: "NPU", "GPU" or "CPU", with `:index` where there are several; "" for the first, no CPU before a CPU.
    Raises BackendUnavailable: this ONNX Runtime takes no plug-ins, the library cannot be loaded, or has no such device.
    """
    devices = _devices(library, options.delegate)
    kind, _, index = options.device.upper().partition(":")
    fitting = sorted((each for each in devices if kind in ("", _kind(each))), key=lambda each: _kind(each) == "CPU")
    place = int(index) if index.isdecimal() else 0
    if place >= len(fitting):
        there = ", ".join(map(_kind, devices)) or "none on this machine: look at its driver"
        raise BackendUnavailable(f"{options.delegate} has no device {options.device or 'at all'}; it has {there}")
    return fitting[place]


def device_name(device: Any) -> str:
    """Name a device as a model's status says it: "QNN:NPU"."""
    return f"{device.ep_name.removesuffix(_SUFFIX).upper()}:{_kind(device)}"


def _devices(library: ModuleType, path: str) -> list[Any]:
    release = tuple(int(each) for each in re.findall(r"\d+", library.__version__)[:2])
    if release < FIRST_RELEASE:
        raise BackendUnavailable(
            f"ONNX Runtime {library.__version__} takes no plug-in providers; wanted 1.24 or later, which needs Python "
            "3.11 or later"
        )
    with _lock:
        if path not in _registered:
            fitted = _FILE.fullmatch(Path(path).name)
            before = len(library.get_ep_devices())
            try:
                # Some libraries take the name for that of their provider, by which its options are read.
                name = fitted[1].upper() if fitted is not None else Path(path).stem
                library.register_execution_provider_library(f"{name}{_SUFFIX}", path)
            except Exception as error:
                reason = " ".join(str(error).split())[:400]
                raise BackendUnavailable(f"ONNX Runtime cannot load the provider {path}: {reason}") from error
            _registered[path] = library.get_ep_devices()[before:]
        return _registered[path]


def _kind(device: Any) -> str:
    kind: str = device.device.type.name
    return kind.upper()
