"""What the governor decides by a reading: tables of temperatures, and the order of what it takes and gives back."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from edge_runtime.heat.throttle import (
    HOLD_S,
    LEAST_CORES,
    LEAST_SHARE,
    LIGHTER_S,
    HeatLimits,
    HeatReading,
    HeatStage,
    Throttle,
    plan_throttle,
)

LIMITS = HeatLimits(80.0, 4, 6)
BUSY = {"cores": 4.0, "low_cores": 2.0}


def at(celsius, *, seconds=60, limits=LIMITS, before=None, is_slowed=None, **work):
    """The decision after a temperature stood still for a while."""
    throttle = before or Throttle(cores=limits.cores, cores_now=limits.cores, of_cores=limits.cores)
    start_s = throttle.read_s if throttle.read_s > -math.inf else 0.0
    for second in range(1, seconds + 1):
        reading = HeatReading(start_s + second, celsius, is_slowed, **{**BUSY, **work})
        throttle = plan_throttle(throttle, reading, limits)
    return throttle


@pytest.mark.parametrize(
    ("celsius", "seconds", "stage"),
    [
        (40.0, 600, HeatStage.FREE),
        (78.0, 600, HeatStage.FREE),
        (79.0, 60, HeatStage.SHARE),
        (84.0, 2, HeatStage.SHARE),
        (90.0, 2, HeatStage.CORES),
        (90.0, 60, HeatStage.REFUSING),
        (None, 600, HeatStage.FREE),
    ],
)
def test_stage_follows_the_temperature_and_how_long_it_stands(celsius, seconds, stage):
    assert at(celsius, seconds=seconds).stage(LIMITS) is stage


def test_share_of_low_work_is_taken_before_any_core():
    throttle = Throttle(cores=4, cores_now=4, of_cores=4)
    seen = []
    for _ in range(60):
        throttle = at(82.0, seconds=1, before=throttle)
        if throttle.cores < 4:
            assert throttle.low_share == pytest.approx(LEAST_SHARE)
        seen.append(throttle.stage(LIMITS))
    assert seen == sorted(seen, key=list(HeatStage).index)
    assert {HeatStage.SHARE, HeatStage.CORES} <= set(seen)


def test_cores_are_taken_at_once_where_there_is_no_low_work():
    throttle = at(79.5, seconds=2, low_cores=0.0)
    assert throttle.pressure == pytest.approx(1.0, abs=0.01)


def test_a_cold_device_that_warms_up_is_not_pressed():
    throttle = at(60.0, seconds=2)
    assert plan_throttle(throttle, HeatReading(3.0, 70.0, **BUSY), LIMITS).stage(LIMITS) is HeatStage.FREE


def test_cores_are_those_in_use_and_parts_of_one_come_in_turns():
    limits = HeatLimits(80.0, 12, 6)
    throttle = at(90.0, seconds=2, limits=limits, cores=1.7)
    assert throttle.of_cores == 2.0
    whole = []
    for _ in range(40):
        throttle = replace(throttle, pressure=1.5)
        throttle = at(78.5, seconds=1, limits=limits, before=replace(throttle, celsius=78.5), cores=1.0)
        whole.append(throttle.cores_now)
    assert sum(whole) / len(whole) == pytest.approx(1.0, abs=0.05)


def test_work_that_is_not_urgent_keeps_a_part_of_a_core():
    throttle = at(100.0, seconds=30)
    assert throttle.cores == LEAST_CORES
    assert {at(100.0, seconds=n, before=throttle).cores_now for n in range(1, 12)} == {0, 1}


def test_steps_come_one_after_another_and_each_stays():
    limits = HeatLimits(80.0, 4, 6, has_lighter=True)
    throttle, came = Throttle(cores=4, cores_now=4, of_cores=4), {}
    for second in range(1, 200):
        throttle = at(95.0, seconds=1, limits=limits, before=throttle)
        came.setdefault(throttle.stage(limits), second)
    assert came[HeatStage.CORES] < came[HeatStage.LIGHTER] < came[HeatStage.REFUSING]
    assert came[HeatStage.REFUSING] - came[HeatStage.LIGHTER] >= HOLD_S

    cold = at(50.0, seconds=1, limits=limits, before=throttle)
    assert cold.stage(limits) is HeatStage.LIGHTER, "refusals end with the heat"
    assert at(50.0, seconds=int(LIGHTER_S) - 2, limits=limits, before=cold).is_lighter
    assert at(50.0, seconds=int(LIGHTER_S) + 2, limits=limits, before=cold).stage(limits) is HeatStage.FREE


def test_models_without_a_lighter_variant_pass_that_step():
    assert not at(95.0, seconds=300).is_lighter
    assert at(95.0, seconds=300).refuses


def test_a_device_that_says_it_is_slowed_is_too_hot_whatever_its_sensors_say():
    assert at(50.0, seconds=600, is_slowed=True).stage(LIMITS) is not HeatStage.FREE
    assert at(None, seconds=600, is_slowed=True).stage(LIMITS) is not HeatStage.FREE
    assert at(50.0, seconds=600, is_slowed=False).stage(LIMITS) is HeatStage.FREE


def test_pressure_winds_up_nothing_however_long_the_heat_lasts():
    hot = at(95.0, seconds=3600)
    cooled = at(50.0, seconds=1, before=hot)
    assert cooled.pressure < 1.0


def test_a_late_reading_counts_for_a_bounded_time():
    throttle = at(81.0, seconds=1)
    late = plan_throttle(throttle, HeatReading(throttle.read_s + 86_400, 81.0, **BUSY), LIMITS)
    assert late.pressure <= throttle.pressure + 0.25 + HOLD_S * 0.1


def test_allowance_says_what_runs_may_take():
    assert at(50.0).allowance(LIMITS) is None
    hot = at(95.0, seconds=120).allowance(LIMITS)
    assert hot is not None
    assert (hot.low_priority, hot.refuses_low) == (6, True)
    assert hot.low_share == pytest.approx(LEAST_SHARE)
    assert hot.retry_s > 0
