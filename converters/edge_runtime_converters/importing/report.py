"""The report of an import, in values, in words and as JSON: model by model, part by part. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct, field

from edge_runtime_converters.comparison import Report

COLUMNS = ("model", "from", "state", "files")

State = Literal["taken", "planned", "refused"]


class ImportedModel(Struct, frozen=True, kw_only=True):
    """One model of the source.

    was: what it is there. folder: where it lies now, "" unless taken. files: of that folder. conversions: the reports
    of `convert`, one for each file that was converted. remarks: what became of each part. reason: why it was refused,
    and what to do.
    """

    name: str
    was: str
    state: State
    folder: str = ""
    files: tuple[str, ...] = ()
    conversions: tuple[Report, ...] = ()
    notes: tuple[str, ...] = ()
    remarks: tuple[tuple[str, str], ...] = field(default=(), name="told")  # --json had this key first
    reason: str = ""


class ImportReport(Struct, frozen=True, kw_only=True):
    """The whole import. system: what the source is. models_folder: where the models were written to."""

    source: str
    system: str
    models_folder: str
    models: tuple[ImportedModel, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def is_whole(self) -> bool:
        """Whether every model was taken."""
        return all(model.state != "refused" for model in self.models)


def rows(report: ImportReport) -> Iterator[tuple[str, ...]]:
    """Yield a row of `COLUMNS` for each model."""
    for model in report.models:
        yield model.name, model.was, model.state, ", ".join(model.files)


def sentences(report: ImportReport) -> Iterator[str]:
    """Yield the lines beside the table: conversions, parts, notes."""
    for model in report.models:
        for made in model.conversions:
            worst = max((output.max_error for output in made.outputs if output.max_error is not None), default=0.0)
            agreed = min((output.agreement for output in made.outputs if output.agreement is not None), default=None)
            distinct = min((output.distinct for output in made.outputs if output.distinct is not None), default=0)
            same = "" if agreed is None else f", same answer {agreed:.2%} ({distinct} different)"
            yield (
                f"{model.name}: converted from {made.source_format} to {made.target}, largest error {worst:.2g}{same}, "
                f"on {made.compared_on} (compared with {made.compared_with})"
            )
            for unjudged in made.unjudged:
                yield f"{model.name}: {unjudged}"
        for part, what in model.remarks:
            yield f"{model.name}: {part}: {what}"
        for note in model.notes:
            yield f"{model.name}: {note}"
    yield from report.notes
