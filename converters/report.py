"""What a conversion came to: values for programs, and how a person reads them."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct


class OutputReport(Struct, frozen=True, kw_only=True):
    """One output. Errors are shares of its largest magnitude; None where they do not apply (labels)."""

    name: str
    max_error: float | None = None
    mean_error: float | None = None
    agreement: float | None = None


class Report(Struct, frozen=True, kw_only=True):
    """One conversion. Errors and agreement against `compared_with`; bytes with data files; opset "" for no ONNX.

    faults: why it was not near enough, empty where it was. files: what was written, none where it was not kept.
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
    notes: tuple[str, ...] = ()

    @property
    def is_near_enough(self) -> bool:
        """Whether every bound was kept."""
        return not self.faults


def fields(report: Report) -> dict[str, str]:
    """Names and values in the order a person wants them."""
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


COLUMNS = ("output", "largest error", "mean error", "same answer")


def rows(report: Report) -> Iterator[list[str]]:
    """A line of COLUMNS for each output; errors as shares of the output's largest magnitude."""
    for output in report.outputs:
        errors = ("" if value is None else f"{value:.2g}" for value in (output.max_error, output.mean_error))
        yield [output.name, *errors, "" if output.agreement is None else f"{output.agreement:.2%}"]
