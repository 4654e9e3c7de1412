"""One conversion from beginning to end: decide, convert in a child process, compare, give the artifact its name.

Owns: the child with its limits, where a source that crashes a library, hangs it or eats memory does so; and that
nothing is written unless the result is near its source, or is kept on request.
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from edge_runtime.client.input_files import PICTURE_NOTE
from edge_runtime.errors import ConversionFailed, EdgeRuntimeError
from edge_runtime.model_spec import ModelSpec
from edge_runtime.models.names import parse_version
from edge_runtime.sandbox.child import Show, named_files, run_child
from edge_runtime.sandbox.ending import Cause, Ending, ShowProgress
from edge_runtime.sandbox.process_memory import limited_memory
from edge_runtime.tensors import Array
from edge_runtime_converters.comparison import Comparison, OutputComparison, OutputReport, Report, tolerance_of
from edge_runtime_converters.formats import (
    TABULAR,
    SourceFormat,
    artifact_name,
    default_output,
    format_of,
    route,
    suffix_of,
)
from edge_runtime_converters.libraries import reason_of
from edge_runtime_converters.options import ConversionOptions, Shapes, Target, absolute, parse_shapes
from edge_runtime_converters.original import Original, ServedArtifact, serve
from edge_runtime_converters.output_files import check_free, place, total_bytes, work_folder
from edge_runtime_converters.samples import (
    RUN_ROWS,
    Run,
    check_finite,
    check_shapes,
    holds_pictures,
    made_up_runs,
    read_labels,
    read_runs,
    rows_of,
    spread,
)
from edge_runtime_converters.tree_rows import tree_runs

_FULL_BYTES = 1 << 16
"""Free space below which a disk counts as full: every single write of a conversion is larger."""


CALIBRATION_ROWS = 300
"""NNCF's own default; more change ranges little and cost time."""

_ORT_IS_FOR_OTHERS = "edge-runtime serves the .onnx, and loads no .ort: this one is for other programs"

_ENGINES_ARE_BUILT = (
    "edge-runtime builds its own engine of the ONNX model on each device, and loads none from a models folder: this "
    "one is for other programs, with the same TensorRT, GPU and driver"
)


class ConversionTask(Struct, frozen=True):
    """A conversion for the child. source_format: a SourceFormat's name. work: a folder with an empty `out/` in it."""

    options: ConversionOptions
    source_format: str
    work: str
    memory_limit_bytes: int


def convert(
    options: ConversionOptions, show: Show | None = None, *, run: Callable[..., Ending[Report]] = run_child
) -> Report:
    """Convert a model in a child process, and write the artifact where the options say.

    The report has no files where the result is too far from its source, or the data cannot show it, and `keep` is off.
    show: gets each stage, on this thread. run: calls a function in a child, as `run_child` does. Raises
    ConversionFailed: nothing was written.
    """
    source = Path(options.source)
    source_format = format_of(source)
    route(source_format, options.target, options.precision)
    parse_shapes(options.shapes)
    if options.gpu and options.target != "tensorrt":
        raise ConversionFailed(
            f"--gpu {options.gpu} says what an engine is built for; --to {options.target} fits any device"
        )
    if options.is_for_tensorrt and (options.target, options.precision) != ("onnx", "int8"):
        raise ConversionFailed(
            "--for-tensorrt chooses the datatypes of an int8 ONNX model; it goes with --to onnx --precision int8"
        )
    output = _output(options, source)
    with work_folder(output.absolute()) as work:
        (work / "out").mkdir()
        report = _reported(absolute(options, output), source_format, work, show, run)
        if report.is_near_enough or options.keep:
            placed = place(work / "out", output, may_replace=options.overwrite)
            report = msgspec.structs.replace(report, files=tuple(map(str, placed)))
        return msgspec.structs.replace(report, source=options.source)


def _output(options: ConversionOptions, source: Path) -> Path:
    output = Path(options.output) if options.output else default_output(source, options.target, options.precision)
    suffix = suffix_of(options.target)
    if options.output.endswith(os.sep) or (output.is_dir() and output.suffix != suffix):
        output /= artifact_name("model", options.target, options.precision)  # as a version folder has it
    if output.suffix != suffix:
        raise ConversionFailed(f"{output}: wanted a name that ends in {suffix} for {options.target}")
    if options.target in ("ort", "tensorrt") and parse_version(output.absolute().parent.name) is not None:
        raise ConversionFailed(
            f"{output}: the daemon serves no {suffix} from a version's folder; write an .onnx there (--to onnx, or "
            "copy the source), or name a file elsewhere with --output, for other programs"
        )
    for path in (output, output.with_suffix(".bin")) if suffix == ".xml" else (output,):
        if path.is_dir():
            raise ConversionFailed(f"{path} is a folder; name a file with --output")
        check_free(path, may_replace=options.overwrite)
    return output


