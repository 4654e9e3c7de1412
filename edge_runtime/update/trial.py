"""A release tried in a child process before the daemon loads it, and whose fault it is when that does not go well.

Owns: the judgement of how a child ended. Loads nothing in this process: a native abort, an endless load or a hunger for
memory ends the child, and what serves never notices. Called by the update loop's thread, which waits here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec

from edge_runtime.serving.loading import Candidate
from edge_runtime.serving.trial_process import Ended, run_child
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.update import trial_child
from edge_runtime.update.releases import StagedRelease
from edge_runtime.update.trial_child import Attempt, Finding, Request


class Outcome(Enum):
    """PASSED: it may be loaded. FAILED: by its own fault, on this device. HINDERED: nothing was found out.

    UNCLEAR: the child ended without a word, most likely killed for want of memory; whose fault it is shows in time.
    """

    PASSED = "passed"
    FAILED = "failed"
    UNCLEAR = "unclear"
    HINDERED = "hindered"


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """memory_bytes: what the model may take beyond its library. limit_s: for load, warm-up and golden runs in all."""

    memory_bytes: int
    limit_s: float


@dataclass(frozen=True, slots=True)
class TrialReport:
    """How a trial went. reason: in words, "" when it passed. finding: what was measured, where the child said so.

    finding.run_s: a usual golden run, in seconds, at a low priority beside what serves.
    """

    outcome: Outcome
    reason: str = ""
    finding: Finding | None = None


def try_release(
    staged: StagedRelease,
    candidates: Sequence[Candidate],
    limits: TrialLimits,
    *,
    stop: threading.Event | None = None,
    free_bytes: Callable[[], int | None] | None = None,
    child: str = trial_child.__name__,
    engines: Path | None = None,
) -> TrialReport:
    """Load the first candidate that can be loaded and run the golden input on it, in a child process.

    candidates: of `VersionLoader`, in its order. stop: set when the daemon stops; ends the trial. free_bytes: how much
    memory is free now. child: the module that is run. engines: the folder of those that were built for it. Raises
    UpdateError: the golden file was changed. Never longer than the limit, and leaves no process.
    """
    free = (free_bytes or HostProbe().memory_available_bytes)()
    needed = min(staged.manifest.peak_memory_bytes, limits.memory_bytes)
    if free is not None and free < needed:
        return TrialReport(Outcome.HINDERED, f"it needs {needed} bytes of memory to be tried; {free} are free")
    staged.golden_tensors()
    request = Request(
        attempts=tuple(_attempt(each) for each in candidates),
        settings=staged.folder.settings,
        inputs=staged.manifest.inputs,
        outputs=staged.manifest.outputs,
        golden=staged.manifest.golden,
        golden_file=str(staged.golden),
        memory_bytes=limits.memory_bytes,
        engines=str(engines or ""),
    )
    try:
        ended = run_child(child, msgspec.json.encode(request), limit_s=limits.limit_s, stop=stop)
    except OSError as error:
        return TrialReport(Outcome.HINDERED, f"no process can be made to try it in: {error.strerror}")
    return judge(ended, limits)


def judge(ended: Ended, limits: TrialLimits) -> TrialReport:
    """What the end of a child says of the release. Pure."""
    finding = _finding(ended)
    if ended.is_stopped:
        return TrialReport(Outcome.HINDERED, "the daemon stopped while it was tried")
    if ended.is_late:
        return TrialReport(Outcome.FAILED, f"was not loaded and run within {limits.limit_s:g} s")
    if ended.signal and ended.signal != "SIGKILL":
        return TrialReport(Outcome.FAILED, _with_words(f"ended the process that tried it ({ended.signal})", ended.said))
    if finding is None:
        # Killed, not by us: the kernel does that when the device runs out of memory, below the limit that the release
        # has. Or an end without a signal or a word: an installation that changes meanwhile does that, no model.
        return TrialReport(
            Outcome.UNCLEAR, _with_words("the process that tried it ended without a finding", _why(ended))
        )
    if finding.fault:
        return TrialReport(Outcome.FAILED, finding.fault, finding)
    return TrialReport(Outcome.PASSED, finding=finding)


def _finding(ended: Ended) -> Finding | None:
    try:
        return msgspec.json.decode(ended.answer, type=Finding)
    except msgspec.DecodeError:
        return None


def _why(ended: Ended) -> str:
    return "it was killed; is the device out of memory?" if ended.signal else ended.said


def _attempt(candidate: Candidate) -> Attempt:
    options = candidate.options
    return Attempt(
        backend=candidate.backend,
        artifact=str(candidate.artifact.absolute()),
        threads=options.threads,
        precision=options.precision,
        device=options.device,
        spin=options.spin,
        extra=dict(options.extra),
        concurrency=options.concurrency,
        max_rows=options.max_rows,
    )


def _with_words(sentence: str, said: str) -> str:
    return f"{sentence}: {said}" if said else sentence
