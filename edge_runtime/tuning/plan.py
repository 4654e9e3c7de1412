"""The next measurement of a tune, and its choice: the pure part of a tune.

All ways meet in a race (race.py) with the daemon's own layout; the other layouts of those that could still lead join
it, then other batch limits of the best. The race ends when its answer is sure enough, and the best few are measured at
the objective. A tune cut short at any step has the best answer that was possible by then, and knows that it is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from edge_runtime.tuning.candidates import PLAIN, Candidate, Way, row_layouts, thread_layouts
from edge_runtime.tuning.options import Objective
from edge_runtime.tuning.race import (
    MIN_ROUNDS,
    SETTLED,
    TIE,
    Lead,
    difference,
    equals_of,
    find_lead,
    judge,
    log_rates,
    may_reach,
    next_slice,
)
from edge_runtime.tuning.results import FullMeasurement, QuickLook, Slice, TuneResults, WayResult

FINALISTS = 3
"""Candidates measured at the objective, besides what serves now: the choice, and two to choose in its place where it
misses the objective."""

LAYOUT_GAIN = 1.5
"""How much quicker another layout may make a way than the daemon's own, which it measures: with room to spare."""

ROWS_GAIN = 1.1
"""How much quicker a batch limit may make a layout than the limit that the daemon measures."""

VETO = 2 / 3
"""A candidate whose rate at the objective is below this share of another finalist's has a tail that the race does not
see. Above it the race decides: a rate at the objective is measured once, and other work moves it by a fifth."""

UP, DOWN = 1.2, 0.75
"""Steps of a rate search's bracket: a quick look is right within a fifth more often than not. Each step enlarges the
next one in the same direction, because the look was wrong then."""

PRECISION = 1.05
"""A rate search ends when the lowest rate that failed is this near the highest that did not: noise is as large."""

OUTDOES = (1 + TIE) * PRECISION
"""One rate at the objective contradicts another above this ratio: a search ends within PRECISION, and within TIE
candidates are equal."""

MAX_FULL_TAKES = 5
"""Most measurements at the objective of what the race is sure of and another one outdoes there. Other work only ever
lowers a rate, so the highest counts."""

MAX_PROBES = 12
"""Enough to come down from the first guess to a hundredth of it and to close in from there."""


@dataclass(frozen=True, slots=True)
class Space:
    """All that may be tried. max_rows: hard limit of a batch, 1 without batching. drop: accuracy that may be lost.

    present: the candidate that `model.toml` says now; None where it says nothing, or nothing that can be tried.
    """

    ways: tuple[Way, ...]
    cores: int
    max_rows: int
    objective: Objective
    drop: float
    present: Candidate | None = None

    @property
    def now(self) -> Candidate:
        """The candidate that serves now, which always takes part."""
        return self.present or self.baseline

    @property
    def baseline(self) -> Candidate:
        """The candidate that serves without tuning."""
        return Candidate(self.ways[0])


@dataclass(frozen=True, slots=True)
class TuneStep:
    """One measurement: of a way (load and compare it), or of a candidate: a first look, a slice of the race, in full.

    round: of a slice, counted from 1.
    """

    kind: Literal["way", "quick", "slice", "full"]
    candidate: Candidate
    round: int = 0


# ---- what comes next ------------------------------------------------------------------------------------------------


def next_step(space: Space, known: TuneResults, *, is_hurried: bool = False) -> TuneStep | None:
    """The next measurement; None when all are done. is_hurried: time is nearly over, so finish the best so far."""
    if is_hurried:
        return _hurried_step(space, known)
    return _way_step(space, known) or _race_step(space, known) or _final_step(space, known)


def is_settled(space: Space, known: TuneResults) -> bool:
    """Whether all that could lead took part in the race, and its answer is sure enough."""
    is_over = _way_step(space, known) is None and _race_step(space, known) is None
    return is_over and confidence(space, known) >= SETTLED


def confidence(space: Space, known: TuneResults) -> float:
    """The probability, at least, that nothing is more than TIE quicker than the choice; 0 before all have joined.

    Before there is a choice, it is that of the leader.
    """
    if _way_step(space, known) is not None:
        return 0.0
    for entrants, rounds in _races(space, known):
        running = [each for each in entrants if each in known.quick and _can_keep(space, known.quick[each])]
        if any(each not in known.quick for each in entrants) or (
            rounds is not None and next_slice(running, slices_of(known), rounds=rounds) is not None
        ):
            return 0.0
    choice = choose(space, known)
    leader = eligible_lead(space, known).leader if choice is None else choice.candidate
    return 0.0 if leader is None else _confidence_in(space, known, leader)


