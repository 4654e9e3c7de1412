"""Whether the models of an ensemble fit together, as Triton checks it, with its texts, which people search for. Pure.

Called before an ensemble answers; what this daemon asks of any pipeline is in pipelines/fit.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.triton.config import named_steps

if TYPE_CHECKING:
    from edge_runtime.triton.config import TritonConfig


def ensemble_faults(config: TritonConfig, steps: Mapping[str, tuple[ModelSpec, int]]) -> Iterator[str]:
    """Yield why an ensemble cannot be served: Triton's checks, in its order.

    steps: by name, the tensors of its model, and the most rows of a request; 0: it has no rows.
    """
    ensemble, rows = config.config["name"], config.max_batch_size
    interface = config.interface
    known = {
        each.name: _KnownTensor(each.datatype, each.shape, ensemble) for each in (*interface.outputs, *interface.inputs)
    }
    for name, step in named_steps(config.config).items():
        (spec, most_rows), model = steps[name], step["model_name"]
        if 0 < most_rows < rows:
            yield (
                f"ensemble {ensemble} allows maximum batch size {rows}, but it contains model {model} which only "
                f"allows maximum batch size to be {most_rows}"
            )
        yield from (f"in ensemble {ensemble}, {fault}" for fault in _step_faults(step, spec, known))


# ---- private --------------------------------------------------------------------------------------------------------


class _KnownTensor(NamedTuple):
    """A tensor of the ensemble, as the first model says it that has it."""

    datatype: str
    shape: tuple[int, ...]
    model: str


def _step_faults(step: Mapping[str, Any], spec: ModelSpec, known: dict[str, _KnownTensor]) -> Iterator[str]:
    name = step["model_name"]
    inputs, outputs = ({each.name: each for each in each_kind} for each_kind in (spec.inputs, spec.outputs))
    for key, tensor in step["input_map"].items():
        if key not in inputs:
            yield f"ensemble tensor {tensor} is mapping to non-existing input {key} in model {name}"
        else:
            yield from _conflicts(tensor, inputs[key], name, known)
    for key, each in inputs.items():
        if key not in step["input_map"] and not each.is_optional:
            yield f"input {key} in model {name} is not mapped to any ensemble tensors"
    for key, tensor in step["output_map"].items():
        if key not in outputs:
            yield f"ensemble tensor {tensor} is mapped from non-existing output {key} in model {name}"
        else:
            yield from _conflicts(tensor, outputs[key], name, known)


def _conflicts(tensor: str, spec: TensorSpec, model: str, known: dict[str, _KnownTensor]) -> Iterator[str]:
    before = known.setdefault(tensor, _KnownTensor(spec.datatype, spec.shape, model))
    if before.datatype != spec.datatype:
        yield (
            f"ensemble tensor {tensor}: inconsistent data type: {_type(before.datatype)} is inferred from model "
            f"{before.model} while {_type(spec.datatype)} is inferred from model {model}"
        )
    elif len(before.shape) != len(spec.shape) or any(
        DYNAMIC not in pair and pair[0] != pair[1] for pair in zip(before.shape, spec.shape, strict=True)
    ):
        yield (
            f"ensemble tensor {tensor}: inconsistent shape: {_shape(before.shape)} is inferred from model "
            f"{before.model} while {_shape(spec.shape)} is inferred from model {model}"
        )


def _type(datatype: str) -> str:
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"


def _shape(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"
