"""A request seen within the window is not a new one; the memory of them is bounded."""

from __future__ import annotations

from edge_runtime.doors.mqtt.frontend import Duplicates


def test_a_key_is_new_once_within_the_window() -> None:
    seen = Duplicates(window_s=60.0)
    assert seen.is_new("a", 0.0)
    assert not seen.is_new("a", 59.9)
    assert seen.is_new("a", 60.0)


def test_a_duplicate_does_not_lengthen_its_window() -> None:
    seen = Duplicates(window_s=60.0)
    assert seen.is_new("a", 0.0)
    assert not seen.is_new("a", 50.0)
    assert seen.is_new("a", 70.0)


def test_a_refused_request_may_come_again() -> None:
    seen = Duplicates()
    assert seen.is_new("a", 0.0)
    seen.forget("a")
    assert seen.is_new("a", 1.0)
    seen.forget("never seen")


def test_the_memory_is_bounded_and_loses_the_oldest() -> None:
    seen = Duplicates(max_remembered=100)
    for number in range(1000):
        assert seen.is_new(number, 0.0)
    assert len(seen) == 100
    assert not seen.is_new(999, 0.0)
    assert seen.is_new(0, 0.0)


def test_a_key_that_left_the_window_is_forgotten() -> None:
    seen = Duplicates(window_s=1.0)
    for number in range(100):
        seen.is_new(number, number / 100)
    seen.is_new("late", 10.0)
    assert len(seen) == 1
