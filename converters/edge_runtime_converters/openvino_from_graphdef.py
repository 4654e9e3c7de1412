"""A frozen TensorFlow graph (`.pb`, `.graphdef`) to OpenVINO IR, by OpenVINO's own reader: nothing of the model runs.

Owns: what the graph's ends are called. It has no signature: its inputs are its placeholders, its outputs what nothing
reads, under the names of their nodes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from edge_runtime.errors import ConversionFailed
from edge_runtime_converters.libraries import failing_as
from edge_runtime_converters.openvino_from_onnx import read_model, write_ir
from edge_runtime_converters.options import Shapes
from edge_runtime_converters.original import Original

MAX_BYTES = 2_000_000_000
"""One protobuf file."""


def convert(source: Path, target: Path, shapes: Shapes) -> Original | None:
    """Write a frozen graph as fp32 IR. shapes: of placeholders that leave them out, by name. Raises ConversionFailed.

    Returns None: TensorFlow would run the model's operators, also those on files, so only OpenVINO reads it.
    """
    size = source.stat().st_size
    if size > MAX_BYTES:
        raise ConversionFailed(f"{source}: {size} bytes; wanted at most {MAX_BYTES}")
    model = read_model(source)
    with failing_as(f"{source}: its inputs do not have the shapes given"):
        for port in (*model.inputs, *model.outputs):
            port.set_names({_node_name(port)})
        given = {_node_name(port): port for port in model.inputs if _node_name(port) in shapes}
        if given:
            model.reshape({port: list(shapes[name].shape) for name, port in given.items()})
    write_ir(model, source, target, "f32", None)
    return None


def _node_name(port: Any) -> str:
    """The name of a tensor without the number of the node's first output, `:0`."""
    name = min(port.get_names(), default=port.get_node().get_friendly_name())
    return str(name).removesuffix(":0")


if __name__ == "__main__":
    from edge_runtime_converters.command import main

    sys.exit(main("openvino"))
