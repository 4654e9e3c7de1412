"""Models that a GPU is measured with, besides MobileNetV2: the shapes of real networks with seeded random weights."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from bench.makers import BenchModel, Graph, cache_folder

TOKENS, WIDTH, HEADS, LAYERS = 128, 256, 4, 4
"""A small transformer encoder: BERT-mini's (Turc et al. 2019) width, heads and layers, on 128 tokens."""


def resnet50() -> BenchModel:
    """ResNet-50 (He et al. 2015, table 1), stride in the 3x3: 224x224, 25.5 M weights, 600 KB a request."""

    def write(path: Path) -> None:
        graph = Graph(seed=5)
        trunk, channels = graph.max_pool(graph.relu(graph.conv("x", 3, 64, 7, stride=2))), 64
        for width, repeats, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for repeat in range(repeats):
                step = stride if repeat == 0 else 1
                trunk = _bottleneck(graph, trunk, channels, width, step)
                channels = width * 4
        graph.save(path, (3, 224, 224), graph.dense(graph.mean_over_area(trunk), 2048, 1000), 1000)

    return _made("resnet50", write, (3, 224, 224), 1000)


def transformer() -> BenchModel:
    """Embeddings in, one vector out: attention and feed-forward blocks with layer normalisation, 128 KB a request."""

    def write(path: Path) -> None:
        graph = Graph(seed=6)
        trunk = "x"
        for _ in range(LAYERS):
            trunk = _normalised(graph, graph.add(trunk, _attention(graph, trunk)))
            inner = graph.relu(_projected(graph, trunk, WIDTH, 4 * WIDTH))
            trunk = _normalised(graph, graph.add(trunk, _projected(graph, inner, 4 * WIDTH, WIDTH)))
        pooled = graph._node("ReduceMean", [trunk], axes=[1], keepdims=0)
        graph.save(path, (TOKENS, WIDTH), graph.dense(pooled, WIDTH, 128), 128)

    return _made("transformer", write, (TOKENS, WIDTH), 128)


def _made(name: str, write: object, row_shape: tuple[int, ...], outputs: int) -> BenchModel:
    path = cache_folder() / f"{name}.onnx"
    if not path.exists():
        write(path)  # type: ignore[operator]
    return BenchModel(name, path, row_shape, outputs)


def _bottleneck(graph: Graph, source: str, inputs: int, width: int, stride: int) -> str:
    shortcut = (
        source if stride == 1 and inputs == 4 * width else graph.conv(source, inputs, 4 * width, 1, stride=stride)
    )
    inner = graph.relu(graph.conv(source, inputs, width, 1))
    inner = graph.relu(graph.conv(inner, width, width, 3, stride=stride))
    return graph.relu(graph.add(graph.conv(inner, width, 4 * width, 1), shortcut))


def _projected(graph: Graph, source: str, inputs: int, outputs: int) -> str:
    """[n, tokens, inputs] -> [n, tokens, outputs]."""
    return graph._node("MatMul", [source, graph._weights((inputs, outputs), fan_in=inputs)])


def _attention(graph: Graph, source: str) -> str:
    size = WIDTH // HEADS

    def heads(order: tuple[int, ...]) -> str:
        split = graph.reshape(_projected(graph, source, WIDTH, WIDTH), -1, TOKENS, HEADS, size)
        return graph._node("Transpose", [split], perm=list(order))

    scores = graph._node("MatMul", [heads((0, 2, 1, 3)), heads((0, 2, 3, 1))])
    scaled = graph._node("Mul", [scores, graph._constant(np.float32(1 / math.sqrt(size)))])
    mixed = graph._node("MatMul", [graph._node("Softmax", [scaled], axis=-1), heads((0, 2, 1, 3))])
    joined = graph.reshape(graph._node("Transpose", [mixed], perm=[0, 2, 1, 3]), -1, TOKENS, WIDTH)
    return _projected(graph, joined, WIDTH, WIDTH)


def _normalised(graph: Graph, source: str) -> str:
    scale, bias = np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
    return graph._node("LayerNormalization", [source, graph._constant(scale), graph._constant(bias)], axis=-1)
