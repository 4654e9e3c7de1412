"""Each way's answers compared with the plain model's: whether it works, and how much accuracy it gives up.

Owns: the measures of accuracy (pure), and the plain model's answers. Thread: one owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edge_runtime.errors import ConfigError, EdgeRuntimeError, LoadFailed
from edge_runtime.tensors import Array
from edge_runtime.tuning.artifacts import WayFiles
from edge_runtime.tuning.candidates import Way
from edge_runtime.tuning.results import Accuracy, WayResult
from edge_runtime.tuning.trial import WayFinding, WayTrials
from edge_runtime.tuning.variation import Variation
from edge_runtime.updates.golden import float_values

Outputs = Mapping[str, Array]
Doubles = npt.NDArray[np.float64]

FAR = 1e6
"""An error without bound: a value that is not a number where the reference has one."""


@dataclass(frozen=True, slots=True)
class JudgingInputs:
    """The inputs that ways are compared on. file: of samples. labels: one a sample. scores: as in TuneOptions."""

    file: Path
    labels: tuple[int, ...] | None
    scores: str | None


class WayComparison:
    """Compares ways with `first`, the plain model. described: its finding. root: a folder for outputs."""

    def __init__(
        self,
        first: Way,
        described: WayFinding,
        inputs: JudgingInputs,
        *,
        trials: WayTrials,
        files: WayFiles,
        root: Path,
    ) -> None:
        self._first = first
        self._described = described
        self._inputs = inputs
        self._trials = trials
        self._files = files
        self._root = root
        self._reference: list[dict[str, Array]] | None = None

    def compare(self, way: Way) -> WayResult:
        """Run a way on all judging inputs; a fault is the result's reason.

        Raises LoadFailed: the plain model no longer runs. ConfigError: as `compare`.
        """
        try:
            graph = self._files.graph_of(way)
        except EdgeRuntimeError as error:
            return WayResult(way, error.message)
        finding, outputs = self._trials.run(way, graph, self._inputs.file, self._root / f"{way.key}.npz")
        if finding.fault:
            return WayResult(way, finding.fault, artifact=graph.name)
        if finding.interface != self._described.interface:
            reason = f"takes and gives {finding.interface}, the plain model {self._described.interface}"
            return WayResult(way, reason, artifact=graph.name)
        datatypes = {form.name: form.datatype for form in finding.outputs}
        reference = self._reference_outputs(way, outputs)
        accuracy = compare(datatypes, reference, outputs, self._inputs.labels, self._inputs.scores)
        return WayResult(way, "", finding.precision, graph.name, accuracy)

    def _reference_outputs(self, way: Way, outputs: list[dict[str, Array]]) -> list[dict[str, Array]]:
        """The plain model's answers; it runs once more where an earlier tune compared it."""
        if way == self._first:
            self._reference = outputs
        if self._reference is None:
            graph = self._files.graph_of(self._first)
            finding, self._reference = self._trials.run(
                self._first, graph, self._inputs.file, self._root / "reference.npz"
            )
            if finding.fault:
                raise LoadFailed(f"{self._first.backend}: {finding.fault}")
        return self._reference


def compare(
    datatypes: Mapping[str, str],
    reference: Sequence[Outputs],
    got: Sequence[Outputs],
    labels: Sequence[int] | None = None,
    scores: str | None = None,
) -> Accuracy:
    """Compare runs on the same inputs, one mapping of outputs a run. Pure. datatypes: of outputs, as on the wire.

    labels: one a run. scores: the output that labels and agreement are taken from; None: the first with rows of floats,
    else the first of whole numbers. Raises ConfigError: there is no such output, or none that could say a label.
    """
    largest, total, values = 0.0, 0.0, 0
    spread_errors: list[float] = []
    for name, datatype in datatypes.items():
        peak = _peak(datatype, name, reference)
        variation = Variation()
        for wanted, found in zip(reference, got, strict=True):
            error = _errors(datatype, wanted[name], found.get(name), peak)
            if error is not None and error.size:
                largest = max(largest, float(error.max()))
                total += float(error.sum())
                values += error.size
                _add_row(variation, datatype, wanted[name], found.get(name))
        if variation.error is not None:
            spread_errors.append(min(variation.error, FAR))
    output = _output_of_scores(datatypes, reference, scores)
    if output is None and labels is not None:
        raise ConfigError(f"--labels: none of the outputs {', '.join(datatypes)} says a class; wanted [rows, classes]")
    agreement = correct = reference_correct = distinct = None
    constant_drop = 1.0 if spread_errors else 0.0
    if output is not None:
        said = [_classes(datatypes[output], run[output]) for run in reference]
        found_ = [_classes(datatypes[output], run.get(output)) for run in got]
        agreement = _share(_alike(a, b) for a, b in zip(said, found_, strict=True))
        distinct, constant_drop = _answers_of(said)
        if labels is not None:
            correct = _share(_is(label, each) for label, each in zip(labels, found_, strict=True))
            reference_correct = _share(_is(label, each) for label, each in zip(labels, said, strict=True))
            constant_drop = max(reference_correct - max(Counter(labels).values()) / len(labels), 0.0)
    return Accuracy(
        len(got), min(largest, FAR), min(total / values if values else 0.0, FAR), agreement, correct,
        reference_correct, distinct, max(spread_errors, default=None), constant_drop,
    )  # fmt: skip