def is_eligible(result: WayResult | None, drop: float) -> bool:
    """Whether a way may be chosen: it works, and gives up no more accuracy than allowed.

    With a drop of 0 only the plain model is eligible: agreement on a few inputs is not a promise for all. Nor is
    agreement on inputs that cannot show it.
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
    # What serves now comes second, so that a search cut short knows what it would replace.
    for way in dict.fromkeys((space.baseline.way, space.now.way, *space.ways)):
        result = known.ways.get(way)
        if result is None:
            return TuneStep("way", Candidate(way))
        for each in (space.now, Candidate(way)) if way == space.now.way else (Candidate(way),):
            if not result.reason and each not in known.quick:
                return TuneStep("quick", each)
    return None


def _race_step(space: Space, known: TuneResults) -> TuneStep | None:
    for entrants, rounds in _races(space, known):
        for each in entrants:
            if each not in known.quick:
                return TuneStep("quick", each)
        running = [each for each in entrants if _can_keep(space, known.quick[each])]
        found = next_slice(running, slices_of(known), rounds=rounds)
        if found is not None:
            return TuneStep("slice", *found)
    return None


def _races(space: Space, known: TuneResults) -> Iterator[tuple[list[Candidate], int | None]]:
    """The entrants of each part of the race with its number of rounds: ways, then layouts, then batch limits.

    Each part is asked for when the one before is over. Invariant: which candidates join depends on slices up to then
    only, so that it does not change while the race goes on.
    """
    # Those that may not be chosen take part at first, so that what they would gain is told fairly.
    entrants = _working([*(Candidate(way) for way in space.ways), space.now], known)
    yield entrants, MIN_ROUNDS
    entrants = [each for each in entrants if _may_be_measured(space, known, each)]
    at_first = _lead_at(entrants, known)
    hopeful = dict.fromkeys(e.way for e in entrants if e == at_first.leader or may_reach(e, at_first, LAYOUT_GAIN))
    layouts = [Candidate(way, layout) for way in hopeful for layout in thread_layouts(space.cores)]
    entrants = _working([*entrants, *layouts], known)
    if space.max_rows > 1:
        yield entrants, MIN_ROUNDS
        by_then = _lead_at(entrants, known)
        best = [_lead_at([each for each in entrants if each.way == way], known).leader for way in hopeful]
        bases = [e for e in best if e is not None and (e == by_then.leader or may_reach(e, by_then, ROWS_GAIN))]
        rows = [Candidate(each.way, layout) for each in bases for layout in row_layouts(each.layout, space.max_rows)]
        entrants = _working([*entrants, *rows], known)
    # What joined before a later slice said otherwise stays in doubt, and so in the race.
    yield _working([*entrants, *_raced(space, known)], known), None


def _working(candidates: Sequence[Candidate], known: TuneResults) -> list[Candidate]:
    """Those of ways that work, each once."""
    return [each for each in dict.fromkeys(candidates) if each.way in known.ways and not known.ways[each.way].reason]


def _lead_at(entrants: Sequence[Candidate], known: TuneResults) -> Lead:
    """The lead in the round when all entrants had run often enough."""
    every = slices_of(known)
    slices = {each: every[each] for each in entrants if each in every}
    last = max((each[MIN_ROUNDS - 1].round for each in slices.values() if len(each) >= MIN_ROUNDS), default=0)
    return find_lead(list(slices), {one: [e for e in each if e.round <= last] for one, each in slices.items()})


def _final_step(space: Space, known: TuneResults) -> TuneStep | None:
    found = _first_full([*_finalists(space, known), *_now(space, known)], known)
    sure = overruled(space, known) if found is None else None
    if sure is None or sure.takes >= MAX_FULL_TAKES:
        return found
    return TuneStep("full", sure.candidate)


def _hurried_step(space: Space, known: TuneResults) -> TuneStep | None:
    """Measure the best so far in full, and the next ones until one keeps the objective; then what serves now."""
    finalists = _finalists(space, known)
    if not finalists:
        return _way_step(space, known)
    return _first_full([*finalists[: 1 if has_answer(known) else FINALISTS], *_now(space, known)], known)


def _finalists(space: Space, known: TuneResults) -> list[Candidate]:
    return ranked(space, known)[:FINALISTS]


def _now(space: Space, known: TuneResults) -> list[Candidate]:
    return [space.now] if _may_be_measured(space, known, space.now) else []


def _first_full(candidates: Sequence[Candidate], known: TuneResults) -> TuneStep | None:
    return next((TuneStep("full", each) for each in candidates if each not in known.full), None)


def _may_be_measured(space: Space, known: TuneResults, candidate: Candidate) -> bool:
    """Whether a full measurement can lead to a choice: it is eligible, works, and answers one request in time."""
    look = known.quick.get(candidate)
    return is_eligible(known.ways.get(candidate.way), space.drop) and look is not None and _can_keep(space, look)


def _can_keep(space: Space, look: QuickLook) -> bool:
    """Whether it works, and answers one request in time."""
    return not look.reason and look.alone_s <= space.objective.limit_s


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


def slices_of(known: TuneResults) -> dict[Candidate, tuple[Slice, ...]]:
    """The slices of all candidates that work."""
    return {one: look.slices for one, look in known.quick.items() if look.slices and not look.reason}


def eligible_lead(space: Space, known: TuneResults) -> Lead:
    """The race's lead among the candidates that may be chosen."""
    return find_lead(_raced(space, known), slices_of(known))


