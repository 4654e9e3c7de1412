"""The options of a conversion as values, and how a command line gives shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct

from edge_runtime.errors import ConversionFailed
from edge_runtime.model_spec import DYNAMIC, TensorSpec
from edge_runtime.tensors import DATATYPES

Target = Literal["onnx", "openvino", "ort", "tensorrt"]
Precision = Literal["fp32", "fp16", "bf16", "int8"]

TIMEOUT_S = 600.0
"""ResNet-50 in int8 with 300 samples takes about one minute on two cores."""


class ConversionOptions(Struct, frozen=True, kw_only=True):
    """One conversion. Paths are absolute once `conversion.convert` has taken it.

    output: "" beside the source. calibration: real inputs that int8 ranges are chosen from. data: inputs to compare on,
    "" for the calibration ones, else made-up ones. labels: right answers of `data`. shapes: NAME=DIMS[:DATATYPE].
    is_for_tensorrt: int8 as TensorRT reads it. gpu: the compute capability to build an engine for, "" for the local
    GPU. tolerance: None for the precision's own. keep: write even an artifact that is too far from its source.
    accepts_unjudged: take one also where the data cannot show whether it is.
    """

    source: str
    target: Target
    precision: Precision = "fp32"
    output: str = ""
    calibration: str = ""
    data: str = ""
    labels: str = ""
    shapes: tuple[str, ...] = ()
    is_for_tensorrt: bool = False
    gpu: str = ""
    tolerance: float | None = None
    keep: bool = False
    accepts_unjudged: bool = False
    overwrite: bool = False
    timeout_s: float = TIMEOUT_S


def absolute(options: ConversionOptions, output: Path) -> ConversionOptions:
    """The same options with absolute paths."""
    values = {name: getattr(options, name) for name in options.__struct_fields__}
    for name in ("source", "calibration", "data", "labels"):
        if values[name]:
            values[name] = str(Path(values[name]).absolute())
    return ConversionOptions(**{**values, "output": str(output.absolute())})


Shapes = Mapping[str, TensorSpec]
"""Shapes of inputs that the caller gives, in the given order."""


def parse_shapes(words: tuple[str, ...]) -> dict[str, TensorSpec]:
    """`image=-1,3,224,224` or `ids=-1,128:INT64`; -1 or a word is open. Raises ConversionFailed."""
    shapes: dict[str, TensorSpec] = {}
    for word in words:
        name, equals, rest = word.partition("=")
        dims, _, datatype = rest.partition(":")
        datatype = datatype or "FP32"
        if not name or not equals or datatype not in DATATYPES:
            raise ConversionFailed(f"shape {word!r}: wanted NAME=DIMS[:DATATYPE], for example image=-1,3,224,224:FP32")
        shapes[name] = TensorSpec(name, datatype, tuple(_dimension(text.strip(), word) for text in dims.split(",")))
    return shapes


def _dimension(text: str, word: str) -> int:
    if re.fullmatch(r"[1-9][0-9]{0,8}", text):
        return int(text)
    if text == "-1" or re.fullmatch(r"[A-Za-z_]\w*", text):
        return DYNAMIC
    raise ConversionFailed(f"shape {word!r}: {text!r} is not a dimension; wanted a whole number, or -1 for an open one")
