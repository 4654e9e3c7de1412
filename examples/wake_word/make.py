"""Make a wake word from nothing: a model of two words, a sound in which they are said, and the daemon's configuration.

    pip install onnx numpy
    python examples/wake_word/make.py FOLDER
    edge-runtime serve --config FOLDER/config.toml

The words are whistles, one that rises and one that falls, in place of speech: so the model is two patterns that are
laid over the features of a window, and nothing has to be trained. A model of yours takes its place, with a model.toml
of its own.
"""

from __future__ import annotations

import shutil
import sys
import wave
from pathlib import Path

import numpy as np
from onnx import TensorProto, checker, helper, numpy_helper, save_model

RATE, FRAMES, BANDS = 16_000, 98, 40
LOW_HZ, HIGH_HZ, WORD_S = 500.0, 3000.0, 0.5
WORD_FRAMES = 48
THRESHOLD = 3.0
"""How far above the others, in ln of power, the bands of a word are on average where it is said."""


def main(folder: str) -> None:
    """Write models, sound and configuration."""
    place, here = Path(folder).absolute(), Path(__file__).parent
    (place / "models" / "wake" / "1").mkdir(parents=True, exist_ok=True)
    save_model(made_model(), str(place / "models" / "wake" / "1" / "model.onnx"))
    shutil.copy(here / "model.toml", place / "models" / "wake" / "model.toml")
    write_wav(place / "kitchen.wav", said())
    config = (here / "config.toml").read_text(encoding="utf-8").replace("/path/to", str(place))
    (place / "config.toml").write_text(config, encoding="utf-8")


def whistle(begin_hz: float, end_hz: float) -> np.ndarray:
    """A tone that goes from one frequency to another, FP32 [samples]."""
    hertz = np.linspace(begin_hz, end_hz, round(WORD_S * RATE))
    return (0.3 * np.sin(2 * np.pi * np.cumsum(hertz) / RATE)).astype(np.float32)


def said() -> np.ndarray:
    """Nine seconds of a kitchen: noise, "hello", noise, "stop", noise."""
    samples = np.random.default_rng(1).normal(0, 0.003, 9 * RATE).astype(np.float32)
    for at_s, word in ((2.0, whistle(LOW_HZ, HIGH_HZ)), (5.0, whistle(HIGH_HZ, LOW_HZ))):
        at = round(at_s * RATE)
        samples[at : at + len(word)] += word
    return samples


def pattern(begin_hz: float, end_hz: float) -> np.ndarray:
    """Where the bands of a word are in time, FP32 [frames, bands]: each frame sums to 0."""

    def mel(hertz: np.ndarray | float) -> np.ndarray:
        return 2595 * np.log10(1 + np.asarray(hertz) / 700)

    middles = np.linspace(mel(20), mel(RATE / 2), BANDS + 2)[1:-1]
    wanted = mel(np.linspace(begin_hz, end_hz, WORD_FRAMES))
    width = middles[1] - middles[0]
    found = np.exp(-(((middles[None, :] - wanted[:, None]) / width) ** 2))
    found /= found.sum(axis=1, keepdims=True)
    return (found - 1 / BANDS).astype(np.float32) / WORD_FRAMES


def made_model() -> object:
    """Return the model: logmel FP32 [rows, 98, 40] -> scores FP32 [rows, 3]: nothing, hello, stop."""
    patterns = np.stack([pattern(LOW_HZ, HIGH_HZ), pattern(HIGH_HZ, LOW_HZ)])[:, None]
    constants = {
        "axis": np.array([1], np.int64),
        "patterns": patterns,
        "spread": np.array([[0, 2, 0], [0, 0, 2]], np.float32),
        "bias": np.array([2 * THRESHOLD, 0, 0], np.float32),
    }
    nodes = [
        helper.make_node("Unsqueeze", ["logmel", "axis"], ["picture"]),
        helper.make_node("Conv", ["picture", "patterns"], ["fits"]),  # at every moment of the window
        helper.make_node("ReduceMax", ["fits"], ["best"], axes=[2, 3], keepdims=0),
        helper.make_node("Gemm", ["best", "spread", "bias"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["scores"], axis=-1),
    ]
    graph = helper.make_graph(
        nodes,
        "wake",
        [helper.make_tensor_value_info("logmel", TensorProto.FLOAT, ["rows", FRAMES, BANDS])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["rows", 3])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    checker.check_model(model)
    return model


def write_wav(path: Path, samples: np.ndarray) -> None:
    """Write 16 bits, one channel."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32767).astype("<i2").tobytes())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
