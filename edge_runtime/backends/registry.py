"""Backends by name, each made on request.

Owns: the list. Importing this module imports no backend's library and none of their files. The list is explicit, not a
scan: a reader sees here what a device can run.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from edge_runtime.backends.base import Backend, Probe
from edge_runtime.backends.library_import import not_installed
from edge_runtime.errors import BackendUnavailable

if TYPE_CHECKING:
    from edge_runtime.backends.base import BeginCall
    from edge_runtime.backends.tensorrt.backend import EngineSource
    from edge_runtime.clock import Clock
    from edge_runtime.hosts.hosts import Hosts

ARTIFACTS: Mapping[str, tuple[str, ...]] = {
    "onnxruntime": ("model.onnx",),
    "openvino": ("model.xml", "model.onnx", "saved_model.pb", "model.tflite", "model.pdmodel"),
    "litert": ("model.tflite",),
    "tensorrt": ("model.onnx", "model.plan", "model.engine", "model.trt"),
    "pytorch": ("model.pt", "model.pt2"),
    "catboost": ("model.cbm",),
    "python": ("model.py",),
}
"""The files that each backend loads, best first, as its class has them: known without importing its file."""

_MODULES = {"litert": "ai_edge_litert", "pytorch": "torch"}
"""The library of a backend, where it has another name."""


def known_backends() -> tuple[str, ...]:
    """Every backend's name, whether or not its library is installed."""
    return tuple(ARTIFACTS)


def backend(name: str, *, allow_python: bool = False, engines: EngineSource | None = None) -> Backend:
    """Make one backend. It looks for its library, and imports it only in `probe` and `load`.

    allow_python: whether `model.py` may be loaded (`python_models` in the configuration). engines: the source of
    TensorRT's; None builds them at load. Raises BackendUnavailable with the extra to install.
    """
    artifact_names(name)
    return _make(name, allow_python=allow_python, engines=engines)


def artifact_names(name: str) -> tuple[str, ...]:
    """Return the files that an installed backend loads, best first. Imports none. Raises BackendUnavailable."""
    if name not in ARTIFACTS:
        raise BackendUnavailable(f"there is no backend {name!r}; known: {', '.join(ARTIFACTS)}")
    if not is_installed(name):
        raise not_installed(_MODULES.get(name, name), name)
    return ARTIFACTS[name]


def is_installed(name: str) -> bool:
    """Whether a known backend's library is there, imported or not."""
    if name not in ARTIFACTS:
        return False
    if name == "tensorrt":
        from edge_runtime.backends.tensorrt.library import installed_library

        return installed_library() is not None
    return name == "python" or find_spec(_MODULES.get(name, name)) is not None  # the others' extras have their names


class Backends:
    """The backends of one daemon, each made once. Thread: any.

    allow_python, engines: as of `backend`. begin_call: as of `HostedBackend`.
    """

    def __init__(
        self,
        hosts: Hosts,
        *,
        allow_python: bool = False,
        engines: EngineSource | None = None,
        clock: Clock | None = None,
        begin_call: BeginCall | None = None,
    ) -> None:
        self._hosts = hosts
        self._allow_python = allow_python
        self._engines = engines
        self._clock = clock
        self._begin_call = begin_call
        self._lock = threading.RLock()
        self._here: dict[str, Backend] = {}
        self._hosted: dict[str, Backend] = {}

    def has(self, name: str) -> bool:
        """Return whether there is such a backend, and its library is installed."""
        return is_installed(name)

    def artifacts(self, name: str) -> tuple[str, ...]:
        """Return the files that an installed backend loads, as `artifact_names`. Raises BackendUnavailable."""
        return artifact_names(name)

    def here(self, name: str) -> Backend:
        """Return the backend of this name whose instances live in this process. Raises BackendUnavailable."""
        with self._lock:
            if name not in self._here:
                self._here[name] = backend(name, allow_python=self._allow_python, engines=self._engines)
            return self._here[name]

    def hosted(self, name: str) -> Backend:
        """Return the backend of this name whose instances live in hosts. Raises BackendUnavailable."""
        with self._lock:
            if name not in self._hosted:
                from edge_runtime.hosts.instance import HostedBackend

                self._hosted[name] = HostedBackend(
                    self.here(name),
                    self._hosts,
                    allow_python=self._allow_python,
                    engines=self._engines,
                    clock=self._clock,
                    begin_call=self._begin_call,
                )
            return self._hosted[name]


def probe_all() -> tuple[Probe, ...]:
    """Probe every backend; imports their libraries."""
    return tuple(_make(name).probe() for name in ARTIFACTS)


def _make(name: str, *, allow_python: bool = False, engines: EngineSource | None = None) -> Backend:  # noqa: PLR0911 (one a backend)
    match name:
        case "onnxruntime":
            from edge_runtime.backends.onnxruntime.backend import OnnxRuntimeBackend

            return OnnxRuntimeBackend()
        case "openvino":
            from edge_runtime.backends.openvino.backend import OpenVinoBackend

            return OpenVinoBackend()
        case "litert":
            from edge_runtime.backends.litert.backend import LiteRtBackend

            return LiteRtBackend()
        case "tensorrt":
            from edge_runtime.backends.tensorrt.backend import TensorRtBackend

            return TensorRtBackend(engines)
        case "pytorch":
            from edge_runtime.backends.pytorch.backend import PyTorchBackend

            return PyTorchBackend()
        case "catboost":
            from edge_runtime.backends.catboost.backend import CatBoostBackend

            return CatBoostBackend()
        case _:
            from edge_runtime.backends.python.backend import PythonBackend

            return PythonBackend(allow=allow_python)
