"""A tune in words and numbers: the table, the reasons in `model.toml`, and JSON. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from edge_runtime.tuning.candidates import PLAIN, Candidate
from edge_runtime.tuning.options import Objective
from edge_runtime.tuning.plan import (
    Space,
    choose,
    confidence,
    front_of,
    is_eligible,
    is_settled,
    overruled,
    slices_of,
)
from edge_runtime.tuning.race import TIE, Difference, difference, log_rates
from edge_runtime.tuning.results import Accuracy, FullMeasurement, QuickLook, TuneResults, WayResult


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a candidate. rate, p50_s, p99_s: at the objective where is_full, else of the race.

    verdict: "chosen", "front", or why it is not chosen. is_cut: the time ended before the search for the highest rate.
    of_choice: its rate divided by the choice's, the likely bounds; None where they shared fewer than two rounds.
    rounds: of the race. is_now: it serves now.
    """

    candidate: Candidate
    runs_in: str
    is_full: bool
    rate: float
    p50_s: float
    p99_s: float
    memory_bytes: int
    accuracy: Accuracy | None
    verdict: str
    is_cut: bool = False
    of_choice: tuple[float, float] | None = None
    rounds: int = 0
    is_now: bool = False


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of a tune. choice None: nothing keeps the objective.

    is_settled: all that could lead took part, and `confidence` that nothing is more than 3 % quicker is high enough.
    gain: the chosen rate divided by the baseline's, by the race; None where they did not meet. over_now: the same by
    what serves now. now_may_stay: what serves now may be chosen too.
    is_now_unknown: the time was over before it was looked at.
    left_out: precisions that looked quicker than the choice and were not eligible, because no accuracy may be given up.
    unjudged: why agreement means nothing on these inputs, and what became of the other precisions; "" where it does.
    overruled: the candidate that the race is sure of, where the choice serves more at the objective.
    """

    rows: tuple[Row, ...]
    choice: FullMeasurement | None
    is_settled: bool
    confidence: float
    gain: float | None = None
    over_now: float | None = None
    now_may_stay: bool = True
    is_now_unknown: bool = False
    left_out: tuple[str, ...] = ()
    unjudged: str = ""
    overruled: FullMeasurement | None = None

    def may_be_written(self, *, anyway: bool) -> bool:
        """Whether the choice goes into `model.toml`. anyway: also where the search is not settled."""
        if self.choice is None or self.is_worse:
            return False
        return anyway or not self.doubt()

    @property
    def is_worse(self) -> bool:
        """Whether what serves now served more, and may stay, or is not known yet: then the choice is never written."""
        return self.is_now_unknown or (self.over_now is not None and self.over_now < 1 and self.now_may_stay)

    def doubt(self) -> str:
        """One sentence on why the choice is not written unless asked; "" where nothing speaks against it."""
        if self.is_worse:
            return (
                "what model.toml says now was not looked at yet: nothing is written; the same command goes on from here"
                if self.is_now_unknown
                else "what model.toml says now serves more: nothing is written"
            )
        if self.overruled is not None and self.choice is not None:
            return (
                f"by turns another one serves most, at the objective the choice does ({self.choice.rate:,.1f} "
                f"requests/s to {self.overruled.rate:,.1f}): nothing is written; tune again with --fresh while the "
                "device does less other work, or write it with --write-anyway"
            )
        if not self.is_settled:
            return (
                f"the search is not settled (confidence {self.confidence:.0%}): nothing is written; the same command "
                "goes on from here, and --write-anyway writes the best so far"
            )
        if self.over_now is not None and self.over_now < 1 and not self.now_may_stay:
            return (
                f"what model.toml says now serves {1 / self.over_now:.2f} times as much and gives up more accuracy "
                "than allowed: nothing is written; allow it with --accuracy-drop, or the choice with --write-anyway"
            )
        return ""

    def raced_rows(self, count: int) -> list[Row]:
        """Rows of the race that are worth showing: the first ones, the best of each precision, and what serves now."""
        precisions = {row.runs_in for row in self.rows if row.is_full}
        found: list[Row] = []
        for row in self.rows:
            if row.is_full or not row.rate:
                continue
            if len(found) < count or row.runs_in not in precisions or row.is_now:
                found.append(row)
            precisions.add(row.runs_in)
        return found

    def merits_of(self, row: Row) -> str:
        """The merits that a row of the front has over the choice, in words."""
        chosen = next((each for each in self.rows if each.verdict == "chosen"), None)
        if chosen is None:
            return ""
        found = {
            "quicker": row.rate > chosen.rate,
            "more exact": _drop_of(row) < _drop_of(chosen),
            "less memory": row.memory_bytes < chosen.memory_bytes,
        }
        return ", ".join(word for word, is_so in found.items() if is_so)


def summarise(space: Space, known: TuneResults) -> Summary:
    """Rows, best first: those measured at the objective, then quick looks, then failures."""
    choice = choose(space, known)
    front = front_of(known.full.values(), known)
    rows = [_full_row(space, known, each, choice, front) for each in known.full.values()]
    rows.sort(key=lambda row: (row.verdict != "chosen", -row.rate))
    looks = [each for each in known.quick.values() if each.candidate not in known.full]
    quick = sorted((_quick_row(space, known, each) for each in looks), key=lambda row: -row.rate)
    failed = [_failed_row(each) for each in known.ways.values() if each.reason]
    met = _beside_choice(known, choice)
    placed = [_placed(row, space, known, met.get(row.candidate)) for row in (*rows, *quick, *failed)]
    now = known.full.get(space.now)
    return Summary(
        tuple(placed),
        choice,
        is_settled(space, known),
        confidence(space, known),
        gain=_times(space.baseline, choice, met),
        over_now=_times(space.now, choice, met),
        now_may_stay=is_eligible(known.ways.get(space.now.way), space.drop) and (now is None or now.rate > 0),
        is_now_unknown=_is_now_unknown(space, known),
        left_out=_left_out(space, known, choice),
        unjudged=unjudged_text(known, space.drop),
        overruled=overruled(space, known),
    )


def reasons(
    summary: Summary, known: TuneResults, objective: Objective, *, device: str, data: str, date: str
) -> tuple[str, ...]:
    """The reasons for a choice, for the comments in `model.toml`, one sentence a line."""
    choice = summary.choice
    assert choice is not None
    accuracy = known.ways[choice.candidate.way].accuracy
    is_blind = accuracy is not None and choice.candidate.way.precision != PLAIN and accuracy.is_accepted
    rate = f"{'at least ' if choice.is_cut else ''}{choice.rate:,.1f} requests/s"
    served = f"{rate} within {objective}: p50 {_ms(choice.p50_s)} ms, p99 {_ms(choice.p99_s)} ms"
    gain = "" if summary.gain is None else f"; {summary.gain:.2f} times the rate without tuning"
    return (
        f"chosen on {date} by `edge-runtime tune` for {device}",
        f"{served}{gain}; {confidence_text(summary)}",
        f"{accuracy_text(accuracy)} ({data}{', which cannot tell how much is given up' if is_blind else ''})",
    )


def confidence_text(summary: Summary) -> str:
    """The confidence of the choice, in words."""
    settled = "" if summary.is_settled else ", not settled"
    return f"confidence {summary.confidence:.0%} that nothing tried serves over {TIE:.0%} more{settled}"


def accuracy_text(accuracy: Accuracy | None) -> str:
    """A way's accuracy beside the plain model's, in a few words."""
    if accuracy is None:
        return ""
    if accuracy.correct is not None and accuracy.reference_correct is not None:
        return f"{accuracy.correct:.2%} right, {accuracy.reference_correct:.2%} as it is"
    if accuracy.agreement is not None:
        answers = _answers_text(accuracy.distinct or 0)
        return f"{answers}, agrees on {accuracy.agreement:.2%}, error {_spread_text(accuracy)}"
    return f"error {_spread_text(accuracy)}, at most {accuracy.max_error:.2g}"


def unjudged_text(known: TuneResults, drop: float) -> str:
    """One sentence where an answer that ignores its input is within `drop`, and what became of ways for it; else ""."""
    blind = {
        each.runs_in or each.way.precision: each.accuracy
        for each in known.ways.values()
        if each.way.precision != PLAIN and each.accuracy is not None
        and each.accuracy.drop <= drop and each.accuracy.constant_drop <= drop < 1
    }  # fmt: skip
    if not blind or not drop:
        return ""
    followed = ", ".join(name for name, accuracy in blind.items() if accuracy.are_values_within(drop))
    others = [name for name, accuracy in blind.items() if not accuracy.are_values_within(drop)]
    parts = [f"{followed} judged by the values, which follow"] if followed else []
    accuracy = next(iter(blind.values()))
    if others and accuracy.is_accepted:
        parts.append(f"{', '.join(others)} accepted all the same, as asked")
    elif others:
        parts.append(
            f"{', '.join(others)} left out; give inputs with more answers (--data DIR), or choose all the same "
            "(--accept-unjudged)"
        )
    gives = "" if accuracy.distinct is None else f" (the model as it is gives {_answers_text(accuracy.distinct)})"
    return (
        f"one and the same answer to all {accuracy.inputs} inputs would lose {accuracy.constant_drop:.2%} only{gives}, "
        f"so that agreement tells nothing: {'; '.join(parts)}"
    )


def as_json(summary: Summary, space: Space) -> dict[str, Any]:
    """All results, for --json."""
    choice = summary.choice
    return {
        "objective": str(space.objective),
        "accuracy_drop": space.drop,
        "choice": None if choice is None else _candidate_json(choice.candidate) | {"rate": round(choice.rate, 2)},
        "settled": summary.is_settled,
        "confidence": round(summary.confidence, 4),
        "doubt": summary.doubt(),
        "gain": None if summary.gain is None else round(summary.gain, 3),
        "gain_over_now": None if summary.over_now is None else round(summary.over_now, 3),
        "unjudged": summary.unjudged,
        "rows": [_row_json(row) for row in summary.rows],
    }


# ---- private --------------------------------------------------------------------------------------------------------


def _answers_text(count: int) -> str:
    return f"{count} answer{'' if count == 1 else 's'}"


def _spread_text(accuracy: Accuracy) -> str:
    """The error as a share of the spread; of the largest value where nothing differs."""
    if accuracy.spread_error is None:
        return f"{accuracy.max_error:.2g}, no spread"
    return f"{accuracy.spread_error:.2g} of spread"


def _beside_choice(known: TuneResults, choice: FullMeasurement | None) -> dict[Candidate, Difference]:
    """Compare each candidate that met the choice in the race with it."""
    rates = log_rates(slices_of(known))
    if choice is None or choice.candidate not in rates:
        return {}
    found = {each: difference(rates[each], rates[choice.candidate]) for each in rates if each != choice.candidate}
    return {each: compared for each, compared in found.items() if compared is not None}


def _times(one: Candidate, choice: FullMeasurement | None, met: Mapping[Candidate, Difference]) -> float | None:
    """The chosen rate divided by a candidate's."""
    if choice is not None and choice.candidate == one:
        return 1.0
    return math.exp(-met[one].mean) if one in met else None


