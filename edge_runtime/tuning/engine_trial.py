"""An engine loaded and run on inputs in a child process, and what it said. Loads nothing in this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from edge_runtime.serving.trial_process import Ended, run_child
from edge_runtime.tensors import Array
from edge_runtime.tuning import engine_child
from edge_runtime.tuning.arrays_file import read_arrays
from edge_runtime.tuning.engine_child import Finding, Request

LIMIT_S = 600.0
"""A TensorRT engine takes minutes to build; thousands of runs of a large model on a small board as long."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A finding, and the outputs of each input, empty where it has a fault."""

    finding: Finding
    outputs: list[dict[str, Array]]


def run_engine(request: Request, limit_s: float = LIMIT_S) -> Ran:
    """Load and run; a child that crashes, or is not done in time, is a finding with a fault."""
    ended = run_child(engine_child.__name__, msgspec.json.encode(request), limit_s=limit_s)
    finding = _finding(ended, limit_s)
    if finding.fault or not request.outputs:
        return Ran(finding, [])
    try:
        return Ran(finding, read_arrays(Path(request.outputs)))
    except (OSError, ValueError) as error:
        return Ran(Finding(fault=f"its outputs were lost: {error}"), [])


def why_ended(ended: Ended, limit_s: float) -> str:
    """Why a child gave no answer, in words."""
    if ended.is_late:
        return f"was not done within {limit_s:g} s"
    if ended.signal == "SIGKILL":
        return "the process that tried it was killed; most likely there was not enough memory"
    if ended.signal:
        return f"ended the process that tried it ({ended.signal})"
    return f"the process that tried it ended without a word: {ended.said or 'nothing was printed'}"


def _finding(ended: Ended, limit_s: float) -> Finding:
    try:
        return msgspec.json.decode(ended.answer, type=Finding)
    except msgspec.DecodeError:
        return Finding(fault=why_ended(ended, limit_s))
