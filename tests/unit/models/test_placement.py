"""Who leaves so that another fits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.models.placement import Resident, plan_eviction


def resident(name, memory, used, pinned=False):
    return Resident(name, 1, memory, used, pinned)


def test_nobody_leaves_while_there_is_room():
    assert plan_eviction([resident("a", 40, 1.0)], 60, 100).leave == ()


def test_the_least_recently_used_leaves_first():
    plan = plan_eviction([resident("new", 40, 9.0), resident("old", 40, 1.0)], 50, 100)

    assert [each.model for each in plan.leave] == ["old"]
    assert plan.missing_bytes == 0


def test_pinned_models_stay_even_when_they_are_oldest():
    plan = plan_eviction([resident("pinned", 40, 0.0, pinned=True), resident("other", 40, 5.0)], 50, 100)

    assert [each.model for each in plan.leave] == ["other"]


def test_nobody_leaves_for_nothing():
    plan = plan_eviction([resident("pinned", 90, 0.0, pinned=True), resident("other", 10, 5.0)], 50, 100)

    assert plan.leave == ()
    assert plan.missing_bytes == 40


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0, 9), st.booleans()), max_size=8),
    st.integers(1, 120),
    st.integers(1, 200),
)
def test_an_eviction_makes_exactly_enough_room_and_spares_the_pinned(items, wanted, budget):
    residents = [resident(f"m{i}", *item) for i, item in enumerate(items)]

    plan = plan_eviction(residents, wanted, budget)

    assert not any(each.is_pinned for each in plan.leave)
    stay = sum(each.memory_bytes for each in residents if each not in plan.leave)
    if plan.missing_bytes == 0:
        assert stay + wanted <= budget
        if plan.leave:
            assert stay + plan.leave[-1].memory_bytes + wanted > budget, "the last to leave was needed"
    else:
        assert plan.leave == ()
        pinned = sum(each.memory_bytes for each in residents if each.is_pinned)
        assert pinned + wanted > budget
