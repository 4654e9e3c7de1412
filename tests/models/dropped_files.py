"""What people drop into a models folder at once: every kind of file, real ones where they can be made here.

Owns: the list of what is dropped, with what serves each, and what is said of the rest; `drop_in`, which does it to a
running daemon beside a model that is in use; and `check`, which holds what is promised.
"""

from __future__ import annotations

import importlib.util
import shutil
import struct
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import EdgeRuntimeError
from tests.models.catboost_models import cbm_head
from tests.models.mutated_files import MISSING, REAL, write_real

SERVED_WITH: Mapping[str, tuple[str, ...]] = {
    "onnx": ("onnxruntime", "openvino"),
    "xml": ("openvino",),
    "tflite": ("ai_edge_litert", "openvino"),
    "saved_model": ("openvino",),
    "pdmodel": ("openvino",),
    "pt": ("torch",),
    "pt2": ("torch",),
    "xgboost": ("xgboost",),
    "ubj": ("xgboost",),
    "cbm": ("catboost",),
    "cbm_words": ("catboost",),
    "lightgbm": ("lightgbm",),
    "skops": ("skops",),
    "keras": ("keras",),
    "h5": ("keras",),
}
"""Kinds of `mutated_files.REAL` that are served, as they are or converted, where one of these modules is installed."""

SAYS: Mapping[str, str] = {
    "ort": "is an ONNX Runtime model (.ort)",
    "keras": "is a Keras model",
    "h5": "is a Keras model",
    "pickle": "is a pickle",
    "pickled_pt": "pickle",
    "mar": "is a TorchServe archive (.mar)",
}
"""What is said of the kinds that nothing serves here."""

STAND_INS: Mapping[str, tuple[str, bytes, str]] = {
    "pt": ("pt.pt", b"PK\x03\x04" + bytes(40), "is a damaged zip archive"),
    "pt2": ("pt2.pt2", b"PK\x03\x04" + bytes(40), "is a damaged zip archive"),
    "xgboost": ("xgboost.json", b'{"learner":{"attributes":{}},"version":[3,2,0]}', "is an XGBoost model"),
    "ubj": ("ubj.ubj", b"{L\0\0\0\0\0\0\0\x07learner{", "is an XGBoost model"),
    "cbm": ("cbm.cbm", b"CBM1\x10\0\0\0", "is a CatBoost model"),
    "cbm_words": ("cbm_words.cbm", cbm_head(categories=1), "is a CatBoost model with categories or text"),
    "lightgbm": ("lightgbm.txt", b"tree\nversion=v4\nnum_class=1\n", "is a LightGBM model"),
    "skops": ("skops.skops", b"PK\x05\x06" + bytes(18), "is a zip archive that is not a model known here"),
}
"""Files in place of real ones that only their own libraries can write: name, bytes, and what is said of them."""

OTHERS: Mapping[str, tuple[bytes, str]] = {
    "forest.joblib": (b"\x78\x9c\x03\x00", "is a pickle"),
    "weights.safetensors": (struct.pack("<Q", 16) + b'{"w":{}}        ', "is weights without a program (safetensors)"),
    "pointer.onnx": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "is a Git LFS pointer"),
    "page.onnx": (b"<!DOCTYPE html>\n<html><body>Sign in</body></html>\n", "is a web page, not a model"),
    "nothing.tflite": (b"", "is empty"),
    "cut.pt2": (b"PK\x03\x04\x14\x00\x08\x08", "is a damaged zip archive"),
    "engine.plan": (b"ftrt" + bytes(60), "is a TensorRT engine"),
    "my model.onnx": (b"\x08\x08", "'my model' is not a model name"),
    "language.gguf": (b"GGUF\x03\0\0\0", "is a language model of llama.cpp (GGUF)"),
    "graph.pb": (b"\n\x10", "is a TensorFlow graph without a signature"),
    "pir.json": (b'{"base_code":{"magic":"pir","version":1}}', "is a PaddlePaddle 3 program (.json)"),
    "train/weights/best.onnx": (b"\x08\x08", "is where Ultralytics left it"),
}
"""Files that are dropped as they stand here: what is said of each."""

SILENT: Mapping[str, bytes] = {
    "README.md": b"what these are",
    "labels.txt": b"tree\nhouse\n",
    "index_to_name.json": b'{"0": ["n01440764", "tench"]}',
    "config.json": b'{"learner": "adam"}',
}
"""Files of which nothing is said."""

STEADY = "steady"
"""The model that is in use while everything else comes: `onnx_models.mlp`."""

BEGUN, ENDED = "converting a model", ("a model is converted", "not converted")
"""What the log says of conversions."""

FINAL = frozenset(("ready", "failed", "not_served"))

