"""The imports of conversions, imported by the process that forks them: a library takes seconds, a small model tenths.

Owns: the modules of each extra that a conversion would else import by itself, one after another. Reads no model. Called
in a prepared parent by `edge_runtime/builds/conversions.py`, which knows it by name.
"""

from __future__ import annotations

import contextlib
import tempfile

from edge_runtime.backends.onnxruntime.backend import prepare_onnxruntime
from edge_runtime_converters import conversion  # noqa: F401 (all steps but the first)
from edge_runtime_converters.libraries import import_library
from edge_runtime_converters.onnx_from_keras import import_keras

_MODULES = {
    "convert-pytorch": ("torch", "torch.export", "onnxscript"),
    "convert-sklearn": ("skops.io", "skl2onnx", "sklearn"),
    "convert-xgboost": ("xgboost",),
    "convert-lightgbm": ("lightgbm",),
    "convert-catboost": ("catboost",),
    "convert-openvino": ("openvino",),
}


def prepare(extra: str) -> None:
    """Import what conversions of an extra need, without starting threads. Raises ConversionFailed: it is not there."""
    with contextlib.suppress(Exception):  # the check of what was made says why it cannot be imported
        prepare_onnxruntime()
    for module in (*_MODULES.get(extra, ()), "onnx"):
        import_library(module, extra)
    if extra == "convert-keras":
        with tempfile.TemporaryDirectory(prefix="keras-") as home:
            import_keras(home)
