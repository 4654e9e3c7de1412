"""Small PaddlePaddle models written by hand: `model.pdmodel` (a ProgramDesc) and `model.pdiparams`, no Paddle needed.

Source: framework.proto for the program; for weights, the order of their names, each as Paddle's SerializeToStream has
it. Compared with files of PaddlePaddle 3.3.1 (FLAGS_enable_pir_api=0), which OpenVINO reads alike.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tests.models.onnx_models import mlp_weights

Weights = Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]
Operator = tuple[str, Mapping[str, str], Mapping[str, str]]
"""Its type, then the tensor of each of its inputs and outputs."""

_FP32, _LOD_TENSOR, _FEED, _FETCH = 5, 7, 9, 10
_OPEN = (1 << 64) - 1  # -1 as a varint


def mlp(folder: Path) -> Path:
    """x FP32 [rows, 16] -> y FP32 [rows, 4], with the weights of onnx_models.mlp."""
    first, second = mlp_weights()
    operators: list[Operator] = [
        ("matmul_v2", {"X": "x", "Y": "first"}, {"Out": "a"}),
        ("relu", {"X": "a"}, {"Out": "b"}),
        ("matmul_v2", {"X": "b", "Y": "second"}, {"Out": "y"}),
    ]
    shapes = {"x": (_OPEN, 16), "a": (_OPEN, 32), "b": (_OPEN, 32), "y": (_OPEN, 4)}
    return _write(folder, operators, shapes, {"first": first, "second": second})


def _write(folder: Path, operators: Sequence[Operator], shapes: Mapping[str, Sequence[int]], weights: Weights) -> Path:
    """Write a program of one block, which is fed its first shape's tensor, and gives its last one's."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(shapes)
    variables = [_variable("feed", _number(1, _FEED), kept=True), _variable("fetch", _number(1, _FETCH), kept=True)]
    variables += [_variable(name, _tensor(shape)) for name, shape in shapes.items()]
    variables += [_variable(name, _tensor(array.shape), kept=True) for name, array in weights.items()]
    whole = [
        ("feed", {"X": "feed"}, {"Out": names[0]}),
        *operators,
        ("fetch", {"X": names[-1]}, {"Out": "fetch"}),
    ]
    block = _number(1, 0) + _number(2, _OPEN) + b"".join(_message(3, each) for each in variables)
    block += b"".join(_message(4, _operator(*each)) for each in whole)
    path = folder / "model.pdmodel"
    path.write_bytes(_message(1, block) + _message(4, _number(1, 0)))
    (folder / "model.pdiparams").write_bytes(b"".join(_saved(weights[name]) for name in sorted(weights)))
    return path


def _saved(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> bytes:
    described = _number(1, _FP32) + b"".join(_number(2, length) for length in array.shape)
    return struct.pack("<IQIi", 0, 0, 0, len(described)) + described + array.tobytes()


def _operator(kind: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> bytes:
    written = b"".join(_message(1, _text(1, name) + _text(2, tensor)) for name, tensor in inputs.items())
    written += b"".join(_message(2, _text(1, name) + _text(2, tensor)) for name, tensor in outputs.items())
    written += _text(3, kind)
    if kind == "matmul_v2":
        for name in ("trans_x", "trans_y"):
            written += _message(4, _text(1, name) + _number(2, 6) + _number(10, 0))
    if kind in ("feed", "fetch"):
        written += _message(4, _text(1, "col") + _number(2, 0) + _number(3, 0))
    return written


def _variable(name: str, kind: bytes, *, kept: bool = False) -> bytes:
    return _text(1, name) + _message(2, kind) + _number(3, int(kept))


def _tensor(shape: Sequence[int]) -> bytes:
    described = _number(1, _FP32) + b"".join(_number(2, length) for length in shape)
    return _number(1, _LOD_TENSOR) + _message(3, _message(1, described))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
