"""Models of texts in Python, whose numbers can be computed by hand: vectors, and scores of pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edge_runtime.tensors import Array

_EMBEDDING = """
import numpy as np

INPUTS = [{{"name": "text", "datatype": "BYTES", "shape": {shape}}}]
OUTPUTS = [{{"name": "vector", "datatype": "FP32", "shape": [-1, 4]}}]


def infer(inputs):
    texts = [bytes(each).decode() for each in inputs["text"].reshape(-1)]
    if "break" in texts:
        raise ValueError("broken")
    if "nan" in texts:
        return {{"vector": np.full((len(texts), 4), np.nan, np.float32)}}
    return {{"vector": np.array([[len(t), t.count("a"), t.count("e"), 1] for t in texts], np.float32)}}
"""

_WAITING = """
import os
import time

def wait(inputs):
    while b"held" in inputs["text"].reshape(-1).tolist() and not os.path.exists({gate!r}):
        time.sleep(0.002)
"""

_RANKING = """
import numpy as np

INPUTS = [{"name": "pair", "datatype": "BYTES", "shape": [-1, 2]}]
OUTPUTS = [{"name": "score", "datatype": "FP32", "shape": [-1, 1]}]


def infer(inputs):
    words = [[set(bytes(each).decode().split()) for each in pair] for pair in inputs["pair"]]
    return {"score": np.array([[len(a & b) / max(len(a | b), 1)] for a, b in words], np.float32)}
"""

_COPY = """
INPUTS = [{"name": "x", "datatype": "BYTES", "shape": [-1]}]
OUTPUTS = [{"name": "y", "datatype": "BYTES", "shape": [-1]}]


def infer(inputs):
    return {"y": inputs["x"]}
"""

EMBEDDING_TOML = '[output.vector]\nanswer = "embedding"\n'


def embedding(folder: Path, shape: tuple[int, ...] = (-1,)) -> Path:
    """text -> vector: its length, how many a and e it has, and 1. The text "break" raises, "nan" gives none."""
    return _write(folder, _EMBEDDING.format(shape=list(shape)))


def held_embedding(folder: Path, gate: Path) -> Path:
    """`embedding`, one text at a time, where the text "held" waits for a file."""
    source = _EMBEDDING.format(shape=[1, 1]).replace("def infer(inputs):", "def infer(inputs):\n    wait(inputs)")
    return _write(folder, _WAITING.format(gate=str(gate)) + source)


def slow_embedding(folder: Path) -> Path:
    """`embedding`, one text at a time, in 10 ms."""
    source = _EMBEDDING.format(shape=[1, 1]).replace("def infer(inputs):", "def infer(inputs):\n    time.sleep(0.01)")
    return _write(folder, f"import time\n{source}")


def vector(text: str, dimensions: int = 4) -> Array:
    """The embedding of a text: its vector with the length 1."""
    found = np.array([len(text), text.count("a"), text.count("e"), 1], np.float32)[:dimensions]
    return found / np.linalg.norm(found)


def pair_embedding(folder: Path) -> Path:
    """`embedding` of pairs of texts."""
    return _write(folder, _EMBEDDING.format(shape=[-1, 2]))


def ranking(folder: Path) -> Path:
    """pair -> score: the share of words that both have."""
    return _write(folder, _RANKING)


def copy(folder: Path) -> Path:
    """x BYTES [rows] -> y the same, whatever its bytes are."""
    return _write(folder, _COPY)


def _write(folder: Path, source: str) -> Path:
    path = folder / "model.py"
    path.write_text(source)
    return path
