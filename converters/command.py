"""The options of a conversion, and what `python -m edge_runtime_converters.<target>_from_<source>` does.

Owns: their names and help, for `edge-runtime convert` too.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence

import msgspec

from edge_runtime.errors import EdgeRuntimeError
from edge_runtime_converters.conversion import convert
from edge_runtime_converters.matrix import PRECISIONS, TARGETS
from edge_runtime_converters.report import COLUMNS, Report, fields, rows
from edge_runtime_converters.wish import TIMEOUT_S, Wish


def add_options(parser: argparse.ArgumentParser, *, target: str = "", precision: str = "fp32") -> None:
    """The source and all options. target: "" lets the caller say it."""
    parser.add_argument(
        "source", metavar="SOURCE", help="a model: .pt2, .pt, .skops, .json, .ubj, .txt, .onnx, .tflite or a SavedModel"
    )
    parser.add_argument("--to", choices=TARGETS, required=not target, default=target or None, help="what it becomes")
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        type=_precision,
        default=precision,
        help="of the result (default %(default)s)",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        default="",
        help="default: beside the source, by its name; models/NAME/1/ writes model.onnx there, where it is served",
    )
    _add_data(parser)
    parser.add_argument(
        "--shapes",
        metavar="NAME=DIMS",
        action="append",
        default=[],
        help="an input as the source does not say it: image=-1,3,224,224 or ids=-1,128:INT64",
    )
    _add_tensorrt(parser)
    parser.add_argument(
        "--tolerance",
        metavar="X",
        type=_share,
        help="allow errors, other answers and loss of accuracy up to this share, 0.01 or 1%% (default: by precision)",
    )
    parser.add_argument("--keep", action="store_true", help="write the result even where it is too far from its source")
    parser.add_argument("--overwrite", action="store_true", help="replace a file of the same name")
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=_seconds,
        default=TIMEOUT_S,
        help="end it after so many seconds (default %(default)g)",
    )


def wish_of(arguments: argparse.Namespace) -> Wish:
    """What the options say."""
    return Wish(
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
        overwrite=arguments.overwrite,
        timeout_s=arguments.timeout,
    )


def main(target: str, precision: str = "fp32", words: Sequence[str] | None = None) -> int:
    """Run one converter from the command line. Returns the exit status: 0 done, 1 failed (2 wrong usage)."""
    parser = argparse.ArgumentParser(description=f"Convert a model to {target}.")
    add_options(parser, target=target, precision=precision)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(words)
    try:
        report = convert(wish_of(arguments))
    except (EdgeRuntimeError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(report), indent=2))
    else:
        print("\n".join(_lines(report)))
    for fault in report.faults:
        print(f"{parser.prog}: {fault}", file=sys.stderr)
    return 0 if report.is_near_enough else 1


def _lines(report: Report) -> list[str]:
    told = [f"{name}: {value}" for name, value in fields(report).items() if value]
    told += [
        ", ".join(f"{name} {cell}" for name, cell in zip(COLUMNS, row, strict=True) if cell) for row in rows(report)
    ]
    return told + [f"note: {note}" for note in report.notes]


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calibration",
        metavar="DATA",
        default="",
        help="real inputs that int8 chooses its ranges by: .npz, .npy, .json or a picture, or a folder of them",
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
        help="the right class of each row of the data, .npy or text with a number a line: tells the accuracy",
    )


def _add_tensorrt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--for-tensorrt",
        action="store_true",
        help="with --to onnx --precision int8: signed and symmetric, as TensorRT reads it; CPUs are slower with it",
    )
    parser.add_argument(
        "--gpu",
        metavar="SM",
        default="",
        help="with --to tensorrt and TensorRT for RTX: the compute capability of a GPU that is not here: SM89",
    )


def _precision(text: str) -> str:
    """model.toml and `tune` call them f32 and f16."""
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
