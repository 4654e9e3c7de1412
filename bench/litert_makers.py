"""MobileNetV2 as LiteRT has it, in float and in int8, by script: shapes of the real network, seeded random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.makers import BenchModel, cache_folder
from tests.models.litert_models import LiteRtGraph

STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion, width, repeats, stride (Sandler et al. 2018, table 2)."""

SCALE = 6 / 255
"""Of every int8 activation; what is learnt is of no matter to speed."""


def mobilenetv2(*, int8: bool) -> BenchModel:
    """MobileNetV2 at width 1.0: x FP32 [-1, 224, 224, 3] -> y FP32 [-1, 1000]; int8 between, where it is asked for."""
    name = f"mobilenetv2-{'int8' if int8 else 'f32'}"
    path = cache_folder() / f"{name}-1.tflite"
    if not path.exists():
        _write(path, int8=int8)
    return BenchModel(name, path, (224, 224, 3), 1000)


class _Layers:
    """A chain of layers, each [-1, side, side, channels], in float or int8."""

    def __init__(self, *, int8: bool) -> None:
        self.graph = LiteRtGraph()
        self._schema = self.graph.schema
        self._int8 = int8
        self._random = np.random.default_rng(3)

    def activation(self, *shape: int) -> int:
        """An output of a layer."""
        if self._int8:
            return self.graph.tensor("INT8", [-1, *shape], scales=[SCALE], zero=-128)
        return self.graph.tensor("FP32", [-1, *shape])

    def conv(self, source: int, inputs: int, outputs: int, side: int, kernel: int, stride: int, *, clip: bool) -> int:
        """A convolution, padded to keep the size, and clipped to 0..6 where it is asked for."""
        options = self._schema.Conv2DOptionsT()
        self._fill(options, stride, clip=clip)
        weights = self._weights((outputs, kernel, kernel, inputs), kernel * kernel * inputs, axis=0)
        return self._layer("CONV_2D", options, source, weights, outputs, -(-side // stride))

    def depthwise(self, source: int, channels: int, side: int, stride: int) -> int:
        """A 3x3 convolution of each channel, clipped to 0..6."""
        options = self._schema.DepthwiseConv2DOptionsT()
        self._fill(options, stride, clip=True)
        options.depthMultiplier = 1
        weights = self._weights((1, 3, 3, channels), 9, axis=3)
        return self._layer("DEPTHWISE_CONV_2D", options, source, weights, channels, -(-side // stride))

    def add(self, left: int, right: int, channels: int, side: int) -> int:
        """The sum that ends a residual block."""
        result = self.activation(side, side, channels)
        self.graph.operator("ADD", [left, right], [result], self._schema.AddOptionsT())
        return result

    def head(self, source: int, channels: int) -> int:
        """[-1, side, side, channels] -> [-1, 1000]."""
        mean = self.activation(channels)
        axes = self.graph.constant(np.array([1, 2], np.int32))
        self.graph.operator("MEAN", [source, axes], [mean], self._schema.ReducerOptionsT())
        weights = self._weights((1000, channels), channels, axis=None)
        scores = self.activation(1000)
        inputs = [mean, weights[0], self._bias(1000, weights[1])]
        self.graph.operator("FULLY_CONNECTED", inputs, [scores], self._schema.FullyConnectedOptionsT())
        return scores

    def save(self, path: Path, source: int, result: int) -> None:
        """Write the file; an int8 one takes and gives floats, as a converter writes it unless it is told otherwise."""
        self.graph.save(path, {"x": source}, {"y": result})

    def quantised(self, source: int, *shape: int) -> int:
        """A float input as the layers take it."""
        return self._turned("QUANTIZE", source, self.activation(*shape)) if self._int8 else source

    def floats(self, source: int, *shape: int) -> int:
        """A layer's output as floats."""
        return self._turned("DEQUANTIZE", source, self.graph.tensor("FP32", [-1, *shape])) if self._int8 else source

    def _turned(self, operator: str, source: int, result: int) -> int:
        self.graph.operator(operator, [source], [result])
        return result

    def _fill(self, options: Any, stride: int, *, clip: bool) -> None:
        options.padding = self._schema.Padding.SAME
        options.strideW = options.strideH = stride
        kinds = self._schema.ActivationFunctionType
        options.fusedActivationFunction = kinds.RELU6 if clip else kinds.NONE

    def _weights(self, shape: tuple[int, ...], fan_in: int, *, axis: int | None) -> tuple[int, NDArray[np.float32]]:
        """A constant, and the scale of each of its output channels."""
        values = self._random.standard_normal(shape, np.float32) * np.float32(np.sqrt(2.0 / fan_in))
        if not self._int8:
            return self.graph.constant(values), np.ones(1, np.float32)
        others = None if axis is None else tuple(each for each in range(len(shape)) if each != axis)
        scales = np.atleast_1d(np.abs(values).max(axis=others) / 127).astype(np.float32)
        along = [1] * len(shape)
        along[axis or 0] = len(scales)
        whole = np.round(values / scales.reshape(along)).astype(np.int8)
        made = self.graph.tensor("INT8", shape, data=whole, scales=scales.tolist(), axis=axis or 0)
        return made, scales

    def _bias(self, outputs: int, scales: NDArray[np.float32]) -> int:
        if not self._int8:
            return self.graph.constant(np.zeros(outputs, np.float32))
        zeros = np.zeros(outputs, np.int32)
        return self.graph.tensor("INT32", zeros.shape, data=zeros, scales=(scales * SCALE).tolist())

    def _layer(
        self,
        operator: str,
        options: Any,
        source: int,
        weights: tuple[int, NDArray[np.float32]],
        outputs: int,
        side: int,
    ) -> int:
        result = self.activation(side, side, outputs)
        self.graph.operator(operator, [source, weights[0], self._bias(outputs, weights[1])], [result], options)
        return result


def _write(path: Path, *, int8: bool) -> None:
    layers = _Layers(int8=int8)
    source = layers.graph.tensor("FP32", [-1, 224, 224, 3])
    trunk, channels, side = layers.conv(layers.quantised(source, 224, 224, 3), 3, 32, 224, 3, 2, clip=True), 32, 112
    for expansion, width, repeats, stride in STAGES:
        for repeat in range(repeats):
            step, before, hidden = stride if repeat == 0 else 1, trunk, channels * expansion
            if expansion != 1:
                trunk = layers.conv(trunk, channels, hidden, side, 1, 1, clip=True)
            trunk = layers.depthwise(trunk, hidden, side, step)
            side = -(-side // step)
            trunk = layers.conv(trunk, hidden, width, side, 1, 1, clip=False)
            if step == 1 and width == channels:
                trunk = layers.add(before, trunk, width, side)
            channels = width
    scores = layers.head(layers.conv(trunk, channels, 1280, side, 1, 1, clip=True), 1280)
    part = path.with_suffix(".part")
    layers.save(part, source, layers.floats(scores, 1000))
    part.replace(path)
