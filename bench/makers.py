"""Models by script: the shapes of real networks with seeded random weights, made once and cached.

Speed depends on shapes, not on what was learnt, so nothing needs to be downloaded. A cached file is keyed by the hash
of this source, so a change here makes the models anew.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
IR_VERSION = 8
"""What ONNX Runtime 1.23 (the last for Python 3.10) and every later one reads."""
SMALL_RUN_S = 0.005
"""What one run of `small5ms` is to take on one core of this machine."""
SMALL_WIDTH, SMALL_SIDE = 64, 14
CALIBRATION_ROWS = 8
"""Enough to give every layer a range: weights are random, and only speed is looked at."""

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model to serve: its file, its one FP32 input `x` and the elements of one output row."""

    name: str
    path: Path
    row_shape: tuple[int, ...]
    output_elements: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one input row."""
        return int(np.prod(self.row_shape)) * 4


class Graph:
    """A chain of nodes being written; each method adds one and returns the name of what it gives."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []

    def dense(self, source: str, inputs: int, outputs: int) -> str:
        """[n, inputs] -> [n, outputs]."""
        weights = self._weights((inputs, outputs), fan_in=inputs)
        return self._node("Gemm", [source, weights, self._constant(np.zeros(outputs, np.float32))])

    def conv(self, source: str, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> str:
        """A convolution with bias, padded to keep the size (batch normalisation folded in, as a deployed model has)."""
        fan_in = inputs // groups * kernel * kernel
        weights = self._weights((outputs, inputs // groups, kernel, kernel), fan_in)
        bias = self._constant(np.zeros(outputs, np.float32))
        return self._node(
            "Conv",
            [source, weights, bias],
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[kernel // 2] * 4,
            group=groups,
        )

    def relu(self, source: str) -> str:
        """max(0, x)."""
        return self._node("Relu", [source])

    def celu(self, source: str) -> str:
        """x where it is positive, else e to the power of x less one."""
        return self._node("Celu", [source])

    def relu6(self, source: str) -> str:
        """x clipped to 0..6."""
        return self._node("Clip", [source, self._constant(np.float32(0)), self._constant(np.float32(6))])

    def add(self, left: str, right: str) -> str:
        """The sum that ends a residual block."""
        return self._node("Add", [left, right])

    def max_pool(self, source: str) -> str:
        """3x3 with stride 2."""
        return self._node("MaxPool", [source], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])

    def mean_over_area(self, source: str) -> str:
        """[n, c, h, w] -> [n, c]."""
        return self._node("Flatten", [self._node("GlobalAveragePool", [source])], axis=1)

    def reshape(self, source: str, *shape: int) -> str:
        """To `shape`; -1 is the batch."""
        return self._node("Reshape", [source, self._constant(np.array(shape, np.int64))])

    def squashed(self, source: str, scale: float, offset: float = 0.0) -> str:
        """scale * sigmoid(source / 8 + offset)."""
        spread = self._node("Mul", [source, self._constant(np.float32(1 / 8))])
        moved = self._node("Add", [spread, self._constant(np.float32(offset))])
        return self._node("Mul", [self._node("Sigmoid", [moved]), self._constant(np.float32(scale))])

    def joined(self, sources: list[str], axis: int) -> str:
        """Side by side along an axis."""
        return self._node("Concat", sources, axis=axis)

    def save(self, path: Path, row_shape: tuple[int, ...], output: str, *output_shape: int) -> None:
        """Write the model: input `x` [-1, *row_shape] FP32, output `y` [-1, *output_shape] FP32."""
        self._nodes.append(helper.make_node("Identity", [output], ["y"]))
        graph = helper.make_graph(
            self._nodes,
            "bench",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", *row_shape])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", *output_shape])],
            self._initializers,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
        onnx.checker.check_model(model)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(model.SerializeToString())
        part.replace(path)

    def _weights(self, shape: tuple[int, ...], fan_in: int) -> str:
        # He's scale keeps activations near 1 through any depth: vanishing ones become denormals, which are slow.
        scale = np.float32(np.sqrt(2.0 / fan_in))
        return self._constant(self._random.standard_normal(shape, np.float32) * scale)

    def _constant(self, value: NDArray[np.generic] | np.generic) -> str:
        name = f"w{len(self._initializers)}"
        self._initializers.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def _node(self, operator: str, inputs: list[str], **attributes: object) -> str:
        name = f"t{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name


def mlp() -> BenchModel:
    """16 -> 32 -> 4: a run costs less than one message, so it measures the server alone."""

    def write(path: Path) -> None:
        graph = Graph(seed=1)
        hidden = graph.relu(graph.dense("x", 16, 32))
        graph.save(path, (16,), graph.dense(hidden, 32, 4), 4)

    return _made("mlp", write, (16,), 4)


def hosted_mlp() -> BenchModel:
    """16 -> 32 -> 4, as costless as `mlp`, by an operator that runs in hosts alone."""

    def write(path: Path) -> None:
        graph = Graph(seed=1)
        graph.save(path, (16,), graph.dense(graph.celu(graph.dense("x", 16, 32)), 32, 4), 4)

    return _made("hosted_mlp", write, (16,), 4)


def small5ms() -> BenchModel:
    """32 floats in, about 5 ms of convolutions on one core, 4 floats out: compute-bound, so batching gains little.

    The depth is measured once on this machine, so that a run takes about 5 ms on a Raspberry Pi too.
    """
    depth_file = cache_folder() / "small5ms.depth"
    if not depth_file.exists():
        depth_file.write_text(str(_small_depth()))
    depth = int(depth_file.read_text())

    def write(path: Path) -> None:
        _write_small(path, depth)

    return _made(f"small5ms-{depth}", write, (32,), 4, served_name="small5ms")


def mobilenetv2() -> BenchModel:
    """MobileNetV2 at width 1.0 (Sandler et al. 2018, table 2): 224x224, 3.5 M weights, 600 KB a request."""

    def write(path: Path) -> None:
        graph = Graph(seed=3)
        trunk, channels = graph.relu6(graph.conv("x", 3, 32, 3, stride=2)), 32
        stages = [
            (1, 16, 1, 1),
            (6, 24, 2, 2),
            (6, 32, 3, 2),
            (6, 64, 4, 2),
            (6, 96, 3, 1),
            (6, 160, 3, 2),
            (6, 320, 1, 1),
        ]
        for expansion, width, repeats, stride in stages:
            for repeat in range(repeats):
                step = stride if repeat == 0 else 1
                trunk = _inverted_residual(graph, trunk, channels, width, expansion, step)
                channels = width
        head = graph.mean_over_area(graph.relu6(graph.conv(trunk, channels, 1280, 1)))
        graph.save(path, (3, 224, 224), graph.dense(head, 1280, 1000), 1000)

    return _made("mobilenetv2", write, (3, 224, 224), 1000)


def int8_mobilenetv2() -> BenchModel:
    """The same in int8: ONNX with quantisers, which OpenVINO reads too, made by this project's converter."""
    from edge_runtime_converters.int8_from_onnx import quantise

    def write(path: Path) -> None:
        random = np.random.default_rng(7)
        rows = ({"x": random.standard_normal((1, 3, 224, 224), np.float32)} for _ in range(CALIBRATION_ROWS))
        quantise(mobilenetv2().path, path, rows)

    return _made("mobilenetv2-int8", write, (3, 224, 224), 1000)


def resnet18() -> BenchModel:
    """ResNet-18 (He et al. 2015, table 1): 224x224, 11.7 M weights, 600 KB a request."""

    def write(path: Path) -> None:
        graph = Graph(seed=4)
        trunk, channels = graph.max_pool(graph.relu(graph.conv("x", 3, 64, 7, stride=2))), 64
        for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            for step in (stride, 1):
                shortcut = trunk
                if step != 1 or channels != width:
                    shortcut = graph.conv(trunk, channels, width, 1, stride=step)
                inner = graph.relu(graph.conv(trunk, channels, width, 3, stride=step))
                trunk = graph.relu(graph.add(graph.conv(inner, width, width, 3), shortcut))
                channels = width
        graph.save(path, (3, 224, 224), graph.dense(graph.mean_over_area(trunk), 512, 1000), 1000)

    return _made("resnet18", write, (3, 224, 224), 1000)


def yolo_like() -> BenchModel:
    """A detector of 3 M weights in YOLOv8's form: 640x640, boxes and 80 classes at 8400 places, few of them sure."""

    def write(path: Path) -> None:
        graph = Graph(seed=5)
        trunk, channels, places = "x", 3, []
        for level, width in enumerate((16, 32, 64, 128, 256)):
            trunk, channels = graph.relu(graph.conv(trunk, channels, width, 3, stride=2)), width
            for _ in range(2):
                trunk = graph.relu(graph.add(graph.relu6(graph.conv(trunk, width, width, 3)), trunk))
            if level < 2:
                continue
            corners = graph.squashed(graph.conv(trunk, width, 4, 1), scale=640.0)
            sure = graph.squashed(graph.conv(trunk, width, 80, 1), scale=1.0, offset=-6.0)
            side = 640 >> (level + 1)
            places.append(graph.reshape(graph.joined([corners, sure], 1), -1, 84, side * side))
        graph.save(path, (3, 640, 640), graph.joined(places, 2), 84, 8400)

    return _made("yolo_like", write, (3, 640, 640), 84 * 8400)


def cache_folder() -> Path:
    """Where made models and the built generator lie; its name holds the hash of this source."""
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path(tempfile.gettempdir()) / f"edge-runtime-bench-{os.getuid()}")
    folder = base / f"edge-runtime-bench-{source}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


