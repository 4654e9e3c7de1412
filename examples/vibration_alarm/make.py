"""Make a vibration alarm from nothing: a model, ten seconds of a motor whose bearing fails, and the configuration.

    pip install onnx numpy
    python examples/vibration_alarm/make.py FOLDER
    edge-runtime serve --config FOLDER/config.toml

The model tells the strength of a second of vibration, in g, and whether it is above a limit: ISO 10816's idea in two
lines of arithmetic. A model of yours, trained on your machine, takes its place with its own model.toml.
"""

from __future__ import annotations

import shutil
import sys
import wave
from pathlib import Path

import numpy as np
from onnx import TensorProto, checker, helper, numpy_helper, save_model

RATE, WINDOW = 1000, 1000
RANGE_G = 8.0
"""Of the sensor: 1 in the file is so many g. model.toml has it as `scale`."""

LIMIT_G = 0.5


def main(folder: str) -> None:
    """Write models, samples and configuration."""
    place, here = Path(folder).absolute(), Path(__file__).parent
    (place / "models" / "motor" / "1").mkdir(parents=True, exist_ok=True)
    save_model(made_model(), str(place / "models" / "motor" / "1" / "model.onnx"))
    shutil.copy(here / "model.toml", place / "models" / "motor" / "model.toml")
    write_wav(place / "motor.wav", shaken())
    config = (here / "config.toml").read_text(encoding="utf-8").replace("/path/to", str(place))
    (place / "config.toml").write_text(config, encoding="utf-8")


def shaken() -> np.ndarray:
    """Ten seconds of a motor in g: 25 turns a second and gravity, from the fifth second on 1 g at 120 Hz."""
    seconds = np.arange(10 * RATE) / RATE
    samples = 1 + 0.2 * np.sin(2 * np.pi * 25 * seconds) + np.random.default_rng(2).normal(0, 0.02, len(seconds))
    return samples + np.where(seconds >= 5, np.sin(2 * np.pi * 120 * seconds), 0)


def made_model() -> object:
    """Return the model: samples FP32 [rows, 1000] in g -> rms FP32 [rows, 1], state FP32 [rows, 2]: good, alarm."""
    constants = {
        "spread": np.array([[0, 20]], np.float32),
        "bias": np.array([20 * LIMIT_G, 0], np.float32),
    }
    nodes = [
        helper.make_node("Mul", ["samples", "samples"], ["squares"]),
        helper.make_node("ReduceMean", ["squares"], ["mean"], axes=[1], keepdims=1),
        helper.make_node("Sqrt", ["mean"], ["rms"]),
        helper.make_node("Gemm", ["rms", "spread", "bias"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["state"], axis=-1),
    ]
    graph = helper.make_graph(
        nodes,
        "motor",
        [helper.make_tensor_value_info("samples", TensorProto.FLOAT, ["rows", WINDOW])],
        [
            helper.make_tensor_value_info("rms", TensorProto.FLOAT, ["rows", 1]),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, ["rows", 2]),
        ],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    checker.check_model(model)
    return model


def write_wav(path: Path, samples: np.ndarray) -> None:
    """Write 16 bits, one channel, of RANGE_G."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples / RANGE_G * 32767).astype("<i2").tobytes())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
