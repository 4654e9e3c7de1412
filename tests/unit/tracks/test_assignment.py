"""Pairs of the largest weight, beside every possible pairing."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.tracks.assignment import ALONE, heaviest_pairs

pytestmark = pytest.mark.long  # it is about numbers, whatever the Python

LEVELS = st.one_of(st.floats(-1, 1, width=16), st.sampled_from((-0.5, 0.0, 0.25, 0.5, 0.5)))


def heaviest(weights: np.ndarray) -> float:
    """The largest sum, by trying all pairings."""
    rows, columns = weights.shape
    padded = np.zeros((rows, columns + rows))
    padded[:, :columns] = np.maximum(weights, 0)
    ways = permutations(range(columns + rows), rows)
    return max(sum(padded[row, column] for row, column in enumerate(way)) for way in ways)


def weight_of(weights: np.ndarray, partners: np.ndarray) -> float:
    return float(sum(weights[row, column] for row, column in enumerate(partners) if column != ALONE))


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_no_other_pairs_weigh_more(rows: int, columns: int, data: st.DataObject) -> None:
    listed = data.draw(st.lists(LEVELS, min_size=rows * columns, max_size=rows * columns))
    weights = np.array(listed, np.float64).reshape(rows, columns)
    partners = heaviest_pairs(weights)
    taken = [column for column in partners if column != ALONE]
    assert len(taken) == len(set(taken))
    assert all(weights[row, column] > 0 for row, column in enumerate(partners) if column != ALONE)
    assert weight_of(weights, partners) == pytest.approx(heaviest(weights))


def test_two_that_want_the_same_share_what_is_best_for_both() -> None:
    weights = np.array([[0.9, 0.8], [0.85, 0.1]])
    assert heaviest_pairs(weights).tolist() == [1, 0]


def test_a_row_stays_alone_where_any_pair_costs_more_than_it_gives() -> None:
    weights = np.array([[0.9, -1.0], [0.2, -1.0]])
    assert heaviest_pairs(weights).tolist() == [0, ALONE]


def test_a_large_crowd_is_paired_exactly() -> None:
    """Whose best pairs are known: a permutation that outweighs all others."""
    places = np.random.default_rng(3)
    order = places.permutation(200)
    weights = places.uniform(0, 0.5, (200, 200))
    weights[np.arange(200), order] += 0.5
    assert heaviest_pairs(weights).tolist() == order.tolist()


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_nothing_is_paired_with_nothing(shape: tuple[int, int]) -> None:
    assert heaviest_pairs(np.zeros(shape)).tolist() == [ALONE] * shape[0]
