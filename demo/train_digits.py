"""Trains the demo's digit classifier and writes it as ONNX: two convolutions and two dense layers, in plain numpy.

    python -m demo.train_digits             train, check, write demo/models/digits/1/model.onnx and demo/digits.json
    python -m demo.train_digits --extract   take demo/digits.npz out of scikit-learn again (extra `digits`)

About half a minute on one core. The seed is fixed; on another processor sums are rounded in another order, so weights
differ there in their last digits and the accuracy may differ by an image or two.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from demo.digits import DIGITS_FILE, Digits, load_held_out, load_training

MODEL_FILE = Path(__file__).parent / "models" / "digits" / "1" / "model.onnx"
REPORT_FILE = Path(__file__).with_name("digits.json")
SEED = 7
EPOCHS = 120
BATCH_ROWS = 64
PEAK_STEP = 2e-3
FULL_INK = 16.0
HIDDEN = 64

Floats = npt.NDArray[np.float32]
Weights = dict[str, Floats]


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo.train_digits", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--extract", action="store_true", help="take the images out of scikit-learn again, first")
    parser.add_argument("--model", type=Path, default=MODEL_FILE, help="ONNX file to write (default: %(default)s)")
    parser.add_argument("--report", type=Path, default=REPORT_FILE, help="accuracy as JSON (default: %(default)s)")
    asked = parser.parse_args(arguments)
    if asked.extract:
        extract()
    weights = train(load_training(), show=sys.stderr.isatty())
    asked.model.parent.mkdir(parents=True, exist_ok=True)
    asked.model.write_bytes(onnx_bytes(weights))
    report = judge(asked.model, load_held_out())
    asked.report.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{asked.model}: {report['correct']} of {report['held_out']} held-out images right")
    return 0


def extract(path: Path = DIGITS_FILE) -> None:
    """Write the images that scikit-learn carries as one compressed file, unchanged and in the same order."""
    from sklearn.datasets import load_digits

    source = load_digits()
    np.savez_compressed(path, images=source.data.astype(np.uint8), labels=source.target.astype(np.uint8))


def judge(model: Path, digits: Digits) -> dict[str, int]:
    """Run an ONNX file on images it was not trained on and count the right answers."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (found,) = session.run(["digit"], {"image": digits.images.astype(np.float32)})
    return {"held_out": len(digits.labels), "correct": int((found == digits.labels).sum())}


# ---- training -------------------------------------------------------------------------------------------------------


