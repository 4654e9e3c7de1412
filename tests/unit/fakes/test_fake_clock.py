"""The fake clock keeps the promises of the real one."""

from __future__ import annotations

import pytest

from edge_runtime.clock import Clock, SystemClock
from tests.fakes.clock import FakeClock


@pytest.mark.parametrize("clock", [SystemClock(), FakeClock()])
def test_a_clock_never_goes_back(clock: Clock) -> None:
    first = clock.monotonic_s()
    assert clock.monotonic_s() >= first


def test_a_fake_clock_moves_only_when_advanced() -> None:
    clock = FakeClock(start_s=5.0)
    assert clock.monotonic_s() == clock.monotonic_s() == 5.0
    clock.advance(0.25)
    assert clock.monotonic_s() == 5.25


def test_a_fake_clock_refuses_to_go_back() -> None:
    clock = FakeClock()
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1)
    assert clock.monotonic_s() == 1000.0
