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
    output.add(np.array([[1.0, 0.0]]), np.array([[1.5, 0.0]]))
    output.add(np.array([[-10.0, 0.0]]), np.array([[-10.0, 0.0]]))
    assert output.max_error == pytest.approx(0.05)
    assert output.mean_error == pytest.approx(0.5 / 4 / 10)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_no_number_is_infinitely_far(bad: float) -> None:
    found = compared([np.array([[1.0, 2.0]])], [np.array([[1.0, bad]])])
    for precision in TOLERANCES:
        assert found.faults(tolerance_of(precision, 1.0))


def test_values_that_are_no_numbers_in_both_are_the_same() -> None:
    values = np.array([[np.nan, np.inf, 1.0]])
    assert compared([values], [values.copy()]).outputs[0].max_error == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_answers_of_which_none_is_a_number_are_no_comparison(bad: float) -> None:
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


def test_other_labels_are_told_as_rows() -> None:
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
