"""The child process in which a model is tried before it is published: load it, run it, say what came out.

Started by `trial` as `python -m edge_runtime.publish.trial_child PARENT`, a request as JSON on stdin; leaves
`result.json` and `golden.bin` in a folder. A model that crashes, hangs or eats memory does so here, and is not
published.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from edge_runtime.backends.base import Instance, LoadOptions
from edge_runtime.backends.registry import backend
from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import EdgeRuntimeError, LoadFailed, RunFailed
from edge_runtime.model_spec import TensorSpec
from edge_runtime.repository.golden import DEFAULT_TOLERANCE, TOLERANCES, differences, not_finite, pack
from edge_runtime.repository.manifest import TensorForm
from edge_runtime.serving.confinement import confine, limited_memory, peak_bytes, start_peak
from edge_runtime.serving.warmup import make_inputs, warm_up
from edge_runtime.tensors import Array, as_tensors, datatype_name, fits_datatype, values_to_bits

MAX_THREADS = 4


class Request(Struct, frozen=True):
    """What to try. golden: an .npz with inputs by name, "" for made-up ones. out: an empty folder.

    precision: of a variant, "" for the model itself.
    """

    backend: str
    artifact: str
    settings: dict[str, Any]
    golden: str
    out: str
    memory_limit_bytes: int
    precision: str = ""


class Result(Struct, frozen=True):
    """What was found; `error` alone where the model cannot be published. `golden.bin` has inputs, then outputs."""

    error: str = ""
    precision: str = ""
    inputs: tuple[TensorForm, ...] = ()
    outputs: tuple[TensorForm, ...] = ()
    golden_inputs: tuple[TensorForm, ...] = ()
    golden_outputs: tuple[TensorForm, ...] = ()
    lengths: tuple[int, ...] = ()
    peak_memory_bytes: int = 0
    is_made_up: bool = False


def main(arguments: Sequence[str]) -> int:
    """Try the model that stdin names, for the process of that id. Exit status 0 when it can be published."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    confine(int(arguments[0])).close()
    is_limited = request.memory_limit_bytes > 0
    try:
        with limited_memory(request.memory_limit_bytes) if is_limited else nullcontext():
            result = _try(request)
    except EdgeRuntimeError as error:
        result = Result(error=error.message)
    except MemoryError:
        result = Result(error=f"it needs more than the {request.memory_limit_bytes} bytes of memory that are free here")
    (Path(request.out) / "result.json").write_bytes(msgspec.json.encode(result))
    return 1 if result.error else 0


def _try(request: Request) -> Result:
    settings = msgspec.convert(request.settings, ModelSettings)
    runner = backend(request.backend)
    runner.probe()  # imports the library, which is not the model's memory
    before = start_peak()
    threads = min(len(os.sched_getaffinity(0)), MAX_THREADS)
    instance = runner.load(Path(request.artifact), LoadOptions(threads=threads, precision=request.precision))
    try:
        first = warm_up(instance, settings)
        if request.golden:
            inputs = _given_inputs(Path(request.golden), instance)
        elif first.times:
            inputs = make_inputs(instance.spec, 1, first.length, settings.warmup.shapes)
        else:
            raise LoadFailed("no made-up input fits its open dimensions; give a real one with --golden FILE.npz")
        datatypes = {spec.name: spec.datatype for spec in instance.spec.inputs}
        packed_inputs = pack(inputs, datatypes)
        outputs = _golden_outputs(instance, inputs)
        packed_outputs = pack(outputs, {spec.name: spec.datatype for spec in instance.spec.outputs})
        (Path(request.out) / "golden.bin").write_bytes(packed_inputs.data + packed_outputs.data)
        return Result(
            precision=instance.precision,
            inputs=tuple(map(_form, instance.spec.inputs)),
            outputs=tuple(map(_form, instance.spec.outputs)),
            golden_inputs=packed_inputs.forms,
            golden_outputs=packed_outputs.forms,
            lengths=(*packed_inputs.lengths, *packed_outputs.lengths),
            peak_memory_bytes=max(peak_bytes() - before, Path(request.artifact).stat().st_size),
            is_made_up=not request.golden,
        )
    finally:
        instance.close()


def _given_inputs(path: Path, instance: Instance) -> dict[str, Array]:
    """The arrays of an .npz, in the model's order. Raises RunFailed: they are not what the model takes."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = as_tensors({name: values_to_bits(file[name]) for name in file.files})
    except (OSError, ValueError, TypeError) as error:
        raise RunFailed(f"{path}: is no .npz with one array for each input: {error}") from error
    wanted = {spec.name: spec for spec in instance.spec.inputs}
    if set(arrays) != set(wanted):
        raise RunFailed(f"{path}: has {', '.join(arrays) or 'nothing'}; wanted {', '.join(wanted)}")
    for name, spec in wanted.items():
        array = arrays[name]
        if not fits_datatype(array.dtype, spec.datatype) or not spec.fits(array.shape):
            got = f"{datatype_name(array.dtype)} {list(array.shape)}"
            raise RunFailed(f"{path}: {name!r} is {got}; wanted {spec.datatype} {list(spec.shape)}")
    return {name: arrays[name] for name in wanted}


def _golden_outputs(instance: Instance, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """What the model answers. Raises RunFailed: not a number, or something else the second time."""
    names = [spec.name for spec in instance.spec.outputs]
    first, second = (dict(zip(names, instance.run(inputs), strict=True)) for _ in range(2))
    forms = [TensorForm(spec.name, spec.datatype, first[spec.name].shape) for spec in instance.spec.outputs]
    bad = not_finite(forms, first)
    if bad is not None:
        raise RunFailed(f"its output {bad!r} has NaN or infinite values for the golden input")
    found = differences(forms, first, second, TOLERANCES.get(instance.precision, DEFAULT_TOLERANCE))
    if found:
        raise RunFailed(f"it answers the same input differently each time, so no device can be checked: {found[0]}")
    return first


def _form(spec: TensorSpec) -> TensorForm:
    return TensorForm(spec.name, spec.datatype, spec.shape)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
