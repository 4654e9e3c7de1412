"""What was measured of engines and candidates, as it is kept and shown. Values only.

A result with a `reason` is one that failed: a candidate that crashes or runs out of memory is a row, never the end.
"""

from __future__ import annotations

from msgspec import Struct

from edge_runtime.tuning.candidates import Candidate, Engine


class Accuracy(Struct, frozen=True):
    """How an engine's answers compare with the reference's on the same inputs.

    max_error, mean_error: of float outputs, relative to the largest value of the output. agreement: share of inputs
    with the same highest score, None without scores. correct: share of inputs whose label it finds, reference_correct:
    the same of the reference; None without labels. inputs: how many were compared.
    """

    inputs: int
    max_error: float
    mean_error: float
    agreement: float | None = None
    correct: float | None = None
    reference_correct: float | None = None

    @property
    def drop(self) -> float:
        """What is given up, 0 to 1: of labels found, else of agreement, else the mean error. Never below 0."""
        if self.correct is not None and self.reference_correct is not None:
            return max(self.reference_correct - self.correct, 0.0)
        if self.agreement is not None:
            return 1.0 - self.agreement
        return min(self.mean_error, 1.0)


class EngineResult(Struct, frozen=True):
    """One engine loaded and compared. runs_in: the precision read back. artifact: the file's name."""

    engine: Engine
    reason: str = ""
    runs_in: str = ""
    artifact: str = ""
    accuracy: Accuracy | None = None


class Quick(Struct, frozen=True):
    """A short look at a candidate: alone_s, the median of one request at a time; rate, of many at a time."""

    candidate: Candidate
    reason: str = ""
    alone_s: float = 0.0
    rate: float = 0.0
    p99_s: float = 0.0
    memory_bytes: int = 0
    mode: str = ""


class Probe(Struct, frozen=True):
    """Requests that came at a rate, at random, and the latencies of the answers. is_met: within the objective."""

    rate: float
    p50_s: float
    p99_s: float
    is_met: bool


class Full(Struct, frozen=True):
    """The highest rate of a candidate at which it keeps the objective; 0 where it never does. probes: all, in order.

    is_cut: the time was over before the search was, so that the rate may be higher.
    """

    candidate: Candidate
    reason: str = ""
    rate: float = 0.0
    p50_s: float = 0.0
    p99_s: float = 0.0
    memory_bytes: int = 0
    probes: tuple[Probe, ...] = ()
    is_cut: bool = False


class Results(Struct, frozen=True):
    """Everything known so far, by what it is about."""

    engines: dict[Engine, EngineResult]
    quick: dict[Candidate, Quick]
    full: dict[Candidate, Full]
