"""Models written in Python: `model.py`, run in a child process of its own.

Owns: whether such models are allowed, and what happens when the child dies. The child's contract is in python_child.py.
In a process of its own a model cannot hold the daemon's GIL, and a crash of its libraries is one failed run.
"""

from __future__ import annotations

import logging
import platform
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edge_runtime.backends.base import LoadOptions, Probe
from edge_runtime.backends.plain_files import artifact_size
from edge_runtime.backends.python_frames import BrokenMessage
from edge_runtime.backends.python_process import ModelProcess
from edge_runtime.clock import Clock, SystemClock
from edge_runtime.errors import BackendUnavailable, LoadFailed, RunFailed
from edge_runtime.model_spec import ModelSpec
from edge_runtime.tensors import Array, Tensors

log = logging.getLogger(__name__)

_LOAD_TIMEOUT_S = 60.0
"""Enough to import a large framework from an SD card; `load_timeout_s` in the model's options changes it."""

_RUN_TIMEOUT_S = 60.0
"""Longer than any deadline a client waits for; `run_timeout_s` changes it. A child that hangs is then replaced."""

_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 0.5, 30.0
"""After one crash the child is replaced at once; when that one fails too, waits double between these."""


class PythonBackend:
    """Runs `model.py`, if `allow` (`python_models` in the configuration) says so: it is code, not data."""

    name = "python"
    artifacts = ("model.py",)

    def __init__(self, *, allow: bool, clock: Clock | None = None) -> None:
        self._allow = allow
        self._clock: Clock = clock or SystemClock()

    def probe(self) -> Probe:
        """See Backend.probe. Always there; allowed or not is the configuration's."""
        return Probe(self.name, is_available=True, version=platform.python_version(), devices=("CPU",))

    def load(self, artifact: Path, options: LoadOptions) -> PythonInstance:
        """See Backend.load. Waits until the child has loaded the model."""
        if not self._allow:
            raise LoadFailed(
                f"{artifact} is Python code, which is off by default; set python_models = true in the configuration "
                "to allow it for every model on this device"
            )
        if options.device.upper() not in ("", "CPU"):
            raise BackendUnavailable(f"a Python model chooses its device itself; got device {options.device!r}")
        artifact_size(artifact)
        instance = PythonInstance(artifact.parent.resolve(), options, self._clock)
        instance.start()
        return instance


class PythonInstance:
    """A `model.py` in its child process. One run at a time; a dead child is replaced when the next run comes."""

    backend = "python"
    device = "CPU"
    concurrency = 1

    def __init__(self, folder: Path, options: LoadOptions, clock: Clock) -> None:
        self.precision = options.precision or "f32"
        self.memory_bytes = 0
        self._folder = folder
        self._threads = options.threads
        self._load_timeout_s = _seconds(options, "load_timeout_s", _LOAD_TIMEOUT_S)
        self._run_timeout_s = _seconds(options, "run_timeout_s", _RUN_TIMEOUT_S)
        self._clock = clock
        self._lock = threading.Lock()
        self._process: ModelProcess | None = None
        self._spec: ModelSpec | None = None
        self._failures = 0
        self._retry_at_monotonic_s = 0.0
        self._is_closed = False

    @property
    def spec(self) -> ModelSpec:
        """See Instance.spec: as INPUTS and OUTPUTS declare."""
        assert self._spec is not None, "started by load"
        return self._spec

    def start(self) -> None:
        """Start the child. Raises LoadFailed, leaving nothing behind."""
        process = ModelProcess(self._folder, self._threads)
        try:
            spec = process.begin(self._load_timeout_s)
            if self._spec is not None and spec != self._spec:
                raise LoadFailed(f"{self._folder / 'model.py'} was changed: it declares other tensors than before")
        except LoadFailed:
            process.end()
            raise
        self._spec, self._process = spec, process
        self.memory_bytes = process.memory_bytes

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """See Instance.run. Raises RunFailed for an exception in `infer`, a child that died, and while it is down."""
        tensors = [(spec.name, spec.datatype, np.asarray(inputs[spec.name])) for spec in self.spec.inputs]
        with self._lock:
            process = self._living_process()
            try:
                header, results = process.exchange(tensors, self._run_timeout_s)
            except TimeoutError as error:
                reason = f"no answer within {self._run_timeout_s:g} s"
                self._bury(process, reason)
                raise RunFailed(f"the model gave {reason}; it is restarted") from error
            except BrokenMessage as error:
                self._bury(process)
                raise RunFailed("the model's process ended during this run; it is restarted, see the log") from error
            if "error" in header:
                raise RunFailed(f"the model failed: {header['error']}")
            self._failures = 0
        names = [spec.name for spec in self.spec.outputs] if outputs is None else outputs
        try:
            return [results[name] for name in names]
        except KeyError as error:
            raise RunFailed(f"the model gave no output {error}") from error

    def bind(self, max_rows: int) -> None:
        """None: buffers cannot be shared with the child."""

    def close(self) -> None:
        """See Instance.close. Ends the child and all it started."""
        with self._lock:
            self._is_closed = True
            process, self._process = self._process, None
        if process is not None:
            process.end()

    def _living_process(self) -> ModelProcess:
        """The child, restarted where it is gone. Raises RunFailed while closed or backing off."""
        if self._is_closed:
            raise RunFailed("the instance is closed")
        if self._process is not None and not self._process.is_alive:
            self._bury(self._process)
        if self._process is None:
            wait_s = self._retry_at_monotonic_s - self._clock.monotonic_s()
            if wait_s > 0:
                raise RunFailed(f"the model's process keeps ending; it is started again in {wait_s:.1f} s")
            try:
                self.start()
            except LoadFailed as error:
                self._back_off()
                raise RunFailed(f"the model's process ended and cannot be restarted: {error.message}") from error
        assert self._process is not None
        return self._process

    def _bury(self, process: ModelProcess, reason: str = "") -> None:
        """End what is left of it. reason: why it was ended; empty where it did so itself, or something else did."""
        process.end()
        log.warning("a model's process ended", extra={"path": str(self._folder), "reason": reason or process.ending})
        self._process = None
        self._back_off()

    def _back_off(self) -> None:
        self._failures += 1
        wait_s = 0.0 if self._failures == 1 else min(_FIRST_BACKOFF_S * 2 ** (self._failures - 2), _LAST_BACKOFF_S)
        self._retry_at_monotonic_s = self._clock.monotonic_s() + wait_s


def _seconds(options: LoadOptions, key: str, default: float) -> float:
    """An option in seconds. Raises LoadFailed unless it is a positive number."""
    text = options.extra.get(key, str(default))
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise LoadFailed(f"{key} is {text!r}; wanted a positive number of seconds")
    return value