def _is_now_unknown(space: Space, known: TuneResults) -> bool:
    result = known.ways.get(space.now.way)
    return result is None or (not result.reason and space.now not in known.quick)


def _placed(row: Row, space: Space, known: TuneResults, met: Difference | None) -> Row:
    """The row with what the race says of it."""
    look = known.quick.get(row.candidate)
    return replace(
        row,
        of_choice=None if met is None else met.interval,
        rounds=0 if look is None else len(look.slices),
        is_now=row.candidate == space.now,
    )


def _drop_of(row: Row) -> float:
    return 1.0 if row.accuracy is None else row.accuracy.drop


def _full_row(
    space: Space, known: TuneResults, full: FullMeasurement, choice: FullMeasurement | None, front: set[str]
) -> Row:
    way = known.ways[full.candidate.way]
    if choice is not None and full.candidate == choice.candidate:
        verdict = "chosen"
    elif full.reason:
        verdict = full.reason
    elif not full.rate:
        verdict = f"never keeps {space.objective}"
    elif full.is_cut:
        verdict = "cut short by the time"
    else:
        verdict = "front" if full.candidate.key in front else ""
    return Row(
        full.candidate, way.runs_in, True, full.rate, full.p50_s, full.p99_s, full.memory_bytes, way.accuracy,
        verdict, full.is_cut,
    )  # fmt: skip


