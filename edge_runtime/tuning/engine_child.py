"""The child process in which an engine is loaded and run on the inputs it is compared by.

Started by `engine_trial` as `python -m edge_runtime.tuning.engine_child PARENT`, a request as JSON on standard input;
answers with one finding as JSON, outputs in a file. What crashes, hangs or eats memory does so here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from edge_runtime.backends.base import Instance, LoadOptions
from edge_runtime.backends.registry import backend
from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.repository.manifest import TensorForm
from edge_runtime.serving.confinement import confine
from edge_runtime.serving.warmup import warm_up
from edge_runtime.tuning.arrays_file import read_arrays, write_arrays

MAX_FAULT_CHARACTERS = 600


class Request(Struct, frozen=True):
    """What to load, and the files of inputs and outputs; both "" to only look at the model."""

    backend: str
    artifact: str
    device: str
    precision: str
    threads: int
    settings: ModelSettings
    inputs: str = ""
    outputs: str = ""


class Finding(Struct, frozen=True):
    """What was found; `fault` alone where it cannot be used. batches: whether axis 0 is rows; length: see FirstRuns."""

    fault: str = ""
    precision: str = ""
    inputs: tuple[TensorForm, ...] = ()
    outputs: tuple[TensorForm, ...] = ()
    batches: bool = False
    length: int = 1

    @property
    def spec(self) -> ModelSpec:
        """Inputs and outputs as the library reports them."""
        described = [
            tuple(TensorSpec(f.name, f.datatype, f.shape) for f in forms) for forms in (self.inputs, self.outputs)
        ]
        return ModelSpec(described[0], described[1])

    @property
    def interface(self) -> str:
        """Inputs and outputs as clients know them."""
        taken, given = (", ".join(f"{f.name} {f.datatype}" for f in forms) for forms in (self.inputs, self.outputs))
        return f"{taken} -> {given}"


def main(arguments: Sequence[str]) -> int:
    """Run what standard input names, for the process of that id. Exit status 0 when there is a finding."""
    with confine(int(arguments[0])) as answer:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
        try:
            finding = _try(request)
        except EdgeRuntimeError as error:
            finding = Finding(fault=error.message)
        except MemoryError:
            finding = Finding(fault="there is not enough memory for it")
        except Exception as error:  # noqa: BLE001  what a library raises unexpectedly is a failed engine too
            finding = Finding(fault=f"{type(error).__name__}: {error}"[:MAX_FAULT_CHARACTERS])
        answer.write(msgspec.json.encode(finding))
    return 0


def _try(request: Request) -> Finding:
    settings = request.settings
    options = LoadOptions(
        threads=request.threads, precision=request.precision, device=request.device, extra=settings.options
    )
    instance = backend(request.backend).load(Path(request.artifact), options)
    try:
        first = warm_up(instance, settings)
        if request.inputs:
            _run_all(instance, request)
        return Finding(
            precision=instance.precision,
            inputs=tuple(TensorForm(each.name, each.datatype, each.shape) for each in instance.spec.inputs),
            outputs=tuple(TensorForm(each.name, each.datatype, each.shape) for each in instance.spec.outputs),
            batches=first.batches,
            length=first.length,
        )
    finally:
        instance.close()


def _run_all(instance: Instance, request: Request) -> None:
    names = [spec.name for spec in instance.spec.outputs]
    runs = (dict(zip(names, instance.run(inputs), strict=True)) for inputs in read_arrays(Path(request.inputs)))
    write_arrays(Path(request.outputs), runs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
