"""A model tried in a child process before it is published: load it, run it, describe it.

Owns: what a publisher's trial does and its limits. Loads nothing in the publisher's process: a model that crashes,
hangs or eats memory ends the child only, and is not published. Called by `releases`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from edge_runtime.backends.base import Instance, LoadOptions, TriedInstance
from edge_runtime.backends.registry import backend as backend_named
from edge_runtime.config.settings import ModelSettings
from edge_runtime.errors import LoadFailed, PublishError, RunFailed
from edge_runtime.hosts.steps_instance import StepsInstance
from edge_runtime.model_spec import ModelSpec, TensorSpec
from edge_runtime.models.loading import load_tried
from edge_runtime.models.warmup import FirstRuns, made_up_rows, make_inputs, warm_up
from edge_runtime.pictures.input import picture_input
from edge_runtime.pictures.model_metadata import read_metadata
from edge_runtime.pictures.presets import fill_inputs
from edge_runtime.sandbox.child import run_child
from edge_runtime.sandbox.ending import ShowProgress
from edge_runtime.sandbox.process_memory import limited_memory, peak_bytes, start_peak
from edge_runtime.steps import ModelSteps
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.tensors import Array, Tensors, as_tensors, datatype_name, fits_datatype, values_to_bits
from edge_runtime.updates.golden import DEFAULT_TOLERANCE, TOLERANCES, differences, not_finite, pack
from edge_runtime.updates.manifest import TensorForm
from edge_runtime.updates.trial import sent_forms, takes

LIMIT_S = 300.0
"""A large model on a slow laptop loads in a minute."""

MAX_THREADS = 4

MADE_UP_PROMPT = b"Once upon a time there was a river,"


class ArtifactTask(Struct, frozen=True):
    """The task of the child. golden: as of `try_artifact`; "" for made-up ones.

    out: the file for golden tensors. precision: of a variant, "" for the model itself. has_steps: as of an `Intake`.
    """

    backend: str
    artifact: str
    settings: dict[str, Any]
    golden: str
    out: str
    memory_limit_bytes: int
    precision: str
    has_steps: bool = False


class ArtifactFacts(Struct, frozen=True):
    """The results of a trial. lengths: bytes of each golden tensor in `out`, inputs first, then outputs.

    is_made_up: the golden input is ours. is_prompt: it is the prompt of a language model.
    """

    precision: str
    inputs: tuple[TensorForm, ...]
    outputs: tuple[TensorForm, ...]
    golden_inputs: tuple[TensorForm, ...]
    golden_outputs: tuple[TensorForm, ...]
    lengths: tuple[int, ...]
    peak_memory_bytes: int
    is_made_up: bool
    is_prompt: bool = False


@dataclass(frozen=True, slots=True)
class ArtifactTrial:
    """A trial that went well, with the golden tensors as bytes. artifact: the file's name."""

    backend: str
    artifact: str
    result: ArtifactFacts
    golden: bytes


def try_artifact(
    backend: str,
    artifact: Path,
    settings: Mapping[str, Any],
    *,
    precision: str = "",
    has_steps: bool = False,
    golden: Path | None = None,
    limit_s: float = LIMIT_S,
) -> ArtifactTrial:
    """Load an artifact and run it twice on its golden input.

    precision: of a variant, "" for the model itself. has_steps: as of an `Intake`. golden: an .npz with one array an
    input, a picture for a model that declares how it is read; of a model of texts a file with one a line, and tabs
    between the texts of a pair; of a language model a file that is its prompt; None: made up.

    Raises PublishError: the artifact cannot be loaded or run, crashes, takes too long, or gives outputs that no device
    can be checked by.
    """
    with tempfile.TemporaryDirectory(prefix="edge-runtime-trial-") as folder:
        out = Path(folder) / "golden.bin"
        absolute = str(golden.resolve()) if golden is not None else ""
        free_bytes = HostProbe().memory_available_bytes() or 0
        task = ArtifactTask(
            backend,
            str(artifact.resolve()),
            dict(settings),
            absolute,
            str(out),
            free_bytes,
            precision,
            has_steps=has_steps,
        )
        reads = [artifact.resolve().parent, *([] if golden is None else [golden])]
        ending = run_child(try_in_child, task, limit_s=limit_s, reads=reads, writes=[Path(folder)], starts_none=True)
        if ending.result is None:
            raise PublishError(f"{artifact.name}: {backend}: {ending.reason}; nothing was published")
        return ArtifactTrial(backend, artifact.name, ending.result, out.read_bytes())


