"""A model that answers, until a request comes that it never comes back from."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper

from tests.models.onnx_models import endless

FOR_EVER = 1e15


def hanging(folder: Path) -> Path:
    """x FP32 [rows, 2] -> y FP32 [rows, 2] = x + x for each time that the largest x says: FOR_EVER is 30 years."""
    path = endless(folder)
    model = onnx.load(path)
    del model.graph.initializer[:]
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["largest"], keepdims=0),
        helper.make_node("Cast", ["largest"], ["most"], to=TensorProto.INT64),
        *model.graph.node,
    ]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, path)
    return path
