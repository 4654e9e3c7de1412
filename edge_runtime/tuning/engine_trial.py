"""An engine loaded and run on inputs in a child process, and what it said. Loads nothing in this process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edge_runtime.config.settings import ModelSettings
from edge_runtime.serving.trial_process import Ended, run_child
from edge_runtime.tensors import Array
from edge_runtime.tuning import engine_child
from edge_runtime.tuning.arrays_file import read_arrays
from edge_runtime.tuning.candidates import Engine
from edge_runtime.tuning.engine_child import Finding, Request
from edge_runtime.tuning.wish import Device

LIMIT_S = 600.0
"""A TensorRT engine takes minutes to build; thousands of runs of a large model on a small board as long."""

LEAST_S = 60.0
"""What an engine gets though the time is over: without one there is no answer, and a Pi needs so long to load some."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A finding, and the outputs of each input, empty where it has a fault."""

    finding: Finding
    outputs: list[dict[str, Array]]


@dataclass(frozen=True, slots=True)
class EngineTrial:
    """Tries engines on a device. A child that crashes, or is not done in time, is a finding with a fault.

    until_s: when the tune's time is over, a monotonic instant.
    """

    device: Device
    settings: ModelSettings
    until_s: float

    def look(self, engine: Engine, graph: Path) -> Finding:
        """Load an engine and run it once."""
        return self._found(self._request(engine, graph))

    def run(self, engine: Engine, graph: Path, inputs: Path, outputs: Path) -> Ran:
        """Load it and run a file of samples. outputs: a file for the time being."""
        request = self._request(engine, graph)
        request = msgspec.structs.replace(request, inputs=str(inputs.absolute()), outputs=str(outputs.absolute()))
        finding = self._found(request)
        if finding.fault:
            return Ran(finding, [])
        try:
            return Ran(finding, read_arrays(outputs))
        except (OSError, ValueError) as error:
            return Ran(Finding(fault=f"its outputs were lost: {error}"), [])
        finally:
            outputs.unlink(missing_ok=True)

    def _found(self, request: Request) -> Finding:
        limit_s = min(max(self.until_s - time.monotonic(), LEAST_S), LIMIT_S)
        ended = run_child(engine_child.__name__, msgspec.json.encode(request), limit_s=limit_s)
        try:
            return msgspec.json.decode(ended.answer, type=Finding)
        except msgspec.DecodeError:
            return Finding(fault=why_ended(ended, limit_s))

    def _request(self, engine: Engine, graph: Path) -> Request:
        profile = self.device.profile
        choice = next((each for each in profile.backends if each.name == engine.backend), None)
        extra = {} if choice is None else dict(choice.extra)
        return Request(
            backend=engine.backend,
            artifact=str(graph.absolute()),
            device=engine.device,
            precision=engine.precision,
            threads=profile.limits.cores,
            settings=msgspec.structs.replace(self.settings, options={**extra, **self.settings.options}),
        )


def why_ended(ended: Ended, limit_s: float) -> str:
    """Why a child gave no answer, in words."""
    if ended.is_late:
        return f"was not done within {limit_s:.0f} s"
    if ended.signal == "SIGKILL":
        return "the process that tried it was killed; most likely there was not enough memory"
    if ended.signal:
        return f"ended the process that tried it ({ended.signal})"
    return f"the process that tried it ended without a word: {ended.said or 'nothing was printed'}"
