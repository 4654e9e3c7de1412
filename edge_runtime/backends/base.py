"""The seam between serving and the libraries that run models.

Owns: the protocols Backend and Instance and the values they exchange. A backend's library is imported only inside its
own file, only when its factory is called (registry.py). Nothing here imports a backend.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from edge_runtime.model_spec import ModelSpec
from edge_runtime.tensors import Array, Tensors


@dataclass(frozen=True, slots=True)
class Probe:
    """What one backend found on this host: usable or why not, the library's version, devices and providers."""

    name: str
    is_available: bool
    version: str = ""
    devices: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How one instance is to be loaded; the profile's backend options after the model's own were laid over them.

    threads: cores that one `run` may use (intra-op). concurrency: runs that go on at once; OpenVINO makes so
    many streams of `threads` each, ONNX Runtime allows any number anyway. precision: "f32", "bf16", "f16", "int8"
    (which the artifact must hold: it is read back, never made) or "" for the backend's default. device: "CPU", "GPU",
    "NPU", "AUTO", "CUDA", "TENSORRT" …; "" is the backend's default. extra: options in the backend's own words, passed
    through. max_rows: most rows of one run, where the owner says it; what is compiled for a range of rows goes by it.
    """

    threads: int = 1
    precision: str = ""
    device: str = ""
    spin: bool = False
    extra: Mapping[str, str] = field(default_factory=dict)
    concurrency: int = 1
    max_rows: int | None = None


class Bound(Protocol):
    """Pre-allocated buffers of one instance with its runs pre-built for each number of rows.

    inputs and outputs: one array a tensor, in the model's order, each [max_rows, *inner], C-contiguous. They live as
    long as this object; freeing them earlier crashes the library. Thread: one caller at a time.
    """

    inputs: Sequence[Array]
    outputs: Sequence[Array]
    max_rows: int

    def run(self, rows: int) -> None:
        """Run on the first `rows` rows of the input buffers, into the same rows of the output buffers.

        1 <= rows <= max_rows. Raises RunFailed.
        """
        ...


class Instance(Protocol):
    """One loaded copy of a version on a device.

    Thread: `run` may be called from `concurrency` threads at once; the caller keeps to it. `close` is idempotent and
    is called only when no run is on; a run after close raises RunFailed.
    """

    @property
    def spec(self) -> ModelSpec:
        """Inputs and outputs as the library reports them."""
        ...

    @property
    def backend(self) -> str:
        """Name of the backend that made it."""
        ...

    @property
    def device(self) -> str:
        """Where it really runs, read back after load, for example "CPU" or "CUDA:0"."""
        ...

    @property
    def precision(self) -> str:
        """Precision it really runs in, read back after load: "f32", "bf16", "f16", "int8", "mixed"."""
        ...

    @property
    def concurrency(self) -> int:
        """How many threads may call `run` at once; 1 or more."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Memory that loading added, measured where the host tells, else estimated from the artifact."""
        ...

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """Run once on whole arrays.

        inputs: name -> array, dtype and shape as in `spec`, checked by the caller. outputs: names wanted, in that
        order; None for all in the model's order. The arrays returned are the caller's. Raises RunFailed.
        """
        ...

    def bind(self, max_rows: int) -> Bound | None:
        """Pre-build runs for 1..max_rows rows on fixed buffers; None where shapes or datatypes do not allow it."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


class Backend(Protocol):
    """A library that runs artifacts."""

    @property
    def name(self) -> str:
        """Its name in profiles and configuration, for example "onnxruntime"."""
        ...

    @property
    def artifacts(self) -> tuple[str, ...]:
        """File names in a version folder that it can load, best first, for example ("model.onnx",)."""
        ...

    def probe(self) -> Probe:
        """Find the library, its version and devices. Raises nothing: what is missing is the probe's reason."""
        ...

    def load(self, artifact: Path, options: LoadOptions) -> Instance:
        """Load one artifact. Raises LoadFailed (bad artifact), BackendUnavailable (device or provider missing)."""
        ...


@runtime_checkable
class Compiler(Protocol):
    """A backend that has models compiled for this device, which takes minutes and is not done by `load`."""

    def prepare(self, artifact: Path, options: LoadOptions, stop: threading.Event) -> None:
        """Have what `load` needs compiled, and wait for it, or until `stop` is set.

        Raises as `load`: it cannot be.
        """
        ...
