"""Backends by name, each made when it is asked for.

Owns: the list. Importing this module imports no backend's library and none of their files. An explicit list, not a
scan: what a device can run is read here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from edge_runtime.backends.base import Backend, Probe
from edge_runtime.backends.library_import import not_installed
from edge_runtime.backends.tensorrt_library import installed_library
from edge_runtime.errors import BackendUnavailable

if TYPE_CHECKING:
    from edge_runtime.backends.tensorrt_backend import EngineSource


def _onnxruntime(_: bool) -> Backend:
    from edge_runtime.backends.onnxruntime_backend import OnnxRuntimeBackend

    return OnnxRuntimeBackend()


def _openvino(_: bool) -> Backend:
    from edge_runtime.backends.openvino_backend import OpenVinoBackend

    return OpenVinoBackend()


def _tensorrt(_: bool) -> Backend:
    return _tensorrt_with(None)


def _tensorrt_with(engines: EngineSource | None) -> Backend:
    from edge_runtime.backends.tensorrt_backend import TensorRtBackend

    return TensorRtBackend(engines)


def _python(allow_python: bool) -> Backend:
    from edge_runtime.backends.python_backend import PythonBackend

    return PythonBackend(allow=allow_python)


_FACTORIES: dict[str, Callable[[bool], Backend]] = {
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
    "tensorrt": _tensorrt,
    "python": _python,
}

_LIBRARIES = ("onnxruntime", "openvino")
"""Backends that are named like the package, and the extra, that they need."""


def known_backends() -> tuple[str, ...]:
    """Every backend's name, whether or not its library is installed."""
    return tuple(_FACTORIES)


def backend(name: str, *, allow_python: bool = False, engines: EngineSource | None = None) -> Backend:
    """One backend. Its library is looked for, and imported only by its `probe` and `load`.

    allow_python: whether `model.py` may be loaded (`python_models` in the configuration). engines: where TensorRT's
    come from; None has them built by whoever loads. Raises BackendUnavailable with what to install.
    """
    factory = _FACTORIES.get(name)
    if factory is None:
        raise BackendUnavailable(f"there is no backend {name!r}; known: {', '.join(_FACTORIES)}")
    if name in _LIBRARIES and find_spec(name) is None:
        raise not_installed(name, name)
    if name == "tensorrt":
        if installed_library() is None:
            raise not_installed(name, name)
        return _tensorrt_with(engines)
    return factory(allow_python)


def probe_all() -> tuple[Probe, ...]:
    """What every backend finds on this host; imports their libraries."""
    return tuple(factory(False).probe() for factory in _FACTORIES.values())
