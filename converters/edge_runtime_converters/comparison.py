"""How far the converted model's answers are from the source's, whether that is near enough, and the report of it. Pure.

Owns: the measures and tolerances, and a report's values and how a person reads them. An error is a share of the largest
magnitude of that output, so that one number fits logits, chances and pictures. Near enough is what an answer that
ignores its input would not be: where the data let such an answer pass, they cannot judge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from edge_runtime.errors import ConversionFailed
from edge_runtime.tensors import Array
from edge_runtime.tuning.variation import Variation


@dataclass(frozen=True, slots=True)
class ConversionTolerance:
    """Shares from 0 to 1.

    largest_error: of any value, None where only the mean is judged. disagreement: of rows with another highest score or
    another label. accuracy_drop: where labels are given, in place of disagreement. spread_error: as Variation.error, of
    outputs whose rows are not answers, or give too few different ones.
    """

    largest_error: float | None
    mean_error: float
    disagreement: float
    accuracy_drop: float
    spread_error: float

    def text(self) -> str:
        """The bounds as a person reads them."""
        largest = "" if self.largest_error is None else f"largest error {self.largest_error:g}, "
        rows = f"other answers {self.disagreement:.1%}, accuracy lost {self.accuracy_drop:.1%}"
        return f"{largest}mean error {self.mean_error:g}, {self.spread_error:g} of spread, {rows}"


TOLERANCES = {
    "fp32": ConversionTolerance(1e-3, 1e-3, 0.01, 0.005, 0.01),
    "fp16": ConversionTolerance(2e-2, 2e-2, 0.02, 0.005, 0.1),
    "int8": ConversionTolerance(None, 5e-2, 0.05, 0.005, 0.2),
}
"""fp32 and fp16: the rows of edge_runtime/updates/golden.py, by which a device judges the artifact later. int8: its
row too, but for the mean, because single values near a rounding step move by more (digits: largest 0.06, mean 0.0005).
accuracy_drop: half a per cent, this project's promise for its digits in int8. spread_error: 0.01, 1 and 4 % of the
variance are lost at most, where an answer that ignores its input loses all of it."""


def tolerance_of(precision: str, bound: float | None) -> ConversionTolerance:
    """The tolerance of a precision; bound: a bound from the caller in place of each of its own."""
    tolerance = TOLERANCES[precision]
    if bound is None:
        return tolerance
    largest = bound if tolerance.largest_error is not None else None
    return ConversionTolerance(largest, bound, bound, bound, bound)


@dataclass(slots=True)
class OutputComparison:
    """The errors of one output so far: sums over all values of all runs."""

    name: str
    largest: float = 0.0
    max_distance: float = 0.0
    sum_distance: float = 0.0
    values: int = 0
    finite: int = 0
    rows: int = 0
    differing: int = 0
    is_judged_by_rows: bool = False
    is_exact: bool = False
    variation: Variation = field(default_factory=Variation)

    def add(self, wanted: Array, got: Array, rows: int) -> None:
        """Add one run of `rows` rows: the source's output and the result's. Raises ConversionFailed: shapes differ."""
        if wanted.shape != got.shape:
            raise ConversionFailed(
                f"output {self.name!r} of the converted model is {list(got.shape)}, the source's {list(wanted.shape)}"
            )
        if wanted.ndim == 0 or len(wanted) != rows:  # an output without rows is one answer to the whole run
            wanted, got = wanted[None], got[None]
        if wanted.dtype.kind in "fc":
            self._add_values(wanted.astype(np.float64), got.astype(np.float64))
        else:
            self.is_exact = self.is_judged_by_rows = True
            self._add_rows((wanted != got).any(axis=tuple(range(1, wanted.ndim))), wanted)

    def _add_values(self, wanted: npt.NDArray[np.float64], got: npt.NDArray[np.float64]) -> None:
        with np.errstate(invalid="ignore"):
            distance = np.abs(wanted - got)
        same = (wanted == got) | (np.isnan(wanted) & np.isnan(got))  # an infinity minus itself is not a number
        distance = np.where(same, 0.0, np.where(np.isnan(distance), np.inf, distance))
        finite = np.abs(wanted[np.isfinite(wanted)])
        self.values += distance.size
        self.finite += finite.size
        self.sum_distance += float(distance.sum())
        self.max_distance = max(self.max_distance, float(distance.max(initial=0.0)))
        self.largest = max(self.largest, float(finite.max(initial=0.0)))
        self.variation.add_values(wanted, got)
        if wanted.ndim == 2 and wanted.shape[1] > 1:
            self.is_judged_by_rows = True
            self._add_rows(wanted.argmax(axis=1) != got.argmax(axis=1), wanted.argmax(axis=1))

    def _add_rows(self, differs: npt.NDArray[np.bool_], answers: Array) -> None:
        self.variation.add_answers(answers)
        self.rows += len(differs)
        self.differing += int(differs.sum())

    @property
    def max_error(self) -> float:
        """Largest error, as a share of the largest magnitude."""
        return _share(self.max_distance, self.largest)

    @property
    def mean_error(self) -> float:
        """Mean error, as a share of the largest magnitude."""
        return _share(self.sum_distance / max(self.values, 1), self.largest)

    @property
    def disagreement(self) -> float | None:
        """Share of rows with another highest score or label; None for outputs without."""
        return self.differing / self.rows if self.is_judged_by_rows and self.rows else None


@dataclass(slots=True)
class Comparison:
    """The errors of all outputs, and the right answers where labels are given."""

    outputs: list[OutputComparison]
    right_source: int = 0
    right_target: int = 0
    labels: Counter[int] = field(default_factory=Counter)
    rows: int = 0
    runs: int = 0

    def add(self, wanted: Sequence[Array], got: Sequence[Array], labels: Array | None, rows: int) -> None:
        """Add one run. labels: of its rows. Raises ConversionFailed: shapes differ, or no output gives a class."""
        if len(wanted) != len(got) or len(got) != len(self.outputs):
            raise ConversionFailed(f"the source has {len(wanted)} outputs, the converted model {len(got)}")
        for output, left, right in zip(self.outputs, wanted, got, strict=True):
            output.add(left, right, rows)
        self.rows += rows
        self.runs += 1
        if labels is not None:
            self.right_source += int((answers(wanted, rows) == labels).sum())
            self.right_target += int((answers(got, rows) == labels).sum())
            self.labels.update(labels.tolist())

    @property
    def labelled(self) -> int:
        """Rows with a label."""
        return sum(self.labels.values())

    @property
    def accuracies(self) -> tuple[float, float] | None:
        """Share of right answers of the source and of the converted model; None without labels."""
        return (self.right_source / self.labelled, self.right_target / self.labelled) if self.labelled else None

    def faults(self, tolerance: ConversionTolerance) -> list[str]:
        """One sentence for each bound that is exceeded; none where nothing is too far."""
        found: list[str] = []
        for output in self.outputs:
            found += _faults_of(output, tolerance, judge_rows=not self.labelled)
            if self._verdict(output, tolerance) == "far":
                error = output.variation.error or 0.0
                found.append(f"{output.name}: error {error:.2g} of spread; allowed {tolerance.spread_error:g}")
        accuracies = self.accuracies
        if accuracies is not None and accuracies[0] - accuracies[1] > tolerance.accuracy_drop + 1e-12:
            drop = accuracies[0] - accuracies[1]
            found.append(
                f"accuracy fell from {accuracies[0]:.2%} to {accuracies[1]:.2%}, by {drop:.2%}; "
                f"allowed {tolerance.accuracy_drop:.2%}"
            )
        return found

    def unjudged(self, tolerance: ConversionTolerance) -> tuple[list[str], list[str]]:
        """One sentence for each output that these data cannot judge: first those that refuse the result, then the rest.

        An output that never differs refuses only where no other output is judged: some are constant by nature.
        """
        refusing, others = [], []
        verdicts = [(output, self._verdict(output, tolerance)) for output in self.outputs]
        is_judged = any(verdict in ("near", "far") for _, verdict in verdicts)
        for output, verdict in verdicts:
            if verdict == "blind" or (verdict == "constant" and not is_judged):
                refusing.append(_why_unjudged(output, tolerance))
            elif verdict == "constant":
                others.append(_why_unjudged(output, tolerance))
            elif output.is_judged_by_rows and output.variation.distinct == 1:
                others.append(f"{output.name}: the source gives one answer to all rows, so its values were judged")
        return refusing, others

    def _verdict(self, output: OutputComparison, tolerance: ConversionTolerance) -> Verdict:
        if output.is_judged_by_rows and self._can_answers_tell(output, tolerance):
            return "near"  # or too far, by the rows or labels
        if output.is_exact or not output.variation.spread:
            return "constant"
        error = output.variation.error
        if error is not None and error <= tolerance.spread_error:
            return "near"
        return "far" if output.variation.spread > tolerance.mean_error else "blind"

    def _can_answers_tell(self, output: OutputComparison, tolerance: ConversionTolerance) -> bool:
        """Whether one and the same answer to all rows would be too far."""
        accuracies = self.accuracies
        if accuracies is None:
            return 1 - output.variation.commonest > tolerance.disagreement
        return accuracies[0] - max(self.labels.values()) / self.labelled > tolerance.accuracy_drop


Verdict = Literal["near", "far", "blind", "constant"]
"""How one output is judged beyond its bounds of magnitude. blind: it differs from row to row, by so little that an
answer that ignores its input would pass, and the result does not follow. constant: it does not differ at all."""


def answers(outputs: Sequence[Array], rows: int) -> Array:
    """The class of each row: the first whole-number output of one value a row, else the highest score.

    Raises ConversionFailed: no output gives a class.
    """
    for output in outputs:
        if output.dtype.kind in "iu" and output.size == rows:
            return output.reshape(rows)
    for output in outputs:
        if output.dtype.kind == "f" and output.ndim >= 2 and output.shape[0] == rows and output.size > rows:
            found: Array = output.reshape(rows, -1).argmax(axis=1)
            return found
    raise ConversionFailed("labels are given, but no output has a class for each row; leave --labels out")


def _faults_of(output: OutputComparison, tolerance: ConversionTolerance, *, judge_rows: bool) -> list[str]:
    found: list[str] = []
    if output.values and not output.finite:
        found.append(f"{output.name}: all answers of the source are infinite or no number; compare on other data")
    if not output.is_exact and tolerance.largest_error is not None and not output.max_error <= tolerance.largest_error:
        found.append(f"{output.name}: largest error {output.max_error:.2g}; allowed {tolerance.largest_error:g}")
    if not output.is_exact and not output.mean_error <= tolerance.mean_error:
        found.append(f"{output.name}: mean error {output.mean_error:.2g}; allowed {tolerance.mean_error:g}")
    disagreement = output.disagreement
    if judge_rows and disagreement is not None and disagreement > tolerance.disagreement:
        found.append(
            f"{output.name}: {output.differing} of {output.rows} rows get another answer; "
            f"allowed {tolerance.disagreement:.1%}"
        )
    return found


def _why_unjudged(output: OutputComparison, tolerance: ConversionTolerance) -> str:
    variation = output.variation
    if output.is_judged_by_rows:
        count = f"{variation.distinct} answer{'' if variation.distinct == 1 else 's'}"
        told = f"the source gives {count} to {output.rows} rows, {variation.commonest:.1%} of them the same"
    elif not variation.spread:
        told = "the source's answers do not differ from row to row"
    else:
        told = f"the source's answers differ by {variation.spread:.2g} only, where a mean error of "
        told += f"{tolerance.mean_error:g} is allowed"
    error = "" if variation.error is None else f"; error {variation.error:.2g} of spread"
    return f"{output.name}: cannot be judged: {told}{error}"


def _share(distance: float, largest: float) -> float:
    if distance == 0:
        return 0.0
    return distance / largest if largest > 0 else float("inf")


class OutputReport(Struct, frozen=True, kw_only=True):
    """One output of a report. Errors are shares of its largest magnitude; None where they do not apply (labels).

    spread_error: as Variation.error, None where its rows do not differ. distinct: number of different answers of the
    source, None for outputs without.
    """

    name: str
    max_error: float | None = None
    mean_error: float | None = None
    spread_error: float | None = None
    agreement: float | None = None
    distinct: int | None = None


class Report(Struct, frozen=True, kw_only=True):
    """The report of a conversion. Errors are against `compared_with`; bytes include data files; opset "" without ONNX.

    faults: why the result is too far. unjudged: why the data cannot show whether it is; is_accepted: the caller takes
    it all the same. files: those written, none where it was not kept.
    """

    source: str
    source_format: str
    target: str
    precision: str
    files: tuple[str, ...]
    source_bytes: int
    target_bytes: int
    opset: str
    seconds: float
    compared_with: str
    compared_on: str
    rows: int
    outputs: tuple[OutputReport, ...]
    source_accuracy: float | None = None
    accuracy: float | None = None
    tolerance: str = ""
    faults: tuple[str, ...] = ()
    unjudged: tuple[str, ...] = ()
    is_accepted: bool = False
    notes: tuple[str, ...] = ()

    @property
    def is_near_enough(self) -> bool:
        """Whether the result is within every bound, by data that can show it or were accepted."""
        return not self.faults and (self.is_accepted or not self.unjudged)


def fields(report: Report) -> dict[str, str]:
    """Names and values in the order for a person."""
    ratio = report.target_bytes / max(report.source_bytes, 1)
    found = {
        "written": ", ".join(report.files) or "nothing",
        "from": f"{report.source}, {report.source_format}",
        "precision": report.precision,
        "size": f"{report.target_bytes:,} bytes, {ratio:.2f} of the source's {report.source_bytes:,}",
        "opset": report.opset,
        "took": f"{report.seconds:.1f} s",
        "compared with": f"{report.compared_with}, on {report.compared_on}",
        "tolerance": report.tolerance,
    }
    if report.accuracy is not None and report.source_accuracy is not None:
        drop = report.source_accuracy - report.accuracy
        found["accuracy"] = f"{report.accuracy:.2%}, the source's {report.source_accuracy:.2%} (drop {drop:.2%})"
    return found


COLUMNS = ("output", "largest error", "mean error", "of spread", "answers", "same answer")


def rows(report: Report) -> Iterator[list[str]]:
    """A line of COLUMNS for each output; errors as shares of the largest magnitude, the third one of the spread."""
    for output in report.outputs:
        errors = (output.max_error, output.mean_error, output.spread_error)
        yield [
            output.name,
            *("" if value is None else f"{value:.2g}" for value in errors),
            "" if output.distinct is None else f"{output.distinct:,}",
            "" if output.agreement is None else f"{output.agreement:.2%}",
        ]
