"""The governor on simulated boards: a folder as /sys whose temperature answers to the load, a real dispatcher, hours
in seconds. No board was there; tests/fakes/warm_board.py says where its constants come from.
"""

from __future__ import annotations

import pytest

from edge_runtime.heat.governor import Governor
from edge_runtime.heat.throttle import HeatLimits
from edge_runtime.telemetry.host import HostProbe
from tests.fakes.warm_board import ORIN_NANO, PI_5, GovernedBoard, Load, WarmBoard

LONGEST_OVER_S = 10.0
LEAST_OF_BEST = 0.9

NORMAL = 5
"""Of requests that say no priority: nothing but cores can be taken from them."""


def governed(tmp_path, board, load, limit_celsius, *, cores):
    device = GovernedBoard(board, load, limit_celsius, cores=cores)
    governor = Governor(device.dispatcher, HostProbe(tmp_path), device.clock, HeatLimits(limit_celsius, cores, 6))

    def step():
        governor.step()
        device.seen.stages.append(governor.stage.value)

    device.step = step
    return device


@pytest.mark.parametrize(
    ("model", "limit_celsius", "cores", "priority", "busy_before", "seconds"),
    [
        pytest.param(PI_5, 78.0, 4, 8, 0.0, 900, id="Raspberry Pi 5, low work"),
        pytest.param(PI_5, 78.0, 4, NORMAL, 2.0, 900, id="Raspberry Pi 5, work without a priority"),
        pytest.param(ORIN_NANO, 90.0, 6, 8, 0.8, 1200, id="Jetson Orin Nano, low work on the GPU"),
        pytest.param(ORIN_NANO, 90.0, 6, NORMAL, 0.8, 1200, id="Jetson Orin Nano, work without a priority"),
    ],
)
def test_a_board_stays_below_its_limit_keeps_urgent_deadlines_and_most_of_its_rate(
    tmp_path, model, limit_celsius, cores, priority, busy_before, seconds
):
    board = WarmBoard(tmp_path, model, busy_before=busy_before)
    load = Load(run_s=0.2, priority=priority)
    assert model.steady_celsius(model.places) > limit_celsius, "the load must be too much for the board"

    seen = governed(tmp_path, board, load, limit_celsius, cores=cores).run(seconds)

    best = model.busy_at(limit_celsius) / load.run_s
    assert seen.over_s <= LONGEST_OVER_S
    assert seen.rate(seconds / 2, seconds) >= LEAST_OF_BEST * best
    assert seen.urgent_p99_s() <= load.urgent_deadline_s
    assert seen.urgent_lost == 0
    assert "refuses_low" not in seen.stages


def test_the_same_board_without_a_governor_gets_too_hot(tmp_path):
    seen = GovernedBoard(WarmBoard(tmp_path, PI_5, busy_before=2.0), Load(0.2), 78.0, cores=4).run(300)
    assert seen.over_s > 10 * LONGEST_OVER_S


def test_urgent_work_is_as_quick_as_on_a_board_that_stays_cool(tmp_path):
    load = Load(run_s=0.2)
    cool = GovernedBoard(WarmBoard(tmp_path / "cool", PI_5), load, 200.0, cores=4)
    cool.board.warm = lambda _seconds, _busy: None
    hot = governed(tmp_path / "hot", WarmBoard(tmp_path / "hot", PI_5, busy_before=2.0), load, 78.0, cores=4)

    assert hot.run(400).urgent_p99_s() <= cool.run(400).urgent_p99_s() * 1.05


def test_low_priorities_are_refused_at_last_and_taken_again_when_it_is_cool(tmp_path):
    board = WarmBoard(tmp_path, PI_5, busy_before=4.0)
    device = governed(tmp_path, board, Load(run_s=0.2, priority=8), 78.0, cores=4)
    board.warm = lambda _seconds, _busy: None  # something else heats it
    device.run(60)
    assert device.seen.stages[-1] == "refuses_low"
    assert device.dispatcher.refusal_of_low(6).retry_after_ms > 0
    assert device.dispatcher.refusal_of_low(5) is None

    board.celsius = 40.0
    board.show()
    for _ in range(120):
        device.clock.advance(1.0)
        device.step()
    assert device.seen.stages[-1] == "free"
    assert device.dispatcher.refusal_of_low(9) is None


def test_status_tells_what_the_device_shows_and_what_is_done(tmp_path):
    board = WarmBoard(tmp_path, PI_5)
    device = GovernedBoard(board, Load(0.2), 78.0, cores=4)
    switched = []
    governor = Governor(
        device.dispatcher,
        HostProbe(tmp_path),
        device.clock,
        HeatLimits(78.0, 4, 6, has_lighter=True),
        make_lighter=switched.append,
    )
    governor.step()
    told = governor.status()
    assert (told["stage"], told["limit_celsius"], told["is_slowed"]) == ("free", 78.0, False)
    assert told["celsius"] == pytest.approx(board.celsius, abs=0.55)
    assert (told["frequency_share"], told["power_watts"]) == (1.0, None)

    board.celsius = 95.0
    board.show()
    for _ in range(120):
        device.clock.advance(1.0)
        governor.step()
    told = governor.status()
    assert (told["stage"], told["is_slowed"], told["frequency_share"]) == ("refuses_low", True, 0.6)
    assert "78 °C" in told["reason"]
    assert (switched[0], switched[-1]) == (False, True)

    governor.release()
    assert device.dispatcher.refusal_of_low(9) is None


def test_zones_that_are_named_count_alone(tmp_path):
    board = WarmBoard(tmp_path, PI_5)
    other = tmp_path / "sys/class/thermal/thermal_zone1"
    other.mkdir()
    (other / "type").write_text("nvme\n")
    (other / "temp").write_text("99000\n")
    device = GovernedBoard(board, Load(0.2), 78.0, cores=4)

    def hottest(zones):
        governor = Governor(device.dispatcher, HostProbe(tmp_path), device.clock, HeatLimits(78.0, 4, 6), zones=zones)
        governor.step()
        return governor.status()["celsius"]

    assert hottest(()) == 99.0
    assert hottest(("cpu-thermal",)) < 60.0


def test_a_reading_that_ends_after_the_governor_takes_nothing_from_runs(tmp_path):
    board = WarmBoard(tmp_path, PI_5, busy_before=4.0)
    board.celsius = 95.0
    board.show()
    device = GovernedBoard(board, Load(0.2), 78.0, cores=4)

    class Late(HostProbe):
        ends = False

        def frequency_share(self):
            if self.ends:
                governor.release()

    host = Late(tmp_path)
    governor = Governor(device.dispatcher, host, device.clock, HeatLimits(78.0, 4, 6))
    slowed = []
    for host.ends in (False, False, True):
        device.clock.advance(1.0)
        governor.step()
        slowed.append(device.dispatcher.is_slowed)
    assert slowed == [False, True, False]
    assert governor.throttle.pressure > 0
