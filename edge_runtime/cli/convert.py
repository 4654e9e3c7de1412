"""Convert a trained model into an artifact that a device serves, and show how near it is to its source.

edge-runtime convert model.pt2 --to onnx
edge-runtime convert model.onnx --to openvino --precision int8 --calibration some.npz --data test.npz --labels test.npy

The result is compared with the source on the inputs given, or on made-up ones; it is written only when it is near
enough. Errors are shares of an output's largest magnitude. Each format wants its own extra (edge-runtime[convert] has
all but PyTorch, which is yours to bring).
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from edge_runtime.cli.screen import Screen
from edge_runtime_converters.command import add_options, wish_of

if TYPE_CHECKING:
    from edge_runtime_converters.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The source and the options of a conversion."""
    add_options(parser)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Convert, and print the report."""
    from edge_runtime_converters.conversion import convert

    wish = wish_of(arguments)
    with screen.progress(f"converting {wish.source}", wish.timeout_s) as progress:
        report = convert(wish, lambda label, share: progress.show(label, share=share))
    if screen.wants_json:
        from msgspec import to_builtins

        screen.json(to_builtins(report))
    else:
        _print(report, screen)
    for fault in report.faults:
        screen.error(fault)
    if not report.is_near_enough and not report.files:
        screen.error("too far from its source, so nothing was written; --keep writes it, --tolerance X allows more")
    return 0 if report.is_near_enough else 1


def _print(report: Report, screen: Screen) -> None:
    from edge_runtime_converters.report import COLUMNS, fields, rows

    screen.fields(fields(report))
    screen.line()
    screen.table(COLUMNS, list(rows(report)), right=COLUMNS[1:])
    for note in report.notes:
        screen.note(f"note: {note}")
