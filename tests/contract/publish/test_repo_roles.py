"""Roles of a repository as python-tuf's own client sees them: thresholds, delegations, rotation, revocation."""

from __future__ import annotations

import shutil
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from tuf.api.exceptions import ExpiredMetadataError, RepositoryError, UnsignedMetadataError
from tuf.api.metadata import Metadata, MetaFile, Root, TargetFile

from edge_runtime.errors import PublishError
from edge_runtime.publish.change import Change, Draft
from edge_runtime.publish.key_ring import NewKeys
from edge_runtime.publish.repository import Repository
from edge_runtime.publish.roles import add_group, add_team, refresh, revoke, rotate
from edge_runtime.updates.release_paths import ReleasePath, assignments_path
from tests.fakes.publishing import Publisher, TufDevice, founding

A_FILE = ReleasePath("a", "digits", 1).file("model.onnx")
B_FILE = ReleasePath("b", "digits", 1).file("model.onnx")


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(tmp_path / "repository").found()


def device_of(publisher: Publisher, home: Path) -> TufDevice:
    return TufDevice(publisher.path, home, publisher.root_1)


def signing(role: str, path: str, data: bytes = b"bytes") -> Publisher | object:
    """A change in which a role signs a path, whether or not it may."""

    def make(repository: Repository) -> Change:
        draft = Draft(repository)
        draft.add_data(role, path, data)
        return draft.finish("sign it")

    return make


def sign(publisher: Publisher, role: str, path: str, data: bytes = b"bytes") -> None:
    publisher.carry_out(signing(role, path, data))  # type: ignore[arg-type]


def test_a_new_repository_is_believed_by_a_device_that_has_only_root_1(publisher: Publisher, tmp_path: Path) -> None:
    device = device_of(publisher, tmp_path / "device")
    device.check()
    assert device.fetched == ["2.root.json", "timestamp.json", "1.snapshot.json", "1.targets.json"]
    assert not list(publisher.path.glob("metadata/*.key")) + list(publisher.path.glob("targets/*"))


def test_a_check_with_nothing_new_asks_for_two_files_below_2_kb(publisher: Publisher, tmp_path: Path) -> None:
    device = device_of(publisher, tmp_path / "device")
    device.check()
    device.fetched.clear()
    device.check()
    assert device.fetched == ["2.root.json", "timestamp.json"]
    assert (publisher.path / "metadata" / "timestamp.json").stat().st_size < 1024


def test_a_repository_is_not_made_twice(publisher: Publisher) -> None:
    before = publisher.root_1
    with pytest.raises(PublishError, match="is a repository already"):
        publisher.found()
    assert publisher.root_1 == before


def test_a_folder_that_is_not_a_repository_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(PublishError, match="repo init"), Publisher(tmp_path).opened():
        pass


@pytest.mark.parametrize("plan", [founding(root=(2, 3)), founding(targets=(1, 0))])
def test_a_threshold_that_no_keys_can_meet_is_refused(plan: object, tmp_path: Path) -> None:
    with pytest.raises(PublishError, match="wanted 1 to"):
        Publisher(tmp_path, plan).found()  # type: ignore[arg-type]
    assert not (tmp_path / "metadata").exists()


def test_as_many_keys_sign_as_the_threshold_asks_for(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "repository", founding(root=(5, 3), targets=(3, 2))).found()
    device_of(publisher, tmp_path / "device").check()
    root = Metadata[Root].from_bytes(publisher.root_1)
    assert len(root.signatures) == 3
    assert len(root.signed.roles["root"].keyids) == 5
    assert len(Metadata.from_file(str(publisher.path / "metadata" / "1.targets.json")).signatures) == 2


def test_with_fewer_keys_than_the_threshold_nothing_changes_and_the_missing_are_named(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "repository", founding(targets=(3, 2))).found()
    for number in (1, 3):
        (publisher.path / "keys" / f"targets-{number}.key").unlink()
    with pytest.raises(PublishError, match=r"1 of its keys are within reach, wanted 2; bring targets-1, targets-3"):
        publisher.carry_out(lambda repository: add_team(repository, "a", NewKeys()))
    assert sorted(path.name for path in (publisher.path / "metadata").iterdir()) == [
        "1.root.json", "1.snapshot.json", "1.targets.json", "timestamp.json",
    ]  # fmt: skip


def test_metadata_with_fewer_signatures_than_the_threshold_is_neither_published_on_nor_believed(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "repository", founding(targets=(3, 2))).found()
    path = publisher.path / "metadata" / "1.targets.json"
    metadata = Metadata.from_file(str(path))
    metadata.signatures.popitem()
    path.write_bytes(metadata.to_bytes())
    with pytest.raises(PublishError, match=r"1\.targets\.json"), publisher.opened():
        pass
    with pytest.raises(RepositoryError):
        device_of(publisher, tmp_path / "device").check()


