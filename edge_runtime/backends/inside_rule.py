"""Which models may run inside the daemon: those that neither a client's data nor their own size can turn against it.

Owns: the decision over one artifact and how it is to be loaded. `isolation = "auto"` follows it; every other model runs
in a host. A model may run inside when each of its operators is in a table (backends/onnx/rule.py) and used as its row
says, when only axis 0 of its inputs is open, and when one row takes little memory and work. All that the rule does not
know runs in a host.
"""

from __future__ import annotations

from pathlib import Path

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.onnx.graph import NotPlain
from edge_runtime.backends.onnx.rule import check_onnx
from edge_runtime.backends.onnx.traced_values import NotInside
from edge_runtime.errors import LoadFailed

_TRIED_OPTIONS = frozenset(("arena", "optimization"))
"""Options of ONNX Runtime that change no kernel; other options and devices were not tried."""

_TRIED_PRECISIONS = ("", "f32", "int8")


_MAY_BE_INSIDE = frozenset((".onnx", ".xml", ".plan"))
"""Suffixes of artifacts that `isolation = "never"` may keep inside. Some other formats hold code, and few of their
readers were made for files of strangers."""


def why_always_hosted(artifact: Path) -> str | None:
    """Return why an artifact runs in a host, whatever the settings say; None where they decide."""
    if artifact.suffix == ".py":
        return "is code"
    return None if artifact.suffix in _MAY_BE_INSIDE else "is of a kind that is read in a host alone"


def why_not_inside(backend: str, artifact: Path, options: LoadOptions) -> str | None:
    """Return why this artifact must run in a host, in words; None where it may run inside the daemon.

    Reads the file (some milliseconds), loads no library, raises nothing: a file that cannot be read belongs in a host.
    """
    reason = _why_not_covered(backend, options)
    if reason is not None:
        return reason
    if artifact.suffix != ".onnx":
        return f"the rule reads ONNX alone, and this is {artifact.name}"
    try:
        check_onnx(artifact)
    except (NotInside, NotPlain, LoadFailed) as error:
        return str(error)
    return None


def _why_not_covered(backend: str, options: LoadOptions) -> str | None:
    """Return what of the way that a model is loaded was not tried."""
    if backend not in ("onnxruntime", "openvino"):
        return f"models of {backend} always run in a host"
    if options.device.upper() not in ("", "CPU"):
        return f"it runs on {options.device}, and the rule covers the CPU alone"
    if options.precision not in _TRIED_PRECISIONS:
        return f"it runs in {options.precision}, and the rule covers f32 and int8 alone"
    if untried := sorted(set(options.extra) - (_TRIED_OPTIONS if backend == "onnxruntime" else set())):
        return f"it is loaded with the option {untried[0]!r}, which the rule does not cover"
    return None
