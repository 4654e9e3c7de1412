"""A tune's report on each way to serve: looks are compared with looks, and what nothing was allowed for is named."""

from __future__ import annotations

import io
import re

import pytest

from edge_runtime.cli.screen import Screen
from edge_runtime.tuning.candidates import MEASURED, PLAIN, Candidate, ThreadLayout, Way
from edge_runtime.tuning.command import print_table
from edge_runtime.tuning.options import Objective
from edge_runtime.tuning.plan import Space
from edge_runtime.tuning.report import Summary, accuracy_text, as_json, confidence_text, reasons, summarise
from edge_runtime.tuning.results import Accuracy, FullMeasurement, QuickLook, Slice, TuneResults, WayResult

AS_IT_IS, INT8 = Way("onnxruntime", "CPU", PLAIN), Way("openvino", "CPU", "int8")


def look_of(candidate: Candidate, rate: float, rounds: int = 10) -> QuickLook:
    """A candidate after so many calm rounds of the race."""
    slices = tuple(Slice(number, rate) for number in range(1, rounds + 1))
    return QuickLook(candidate, "", 0.001, rate, slices=slices)


def told(look: float, int8_look: float, *, drop: float, measured: Way | None = AS_IT_IS) -> Summary:
    """Two ways with these looks, of which one, or none, was measured at the objective; int8 differs a little."""
    known = TuneResults({}, {}, {})
    for way, rate in ((AS_IT_IS, look), (INT8, int8_look)):
        accuracy = Accuracy(100, 0.01, 0.001, agreement=0.999 if way is INT8 else 1.0)
        known.ways[way] = WayResult(way, "", way.precision or "f32", "", accuracy)
        known.quick[Candidate(way)] = look_of(Candidate(way), rate)
    if measured is not None:
        candidate = Candidate(measured)
        known.full[candidate] = FullMeasurement(candidate, "", 0.5 * known.quick[candidate].rate, 0.01, 0.02, 1)
    return summarise(Space((AS_IT_IS, INT8), 2, 1, Objective(0.99, 0.05), drop), known)


def test_a_row_says_how_it_compares_with_the_choice_and_after_how_many_rounds() -> None:
    (chosen, other) = told(3000.0, 2000.0, drop=0.01).rows
    assert (chosen.verdict, chosen.of_choice, chosen.is_now) == ("chosen", None, True)
    low, high = other.of_choice or (0.0, 0.0)
    assert low < 2 / 3 < high
    assert high - low < 0.1
    assert other.rounds == 10


def test_a_settled_choice_is_written_and_says_how_sure_it_is() -> None:
    known = TuneResults({}, {}, {})
    known.ways[AS_IT_IS] = WayResult(AS_IT_IS, "", "f32", "", Accuracy(100, 0, 0, agreement=1.0))
    for layout, rate in ((MEASURED, 3000.0), (ThreadLayout(1, 1), 2000.0)):
        known.quick[Candidate(AS_IT_IS, layout)] = look_of(Candidate(AS_IT_IS, layout), rate)
    known.full[Candidate(AS_IT_IS)] = FullMeasurement(Candidate(AS_IT_IS), "", 2500.0, 0.01, 0.02, 1)
    summary = summarise(Space((AS_IT_IS,), 1, 1, Objective(0.99, 0.05), 0.0), known)
    assert summary.is_settled
    assert summary.doubt() == ""
    assert summary.confidence > 0.9
    assert confidence_text(summary).startswith("confidence 100% that nothing tried serves over 3% more")


def test_a_search_that_is_not_over_is_not_written_unless_asked() -> None:
    known = TuneResults({}, {}, {})
    candidate = Candidate(AS_IT_IS)
    known.ways[AS_IT_IS] = WayResult(AS_IT_IS, "", "f32", "", Accuracy(100, 0, 0, agreement=1.0))
    known.quick[candidate] = look_of(candidate, 100.0, rounds=1)
    known.full[candidate] = FullMeasurement(candidate, "", 90.0, 0.01, 0.02, 1)
    summary = summarise(Space((AS_IT_IS, INT8), 2, 1, Objective(0.99, 0.05), 0.01), known)
    assert summary.choice is not None
    assert (summary.is_settled, summary.confidence) == (False, 0.0)
    assert "--write-anyway" in summary.doubt()
    assert "not settled" in confidence_text(summary)


