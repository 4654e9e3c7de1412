"""What precision an ONNX model was exported in, from the element types of its weights."""

from __future__ import annotations

from collections.abc import Mapping

# TensorProto.DataType of onnx.proto. Types that are not listed hold shapes, indices and text, not weights.
_PRECISIONS = {
    1: "f32", 10: "f16", 11: "f64", 16: "bf16",
    2: "int8", 3: "int8",
    17: "f8", 18: "f8", 19: "f8", 20: "f8", 21: "int4", 22: "int4", 23: "f4",
}  # fmt: skip

_MOST = 0.9
"""Scales, biases and limits of an int8 or f16 model stay f32; they are a few per cent of its elements."""


INT8 = "int8"


def holds_int8(elements: Mapping[int, int]) -> bool:
    """Whether a model was quantised to int8, wholly or in part: what was not holds zero points of it at most."""
    weights = _weights(elements)
    return weights.get(INT8, 0) > (1 - _MOST) * sum(weights.values())


def weight_precision(elements: Mapping[int, int]) -> str:
    """The precision of nine weights in ten, else "mixed"; "" for a model without weights.

    elements: number of elements for each TensorProto.DataType.
    """
    weights = _weights(elements)
    if not weights:
        return ""
    most = max(weights, key=lambda precision: weights[precision])
    return most if weights[most] >= _MOST * sum(weights.values()) else "mixed"


def _weights(elements: Mapping[int, int]) -> dict[str, int]:
    weights: dict[str, int] = {}
    for data_type, count in elements.items():
        precision = _PRECISIONS.get(data_type)
        if precision is not None and count > 0:
            weights[precision] = weights.get(precision, 0) + count
    return weights
