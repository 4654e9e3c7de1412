"""What nobody thought of, on a device that follows a repository: it is told, and ends no thread and no check."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
from pathlib import Path

import pytest

from edge_runtime.errors import ConfigError, EdgeRuntimeError
from edge_runtime.updates.journal import DATABASE
from edge_runtime.updates.manifest import Assignment, decode_assignments, encode_assignments
from tests.contract.updates.updated_device import Fleet
from tests.fakes.http_server import Answer, HttpServer
from tests.fakes.update_site import GROUP, TEAM


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """With release 1 published."""
    fleet = Fleet(tmp_path)
    fleet.release(1)
    return fleet


def state(fleet: Fleet) -> Path:
    return fleet.folder / "state" / "update"


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"root:x:0:0:root:/root:/bin/bash\n", "root: Failed to deserialize JSON"), (None, "wanted 'root'")],
    ids=["no metadata", "metadata of another role"],
)
def test_a_root_file_that_is_none_is_a_wrong_setting_from_the_start(
    content: bytes | None, reason: str, fleet: Fleet
) -> None:
    file = fleet.folder / "wrong.json"
    file.write_bytes(content if content is not None else fleet.site.repository.published["timestamp"][-1])
    with pytest.raises(ConfigError) as caught, fleet.device(root_file=str(file)):
        pass
    assert caught.value.message.startswith(f"update.root_file: {file} is not a root of trust: ")
    assert reason in caught.value.message
    assert "wanted the 1.root.json" in caught.value.message


def test_a_redirect_to_no_address_is_a_failed_check_that_status_reports(fleet: Fleet) -> None:
    with HttpServer(fleet.site.find) as server, fleet.device(folder=None, url=server.url) as device:
        device.outcome()
        server.answer = lambda _: Answer(302, headers={"Location": "http://[half/of/an/address"})
        checked = device.apply()
        assert not checked["is_ok"]
        assert "half" in checked["reason"]
        assert device.status()["checked"]["reason"] == checked["reason"]
        assert device.adds() == 1.0


def test_a_version_beyond_all_numbers_is_refused_and_ends_with_the_stolen_key(fleet: Fleet) -> None:
    repository = fleet.site.repository
    with HttpServer(fleet.site.find) as server, fleet.device(folder=None, url=server.url) as device:
        device.outcome()
        repository.timestamp.version = 1 << 70
        repository.published["timestamp"].append(repository.sign("timestamp"))
        checked = device.apply()
        assert not checked["is_ok"]
        assert "timestamp: got version" in checked["reason"]
        assert device.status()["checked"]["reason"] == checked["reason"]
        repository.rotate("timestamp")
        repository.publish("root")
        repository.start_again("timestamp", 1)
        fleet.site.release(fleet.adder(2))
        assert device.outcome()[0] == "installed"


def test_a_manifest_nested_without_end_is_its_own_models_trouble(fleet: Fleet) -> None:
    deep = b'{"x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    path = f"team/{TEAM}/aaa/1/manifest.json"
    repository = fleet.site.repository
    repository.add_target(path, deep, f"team-{TEAM}")
    repository.publish(f"team-{TEAM}")
    (adder,) = assigned(fleet)
    hostile = Assignment("aaa", path, hashlib.sha256(deep).hexdigest(), 100.0)
    repository.add_target(f"fleet/{GROUP}/assign.json", encode_assignments([hostile, adder]), f"fleet-{GROUP}")
    repository.publish(f"fleet-{GROUP}", "snapshot", "timestamp")
    with fleet.device() as device:
        assert device.outcome("aaa")[0] == "put off"
        assert device.adds() == 1.0


def assigned(fleet: Fleet) -> tuple[Assignment, ...]:
    path = f"fleet/{GROUP}/assign.json"
    return decode_assignments(fleet.site.repository.artifacts[path], path)


def test_a_file_in_the_place_of_the_folder_of_releases_is_reported(fleet: Fleet) -> None:
    state(fleet).mkdir(parents=True)
    (state(fleet) / "releases").write_bytes(b"")
    with fleet.device() as device:
        checked = device.apply()
        assert "releases" in str(checked["offers"][0]["reason"]), checked
        assert device.status()["checked"]["offers"]
    (state(fleet) / "releases").unlink()
    with fleet.device() as device:
        assert device.outcome()[0] == "installed"


def test_a_state_that_this_daemon_does_not_know_is_reported_and_what_was_active_serves(fleet: Fleet) -> None:
    with fleet.device() as device:
        device.outcome()
    with contextlib.closing(sqlite3.connect(state(fleet) / "journal" / DATABASE)) as database, database:
        database.execute("insert into rollouts values ('adder', 2, 2, 'ff', 'of tomorrow', 0, '')")
    with fleet.device() as device:
        assert device.adds() == 1.0
        with pytest.raises(EdgeRuntimeError, match="of tomorrow"):
            device.apply()
        assert "of tomorrow" in device.status()["reason"]


@pytest.mark.parametrize("name", ["journal/active.json", "metadata/anchor"])
def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(fleet: Fleet, name: str) -> None:
    with fleet.device() as device:
        device.outcome()
    (state(fleet) / name).unlink()
    os.mkfifo(state(fleet) / name)
    with fleet.device() as device:
        assert device.adds() == 1.0
        fleet.release(2)
        assert device.outcome()[0] == "installed"


@pytest.mark.parametrize("name", [".nfs0001", "lost"])
def test_a_stray_file_among_the_releases_fails_no_check(fleet: Fleet, name: str) -> None:
    with fleet.device() as device:
        device.outcome()
        (state(fleet) / "releases" / name).write_bytes(b"x")
        (state(fleet) / "releases" / f"{name}.link").symlink_to("/")
        fleet.release(2)
        assert device.outcome()[0] == "installed"
        assert device.adds() == 2.0
        assert not (state(fleet) / "releases" / name).exists()
        assert Path("/tmp").is_dir()


def test_a_release_no_longer_needed_goes_also_while_another_models_release_waits_for_ever(fleet: Fleet) -> None:
    repository = fleet.site.repository
    missing = Assignment("aaa", f"team/{TEAM}/aaa/1/manifest.json", "0" * 64, 100.0)
    with fleet.device() as device:
        for number in range(1, 6):
            fleet.site.release(fleet.adder(number))
            hostile = encode_assignments([missing, *assigned(fleet)])
            repository.add_target(f"fleet/{GROUP}/assign.json", hostile, f"fleet-{GROUP}")
            repository.publish(f"fleet-{GROUP}", "snapshot", "timestamp")
            fleet.sync()
            assert device.outcome("aaa")[0] == "put off"
            assert device.adds() == number
        manifests = (state(fleet) / "releases").glob("*/manifest.json")
        assert {json.loads(file.read_bytes())["release_counter"] for file in manifests} == {4, 5}
