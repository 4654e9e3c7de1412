"""What a tune measures next, at which rates, and what it chooses: the pure part of a tune.

Successive halving: load, compare and quickly look at every way with the daemon's own layout; look at other layouts of
the quicker half, and at other batch limits of the best of each; then measure the best few at the objective. A tune cut
short at any step has the best answer that was possible by then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from edge_runtime.tuning.candidates import PLAIN, Candidate, Way, row_layouts, thread_layouts
from edge_runtime.tuning.options import Objective
from edge_runtime.tuning.results import FullMeasurement, QuickLook, TuneResults, WayResult

FINALISTS = 3
"""Candidates measured at the objective, besides the baseline: quick looks are right within a few per cent, and the
third and the fourth are farther apart."""

SURVIVORS = 2
"""The least number of ways whose layouts are tried."""

UP, DOWN = 1.2, 0.75
"""Steps of a rate search's bracket: a quick look is right within a fifth more often than not. Each step enlarges the
next one in the same direction, because the look was wrong then."""

PRECISION = 1.05
"""A rate search ends when the lowest rate that failed is this near the highest that did not: noise is as large."""

MAX_PROBES = 12
"""Enough to come down from the first guess to a hundredth of it and to close in from there."""

TIE = 1 / PRECISION
"""Rates above this share of the highest are equal; then the more exact or simpler candidate is chosen."""


@dataclass(frozen=True, slots=True)
class Space:
    """All that may be tried. max_rows: hard limit of a batch, 1 without batching. drop: accuracy that may be lost."""

    ways: tuple[Way, ...]
    cores: int
    max_rows: int
    objective: Objective
    drop: float

    @property
    def baseline(self) -> Candidate:
        """The candidate that serves without tuning."""
        return Candidate(self.ways[0])


@dataclass(frozen=True, slots=True)
class TuneStep:
    """One measurement: of a way (load and compare it), or of a candidate, quickly or in full."""

    kind: Literal["way", "quick", "full"]
    candidate: Candidate


# ---- what comes next ------------------------------------------------------------------------------------------------


def next_step(space: Space, known: TuneResults, *, is_hurried: bool = False) -> TuneStep | None:
    """The next measurement; None when all are done. is_hurried: time is nearly over, so finish the best so far."""
    if is_hurried:
        return _hurried_step(space, known)
    return _way_step(space, known) or _layout_step(space, known) or _final_step(space, known)


def is_eligible(result: WayResult | None, drop: float) -> bool:
    """Whether a way may be chosen: it works, and gives up no more accuracy than allowed.

    With a drop of 0 only the plain model is eligible: agreement on a few inputs is no promise for all. Nor is agreement
    on inputs that cannot tell it.
    """
    if result is None or result.reason or result.accuracy is None:
        return False
    if result.way.precision == PLAIN:
        return True
    return drop > 0 and result.accuracy.is_within(drop)


def has_answer(known: TuneResults) -> bool:
    """Whether a measured candidate keeps the objective."""
    return any(not each.reason and each.rate > 0 for each in known.full.values())


def _way_step(space: Space, known: TuneResults) -> TuneStep | None:
    for way in space.ways:
        result = known.ways.get(way)
        if result is None:
            return TuneStep("way", Candidate(way))
        if not result.reason and Candidate(way) not in known.quick:
            return TuneStep("quick", Candidate(way))
    return None


def _layout_step(space: Space, known: TuneResults) -> TuneStep | None:
    for way in _survivors(space, known):
        for layout in thread_layouts(space.cores):
            if Candidate(way, layout) not in known.quick:
                return TuneStep("quick", Candidate(way, layout))
        if space.max_rows == 1:
            continue
        ranked = _ranked([known.quick[Candidate(way, layout)] for layout in thread_layouts(space.cores)])
        if not ranked:
            continue
        for layout in row_layouts(ranked[0].candidate.layout, space.max_rows):
            if Candidate(way, layout) not in known.quick:
                return TuneStep("quick", Candidate(way, layout))
    return None


def _final_step(space: Space, known: TuneResults) -> TuneStep | None:
    return _first_full([*_finalists(space, known), *_baseline(space, known)], known)


def _hurried_step(space: Space, known: TuneResults) -> TuneStep | None:
    """Measure the best so far in full, unless one is; then the baseline, which tells what was gained."""
    finalists = _finalists(space, known)
    if not finalists:
        return _way_step(space, known)
    return _first_full([*([] if has_answer(known) else finalists), *_baseline(space, known)], known)


def _finalists(space: Space, known: TuneResults) -> list[Candidate]:
    usable = [each for each in known.quick.values() if _may_be_measured(space, known, each.candidate)]
    return [each.candidate for each in _ranked(usable)[:FINALISTS]]


def _baseline(space: Space, known: TuneResults) -> list[Candidate]:
    return [space.baseline] if _may_be_measured(space, known, space.baseline) else []


def _first_full(candidates: Sequence[Candidate], known: TuneResults) -> TuneStep | None:
    return next((TuneStep("full", each) for each in candidates if each not in known.full), None)


def _may_be_measured(space: Space, known: TuneResults, candidate: Candidate) -> bool:
    """Whether a full measurement can lead to a choice: it is eligible, works, and answers one request in time."""
    quick = known.quick.get(candidate)
    return (
        is_eligible(known.ways.get(candidate.way), space.drop)
        and quick is not None
        and not quick.reason
        and quick.alone_s <= space.objective.limit_s
    )


def _survivors(space: Space, known: TuneResults) -> list[Way]:
    """The quicker half of the eligible ways, quickest first."""
    looks = [known.quick[Candidate(way)] for way in space.ways if Candidate(way) in known.quick]
    usable = _ranked([each for each in looks if is_eligible(known.ways.get(each.candidate.way), space.drop)])
    kept = max(-(-len(usable) // 2), SURVIVORS)
    return [each.candidate.way for each in usable[:kept]]


def _ranked(looks: Sequence[QuickLook]) -> list[QuickLook]:
    """Those that worked, quickest first; of equals, the one tried first."""
    return sorted((each for each in looks if not each.reason), key=lambda each: -each.rate)


# ---- which rate comes next ------------------------------------------------------------------------------------------


class RateSearch:
    """The highest rate that keeps an objective, found by bracketing and halving.

    `next_rate` is the rate to offer, `record` takes whether it kept the objective, `best` is the highest that did.
    first: where to begin, above 0; usually a little below the rate of a quick look.
    """

    def __init__(self, first: float) -> None:
        self.best = 0.0
        self._failed = math.inf
        self._first = first
        self._probes = 0
        self._failures = 0
        self._successes = 0

    def next_rate(self) -> float | None:
        """The rate to offer next; None when the search is over."""
        if self._probes >= MAX_PROBES:
            return None
        if self._probes == 0:
            return self._first
        if math.isinf(self._failed):
            return self.best * UP**self._successes
        if self.best == 0.0:
            return self._failed * DOWN**self._failures
        if self._failed / self.best <= PRECISION:
            return None
        return math.sqrt(self._failed * self.best)

    def record(self, rate: float, *, is_met: bool) -> None:
        """Take the result of one rate."""
        self._probes += 1
        if is_met:
            self._successes += 1
            self.best = max(self.best, rate)
        else:
            self._failures += 1
            self._failed = min(self._failed, rate)


# ---- what is chosen -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Merits:
    """The merits that candidates are compared by: a higher rate, a lower drop, less memory."""

    rate: float
    drop: float
    memory_bytes: int

    def beats(self, other: Merits) -> bool:
        """Nowhere worse and somewhere better."""
        ours, theirs = self._ordered(), other._ordered()
        return ours != theirs and all(mine >= its for mine, its in zip(ours, theirs, strict=True))

    def _ordered(self) -> tuple[float, float, float]:
        return (self.rate, -self.drop, -self.memory_bytes)


def pareto_front(merits: Sequence[Merits]) -> set[int]:
    """Indices of those that no other one beats."""
    return {index for index, one in enumerate(merits) if not any(other.beats(one) for other in merits)}


def front_of(fulls: Iterable[FullMeasurement], known: TuneResults) -> set[str]:
    """Keys of the candidates on the Pareto front, among those that keep the objective."""
    usable = [each for each in fulls if not each.reason and each.rate > 0]
    indices = pareto_front([_merits_of(each, known) for each in usable])
    return {usable[index].candidate.key for index in indices}


def choose(space: Space, known: TuneResults) -> FullMeasurement | None:
    """The highest rate at the objective among the eligible candidates; None where none keeps the objective.

    Of nearly equal rates: the one that gives up least accuracy, then sets fewest keys, then takes least memory.
    """
    usable = [
        each
        for each in known.full.values()
        if not each.reason and each.rate > 0 and is_eligible(known.ways.get(each.candidate.way), space.drop)
    ]
    if not usable:
        return None
    highest = max(each.rate for each in usable)
    near = [each for each in usable if each.rate >= highest * TIE]
    return min(near, key=lambda each: _cost(space, each, known))


def _merits_of(full: FullMeasurement, known: TuneResults) -> Merits:
    accuracy = known.ways[full.candidate.way].accuracy
    return Merits(full.rate, 1.0 if accuracy is None else accuracy.drop, full.memory_bytes)


def _cost(space: Space, full: FullMeasurement, known: TuneResults) -> tuple[float, int, int, int]:
    merits = _merits_of(full, known)
    way, layout = full.candidate.way, full.candidate.layout
    keys = sum(each is not None for each in (layout.threads, layout.instances, layout.max_batch_rows))
    return (merits.drop if way.precision else -1.0, space.ways.index(way), keys, merits.memory_bytes)