def _reported(
    options: ConversionOptions,
    source_format: SourceFormat,
    work: Path,
    show: Show | None,
    run: Callable[..., Ending[Report]],
) -> Report:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    task = ConversionTask(options, source_format.name, str(work), memory_bytes)
    ending = run(
        convert_in_child,
        task,
        limit_s=options.timeout_s,
        reads=[
            Path(options.source).parent,
            *named_files(*map(Path, filter(None, (options.source, options.calibration, options.data, options.labels)))),
        ],
        writes=[work],
        show=show,
    )
    if ending.result is not None:
        return ending.result
    reason = _reason(ending, options)
    if shutil.disk_usage(work).free < _FULL_BYTES:  # libraries do not name a full disk
        reason = f"{reason}. The disk of {options.output} is full; free some space"
    raise ConversionFailed(reason)


def _reason(ending: Ending[Report], options: ConversionOptions) -> str:
    match ending.cause:
        case Cause.RAISED:
            return ending.reason
        case Cause.TIMED_OUT:
            return f"{options.source}: {ending.reason}, so it was ended; give it more with --timeout"
        case Cause.CRASHED | Cause.KILLED:
            return f"{options.source}: {ending.reason}; the file may be damaged, or the machine out of memory"
    return f"{options.source}: {ending.reason}"


# ---- in the child ----------------------------------------------------------------------------------------------------


def convert_in_child(task: ConversionTask, progress: ShowProgress) -> Report:
    """Convert into `out/` of the work folder, and report. Raises ConversionFailed, MemoryError."""
    # A library's temporary files are removed with the work folder, even when this process is killed.
    tempfile.tempdir = os.environ["TMPDIR"] = task.work
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # torch.load unpickles no code, whatever its caller asks for
    try:
        with limited_memory(task.memory_limit_bytes):
            return _Conversion(task, progress).report()
    except (EdgeRuntimeError, MemoryError):
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {reason_of(error)}"
        raise ConversionFailed(
            f"{task.options.source}: cannot be converted ({said}); the file may be damaged"
        ) from error


def convert_to_serve(
    source: str, target: Target, *, shapes: Sequence[str], work: str, memory_limit_bytes: int, progress: ShowProgress
) -> Report:
    """Convert a model's file for the daemon that loads it, as `model` into `out/` of the folder `work`.

    shapes: as of ConversionOptions. Raises ConversionFailed: among others, the result is too far from its source;
    MemoryError.
    """
    source_format = format_of(Path(source))
    route(source_format, target, "fp32")
    output = Path(work) / "out" / artifact_name("model", target, "fp32")
    # Nobody is there to give other data: the report says what these could not judge.
    options = ConversionOptions(
        source=source, target=target, output=str(output), shapes=tuple(shapes), accepts_unjudged=True
    )
    try:
        report = convert_in_child(ConversionTask(options, source_format.name, work, memory_limit_bytes), progress)
    except ConversionFailed as error:
        if "--shapes" not in error.message:
            raise
        raise ConversionFailed(f"{error.message}; in model.toml: [warmup] shapes = {{NAME = [3, 224, 224]}}") from error
    if not report.is_near_enough:
        raise ConversionFailed(
            f"{Path(source).name} was converted, and answers otherwise than its source: {'; '.join(report.faults)}"
        )
    return report


