"""ONNX to an int8 ONNX model, by ONNX Runtime's static quantisation with samples of real inputs.

Owns: the choice of datatypes. Activations uint8, weights int8 per channel (U8S8) is what AVX512-VNNI
multiplies: MobileNetV2 on one such core runs in 3.8 ms so, in 6.1 ms with int8 activations, in 8.1 ms with uint8
weights, in 7.7 ms in fp32 (ONNX Runtime 1.31); ARM's dot products take either.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from edge_runtime.errors import ConversionFailed
from edge_runtime.tensors import Array
from edge_runtime_converters.libraries import failing_as, import_library
from edge_runtime_converters.onnx_source import read_onnx, with_opset
from edge_runtime_converters.output_files import whole

EXTRA = "convert-onnx"

_OPSET = 13
"""The first with QuantizeLinear per channel. Source: onnx.ai/onnx/operators/onnx__QuantizeLinear.html."""

_LEFT_ALONE = ("Softmax", "ArgMax")
"""Operators kept in fp32: 256 steps are few for probabilities, and they take no time."""


def quantise(
    source: Path, target: Path, calibration: Iterable[Mapping[str, Array]], *, is_for_tensorrt: bool = False
) -> None:
    """Write `target`, the int8 (QDQ) form of an ONNX model.

    calibration: the model's inputs by name, one mapping a run; read once. A few hundred typical rows are enough.
    is_for_tensorrt: signed and symmetric throughout, biases in f32: TensorRT reads no other. Raises ConversionFailed;
    `target` is then unchanged. Thread: any; takes all cores for seconds.
    """
    model = read_onnx(source, EXTRA)
    if not any(node.domain in ("", "ai.onnx") for node in model.graph.node):
        raise ConversionFailed(
            f"{source}: has trees or linear models alone, whose thresholds and coefficients are not for int8; serve it "
            "as it is"
        )
    model = with_opset(model, _OPSET, EXTRA)
    quantization = import_library("onnxruntime.quantization", EXTRA)
    onnx = import_library("onnx", EXTRA)
    with failing_as(f"{source}: cannot be quantised"), whole(target) as output:
        plain, prepared = output.with_name("plain.onnx"), output.with_name("prepared.onnx")
        try:
            onnx.save(model, str(plain))
            del model
            _prepare(plain, prepared)
            samples = _Samples(quantization, calibration)
            _quantise(quantization, prepared, output, samples.reader, is_for_tensorrt=is_for_tensorrt)
        finally:
            plain.unlink(missing_ok=True)
            prepared.unlink(missing_ok=True)


class _Samples:
    """ONNX Runtime's reader over an iterable. Raises ConversionFailed where the iterable is empty."""

    def __init__(self, quantization: Any, calibration: Iterable[Mapping[str, Array]]) -> None:
        samples = iter(calibration)

        class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]  # the library is imported late
            def get_next(self) -> Mapping[str, Array] | None:
                return next(samples, None)

        first = next(samples, None)
        if first is None:
            raise ConversionFailed("int8 wants samples to calibrate with; got none")
        samples = _after(first, samples)
        self.reader = Reader()


def _after(first: Mapping[str, Array], rest: Iterator[Mapping[str, Array]]) -> Iterator[Mapping[str, Array]]:
    yield first
    yield from rest


def _prepare(plain: Path, prepared: Path) -> None:
    """Infer shapes and fold batch normalisation, as ONNX Runtime's documentation requires before quantising."""
    shapes = import_library("onnxruntime.quantization.shape_inference", EXTRA)
    # Symbolic shape inference needs sympy and is for transformers with open inner axes.
    shapes.quant_pre_process(str(plain), str(prepared), skip_symbolic_shape=True)


def _quantise(quantization: Any, prepared: Path, output: Path, reader: Any, *, is_for_tensorrt: bool) -> None:
    onnx = import_library("onnx", EXTRA)
    graph = onnx.load(str(prepared)).graph
    left_alone = [node.name for node in graph.node if node.op_type in _LEFT_ALONE and node.name]
    activations = quantization.QuantType.QInt8 if is_for_tensorrt else quantization.QuantType.QUInt8
    options = {"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False} if is_for_tensorrt else {}
    root_level = logging.getLogger().level
    logging.getLogger().setLevel(logging.ERROR)  # it advises to prepare the model, which is done
    try:
        quantization.quantize_static(
            str(prepared), str(output), reader,
            quant_format=quantization.QuantFormat.QDQ, per_channel=True,
            activation_type=activations, weight_type=quantization.QuantType.QInt8,
            # Seven bits: without VNNI, x86 adds two products in 16 bits, and products of eight bits overflow there
            # (onnxruntime.ai/docs/performance/model-optimizations/quantization.html). The file may go to any device.
            reduce_range=not is_for_tensorrt,
            nodes_to_exclude=left_alone, extra_options=options,
        )  # fmt: skip
    finally:
        logging.getLogger().setLevel(root_level)


if __name__ == "__main__":
    from edge_runtime_converters.command import main

    sys.exit(main("onnx", "int8"))
