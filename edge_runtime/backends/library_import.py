"""Import a backend's library late, and turn a failed import into a reason that a person can act on."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from edge_runtime.backends.base import Probe
from edge_runtime.errors import BackendUnavailable
from edge_runtime.extras import install_advice

IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError, TypeError, ValueError, SystemError)
"""What importing a missing, broken or mismatched binary package raises."""


def import_library(module: str, extra: str, without: Sequence[str] = ()) -> ModuleType:
    """Import a library. Raises BackendUnavailable with the extra to install, or why the installed one is broken.

    without: parts that the library imports by itself and can do without; they stay importable later.
    """
    if module in sys.modules:
        return sys.modules[module]
    left_out = [part for part in without if part not in sys.modules]
    try:
        for part in left_out:
            sys.modules[part] = None  # type: ignore[assignment]  # makes an import fail at once
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            raise not_installed(module, extra) from error
        raise BackendUnavailable(f"{module} is installed but cannot be imported: {error}") from error
    except IMPORT_ERRORS as error:
        raise BackendUnavailable(f"{module} is installed but cannot be imported: {error}") from error
    finally:
        for part in left_out:
            sys.modules.pop(part, None)


PYTORCH_ADVICE = "install it with: pip install torch --index-url https://download.pytorch.org/whl/cpu"
"""No extra brings it: each device needs another build, and PyPI's brings gigabytes of CUDA. Source:
https://pytorch.org/get-started/locally."""


def not_installed(module: str, extra: str) -> BackendUnavailable:
    """The error for a missing library."""
    advice = PYTORCH_ADVICE if module == "torch" else install_advice(extra)
    return BackendUnavailable(f"{module} is not installed; {advice}")


def probe_library(name: str, find: Callable[[], tuple[str, tuple[str, ...]]]) -> Probe:
    """Make a probe from `find`, which returns the library's version and devices. Raises nothing."""
    try:
        version, devices = find()
    except (BackendUnavailable, *IMPORT_ERRORS) as error:
        return Probe(name, is_available=False, reason=str(error) or type(error).__name__)
    return Probe(name, is_available=True, version=version, devices=devices)
