"""The measurements of ways and candidates, and how a later tune finds them again.

Owns: the results' types, and one small file for each result, named by a digest of all that it depends on: the artifact,
the inputs, the objective, the way or candidate, the device and the backend's version. Files are durable: a result that
was shown survives a power cut. Each carries the hash of its content; a damaged one counts as none. A result with a
`reason` failed: a candidate that crashes or runs out of memory is a row of the report and never ends the tune.
"""

from __future__ import annotations

import hashlib
import logging
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from edge_runtime.durable import make_folder, write_atomically
from edge_runtime.errors import StorageFailed
from edge_runtime.tuning.candidates import Candidate, Way

log = logging.getLogger(__name__)

FORMAT = "5"
"""Part of every file's name: a release that measures differently begins anew."""

T = TypeVar("T", bound=Struct)


class Accuracy(Struct, frozen=True):
    """How a way's answers compare with the plain model's on the same inputs.

    max_error, mean_error: of float outputs, relative to the largest value of the output. agreement: share of inputs
    with the same highest score, None without scores. correct: share of inputs whose label it finds, reference_correct:
    the same of the plain model; None without labels. inputs: how many were compared. distinct: number of different
    answers that the plain model gives to them, None without scores. spread_error: error relative to the spread over the
    inputs, of the worst output; None where none differs. constant_drop: the drop of one and the same answer to all
    inputs, at best. is_accepted: whether the caller accepts a drop that the inputs cannot show.
    """

    inputs: int
    max_error: float
    mean_error: float
    agreement: float | None = None
    correct: float | None = None
    reference_correct: float | None = None
    distinct: int | None = None
    spread_error: float | None = None
    constant_drop: float = 1.0
    is_accepted: bool = False

    @property
    def drop(self) -> float:
        """The accuracy given up, 0 to 1: of labels found, else of agreement, else of values. Never below 0.

        Of values: the mean error, or the share of the variance that is lost (spread_error squared) where that is more.
        """
        if self.correct is not None and self.reference_correct is not None:
            return max(self.reference_correct - self.correct, 0.0)
        if self.agreement is not None:
            return 1.0 - self.agreement
        return min(max(self.mean_error, (self.spread_error or 0.0) ** 2), 1.0)

    def can_tell(self, allowed: float) -> bool:
        """Whether the inputs can show a drop within `allowed`: an answer that ignores its input must not pass.

        Where one and the same answer to all would, the values must show it: no more of their variance may be lost.
        """
        return allowed >= 1 or self.constant_drop > allowed or self.are_values_within(allowed)

    def are_values_within(self, allowed: float) -> bool:
        """Whether a share of the variance within `allowed` is lost, of outputs that differ from input to input."""
        return self.spread_error is not None and self.spread_error**2 <= allowed

    def is_within(self, allowed: float) -> bool:
        """Whether the drop is within `allowed`, and the inputs can show it or the caller accepts that they cannot."""
        return self.drop <= allowed and (self.is_accepted or self.can_tell(allowed))


class WayResult(Struct, frozen=True):
    """One way, loaded and compared. runs_in: the precision read back. artifact: the file's name."""

    way: Way
    reason: str = ""
    runs_in: str = ""
    artifact: str = ""
    accuracy: Accuracy | None = None


class Slice(Struct, frozen=True):
    """One short look at a candidate in a round of the race. rate: answers within the objective, a second.

    others: the share of the machine that other work took meanwhile. takes: how often it was looked at in this round.
    """

    round: int
    rate: float
    p99_s: float = 0.0
    others: float = 0.0
    takes: int = 1


class QuickLook(Struct, frozen=True):
    """A candidate's looks. alone_s: median latency of one request at a time. first_rate: of the first look at many.

    slices: of the race, by round.
    """

    candidate: Candidate
    reason: str = ""
    alone_s: float = 0.0
    first_rate: float = 0.0
    memory_bytes: int = 0
    mode: str = ""
    slices: tuple[Slice, ...] = ()

    @property
    def rate(self) -> float:
        """The median rate of the slices; of the first look where there are none."""
        return statistics.median([each.rate for each in self.slices] or [self.first_rate])

    @property
    def p99_s(self) -> float:
        """The median of the slices' 99th percentiles; 0 where none was measured."""
        return statistics.median([each.p99_s for each in self.slices if each.p99_s] or [0.0])


class RateProbe(Struct, frozen=True):
    """Latencies at one rate of random arrivals. is_met: within the objective."""

    rate: float
    p50_s: float
    p99_s: float
    is_met: bool


class FullMeasurement(Struct, frozen=True):
    """The highest rate at which a candidate keeps the objective; 0 where it never does. probes: all, in order.

    is_cut: the tune's time ended before the search did, so the rate may be higher. takes: how often it was measured;
    the highest rate counts.
    """

    candidate: Candidate
    reason: str = ""
    rate: float = 0.0
    p50_s: float = 0.0
    p99_s: float = 0.0
    memory_bytes: int = 0
    probes: tuple[RateProbe, ...] = ()
    is_cut: bool = False
    takes: int = 1


def with_full(before: FullMeasurement | None, taken: FullMeasurement) -> FullMeasurement:
    """The better of two measurements of a candidate, with the takes of both."""
    if before is None:
        return taken
    better = max(before, taken, key=lambda each: (not each.reason, each.rate))
    return msgspec.structs.replace(better, takes=before.takes + taken.takes)


class TuneResults(Struct, frozen=True):
    """All results so far."""

    ways: dict[Way, WayResult]
    quick: dict[Candidate, QuickLook]
    full: dict[Candidate, FullMeasurement]


class KeptResults:
    """Results on disk. folder None: none are kept. about: what all of them depend on. Thread: one owner."""

    def __init__(self, folder: Path | None, about: tuple[str, ...]) -> None:
        self._folder = folder
        self._about = about

    def read(self, kind: type[T], *subject: str) -> T | None:
        """Return a kept result; None where there is none, or it cannot be read."""
        if self._folder is None:
            return None
        try:
            kept = msgspec.json.decode(self._path(kind, subject).read_bytes(), type=_ResultFile)
            return msgspec.json.decode(kept.result, type=kind) if kept.digest == _sha256(kept.result) else None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    def write(self, result: Struct, *subject: str) -> None:
        """Keep a result. A full or read-only disk is logged and costs only a measurement later."""
        if self._folder is None:
            return
        try:
            make_folder(self._folder)
            content = msgspec.json.encode(result)
            kept = _ResultFile(_sha256(content), msgspec.Raw(content))
            write_atomically(self._path(type(result), subject), msgspec.json.encode(kept))
        except (OSError, StorageFailed) as error:
            log.warning("a result is not kept: %s", error)

    def _path(self, kind: type[Struct], subject: tuple[str, ...]) -> Path:
        assert self._folder is not None
        return self._folder / f"{digest_of((FORMAT, kind.__name__, *self._about, *subject))}.json"


def digest_of(parts: Sequence[str]) -> str:
    """One name for several facts."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class _ResultFile(Struct, frozen=True):
    """A result's file. digest: SHA-256 of the result's JSON, in hexadecimal digits."""

    digest: str
    result: msgspec.Raw


def _sha256(content: bytes | msgspec.Raw) -> str:
    return hashlib.sha256(content).hexdigest()
