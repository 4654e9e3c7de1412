"""A way tried in a child process: it loads the artifact and runs it on inputs, so that a crash or hang happens there.

Owns: the task, its result, and the .npz files that carry inputs and outputs. Called by tune.py and comparison.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from edge_runtime.backends.base import Instance, LoadOptions
from edge_runtime.backends.registry import backend
from edge_runtime.config.settings import ModelSettings
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.models.warmup import read_sample, warm_up
from edge_runtime.sandbox.child import named_files, run_child
from edge_runtime.sandbox.ending import ShowProgress
from edge_runtime.tensors import Array
from edge_runtime.tuning.candidates import Way
from edge_runtime.tuning.options import TunedDevice
from edge_runtime.updates.manifest import TensorForm

LIMIT_S = 600.0
"""A TensorRT engine takes minutes to build; thousands of runs of a large model on a small board take as long."""

LEAST_S = 60.0
"""A trial's time after the tune's time is over: without a way there is no answer, and a Pi loads some this slowly."""


class WayTask(Struct, frozen=True):
    """The artifact to load, and the files of inputs and outputs; both "" to only describe the model."""

    backend: str
    artifact: str
    device: str
    precision: str
    threads: int
    settings: ModelSettings
    inputs: str = ""
    outputs: str = ""

    def samples(self) -> list[Path]:
        """The files of `warmup.inputs`: beside `model.toml` or the artifact."""
        name, version = self.settings.warmup.inputs, Path(self.artifact).parent
        places = [] if name is None else [version / name, version.parent / name]
        return [path for path in places if path.is_file()]


class WayFinding(Struct, frozen=True):
    """The result of a trial; only `fault` where the way is unusable. batches: axis 0 is rows; length: see FirstRuns."""

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


@dataclass(frozen=True, slots=True)
class WayTrials:
    """Tries ways on a device. A child that crashes or is late gives a finding with a fault.

    until_s: the end of the tune's time, a monotonic instant.
    """

    device: TunedDevice
    settings: ModelSettings
    until_s: float

    def look(self, way: Way, graph: Path) -> WayFinding:
        """Load a way and run it once."""
        return self._found(self._task(way, graph))

    def run(self, way: Way, graph: Path, inputs: Path, outputs: Path) -> tuple[WayFinding, list[dict[str, Array]]]:
        """Load a way and run it on a file of samples; returns the outputs of each, none with a fault.

        outputs: a temporary file.
        """
        task = self._task(way, graph)
        finding = self._found(
            msgspec.structs.replace(task, inputs=str(inputs.absolute()), outputs=str(outputs.absolute()))
        )
        if finding.fault:
            return finding, []
        try:
            return finding, read_arrays(outputs)
        except (OSError, ValueError) as error:
            return WayFinding(fault=f"its outputs were lost: {error}"), []
        finally:
            outputs.unlink(missing_ok=True)

    def _found(self, task: WayTask) -> WayFinding:
        limit_s = min(max(self.until_s - time.monotonic(), LEAST_S), LIMIT_S)
        ending = run_child(
            try_way,
            task,
            limit_s=limit_s,
            reads=[
                Path(task.artifact).parent,
                *named_files(Path(task.artifact)),
                *task.samples(),
                *([Path(task.inputs)] if task.inputs else []),
            ],
            writes=[Path(task.outputs).parent] if task.outputs else [],
            starts_none=True,
        )
        return ending.result or WayFinding(fault=ending.reason)

    def _task(self, way: Way, graph: Path) -> WayTask:
        profile = self.device.profile
        choice = next((each for each in profile.backends if each.name == way.backend), None)
        extra = {} if choice is None else dict(choice.extra)
        return WayTask(
            backend=way.backend,
            artifact=str(graph.absolute()),
            device=way.device,
            precision=way.precision,
            threads=profile.limits.cores,
            settings=msgspec.structs.replace(self.settings, options={**extra, **self.settings.options}),
        )


def try_way(task: WayTask, _progress: ShowProgress) -> WayFinding:
    """Load the artifact, warm it up, and run it on the inputs, in the child. Raises: as the backend does."""
    settings = task.settings
    options = LoadOptions(threads=task.threads, precision=task.precision, device=task.device, extra=settings.options)
    instance = backend(task.backend).load(Path(task.artifact), options)
    try:
        name, version = settings.warmup.inputs, Path(task.artifact).parent
        sample = None if name is None else read_sample(name, instance.spec, (version, version.parent))
        first = warm_up(instance, settings, sample)
        if task.inputs:
            _run_all(instance, task)
        return WayFinding(
            precision=instance.precision,
            inputs=tuple(TensorForm(each.name, each.datatype, each.shape) for each in instance.spec.inputs),
            outputs=tuple(TensorForm(each.name, each.datatype, each.shape) for each in instance.spec.outputs),
            batches=first.batches,
            length=first.length,
        )
    finally:
        instance.close()


def _run_all(instance: Instance, task: WayTask) -> None:
    names = [spec.name for spec in instance.spec.outputs]
    runs = (dict(zip(names, instance.run(inputs), strict=True)) for inputs in read_arrays(Path(task.inputs)))
    write_arrays(Path(task.outputs), runs)


def write_arrays(path: Path, runs: Iterable[Mapping[str, Array]]) -> int:
    """Write the inputs or outputs of runs, in order, as an .npz; returns the number of runs. Text becomes bytes."""
    entries: dict[str, Any] = {}
    count = 0
    for number, run in enumerate(runs):
        count += 1
        for name, array in run.items():
            entries[f"{number}/{name}"] = array.astype(np.bytes_) if array.dtype.kind == "O" else array
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **entries)
    return count


def read_arrays(path: Path) -> list[dict[str, Array]]:
    """Read the runs that `write_arrays` wrote, without unpickling. Raises ValueError, OSError: not such a file."""
    runs: list[dict[str, Array]] = []
    with np.load(path, allow_pickle=False) as file:
        for entry in file.files:
            number, _, name = entry.partition("/")
            while len(runs) <= int(number):
                runs.append({})
            array = file[entry]
            runs[int(number)][name] = array.astype(object) if array.dtype.kind == "S" else array
    return runs
