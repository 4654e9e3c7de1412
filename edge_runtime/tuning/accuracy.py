"""How near one engine's answers are to the reference's, and how many labels each finds. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from edge_runtime.errors import ConfigError
from edge_runtime.repository.golden import float_values
from edge_runtime.tensors import Array
from edge_runtime.tuning.results import Accuracy

Outputs = Mapping[str, Array]
Doubles = npt.NDArray[np.float64]

FAR = 1e6
"""Stands for an error without bound: a value that is no number where the reference has one."""


def compare(
    datatypes: Mapping[str, str],
    reference: Sequence[Outputs],
    got: Sequence[Outputs],
    labels: Sequence[int] | None = None,
    scores: str | None = None,
) -> Accuracy:
    """Compare runs on the same inputs, one mapping of outputs a run. datatypes: of outputs, as on the wire.

    labels: one a run. scores: the output that labels and agreement are taken from; None: the first with rows of floats,
    else the first of whole numbers. Raises ConfigError: there is no such output, or none that could say a label.
    """
    largest, total, values = 0.0, 0.0, 0
    for name, datatype in datatypes.items():
        peak = _peak(datatype, name, reference)
        for wanted, found in zip(reference, got, strict=True):
            error = _errors(datatype, wanted[name], found.get(name), peak)
            if error is not None and error.size:
                largest, total, values = (
                    max(largest, float(error.max())),
                    total + float(error.sum()),
                    values + error.size,
                )
    output = _output_of_scores(datatypes, reference, scores)
    if output is None and labels is not None:
        raise ConfigError(f"--labels: none of the outputs {', '.join(datatypes)} says a class; wanted [rows, classes]")
    agreement = correct = reference_correct = None
    if output is not None:
        said = [_classes(datatypes[output], run[output]) for run in reference]
        found_ = [_classes(datatypes[output], run.get(output)) for run in got]
        agreement = _share(_alike(a, b) for a, b in zip(said, found_, strict=True))
        if labels is not None:
            correct = _share(_is(label, each) for label, each in zip(labels, found_, strict=True))
            reference_correct = _share(_is(label, each) for label, each in zip(labels, said, strict=True))
    mean = total / values if values else 0.0
    return Accuracy(len(got), min(largest, FAR), min(mean, FAR), agreement, correct, reference_correct)


# ---- private --------------------------------------------------------------------------------------------------------


def _peak(datatype: str, name: str, runs: Sequence[Outputs]) -> float:
    """The largest finite value of an output over all runs: what its errors are measured against."""
    peak = 0.0
    for run in runs:
        values = float_values(datatype, run[name])
        if values is not None and values.size:
            peak = max(peak, float(np.max(np.abs(values), initial=0.0, where=np.isfinite(values))))
    return peak or 1.0


def _errors(datatype: str, wanted: Array, got: Array | None, peak: float) -> Doubles | None:
    """Distances of a float output, relative to its peak; None for outputs of other kinds."""
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
    """What each row says: the place of its highest score, or the whole number itself; None where it is no number."""
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
