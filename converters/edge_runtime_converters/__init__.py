"""Converters: a trained model of any supported library becomes an artifact that a device serves.

Each `<target>_from_<source>.py` is one step, to import or to run (`python -m edge_runtime_converters.onnx_from_sklearn
MODEL`); `conversion.py` joins steps in a child process and compares the result with the source. Each library is
imported inside the step that needs it. Converters import `edge_runtime`; it never imports them.
"""

from __future__ import annotations

from edge_runtime.cli.verbs import Verb

CONVERT = Verb(
    "convert",
    "make an artifact of a trained model, and show how near it is to its source",
    "edge_runtime_converters.command",
)
IMPORT = Verb(
    "import",
    "take models of Triton, TorchServe and others into a models folder",
    "edge_runtime_converters.import_command",
)
