"""Import a backend's library late, and turn a failed import into a reason that a person can act on."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from edge_runtime.backends.base import Probe
from edge_runtime.backends.declaration import Declaration
from edge_runtime.errors import BackendUnavailable

IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError, TypeError, ValueError, SystemError)
"""Errors of importing a missing, broken or mismatched binary package."""


def import_library(module: str, declaration: Declaration, without: Sequence[str] = ()) -> ModuleType:
    """Import a backend's library. Raises BackendUnavailable: what to install, or why the installed one is broken.

    without: parts that the library imports by itself and can do without; they stay importable later.
    """
    if module in sys.modules:
        return sys.modules[module]
    try:
        with left_out(*without):
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            raise not_installed(declaration, module) from error
        raise BackendUnavailable(f"{module} is installed but cannot be imported: {error}") from error
    except IMPORT_ERRORS as error:
        raise BackendUnavailable(f"{module} is installed but cannot be imported: {error}") from error


@contextmanager
def left_out(*modules: str) -> Iterator[None]:
    """Let modules be as if they were not installed, but for those that are imported already.

    Not by a None in `sys.modules`: SciPy takes what is there for imported. Thread: all import so meanwhile.
    """
    found_by: dict[Any, Any] = {_LeavingOut(finder, modules): finder for finder in sys.meta_path if modules}
    sys.meta_path[:] = [*found_by] or sys.meta_path
    try:
        yield
    finally:
        for each in found_by:  # another thread's import may keep it
            each.modules = ()
        # A library may have added a finder of its own.
        sys.meta_path[:] = [found_by.get(finder, finder) for finder in sys.meta_path]


def not_installed(declaration: Declaration, module: str = "") -> BackendUnavailable:
    """The error for a missing library, with what to install. module: the part of it that is missing, "" for all."""
    from edge_runtime.extras import install_advice  # only where a library is missing

    advice = declaration.advice or install_advice(declaration.extra)
    return BackendUnavailable(f"{module or declaration.libraries[0]} is not installed; {advice}")


def probe_library(name: str, find: Callable[[], tuple[str, tuple[str, ...]]]) -> Probe:
    """Make a probe from `find`, which returns the library's version and devices. Raises nothing."""
    try:
        version, devices = find()
    except (BackendUnavailable, *IMPORT_ERRORS) as error:
        return Probe(name, is_available=False, reason=str(error) or type(error).__name__)
    return Probe(name, is_available=True, version=version, devices=devices)


class _LeavingOut:
    """A finder of modules that finds all but some."""

    def __init__(self, finder: Any, modules: Sequence[str]) -> None:
        self.modules = modules
        self._finder = finder

    def find_spec(self, name: str, *arguments: Any) -> Any:
        return None if name in self.modules else self._finder.find_spec(name, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)
