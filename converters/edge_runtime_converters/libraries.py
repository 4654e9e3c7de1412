"""A conversion's libraries: imported late, kept from phoning home.

Owns: the error for a missing or broken library, with the extra that brings it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType

from edge_runtime.backends.library_import import left_out
from edge_runtime.errors import ConversionFailed
from edge_runtime.extras import install_advice

PYTORCH = "pytorch"
"""In place of an extra: users bring PyTorch, because each device needs another build of it."""

_PYTORCH_ADVICE = "install it with: pip install torch --index-url https://download.pytorch.org/whl/cpu"
"""Source: https://pytorch.org/get-started/locally; from PyPI it brings gigabytes of CUDA."""

_COMPANIONS = {
    "keras": ("pandas", "sklearn"),
    "lightgbm": ("pandas", "sklearn"),
    "nncf": ("torch",),
    "skops": ("torch",),
    "xgboost": ("pandas", "sklearn"),
}
"""Packages that a library imports where it finds them, to take their objects too. No conversion hands it one, and they
take most of its time: XGBoost is there in 0.5 s without them, and in 1.9 s with them."""

_IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError, TypeError, ValueError, SystemError)


def import_library(module: str, extra: str) -> ModuleType:
    """Import a library or a part of one, without its companions. extra: of edge-runtime, which brings it.

    Raises ConversionFailed: what to install, or why it cannot be imported.
    """
    # openvino_telemetry reports use over the network unless it is absent; openvino and nncf both do without it.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    package = module.partition(".")[0]
    try:
        with without_companions(package):
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise ConversionFailed(f"{package} is installed but cannot be imported: {error}") from error
        advice = _PYTORCH_ADVICE if extra == PYTORCH else install_advice(extra)
        raise ConversionFailed(f"{package} is not installed; {advice}") from error
    except _IMPORT_ERRORS as error:
        raise ConversionFailed(f"{package} is installed but cannot be imported: {error}") from error


def without_companions(package: str) -> AbstractContextManager[None]:
    """Let a library find none of the packages that it imports beside its own; those imported already stay."""
    return left_out(*_COMPANIONS.get(package, ()))


@contextmanager
def failing_as(text: str) -> Iterator[None]:
    """Turn any exception of a library into ConversionFailed: the text, then the library's reason."""
    try:
        yield
    except ConversionFailed:
        raise
    except Exception as error:
        raise ConversionFailed(f"{text}: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """The first lines of a library's message, short enough for one paragraph, without its stack."""
    lines = [line.strip() for line in str(error).partition("Stack trace:")[0].splitlines() if line.strip()]
    text = " ".join(lines[:4]) or type(error).__name__
    return text if len(text) <= 500 else f"{text[:500]}…"
