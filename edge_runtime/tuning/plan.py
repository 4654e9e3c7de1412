"""What to measure next, by what is known: the pure part of a tune.

Successive halving: every engine is loaded, compared and looked at quickly with the layout that serves without tuning;
of the quicker half other layouts are looked at, of the best of each other batch limits; the best few are then measured
at the objective. The order is such that a tune cut short at any step has the best answer that could be had by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from edge_runtime.tuning.candidates import MEASURED, PLAIN, Candidate, Engine, row_layouts, thread_layouts
from edge_runtime.tuning.objective import Objective
from edge_runtime.tuning.results import EngineResult, Quick, Results

FINALISTS = 3
"""Candidates measured at the objective, besides what serves without tuning: quick looks are right within a few per
cent, and more than that lies between the third and the fourth."""

SURVIVORS = 2
"""Engines at least whose layouts are looked at, where there are so many."""

Kind = Literal["engine", "quick", "full"]


@dataclass(frozen=True, slots=True)
class Space:
    """What may be tried. max_rows: hard limit of a batch, 1 for a model that does not batch. drop: accuracy allowed."""

    engines: tuple[Engine, ...]
    cores: int
    max_rows: int
    objective: Objective
    drop: float

    @property
    def baseline(self) -> Candidate:
        """What serves without tuning."""
        return Candidate(self.engines[0])


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to measure: an engine (loaded and compared), or a candidate, quickly or in full."""

    kind: Kind
    candidate: Candidate


def next_step(space: Space, known: Results, *, is_hurried: bool = False) -> Step | None:
    """The next thing to measure; None when all is. is_hurried: time is nearly over, so finish what is best by now."""
    if is_hurried:
        return _hurried_step(space, known)
    return _engine_step(space, known) or _layout_step(space, known) or _final_step(space, known)


def is_eligible(result: EngineResult | None, drop: float) -> bool:
    """Whether an engine may be chosen: it works, and gives up no more accuracy than allowed.

    With nothing to give up, only the model as it is: an agreement on a few inputs is no promise for all.
    """
    if result is None or result.reason or result.accuracy is None:
        return False
    if result.engine.precision == PLAIN:
        return True
    return drop > 0 and result.accuracy.drop <= drop


def may_be_measured(space: Space, known: Results, candidate: Candidate) -> bool:
    """Whether a full measurement can lead to a choice: it is eligible, works, and answers one request in time."""
    quick = known.quick.get(candidate)
    return (
        is_eligible(known.engines.get(candidate.engine), space.drop)
        and quick is not None
        and not quick.reason
        and quick.alone_s <= space.objective.limit_s
    )


def has_answer(known: Results) -> bool:
    """Whether a candidate was measured that keeps the objective."""
    return any(not each.reason and each.rate > 0 for each in known.full.values())


# ---- private --------------------------------------------------------------------------------------------------------


def _engine_step(space: Space, known: Results) -> Step | None:
    for engine in space.engines:
        result = known.engines.get(engine)
        if result is None:
            return Step("engine", Candidate(engine))
        if not result.reason and Candidate(engine) not in known.quick:
            return Step("quick", Candidate(engine))
    return None


def _layout_step(space: Space, known: Results) -> Step | None:
    for engine in _survivors(space, known):
        for layout in thread_layouts(space.cores):
            if Candidate(engine, layout) not in known.quick:
                return Step("quick", Candidate(engine, layout))
        if space.max_rows == 1:
            continue
        best = _best([known.quick[Candidate(engine, layout)] for layout in thread_layouts(space.cores)])
        if best is None:
            continue
        for layout in row_layouts(best.candidate.layout, space.max_rows):
            if Candidate(engine, layout) not in known.quick:
                return Step("quick", Candidate(engine, layout))
    return None


def _final_step(space: Space, known: Results) -> Step | None:
    usable = [each for each in known.quick.values() if may_be_measured(space, known, each.candidate)]
    finalists = [each.candidate for each in _ranked(usable)[:FINALISTS]]
    if may_be_measured(space, known, space.baseline):
        finalists.append(space.baseline)
    return _first_full(finalists, known)


def _hurried_step(space: Space, known: Results) -> Step | None:
    """The best so far measured in full, unless one is; then what serves without tuning, to tell what was gained."""
    usable = [each for each in known.quick.values() if may_be_measured(space, known, each.candidate)]
    if not usable:
        return _engine_step(space, known)
    finalists = [] if has_answer(known) else [each.candidate for each in _ranked(usable)[:FINALISTS]]
    if may_be_measured(space, known, space.baseline):
        finalists.append(space.baseline)
    return _first_full(finalists, known)


def _first_full(candidates: Sequence[Candidate], known: Results) -> Step | None:
    return next((Step("full", each) for each in candidates if each not in known.full), None)


def _survivors(space: Space, known: Results) -> list[Engine]:
    """The quicker half of the engines that may be chosen, quickest first."""
    quick = [known.quick[Candidate(engine, MEASURED)] for engine in space.engines if _has_quick(known, engine)]
    usable = [each for each in quick if is_eligible(known.engines.get(each.candidate.engine), space.drop)]
    kept = max(-(-len(usable) // 2), SURVIVORS)
    return [each.candidate.engine for each in _ranked(usable)[:kept]]


def _has_quick(known: Results, engine: Engine) -> bool:
    quick = known.quick.get(Candidate(engine, MEASURED))
    return quick is not None and not quick.reason


def _ranked(looks: Sequence[Quick]) -> list[Quick]:
    """Quickest first; of equals what was tried first."""
    return sorted((each for each in looks if not each.reason), key=lambda each: -each.rate)


def _best(looks: Sequence[Quick]) -> Quick | None:
    return next(iter(_ranked(looks)), None)
