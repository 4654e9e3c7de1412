"""Which TensorRT is installed, and what its version can do.

Owns: the choice between `tensorrt` and `tensorrt_rtx`, which share an API, and the table of what changed between
versions. Imports a library only in `import_tensorrt`. Called by the other tensorrt_* files and by the registry.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from types import ModuleType

from msgspec import Struct

from edge_runtime.backends.library_import import import_library, not_installed
from edge_runtime.backends.tensorrt import BACKEND
from edge_runtime.errors import BackendUnavailable

FULL, RTX = "tensorrt", "tensorrt_rtx"

LIBRARIES = BACKEND.libraries
"""In the order of the search."""


class Traits(Struct, frozen=True):
    """The abilities of a version.

    weak_typing: builder flags may lower precisions, layer by layer. strong_flag: a flag keeps the model's own types.
    always_strong: they are always kept. explicit_batch: it needs a flag. bf16, int64: known
    datatypes. progress: IProgressMonitor. timing_cache: builds time kernels on the device, and timings can be kept.
    """

    weak_typing: bool
    strong_flag: bool
    always_strong: bool
    explicit_batch: bool
    bf16: bool
    int64: bool
    progress: bool
    timing_cache: bool


_EIGHT = Traits(
    weak_typing=True, strong_flag=False, always_strong=False, explicit_batch=True,
    bf16=False, int64=False, progress=False, timing_cache=True,
)  # fmt: skip
_TEN = Traits(
    weak_typing=True, strong_flag=True, always_strong=False, explicit_batch=False,
    bf16=True, int64=True, progress=True, timing_cache=True,
)  # fmt: skip
_ELEVEN = Traits(
    weak_typing=False, strong_flag=False, always_strong=True, explicit_batch=False,
    bf16=True, int64=True, progress=True, timing_cache=True,
)  # fmt: skip
_RTX = Traits(
    weak_typing=False, strong_flag=False, always_strong=True, explicit_batch=False,
    bf16=True, int64=True, progress=True, timing_cache=False,
)  # fmt: skip


class Library(Struct, frozen=True):
    """One imported library. name: "tensorrt" or "tensorrt_rtx"."""

    module: ModuleType
    name: str
    version: str
    traits: Traits

    @property
    def title(self) -> str:
        """Its name for people: "TensorRT 10.3.0", "TensorRT for RTX 1.7.1"."""
        return title(self.name, self.version)


def title(name: str, version: str) -> str:
    """The name for people of a library and version."""
    return f"{'TensorRT for RTX' if name == RTX else 'TensorRT'} {version}"


def installed_library() -> str | None:
    """The name of the library to import; None where neither is installed. Imports nothing."""
    return next((name for name in LIBRARIES if _is_there(name)), None)


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # a broken package of that name
        return False


def import_tensorrt() -> Library:
    """Import the library. Raises BackendUnavailable: absent, broken, or too old."""
    name = installed_library()
    if name is None:
        raise not_installed(BACKEND)
    module = import_library(name, BACKEND)
    version = str(getattr(module, "__version__", ""))
    return Library(module, name, version, traits_of(name, version))


def traits_of(name: str, version: str) -> Traits:
    """Return the abilities of a version. Pure. Raises BackendUnavailable for one that is too old, or has no number.

    Source: the bindings of 8.6.1, 10.3.0, 10.13.3, 10.16.1, 11.4.0 and RTX 1.7.1 themselves, which
    tests/tensorrt/test_bindings.py inspects.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        raise BackendUnavailable(f"{name} says version {version!r}, which is not a version; install it again")
    major, minor = int(numbers[1]), int(numbers[2])
    if name == RTX:
        return _RTX
    if major >= 11:
        return _ELEVEN
    if major == 10:
        return _TEN
    if (major, minor) == (8, 6):
        return _EIGHT
    raise BackendUnavailable(f"TensorRT {version} is not supported; wanted 8.6 (JetPack 6.0), 10 or 11")
