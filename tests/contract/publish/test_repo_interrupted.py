"""A publisher that is killed at any moment, and several at once: the old repository or the new, never a mix."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from edge_runtime.errors import PublishError
from edge_runtime.publish.change import Change
from edge_runtime.publish.folder import RepositoryFolder
from edge_runtime.publish.key_ring import NewKeys
from edge_runtime.publish.repository import Repository
from edge_runtime.publish.roles import add_group, add_team, rotate
from edge_runtime.updates.release_paths import assignments_path
from tests.fakes.dying_disk import DyingDisk, Killed
from tests.fakes.publishing import Publisher, TufDevice

Make = Callable[[Repository], Change]


def device_of(publisher: Publisher, home: Path) -> TufDevice:
    return TufDevice(publisher.path, home, publisher.root_1)


def killed_at(path: Path, number: int, make: Make) -> tuple[Publisher, bool]:
    """A repository whose change was cut off at the n-th operation; False: it was over before."""
    publisher = Publisher(path).found()
    publisher.carry_out(lambda repository: add_team(repository, "first", NewKeys()))
    disk = DyingDisk(number)
    publisher.disk = disk
    with suppress(Killed):
        publisher.carry_out(make)
    publisher.disk = DyingDisk()
    return publisher, disk.is_dead


@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    [
        lambda repository: add_group(repository, "line", NewKeys()),
        lambda repository: rotate(repository, "timestamp"),
        lambda repository: rotate(repository, "targets"),
        lambda repository: rotate(repository, "root"),
    ],
    ids=["add-group", "rotate-timestamp", "rotate-targets", "rotate-root"],
)
def test_a_change_cut_off_anywhere_is_whole_or_absent_for_devices_and_is_finished_by_the_next(
    make: Make, tmp_path: Path
) -> None:
    number, was_killed = 0, True
    versions: set[int] = set()
    while was_killed:
        number += 1
        publisher, was_killed = killed_at(tmp_path / str(number), number, make)
        for name in ("old", "new"):
            device_of(publisher, tmp_path / f"{name}-{number}").check()
        with publisher.opened() as repository:
            versions.add(repository.catalog.timestamp.version + repository.catalog.root.version)
        device = device_of(publisher, tmp_path / f"old-{number}")
        publisher.carry_out(lambda repository: add_team(repository, "second", NewKeys()))
        device.check()
        assert not (publisher.path / "journal.json").exists()
    assert number > 8
    assert len(versions) == 2


def test_a_group_that_was_being_added_is_there_with_its_file_or_not_at_all(tmp_path: Path) -> None:
    number, was_killed = 0, True
    seen: set[bytes | None] = set()
    while was_killed:
        number += 1
        path = tmp_path / str(number)
        publisher, was_killed = killed_at(path, number, lambda repository: add_group(repository, "line", NewKeys()))
        seen.add(device_of(publisher, tmp_path / f"device-{number}").fetch(assignments_path("line")))
    assert seen == {None, b"[]\n"}


def test_making_a_repository_cut_off_anywhere_can_be_done_again_or_is_finished(tmp_path: Path) -> None:
    number, was_killed = 0, True
    while was_killed:
        number += 1
        path = tmp_path / str(number)
        disk = DyingDisk(number)
        with suppress(Killed):
            Publisher(path, disk=disk).found()
        was_killed = disk.is_dead
        publisher = Publisher(path)
        if not RepositoryFolder(path).is_repository:
            publisher.found()
        with publisher.opened():
            pass
        device_of(publisher, tmp_path / f"device-{number}").check()
    assert number > 8


def test_publishers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "repository").found()
    names = [f"team-{number}" for number in range(8)]
    threads = [
        threading.Thread(
            target=lambda name=name: publisher.carry_out(  # type: ignore[misc]
                lambda repository: add_team(repository, name, NewKeys())
            )
        )
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with publisher.opened() as repository:
        assert repository.catalog.owners("team") == names
        assert repository.catalog.targets.version == 1 + len(names)


def test_a_publisher_that_finds_another_at_work_for_too_long_says_so(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "repository").found()
    with (
        publisher.opened(),
        pytest.raises(PublishError, match="another publisher is at work"),
        RepositoryFolder(publisher.path).locked(wait_s=0),
    ):
        pass


@pytest.mark.parametrize("name", ["timestamp.json", "1.snapshot.json", "1.targets.json", "1.root.json"])
def test_nothing_is_signed_on_top_of_metadata_that_somebody_changed(name: str, tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "repository").found()
    path = publisher.path / "metadata" / name
    path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":7'))
    with pytest.raises(PublishError, match=name), publisher.opened():
        pass