def test_a_wrong_passphrase_signs_nothing(publisher: Publisher) -> None:
    with publisher.opened("not the passphrase") as repository:
        change = add_team(repository, "a", NewKeys(is_online=True))
        with pytest.raises(PublishError, match="targets-1: wrong passphrase"):
            change.commit()
    assert not (publisher.path / "metadata" / "2.targets.json").exists()
    assert not (publisher.path / "keys" / "team-a-1.pem").exists()


def test_a_team_signs_its_own_paths_and_no_others(publisher: Publisher, tmp_path: Path) -> None:
    for team in ("a", "b"):
        publisher.carry_out(lambda repository, team=team: add_team(repository, team, NewKeys()))  # type: ignore[misc]
    sign(publisher, "team-a", A_FILE)
    sign(publisher, "team-a", B_FILE)
    sign(publisher, "team-a", assignments_path("line"))
    sign(publisher, "team-a", f"{A_FILE}/deeper")
    device = device_of(publisher, tmp_path / "device")
    assert device.fetch(A_FILE) == b"bytes"
    for other in (B_FILE, assignments_path("line"), f"{A_FILE}/deeper"):
        assert device.fetch(other) is None


def test_a_group_signs_its_own_assignments_and_nothing_else(publisher: Publisher, tmp_path: Path) -> None:
    publisher.carry_out(lambda repository: add_team(repository, "a", NewKeys()))
    for group in ("line", "yard"):
        publisher.carry_out(lambda repository, group=group: add_group(repository, group, NewKeys()))  # type: ignore[misc]
    sign(publisher, "fleet-line", A_FILE)
    sign(publisher, "fleet-line", "fleet/line/other.json")
    sign(publisher, "fleet-line", assignments_path("yard"), b"[1]")
    device = device_of(publisher, tmp_path / "device")
    assert device.fetch(assignments_path("line")) == device.fetch(assignments_path("yard")) == b"[]\n"
    assert device.fetch(A_FILE) is None
    assert device.fetch("fleet/line/other.json") is None


@pytest.mark.parametrize("name", ["", "Vision", "a/b", "..", "a_b", "a" * 65, "ä", "a\n"])
def test_a_name_that_could_be_a_path_is_not_a_team_and_no_group(name: str, publisher: Publisher) -> None:
    for add in (add_team, add_group):
        with pytest.raises(PublishError, match="cannot be the name"):
            publisher.carry_out(lambda repository, add=add: add(repository, name, NewKeys()))  # type: ignore[misc]


def test_a_team_is_added_once(publisher: Publisher) -> None:
    publisher.carry_out(lambda repository: add_team(repository, "a", NewKeys()))
    with pytest.raises(PublishError, match="is there already"):
        publisher.carry_out(lambda repository: add_team(repository, "a", NewKeys()))


# ---- other keys -----------------------------------------------------------------------------------------------------


def test_every_role_may_get_new_keys_and_devices_of_any_age_follow(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "repository", founding(root=(3, 2), targets=(2, 2))).found()
    publisher.carry_out(lambda repository: add_team(repository, "a", NewKeys()))
    publisher.carry_out(lambda repository: add_group(repository, "line", NewKeys()))
    sign(publisher, "team-a", A_FILE)
    devices = [device_of(publisher, tmp_path / "device-0")]
    for number, role in enumerate(["root", "targets", "snapshot", "timestamp", "team-a", "fleet-line", "root"], 1):
        publisher.carry_out(lambda repository, role=role: rotate(repository, role))  # type: ignore[misc]
        devices.append(device_of(publisher, tmp_path / f"device-{number}"))
        for device in devices:
            assert device.fetch(A_FILE) == b"bytes"
            assert device.fetch(assignments_path("line")) == b"[]\n"
    assert sorted(path.name for path in publisher.path.glob("metadata/*.root.json")) == [
        f"{version}.root.json" for version in range(1, 7)
    ]


