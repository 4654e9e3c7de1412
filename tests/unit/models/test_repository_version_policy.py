"""Which versions are served: a table of every rule, and what holds for all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.config.settings import Versions
from edge_runtime.models.folder import select_versions

NUMBERS = st.sets(st.integers(1, 50), max_size=12)
POLICIES = st.one_of(
    st.builds(Versions, latest=st.none() | st.integers(1, 20)),
    st.builds(Versions, all=st.booleans()),
    st.builds(Versions, specific=st.lists(st.integers(1, 50), max_size=6).map(tuple)),
)


@pytest.mark.parametrize(
    ("available", "policy", "selected"),
    [
        ([], Versions(), ()),
        ([1], Versions(), (1,)),
        ([1, 2, 10], Versions(), (10,)),
        ([10, 2, 1], Versions(latest=2), (10, 2)),
        ([1, 2], Versions(latest=5), (2, 1)),
        ([3, 1, 2], Versions(all=True), (3, 2, 1)),
        ([], Versions(all=True), ()),
        ([1, 2, 3], Versions(specific=(1, 3)), (3, 1)),
        ([1, 2, 3], Versions(specific=(3, 1, 3)), (3, 1)),
        ([1, 2], Versions(specific=(2, 7, 9)), (2,)),
        ([1, 2], Versions(specific=(7,)), ()),
        ([], Versions(specific=(7,)), ()),
        ([2, 2, 1], Versions(latest=2), (2, 1)),
    ],
)
def test_the_policy_selects(available: list[int], policy: Versions, selected: tuple[int, ...]) -> None:
    assert select_versions(available, policy) == selected


@given(NUMBERS, POLICIES)
def test_only_versions_that_are_there_are_selected_newest_first_and_once(available: set[int], policy: Versions) -> None:
    selected = select_versions(available, policy)
    assert set(selected) <= available
    assert list(selected) == sorted(set(selected), reverse=True)


@given(NUMBERS, st.integers(1, 20))
def test_the_latest_are_never_older_than_one_left_out(available: set[int], latest: int) -> None:
    selected = set(select_versions(available, Versions(latest=latest)))
    assert len(selected) == min(latest, len(available))
    assert all(kept > left for kept in selected for left in available - selected)