def _quick_row(space: Space, known: TuneResults, quick: QuickLook) -> Row:
    way = known.ways[quick.candidate.way]
    verdict = quick.reason or _why_not(space, known, quick)
    return Row(
        quick.candidate, way.runs_in, False, quick.rate, quick.alone_s, quick.p99_s, quick.memory_bytes,
        way.accuracy, verdict,
    )  # fmt: skip


def _why_not(space: Space, known: TuneResults, quick: QuickLook) -> str:
    way = known.ways[quick.candidate.way]
    if not is_eligible(way, space.drop):
        if way.accuracy is None or not space.drop:
            return "not exact"
        is_blind = way.accuracy.drop <= space.drop
        return "the inputs cannot tell" if is_blind else f"gives up {way.accuracy.drop:.2%}"
    if quick.alone_s > space.objective.limit_s:
        return "one request alone takes longer"
    return "" if quick.slices else "not measured yet"


def _left_out(space: Space, known: TuneResults, choice: FullMeasurement | None) -> tuple[str, ...]:
    """Precisions that are quicker than the choice and give up some accuracy."""
    chosen = None if choice is None else known.quick.get(choice.candidate)
    if space.drop > 0 or chosen is None:
        return ()
    looks = [each for each in known.quick.values() if not each.reason and each.rate > chosen.rate]
    inexact = [each for each in looks if not is_eligible(known.ways.get(each.candidate.way), space.drop)]
    return tuple(dict.fromkeys(known.ways[each.candidate.way].runs_in for each in inexact))