def train(digits: Digits, *, epochs: int = EPOCHS, show: bool = False) -> Weights:
    """Adam on cross-entropy, its step rising and falling once, each image moved, turned and stretched a little.

    Shapes of the weights: kernels [out, in, 3, 3], dense [in, out], biases [out].
    """
    random = np.random.default_rng(SEED)
    weights = _initial(random)
    mean = {name: np.zeros_like(value) for name, value in weights.items()}
    square = {name: np.zeros_like(value) for name, value in weights.items()}
    steps, step = epochs * -(-len(digits.labels) // BATCH_ROWS), 0
    for epoch in range(epochs):
        for rows in _batches(len(digits.labels), random):
            step += 1
            images = warp(digits.images[rows].reshape(-1, 1, 8, 8).astype(np.float32), random)
            kept = (random.random((len(rows), HIDDEN)) < 0.5).astype(np.float32) * 2
            for name, slope in gradients(weights, images, digits.labels[rows], kept).items():
                mean[name] += 0.1 * (slope - mean[name])
                square[name] += 0.001 * (slope * slope - square[name])
                size = _step_size(step / steps) / (1 - 0.9**step)
                weights[name] -= size * mean[name] / (np.sqrt(square[name] / (1 - 0.999**step)) + 1e-8)
        if show:
            print(f"\rtraining: {epoch + 1} of {epochs} passes", end="", file=sys.stderr, flush=True)
    if show:
        print(file=sys.stderr)
    return weights


def _initial(random: np.random.Generator) -> Weights:
    """He et al. 2015: variance 2 over the inputs of one output, which keeps the size of what ReLU passes on."""
    shapes = {"kernel_1": (16, 1, 3, 3), "kernel_2": (32, 16, 3, 3), "dense_1": (512, HIDDEN), "dense_2": (HIDDEN, 10)}
    weights: Weights = {}
    for name, shape in shapes.items():
        inputs = shape[0] if len(shape) == 2 else shape[1] * 9
        weights[name] = (random.standard_normal(shape) * np.sqrt(2 / inputs)).astype(np.float32)
        weights[f"{name}_bias"] = np.zeros(shape[1] if len(shape) == 2 else shape[0], np.float32)
    return weights


def _batches(rows: int, random: np.random.Generator) -> Iterator[npt.NDArray[np.int64]]:
    order = random.permutation(rows)
    for start in range(0, rows, BATCH_ROWS):
        yield order[start : start + BATCH_ROWS]


def _step_size(progress: float) -> float:
    """Up in a straight line over the first tenth, then down along a cosine to zero."""
    if progress < 0.1:
        return PEAK_STEP * progress / 0.1
    return float(PEAK_STEP * 0.5 * (1 + np.cos(np.pi * (progress - 0.1) / 0.9)))


def warp(images: Floats, random: np.random.Generator) -> Floats:
    """Each image turned, slanted, stretched and moved at random, as another hand might have written it.

    Shapes: [n, 1, 8, 8] -> the same. Sampled between pixels in straight lines; paper comes in at the edges.
    """
    rows = len(images)
    turn = np.eye(2) + random.normal(0, 0.12, (rows, 2, 2))
    move = random.normal(0, 0.5, (rows, 2, 1))
    grid = np.stack(np.meshgrid(np.arange(8) - 3.5, np.arange(8) - 3.5, indexing="ij")).reshape(2, 64)
    source = turn @ grid + move + 3.5
    corner = np.floor(source).astype(int)
    part = source - corner
    padded = np.pad(images[:, 0], ((0, 0), (1, 2), (1, 2)))
    warped = np.zeros((rows, 64))
    for down in (0, 1):
        for right in (0, 1):
            weight = np.abs(1 - down - part[:, 0]) * np.abs(1 - right - part[:, 1])
            y, x = np.clip(corner[:, 0] + down + 1, 0, 10), np.clip(corner[:, 1] + right + 1, 0, 10)
            warped += weight * padded[np.arange(rows)[:, None], y, x]
    return warped.reshape(images.shape).astype(np.float32)


def gradients(weights: Weights, images: Floats, labels: npt.NDArray[np.uint8], kept: Floats) -> Weights:
    """Slope of the mean cross-entropy over one batch, for each weight.

    Shapes: images [n, 1, 8, 8], labels [n], kept [n, HIDDEN]: what each hidden value is multiplied by. Training drops
    half of them at random, so that no single one is relied upon; ones drop none.
    """
    rows = len(images)
    patches_1 = _patches(images / FULL_INK)
    before_1 = _convolved(patches_1, weights, "kernel_1")
    patches_2 = _patches(np.maximum(before_1, 0))
    before_2 = _convolved(patches_2, weights, "kernel_2")
    tiles = np.maximum(before_2, 0).reshape(rows, 32, 4, 2, 4, 2)
    pooled = tiles.max(axis=(3, 5))
    flat = pooled.reshape(rows, 512)
    before_3 = flat @ weights["dense_1"] + weights["dense_1_bias"]
    hidden = np.maximum(before_3, 0) * kept
    scores = hidden @ weights["dense_2"] + weights["dense_2_bias"]

    chance = np.exp(scores - scores.max(axis=1, keepdims=True))
    chance /= chance.sum(axis=1, keepdims=True)
    chance[np.arange(rows), labels] -= 1
    back_scores = chance / rows

    found: Weights = {"dense_2": hidden.T @ back_scores, "dense_2_bias": back_scores.sum(axis=0)}
    back_hidden = (back_scores @ weights["dense_2"].T) * kept * (before_3 > 0)
    found |= {"dense_1": flat.T @ back_hidden, "dense_1_bias": back_hidden.sum(axis=0)}
    back_pooled = (back_hidden @ weights["dense_1"].T).reshape(rows, 32, 4, 1, 4, 1)
    is_peak = tiles == pooled[:, :, :, None, :, None]
    back_2 = (back_pooled * is_peak).reshape(before_2.shape) * (before_2 > 0)
    found |= _kernel_slopes(back_2, patches_2, weights, "kernel_2")
    back_1 = _unpatched(np.einsum("noyx,ok->nkyx", back_2, weights["kernel_2"].reshape(32, -1), optimize=True))
    found |= _kernel_slopes(back_1 * (before_1 > 0), patches_1, weights, "kernel_1")
    return found


def _patches(images: Floats) -> Floats:
    """The 3x3 surroundings of each pixel, paper outside. Shapes: [n, c, 8, 8] -> [n, c * 9, 8, 8]."""
    padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)))
    shifted = [padded[:, :, y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
    return np.stack(shifted, axis=2).reshape(len(images), -1, 8, 8)


def _unpatched(patches: Floats) -> Floats:
    """The transpose of `_patches`: each pixel gets the sum of what its copies got."""
    rows, width = len(patches), patches.shape[1] // 9
    spread = patches.reshape(rows, width, 9, 8, 8)
    padded = np.zeros((rows, width, 10, 10), np.float32)
    for place in range(9):
        y, x = divmod(place, 3)
        padded[:, :, y : y + 8, x : x + 8] += spread[:, :, place]
    return padded[:, :, 1:9, 1:9]


def _convolved(patches: Floats, weights: Weights, name: str) -> Floats:
    kernel = weights[name].reshape(len(weights[name]), -1)
    spread: Floats = np.einsum("nkyx,ok->noyx", patches, kernel, optimize=True)
    return spread + weights[f"{name}_bias"][:, None, None]


def _kernel_slopes(back: Floats, patches: Floats, weights: Weights, name: str) -> Weights:
    slope = np.einsum("noyx,nkyx->ok", back, patches, optimize=True).reshape(weights[name].shape)
    return {name: slope, f"{name}_bias": back.sum(axis=(0, 2, 3))}


# ---- ONNX -----------------------------------------------------------------------------------------------------------


def onnx_bytes(weights: Weights) -> bytes:
    """The trained network as an ONNX file.

    Input `image` FP32 [rows, 64], ink 0 to 16; outputs `scores` FP32 [rows, 10], which add up to 1, and `digit` INT64
    [rows].
    """
    nodes = [
        helper.make_node("Div", ["image", "full_ink"], ["ink"]),
        helper.make_node("Reshape", ["ink", "picture_shape"], ["picture"]),
        helper.make_node("Conv", ["picture", "kernel_1", "kernel_1_bias"], ["edges"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["edges"], ["edges_on"]),
        helper.make_node("Conv", ["edges_on", "kernel_2", "kernel_2_bias"], ["shapes"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["shapes"], ["shapes_on"]),
        helper.make_node("MaxPool", ["shapes_on"], ["pooled"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("Gemm", ["flat", "dense_1", "dense_1_bias"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["hidden_on"]),
        helper.make_node("Gemm", ["hidden_on", "dense_2", "dense_2_bias"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["scores"], axis=1),
        helper.make_node("ArgMax", ["scores"], ["digit"], axis=1, keepdims=0),
    ]
    constants = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    constants.append(numpy_helper.from_array(np.float32(FULL_INK).reshape(()), "full_ink"))
    constants.append(numpy_helper.from_array(np.array([-1, 1, 8, 8], np.int64), "picture_shape"))
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["rows", 64])],
        [
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["rows", 10]),
            helper.make_tensor_value_info("digit", TensorProto.INT64, ["rows"]),
        ],
        constants,
    )
    # Opset 17 and IR 8 are read by every ONNX Runtime and OpenVINO that we allow.
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="edge-runtime demo"
    )
    onnx.checker.check_model(model, full_check=True)
    content: bytes = model.SerializeToString(deterministic=True)
    return content


if __name__ == "__main__":
    sys.exit(main())