def test_a_choice_that_serves_less_than_what_may_stay_is_worse() -> None:
    """As a search cut short has it: what serves now was not measured at the objective."""
    known = TuneResults({}, {}, {})
    for way, rate in ((AS_IT_IS, 100.0), (INT8, 300.0)):
        known.ways[way] = WayResult(way, "", way.precision or "f32", "", Accuracy(100, 0.01, 0.001, agreement=1.0))
        known.quick[Candidate(way)] = look_of(Candidate(way), rate)
    known.full[Candidate(AS_IT_IS)] = FullMeasurement(Candidate(AS_IT_IS), "", 90.0, 0.01, 0.02, 1)
    for drop, is_worse in ((1.0, True), (0.0, False)):
        summary = summarise(Space((AS_IT_IS, INT8), 2, 1, Objective(0.99, 0.05), drop, Candidate(INT8)), known)
        assert summary.is_worse is is_worse
        assert summary.over_now == pytest.approx(1 / 3)
        assert summary.doubt()
        assert ("what model.toml says now serves more" in summary.doubt()) is is_worse


def test_a_choice_is_not_written_before_what_serves_now_was_looked_at() -> None:
    known = TuneResults({}, {}, {})
    candidate = Candidate(AS_IT_IS)
    known.ways[AS_IT_IS] = WayResult(AS_IT_IS, "", "f32", "", Accuracy(100, 0, 0, agreement=1.0))
    known.quick[candidate] = look_of(candidate, 100.0, rounds=0)
    known.full[candidate] = FullMeasurement(candidate, "", 90.0, 0.01, 0.02, 1)
    summary = summarise(Space((AS_IT_IS, INT8), 2, 1, Objective(0.99, 0.05), 0.01, Candidate(INT8)), known)
    assert summary.is_worse
    assert "not looked at yet" in summary.doubt()


def test_a_precision_that_looked_quicker_and_could_not_be_chosen_is_named() -> None:
    assert told(2000.0, 3000.0, drop=0.0).left_out == ("int8",)


@pytest.mark.parametrize(("int8_look", "drop"), [(1000.0, 0.0), (3000.0, 0.01)])
def test_a_precision_that_looked_slower_or_could_be_chosen_is_not_named_as_left_out(
    int8_look: float, drop: float
) -> None:
    assert told(2000.0, int8_look, drop=drop).left_out == ()


@pytest.mark.parametrize(("is_cut", "told_as"), [(True, "at least 1,000.0 requests/s"), (False, "1,000.0 requests/s")])
def test_a_rate_whose_search_was_cut_short_is_reported_as_a_least_one(is_cut: bool, told_as: str) -> None:
    way = WayResult(AS_IT_IS, "", "f32", "", Accuracy(100, 0.0, 0.0, agreement=1.0))
    full = FullMeasurement(Candidate(AS_IT_IS), "", 1000.0, 0.01, 0.02, 1, is_cut=is_cut)
    candidate = Candidate(AS_IT_IS)
    known = TuneResults({AS_IT_IS: way}, {candidate: look_of(candidate, 1000.0)}, {candidate: full})
    summary = summarise(Space((AS_IT_IS,), 2, 1, Objective(0.99, 0.05), 0.0), known)
    words = reasons(summary, known, Objective(0.99, 0.05), device="a board", data="48 inputs", date="2026-11-22")
    assert words[1].startswith(f"{told_as} within p99=50ms")


def test_a_latency_that_was_not_measured_is_a_dash_and_no_zero() -> None:
    known = TuneResults({}, {}, {})
    for way, slices in ((AS_IT_IS, (Slice(1, 90.0), Slice(2, 80.0, 0.02))), (INT8, ())):
        known.ways[way] = WayResult(way, "", way.precision or "f32", "", Accuracy(100, 0.0, 0.0, agreement=1.0))
        known.quick[Candidate(way)] = QuickLook(Candidate(way), "", 0.001, 100.0, slices=slices)
    space = Space((AS_IT_IS, INT8), 2, 1, Objective(0.99, 0.05), 0.0)
    summary = summarise(space, known)
    told = {row["precision"]: row["p99_ms"] for row in as_json(summary, space)["rows"]}
    assert told == {"": 20.0, "int8": None}
    out = io.StringIO()
    print_table(summary, Screen(out, io.StringIO()))
    head, *lines = (re.split(r"\s{2,}", line.strip()) for line in out.getvalue().splitlines()[:3])
    assert sorted(line[head.index("p99 ms")] for line in lines) == ["-", "20.0"]


