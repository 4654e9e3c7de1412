"""What tells a good copy of a model from an answer that ignores its input: distinct answers, error against spread."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.tensors import Array
from edge_runtime.tuning.variation import Doubles, Variation


def varied(wanted: Doubles, got: Doubles, run_rows: int = 100) -> Variation:
    found = Variation()
    for start in range(0, len(wanted), run_rows):
        found.add_values(wanted[start : start + run_rows], got[start : start + run_rows])
    return found


def noise(*shape: int, seed: int = 0) -> Doubles:
    return np.random.default_rng(seed).standard_normal(shape)


def test_the_best_constant_answer_has_an_error_of_the_whole_spread() -> None:
    wanted = 300 + noise(50, 4)
    found = varied(wanted, np.broadcast_to(wanted.mean(axis=0), wanted.shape))
    assert found.error == pytest.approx(1)
    assert 0.002 < found.spread < 0.01, "of the largest magnitude, which hides the error"


def test_an_error_that_is_small_beside_the_magnitude_may_be_most_of_the_spread() -> None:
    wanted = 300 + noise(200, 4)
    got = 300 + 0.64 * (wanted - 300) + np.sqrt(1 - 0.64**2) * noise(200, 4, seed=1)  # correlates 0.64
    assert np.abs(got - wanted).mean() / np.abs(wanted).max() < 0.003
    found = varied(wanted, got).error
    assert found is not None
    assert found > 0.7


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([0.0, 1.0, 1e6]))
def test_runs_of_any_length_make_the_same_figures(rows: int, run_rows: int, offset: float) -> None:
    wanted = offset + noise(rows, 3)
    got = wanted + 0.1 * noise(rows, 3, seed=1)
    apart, together = varied(wanted, got, run_rows), varied(wanted, got)
    assert apart.spread == pytest.approx(together.spread, rel=1e-6)
    if rows > 1:
        expected = np.sqrt(np.square(got - wanted).sum() / np.square(wanted - wanted.mean(axis=0)).sum())
        if together.spread:
            assert together.error == pytest.approx(expected, rel=1e-5)
            assert apart.error == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "rows", [np.zeros((5, 2)), np.full((5, 2), 7.0), np.ones((1, 3)), np.zeros((4, 0)), noise(0, 3)]
)
def test_answers_that_do_not_differ_have_no_spread_and_no_error(rows: Doubles) -> None:
    found = varied(rows, rows + 1)
    assert (found.spread, found.error) == (0, None)


def test_rounding_is_not_a_spread() -> None:
    rows = 5 + 1e-7 * noise(10, 3)
    assert varied(rows, rows).error is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200])
def test_a_value_that_is_not_a_number_or_beyond_all_is_infinitely_far(bad: float) -> None:
    wanted = noise(4, 2)
    got = wanted.copy()
    got[0, 0] = bad
    assert (varied(wanted, got).error or 0) > 1e100


def test_values_that_are_not_numbers_in_the_model_do_not_count() -> None:
    wanted = noise(4, 2)
    wanted[0, 0], wanted[1, 1] = np.nan, -np.inf
    assert varied(wanted, wanted).error == 0


def test_rows_of_other_shapes_are_compared_where_all_have_values() -> None:
    found = Variation()
    for length in (3, 5, 2):
        rows = noise(4, length, 2, seed=length)
        found.add_values(rows, rows)
    assert found.spread > 0
    assert found.error == 0


@pytest.mark.parametrize(
    ("answers", "distinct", "commonest"),
    [
        (np.array([3, 3, 3, 3]), 1, 1.0),
        (np.array([1, 2, 3, 3]), 3, 0.5),
        (np.array([b"cat", b"dog", b"cat", b"cat"], object), 2, 0.75),
        (np.array([["a", "b"], ["a", "b"], ["b", "a"], ["a", "b"]], object), 2, 0.75),
        (np.array([[True, False], [True, True], [True, False], [False, False]]), 3, 0.5),
    ],
)
def test_distinct_answers_and_the_commonest_are_counted(answers: Array, distinct: int, commonest: float) -> None:
    found = Variation()
    found.add_answers(answers[:1])
    found.add_answers(answers[1:])
    assert (found.distinct, found.commonest) == (distinct, commonest)
