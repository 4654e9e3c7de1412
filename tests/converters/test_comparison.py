"""How far two models' answers are apart, and when that is too far."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edge_runtime.errors import ConversionFailed
from edge_runtime.tensors import Array
from edge_runtime_converters.comparison import TOLERANCES, Comparison, OutputComparison, tolerance_of


def compared(wanted: list[Array], got: list[Array], labels: Array | None = None) -> Comparison:
    found = Comparison([OutputComparison(f"output_{place}") for place in range(len(got))])
    found.add(wanted, got, labels, len(got[0]))
    return found


@given(arrays(np.float32, (4, 3), elements=st.floats(-1e6, 1e6, width=32)))
def test_a_model_agrees_with_itself_in_every_precision(values: Array) -> None:
    for tolerance in TOLERANCES.values():
        assert compared([values], [values.copy()]).faults(tolerance) == []


@given(
    arrays(np.float32, (4, 3), elements=st.floats(-100, 100, width=32)),
    st.integers(0, 11),
    st.floats(0.01, 10),
)
def test_one_value_further_off_than_allowed_is_a_fault_in_fp32(values: Array, place: int, distance: float) -> None:
    values.flat[0] = 100
    other = values.copy()
    other.flat[place] += np.float32(distance * 100)
    assert compared([values], [other]).faults(TOLERANCES["fp32"])


def test_errors_are_shares_of_the_largest_magnitude_over_all_runs() -> None:
    output = OutputComparison("scores")
    output.add(np.array([[1.0, 0.0]]), np.array([[1.5, 0.0]]), 1)
    output.add(np.array([[-10.0, 0.0]]), np.array([[-10.0, 0.0]]), 1)
    assert output.max_error == pytest.approx(0.05)
    assert output.mean_error == pytest.approx(0.5 / 4 / 10)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_a_number_is_infinitely_far(bad: float) -> None:
    found = compared([np.array([[1.0, 2.0]])], [np.array([[1.0, bad]])])
    for precision in TOLERANCES:
        assert found.faults(tolerance_of(precision, 1.0))


def test_values_that_are_not_numbers_in_both_are_the_same() -> None:
    values = np.array([[np.nan, np.inf, 1.0]])
    assert compared([values], [values.copy()]).outputs[0].max_error == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_answers_of_which_none_is_a_number_are_not_a_comparison(bad: float) -> None:
    values = np.full((2, 3), bad)
    (fault,) = compared([values], [values.copy()]).faults(TOLERANCES["fp32"])
    assert "compare on other data" in fault


def test_an_output_of_zeros_that_stays_zero_has_no_error() -> None:
    assert compared([np.zeros((2, 2))], [np.zeros((2, 2))]).faults(TOLERANCES["fp32"]) == []


def test_int8_is_judged_by_the_mean_and_by_answers() -> None:
    wanted = np.tile(np.array([[1.0, 0.0]]), (100, 1))
    one_off = wanted.copy()
    one_off[0] = (0.6, 0.4)
    assert compared([wanted], [one_off]).faults(TOLERANCES["int8"]) == []
    assert compared([wanted], [one_off]).faults(TOLERANCES["fp32"]) != []
    many_other = wanted.copy()
    many_other[:10] = (0.4, 0.6)
    assert "10 of 100 rows" in compared([wanted], [many_other]).faults(TOLERANCES["int8"])[-1]


def test_with_labels_accuracy_decides_instead_of_agreement() -> None:
    labels = np.arange(200) % 2
    wanted = np.eye(2)[labels]
    one_wrong, two_wrong = wanted.copy(), wanted.copy()
    one_wrong[:1] = one_wrong[:1, ::-1]
    two_wrong[:2] = two_wrong[:2, ::-1]
    assert compared([wanted], [one_wrong], labels).faults(TOLERANCES["int8"]) == []
    (fault,) = compared([wanted], [two_wrong], labels).faults(TOLERANCES["int8"])
    assert "from 100.00% to 99.00%" in fault


def test_other_labels_are_reported_as_rows() -> None:
    wanted = np.array(["a", "b", "a"], object)
    found = compared([wanted], [np.array(["a", "b", "b"], object)])
    assert found.outputs[0].disagreement == pytest.approx(1 / 3)
    assert found.faults(TOLERANCES["fp32"])


def test_another_shape_or_number_of_outputs_is_an_error() -> None:
    with pytest.raises(ConversionFailed, match=r"\[1, 2\]"):
        compared([np.zeros((1, 3))], [np.zeros((1, 2))])
    with pytest.raises(ConversionFailed, match="2 outputs"):
        compared([np.zeros((1, 3)), np.zeros(1)], [np.zeros((1, 3))])


def test_labels_without_an_output_that_says_a_class_are_an_error() -> None:
    with pytest.raises(ConversionFailed, match="leave --labels out"):
        compared([np.zeros((2, 1))], [np.zeros((2, 1))], np.zeros(2, int))


def test_a_tolerance_that_is_said_replaces_every_bound() -> None:
    wanted, got = np.array([[1.0, 0.0]]), np.array([[0.9, 0.0]])
    assert compared([wanted], [got]).faults(tolerance_of("fp32", 0.2)) == []
    assert compared([wanted], [got]).faults(tolerance_of("fp32", 0.01)) != []


# ---- data that cannot judge -----------------------------------------------------------------------------------------

RANDOM = np.random.default_rng(0)
OF_ONE_CLASS = np.array([5.0, 1.0, 1.0]) + 0.05 * RANDOM.standard_normal((64, 3))
"""Scores of which the first is the highest in all rows: their spread is 0.01 of the largest magnitude."""


def correlating(values: Array, share: float) -> Array:
    """Values that correlate with the given ones by a share, and vary as much."""
    mean, spread = values.mean(axis=0), values.std(axis=0)
    noise = spread * np.sqrt(1 - share**2) * RANDOM.standard_normal(values.shape)
    found: Array = mean + share * (values - mean) + noise
    return found


@pytest.mark.parametrize(
    "got", [np.broadcast_to(OF_ONE_CLASS.mean(axis=0), OF_ONE_CLASS.shape), correlating(OF_ONE_CLASS, 0.64)]
)
def test_an_answer_that_does_not_follow_its_input_is_not_called_good_for_agreeing_on_one_class(got: Array) -> None:
    found = compared([OF_ONE_CLASS], [got])
    (output,) = found.outputs
    assert (output.disagreement, output.variation.distinct) == (0.0, 1)
    assert output.mean_error < 0.02
    assert found.faults(TOLERANCES["int8"]) == []
    (refusing,), others = found.unjudged(TOLERANCES["int8"])
    assert "the source gives 1 answer to 64 rows" in refusing
    assert "of spread" in refusing
    assert others == []


def test_values_that_follow_stand_in_for_answers_that_show_nothing() -> None:
    found = compared([OF_ONE_CLASS], [correlating(OF_ONE_CLASS, 0.999)])
    assert found.faults(TOLERANCES["int8"]) == []
    refusing, (note,) = found.unjudged(TOLERANCES["int8"])
    assert refusing == []
    assert "one answer to all rows" in note


@pytest.mark.parametrize(("other", "is_judged"), [(2, False), (20, True)])
def test_answers_judge_only_where_the_commonest_one_alone_would_be_too_far(other: int, is_judged: bool) -> None:
    labels = np.array([0] * (100 - other) + [1] * other)
    found = compared([labels], [labels.copy()])
    refusing, _ = found.unjudged(TOLERANCES["int8"])
    assert (refusing == []) is is_judged
    assert is_judged or "98.0% of them the same" in refusing[0]


def test_labels_of_one_class_judge_nothing() -> None:
    constant = np.broadcast_to(OF_ONE_CLASS.mean(axis=0), OF_ONE_CLASS.shape)
    found = compared([OF_ONE_CLASS], [constant], np.zeros(64, int))
    assert found.accuracies == (1.0, 1.0)
    assert found.unjudged(TOLERANCES["int8"])[0]


def test_values_without_classes_must_follow_the_source() -> None:
    wanted = 10 * RANDOM.standard_normal((64, 1))
    assert compared([wanted], [correlating(wanted, 0.999)]).faults(TOLERANCES["int8"]) == []
    assert "of spread; allowed 0.2" in compared([wanted], [0.7 * wanted]).faults(tolerance_of("int8", None))[-1]
    hidden = 300 + RANDOM.standard_normal((64, 1))
    got = correlating(hidden, 0.5)
    assert compared([hidden], [got]).faults(TOLERANCES["int8"]) == []
    (refusing,), _ = compared([hidden], [got]).unjudged(TOLERANCES["int8"])
    assert "differ by 0.003" in refusing
    assert "a mean error of 0.05 is allowed" in refusing


def test_an_output_that_never_differs_refuses_only_where_no_other_is_judged() -> None:
    priors, boxes = np.ones((64, 4)), 10 * RANDOM.standard_normal((64, 1))
    refusing, (told,) = compared([priors, boxes], [priors, boxes]).unjudged(TOLERANCES["fp32"])
    assert refusing == []
    assert told.startswith("output_0: cannot be judged")
    (refused,), _ = compared([priors], [priors]).unjudged(TOLERANCES["fp32"])
    assert "1 answer to 64 rows" in refused


def test_one_row_judges_nothing_and_an_output_without_rows_is_one_answer_a_run() -> None:
    assert compared([np.array([[1.0, 2.0]])], [np.array([[1.0, 2.0]])]).unjudged(TOLERANCES["fp32"])[0]
    found = Comparison([OutputComparison("count"), OutputComparison("boxes")])
    for count in (3, 1, 0):
        boxes = np.arange(4.0 * count).reshape(count, 4)
        found.add([np.array(count), boxes], [np.array(count), boxes], None, 8)
    assert found.outputs[0].variation.distinct == 3
    assert found.outputs[1].rows == 0 or found.outputs[1].variation.spread > 0
    assert found.unjudged(TOLERANCES["fp32"])[0] == []


@given(arrays(np.float64, (6, 3), elements=st.floats(-1e3, 1e3)), st.sampled_from(sorted(TOLERANCES)))
def test_no_constant_answer_is_ever_called_good(values: Array, precision: str) -> None:
    constant = np.broadcast_to(values.mean(axis=0), values.shape)
    found = compared([values], [constant])
    assert found.faults(TOLERANCES[precision]) or found.unjudged(TOLERANCES[precision])[0]