def blind(*, is_accepted: bool, error: float = 0.77) -> tuple[Summary, TuneResults]:
    """Two ways on inputs that the model as it is answers alike; int8 looked quicker."""
    known = TuneResults({}, {}, {})
    accuracy = Accuracy(
        48, 0.02, 0.01, agreement=1.0, distinct=1, spread_error=error, constant_drop=0.0, is_accepted=is_accepted
    )
    for way, rate in ((AS_IT_IS, 100.0), (INT8, 300.0)):
        known.ways[way] = WayResult(way, "", way.precision or "f32", "", accuracy)
        known.quick[Candidate(way)] = look_of(Candidate(way), rate)
    chosen = Candidate(INT8 if is_accepted else AS_IT_IS)
    known.full[chosen] = FullMeasurement(chosen, "", 90.0, 0.01, 0.02, 1)
    return summarise(Space((AS_IT_IS, INT8), 2, 1, Objective(0.99, 0.05), 0.005), known), known


def test_inputs_that_cannot_show_accuracy_leave_a_precision_out_and_say_what_to_do() -> None:
    summary, _ = blind(is_accepted=False)
    (row,) = [row for row in summary.rows if row.candidate.way is INT8]
    assert row.verdict == "the inputs cannot tell"
    assert accuracy_text(row.accuracy) == "1 answer, agrees on 100.00%, error 0.77 of spread"
    assert "one and the same answer to all 48 inputs would lose 0.00% only" in summary.unjudged
    assert "gives 1 answer)" in summary.unjudged
    assert "int8 left out" in summary.unjudged
    assert "--accept-unjudged" in summary.unjudged


def test_a_loss_that_inputs_cannot_show_is_accepted_by_name_only_and_the_reasons_say_so() -> None:
    summary, known = blind(is_accepted=True)
    assert summary.choice is not None
    assert summary.choice.candidate.way is INT8
    assert "int8 accepted all the same, as asked" in summary.unjudged
    words = reasons(summary, known, Objective(0.99, 0.05), device="a board", data="48 inputs", date="2026-11-22")
    assert words[-1].endswith("(48 inputs, which cannot tell how much is given up)")


def test_values_that_follow_are_named_as_what_judged() -> None:
    summary, _ = blind(is_accepted=False, error=0.05)
    assert summary.unjudged.endswith("so that agreement tells nothing: int8 judged by the values, which follow")
    assert "the inputs cannot tell" not in {row.verdict for row in summary.rows}


def test_inputs_that_can_show_accuracy_say_nothing_of_it() -> None:
    assert told(2000.0, 3000.0, drop=0.01).unjudged == ""


def test_a_row_of_the_front_says_what_it_has_over_the_choice() -> None:
    known = TuneResults({}, {}, {})
    for way, drop, memory in ((AS_IT_IS, 0.0, 5), (INT8, 0.004, 9)):
        known.ways[way] = WayResult(way, "", way.precision, "", Accuracy(100, 0, 0, agreement=1 - drop))
        rate = 200.0 if way is INT8 else 100.0
        known.quick[Candidate(way)] = look_of(Candidate(way), rate)
        known.full[Candidate(way)] = FullMeasurement(Candidate(way), "", rate, 0.01, 0.02, memory)
    summary = summarise(Space((AS_IT_IS, INT8), 2, 1, Objective(0.99, 0.05), 0.005), known)
    assert [row.verdict for row in summary.rows] == ["chosen", "front"]
    assert summary.merits_of(summary.rows[1]) == "more exact, less memory"


def test_the_best_of_each_precision_and_what_serves_now_are_always_shown() -> None:
    known = TuneResults({}, {}, {})
    bf16, f16 = Way("openvino", "CPU", "bf16"), Way("openvino", "CPU", "f16")
    rates = {AS_IT_IS: 10.0, INT8: 300.0, bf16: 20.0, f16: 5.0}
    for way, rate in rates.items():
        known.ways[way] = WayResult(way, "", way.precision or "f32", "", Accuracy(9, 0, 0, agreement=1.0))
        for threads in (1, 2, 3):
            candidate = Candidate(way, ThreadLayout(threads, 1))
            known.quick[candidate] = look_of(candidate, rate - threads)
    now = Candidate(f16, ThreadLayout(3, 1))
    shown = summarise(Space(tuple(rates), 2, 1, Objective(0.99, 0.05), 1.0, now), known).raced_rows(2)
    assert [(row.runs_in, row.candidate.layout.threads) for row in shown] == [
        ("int8", 1), ("int8", 2), ("bf16", 1), ("f32", 1), ("f16", 1), ("f16", 3),
    ]  # fmt: skip
