"""The database of updates is lost or broken: the device serves on from its second record, says so, and heals."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_runtime.daemon.core import Core
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.durable import SystemDisk
from edge_runtime.errors import EdgeRuntimeError, ModelNotFound, NotReady
from edge_runtime.updates.journal import DATABASE, RECORD
from tests.contract.updates.updated_device import Fleet, UpdatedDevice, update_settings, updated_core

JOURNAL = Path("state") / "update" / "journal"


def removed(folder: Path) -> None:
    for file in folder.glob(f"{DATABASE}*"):
        file.unlink()


def truncated(folder: Path) -> None:
    with (folder / DATABASE).open("r+b") as file:
        file.truncate(5_000)


def emptied(folder: Path) -> None:
    (folder / DATABASE).write_bytes(b"")
    (folder / f"{DATABASE}-wal").unlink(missing_ok=True)


def overwritten(folder: Path) -> None:
    (folder / DATABASE).write_bytes(random.Random(1).randbytes(20_000))


def without_log(folder: Path) -> None:
    (folder / f"{DATABASE}-wal").unlink()


def with_a_broken_log(folder: Path) -> None:
    log = folder / f"{DATABASE}-wal"
    log.write_bytes(random.Random(1).randbytes(log.stat().st_size))


@pytest.fixture
def killed(tmp_path: Path) -> Fleet:
    """A device that committed release 2 and was killed at once: part of its memory is in the log of the database."""
    fleet = Fleet(tmp_path)
    fleet.release(1)
    with fleet.device() as device:
        device.outcome()
    fleet.release(2)
    with fleet.device() as device:
        device.outcome()
        shutil.copytree(tmp_path / JOURNAL, tmp_path / "kept")
    shutil.rmtree(tmp_path / JOURNAL)
    shutil.copytree(tmp_path / "kept", tmp_path / JOURNAL)
    return fleet


@pytest.mark.parametrize("damage", [removed, truncated, emptied, overwritten, without_log, with_a_broken_log])
def test_a_device_whose_database_is_lost_serves_what_was_active_says_so_and_heals_with_a_full_refresh(
    killed: Fleet, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    damage(tmp_path / JOURNAL)
    mirror = tmp_path / "unplugged"
    with killed.device(folder=str(mirror)) as device:
        assert device.adds() == 2.0
        assert device.status()["state_lost"]
        assert not device.apply()["is_ok"]
        assert device.adds() == 2.0
        assert device.status()["state_lost"]
    killed.release(3)
    with killed.device() as device:
        assert device.adds() == 2.0
        assert device.outcome()[0] == "installed"
        assert device.adds() == 3.0
        assert not device.status()["state_lost"]


def test_a_release_that_was_changed_while_the_database_was_lost_is_not_served_and_is_brought_again(
    killed: Fleet, tmp_path: Path
) -> None:
    removed(tmp_path / JOURNAL)
    for file in (tmp_path / "state" / "update" / "releases").glob("*/model.onnx"):
        file.chmod(0o644)
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    with killed.device() as device:
        assert device.status()["models"]["adder"]["not_served"]
        assert device.outcome()[0] == "installed"
        assert device.adds() == 2.0


def test_an_older_repository_is_refused_by_a_device_whose_database_is_lost(killed: Fleet, tmp_path: Path) -> None:
    old = shutil.copytree(tmp_path / "mirror", tmp_path / "old")
    killed.release(3)
    with killed.device() as device:
        assert device.outcome()[0] == "installed"
    removed(tmp_path / JOURNAL)
    with killed.device(folder=str(old)) as device:
        checked = device.apply()
        assert not checked["is_ok"]
        assert "was seen" in checked["reason"]
        assert (device.adds(), device.status()["state_lost"]) == (3.0, True)


def test_a_device_that_lost_its_database_and_its_record_serves_nothing_until_it_is_brought_again(
    killed: Fleet, tmp_path: Path
) -> None:
    removed(tmp_path / JOURNAL)
    (tmp_path / JOURNAL / RECORD).write_bytes(b"{")
    with killed.device() as device:
        assert device.status()["models"] == {}
        assert device.outcome()[0] == "installed"
        assert device.adds() == 2.0


class LookingDisk(SystemDisk):
    """What a request for "adder" is told while updates open their journal, and the loader has read the folder."""

    def __init__(self) -> None:
        self.core: Core | None = None
        self.told: list[type[Exception]] = []

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        self.look()

    def open(self, path: Path, flags: int, mode: int) -> int:
        self.look()
        return super().open(path, flags, mode)

    def look(self) -> None:
        if self.core is None or threading.current_thread().name != "edge-updater" or self.told:
            return
        assert self.core.loader.has_settled.wait(60.0)
        with pytest.raises(EdgeRuntimeError) as caught:
            self.core.table.resolve("adder", None)
        self.told.append(caught.type)


def test_a_device_killed_between_its_first_commit_and_the_second_record_says_that_it_starts_and_not_that_it_has_none(
    tmp_path: Path,
) -> None:
    fleet = Fleet(tmp_path)
    fleet.release(1)
    with fleet.device() as device:
        device.outcome()
    (tmp_path / JOURNAL / RECORD).unlink()
    disk = LookingDisk()
    settings = update_settings(tmp_path, fleet.site.root, folder=str(fleet.mirror))
    disk.core = updated_core(tmp_path, settings, disk=disk)
    with Runtime(core=disk.core) as runtime:
        device = UpdatedDevice(runtime)
        assert device.adds() == 1.0
        with pytest.raises(ModelNotFound):
            device.run("subtractor")
    assert disk.told == [NotReady]
