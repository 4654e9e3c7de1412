"""The disk is full or fails at any write of an update: what serves goes on, and the next check completes."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path

import pytest

from edge_runtime.errors import StorageFailed
from tests.contract.updates.updated_device import Fleet, update_settings, updated_device
from tests.fakes.dying_disk import WRITES, DyingDisk, failing


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """A device on which release 1 serves, and 2 is assigned."""
    fleet = Fleet(tmp_path / "fleet")
    fleet.release(1)
    with fleet.device() as device:
        assert device.outcome()[0] == "installed"
    fleet.release(2)
    return fleet


def test_a_client_that_asks_after_the_disk_was_mended_does_not_wait_for_the_next_try(fleet: Fleet) -> None:
    journal = fleet.folder / "state" / "update" / "journal"
    journal.rename(journal.with_name("kept"))
    journal.write_text("in the way")
    with fleet.device() as device:
        with pytest.raises(StorageFailed, match="Not a directory"):
            device.apply()
        assert device.status()["state"] == "broken"
        journal.unlink()
        journal.with_name("kept").rename(journal)
        assert device.outcome()[0] == "installed"
        assert device.status()["state"] == "idle"


@pytest.mark.sample
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["full", "failing"])
def test_an_update_on_a_disk_that_fails_now_and_then_leaves_what_serves_and_the_next_completes(
    fleet: Fleet, tmp_path: Path, error: int
) -> None:
    assert troubles(fleet, tmp_path, [error], range(1, calls(fleet, tmp_path) + 1, 13)) == []


@pytest.mark.long
def test_an_update_on_a_disk_that_fails_at_any_write_leaves_what_serves_and_the_next_completes(
    fleet: Fleet, tmp_path: Path
) -> None:
    # The kinds differ in the text of the error alone, so that each call sees one of them.
    errors = [errno.ENOSPC, errno.EIO]
    assert troubles(fleet, tmp_path, errors, range(1, calls(fleet, tmp_path) + 1)) == []


def calls(fleet: Fleet, tmp_path: Path) -> int:
    """How many durable writes a whole update makes."""
    disk = DyingDisk(counts=WRITES)
    shutil.copytree(fleet.folder, tmp_path / "counted")
    settings = update_settings(tmp_path / "counted", fleet.site.root, folder=str(fleet.mirror))
    with updated_device(tmp_path / "counted", settings, disk=disk) as device:
        assert device.outcome()[0] == "installed"
    return len(disk.calls)


def troubles(fleet: Fleet, tmp_path: Path, errors: Sequence[int], numbers: Iterable[int]) -> list[str]:
    """What went wrong, a line each, where the disk failed from these calls on, with the errors by turns."""
    found = []
    for number, error in zip(numbers, cycle(errors)):
        folder = tmp_path / str(number)
        shutil.copytree(fleet.folder, folder)
        settings = update_settings(folder, fleet.site.root, folder=str(fleet.mirror))
        with updated_device(folder, settings, disk=DyingDisk(number, failing(error), counts=WRITES)) as device:
            before, checked = device.adds(), {}
            try:
                checked = device.apply()
                is_clean = not checked["is_ok"] or {each["action"] for each in checked["offers"]} <= {
                    "put off",
                    "installed",
                }
            except StorageFailed:
                is_clean = True
            after = device.adds()
        if before != 1.0 or after not in (1.0, 2.0) or not is_clean:
            found.append(f"failing from call {number} on: {before}, {after}, {checked}")
        with updated_device(folder, settings) as device:
            again = device.adds()
            checked = device.apply()
            if again not in (1.0, 2.0) or not checked["is_ok"] or device.adds() != 2.0 or device.status()["refused"]:
                found.append(f"after it failed from call {number} on: {again}, {device.adds()}, {checked}")
        shutil.rmtree(folder)
    return found
