"""Each entry of the runbook, tried: what it is about is done to a repository and a device, and its commands mend it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from demo.digit_releases import broken
from demo.train_digits import MODEL_FILE
from edge_runtime.publish.assignments import assign
from edge_runtime.publish.change import Change, Draft
from edge_runtime.publish.key_ring import NewKeys
from edge_runtime.publish.releases import ReleaseOptions, prepare_release
from edge_runtime.publish.repository import Repository
from edge_runtime.publish.roles import add_group, add_team, refresh, rotate
from tests.fakes.publishing import Publisher, founding
from tests.system.runbook_site import DAY, Section, Site, sections, site_of

SECTIONS = sections()
APPLY = "edge-runtime update apply"
STATUS = "edge-runtime update status"
REPO_STATUS = "edge-runtime repo status"
FAR_VERSION = 9000

pytestmark = pytest.mark.long

Trial = Callable[[Site, Section], None]
TRIED: set[str] = set()


def tried(title: str) -> Section:
    """The entry of a title, noted as one that a test here tries."""
    TRIED.add(title)
    return SECTIONS[title]


EXPIRED = tried("The timestamp has expired")
FULL_DISK = tried("A device's disk is full")
WRONG_CLOCK = tried("A device's clock is wrong")


def entry(title: str) -> Callable[[Trial], Callable[[Site], None]]:
    """Let a test try an entry: when it is over, everything that the entry quotes must have been seen."""
    section = tried(title)

    def wrap(trial: Trial) -> Callable[[Site], None]:
        def test(site: Site) -> None:
            trial(site, section)
            assert site.missing(section) == [], site.said

        return test

    return wrap


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `models` and a repository that was made eight days ago: the timestamp has expired since."""
    folder = tmp_path_factory.mktemp("base")
    for version, data in ((1, MODEL_FILE.read_bytes()), (2, broken())):
        file = folder / "models" / "digits" / str(version) / "model.onnx"
        file.parent.mkdir(parents=True)
        file.write_bytes(data)
    publisher = Publisher(folder / "repository", founding((3, 2), (2, 1)))
    publisher.now_utc = datetime.now(timezone.utc) - 8 * DAY
    publisher.found()
    publisher.carry_out(lambda repository: add_team(repository, "vision", NewKeys(1), 1))
    publisher.carry_out(lambda repository: add_group(repository, "line-1", NewKeys(1), 1))
    wish = ReleaseOptions("vision", folder / "models" / "digits", version=1)
    publisher.carry_out(lambda repository: prepare_release(repository, wish).change)
    publisher.carry_out(lambda repository: assign(repository, "line-1", "digits", 1))
    return folder


