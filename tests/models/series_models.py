"""Small ONNX models of series, made by hand: what they say of a window can be told by looking at it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import helper, numpy_helper

from edge_runtime.series.features import mel_bands
from edge_runtime.series.series_steps import SeriesSteps
from tests.models.onnx_models import _write

RATE = 16_000
LOW_HZ, HIGH_HZ = 500.0, 3000.0
WORDS = ("silence", "low", "high")


def listener(folder: Path, rows: int | str = "rows") -> Path:
    """logmel FP32 [rows, 98, 40] -> scores FP32 [rows, 3]: silence, a tone of 500 Hz, one of 3 kHz.

    Each tone's score is how far its band is above the mean of all bands; silence has none above it.
    """
    bands = mel_bands(SeriesSteps())
    points = np.arange(bands.shape[0]) * RATE / SeriesSteps().points
    weights = np.full((40, 3), -1 / 40, np.float32)
    weights[:, 0] = 0
    for column, hertz in ((1, LOW_HZ), (2, HIGH_HZ)):
        weights[bands[np.abs(points - hertz).argmin()].argmax(), column] += 1
    nodes = [
        helper.make_node("ReduceMean", ["logmel"], ["mean"], axes=[1], keepdims=0),
        helper.make_node("MatMul", ["mean", "weights"], ["logits"]),
        helper.make_node("Add", ["logits", "bias"], ["raised"]),
        helper.make_node("Softmax", ["raised"], ["scores"], axis=-1),
    ]
    told = [numpy_helper.from_array(weights, "weights")]
    told.append(numpy_helper.from_array(np.array([2, 0, 0], np.float32), "bias"))
    return _write(folder, nodes, [("logmel", "FP32", [rows, 98, 40])], [("scores", "FP32", [rows, 3])], told)


def shaking(folder: Path, samples: int = 1000) -> Path:
    """samples FP32 [rows, samples] -> rms FP32 [rows, 1]: the strength of a vibration, as what it was sent in."""
    nodes = [
        helper.make_node("Mul", ["samples", "samples"], ["squares"]),
        helper.make_node("ReduceMean", ["squares"], ["mean"], axes=[1], keepdims=1),
        helper.make_node("Sqrt", ["mean"], ["rms"]),
    ]
    return _write(folder, nodes, [("samples", "FP32", ["rows", samples])], [("rms", "FP32", ["rows", 1])])


def tone(hertz: float, seconds: float, rate: int = RATE, strength: float = 0.5) -> np.ndarray:
    """FP32 [samples] of -1 to 1."""
    return (strength * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)
