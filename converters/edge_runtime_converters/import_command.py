"""Take the models of another server, or of a package, into a models folder: recognised, converted, compared, written.

edge-runtime import triton_repository/ --models models/
edge-runtime import mlflow_model/ --models models/ --name churn

Each model is written whole, or not at all, and nothing that is there is replaced without --replace. What is converted
is compared with its source, and refused above the tolerance. docs/import.md says what is taken of each system.
"""

# The verb `import` of the command line. It lies here because converters import edge_runtime, never the other way:
# edge_runtime/shipped.py names its declaration.

from __future__ import annotations

import argparse

import msgspec

from edge_runtime.cli.screen import Screen
from edge_runtime_converters.command import add_conversion_limits
from edge_runtime_converters.importing.report import COLUMNS, ImportReport, rows, sentences
from edge_runtime_converters.importing.writing import ImportOptions, import_source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The source, where to, and the options of the verb."""
    parser.add_argument(
        "source", metavar="SOURCE", help="a repository's folder, an archive, or a file of settings (docs/import.md)"
    )
    parser.add_argument("--models", metavar="DIR", required=True, help="the models folder to write to")
    parser.add_argument("--name", default="", help="the model's name, where the source holds one model")
    parser.add_argument(
        "--only", metavar="NAME", action="append", default=[], help="take this model alone; may be repeated"
    )
    parser.add_argument("--replace", action="store_true", help="replace a model of the same name")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and write nothing")
    add_conversion_limits(parser)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Import, and print the report. Returns the exit status: 0 done, 1 a model was not taken."""
    options = ImportOptions(
        source=arguments.source,
        models=arguments.models,
        name=arguments.name,
        only=tuple(arguments.only),
        shapes=tuple(arguments.shapes),
        tolerance=arguments.tolerance,
        timeout_s=arguments.timeout,
        replace=arguments.replace,
        is_dry=arguments.dry_run,
    )
    with screen.progress(f"importing {options.source}") as progress:

        def show(stage: str, share: float | None = None) -> None:
            progress.show(stage, share=share)

        report = import_source(options, show)
    if screen.wants_json:
        screen.json(msgspec.to_builtins(report))
    else:
        _print(report, screen)
    for model in report.models:
        if model.reason:
            screen.error(f"{model.name} was not taken: {model.reason}")
    return 0 if report.is_whole else 1


# ---- private --------------------------------------------------------------------------------------------------------


def _print(report: ImportReport, screen: Screen) -> None:
    screen.line(f"{report.source} is {report.system}")
    screen.line()
    screen.table(COLUMNS, list(rows(report)))
    for sentence in sentences(report):
        screen.note(f"note: {sentence}")