ASK_EVERY_S = 0.01
"""As a device that is in use: without end they took a core and a half, of which the conversions want one."""

LIMIT_S = 1_800.0
"""A hang's: twenty times what a slow machine takes, with the imports of torch."""


def is_served(kind: str) -> bool:
    """Return whether a library is here that serves this kind, or converts it."""
    return any(importlib.util.find_spec(module) is not None for module in SERVED_WITH.get(kind, ()))


NEEDS_TORCH = frozenset(("pt", "pt2", "keras", "h5"))
"""Kinds whose library alone takes seconds to import: the promised time is without them."""


def write_dropped(folder: Path, kinds: Collection[str] = tuple(REAL)) -> dict[str, str]:
    """Write everything into a folder, each under its short form. kinds: of `REAL`.

    Returns by the model's name what is to be said of it; "" where it is to be served.
    """
    told: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        if kind in MISSING:
            name, content, told[kind] = STAND_INS[kind]
            (folder / name).write_bytes(content)
            continue
        told[kind] = "" if is_served(kind) else SAYS[kind]
        made = folder / kind
        write_real(kind, made)
        files = [each for each in made.iterdir() if each.stem == "model"]
        for each in files:
            each.rename(folder / f"{kind}{each.suffix}")
        if files:
            shutil.rmtree(made)
    for name, (content, said) in OTHERS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        told[name.partition("/")[0].rpartition(".")[0] or name.partition("/")[0]] = said
    for name, content in SILENT.items():
        (folder / name).write_bytes(content)
    return told


@dataclass(slots=True)
class Dropped:
    """What became of everything. took_s: until the last was decided. entries: of `models`, by name.

    asked, failed: requests to the model in use meanwhile; longest_s: the slowest.
    """

    took_s: float = 0.0
    entries: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    asked: int = 0
    failed: list[str] = field(default_factory=list)
    longest_s: float = 0.0


def drop_in(endpoint: str, models: Path, files: Path, wanted: Mapping[str, str]) -> Dropped:
    """Move all files into a models folder at once, and wait until each is decided, while `STEADY` is asked.

    files: a folder on the same disk. wanted: as `write_dropped` returns.
    """
    dropped = Dropped()
    is_over = threading.Event()
    asking = threading.Thread(target=_keep_asking, args=(endpoint, dropped, is_over), name="asking")
    with Client(endpoint) as client:
        asking.start()
        try:
            began_s = time.monotonic()
            for each in sorted(files.iterdir()):
                each.rename(models / each.name)
            while time.monotonic() - began_s < LIMIT_S:
                entries = {str(each["name"]): each for each in client.models()}
                states = [
                    str(each["state"])
                    for name, each in entries.items()
                    if name in wanted and not each["reason"].startswith("was found just now")
                ]
                if len(states) == len(wanted) and FINAL.issuperset(states):
                    break
                is_over.wait(0.2)
            dropped.took_s, dropped.entries = time.monotonic() - began_s, entries
        finally:
            is_over.set()
            asking.join()
    return dropped


def check(dropped: Dropped, wanted: Mapping[str, str]) -> None:
    """Hold that what can be served is, that only the rest is named with its reason, and that nobody was disturbed."""
    assert dropped.entries.keys() == {STEADY, *wanted}, "of others nothing is said"
    for name, said in wanted.items():
        entry = dropped.entries[name]
        assert (entry["state"] == "ready") is (said == ""), f"{name}: {entry['state']}: {entry['reason']}"
        assert said in entry["reason"], entry
        assert (entry["version"] is None) is (entry["state"] == "not_served"), entry
    assert dropped.entries[STEADY]["state"] == "ready"
    assert dropped.failed == []
    assert dropped.asked > 10


def most_together(log: Sequence[Mapping[str, Any]]) -> int:
    """Return the most conversions that were under way at once, by the lines of the daemon's log."""
    running: set[str] = set()
    most = 0
    for line in log:
        if line["message"] == BEGUN:  # and again with its progress
            running.add(line["artifact"])
        elif line["message"].startswith(ENDED):
            running.discard(line["artifact"])
        most = max(most, len(running))
    return most


def _keep_asking(endpoint: str, dropped: Dropped, is_over: threading.Event) -> None:
    """Ask the model in use again and again."""
    with Client(endpoint) as client:
        while not is_over.is_set():
            began_s = time.monotonic()
            try:
                client.infer(STEADY, {"x": np.zeros((1, 16), np.float32)}, timeout_ms=60_000)
            except (EdgeRuntimeError, TimeoutError, ConnectionError) as error:
                dropped.failed.append(f"{type(error).__name__}: {error}")
            dropped.asked += 1
            dropped.longest_s = max(dropped.longest_s, time.monotonic() - began_s)
            is_over.wait(ASK_EVERY_S)