class _Conversion:
    """One conversion, step by step, as its task says."""

    def __init__(self, task: ConversionTask, progress: ShowProgress) -> None:
        self._options = task.options
        self._progress = progress
        self._format = SourceFormat[task.source_format]
        self._route = route(self._format, self._options.target, self._options.precision)
        self._work = Path(task.work)
        # Not the work folder itself: the parent locks it, and the output of a step locks its own folder.
        self._steps = self._work / "steps"
        self._source = Path(self._options.source)
        self._output = self._work / "out" / Path(self._options.output).name
        self._shapes: Shapes = parse_shapes(self._options.shapes)
        self._began_s = time.monotonic()

    def report(self) -> Report:
        """Convert, compare, report. Raises ConversionFailed."""
        self._progress(f"reading {self._source.name}")
        self._steps.mkdir()
        base, original = self._read()
        plain = serve(base)
        reference: Original = original or plain
        try:
            check_shapes(self._shapes, plain.spec)
            # All of a person's files are read before the long part.
            calibration = self._calibration(plain.spec)
            runs, compared_on = self._runs(plain.spec, base, reference)
            labels = self._labels(runs)
            made_of = self._refine(base, calibration)
            result, notes = self._result(made_of)
            comparison = self._compare(result, reference, plain.spec, runs, labels)
        finally:
            plain.close()
        return self._told(comparison, reference, compared_on, notes, is_own_reading=original is None)

    def _read(self) -> tuple[Path, Original | None]:
        """Do the first step. Returns the base for all further steps, and the source, loaded (None: the base itself)."""
        if not self._route.first:
            return self._source, None
        is_final = not self._route.then or (
            self._route.then == (("openvino", "fp32"),) and self._route.base == "openvino"
        )
        base = self._output if is_final else self._steps / artifact_name("base", self._route.base, "fp32")
        step = importlib.import_module(f"edge_runtime_converters.{self._route.first}")
        return base, step.convert(self._source, base, self._shapes)

    def _refine(self, base: Path, calibration: list[Run]) -> Path:
        """Do all further steps. Returns the input of the last one."""
        steps, begun_with = self._route.then, base
        for number, (target, precision) in enumerate(steps):
            is_last = number == len(steps) - 1
            made = self._output if is_last else self._steps / artifact_name("step", target, precision)
            if made.exists():  # written by the first step
                continue
            self._progress(f"writing {made.name if is_last else f'{target} in {precision}'}")
            self._step(base, made, target, precision, calibration)
            begun_with, base = base, made
        return begun_with

    def _calibration(self, spec: ModelSpec) -> list[Run]:
        if self._options.precision != "int8":
            return []
        if not self._options.calibration:
            raise ConversionFailed(
                "int8 chooses its ranges by real inputs; give some hundred rows with --calibration DATA, an .npz with "
                f"arrays called {', '.join(tensor.name for tensor in spec.inputs)}, or a folder of inputs or pictures"
            )
        self._progress("reading calibration data")
        path = Path(self._options.calibration)
        found = read_runs(path, spec, run_rows=1, most_pictures=CALIBRATION_ROWS)
        runs = list(spread(found, CALIBRATION_ROWS))
        check_finite(runs, path)
        return runs

    def _runs(self, spec: ModelSpec, base: Path, reference: Original) -> tuple[list[Run], str]:
        given = self._options.data or self._options.calibration
        if given:
            runs = read_runs(Path(given), spec, RUN_ROWS)
            return runs, f"{sum(map(rows_of, runs))} rows of {Path(given).name}"
        if self._options.labels:
            raise ConversionFailed("labels are given without their inputs; give those with --data")
        if hasattr(reference, "made_up") and (texts := reference.made_up()):
            what = "texts" if [*texts[0]] == ["text"] else "rows"
            return texts, f"{sum(map(rows_of, texts))} made-up {what}"
        runs = made_up_runs(spec, self._shapes, is_tabular=self._format in TABULAR)
        if self._format not in TABULAR:
            return runs, f"{sum(map(rows_of, runs))} made-up rows"
        at_cuts = tree_runs(base, spec, missing=False)
        missing = _answered(reference, tree_runs(base, spec, missing=True))
        runs += [*at_cuts, *missing]
        told = [f"{sum(map(rows_of, runs))} made-up rows"]
        told += [f"{sum(map(rows_of, at_cuts + missing))} of them in the range that it tells apart"] if at_cuts else []
        told += [f"{sum(map(rows_of, missing))} with missing values"] if missing else []
        return runs, ", ".join(told)

    def _labels(self, runs: Sequence[Run]) -> Array | None:
        return read_labels(Path(self._options.labels), sum(map(rows_of, runs))) if self._options.labels else None

    def _result(self, made_of: Path) -> tuple[Any, list[str]]:
        """The artifact, loaded, and notes. An engine that cannot run here is judged by its ONNX model."""
        if self._output.suffix != ".engine":
            return _load(self._output), [_ORT_IS_FOR_OTHERS] if self._output.suffix == ".ort" else []
        from edge_runtime_converters.tensorrt_from_onnx import load

        notes = [_ENGINES_ARE_BUILT]
        engine = None if self._options.gpu else load(self._output, made_of, self._shapes)
        if engine is not None:
            return engine, notes
        notes.append("the engine was not run, because its GPU is not here: its ONNX model was compared instead")
        return serve(made_of), notes

    def _compare(
        self, result: Any, reference: Original, spec: ModelSpec, runs: Sequence[Run], labels: Array | None
    ) -> Comparison:
        names = [output.name for output in (result.spec if isinstance(result, ServedArtifact) else spec).outputs]
        comparison = Comparison([OutputComparison(name) for name in names])
        total = sum(map(rows_of, runs))
        done = 0
        for run in runs:
            self._progress("comparing", done / total)
            rows = rows_of(run)
            comparison.add(
                reference.run(run), result.run(run), labels[done : done + rows] if labels is not None else None, rows
            )
            done += rows
        if isinstance(result, ServedArtifact):
            result.close()
        return comparison

    def _told(
        self,
        comparison: Comparison,
        reference: Original,
        compared_on: str,
        more_notes: Sequence[str],
        *,
        is_own_reading: bool,
    ) -> Report:
        options = self._options
        tolerance = tolerance_of(options.precision, options.tolerance)
        accuracies = comparison.accuracies or (None, None)
        compared_with, notes = reference.described, [*_notes(self._output, compared_on), *more_notes]
        unjudged, others = comparison.unjudged(tolerance)
        notes += others
        if any(given and holds_pictures(Path(given)) for given in (options.calibration, options.data)):
            notes.append(PICTURE_NOTE)
        if is_own_reading and self._format is not SourceFormat.ONNX:
            compared_with = "OpenVINO's own fp32 reading of it"
            notes.append(
                "TensorFlow was not asked (it is not here, or would run what the model says); check a few answers"
            )
        return Report(
            source=options.source,
            source_format=self._format.value,
            target=options.target,
            precision=options.precision,
            files=(),
            source_bytes=total_bytes([self._source]),
            target_bytes=total_bytes([self._output.parent]),
            opset=_opset(self._output),
            seconds=round(time.monotonic() - self._began_s, 3),
            compared_with=compared_with,
            compared_on=compared_on,
            rows=comparison.rows,
            outputs=tuple(map(_output_report, comparison.outputs)),
            source_accuracy=accuracies[0],
            accuracy=accuracies[1],
            tolerance=tolerance.text(),
            faults=tuple(comparison.faults(tolerance)),
            unjudged=tuple(unjudged),
            is_accepted=options.accepts_unjudged,
            notes=tuple(notes),
        )

    def _step(self, base: Path, made: Path, target: str, precision: str, calibration: list[Run]) -> None:
        if target == "ort":
            from edge_runtime_converters.ort_from_onnx import convert as to_ort

            to_ort(base, made)
        elif target == "tensorrt":
            from edge_runtime_converters.tensorrt_from_onnx import convert as to_engine

            to_engine(
                base, made, self._shapes, gpu=self._options.gpu, tell=lambda share, _: self._progress("building", share)
            )
        elif target == "openvino":
            from edge_runtime_converters.openvino_from_onnx import read_model, write_ir

            names = {"fp32": "f32", "fp16": "f16", "int8": "int8"}
            write_ir(read_model(base), base, made, names[precision], calibration)  # type: ignore[arg-type]
        elif precision == "int8":
            from edge_runtime_converters.int8_from_onnx import quantise

            options = self._options
            quantise(base, made, calibration, is_for_tensorrt=options.is_for_tensorrt or options.target == "tensorrt")
        else:
            from edge_runtime_converters.f16_from_onnx import convert as to_f16

            to_f16(base, made)


