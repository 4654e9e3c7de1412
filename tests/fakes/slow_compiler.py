"""A backend named like TensorRT whose engines are there when a test says so; what it runs is a real ONNX session.

Stands in for the one thing that this suite cannot have without a GPU: an engine that runs. That engines are really
built is tests/tensorrt's to show.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from edge_runtime.backends.base import Backend, Instance, LoadOptions, Probe
from edge_runtime.backends.declaration import Declaration
from edge_runtime.backends.registry import backend, installed
from edge_runtime.backends.tensorrt import BACKEND
from edge_runtime.errors import LoadFailed, NotBuiltYet
from edge_runtime.hosts.instance import HostedBackend
from edge_runtime.tensors import Array, Tensors


class SlowInstance:
    """A session that says it is an engine; `off` is added to what it answers, as a wrong engine would."""

    backend = "tensorrt"
    device = "GPU:0"
    concurrency = 1

    def __init__(self, real: Instance, compiler: SlowCompiler) -> None:
        self._real = real
        self._compiler = compiler
        self._off = compiler.off
        self.spec = replace(real.spec, max_rows=32)
        self.precision, self.memory_bytes = real.precision, real.memory_bytes

    def run(self, inputs: Tensors, outputs: list[str] | None = None) -> list[Array]:
        rows = next(iter(inputs.values())).shape[0]
        self._compiler.most_rows = max(self._compiler.most_rows, rows)
        return [array + self._off if self._off else array for array in self._real.run(inputs, outputs)]

    def bind(self, max_rows: int) -> None:
        return None

    def close(self) -> None:
        self._real.close()


class SlowCompiler:
    """built: artifacts whose engine is there. failed: why others have none. waits: who was told to prepare."""

    declaration = replace(BACKEND, artifacts=("model.onnx",))

    def __init__(self) -> None:
        self.built: set[str] = set()
        self.failed: dict[str, str] = {}
        self.off = 0.0
        self.loads = 0
        self.most_rows = 0
        self.waits: list[str] = []

    def probe(self) -> Probe:
        return Probe(self.declaration.name, is_available=True)

    def load(self, artifact: Path, options: LoadOptions) -> SlowInstance:
        path = str(artifact.absolute())
        if path in self.failed:
            raise LoadFailed(self.failed[path])
        if path not in self.built:
            raise NotBuiltYet("its engine is being built (0%)")
        self.loads += 1
        return SlowInstance(backend("onnxruntime").load(artifact, LoadOptions()), self)

    def prepare(self, artifact: Path, options: LoadOptions, stop: threading.Event) -> None:
        self.waits.append(str(artifact.absolute()))
        self.built.add(str(artifact.absolute()))

    def in_place_of(self, name: str, **settings: object) -> Backend:
        """What `registry.backend` is called with."""
        if name == self.declaration.name:
            return self  # type: ignore[return-value]
        return backend(name, allows_code=bool(settings.get("allows_code")))

    def in_place_of_installed(self, name: str) -> Declaration:
        """What `registry.installed` is called with."""
        return self.declaration if name == self.declaration.name else installed(name)

    def in_place_of_hosts(self, inside: Backend, *arguments: Any, **settings: Any) -> Backend:
        """What `HostedBackend` is called with: a host cannot have this object, so its instances live here."""
        return inside if inside is self else HostedBackend(inside, *arguments, **settings)
