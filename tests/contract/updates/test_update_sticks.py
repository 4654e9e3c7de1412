"""Sticks: a device that gets nothing else, the folder that was meant, and messages that name the stick."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_runtime.config.settings import UpdateSettings
from edge_runtime.errors import UpdateError
from edge_runtime.updates.source import LOOKED_AT, Surroundings, find_repository, why_not
from tests.contract.updates.updated_device import Fleet
from tests.fakes.http_server import HttpServer
from tests.fakes.rights import open_folder, ordinary_rights

HERE = Path("/media/stick")


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


@pytest.fixture
def stick(fleet: Fleet, tmp_path: Path) -> Path:
    fleet.release(1)
    return fleet.site.write(tmp_path / "stick" / "models")


# ---- a device that names no repository ------------------------------------------------------------------------------


def test_a_device_that_only_gets_sticks_needs_no_address(fleet: Fleet, stick: Path) -> None:
    with fleet.device(folder=None, auto=True, wake_jitter_s=0.0) as device:
        device.updates.look()
        told = device.status()
        assert (told["source"], told["next_check_s"], told["checked"]) == ("", None, None)
        (offer,) = device.import_folder(stick)["offers"]
        assert offer["action"] == "installed"
        assert device.adds() == 1.0
        assert device.status()["checked"]["source"] == str(stick)


def test_where_no_repository_is_named_a_check_says_how_updates_come(fleet: Fleet) -> None:
    with fleet.device(folder=None) as device:
        for order in (device.check, device.apply):
            with pytest.raises(UpdateError, match="by `edge-runtime update import DIR` only; for others, add url or"):
                order()
        assert device.status()["checked"] is None


def test_two_repositories_are_one_too_many() -> None:
    with pytest.raises(ValueError, match="got url and folder; wanted one of them"):
        UpdateSettings(root_file="", url="https://models.example", folder="/mirror")


# ---- the folder that was meant --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (Surroundings(HERE, is_repository=True), None),
        (Surroundings(HERE, is_repository=False), "wanted the folder that `edge-runtime repo bundle` wrote"),
        (
            Surroundings(HERE / "metadata", is_repository=False, above=HERE),
            "the folder above it is one: edge-runtime update import /media/stick",
        ),
        (
            Surroundings(HERE, is_repository=False, below=(HERE / "my models",)),
            "one level down there is one: edge-runtime update import '/media/stick/my models'",
        ),
        (
            Surroundings(HERE, is_repository=False, below=(HERE / "a\x1b[2J", HERE / "b")),
            r"import '/media/stick/a\x1b[2J' or edge-runtime update import /media/stick/b",
        ),
    ],
    ids=["right", "wrong", "too low", "too high", "hostile names"],
)
def test_the_folder_that_is_meant_is_named(found: Surroundings, says: str | None) -> None:
    told = why_not(found)
    assert told is None if says is None else told is not None and told.endswith(says), told


def test_an_import_of_the_folder_above_or_below_names_the_right_one(fleet: Fleet, stick: Path) -> None:
    with fleet.device(folder=None) as device:
        for near in (stick.parent, stick / "metadata", stick / "targets"):
            with pytest.raises(UpdateError) as caught:
                device.import_folder(near)
            assert caught.value.message.endswith(f"edge-runtime update import {stick}")
        assert device.status()["checked"] is None, "nothing was looked at"


def test_a_link_on_a_stick_leads_nowhere_and_a_full_one_is_looked_at_in_part(stick: Path, tmp_path: Path) -> None:
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    (hostile / "models").symlink_to(stick)
    for number in range(LOOKED_AT + 10):
        (hostile / f"junk{number}").touch()
    with pytest.raises(UpdateError, match="wanted the folder that"):
        find_repository(str(hostile))


def test_a_stick_that_the_daemon_may_not_read_is_distinguished_from_one_that_is_not_there() -> None:
    with open_folder() as mounts:
        (mounts / "stick").mkdir(mode=0o700 if os.geteuid() == 0 else 0)
        with (
            ordinary_rights(),
            pytest.raises(UpdateError, match="cannot look there: Permission denied; it runs as a user of its own"),
        ):
            find_repository(str(mounts / "stick"))
        with pytest.raises(UpdateError, match="the daemon sees no such folder"):
            find_repository(str(mounts / "another"))


# ---- what went wrong is the stick's, and not the address's -----------------------------------------------------------


@pytest.fixture
def server(fleet: Fleet) -> Iterator[HttpServer]:
    with HttpServer(fleet.site.find) as server:
        yield server


def test_a_fault_of_a_stick_names_the_stick_and_not_the_repository(
    fleet: Fleet, stick: Path, server: HttpServer
) -> None:
    with fleet.device(folder=None, url=server.url) as device:
        for file in (stick / "targets").rglob("*.model.onnx"):
            file.unlink()
        (offer,) = device.import_folder(stick)["offers"]
        assert offer["action"] == "put off"
        assert str(stick) in offer["reason"]
        (stick / "metadata" / "timestamp.json").unlink()
        checked = device.import_folder(stick)
        assert not checked["is_ok"]
        assert checked["source"] == str(stick)
        assert str(stick) in checked["reason"]
        assert server.url not in checked["reason"] + offer["reason"]
