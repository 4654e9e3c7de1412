"""The process in which a conversion happens: the steps of its route, then the comparison with the source.

Started by conversion.py as `python -m edge_runtime_converters.conversion_child PARENT`, a request as JSON on stdin;
leaves the artifact in `out/` of the work folder and answers with what it found as JSON. A source that crashes a
library, hangs it or eats memory does so here.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from edge_runtime.client.pictures import PICTURE_NOTE
from edge_runtime.errors import ConversionFailed, EdgeRuntimeError
from edge_runtime.model_spec import ModelSpec
from edge_runtime.serving.confinement import confine, limited_memory
from edge_runtime.tensors import Array
from edge_runtime_converters.comparison import Comparison, OutputComparison, tolerance_of
from edge_runtime_converters.libraries import reason_of
from edge_runtime_converters.matrix import TABULAR, artifact_name, route
from edge_runtime_converters.original import Original, Served, serve
from edge_runtime_converters.output_files import total_bytes
from edge_runtime_converters.report import OutputReport, Report
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
from edge_runtime_converters.source_format import SourceFormat
from edge_runtime_converters.wish import Shapes, Wish, parse_shapes

CALIBRATION_ROWS = 300
"""What NNCF looks at by itself; more changes ranges by little and costs time."""

_ENGINES_ARE_BUILT = (
    "edge-runtime builds its own engine of the ONNX model on each device, and loads none from a models folder: this "
    "one is for other programs, with the same TensorRT, GPU and driver"
)


class Request(Struct, frozen=True):
    """What to do. source_format: the name of a SourceFormat. work: an empty folder with `out/` in it."""

    wish: Wish
    source_format: str
    work: str
    memory_limit_bytes: int


class Result(Struct, frozen=True):
    """What was found: an error that a person reads, or a report (its files are not yet at their place)."""

    error: str = ""
    report: Report | None = None


def main(arguments: Sequence[str]) -> int:
    """Convert what stdin says, for the process of that id. Exit status 0 when there is a report."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    work = Path(request.work)
    # Whatever a library leaves behind goes with the work folder, even when this process is killed.
    tempfile.tempdir = os.environ["TMPDIR"] = str(work)
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # whatever else is asked of torch.load, it unpickles no code
    with confine(int(arguments[0])) as answer:
        result = _converted(request)
        answer.write(msgspec.json.encode(result))
    return 1 if result.error else 0


def _converted(request: Request) -> Result:
    try:
        with limited_memory(request.memory_limit_bytes):
            return Result(report=_Conversion(request).report())
    except EdgeRuntimeError as error:
        return Result(error=error.message)
    except MemoryError:
        return Result(error=f"it needs more than the {request.memory_limit_bytes} bytes of memory of this machine")
    except Exception as error:  # noqa: BLE001  what a library raises unexpectedly is a failed conversion too
        said = f"{type(error).__name__}: {reason_of(error)}"
        return Result(error=f"{request.wish.source}: cannot be converted ({said}); the file may be damaged")


