"""The same small models as `model.py`, and some that misbehave. Every function gives the path of `model.py` back."""

from __future__ import annotations

from pathlib import Path


def mlp(folder: Path, rows: int | str = "rows") -> Path:
    """As onnx_models.mlp."""
    size = rows if isinstance(rows, int) else -1
    body = """
import numpy as np

def load(folder):
    random = np.random.default_rng(0)
    return random.normal(size=(16, 32)).astype(np.float32), random.normal(size=(32, 4)).astype(np.float32)

def infer(model, inputs):
    first, second = model
    return {"y": np.maximum(inputs["x"] @ first, 0) @ second}
"""
    return write(folder, [("x", "FP32", [size, 16])], [("y", "FP32", [size, 4])], body)


def two_in_two_out(folder: Path) -> Path:
    """As onnx_models.two_in_two_out."""
    body = "def infer(inputs):\n    return {'twice': inputs['b'] * 2, 'sum': inputs['a'] * 2}\n"
    inputs = [("a", "FP32", [-1, 3]), ("b", "INT64", [-1, 2])]
    return write(folder, inputs, [("sum", "FP32", [-1, 3]), ("twice", "INT64", [-1, 2])], body)


def identity(folder: Path, datatype: str) -> Path:
    """As onnx_models.identity."""
    body = "def infer(inputs):\n    return {'y': inputs['x']}\n"
    return write(folder, [("x", datatype, [-1, 2])], [("y", datatype, [-1, 2])], body)


def running_sum(folder: Path) -> Path:
    """As onnx_models.running_sum."""
    body = "def infer(inputs):\n    return {'y': inputs['x'].cumsum(axis=0)}\n"
    return write(folder, [("x", "FP32", [-1, 4])], [("y", "FP32", [-1, 4])], body)


def product(folder: Path) -> Path:
    """As onnx_models.product."""
    body = "def infer(inputs):\n    return {'y': inputs['a'] @ inputs['b']}\n"
    return write(folder, [("a", "FP32", [-1, -1]), ("b", "FP32", [-1, -1])], [("y", "FP32", [-1, -1])], body)


def where_nonzero(folder: Path) -> Path:
    """As onnx_models.where_nonzero."""
    body = "import numpy as np\ndef infer(inputs):\n    return {'places': np.argwhere(inputs['x'])}\n"
    return write(folder, [("x", "FP32", [-1, 2])], [("places", "INT64", [-1, 2])], body)


def wide(folder: Path, size: int = 1024) -> Path:
    """As onnx_models.wide."""
    body = f"""
import numpy as np

def load(folder):
    return np.random.default_rng(0).normal(size=({size}, {size})).astype(np.float32)

def infer(model, inputs):
    return {{"y": inputs["x"] @ model}}
"""
    return write(folder, [("x", "FP32", [-1, size])], [("y", "FP32", [-1, size])], body)


def on_first_value(folder: Path, body: str, preamble: str = "") -> Path:
    """x FP32 [rows, 1] -> y the same; `body` runs first, with `value = int(x[0, 0])`, and may misbehave."""
    source = f"""
import os, signal, subprocess, sys, time
import numpy as np
{preamble}

def infer(inputs):
    value = int(inputs["x"][0, 0])
{chr(10).join("    " + line for line in body.splitlines())}
    return {{"y": inputs["x"]}}
"""
    return write(folder, [("x", "FP32", [-1, 1])], [("y", "FP32", [-1, 1])], source)


def write(
    folder: Path, inputs: list[tuple[str, str, list[int]]], outputs: list[tuple[str, str, list[int]]], body: str
) -> Path:
    """INPUTS and OUTPUTS, then `body`."""
    folder.mkdir(parents=True, exist_ok=True)
    described = [
        [{"name": name, "datatype": datatype, "shape": shape} for name, datatype, shape in tensors]
        for tensors in (inputs, outputs)
    ]
    path = folder / "model.py"
    path.write_text(f"INPUTS = {described[0]}\nOUTPUTS = {described[1]}\n{body}", encoding="utf-8")
    return path
