"""Frozen TensorFlow graphs written by hand, field by field: TensorFlow itself is not installed anywhere here.

Source of the field numbers: graph.proto, node_def.proto, attr_value.proto, tensor.proto, tensor_shape.proto.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

_FLOAT = 1
"""DT_FLOAT. Source: types.proto."""


def weights(features: int) -> npt.NDArray[np.float32]:
    """The weights of `softmax_graph`, [features, 3]."""
    return np.random.default_rng(5).normal(size=(features, 3)).astype(np.float32)


def softmax_graph(path: Path, name: str, features: int) -> Path:
    """An input FP32 [rows, features] -> scores [rows, 3]: softmax(x @ weights)."""
    product = _node("product", "MatMul", (name, "weights"), _type("T"), _flag("transpose_a"), _flag("transpose_b"))
    graph = (
        _node(name, "Placeholder", (), _type("dtype"), _attribute("shape", _message(7, _shape((-1, features)))))
        + _constant("weights", weights(features))
        + product
        + _node("scores", "Softmax", ("product",), _type("T"))
        + _message(4, _number(1, 1087))
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(graph)
    return path


def _constant(name: str, value: npt.NDArray[np.float32]) -> bytes:
    tensor = _number(1, _FLOAT) + _message(2, _shape(value.shape)) + _message(4, value.astype("<f4").tobytes())
    return _node(name, "Const", (), _type("dtype"), _attribute("value", _message(8, tensor)))


def _node(name: str, operator: str, inputs: tuple[str, ...], *attributes: bytes) -> bytes:
    content = _message(1, name.encode()) + _message(2, operator.encode())
    return _message(1, content + b"".join(_message(3, each.encode()) for each in inputs) + b"".join(attributes))


def _type(key: str) -> bytes:
    return _attribute(key, _number(6, _FLOAT))


def _flag(key: str) -> bytes:
    return _attribute(key, _number(5, 0))


def _attribute(key: str, value: bytes) -> bytes:
    return _message(5, _message(1, key.encode()) + _message(2, value))


def _shape(sides: tuple[int, ...]) -> bytes:
    return b"".join(_message(2, _number(1, side)) for side in sides)


def _message(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    found = bytearray()
    while True:
        value, low = value >> 7, value & 127
        found.append(low | (128 if value else 0))
        if not value:
            return bytes(found)
