"""Releases as the updater hands them to the loader, each told from the others by what it answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from onnx import numpy_helper

from edge_runtime.config.settings import Config
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.models.folder import ModelFolder
from edge_runtime.models.walk import scan
from tests.contract.running_daemon import put_model
from tests.models import onnx_models

X = np.zeros((1, 2), np.float32)
"""A request of an adder: its answer is the number that the adder adds."""

INLINE, WORKERS = 'mode = "inline"\n', 'mode = "workers"\n'
"""Said, not measured: on a busy machine a tiny model seems too slow to run inline."""


def adder(folder: Path, value: float) -> Path:
    """x FP32 [rows, 2] -> y = x + value."""
    return onnx_models.add_weights(folder, numpy_helper.from_array(np.full((1, 2), value, np.float32), "w"))


def put_adder(models: Path, value: float, *, toml: str = "", version: int = 1, name: str = "m") -> None:
    put_model(models, name, adder, version=version, toml=toml, value=value)


def release(folder: Path, value: float, *, version: int = 1, toml: str = "", name: str = "m") -> ModelFolder:
    """A release of the model `m` in a folder of its own."""
    return release_of(folder, lambda path: adder(path, value), version=version, toml=toml, name=name)


def release_of(
    folder: Path, maker: Callable[[Path], Path], *, version: int = 1, toml: str = "", name: str = "m"
) -> ModelFolder:
    """A release of any model."""
    put_model(folder, name, maker, version=version, toml=toml)
    return scan(folder).models[name]


def runtime(models: Path, tmp_path: Path, **settings) -> Runtime:
    models.mkdir(exist_ok=True)
    return Runtime(models, config=Config(state=str(tmp_path / "state"), watch=False, calibrate=False, **settings))


def answer_of(rt: Runtime, **fields) -> tuple[int, float]:
    """Which version answers, and what it adds."""
    result = rt.infer("m", {"x": X}, **fields)
    return result.version, float(result["y"][0, 0])


def states(rt: Runtime) -> dict[int, str]:
    return {entry["version"]: entry["state"] for entry in rt.models() if entry["name"] == "m"}


class Hammer:
    """Threads that ask without a pause, and what went wrong."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.answers = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()

    @contextmanager
    def asking(self, ask: Callable[[], object], threads: int = 3) -> Iterator[Hammer]:
        """`ask` raises when something is wrong with its answer."""
        started = [threading.Thread(target=self._hammer, args=(ask,)) for _ in range(threads)]
        for thread in started:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in started:
                thread.join()

    def _hammer(self, ask: Callable[[], object]) -> None:
        while not self._stop.is_set():
            try:
                ask()
            except Exception as error:  # noqa: BLE001 (whatever it is, the test is to see it)
                self.errors.append(error)
                return
            with self._lock:
                self.answers += 1
