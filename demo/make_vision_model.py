"""Writes a vision model as big as those that devices run: MobileNetV2's shape, random weights, 224x224 RGB, 14 MB.

    python -m demo.make_vision_model [FILE]     (default: demo/models/mobilenetv2/1/model.onnx)

Its answers mean nothing; what it costs to run is the real thing. The weights come from a fixed seed, so every machine
writes the same network.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

MODEL_FILE = Path(__file__).parent / "models" / "mobilenetv2" / "1" / "model.onnx"
SEED = 11
PICTURE_SHAPE = (3, 224, 224)
CLASSES = 1000
BLOCKS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion, channels out, repeats, first stride: table 2 of Sandler et al., "MobileNetV2", CVPR 2018."""


def main(arguments: list[str] | None = None) -> int:
    """Run from the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo.make_vision_model", description=(__doc__ or "").split(":")[0])
    parser.add_argument("file", nargs="?", type=Path, default=MODEL_FILE, help="default: %(default)s")
    file: Path = parser.parse_args(arguments).file
    file.parent.mkdir(parents=True, exist_ok=True)
    # A reader, the running daemon included, sees the whole file or none: names ending in .part are ignored.
    part = file.with_name(file.name + ".part")
    part.write_bytes(mobilenetv2_bytes())
    part.replace(file)
    print(f"{file}: MobileNetV2, {file.stat().st_size / 1e6:.1f} MB")
    return 0


def mobilenetv2_bytes(seed: int = SEED) -> bytes:
    """MobileNetV2 1.0 as an ONNX file.

    Input `image` FP32 [rows, 3, 224, 224]; output `scores` FP32 [rows, 1000], which add up to 1. Batch normalisation
    is folded into the convolutions, as exporters do before deployment.
    """
    network = _Network(np.random.default_rng(seed))
    channels, found = 32, network.convolution("image", 3, 32, 3, stride=2)
    for expansion, width, repeats, first_stride in BLOCKS:
        for repeat in range(repeats):
            stride = first_stride if repeat == 0 else 1
            found, channels = network.block(found, channels, width, expansion, stride), width
    found = network.convolution(found, channels, 1280, 1)
    network.classifier(found, 1280)
    graph = helper.make_graph(
        network.nodes,
        "mobilenetv2",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["rows", *PICTURE_SHAPE])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["rows", CLASSES])],
        network.constants,
    )
    # Opset 17 and IR 8 are read by every ONNX Runtime and OpenVINO that we allow.
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="edge-runtime demo"
    )
    onnx.checker.check_model(model, full_check=True)
    content: bytes = model.SerializeToString(deterministic=True)
    return content


class _Network:
    """Nodes and weights while they are put together; each method returns the name of what it computes."""

    def __init__(self, random: np.random.Generator) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = [
            numpy_helper.from_array(np.float32(0).reshape(()), "zero"),
            numpy_helper.from_array(np.float32(6).reshape(()), "six"),
        ]
        self._random = random

    def block(self, source: str, channels: int, width: int, expansion: int, stride: int) -> str:
        """Widen, filter each channel by itself, narrow; add the source where the shapes are equal."""
        inner = channels * expansion
        found = source if expansion == 1 else self.convolution(source, channels, inner, 1)
        found = self.convolution(found, inner, inner, 3, stride=stride, groups=inner)
        found = self.convolution(found, inner, width, 1, is_bounded=False)
        return self._node("Add", [source, found]) if stride == 1 and channels == width else found

    def convolution(
        self, source: str, channels: int, width: int, side: int, *, stride: int = 1, groups: int = 1,
        is_bounded: bool = True,
    ) -> str:  # fmt: skip
        """A convolution with bias and, where `is_bounded`, ReLU6. He et al. 2015 keeps the size of values."""
        inputs = channels // groups
        kernel = self._weight((width, inputs, side, side), np.sqrt(2 / (inputs * side * side)))
        found = self._node(
            "Conv",
            [source, kernel, self._weight((width,), 0.01)],
            group=groups, kernel_shape=[side, side], pads=[side // 2] * 4, strides=[stride, stride],
        )  # fmt: skip
        return self._node("Clip", [found, "zero", "six"]) if is_bounded else found

    def classifier(self, source: str, channels: int) -> None:
        """The mean of each channel, one dense layer, and chances as `scores`."""
        mean = self._node("Flatten", [self._node("GlobalAveragePool", [source])])
        dense = self._weight((channels, CLASSES), np.sqrt(1 / channels))
        logits = self._node("Gemm", [mean, dense, self._weight((CLASSES,), 0.01)])
        self.nodes.append(helper.make_node("Softmax", [logits], ["scores"], axis=1))

    def _weight(self, shape: tuple[int, ...], deviation: float) -> str:
        name = f"weight_{len(self.constants)}"
        values: npt.NDArray[np.float32] = self._random.standard_normal(shape, np.float32) * np.float32(deviation)
        self.constants.append(numpy_helper.from_array(values, name))
        return name

    def _node(self, kind: str, sources: list[str], **attributes: object) -> str:
        name = f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, sources, [name], **attributes))
        return name


if __name__ == "__main__":
    sys.exit(main())