def _answered(reference: Original, runs: list[Run]) -> list[Run]:
    """Runs that the source takes; none where it wants every value."""
    try:
        for run in runs[:1]:
            reference.run(run)
    except ConversionFailed:
        return []
    return runs


def _load(artifact: Path) -> Any:
    if artifact.suffix == ".ort":
        from edge_runtime_converters.ort_from_onnx import load

        return load(artifact)
    return serve(artifact)


def _opset(artifact: Path) -> str:
    if artifact.suffix != ".onnx":
        return ""
    from edge_runtime_converters.onnx_source import opsets_of, read_onnx

    return opsets_of(read_onnx(artifact, "convert-onnx"))


def _output_report(output: OutputComparison) -> OutputReport:
    disagreement = output.disagreement
    return OutputReport(
        name=output.name,
        max_error=None if output.is_exact else output.max_error,
        mean_error=None if output.is_exact else output.mean_error,
        spread_error=output.variation.error,
        agreement=None if disagreement is None else 1 - disagreement,
        distinct=None if disagreement is None else output.variation.distinct,
    )


def _notes(artifact: Path, compared_on: str) -> Sequence[str]:
    notes = []
    if "made-up" in compared_on:
        notes.append("inputs were made up; --data DATA compares on real ones, --labels FILE gives the accuracy")
    if artifact.suffix in (".onnx", ".xml"):
        served = serve(artifact)
        if not served.spec.may_batch:
            notes.append("axis 0 is not open in all inputs and outputs, so requests will not be batched")
        served.close()
    return notes
