"""ONNX to OpenVINO IR: in fp32, in fp16 weights, or in int8 by NNCF's post-training quantisation.

Owns: the calls of OpenVINO and NNCF. The target is `<name>.xml`, with `<name>.bin` beside it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from edge_runtime.errors import ConversionFailed
from edge_runtime.tensors import Array
from edge_runtime_converters.libraries import failing_as, import_library, reason_of, without_companions
from edge_runtime_converters.onnx_source import check_source
from edge_runtime_converters.output_files import whole

EXTRA = "convert-openvino"
Precision = Literal["f32", "f16", "int8"]

MAX_SAMPLES = 2000
"""NNCF reads its data more than once, so memory holds them; its own default is 300."""


def convert(
    source: Path, target: Path, *, precision: Precision, calibration: Iterable[Mapping[str, Array]] | None = None
) -> None:
    """Write an ONNX model as OpenVINO IR.

    target: an .xml. calibration: for int8, inputs by name, one mapping a run; at most MAX_SAMPLES are read. Raises
    ConversionFailed; `target` is then unchanged. Thread: any; int8 takes all cores for seconds.
    """
    check_source(source)
    write_ir(read_model(source), source, target, precision, calibration)


def quantise(source: Path, target: Path, calibration: Iterable[Mapping[str, Array]]) -> None:
    """Write `target`, an ONNX model as int8 IR; as `convert`. The same call as int8_from_onnx's."""
    convert(source, target, precision="int8", calibration=calibration)


def read_model(source: Path) -> Any:
    """An `openvino.Model` of a file that OpenVINO's own frontends read. Raises ConversionFailed."""
    openvino = import_library("openvino", EXTRA)
    try:
        return openvino.Core().read_model(str(source))
    except Exception as error:
        raise ConversionFailed(f"{source}: OpenVINO cannot read it: {_said(error)}") from error


def write_ir(
    model: Any, source: Path, target: Path, precision: Precision, calibration: Iterable[Mapping[str, Array]] | None
) -> None:
    """Write an `openvino.Model` as IR of a precision. Raises ConversionFailed."""
    if target.suffix != ".xml":
        raise ConversionFailed(f"{target}: wanted a name that ends in .xml, OpenVINO's IR")
    openvino = import_library("openvino", EXTRA)
    with failing_as(f"{source}: cannot be written as {precision} IR"):
        if precision == "int8":
            model = _quantised(model, calibration)
        with whole(target) as output:
            openvino.save_model(model, str(output), compress_to_fp16=precision == "f16")


def _said(error: Exception) -> str:
    """The part of OpenVINO's message about the model, or about operators without a rule."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    about = [
        line for line in lines if not line.startswith(("Exception from", "Check '", "[TensorFlow", "FrontEnd API"))
    ]
    found = [line for line in about if "No conversion rule" in line or "No translator" in line]
    return reason_of(RuntimeError("\n".join(found or about or lines)))


def _quantised(model: Any, calibration: Iterable[Mapping[str, Array]] | None) -> Any:
    samples = [dict(sample) for sample in itertools.islice(calibration or (), MAX_SAMPLES)]
    if not samples:
        raise ConversionFailed("int8 wants samples to calibrate with; got none")
    _fold(model)
    with _quiet(), without_companions("nncf"):  # it asks each kind of model's library whether the model is its
        nncf = import_library("nncf", EXTRA)
        return nncf.quantize(model, nncf.Dataset(samples), subset_size=len(samples))


def _fold(model: Any) -> None:
    """Fold constants, in place.

    The ONNX frontend writes a grouped convolution's weights as a computation, and NNCF then leaves the convolution in
    f32: MobileNetV2 on two cores ran 481 images/s unfolded and 746 folded (OpenVINO 2026.4, NNCF 3.4).
    """
    passes = import_library("openvino.passes", EXTRA)
    manager = passes.Manager()
    manager.register_pass(passes.ConstantFolding())
    manager.run_passes(model)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide NNCF's progress bars and messages."""
    level = logging.getLogger("nncf").level
    logging.getLogger("nncf").setLevel(logging.ERROR)
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            yield
        finally:
            logging.getLogger("nncf").setLevel(level)


if __name__ == "__main__":
    from edge_runtime_converters.command import main

    sys.exit(main("openvino"))
