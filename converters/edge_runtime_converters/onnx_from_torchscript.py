"""TorchScript (`torch.jit.save`, .pt) to ONNX with an open batch axis, by PyTorch's TorchScript exporter.

Owns: the calls of the exporter. A traced program does not hold its input shapes, so the caller gives them (`--shapes`).
PyTorch keeps TorchScript for existing models; export new ones with torch.export.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edge_runtime.errors import ConversionFailed
from edge_runtime.model_spec import DYNAMIC, TensorSpec
from edge_runtime.tensors import DATATYPES
from edge_runtime_converters.libraries import failing_as, import_library
from edge_runtime_converters.onnx_from_pytorch import EXTRA, PytorchModule, import_torch, quiet
from edge_runtime_converters.options import Shapes
from edge_runtime_converters.original import Original
from edge_runtime_converters.output_files import whole
from edge_runtime_converters.pytorch_archives import write_safe_archive

_OPSET = 17
"""Every allowed ONNX Runtime and OpenVINO reads it; this exporter writes up to 20."""


def convert(source: Path, target: Path, shapes: Shapes) -> Original:
    """Write TorchScript as ONNX; returns the source, loaded. shapes: of every argument of `forward`, in its order.

    Loads only code that computes (pytorch_archives.py). Raises ConversionFailed.
    """
    torch = import_torch()
    import_library("onnx", EXTRA)
    with tempfile.TemporaryDirectory(prefix="torchscript-") as folder, quiet():
        safe = Path(folder) / "model.pt"
        write_safe_archive(source, safe)
        with failing_as(f"{source}: PyTorch {torch.__version__} cannot load it"):
            module = torch.jit.load(str(safe), map_location="cpu").eval()
        shapes = _arguments(module, shapes, source)
        _write(torch, module, source, target, list(shapes.values()))
    return PytorchModule(torch, lambda tensors: module(*tensors))


def _arguments(module: Any, shapes: Shapes, source: Path) -> Shapes:
    """The shapes in the order of `forward`, whose arguments they may name. Raises ConversionFailed: not as many."""
    wanted = [value.debugName().split(".")[0] for value in list(module.forward.graph.inputs())[1:]]
    if len(shapes) != len(wanted):
        example = " ".join(f"--shapes {name}=-1,3,224,224" for name in wanted)
        got = f"got {', '.join(shapes)}" if shapes else "TorchScript does not say the shapes itself"
        raise ConversionFailed(
            f"{source}: takes {', '.join(wanted)}; {got}. Say them in this order, for example {example}"
        )
    for spec in shapes.values():
        if DYNAMIC in spec.shape[1:]:
            raise ConversionFailed(f"shape of {spec.name!r}: only axis 0 may be open, got {list(spec.shape)}")
    return {name: shapes[name] for name in wanted} if set(shapes) == set(wanted) else shapes


def _write(torch: Any, module: Any, source: Path, target: Path, specs: Sequence[TensorSpec]) -> None:
    with failing_as(f"{source}: torch.onnx cannot write it"):
        outputs = _open_outputs(torch, module, source, specs)
        names = [f"output_{place}" for place in range(len(outputs))] if len(outputs) > 1 else ["output"]
        open_axes = {name: {0: "rows"} for name, is_open in zip(names, outputs, strict=True) if is_open}
        open_axes |= {spec.name: {0: "rows"} for spec in specs if spec.has_dynamic_axis_0}
        with whole(target) as output:
            torch.onnx.export(
                module, tuple(_example(torch, spec, 2) for spec in specs), str(output), dynamo=False,
                input_names=[spec.name for spec in specs], output_names=names, dynamic_axes=open_axes,
                opset_version=_OPSET,
            )  # fmt: skip


def _open_outputs(torch: Any, module: Any, source: Path, specs: Sequence[TensorSpec]) -> list[bool]:
    """Whether axis 0 of each output follows the rows, found by running two and three. Raises ConversionFailed."""
    lengths = []
    for rows in (2, 3):
        try:
            with torch.inference_mode():
                found = module(*(_example(torch, spec, rows) for spec in specs))
        except Exception as error:
            said = ", ".join(f"{spec.name}={','.join(map(str, spec.shape))}:{spec.datatype}" for spec in specs)
            raise ConversionFailed(
                f"{source}: PyTorch cannot run it with {said}; check --shapes. It said: {_last_words(error)}"
            ) from error
        leaves, _ = torch.utils._pytree.tree_flatten(found)  # noqa: SLF001 (torch.export's own documentation uses it)
        lengths.append([leaf.shape[0] if leaf.ndim else 0 for leaf in leaves if isinstance(leaf, torch.Tensor)])
    return [two != three for two, three in zip(*lengths, strict=True)]


def _last_words(error: Exception) -> str:
    """The last line of a TorchScript error, which is the reason; the lines before quote the program."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


def _example(torch: Any, spec: TensorSpec, rows: int) -> Any:
    shape = [rows if length == DYNAMIC else length for length in spec.shape]
    return torch.zeros(shape, dtype=getattr(torch, str(DATATYPES[spec.datatype].dtype)))


if __name__ == "__main__":
    from edge_runtime_converters.command import main

    sys.exit(main("onnx"))