class _Conversion:
    """One conversion, step by step. All is decided by the request."""

    def __init__(self, request: Request) -> None:
        self._wish = request.wish
        self._format = SourceFormat[request.source_format]
        self._route = route(self._format, self._wish.target, self._wish.precision)
        self._work = Path(request.work)
        # Not the work folder itself: the parent holds that as in use, and whoever writes into a folder waits for it.
        self._steps = self._work / "steps"
        self._source = Path(self._wish.source)
        self._output = self._work / "out" / Path(self._wish.output).name
        self._shapes: Shapes = parse_shapes(self._wish.shapes)
        self._began_s = time.monotonic()

    def report(self) -> Report:
        """Convert, compare, say what came out. Raises ConversionFailed."""
        self._say(f"reading {self._source.name}")
        self._steps.mkdir()
        base, original = self._read()
        plain = serve(base)
        reference: Original = original or plain
        try:
            check_shapes(self._shapes, plain.spec)
            # All that a person gave is read before the long part.
            calibration = self._calibration(plain.spec)
            runs, compared_on = self._runs(plain.spec)
            labels = self._labels(runs)
            made_of = self._refine(base, calibration)
            result, notes = self._result(made_of)
            comparison = self._compare(result, reference, plain.spec, runs, labels)
        finally:
            plain.close()
        return self._told(comparison, reference, compared_on, notes, is_own_reading=original is None)

    def _read(self) -> tuple[Path, Original | None]:
        """The first step. Returns the base that all else is made of, and the source, loaded (None: the base itself)."""
        if not self._route.first:
            return self._source, None
        is_final = not self._route.then or (
            self._route.then == (("openvino", "fp32"),) and self._route.base == "openvino"
        )
        base = self._output if is_final else self._steps / artifact_name("base", self._route.base, "fp32")
        step = importlib.import_module(f"edge_runtime_converters.{self._route.first}")
        return base, step.convert(self._source, base, self._shapes)

    def _refine(self, base: Path, calibration: list[Run]) -> Path:
        """All further steps. Returns what the last one began with."""
        steps, begun_with = self._route.then, base
        for place, (target, precision) in enumerate(steps):
            is_last = place == len(steps) - 1
            made = self._output if is_last else self._steps / artifact_name("step", target, precision)
            if made.exists():  # written by the first step
                continue
            self._say(f"writing {made.name if is_last else f'{target} in {precision}'}")
            self._step(base, made, target, precision, calibration)
            begun_with, base = base, made
        return begun_with

    def _calibration(self, spec: ModelSpec) -> list[Run]:
        if self._wish.precision != "int8":
            return []
        if not self._wish.calibration:
            raise ConversionFailed(
                "int8 chooses its ranges by real inputs; give some hundred rows with --calibration DATA, an .npz with "
                f"arrays called {', '.join(tensor.name for tensor in spec.inputs)}, or a folder of inputs or pictures"
            )
        self._say("reading calibration data")
        path = Path(self._wish.calibration)
        found = read_runs(path, spec, run_rows=1, most_pictures=CALIBRATION_ROWS)
        runs = list(spread(found, CALIBRATION_ROWS))
        check_finite(runs, path)
        return runs

    def _runs(self, spec: ModelSpec) -> tuple[list[Run], str]:
        given = self._wish.data or self._wish.calibration
        if given:
            runs = read_runs(Path(given), spec, RUN_ROWS)
            return runs, f"{sum(map(rows_of, runs))} rows of {Path(given).name}"
        if self._wish.labels:
            raise ConversionFailed("labels are given without the inputs that they are of; give those with --data")
        runs = made_up_runs(spec, self._shapes, is_tabular=self._format in TABULAR)
        return runs, f"{sum(map(rows_of, runs))} made-up rows"

    def _labels(self, runs: Sequence[Run]) -> Array | None:
        return read_labels(Path(self._wish.labels), sum(map(rows_of, runs))) if self._wish.labels else None

    def _result(self, made_of: Path) -> tuple[Any, list[str]]:
        """The artifact, loaded, and notes. An engine that cannot run here is judged by the model it was built of."""
        if self._output.suffix != ".engine":
            return _load(self._output), []
        from edge_runtime_converters.tensorrt_from_onnx import load

        notes = [_ENGINES_ARE_BUILT]
        engine = None if self._wish.gpu else load(self._output, made_of, self._shapes)
        if engine is not None:
            return engine, notes
        notes.append("the engine was not run, for want of its GPU: compared is the ONNX model that it was built of")
        return serve(made_of), notes

    def _compare(
        self, result: Any, reference: Original, spec: ModelSpec, runs: Sequence[Run], labels: Array | None
    ) -> Comparison:
        names = [output.name for output in (result.spec if isinstance(result, Served) else spec).outputs]
        comparison = Comparison([OutputComparison(name) for name in names])
        total = sum(map(rows_of, runs))
        done = 0
        for run in runs:
            self._say("comparing", done / total)
            rows = rows_of(run)
            comparison.add(
                reference.run(run), result.run(run), labels[done : done + rows] if labels is not None else None, rows
            )
            done += rows
        if isinstance(result, Served):
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
        wish = self._wish
        tolerance = tolerance_of(wish.precision, wish.tolerance)
        accuracies = comparison.accuracies or (None, None)
        compared_with, notes = reference.described, [*_notes(self._output, compared_on), *more_notes]
        if any(given and holds_pictures(Path(given)) for given in (wish.calibration, wish.data)):
            notes.append(PICTURE_NOTE)
        if is_own_reading and self._format is not SourceFormat.ONNX:
            compared_with = "OpenVINO's own fp32 reading of it"
            notes.append(
                "TensorFlow was not asked (it is not here, or would run what the model says); check a few answers"
            )
        return Report(
            source=wish.source,
            source_format=self._format.value,
            target=wish.target,
            precision=wish.precision,
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
            tolerance=tolerance.told(),
            faults=tuple(comparison.faults(tolerance)),
            notes=tuple(notes),
        )

    def _step(self, base: Path, made: Path, target: str, precision: str, calibration: list[Run]) -> None:
        if target == "ort":
            from edge_runtime_converters.ort_from_onnx import convert as to_ort

            to_ort(base, made)
        elif target == "tensorrt":
            from edge_runtime_converters.tensorrt_from_onnx import convert as to_engine

            to_engine(base, made, self._shapes, gpu=self._wish.gpu, tell=lambda share, _: self._say("building", share))
        elif target == "openvino":
            from edge_runtime_converters.openvino_from_onnx import read_model, write_ir

            names = {"fp32": "f32", "fp16": "f16", "int8": "int8"}
            write_ir(read_model(base), base, made, names[precision], calibration)  # type: ignore[arg-type]
        elif precision == "int8":
            from edge_runtime_converters.int8_from_onnx import quantise

            wish = self._wish
            quantise(base, made, calibration, is_for_tensorrt=wish.is_for_tensorrt or wish.target == "tensorrt")
        else:
            from edge_runtime_converters.f16_from_onnx import convert as to_f16

            to_f16(base, made)

    def _say(self, stage: str, share: float | None = None) -> None:
        """What is done now, for the parent to show: a label, and a share of 0 to 1 where one is known."""
        fresh = self._work / "stage.part"
        with contextlib.suppress(OSError):  # a full disk fails where something is lost, not here
            fresh.write_text(f"{stage}\t{'' if share is None else f'{share:.3f}'}", encoding="utf-8")
            fresh.replace(self._work / "stage")


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
        agreement=None if disagreement is None else 1 - disagreement,
    )


def _notes(artifact: Path, compared_on: str) -> Sequence[str]:
    notes = []
    if "made-up" in compared_on:
        notes.append("inputs were made up; --data DATA compares on real ones, --labels FILE tells the accuracy")
    if artifact.suffix in (".onnx", ".xml"):
        served = serve(artifact)
        if not served.spec.may_batch:
            notes.append("axis 0 is not open in all inputs and outputs, so requests will not be batched")
        served.close()
    return notes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