def ranked(space: Space, known: TuneResults) -> list[Candidate]:
    """The candidates that may be chosen, best first, by the race; by their first looks where they did not run.

    Of those that are surely equal: what serves now, else the one that gives up least accuracy, then sets fewest keys,
    then takes least memory.
    """
    found = eligible_lead(space, known)
    rivals = _raced(space, known)
    sure = [e for e in equals_of(found) if e == found.leader or judge(e, rivals, slices_of(known)).is_settled]
    equal = sorted(sure, key=lambda each: _cost(space, each, known))
    behind = {one: -math.inf if each is None else each.mean for one, each in found.behind.items()}
    others = sorted((each for each in behind if each not in equal), key=lambda each: -behind[each])
    looks = sorted((e for e in rivals if not known.quick[e].slices), key=lambda e: -known.quick[e].first_rate)
    return [*equal[:1], *(each for each in (found.leader,) if each is not None and each not in equal[:1]),
            *(each for each in equal[1:] if each != found.leader), *others, *looks]  # fmt: skip


def choose(space: Space, known: TuneResults) -> FullMeasurement | None:
    """The best of the race that keeps the objective; None where none does.

    Where the race is not sure of it, or another one is quicker at the objective, the quickest there: a choice is never
    what the rates beside it contradict. Where the best did not meet what serves now, that stays if it is quicker at the
    objective.
    """
    usable = _usable(space, known)
    highest = max(usable, key=lambda each: each.rate, default=None)
    if highest is None:
        return None
    best = _best_of_race(usable)
    if highest.rate > best.rate * OUTDOES or _confidence_in(space, known, best.candidate) < SETTLED:
        return highest
    now = next((each for each in usable if each.candidate == space.now), None)
    if now is None or now.rate <= best.rate:
        return best
    rates = log_rates({each: known.quick[each].slices for each in (best.candidate, now.candidate)})
    met = difference(rates.get(best.candidate, {}), rates.get(now.candidate, {}))
    return now if met is None else best


def overruled(space: Space, known: TuneResults) -> FullMeasurement | None:
    """The candidate that the race is sure of and that another one outdoes at the objective; None where they agree."""
    usable = _usable(space, known)
    best = _best_of_race(usable) if usable else None
    if best is None or max(each.rate for each in usable) <= best.rate * OUTDOES:
        return None
    return best if _confidence_in(space, known, best.candidate) >= SETTLED else None


def _best_of_race(usable: Sequence[FullMeasurement]) -> FullMeasurement:
    highest = max(each.rate for each in usable)
    return next(each for each in usable if each.rate >= highest * VETO)


def _confidence_in(space: Space, known: TuneResults, one: Candidate) -> float:
    """The probability, at least, that nothing that met a candidate is more than TIE quicker."""
    usable = _usable(space, known)
    highest = max((each.rate for each in usable), default=0.0)
    # What misses the objective, or has a tail that the race does not see, serves no more than the choice.
    beside = {each.candidate for each in usable if each.rate >= highest * VETO}
    rivals = [each for each in _raced(space, known) if each not in known.full or each in beside]
    return judge(one, rivals, slices_of(known)).confidence


def _raced(space: Space, known: TuneResults) -> list[Candidate]:
    return [each for each in known.quick if _may_be_measured(space, known, each)]


def _usable(space: Space, known: TuneResults) -> list[FullMeasurement]:
    """Return measurements at the objective that keep it and may be chosen; by the race, best first."""
    found = [known.full[each] for each in ranked(space, known) if each in known.full]
    return [each for each in found if not each.reason and each.rate > 0]


def _merits_of(full: FullMeasurement, known: TuneResults) -> Merits:
    accuracy = known.ways[full.candidate.way].accuracy
    return Merits(full.rate, 1.0 if accuracy is None else accuracy.drop, full.memory_bytes)


def _cost(space: Space, candidate: Candidate, known: TuneResults) -> tuple[bool, float, int, int, int]:
    way, layout = candidate.way, candidate.layout
    accuracy = known.ways[way].accuracy
    drop = -1.0 if way.precision == PLAIN or accuracy is None else accuracy.drop
    keys = sum(each is not None for each in (layout.threads, layout.instances, layout.max_batch_rows))
    memory_bytes = known.quick[candidate].memory_bytes
    return (candidate != space.now, drop, space.ways.index(way), keys, memory_bytes)