# ---- private --------------------------------------------------------------------------------------------------------


def _peak(datatype: str, name: str, runs: Sequence[Outputs]) -> float:
    """The largest finite value of an output over all runs, which its errors are relative to."""
    peak = 0.0
    for run in runs:
        values = float_values(datatype, run[name])
        if values is not None and values.size:
            peak = max(peak, float(np.max(np.abs(values), initial=0.0, where=np.isfinite(values))))
    return peak or 1.0


def _errors(datatype: str, wanted: Array, got: Array | None, peak: float) -> Doubles | None:
    """Distances of a float output, relative to its peak; None for other outputs."""
    wanted_values = float_values(datatype, wanted)
    if wanted_values is None:
        return None
    got_values = None if got is None or got.shape != wanted.shape else float_values(datatype, got)
    if got_values is None:
        return np.full(max(wanted_values.size, 1), FAR)
    same = (wanted_values == got_values) | (np.isnan(wanted_values) & np.isnan(got_values))
    with np.errstate(invalid="ignore"):
        distance = np.where(same, 0.0, np.abs(got_values - wanted_values) / peak)
    return np.where(np.isfinite(distance), distance, FAR)


def _add_row(variation: Variation, datatype: str, wanted: Array, got: Array | None) -> None:
    """Add one input's answer; another shape of the way's is infinitely far."""
    values = float_values(datatype, wanted)
    assert values is not None
    found = None if got is None or got.shape != wanted.shape else float_values(datatype, got)
    variation.add_values(values[None], np.full(values.shape, np.inf)[None] if found is None else found[None])


def _answers_of(said: Sequence[Array | None]) -> tuple[int, float]:
    """The number of different answers, and the drop of the commonest one given to all inputs."""
    answers = Counter(None if each is None else each.tobytes() for each in said)
    return len(answers), 1 - max(answers.values()) / len(said)


def _output_of_scores(datatypes: Mapping[str, str], runs: Sequence[Outputs], named: str | None) -> str | None:
    if named is not None:
        if named not in datatypes:
            raise ConfigError(f"--scores: the model has no output {named!r}; it has {', '.join(datatypes)}")
        return named
    first = runs[0]
    for name, datatype in datatypes.items():
        if float_values(datatype, first[name]) is not None and first[name].ndim == 2 and first[name].shape[1] > 1:
            return name
    return next((name for name in datatypes if first[name].dtype.kind in "iu" and first[name].ndim == 1), None)


def _classes(datatype: str, array: Array | None) -> Array | None:
    """The class of each row: the index of its highest score, or the whole number itself; None without finite scores."""
    if array is None:
        return None
    values = float_values(datatype, array)
    if values is None:
        return array
    return np.argmax(values, axis=-1) if values.ndim and bool(np.isfinite(values).all()) else None


def _alike(one: Array | None, other: Array | None) -> bool:
    return one is not None and other is not None and np.array_equal(one, other)


def _is(label: int, classes: Array | None) -> bool:
    return classes is not None and classes.size > 0 and bool((classes == label).all())


def _share(truths: Iterable[bool]) -> float:
    found = list(truths)
    return sum(found) / len(found) if found else 0.0
