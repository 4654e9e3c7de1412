"""Attacks on a device that follows a repository: what serves goes on, and the truth is taken when it is back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest

from edge_runtime.updates.manifest import Assignment, encode_assignments
from tests.contract.updates.updated_device import Fleet, UpdatedDevice
from tests.fakes.dates import FakeCalendar
from tests.fakes.http_server import Answer, HttpServer, Request
from tests.fakes.tuf_repository import NOW
from tests.fakes.update_site import GROUP, TEAM, adder

TEAM_ROLE, GROUP_ROLE = f"team-{TEAM}", f"fleet-{GROUP}"


class Island:
    """A fleet whose repository is served over HTTP by whoever attacks it."""

    def __init__(self, folder: Path, server: HttpServer, fleet: Fleet) -> None:
        self.folder = folder
        self.server = server
        self.fleet = fleet
        self.site = fleet.site
        self.repository = fleet.site.repository

    def device(self, **changes: Any) -> AbstractContextManager[UpdatedDevice]:
        """The device, which follows the server."""
        return self.fleet.device(folder=None, url=self.server.url, **changes)


@pytest.fixture
def island(tmp_path: Path) -> Iterator[Island]:
    """With release 1 published, and 2 to come."""
    fleet = Fleet(tmp_path)
    fleet.release(1)
    with HttpServer(fleet.site.find) as server:
        yield Island(tmp_path, server, fleet)


def stands_firm(device: UpdatedDevice, *words: str) -> dict[str, Any]:
    """A check brings nothing, says why, and release 1 serves on; returns what the check said."""
    checked = device.apply()
    reasons = " ".join([checked["reason"], *(offer["reason"] for offer in checked["offers"])])
    assert all(offer["action"] not in {"installed", "refused"} for offer in checked["offers"])
    for word in words:
        assert word in reasons
    assert device.adds() == 1.0
    status = device.status()
    assert status["models"]["adder"]["release"] == 1
    assert status["refused"] == []
    return checked


def takes_the_next(island: Island, device: UpdatedDevice) -> None:
    """When all is right again, release 2 is installed."""
    island.fleet.release(2)
    assert device.outcome()[0] == "installed", device.status()["checked"]
    assert device.adds() == 2.0


def test_rollback_an_older_timestamp_is_refused(island: Island) -> None:
    with island.device() as device:
        island.fleet.release(1)
        device.apply()
        current = island.repository.published["timestamp"]
        island.repository.published["timestamp"] = current[:1]
        stands_firm(device, "timestamp", "was seen already")
        island.repository.published["timestamp"] = current
        takes_the_next(island, device)


def test_rollback_a_device_that_lost_its_metadata_does_not_believe_older_one(island: Island) -> None:
    with island.device() as device:
        device.apply()
        old = copy.deepcopy(island.repository.published)
        island.fleet.release(1)
        device.apply()
    for file in (island.folder / "state" / "update" / "metadata").glob("*.json"):
        file.unlink()
    new, island.repository.published = island.repository.published, old
    with island.device() as device:
        stands_firm(device, "was seen here", "replays old files")
        island.repository.published = new
        takes_the_next(island, device)


def test_freeze_a_repository_that_stands_still_is_not_believed_when_it_expired(island: Island) -> None:
    calendar = FakeCalendar(NOW)
    with island.device(calendar=calendar) as device:
        device.apply()
        calendar.instant_utc = NOW + timedelta(days=31)
        stands_firm(device, "expired")
        calendar.instant_utc = NOW
        takes_the_next(island, device)


def test_fast_forward_is_forgotten_when_the_stolen_keys_are_replaced(island: Island) -> None:
    repository = island.repository
    with island.device() as device:
        device.apply()
        for role in ("snapshot", "timestamp"):
            repository.start_again(role, 10**4)
        device.apply()
        for role in ("snapshot", "timestamp"):
            repository.rotate(role)
        repository.publish("root")
        for role in ("snapshot", "timestamp"):
            repository.start_again(role, 1)
        takes_the_next(island, device)


def test_mix_and_match_an_old_role_under_a_new_snapshot_is_refused(island: Island) -> None:
    with island.device() as device:
        device.apply()
        old = island.repository.published[GROUP_ROLE][-1]
        island.site.release(island.fleet.adder(2))
        new = island.repository.published[GROUP_ROLE][-1]
        island.repository.published[GROUP_ROLE][-1] = old
        stands_firm(device, GROUP_ROLE)
        island.repository.published[GROUP_ROLE][-1] = new
        assert device.outcome()[0] == "installed"


@pytest.mark.parametrize("ending", ["timestamp.json", "manifest.json", "model.onnx", "golden.bin"])
def test_endless_data_is_not_read_beyond_what_was_signed(island: Island, ending: str) -> None:
    sent = 0

    def endless(request: Request) -> Answer | None:

        def drip() -> Iterator[bytes]:
            nonlocal sent
            while True:
                sent += 65536
                yield bytes(65536)

        return Answer(200, drip(), says_length=False) if request.path.endswith(ending) else None

    with island.device() as device:
        device.apply()
        island.site.release(island.fleet.adder(2))
        island.server.answer = endless
        stands_firm(device)
        island.server.answer = lambda _: None
        assert sent < 64 << 20
        assert device.outcome()[0] == "installed"


def test_a_group_cannot_speak_for_another(island: Island) -> None:
    repository = island.repository
    with island.device() as device:
        device.apply()
        repository.delegate("targets", "fleet-other", ["fleet/other/assign.json"])
        two = island.site.publish(island.fleet.adder(2))
        entries = encode_assignments([Assignment("adder", two.path, two.release.manifest_sha256, 100)])
        repository.add_target(f"fleet/{GROUP}/assign.json", entries, "fleet-other")
        repository.publish("fleet-other", "targets", "snapshot", "timestamp")
        assert [offer["action"] for offer in stands_firm(device)["offers"]] == ["runs"]


def test_a_stolen_group_key_chooses_among_what_teams_signed_and_nothing_else(island: Island) -> None:
    repository = island.repository
    forged = adder(island.folder / "forged", 3, adds=666.0, says=666.0)
    with island.device() as device:
        device.apply()
        for name, data in forged.files.items():
            repository.artifacts[f"{forged.path.rpartition('/')[0]}/{name}"] = data
        repository.artifacts[forged.path] = forged.manifest_data
        island.site.assign(forged)
        stands_firm(device, "no team that may speak of it signs it")
        # Nor by signing the release itself, which is not the group's to sign.
        for name, data in forged.files.items():
            repository.add_target(f"{forged.path.rpartition('/')[0]}/{name}", data, GROUP_ROLE)
        repository.add_target(forged.path, forged.manifest_data, GROUP_ROLE)
        repository.publish(GROUP_ROLE, "snapshot", "timestamp")
        stands_firm(device, "no team that may speak of it signs it")
        takes_the_next(island, device)


def test_a_stolen_group_key_cannot_bring_an_older_release_back(island: Island) -> None:
    with island.device() as device:
        device.apply()
        takes_the_next(island, device)
        island.fleet.release(1)
        action, reason = device.outcome()
        assert action == "passed over"
        assert "is older than 2" in reason
        assert device.adds() == 2.0


def test_a_stolen_team_key_alone_installs_nothing(island: Island) -> None:
    with island.device() as device:
        device.apply()
        island.site.publish(adder(island.folder / "forged", 3, adds=666.0, says=666.0))
        stands_firm(device)
        takes_the_next(island, device)


def test_one_team_cannot_sign_another_teams_release(island: Island) -> None:
    repository = island.repository
    with island.device() as device:
        device.apply()
        repository.delegate("targets", "team-other", ["team/other/*/*/*"])
        two = island.fleet.adder(2)
        for name, data in two.files.items():
            repository.add_target(f"{two.path.rpartition('/')[0]}/{name}", data, "team-other")
        repository.add_target(two.path, two.manifest_data, "team-other")
        repository.publish("team-other", "targets", "snapshot", "timestamp")
        island.site.assign(two)
        stands_firm(device, "no team that may speak of it signs it")


def test_a_team_below_its_threshold_installs_nothing(island: Island) -> None:
    repository = island.repository
    with island.device() as device:
        device.apply()
        delegations = repository.targets().delegations
        delegations.roles[TEAM_ROLE].threshold = 2
        repository.publish("targets", "snapshot", "timestamp")
        island.site.release(island.fleet.adder(2))
        stands_firm(device, TEAM_ROLE)
        repository.targets().add_key((key := repository.new_key()).public_key, TEAM_ROLE)
        repository.signers[TEAM_ROLE].append(key)
        repository.publish(TEAM_ROLE, "targets", "snapshot", "timestamp")
        assert device.outcome()[0] == "installed"


def test_a_revoked_team_key_installs_nothing(island: Island) -> None:
    repository = island.repository
    with island.device() as device:
        device.apply()
        (old,) = repository.signers[TEAM_ROLE]
        repository.targets().revoke_key(old.public_key.keyid, TEAM_ROLE)
        key = repository.new_key()
        repository.targets().add_key(key.public_key, TEAM_ROLE)
        repository.publish("targets", "snapshot", "timestamp")
        island.site.release(island.fleet.adder(2))
        stands_firm(device, TEAM_ROLE)
        repository.signers[TEAM_ROLE] = [key]
        repository.publish(TEAM_ROLE, "snapshot", "timestamp")
        assert device.outcome()[0] == "installed"


def test_fifty_rotations_of_the_root_are_followed_and_a_forged_one_ends_the_walk(island: Island) -> None:
    repository = island.repository
    with island.device() as device:
        device.apply()
        for _ in range(49):
            before = repository.signers["root"]
            repository.rotate("root")
            repository.signers["root"] += before  # both sign the one that replaces them
            repository.publish("root")
            repository.signers["root"] = [key for key in repository.signers["root"] if key not in before]
        takes_the_next(island, device)
        genuine, repository.signers["root"] = repository.signers["root"], [repository.new_key()]
        repository.publish("root")
        checked = device.apply()
        assert not checked["is_ok"]
        assert "root" in checked["reason"]
        assert device.adds() == 2.0
        repository.signers["root"] = genuine
        repository.published["root"].pop()
        repository.signed["root"].version -= 1
        assert device.outcome() == ("runs", "")


def test_a_stick_full_of_junk_and_links_installs_what_is_signed_and_nothing_else(
    island: Island, tmp_path: Path
) -> None:
    stick = tmp_path / "stick"
    secret = tmp_path / "secret"
    secret.write_text("not for a stick")
    with island.device() as device:
        device.apply()
        island.site.release(island.fleet.adder(2))
        island.site.write(stick)
        for number in range(10_000):
            (stick / ("targets", "metadata")[number % 2] / f"junk{number}").write_bytes(b"junk")
        (stick / "metadata" / "2.root.json").symlink_to(secret)
        models = {each: each.read_bytes() for each in (stick / "targets").rglob("*.model.onnx")}
        for each in models:
            each.unlink()
            each.symlink_to(secret)
        assert [offer["action"] for offer in device.import_folder(stick)["offers"]] == ["put off"]
        assert device.adds() == 1.0
        for each, data in models.items():
            each.unlink()
            each.write_bytes(data)
        assert [offer["action"] for offer in device.import_folder(stick)["offers"]] == ["installed"]
        assert device.adds() == 2.0
        assert not any(b"not for a stick" in file.read_bytes() for file in everything_in(tmp_path / "state"))


def test_a_bit_that_flips_in_what_a_device_keeps_never_changes_an_answer(island: Island) -> None:
    with island.device() as device:
        device.apply()
        takes_the_next(island, device)
    home = island.folder / "state" / "update"
    random = Random(4)
    flipped = 0
    for file in sorted(everything_in(home)):
        data = file.read_bytes() if file.exists() else b""  # with a journal goes what only it knew of
        if not data:
            continue
        damaged = bytearray(data)
        for _ in range(3):
            damaged[random.randrange(len(data))] ^= 1 << random.randrange(8)
        mode = file.stat().st_mode
        file.chmod(0o600)
        file.write_bytes(damaged)
        file.chmod(mode)
        flipped += 1
        with island.device() as device:
            device.apply()  # what was damaged is brought again where it is needed
            assert device.adds() == 2.0, file
    assert flipped >= 10


def everything_in(folder: Path) -> list[Path]:
    """Its plain files."""
    return [file for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
