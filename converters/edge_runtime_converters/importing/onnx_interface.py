"""A converted ONNX model's inputs and outputs as its callers know them: names, datatypes, columns, a threshold.

Owns: the nodes at the ends of the graph that make them so; what is between is not touched. Triton's clients name a
TorchScript model's tensors `INPUT__0`, and a forest's answer is one FP32 tensor `output__0`, whatever it answers. Runs
in a child of its own: a graph is never read by the process that writes models.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from edge_runtime.errors import ConversionFailed
from edge_runtime.sandbox.child import run_child
from edge_runtime.sandbox.ending import ShowProgress
from edge_runtime_converters.importing.plan import CallersOutput
from edge_runtime_converters.libraries import import_library
from edge_runtime_converters.onnx_source import read_onnx
from edge_runtime_converters.original import serve
from edge_runtime_converters.output_files import whole

EXTRA = "convert-onnx"
LIMIT_S = 120.0
MEMORY_BYTES = 8 << 30
"""The largest graph that is one protobuf file, twice in memory, and what libraries take."""


class InterfaceTask(Struct, frozen=True):
    """A graph for the child, which is written anew at its own path."""

    path: str
    inputs: tuple[str, ...]
    outputs: tuple[CallersOutput, ...]


def set_interface(path: Path, inputs: tuple[str, ...], outputs: tuple[CallersOutput, ...]) -> None:
    """Give a converted model the inputs (by place) and outputs that its callers know, in a child process.

    Raises ConversionFailed: it has no such outputs, or another number of inputs.
    """
    task = InterfaceTask(str(path), inputs, outputs)
    ending = run_child(
        interface_in_child, task, limit_s=LIMIT_S, memory_bytes=MEMORY_BYTES, reads=[path.parent], writes=[path.parent]
    )
    if ending.result is None:
        raise ConversionFailed(f"its tensors cannot be named as its callers know them: {ending.reason}")


def interface_in_child(task: InterfaceTask, progress: ShowProgress) -> int:
    """Write the graph anew; returns its number of outputs. Raises ConversionFailed."""
    path = Path(task.path)
    progress("naming its tensors")
    model = read_onnx(path, EXTRA)
    _Ends(import_library("onnx", EXTRA), model.graph).set(task.inputs, task.outputs)
    with whole(path) as written:
        written.write_bytes(model.SerializeToString())
    served = serve(path)
    found = [tensor.name for tensor in served.spec.outputs]
    served.close()
    wanted = [output.name for output in task.outputs]
    if wanted and found != wanted:
        raise ConversionFailed(f"its outputs are {', '.join(found)}; wanted {', '.join(wanted)}")
    return len(found)


# ---- private --------------------------------------------------------------------------------------------------------


class _Ends:
    """The two ends of a graph."""

    def __init__(self, onnx: Any, graph: Any) -> None:
        self._onnx = onnx
        self._graph = graph
        self._taken = {name for node in graph.node for name in (*node.input, *node.output)}

    def set(self, inputs: Sequence[str], outputs: Sequence[CallersOutput]) -> None:
        """Put nodes before the inputs and after the outputs, where they differ. Raises ConversionFailed."""
        weights = {weight.name for weight in self._graph.initializer}
        own = [value for value in self._graph.input if value.name not in weights]
        if inputs and len(inputs) != len(own):
            names = ", ".join(value.name for value in own)
            raise ConversionFailed(f"it takes {len(own)} inputs ({names}), and its callers know {', '.join(inputs)}")
        for value, name in zip(own, inputs, strict=False):
            if value.name != name:
                self._check_free(name)
                self._graph.node.insert(0, self._node("Identity", [name], value.name))
                value.name = name
        if outputs:
            made = list(self._graph.output)
            chosen = [self._output(made, place, output) for place, output in enumerate(outputs)]
            del self._graph.output[:]
            self._graph.output.extend(chosen)

    def _output(self, made: Sequence[Any], place: int, wanted: CallersOutput) -> Any:
        """The output that callers know, made of one of the graph's."""
        by_name = {value.name: value for value in made}
        value = next((by_name[name] for name in wanted.made if name in by_name), None)
        at = wanted.place if wanted.place >= 0 else place
        if value is None and not wanted.made and at < len(made):
            value = made[at]
        if value is None:
            raise ConversionFailed(
                f"its outputs are {', '.join(by_name)}, and {wanted.name} is made of "
                f"{' or '.join(wanted.made) or f'the one at place {at}'}"
            )
        if value.name == wanted.name:
            return value
        self._check_free(wanted.name)
        if not wanted.columns:
            self._add("Identity", [value.name], wanted.name)
            renamed = type(value)()
            renamed.CopyFrom(value)
            renamed.name = wanted.name
            return renamed
        return self._columns(value, wanted)

    def _columns(self, value: Any, wanted: CallersOutput) -> Any:
        """The last columns of a tensor, FP32 [rows, columns]; or whether one is above a threshold, 1 or 0."""
        own = wanted.name
        shape = self._constant(f"{own}/shape", np.array([-1, wanted.columns], np.int64))
        dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        name = value.name
        if len(dims) == 2 and dims[1] > wanted.columns:
            name = self._add("Slice", [name, *self._range(own, dims[1] - wanted.columns, dims[1])], f"{own}/last")
        if wanted.above is not None:
            level = self._constant(f"{own}/level", np.array(wanted.above, np.float32))
            name = self._add("Greater", [name, level], f"{own}/above")
        name = self._add("Cast", [name], f"{own}/float", to=self._onnx.TensorProto.FLOAT)
        self._add("Reshape", [name, shape], own)
        return self._onnx.helper.make_tensor_value_info(own, self._onnx.TensorProto.FLOAT, ["rows", wanted.columns])

    def _range(self, own: str, begin: int, end: int) -> list[str]:
        numbers = {"begin": begin, "end": end, "axis": 1}
        return [self._constant(f"{own}/{key}", np.array([value], np.int64)) for key, value in numbers.items()]

    def _constant(self, name: str, value: Any) -> str:
        self._graph.initializer.append(self._onnx.numpy_helper.from_array(value, name))
        return name

    def _add(self, operator: str, inputs: list[str], name: str, **words: Any) -> str:
        self._graph.node.append(self._node(operator, inputs, name, **words))
        return name

    def _node(self, operator: str, inputs: list[str], name: str, **words: Any) -> Any:
        return self._onnx.helper.make_node(operator, inputs, [name], **words)

    def _check_free(self, name: str) -> None:
        if name in self._taken:
            raise ConversionFailed(f"a tensor within it is called {name} already")
        self._taken.add(name)
