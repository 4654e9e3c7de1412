"""Waits between tries double, are spread, and begin again after a good connection."""

from __future__ import annotations

import random

from edge_runtime.transports.backoff import STEADY_S, Backoff


def test_waits_double_to_the_longest_one() -> None:
    backoff = Backoff(0.5, 6.0, lambda: 1.0)
    assert [backoff.next_s() for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 6.0, 6.0]


def test_half_of_a_wait_is_left_to_chance() -> None:
    waits = [Backoff(8.0, 60.0, random.Random(seed).random).next_s() for seed in range(200)]
    assert all(4.0 <= wait_s <= 8.0 for wait_s in waits)
    assert max(waits) - min(waits) > 3.5


def test_a_good_connection_begins_anew_and_a_short_one_does_not() -> None:
    backoff = Backoff(1.0, 60.0, lambda: 1.0)
    backoff.next_s()
    backoff.lasted(STEADY_S / 2)
    assert backoff.next_s() == 2.0
    backoff.lasted(STEADY_S)
    assert backoff.next_s() == 1.0


def test_failures_without_end_overflow_nothing() -> None:
    backoff = Backoff(0.5, 60.0, lambda: 0.0)
    assert {backoff.next_s() for _ in range(5000)} <= {0.25 * (1 << n) for n in range(7)} | {30.0}