def test_an_old_team_key_stolen_with_the_online_keys_signs_nothing_that_is_believed_after_the_rotation(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.carry_out(lambda repository: add_team(repository, "a", NewKeys()))
    stolen = tmp_path / "stolen"
    shutil.copytree(publisher.path, stolen)
    publisher.carry_out(lambda repository: rotate(repository, "team-a"))
    thief = Publisher(stolen)
    with publisher.opened() as current, thief.opened() as copied:
        forged, catalog = publisher.path / "metadata", current.catalog
        team = catalog.delegated["team-a"]
        team.targets[A_FILE] = TargetFile.from_data(A_FILE, b"evil", ["sha256"])
        for signed, role in ((team, "team-a"), (catalog.snapshot, "snapshot"), (catalog.timestamp, "timestamp")):
            signed.version += 1
            metadata: Metadata[Any] = Metadata(signed)
            for keyid in copied.catalog.role(role).keyids:
                metadata.sign(copied.keys.signer(copied.catalog.key(role, keyid)))
            name = "timestamp.json" if role == "timestamp" else f"{signed.version}.{role}.json"
            metadata.to_file(str(forged / name))
            catalog.snapshot.meta["team-a.json"] = MetaFile(team.version)
            catalog.timestamp.snapshot_meta = MetaFile(catalog.snapshot.version)
    with pytest.raises(UnsignedMetadataError, match="team-a"):
        device_of(publisher, tmp_path / "device").fetch(A_FILE)
    with pytest.raises(PublishError, match="team-a"), publisher.opened():
        pass


def test_a_revoked_key_is_in_no_role_any_more_and_a_new_one_is(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "repository", founding(root=(3, 2), targets=(2, 1))).found()
    device = device_of(publisher, tmp_path / "device")
    device.check()
    for key in ("root-1", "targets-2", "timestamp-1"):
        publisher.carry_out(lambda repository, key=key: revoke(repository, key))  # type: ignore[misc]
        device.check()
    with publisher.opened() as repository:
        catalog, keys = repository.catalog, repository.keys
        names = {role: [keys.name(keyid) for keyid in catalog.role(role).keyids] for role in catalog.roles}
    assert names == {
        "root": ["root-2", "root-3", "root-4"],
        "targets": ["targets-1", "targets-3"],
        "snapshot": ["snapshot-1"],
        "timestamp": ["timestamp-2"],
    }
    with pytest.raises(PublishError, match="0 of the keys"):
        publisher.carry_out(lambda repository: revoke(repository, "root-1"))


def test_a_lost_root_key_is_revoked_with_the_others(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "repository", founding(root=(3, 2))).found()
    (publisher.path / "keys" / "root-2.key").unlink()
    publisher.carry_out(lambda repository: revoke(repository, "root-2"))
    device_of(publisher, tmp_path / "device").check()


def test_with_too_few_root_keys_left_root_stays_as_it_is(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "repository", founding(root=(3, 2))).found()
    for number in (1, 2):
        (publisher.path / "keys" / f"root-{number}.key").unlink()
    with pytest.raises(PublishError, match="root: 1 of its keys"):
        publisher.carry_out(lambda repository: rotate(repository, "root"))
    assert not (publisher.path / "metadata" / "2.root.json").exists()


def test_a_lost_online_key_is_replaced_by_the_root_alone(publisher: Publisher, tmp_path: Path) -> None:
    device = device_of(publisher, tmp_path / "device")
    device.check()
    (publisher.path / "keys" / "timestamp-1.pem").unlink()
    with pytest.raises(PublishError, match="timestamp: 0 of its keys"):
        publisher.carry_out(refresh)
    publisher.carry_out(lambda repository: rotate(repository, "timestamp"))
    device.check()


def test_a_device_that_has_not_seen_the_new_root_believes_what_is_published_with_it(
    publisher: Publisher, tmp_path: Path
) -> None:
    device = device_of(publisher, tmp_path / "device")
    device.check()
    for role in ("timestamp", "snapshot", "targets"):
        publisher.carry_out(lambda repository, role=role: rotate(repository, role))  # type: ignore[misc]
        root = max(publisher.path.glob("metadata/*.root.json"))
        hidden = root.rename(root.with_suffix(".hidden"))
        device.check()
        hidden.rename(root)
        device.check()


def test_a_role_that_is_not_there_cannot_get_keys(publisher: Publisher) -> None:
    with pytest.raises(PublishError, match="wanted one of root, targets, snapshot, timestamp"):
        publisher.carry_out(lambda repository: rotate(repository, "team-x"))


# ---- time -----------------------------------------------------------------------------------------------------------


def test_an_expired_timestamp_is_not_believed_until_it_is_refreshed_without_any_passphrase(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.now_utc = datetime.now(timezone.utc) - timedelta(days=8)
    publisher.carry_out(refresh)
    device = device_of(publisher, tmp_path / "device")
    with pytest.raises(ExpiredMetadataError):
        device.check()
    publisher.now_utc = None
    with publisher.opened("nobody knows") as repository:
        change = refresh(repository)
        assert not change.needs_a_person
        change.commit()
    device.check()


def test_a_refresh_signs_the_snapshot_when_half_its_time_is_over(publisher: Publisher) -> None:
    assert [each.role for each in publisher.carry_out(refresh).signings] == ["timestamp"]
    publisher.now_utc = datetime.now(timezone.utc) + timedelta(days=8)
    assert [each.role for each in publisher.carry_out(refresh).signings] == ["snapshot", "timestamp"]


def test_a_person_refreshes_offline_roles_by_name(publisher: Publisher, tmp_path: Path) -> None:
    change = publisher.carry_out(lambda repository: refresh(repository, ["targets", "root"]))
    assert [(each.role, each.version) for each in change.signings] == [
        ("targets", 2), ("snapshot", 2), ("timestamp", 2), ("root", 2),
    ]  # fmt: skip
    assert change.needs_a_person
    device_of(publisher, tmp_path / "device").check()


def test_the_timestamp_says_when_it_was_signed(publisher: Publisher) -> None:
    publisher.now_utc = datetime(2031, 2, 3, 4, 5, 6, tzinfo=timezone.utc)
    publisher.carry_out(refresh)
    signed = Metadata.from_file(str(publisher.path / "metadata" / "timestamp.json")).signed
    assert signed.unrecognized_fields["issued"] == "2031-02-03T04:05:06Z"
    assert signed.expires == publisher.now_utc + timedelta(days=7)
