"""The kit of a door's contract: how to open the door, how to ask through it, and the models that are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_runtime.messages import InferResult

Ask = Callable[..., InferResult]
"""ask(model, inputs, version=, outputs=, timeout_ms=, priority=) through the door: arrays by name go in and come back.
Raises the EdgeRuntimeError that the door answered (`edge_runtime.errors.error_from_wire` makes it of its code)."""

DATATYPES = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP32", "FP64", "BYTES",
)  # fmt: skip
"""Those that JSON has, which leaves out FP16 and BF16."""

_MLP = """
import numpy as np

def load(folder):
    random = np.random.default_rng(0)
    return random.normal(size=(16, 4)).astype(np.float32)

def infer(model, inputs):
    return {"y": inputs["x"] @ model}
"""
_PAIR = "def infer(inputs):\n    return {'sum': inputs['a'] * 2, 'twice': inputs['b'] * 2}\n"
_IDENTITY = "def infer(inputs):\n    return {'y': inputs['x']}\n"

Tensors = list[tuple[str, str, list[int]]]


@dataclass(frozen=True)
class DoorKit:
    """One door. plugins: the distributions that bring it. table: its tables of config.toml, as TOML.

    asking: takes the result of `stats` of the daemon, which has what the door's `status` says, and gives an `Ask`.
    """

    plugins: tuple[str, ...]
    table: str
    asking: Callable[[Mapping[str, Any]], AbstractContextManager[Ask]]


def write_models(folder: Path) -> None:
    """Write the models that the contract asks for, as `model.py`."""
    wide: tuple[Tensors, Tensors] = ([("x", "FP32", [-1, 16])], [("y", "FP32", [-1, 4])])
    for name in ("mlp", "gone"):
        _write(folder / name / "1", *wide, _MLP)
    for version in ("1", "2"):
        _write(folder / "two" / version, *wide, _MLP)
    (folder / "two" / "model.toml").write_text("[versions]\nall = true\n")
    pair: tuple[Tensors, Tensors] = (
        [("a", "FP32", [-1, 3]), ("b", "INT64", [-1, 2])],
        [("sum", "FP32", [-1, 3]), ("twice", "INT64", [-1, 2])],
    )
    _write(folder / "pair" / "1", *pair, _PAIR)
    for datatype in DATATYPES:
        _write(folder / datatype.lower() / "1", [("x", datatype, [-1, 2])], [("y", datatype, [-1, 2])], _IDENTITY)
    _write(folder / "broken" / "1", *wide, "raise RuntimeError('this model is broken')\n")


@contextmanager
def asked_door(kit: DoorKit, folder: Path) -> Iterator[tuple[Ask, Ask]]:
    """Serve the models through the door of a kit, and yield how to ask through it and over ZeroMQ."""
    from edge_runtime.config.loading import load_config
    from edge_runtime.daemon.assemble import assemble_daemon
    from edge_runtime.doors.zmq.client import Client

    write_models(folder / "models")
    file = folder / "config.toml"
    file.write_text(
        f'models = "{folder}/models"\nstate = "{folder}/state"\npython_models = true\ncalibrate = false\n'
        f"plugins = {list(kit.plugins)}\nstart_limit_s = 300\n"
        f'zmq.endpoints = ["ipc://{folder}/infer.sock"]\n{kit.table}\n'
    )
    daemon = assemble_daemon(load_config(file, {}))
    try:
        daemon.start()
        with Client(daemon.endpoints[1]) as client:
            client.unload("gone")
            with kit.asking(client.stats()) as ask:
                yield ask, client.infer
    finally:
        daemon.stop()


def _write(folder: Path, inputs: Tensors, outputs: Tensors, body: str) -> None:
    folder.mkdir(parents=True)
    lists = [
        [{"name": name, "datatype": datatype, "shape": shape} for name, datatype, shape in tensors]
        for tensors in (inputs, outputs)
    ]
    (folder / "model.py").write_text(f"INPUTS = {lists[0]}\nOUTPUTS = {lists[1]}\n{body}")
