"""When a device looks for updates: by the clock, when woken, and never too often."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.updates.worker import Schedule

SHARE = st.floats(0, 1)


def schedule(**changes: float) -> Schedule:
    values = {"poll_s": 3600.0, "poll_jitter": 0.2, "wake_jitter_s": 10.0, "min_check_s": 30.0, "due_s": 1000.0}
    return Schedule(**{**values, **changes})


def test_after_a_look_the_next_is_due_after_the_interval_more_or_less() -> None:
    each = schedule()
    for share, due_s in ((0.0, 2880.0), (0.5, 3600.0), (1.0, 4320.0)):
        each.looked(0.0, share)
        assert each.due_s == due_s


def test_a_woken_device_looks_within_the_jitter() -> None:
    each = schedule()
    each.woken(0.0, 0.5)
    assert each.due_s == 5.0


def test_waking_never_puts_a_look_off() -> None:
    each = schedule(due_s=1.0)
    each.woken(0.0, 0.9)
    assert each.due_s == 1.0


@given(st.lists(st.tuples(st.floats(0, 5), SHARE), max_size=50), SHARE)
def test_however_often_it_is_woken_it_looks_at_most_once_in_the_least_interval(
    wakes: list[tuple[float, float]], share: float
) -> None:
    each = schedule()
    each.looked(0.0, share)
    now_s = 0.0
    for wait_s, jitter in wakes:
        now_s += wait_s
        each.woken(now_s, jitter)
        assert each.due_s >= 30.0
