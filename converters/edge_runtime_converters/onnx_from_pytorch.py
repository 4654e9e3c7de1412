"""A PyTorch program (`torch.export.save`, .pt2) or a module in memory to ONNX, by torch.onnx.export.

Owns: the calls of PyTorch. The batch axis of the result is open where it was open in the export
(`dynamic_shapes`), or always for `convert_module`.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_runtime.errors import ConversionFailed
from edge_runtime.tensors import Array
from edge_runtime_converters.libraries import PYTORCH, failing_as, import_library
from edge_runtime_converters.options import Shapes
from edge_runtime_converters.original import Original
from edge_runtime_converters.output_files import whole
from edge_runtime_converters.pytorch_archives import write_safe_program

EXTRA = "convert-pytorch"
_OLDEST = (2, 9)
"""The first version with this form of .pt2 (torch/export/pt2_archive)."""


class PytorchModule:
    """A PyTorch callable that takes its inputs by position. An `Original`."""

    def __init__(self, torch: Any, call: Any) -> None:
        self.described = f"PyTorch {torch.__version__}"
        self._torch = torch
        self._call = call

    def run(self, inputs: Mapping[str, Array]) -> list[Array]:
        """Return the outputs in the converted model's order. Raises ConversionFailed."""
        tensors = [self._torch.from_numpy(array.copy()) for array in inputs.values()]
        with failing_as("PyTorch cannot run it"), self._torch.inference_mode():
            found = self._call(tensors)
        leaves, _ = self._torch.utils._pytree.tree_flatten(found)  # noqa: SLF001 (torch.export's own documentation uses it)
        return [leaf.detach().cpu().numpy() for leaf in leaves if isinstance(leaf, self._torch.Tensor)]


def convert(source: Path, target: Path, shapes: Shapes) -> Original:
    """Write a .pt2 as ONNX; returns the source, loaded. shapes: unused, the program holds them.

    Loads only the file's numbers and arithmetic (pytorch_archives.py). Raises ConversionFailed.
    """
    torch = import_torch()
    with tempfile.TemporaryDirectory(prefix="pt2-") as folder:
        safe = Path(folder) / "model.pt2"
        write_safe_program(source, safe)
        with failing_as(f"{source}: PyTorch {torch.__version__} cannot load it"), quiet():
            program = torch.export.load(str(safe))
        _write(torch, source, target, program)
    with quiet():
        module, in_spec = program.module(), program.call_spec.in_spec

    def call(tensors: Sequence[Any]) -> Any:
        positional, named = torch.utils._pytree.tree_unflatten(tensors, in_spec)  # noqa: SLF001 (as above)
        return module(*positional, **named)

    return PytorchModule(torch, call)


def convert_module(module: Any, example_inputs: Sequence[Any], target: str | Path) -> Original:
    """Write a `torch.nn.Module` in memory as ONNX with axis 0 of every input open; returns the source.

    example_inputs: one tensor an input, [rows, …]. Sets the module to evaluation. Raises ConversionFailed.
    """
    torch = import_torch()
    module.eval()
    is_open = {0: torch.export.Dim.DYNAMIC}
    # torch.export takes a single row for a fixed length, so the example has two.
    examples = tuple(torch.cat((each, each)) if each.shape[:1] == (1,) else each for each in example_inputs)
    with failing_as(f"{type(module).__name__}: torch.export cannot export it"):
        program = torch.export.export(module, examples, dynamic_shapes=tuple(is_open for _ in examples), strict=False)
    _write(torch, Path(type(module).__name__), Path(target), program)
    return PytorchModule(torch, lambda tensors: module(*tensors))


def import_torch() -> Any:
    """Import PyTorch, which the user brings. Raises ConversionFailed: absent, or too old to read models safely."""
    torch = import_library("torch", PYTORCH)
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _OLDEST:
        wanted = ".".join(map(str, _OLDEST))
        raise ConversionFailed(f"PyTorch {torch.__version__} is here; wanted {wanted} or newer: pip install -U torch")
    return torch


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide PyTorch's warnings of coming changes and of missing torchvision operators."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _write(torch: Any, source: Path, target: Path, program: Any) -> None:
    import_library("onnxscript", EXTRA)
    with failing_as(f"{source}: torch.onnx cannot write it"), quiet(), whole(target) as output:
        made = torch.onnx.export(program, dynamo=True, verbose=False)
        _name_outputs(made.model.graph, _output_names(torch, program))
        made.save(str(output), external_data=False)


def _output_names(torch: Any, program: Any) -> list[str]:
    """A name for each output of a program, by its place: `output`, `output_0`, or the keys of a dictionary.

    PyTorch's own names come from the last operation, `add_6`, and change with each change of a model.
    """
    tree, spec = torch.utils._pytree, program.call_spec.out_spec  # noqa: SLF001 (as above)
    leaves, _ = tree.tree_flatten_with_path(tree.tree_unflatten(list(range(spec.num_leaves)), spec))
    names = []
    for (path, _), user_output in zip(leaves, program.graph_signature.user_outputs, strict=True):
        if isinstance(user_output, str):  # others are constants, which are not in the graph
            keys = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path]
            begins_with_name = bool(keys) and not keys[0].isdigit()
            names.append(re.sub(r"[^\w.-]", "_", "_".join(keys if begins_with_name else ["output", *keys])))
    return names


def _name_outputs(graph: Any, names: Sequence[str]) -> None:
    """Give a graph's outputs these names, except for one that is an input too, or whose name is taken."""
    taken = {value.name for value in (*graph.inputs, *graph.initializers.values())}
    taken |= {value.name for node in graph for value in node.outputs}
    for value, name in zip(graph.outputs, names, strict=True):
        if name not in taken and value not in graph.inputs:
            value.name = name
            taken.add(name)


if __name__ == "__main__":
    from edge_runtime_converters.command import main

    sys.exit(main("onnx"))
