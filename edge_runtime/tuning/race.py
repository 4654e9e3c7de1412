"""Which of several candidates serves most: a race by turns that ends when the answer is sure enough. Pure.

In a round every candidate that is still in doubt takes one short slice, and slices are compared within a round only:
other work and a drifting clock hit all of a round alike. A candidate sits out while it is surely no more than TIE
quicker than the leader. Nothing here measures: plan.py asks for the next slice, tune.py takes it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edge_runtime.tuning.candidates import Candidate
from edge_runtime.tuning.results import Slice

TIE = 0.03
"""Candidates whose rates differ by less than this share are equal: a device's own drift over a day is as large."""

SETTLED = 0.9
"""The confidence that ends a race: in nine of ten races at least, nothing is more than TIE quicker than the leader."""

OUT = 0.003
"""The chance of being more than TIE quicker than the leader below which a candidate sits out. Checked after each round,
and of a dozen at a time, so it is far below 1 - SETTLED."""

MIN_ROUNDS = 4
"""Rounds of every candidate before it may sit out: fewer slices say little of how much they scatter."""

TRIMMED = 0.15
"""The share of differences left out at each end: a burst of other work hits one slice of a pair."""

LEAST_SCATTER = 0.02
"""Least scatter of a difference of logarithms: a few slices may agree by luck, and none is more exact."""

CALM = 0.05
"""Other work during a slice, as a share of the machine, below which the slice counts at once."""

UNUSUAL = 1.3
"""Times the usual other work above which a slice is taken again."""

MAX_TAKES = 3
"""Most takes of one slice; the calmest counts."""

_LEAST_RATE = 1e-3
_FARTHEST = math.log(5.0)
"""A slice in which all answers came late says no more than that its candidate was far behind."""

_LEAST_LEFT = 0.1
_PRIOR = 0.02
_STEEPEST = 1.5
"""Bounds of the fit of other work's cost: a few slices with equal other work say nothing of its cost."""

LogRates = Mapping[int, float]

RaceSlices = Mapping[Candidate, Sequence[Slice]]


@dataclass(frozen=True, slots=True)
class Difference:
    """The ratio of two candidates' rates: the mean of its logarithms, and the standard error."""

    mean: float
    error: float
    freedom: int

    def chance_above(self, ratio: float) -> float:
        """The probability that the first is more than `ratio` times as quick, by Student's t distribution."""
        t = (math.log(ratio) - self.mean) / self.error
        # Wallace 1959: a normal deviate for Student's t, within 0.02 from 2 degrees of freedom on.
        n = self.freedom
        z = math.copysign((8 * n + 1) / (8 * n + 3) * math.sqrt(n * math.log1p(t * t / n)), t)
        return 0.5 * math.erfc(z / math.sqrt(2.0))

    @property
    def interval(self) -> tuple[float, float]:
        """The ratio's likely bounds: two standard errors either side, as many more as few slices want."""
        wide = 2.0 * (1.0 + 2.0 / self.freedom) * self.error
        return math.exp(self.mean - wide), math.exp(self.mean + wide)


@dataclass(frozen=True, slots=True)
class Lead:
    """The leader, the others' differences from it, and the chance of each to be more than TIE quicker.

    leader None: no slices yet. behind: None for one that shares fewer than two rounds with the leader.
    """

    leader: Candidate | None
    behind: Mapping[Candidate, Difference | None] = field(default_factory=dict)
    doubts: Mapping[Candidate, float] = field(default_factory=dict)

    @property
    def confidence(self) -> float:
        """The probability, at least, that nothing is more than TIE quicker than the leader."""
        return 0.0 if self.leader is None else max(1.0 - sum(self.doubts.values()), 0.0)

    @property
    def is_settled(self) -> bool:
        """Whether the race is over."""
        return self.confidence >= SETTLED


def difference(ours: LogRates, theirs: LogRates) -> Difference | None:
    """Compare two candidates in the rounds that both ran; None where those are fewer than two.

    A trimmed mean with the error of Yuen (1974): winsorised, so that what is left out still counts as scatter.
    """
    pairs = [rate - theirs[number] for number, rate in ours.items() if number in theirs]
    found = sorted(min(max(each, -_FARTHEST), _FARTHEST) for each in pairs)
    count = len(found)
    if count < 2:
        return None
    cut = int(count * TRIMMED)
    kept = found[cut : count - cut]
    mean = sum(kept) / len(kept)
    winsorised = [kept[0]] * cut + kept + [kept[-1]] * cut
    middle = sum(winsorised) / count
    variance = sum((each - middle) ** 2 for each in winsorised) / (count - 1)
    scatter = max(math.sqrt(variance), LEAST_SCATTER)
    left = len(kept)
    return Difference(mean, scatter * math.sqrt((count - 1) / (left * (left - 1))), left - 1)