@pytest.fixture
def stale(base: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site whose timestamp has expired, with a device that knows nothing yet."""
    shutil.copytree(base / "models", tmp_path / "models")
    with site_of(tmp_path, tmp_path_factory.mktemp("d"), base / "repository") as site:
        site.start()
        yield site


@pytest.fixture
def site(stale: Site) -> Site:
    """A site where all is well: the device runs version 1."""
    stale.publisher.carry_out(refresh)
    stale.do(APPLY)
    assert stale.serves() == 1
    stale.said = ""
    return stale


def publish_second(site: Site) -> None:
    """Version 2 of the model, for the group."""
    site.do("edge-runtime repo publish models/digits --team vision", "edge-runtime repo assign line-1 digits=2")


def lose(site: Site, *keys: str) -> None:
    """Private keys are gone."""
    for key in keys:
        (site.publisher.path / "keys" / key).unlink()


def raise_versions(repository: Repository) -> Change:
    """What a thief of both online keys may do."""
    repository.catalog.timestamp.version = repository.catalog.snapshot.version = FAR_VERSION
    draft = Draft(repository)
    draft.touch("snapshot")
    return draft.finish("raise versions")


def test_every_entry_is_tried() -> None:
    assert set(SECTIONS) == TRIED


# ---- the repository -------------------------------------------------------------------------------------------------


def test_an_expired_timestamp_is_signed_anew_and_devices_go_on(stale: Site) -> None:
    stale.do(APPLY, fails=True)
    stale.do(STATUS, REPO_STATUS, *EXPIRED.blocks[0], APPLY)
    assert stale.serves() == 1
    assert "expired" not in stale.do(*EXPIRED.blocks[0])
    assert stale.missing(EXPIRED) == []


@entry("The repository is lost, and the web server has it")
def test_a_lost_repository_comes_back_from_the_web_server(site: Site, section: Section) -> None:
    shutil.copytree(site.publisher.path, site.folder / "backup" / "models")
    publish_second(site)
    for name in ("metadata", "targets"):
        shutil.copytree(site.publisher.path / name, site.folder / "server" / name)
    shutil.rmtree(site.publisher.path)
    site.do(*section.blocks[0], "edge-runtime repo refresh", APPLY)
    assert site.serves() == 2


@entry("The repository was restored from an old backup")
def test_a_repository_from_an_old_backup_is_believed_again_with_new_online_keys(site: Site, section: Section) -> None:
    backup = site.folder / "backup" / "models"
    shutil.copytree(site.publisher.path, backup)
    publish_second(site)
    site.do(APPLY)
    shutil.rmtree(site.publisher.path)
    shutil.copytree(backup, site.publisher.path)
    site.do(APPLY, fails=True)
    assert site.serves() == 2
    rotating, publishing = section.blocks
    site.do(*rotating, APPLY)
    assert site.serves() == 2
    site.do(*publishing, APPLY)
    assert site.serves() == 2


@entry("The repository moves to another address")
def test_a_device_that_is_given_another_address_goes_on_there(site: Site, section: Section) -> None:
    copy = site.folder / "copy"
    publish_second(site)
    shutil.copytree(site.publisher.path, copy)
    site.close_servers()
    site.do(APPLY, fails=True)
    site.do(STATUS)
    site.replaced["https://new.example/models"] = site.serve(copy)
    assert "available" in site.do(*section.blocks[0])
    site.do(APPLY)
    assert site.serves() == 2


# ---- keys -----------------------------------------------------------------------------------------------------------


@entry("A team's or a group's key is lost")
def test_a_lost_key_is_replaced_by_the_role_above(site: Site, section: Section) -> None:
    lose(site, "team-vision-1.key")
    site.do(REPO_STATUS)
    site.do("edge-runtime repo publish models/digits --team vision", fails=True)
    of_the_team, of_all = section.blocks
    site.do(*of_the_team, APPLY)
    assert site.serves() == 2
    lose(site, "targets-1.key", "timestamp-1.pem", "snapshot-1.pem")
    for line in of_all:
        site.do(line, APPLY)
    assert "not here" not in site.do(REPO_STATUS)


@entry("A root key is lost")
def test_one_lost_root_key_is_replaced_by_the_others(site: Site, section: Section) -> None:
    lose(site, "root-2.key")
    site.do(*section.blocks[0])
    assert "root-2" not in site.do(REPO_STATUS)
    publish_second(site)
    site.do(APPLY)
    assert site.serves() == 2


@entry("So many root keys are lost that root cannot sign")
def test_without_enough_root_keys_releases_go_on_and_keys_cannot_change(site: Site, section: Section) -> None:
    lose(site, "root-1.key", "root-2.key")
    site.do(REPO_STATUS)
    site.do("edge-runtime repo rotate timestamp", fails=True)
    publish_second(site)
    site.do(APPLY)
    assert site.serves() == 2


@entry("A key of the timestamp or the snapshot is stolen")
def test_a_thief_of_the_online_keys_holds_devices_up_until_they_are_replaced(site: Site, section: Section) -> None:
    copy = site.folder / "copy"
    shutil.copytree(site.publisher.path, copy)
    site.publisher.carry_out(raise_versions)
    site.do(APPLY)
    shutil.rmtree(site.publisher.path)
    shutil.copytree(copy, site.publisher.path)
    site.do(APPLY, fails=True)
    assert site.serves() == 1
    site.do(*section.blocks[0])
    publish_second(site)
    site.do(APPLY)
    assert site.serves() == 2


@entry("A team's key is stolen")
def test_a_release_published_by_a_thief_of_a_team_key_is_replaced_and_taken_out(site: Site, section: Section) -> None:
    publish_second(site)  # by the thief
    site.do(APPLY, *section.blocks[0], APPLY)
    assert site.serves() == 1
    assert not list((site.publisher.path / "targets" / "team" / "vision" / "digits" / "2").glob("*"))
    site.do("edge-runtime repo revoke fleet-line-1-1", "edge-runtime repo revoke targets-1", APPLY)


@entry("Fewer root keys are stolen than must sign")
def test_one_stolen_root_key_is_replaced_by_the_others(site: Site, section: Section) -> None:
    site.do(*section.blocks[0])
    assert "root-1" not in site.do(REPO_STATUS)
    publish_second(site)
    site.do(APPLY)
    assert site.serves() == 2


@entry("As many root keys are stolen as must sign")
def test_devices_that_saw_the_new_root_first_are_safe_from_thieves_of_the_old_one(site: Site, section: Section) -> None:
    copy = site.folder / "copy"
    shutil.copytree(site.publisher.path, copy)
    site.do(*section.blocks[0])
    publish_second(site)
    site.do(APPLY)
    assert site.serves() == 2
    # The thief's: another root of the same number, and what he signs with keys that only his root names.
    thief = Publisher(copy)
    thief.carry_out(lambda repository: rotate(repository, "root"))
    thief.carry_out(lambda repository: rotate(repository, "timestamp"))
    site.configure(site.serve(copy))
    site.do("systemctl restart edge-runtime")
    site.do(APPLY, fails=True)
    site.do(STATUS)
    assert site.serves() == 2


@entry("A new root for every device")
def test_devices_take_a_new_root_by_hand_and_serve_meanwhile(site: Site, section: Section) -> None:
    publish_second(site)
    site.do("edge-runtime repo refresh root", APPLY)
    shutil.rmtree(site.publisher.path)
    making, taking = section.blocks
    early, late = making[:3], making[3:]
    site.do(*early)
    assert "timestamp: was signed by no key that this device trusts" in site.do(APPLY, fails=True)
    site.do(*taking[:2])
    site.do(taking[2], fails=True)
    site.do(*late[:2], "edge-runtime repo assign line-1 digits=2", taking[2], *late[2:], taking[2])
    assert site.serves() == 2
    assert "installed" in site.said


# ---- releases -------------------------------------------------------------------------------------------------------


@entry("A bad release is in the field")
def test_a_bad_release_is_rolled_back_on_one_device_and_then_on_all(site: Site, section: Section) -> None:
    publish_second(site)
    site.do(APPLY)
    assert site.serves() == 2
    by_hand, back, for_all = section.blocks
    assert "installed" in site.do(*back, APPLY)
    assert site.serves() == 1
    site.do("edge-runtime repo assign line-1 digits=2", APPLY, *by_hand)
    assert site.serves() == 1
    site.do("edge-runtime repo assign line-1 digits=1", fails=True)
    site.do(*for_all)
    assert "installed" in site.do(APPLY)
    assert site.serves() == 1


@entry("A model must stop at once")
def test_a_model_that_is_unassigned_stops_and_can_come_back(site: Site, section: Section) -> None:
    site.do(*section.blocks[0], APPLY)
    assert site.serves() is None
    site.do("edge-runtime repo assign line-1 digits=1", APPLY)
    assert site.serves() == 1


@entry("A good release was refused")
def test_a_release_that_was_refused_is_taken_under_a_new_number(site: Site, section: Section) -> None:
    publish_second(site)
    site.do(APPLY, "edge-runtime update rollback digits")
    site.do(APPLY, fails=True)
    site.do(STATUS)
    assert site.serves() == 1
    site.do(*section.blocks[0], APPLY)
    assert site.serves() == 2


# ---- devices --------------------------------------------------------------------------------------------------------


@entry("A new device")
def test_a_new_device_needs_the_first_root_and_an_address(site: Site, section: Section) -> None:
    site.stop()
    shutil.rmtree(site.home / "state")
    (site.home / "etc" / "1.root.json").unlink()
    for block in section.blocks:
        site.do(*block)
    assert site.serves() == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system of one's own can be mounted by root only")
def test_a_device_with_a_full_disk_serves_on_and_installs_once_there_is_space(site: Site) -> None:
    state, freeing = site.home / "state", FULL_DISK.blocks[0]
    site.stop()
    shutil.rmtree(state)
    state.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(state)], check=True, timeout=60)
    try:
        site.start()
        site.do(APPLY)
        publish_second(site)
        fill(state / "core.1", left_bytes=1_050_000)
        site.do(APPLY, fails=True)
        assert site.serves() == 1
        site.do(*freeing)
        assert site.serves() == 2
        site.stop()
        for file in (state / "update" / "journal").glob("journal.sqlite-*"):
            file.unlink()
        fill(state / "core.1", left_bytes=0)
        site.start()
        site.do("edge-runtime repo publish models/digits --version 1 --team vision")
        site.do("edge-runtime repo assign line-1 digits=1")
        site.do(APPLY, fails=True)
        assert site.serves() == 2
        site.do(*freeing)
        assert site.serves() == 1
        assert site.missing(FULL_DISK) == [], site.said
    finally:
        site.stop()
        subprocess.run(["umount", str(state)], check=True, timeout=60)


def fill(file: Path, *, left_bytes: int) -> None:
    """Let a file take all of its disk but so many bytes."""
    with file.open("wb", buffering=0) as ballast:
        while shutil.disk_usage(file.parent).free > left_bytes + 4096:
            ballast.write(bytes(4096))


@entry("A device comes back after years")
def test_a_device_that_was_off_for_years_catches_up_where_all_roots_are_there(site: Site, section: Section) -> None:
    site.stop()
    last = site.clock.now_utc()
    for years in (1, 2, 3):
        site.publisher.now_utc = last + years * 300 * DAY
        site.publisher.carry_out(lambda repository: rotate(repository, "root"))
        site.publisher.carry_out(lambda repository: rotate(repository, "timestamp"))
        site.publisher.carry_out(lambda repository: refresh(repository, ("targets", "team-vision", "fleet-line-1")))
    site.clock.ahead = 901 * DAY
    metadata = site.publisher.path / "metadata"
    shutil.copytree(metadata, site.folder / "backup" / "models" / "metadata")
    (metadata / "2.root.json").unlink()
    site.start()
    site.do(APPLY, fails=True)
    assert site.serves() == 1
    for block in section.blocks:
        site.do(*block)
    site.publisher.carry_out(
        lambda repository: prepare_release(
            repository, ReleaseOptions("vision", site.folder / "models" / "digits")
        ).change
    )  # fmt: skip
    site.publisher.carry_out(lambda repository: assign(repository, "line-1", "digits", 2))
    site.do(APPLY)
    assert site.serves() == 2


@pytest.mark.parametrize("ahead_days", [20 * 365, -56 * 365], ids=["20 years ahead", "1970"])
def test_a_device_with_a_wrong_clock_serves_and_heals(site: Site, ahead_days: int) -> None:
    publish_second(site)
    site.clock.ahead = ahead_days * DAY
    site.do(APPLY, fails=ahead_days > 0)
    site.do(STATUS)
    assert site.serves() == (1 if ahead_days > 0 else 2)
    behind, ahead = WRONG_CLOCK.quotes
    assert (ahead if ahead_days > 0 else behind).search(site.said), site.said
    site.do(*WRONG_CLOCK.blocks[0])
    assert site.serves() == 2


@entry("A device's memory of updates is lost")
def test_a_device_that_lost_its_journal_serves_and_is_mended_by_a_check(site: Site, section: Section) -> None:
    site.stop()
    journal = site.home / "state" / "update" / "journal"
    (journal / "journal.sqlite").write_bytes(b"not a database" * 1000)
    site.start()
    site.do(STATUS)
    assert site.serves() == 1
    publish_second(site)
    assert "it was lost" not in site.do(*section.blocks[0])
    assert (journal / "journal.sqlite.broken").exists()
    assert site.serves() == 2


@entry("A model's files on a device are damaged")
def test_a_damaged_model_is_fetched_again(site: Site, section: Section) -> None:
    site.stop()
    (file,) = (site.home / "state" / "update" / "releases").rglob("model.onnx")
    file.chmod(0o644)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    site.start()
    site.do(STATUS)
    assert site.serves() is None
    site.do(*section.blocks[0])
    assert site.serves() == 1
    site.stop()
    shutil.rmtree(site.home / "state" / "update")
    site.start()
    assert site.serves() is None
    site.do(*section.blocks[0])
    assert site.serves() == 1


@entry("A site without a network")
def test_a_stick_brings_a_release_while_it_is_fresh(site: Site, section: Section) -> None:
    site.close_servers()
    publish_second(site)
    at_home, at_the_site = section.blocks
    site.do(*at_home, *at_the_site)
    assert site.serves() == 2
    stick = site.folder / "stick" / "models"
    stick.rename(stick.with_name("older"))
    site.do("edge-runtime repo refresh", at_home[-1], *at_the_site)
    site.do("edge-runtime update import /media/stick/older", fails=True)
    site.clock.ahead = 61 * DAY
    site.do(*at_the_site, fails=True)
    assert site.serves() == 2
