"""A release for some percent of a group: the same devices each time, and more of them when the percentage is raised."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_runtime.updates.release_checks import share
from tests.contract.updates.updated_device import Fleet


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def test_a_device_takes_a_release_when_the_percentage_reaches_it_and_keeps_the_old_one_until_then(fleet: Fleet) -> None:
    one = fleet.release(1)
    two = fleet.adder(2)
    stands_at = share("dev1", two.release.manifest_sha256)
    fleet.site.publish(two)
    with fleet.device() as device:
        device.outcome()
        for percent in (stands_at * 0.5, stands_at * 0.99):
            fleet.site.assign(two, percent=percent)
            fleet.sync()
            action, reason = device.outcome()
            assert action == "passed over"
            assert "this device is not among them" in reason
            assert device.adds() == 1.0
        for percent in (min(stands_at * 1.01, 100.0), 100.0):
            fleet.site.assign(two, percent=percent)
            fleet.sync()
            assert device.outcome()[0] in {"installed", "runs"}
            assert device.adds() == 2.0
    assert one.release.counter == 1


def test_beside_a_release_for_all_some_take_the_newer_one(fleet: Fleet) -> None:
    one, two = fleet.adder(1), fleet.adder(2)
    stands_at = share("dev1", two.release.manifest_sha256)
    for made in (one, two):
        fleet.site.publish(made)
    fleet.site.assign_shares((one, 100.0), (two, stands_at * 0.9))
    with fleet.device() as device:
        device.apply()
        assert device.adds() == 1.0
        fleet.site.assign_shares((one, 100.0), (two, min(stands_at * 1.1, 100.0)))
        fleet.sync()
        device.apply()
        assert device.adds() == 2.0


def test_devices_spread_evenly_over_the_percentages() -> None:
    shares = [share(f"dev{index}", "a" * 64) for index in range(10_000)]
    for percent in (1, 10, 50):
        assert sum(each < percent for each in shares) == pytest.approx(100 * percent, rel=0.2)