# ---- in the child ---------------------------------------------------------------------------------------------------


def try_in_child(task: ArtifactTask, _: ShowProgress) -> ArtifactFacts:
    """Load and run the artifact; leaves its golden tensors in `out`. Raises EdgeRuntimeError, MemoryError."""
    with limited_memory(task.memory_limit_bytes) if task.memory_limit_bytes > 0 else nullcontext():
        return _facts(task)


def _facts(task: ArtifactTask) -> ArtifactFacts:
    settings = msgspec.convert(task.settings, ModelSettings)
    library = backend_named(task.backend)
    library.probe()  # imports the library, which is not the model's memory
    before = start_peak()
    threads = min(len(os.sched_getaffinity(0)), MAX_THREADS)
    options = LoadOptions(threads=threads, precision=task.precision, language=settings.language)
    instance = load_tried(library, Path(task.artifact), options, settings)
    try:
        first = warm_up(instance, settings)
        if task.has_steps and not task.golden.lower().endswith(".npz"):
            form, inputs = _sent(instance, settings, task, first, threads)
            tried = _TriedForm(form.spec, instance.precision, form.run)
            facts = describe_tried(tried, inputs, task.out, is_made_up=not task.golden)
            own = {"inputs": instance.spec.inputs, "outputs": instance.spec.outputs}
            forms = {key: tuple(map(_form, each)) for key, each in own.items()}
            return msgspec.structs.replace(facts, **forms, peak_memory_bytes=_peak(before, task))
        prompt = _prompt_name(instance.spec)
        if prompt and not task.golden.lower().endswith(".npz"):
            data = Path(task.golden).read_bytes() if task.golden else MADE_UP_PROMPT
            inputs = {prompt: np.array([data], object)}
        elif task.golden:
            golden = Path(task.golden)
            is_picture = golden.suffix.lower() != ".npz"
            inputs = _pictured(golden, instance, settings, task) if is_picture else given_inputs(golden, instance.spec)
        elif first.times:
            inputs = make_inputs(instance.spec, 1, first.length, settings.warmup.shapes)
        else:
            raise LoadFailed("no made-up input fits its open dimensions; give a real one with --golden FILE.npz")
        facts = describe_tried(instance, inputs, task.out, is_made_up=not task.golden)
        return msgspec.structs.replace(facts, peak_memory_bytes=_peak(before, task), is_prompt=bool(prompt))
    finally:
        instance.close()


def _prompt_name(spec: ModelSpec) -> str:
    """Return the input that takes a prompt: the first of a model that needs none of its inputs; "" of another."""
    if not spec.inputs or not all(each.is_optional for each in spec.inputs):
        return ""
    first = spec.inputs[0]
    return first.name if (first.datatype, first.shape) == ("BYTES", (1,)) else ""


def _peak(before: int, task: ArtifactTask) -> int:
    return max(peak_bytes() - before, Path(task.artifact).stat().st_size)


def describe_tried(
    instance: TriedInstance, inputs: Mapping[str, Array], out: str, *, is_made_up: bool
) -> ArtifactFacts:
    """Run what was loaded twice and describe it, but for its memory; leaves its golden tensors in the file `out`.

    Raises RunFailed: an output is not finite, or differs the second time.
    """
    packed_inputs = pack(inputs, {spec.name: spec.datatype for spec in instance.spec.inputs})
    outputs = _golden_outputs(instance, inputs)
    packed_outputs = pack(outputs, {spec.name: spec.datatype for spec in instance.spec.outputs})
    Path(out).write_bytes(packed_inputs.data + packed_outputs.data)
    return ArtifactFacts(
        precision=instance.precision,
        inputs=tuple(map(_form, instance.spec.inputs)),
        outputs=tuple(map(_form, instance.spec.outputs)),
        golden_inputs=packed_inputs.forms,
        golden_outputs=packed_outputs.forms,
        lengths=(*packed_inputs.lengths, *packed_outputs.lengths),
        peak_memory_bytes=0,
        is_made_up=is_made_up,
    )


