"""Which candidates are worth a look, and which one is chosen. Pure.

Owns: the Pareto front (no other is better in rate, accuracy and memory) and the rule of choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edge_runtime.tuning.plan import Space, is_eligible
from edge_runtime.tuning.rate_search import PRECISION
from edge_runtime.tuning.results import Full, Results

TIE = 1 / PRECISION
"""Above this share of the highest rate, what is more exact or simpler is chosen: they were not told apart."""


@dataclass(frozen=True, slots=True)
class Merits:
    """What one candidate is compared by: rate up, drop and memory down."""

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
    """Places of those that no other one beats."""
    return {place for place, one in enumerate(merits) if not any(other.beats(one) for other in merits)}


def merits_of(full: Full, known: Results) -> Merits:
    """A measured candidate's merits."""
    accuracy = known.engines[full.candidate.engine].accuracy
    return Merits(full.rate, 1.0 if accuracy is None else accuracy.drop, full.memory_bytes)


def choose(space: Space, known: Results) -> Full | None:
    """The highest rate at the objective among those that are exact enough; None where none keeps the objective.

    Of rates that are nearly equal: what gives up least, then what says least, then what takes least memory.
    """
    usable = [
        each
        for each in known.full.values()
        if not each.reason and each.rate > 0 and is_eligible(known.engines.get(each.candidate.engine), space.drop)
    ]
    if not usable:
        return None
    highest = max(each.rate for each in usable)
    near = [each for each in usable if each.rate >= highest * TIE]
    return min(near, key=lambda each: _cost(space, each, known))


def _cost(space: Space, full: Full, known: Results) -> tuple[float, int, int, int]:
    merits = merits_of(full, known)
    engine, layout = full.candidate.engine, full.candidate.layout
    said = sum(each is not None for each in (layout.threads, layout.instances, layout.max_batch_rows))
    return (merits.drop if engine.precision else -1.0, space.engines.index(engine), said, merits.memory_bytes)


def front_of(fulls: Iterable[Full], known: Results) -> set[str]:
    """Keys of the candidates on the Pareto front, among those that keep the objective."""
    usable = [each for each in fulls if not each.reason and each.rate > 0]
    places = pareto_front([merits_of(each, known) for each in usable])
    return {usable[place].candidate.key for place in places}