def log_rates(slices: RaceSlices) -> dict[Candidate, LogRates]:
    """The logarithm of each slice's rate by round, as if nothing else had run.

    Each slice says what share of the machine was left to it; how much a share costs is fitted to all slices, for a
    candidate may need the whole machine, one core, or none.
    """
    points = {
        one: [(each.round, math.log(max(1.0 - each.others, _LEAST_LEFT)), math.log(max(each.rate, _LEAST_RATE)))
              for each in taken]
        for one, taken in slices.items() if taken
    }  # fmt: skip
    across = along = 0.0
    for found in points.values():
        left = sum(x for _, x, _ in found) / len(found)
        rate = sum(y for _, _, y in found) / len(found)
        across += sum((x - left) * (y - rate) for _, x, y in found)
        along += sum((x - left) ** 2 for _, x, _ in found)
    slope = min(max(across / (along + _PRIOR), 0.0), _STEEPEST)
    return {one: {number: y - slope * x for number, x, y in found} for one, found in points.items()}


def find_lead(entrants: Sequence[Candidate], slices: RaceSlices) -> Lead:
    """Find the leader, and doubt the others. Of equals the first entrant leads."""
    rates = log_rates({each: slices.get(each, ()) for each in entrants})
    leader: Candidate | None = None
    for each in rates:
        found = None if leader is None else difference(rates[each], rates[leader])
        if leader is None or (found is not None and found.mean > 0):
            leader = each
    return Lead(None) if leader is None else judge(leader, entrants, slices)


def judge(leader: Candidate, entrants: Sequence[Candidate], slices: RaceSlices) -> Lead:
    """Doubt the others beside a candidate, as if it led."""
    rates = log_rates({each: slices.get(each, ()) for each in (leader, *entrants)})
    found_of = {each: difference(rates.get(each, {}), rates.get(leader, {})) for each in entrants if each != leader}
    doubts = {each: _doubt(found, len(slices.get(each, ()))) for each, found in found_of.items()}
    return Lead(leader, found_of, doubts)


def next_slice(
    entrants: Sequence[Candidate], slices: RaceSlices, *, rounds: int | None = None
) -> tuple[Candidate, int] | None:
    """The candidate that runs next and the number of its round; None when the race is over.

    rounds: end when every entrant ran this number, settled or not; None to run until it is settled.
    """
    if not entrants or (rounds is not None and all(len(slices.get(each, ())) >= rounds for each in entrants)):
        return None
    number = max((each[-1].round for each in slices.values() if each), default=0)
    if number:
        earlier = {one: [each for each in slices.get(one, ()) if each.round < number] for one in entrants}
        running = {one: _slice_of(slices.get(one, ()), number) for one in _line_up(entrants, earlier, number)}
        # A new entrant runs first in a round; one that missed that waits for the next, or its pairs lie far apart.
        is_late = any(len(each) > 1 and each[-1].round == number for each in slices.values())
        for one, taken in running.items():
            if taken is None and (slices.get(one) or not is_late):
                return one, number
        usual = _usual(slices)
        # Last, so that a burst may be over by then.
        for one, taken in running.items():
            if taken is not None and is_disturbed(taken, usual):
                return one, number
    if find_lead(entrants, slices).is_settled:
        return None
    return _line_up(entrants, slices, number + 1)[0], number + 1


def with_slice(slices: Sequence[Slice], taken: Slice) -> tuple[Slice, ...]:
    """The slices with another one: a new round's at the end; of one round's, the calmest counts, with all takes."""
    if not slices or slices[-1].round != taken.round:
        return (*slices, taken)
    before = slices[-1]
    calmest = min(before, taken, key=lambda each: each.others)
    kept = Slice(taken.round, calmest.rate, calmest.p99_s, calmest.others, before.takes + taken.takes)
    return (*slices[:-1], kept)


def is_disturbed(taken: Slice, usual: float) -> bool:
    """Whether a slice is taken again: other work was there, and more than usual. usual: a share of the machine."""
    return taken.takes < MAX_TAKES and taken.others > max(CALM, UNUSUAL * usual)


def equals_of(lead: Lead) -> list[Candidate]:
    """The leader, and all that are surely less than TIE slower than it."""
    if lead.leader is None:
        return []
    near = [e for e, d in lead.behind.items() if d is not None and d.chance_above(1.0 - TIE) >= SETTLED]
    return [lead.leader, *near]


def may_reach(one: Candidate, lead: Lead, gain: float) -> bool:
    """Whether a candidate could lead if it became `gain` times as quick."""
    found = lead.behind.get(one)
    return found is None or found.chance_above(1.0 / gain) >= OUT


# ---- private --------------------------------------------------------------------------------------------------------


def _doubt(found: Difference | None, count: int) -> float:
    return 1.0 if found is None or count < MIN_ROUNDS else found.chance_above(1.0 + TIE)


def _line_up(entrants: Sequence[Candidate], slices: RaceSlices, number: int) -> list[Candidate]:
    """The entrants of a round: new ones, the leader, all in doubt; every other round backwards, as drifts cancel."""
    lead = find_lead(entrants, slices)
    running = [each for each in entrants if each == lead.leader or lead.doubts.get(each, 1.0) >= OUT]
    return sorted(running[:: 1 if number % 2 else -1], key=lambda each: bool(slices.get(each)))


def _slice_of(slices: Sequence[Slice], number: int) -> Slice | None:
    return next((each for each in slices if each.round == number), None)


def _usual(slices: RaceSlices) -> float:
    return statistics.median([each.others for taken in slices.values() for each in taken] or [0.0])