def _failed_row(way: WayResult) -> Row:
    return Row(Candidate(way.way), way.runs_in, False, 0.0, 0.0, 0.0, 0, way.accuracy, way.reason)


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    way, layout = candidate.way, candidate.layout
    return {
        "backend": way.backend,
        "device": way.device,
        "precision": way.precision,
        "threads": layout.threads,
        "instances": layout.instances,
        "max_batch_rows": layout.max_batch_rows,
    }


def _row_json(row: Row) -> Mapping[str, Any]:
    accuracy = row.accuracy
    return {
        **_candidate_json(row.candidate),
        "runs_in": row.runs_in,
        "at_objective": row.is_full,
        "rate": round(row.rate, 2),
        "p50_ms": round(row.p50_s * 1e3, 4) or None,  # None: not measured
        "p99_ms": round(row.p99_s * 1e3, 4) or None,
        "memory_bytes": row.memory_bytes,
        "accuracy": None
        if accuracy is None
        else {name: getattr(accuracy, name) for name in (*accuracy.__struct_fields__, "drop")},
        "verdict": row.verdict,
        "of_choice": None if row.of_choice is None else [round(each, 4) for each in row.of_choice],
        "rounds": row.rounds,
        "is_now": row.is_now,
        "is_cut": row.is_cut,
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"
