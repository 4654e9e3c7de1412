"""A disk that is full, or fails, at any durable call of an update: what serves goes on, and nothing is half done."""

from __future__ import annotations

import errno
import shutil
from random import Random
from typing import Any

import pytest

from edge_runtime.errors import StorageFailed
from tests.contract.updated_device import Fleet, UpdatedDevice
from tests.fakes.dying_disk import DyingDisk, failing


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """A device on which release 1 is active, and release 2 assigned. Its state is copied for each try."""
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    fleet.release(1)
    with fleet.device() as device:
        device.outcome()
    fleet.release(2)
    shutil.copytree(fleet.folder / "state", fleet.folder / "before")
    return fleet


def begin_anew(fleet: Fleet) -> None:
    shutil.rmtree(fleet.folder / "state")
    shutil.copytree(fleet.folder / "before", fleet.folder / "state")


def calls_of_an_update(fleet: Fleet) -> int:
    begin_anew(fleet)
    disk = DyingDisk()
    with fleet.device(disk=disk) as device:
        device.outcome()
    return len(disk.calls)


def applied(device: UpdatedDevice) -> dict[str, Any]:
    """What `apply` said; where even the journal could not be opened, that."""
    try:
        return device.apply()
    except StorageFailed as error:
        return {"reason": error.message, "offers": ()}


def meet(fleet: Fleet, number: int, error: int, *, lasts: bool) -> None:
    """An update whose durable call of this number fails, and, where it `lasts`, all that follow."""
    begin_anew(fleet)
    with fleet.device(disk=DyingDisk(number, failing(error), lasts=lasts)) as device:
        said = applied(device)
        is_installed = any(offer["action"] == "installed" for offer in said["offers"])
        assert is_installed or said["reason"] or said["offers"][0]["reason"], number
        assert device.adds() == (2.0 if is_installed else 1.0), (number, said)
    with fleet.device() as device:
        device.apply()
        assert device.adds() == 2.0, number
        assert device.status()["refused"] == [], number


def test_a_disk_that_fails_now_and_then_leaves_what_serves_and_a_later_check_completes(fleet: Fleet) -> None:
    calls = calls_of_an_update(fleet)
    assert calls > 40
    for number in sorted(Random(1).sample(range(1, calls + 1), 8)):
        meet(fleet, number, errno.ENOSPC, lasts=number % 2 == 0)


@pytest.mark.long
@pytest.mark.parametrize(("error", "lasts"), [(errno.ENOSPC, True), (errno.EIO, False)])
def test_a_disk_that_fails_at_any_call_leaves_what_serves_and_a_later_check_completes(
    fleet: Fleet, error: int, lasts: bool
) -> None:
    for number in range(1, calls_of_an_update(fleet) + 1):
        meet(fleet, number, error, lasts=lasts)
