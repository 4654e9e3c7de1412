"""Going back by the group's word: a device follows to what it ran itself; nothing else brings an old release back."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_runtime.updates.manifest import Assignment, encode_assignments
from tests.contract.updates.updated_device import Fleet
from tests.fakes.releases import Made
from tests.fakes.update_site import GROUP


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def go_back(fleet: Fleet, made: Made, going_back_from: int) -> None:
    """Let the group sign that its devices go back to a release."""
    entry = Assignment(made.release.model, made.path, made.release.manifest_sha256, 100.0, going_back_from)
    fleet.site.repository.add_target(f"fleet/{GROUP}/assign.json", encode_assignments([entry]), f"fleet-{GROUP}")
    fleet.site.repository.publish(f"fleet-{GROUP}", "snapshot", "timestamp")
    fleet.sync()


def test_a_device_goes_back_to_what_it_ran_and_forward_again(fleet: Fleet) -> None:
    one, two, three = fleet.release(1), fleet.adder(2), fleet.adder(3)
    with fleet.device() as device:
        device.outcome()
        for made in (two, three):
            fleet.site.release(made)
            fleet.sync()
            assert device.outcome()[0] == "installed"
        go_back(fleet, one, 3)  # its files were tidied away meanwhile, and are fetched again
        assert device.outcome()[0] == "installed"
        assert device.adds() == 1.0
    with fleet.device() as device:
        assert device.adds() == 1.0
        assert device.outcome()[0] == "runs"
        fleet.site.assign(three)
        fleet.sync()
        assert device.outcome()[0] == "installed"
        assert device.adds() == 3.0
        fleet.site.assign(one)  # without the group's word, as before
        fleet.sync()
        assert device.outcome() == (
            "passed over",
            "release 1 of adder is older than 3, which was here; publish it under a new counter",
        )


def test_a_device_that_never_ran_a_release_does_not_go_back_to_it(fleet: Fleet) -> None:
    one = fleet.site.publish(fleet.adder(1))
    fleet.release(2)
    with fleet.device() as device:
        device.outcome()
        go_back(fleet, one, 2)
        action, reason = device.outcome()
        assert (action, "it was never kept here" in reason) == ("passed over", True), reason
        assert device.adds() == 2.0


def test_a_device_that_is_further_than_its_group_goes_back_from_stays(fleet: Fleet) -> None:
    one = fleet.release(1)
    with fleet.device() as device:
        device.outcome()
        fleet.release(5)
        device.outcome()
        go_back(fleet, one, 4)
        action, reason = device.outcome()
        assert (action, "its group goes back from 4 only" in reason) == ("passed over", True), reason
        assert device.adds() == 5.0


def test_a_release_that_a_device_refused_stays_refused(fleet: Fleet) -> None:
    one = fleet.release(1)
    with fleet.device() as device:
        device.outcome()
        fleet.release(2)
        device.outcome()
        device.roll_back("adder")  # refuses the second
        fleet.release(3)
        device.outcome()
        two = fleet.adder(2)
        go_back(fleet, two, 3)
        assert device.outcome()[0] == "refused before"
        go_back(fleet, one, 3)
        assert device.outcome()[0] == "installed"


def test_a_new_device_takes_the_release_that_the_others_go_back_to(fleet: Fleet) -> None:
    one = fleet.release(1)
    go_back(fleet, one, 2)
    with fleet.device() as device:
        assert device.outcome()[0] == "installed"


def test_a_check_learns_what_is_wanted_with_less_free_than_the_reserve_and_installs_nothing(fleet: Fleet) -> None:
    fleet.release(1)
    with fleet.device(reserve_bytes=1 << 60) as device:
        checked = device.check()
        assert checked["is_ok"], checked["reason"]
        assert [each["action"] for each in checked["offers"]] == ["available"]
        action, reason = device.outcome()
        assert (action, f"{1 << 60} of them to stay free" in reason) == ("put off", True), reason
