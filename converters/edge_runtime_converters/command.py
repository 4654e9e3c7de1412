"""Convert a trained model into an artifact that a device serves, and compare the two.

edge-runtime convert model.pt2 --to onnx
edge-runtime convert model.onnx --to openvino --precision int8 --calibration some.npz --data test.npz --labels test.npy

The result is compared with the source on the inputs given, or on made-up ones; it is written only when it is near
enough, by inputs that can show it: an answer that ignores its input must not pass. Errors are shares of an output's
largest magnitude, and of its spread over the rows. Each format needs its own extra (edge-runtime[convert] has all but
PyTorch, which is yours to bring).
"""

# The verb `convert` of the command line, and what `python -m edge_runtime_converters.<target>_from_<source>` runs. It
# lies here because converters import edge_runtime, never the other way: edge_runtime/shipped.py names its declaration.

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

import msgspec

from edge_runtime.cli.screen import Screen
from edge_runtime.errors import EdgeRuntimeError
from edge_runtime_converters.comparison import COLUMNS, Report, fields, rows
from edge_runtime_converters.conversion import convert
from edge_runtime_converters.formats import PRECISIONS, TARGETS
from edge_runtime_converters.options import TIMEOUT_S, ConversionOptions

_WHAT_TELLS = (
    "give others with --data, to which the source gives different answers; --accept-unjudged takes it as it is"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The source and the options of the verb."""
    _add_options(parser)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Convert, and print the report. Returns the exit status: 0 done, 1 too far from the source, or unknown whether."""
    options = options_of(arguments)
    with screen.progress(f"converting {options.source}", options.timeout_s) as progress:

        def show(stage: str, share: float | None = None) -> None:
            progress.show(stage, share=share)

        report = convert(options, show)
    if screen.wants_json:
        screen.json(msgspec.to_builtins(report))
    else:
        _print(report, screen)
    for fault in (*report.faults, *(() if report.is_accepted else report.unjudged)):
        screen.error(fault)
    if report.unjudged and not report.faults and not report.is_accepted:
        written = "" if report.files else ", so nothing was written"
        screen.error(f"these data cannot tell whether it is near its source{written}; {_WHAT_TELLS}")
    elif report.faults and not report.files:
        screen.error("too far from its source, so nothing was written; --keep writes it, --tolerance X allows more")
    return 0 if report.is_near_enough else 1


def main(target: str, precision: str = "fp32", words: Sequence[str] | None = None) -> int:
    """Run one converter as a program. Returns the exit status: 0 done, 1 failed (2 wrong usage)."""
    parser = argparse.ArgumentParser(description=f"Convert a model to {target}.")
    _add_options(parser, target=target, precision=precision)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(words)
    screen = Screen(sys.stdout, sys.stderr, wants_json=arguments.json)
    try:
        return run(arguments, screen)
    except (EdgeRuntimeError, OSError) as error:
        screen.error(str(error))
        return 1


def options_of(arguments: argparse.Namespace) -> ConversionOptions:
    """The options as a value."""
    return ConversionOptions(
        source=arguments.source,
        target=arguments.to,
        precision=arguments.precision,
        output=arguments.output,
        calibration=arguments.calibration,
        data=arguments.data,
        labels=arguments.labels,
        shapes=tuple(arguments.shapes),
        is_for_tensorrt=arguments.for_tensorrt,
        gpu=arguments.gpu,
        tolerance=arguments.tolerance,
        keep=arguments.keep,
        accepts_unjudged=arguments.accept_unjudged,
        overwrite=arguments.overwrite,
        timeout_s=arguments.timeout,
    )


def add_conversion_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options that `import` has too: shapes, tolerance and time of a conversion."""
    parser.add_argument(
        "--shapes",
        metavar="NAME=DIMS",
        action="append",
        default=[],
        help="shape of an input that the source leaves out: image=-1,3,224,224 or ids=-1,128:INT64",
    )
    parser.add_argument(
        "--tolerance",
        metavar="X",
        type=_share,
        help="allow errors, other answers and loss of accuracy up to this share, 0.01 or 1%% (default: by precision)",
    )
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=_seconds,
        default=TIMEOUT_S,
        help="end the conversion after this many seconds (default %(default)g)",
    )


# ---- private --------------------------------------------------------------------------------------------------------


def _print(report: Report, screen: Screen) -> None:
    screen.fields(fields(report))
    screen.line()
    screen.table(COLUMNS, list(rows(report)), right=COLUMNS[1:])
    for note in (*report.notes, *(report.unjudged if report.is_accepted else ())):
        screen.note(f"note: {note}")


def _add_options(parser: argparse.ArgumentParser, *, target: str = "", precision: str = "fp32") -> None:
    parser.add_argument(
        "source", metavar="SOURCE", help="a model: .pt2, .pt, .skops, .json, .ubj, .txt, .onnx, .tflite or a SavedModel"
    )
    parser.add_argument(
        "--to", choices=TARGETS, required=not target, default=target or None, help="the format to write"
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        type=_precision,
        default=precision,
        help="precision of the result (default %(default)s)",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        default="",
        help="default: beside the source, by its name; models/NAME/1/ writes model.onnx there, where it is served",
    )
    _add_data(parser)
    _add_tensorrt(parser)
    parser.add_argument("--keep", action="store_true", help="write the result even where it is too far from its source")
    parser.add_argument(
        "--accept-unjudged",
        action="store_true",
        help="take the result also where the data cannot tell whether it is near, because one answer fits nearly all",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a file of the same name")
    add_conversion_limits(parser)


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calibration",
        metavar="DATA",
        default="",
        help="real inputs that int8 ranges are chosen from: .npz, .npy, .json or a picture, or a folder of them",
    )
    parser.add_argument(
        "--data",
        metavar="DATA",
        default="",
        help="inputs to compare on (default: those of --calibration, else made up)",
    )
    parser.add_argument(
        "--labels",
        metavar="FILE",
        default="",
        help="the right class of each row of the data, .npy or text with a number a line: gives the accuracy",
    )


def _add_tensorrt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--for-tensorrt",
        action="store_true",
        help="with --to onnx --precision int8: signed and symmetric, as TensorRT reads it; slower on CPUs",
    )
    parser.add_argument(
        "--gpu",
        metavar="SM",
        default="",
        help="with --to tensorrt and TensorRT for RTX: the compute capability of another GPU: SM89",
    )


def _precision(text: str) -> str:
    """Also take the names in model.toml and `tune`, f32 and f16."""
    return {"f32": "fp32", "f16": "fp16"}.get(text, text)


def _share(text: str) -> float:
    wanted = "a share from 0 to 1, or from 0% to 100%"
    return _number(text[:-1], 100.0, wanted) / 100 if text.endswith("%") else _number(text, 1.0, wanted)


def _seconds(text: str) -> float:
    return _number(text, math.inf, "more than 0 seconds")


def _number(text: str, most: float, wanted: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= most or (most == math.inf and not 0 < number < most):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted {wanted}")
    return number