# ---- private --------------------------------------------------------------------------------------------------------


def _made(
    file: str, write: Callable[[Path], None], row_shape: tuple[int, ...], outputs: int, served_name: str = ""
) -> BenchModel:
    path = cache_folder() / f"{file}.onnx"
    if not path.exists():
        write(path)
    return BenchModel(served_name or file, path, row_shape, outputs)


def _inverted_residual(graph: Graph, source: str, inputs: int, outputs: int, expansion: int, stride: int) -> str:
    wide, hidden = source, inputs * expansion
    if expansion != 1:
        wide = graph.relu6(graph.conv(source, inputs, hidden, 1))
    deep = graph.relu6(graph.conv(wide, hidden, hidden, 3, stride=stride, groups=hidden))
    narrow = graph.conv(deep, hidden, outputs, 1)
    return graph.add(source, narrow) if stride == 1 and inputs == outputs else narrow


def _write_small(path: Path, depth: int) -> None:
    graph = Graph(seed=2)
    cells = SMALL_WIDTH * SMALL_SIDE * SMALL_SIDE
    trunk = graph.reshape(graph.dense("x", 32, cells), -1, SMALL_WIDTH, SMALL_SIDE, SMALL_SIDE)
    for _ in range(depth):
        trunk = graph.relu(graph.conv(trunk, SMALL_WIDTH, SMALL_WIDTH, 3))
    graph.save(path, (32,), graph.dense(graph.mean_over_area(trunk), SMALL_WIDTH, 4), 4)


def _small_depth() -> int:
    """Convolutions that take SMALL_RUN_S on one core, by the quickest run of a model of 16 (others share the cores)."""
    import onnxruntime

    trial_depth = 16
    trial = cache_folder() / f"small5ms-trial-{os.getpid()}.onnx"
    _write_small(trial, trial_depth)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(trial), options, providers=["CPUExecutionProvider"])
    row: Floats = np.ones((1, 32), np.float32)
    times = []
    for _ in range(60):
        start = time.perf_counter()
        session.run(None, {"x": row})
        times.append(time.perf_counter() - start)
    trial.unlink()
    # The quickest: while others had the cores, the quarter's time once gave 7 for 28, and runs of 1.3 ms.
    return max(1, round(trial_depth * SMALL_RUN_S / min(times)))