class _TriedForm(NamedTuple):
    """A form of a model, tried as a model is."""

    spec: ModelSpec
    precision: str
    run: Callable[[Tensors], list[Array]]


def _sent(
    instance: Instance, settings: ModelSettings, task: ArtifactTask, first: FirstRuns, threads: int
) -> tuple[StepsInstance, dict[str, Array]]:
    """The form that takes the golden texts, and these. Raises RunFailed: none does; LoadFailed."""
    forms = sent_forms(instance, settings, Path(task.artifact), threads)
    lines = _lines(Path(task.golden)) if task.golden else None
    for form in forms:
        inputs = first.inputs(form.spec, 1, settings.warmup.shapes)
        if lines is None:
            inputs.update(made_up_rows(form.spec, form.form, ModelSteps(settings.input)))
        elif len(inputs) == 1:
            inputs = dict.fromkeys(inputs, lines)
        if takes(form, inputs):
            return form, inputs
    wanted = " or ".join(
        ", ".join(f"{each.name} {each.datatype} {list(each.shape)}" for each in form.spec.inputs) for form in forms
    )
    raise RunFailed(f"{task.golden or 'a text'}: the model takes {wanted}; wanted a text a line, or an .npz")


def _lines(path: Path) -> Array:
    """The texts of a file, BYTES [lines]; with tabs in them [lines, columns]. Raises RunFailed."""
    rows = [line.split(b"\t") for line in path.read_bytes().splitlines() if line.strip()]
    if len({len(row) for row in rows}) != 1:
        raise RunFailed(f"{path}: wanted a text a line, or as many texts in each line with tabs between them")
    array: Array = np.array(rows, object)
    return array[:, 0] if array.shape[1] == 1 else array


def _pictured(path: Path, instance: Instance, settings: ModelSettings, task: ArtifactTask) -> dict[str, Array]:
    """Read a picture as the model's steps declare. Raises RunFailed: it declares none; UnreadablePicture."""
    metadata = read_metadata(Path(task.artifact))
    preset = settings.preset or metadata.preset
    steps = fill_inputs(settings.input, preset, instance.spec, metadata, adds=settings.preset is not None)
    picture = picture_input(instance.spec, ModelSteps(steps), 1, 1)
    if picture is None or len(instance.spec.inputs) > 1:
        raise RunFailed(
            f"{path}: is not a .npz, and a picture is for a model of one input whose model.toml declares how it is "
            "read ([input.NAME] or preset)"
        )
    tensor, _ = picture.rows("picture", np.array([path.read_bytes()], object))
    return {picture.name: tensor}


def given_inputs(path: Path, model: ModelSpec) -> dict[str, Array]:
    """Read the arrays of an .npz in the model's order. Raises RunFailed: the model does not take them."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = as_tensors({name: values_to_bits(file[name]) for name in file.files})
    except (OSError, ValueError, TypeError) as error:
        raise RunFailed(f"{path}: is not a .npz with one array for each input: {error}") from error
    wanted = {spec.name: spec for spec in model.inputs}
    if set(arrays) != set(wanted):
        raise RunFailed(f"{path}: has {', '.join(arrays) or 'nothing'}; wanted {', '.join(wanted)}")
    for name, spec in wanted.items():
        array = arrays[name]
        if not fits_datatype(array.dtype, spec.datatype) or not spec.fits(array.shape):
            got = f"{datatype_name(array.dtype)} {list(array.shape)}"
            raise RunFailed(f"{path}: {name!r} is {got}; wanted {spec.datatype} {list(spec.shape)}")
    return {name: arrays[name] for name in wanted}


def _golden_outputs(instance: TriedInstance, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Run the model twice. Raises RunFailed: an output is not finite, or differs the second time."""
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
