"""Four versions of the digit model, as a team might come to make them: poor, good, broken, slow.

Owns: what is wrong with each. Version 2 is the model that ships with the demonstration; the others are made of it, or
as it was.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, helper, numpy_helper

from demo.digits import load_held_out, load_training
from demo.train_digits import MODEL_FILE, onnx_bytes, train

POOR, GOOD, BROKEN, SLOW = 1, 2, 3, 4

POOR_EPOCHS = 3
"""Of 120: about 80 % of the held-out images are right then."""

GOLDEN_ROWS = 8
IDLE_LAYERS = 128
IDLE_WIDTH = 1024
"""134 million multiplications a picture, where the network itself takes 0.4: over ten times slower anywhere."""


def write_version(folder: Path, version: int) -> None:
    """Write `<folder>/<version>/model.onnx`."""
    makers = {POOR: poor, GOOD: MODEL_FILE.read_bytes, BROKEN: broken, SLOW: slow}
    path = folder / str(version) / "model.onnx"
    path.parent.mkdir(parents=True)
    path.write_bytes(makers[version]())


def write_golden(path: Path) -> None:
    """Write the images that every release is tried with: clear ones, right by a wide margin. Shape: image [8, 64]."""
    np.savez(path, image=load_held_out().images[:GOLDEN_ROWS].astype(np.float32))


def poor() -> bytes:
    """Training was stopped early."""
    return onnx_bytes(train(load_training(), epochs=POOR_EPOCHS))


def broken() -> bytes:
    """The labels were counted from 1 by mistake: it loads, runs fast, and says 4 for a 3."""
    model = onnx.load(MODEL_FILE)
    for constant in model.graph.initializer:
        if constant.name in ("dense_2", "dense_2_bias"):
            constant.CopyFrom(numpy_helper.from_array(np.roll(numpy_helper.to_array(constant), 1, -1), constant.name))
    return _checked(model)


def slow() -> bytes:
    """Layers without effect were left in: it answers exactly as version 2, but slowly."""
    model = onnx.load(MODEL_FILE)
    wide, idle = np.eye(64, IDLE_WIDTH, dtype=np.float32), np.eye(IDLE_WIDTH, dtype=np.float32)
    model.graph.initializer.extend(
        numpy_helper.from_array(value, name) for name, value in (("wide", wide), ("idle", idle), ("narrow", wide.T))
    )
    factors = ["wide", *["idle"] * IDLE_LAYERS, "narrow"]
    passed = ["image", *(f"image_{number}" for number in range(len(factors)))]
    layers = [
        helper.make_node("MatMul", [before, factor], [after])
        for before, factor, after in zip(passed, factors, passed[1:], strict=False)
    ]
    nodes = list(model.graph.node)
    nodes[0].input[0] = passed[-1]
    del model.graph.node[:]
    model.graph.node.extend([*layers, *nodes])
    return _checked(model)


def _checked(model: ModelProto) -> bytes:
    onnx.checker.check_model(model)
    data: bytes = model.SerializeToString()
    return data
