"""`edge-runtime repo rollout` on a real repository and broker: raises, stops, goes on, gives back what was before."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.cli.main import main
from edge_runtime.doors.mqtt.settings import MqttSettings
from edge_runtime.durable import SYSTEM_DISK, Disk
from edge_runtime.fleet.fleet import ReleaseFates
from edge_runtime.publish.assignments import assign, read_assignments
from edge_runtime.publish.change import Change
from edge_runtime.publish.configurations import move
from edge_runtime.publish.key_ring import NewKeys
from edge_runtime.publish.releases import ReleaseOptions, prepare_release
from edge_runtime.publish.roles import add_group, add_team
from edge_runtime.rollouts.conductor import Conductor
from edge_runtime.rollouts.plan import RolloutPlan
from edge_runtime.rollouts.record import record_json
from edge_runtime.updates.manifest import Assignment, ReleaseBounds
from edge_runtime.updates.release_checks import share
from tests.contract.running_daemon import ANSWER_S, running_daemon
from tests.contract.updates.updated_device import update_settings
from tests.fakes.broker import Broker, needs_mosquitto
from tests.fakes.dying_disk import DyingDisk, Killed
from tests.fakes.mqtt_peer import Peer
from tests.fakes.publishing import PASSPHRASE, Publisher, passphrases
from tests.models.onnx_models import wide

pytestmark = needs_mosquitto

DEVICES = [f"cam-{number}" for number in range(60)]
PLAN = ("--steps", "10,50,100", "--hold", "0s")


def publish(publisher: Publisher, models: Path, version: int, bounds: ReleaseBounds | None = None) -> None:
    wide(models / "tiny" / str(version), size=version + 1)
    with publisher.opened() as repository:
        options = ReleaseOptions("vision", models / "tiny", version=version, bounds=bounds, patches=0)
        prepare_release(repository, options).change.commit()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with versions 1 to 3 of `tiny`, of which line has the first. No device runs the second in time."""
    folder = tmp_path_factory.mktemp("published")
    publisher = Publisher(folder / "repository").found()
    publisher.carry_out(lambda repository: add_team(repository, "vision", NewKeys(is_online=True)))
    publisher.carry_out(lambda repository: add_group(repository, "line", NewKeys(is_online=True)))
    for version, bounds in ((1, None), (2, ReleaseBounds({"*": 1e-6})), (3, None)):
        publish(publisher, folder / "models", version, bounds)
    publisher.carry_out(lambda repository: assign(repository, "line", "tiny", 1))
    return publisher.path


@pytest.fixture
def publisher(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Publisher:
    shutil.copytree(published, tmp_path / "repository")
    monkeypatch.setenv("EDGE_RUNTIME_REPO", str(tmp_path / "repository"))
    monkeypatch.setenv("EDGE_RUNTIME_PASSPHRASE", PASSPHRASE)
    return Publisher(tmp_path / "repository")


@pytest.fixture
def own_broker(tmp_path: Path):
    with Broker(tmp_path / "broker") as broker:
        yield broker


def entries(publisher: Publisher) -> list[tuple[int, float, int]]:
    """Release, percent and what is gone back from, of each assignment of the group."""
    with publisher.opened() as repository:
        found = read_assignments(repository, "line")
    return [(each.release.counter, each.percent, each.going_back_from) for each in found]


def assignment(publisher: Publisher, counter: int) -> Assignment:
    with publisher.opened() as repository:
        return next(each for each in read_assignments(repository, "line") if each.release.counter == counter)


def say(peer: Peer, device: str, release: int, refused: int = 0) -> None:
    notes = [{"model": "tiny", "release": refused, "reason": "a run takes p95 44 ms"}] if refused else []
    update = {
        "state": "idle", "group": "line", "device_id": device, "refused": notes,
        "models": {"tiny": {"release": release}},
    }  # fmt: skip
    state = {
        "health": "ok", "interval_s": 3600.0, "models": {"tiny": {"version": release, "versions": []}}, "update": update
    }  # fmt: skip
    peer.publish(f"edge/{device}/status", "online", 1, retain=True)
    peer.publish(f"edge/{device}/state", json.dumps(state), 1, retain=True)


def take(peer: Peer, publisher: Publisher, release: int, is_refused: Callable[[str], bool] = lambda _: False) -> int:
    """Let the devices that the assignment includes take the release; how many these are."""
    given = assignment(publisher, release)
    meant = [each for each in DEVICES if share(each, given.manifest_sha256) < given.percent]
    for each in meant:
        refuses = is_refused(each)
        say(peer, each, 1 if refuses else release, release if refuses else 0)
    return len(meant)


def rollout(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    status = main(["repo", "rollout", *words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def start(capsys: pytest.CaptureFixture[str], broker: Broker, *words: str) -> tuple[int, Any]:
    return rollout(capsys, "start", *words, "--mqtt", broker.url)


@pytest.mark.smoke
def test_a_rollout_goes_from_step_to_step_and_goes_on_where_it_ended(publisher, own_broker, capsys):
    with Peer(own_broker.url) as peer:
        for each in DEVICES:
            say(peer, each, 1)
        assert start(capsys, own_broker, "tiny=3", *PLAN, "--once")[1]["percent"] == 10.0
        assert entries(publisher) == [(3, 10.0, 0), (1, 100.0, 0)]
        status, waits = start(capsys, own_broker, "tiny=3", "--once")
        assert (status, waits["percent"], waits["counts"]["installed"]) == (0, 10.0, 0)
        for percent in (50.0, 100.0):
            took = take(peer, publisher, 3)
            status, raised = start(capsys, own_broker, "tiny=3", "--once")
            assert (status, raised["percent"], raised["counts"]["installed"]) == (0, percent, took)
        assert entries(publisher) == [(3, 100.0, 0)]
        take(peer, publisher, 3)
        status, done = start(capsys, own_broker, "tiny=3", "--once")
    assert (status, done["state"], done["reason"]) == (0, "done", "60 run it, 0 refused it")
    assert rollout(capsys, "status")[1] == [done]


def test_a_rollout_that_devices_refuse_stops_and_gives_back_what_was_before(publisher, own_broker, capsys):
    with Peer(own_broker.url) as peer:
        for each in DEVICES:
            say(peer, each, 1)
        start(capsys, own_broker, "tiny=3", *PLAN, "--once")
        take(peer, publisher, 3, is_refused=lambda device: int(device[4:]) % 2 == 0)
        status, stopped = start(capsys, own_broker, "tiny=3", "--once")
        assert (status, stopped["state"], stopped["percent"]) == (1, "stopped", 10.0)
        assert "devices refused it: a run takes p95 44 ms" in stopped["reason"]
        assert entries(publisher) == [(1, 100.0, 0)]
        assert main(["repo", "rollout", "start", "tiny=3", "--mqtt", own_broker.url]) == 1
        assert "--anew begins it again" in capsys.readouterr().err
        status, again = start(capsys, own_broker, "tiny=3", "--stop-at", "99%", *PLAN, "--anew", "--once")
        assert (status, again["state"], entries(publisher)) == (0, "running", [(3, 50.0, 0), (1, 100.0, 0)])


def test_an_operator_stops_a_rollout_and_sends_devices_back(publisher, own_broker, capsys):
    with Peer(own_broker.url) as peer:
        say(peer, "cam-0", 1)
        start(capsys, own_broker, "tiny=3", *PLAN, "--once")
        assert main(["repo", "rollout", "stop", "tiny", "--go-back"]) == 0
        assert "devices that took it go back to the release before" in capsys.readouterr().out
        assert entries(publisher) == [(1, 100.0, 3)]
        assert main(["repo", "rollout", "stop", "tiny"]) == 1
        assert "is stopped: stopped by an operator" in capsys.readouterr().err


def test_a_signature_that_an_ended_process_owed_is_made_when_it_goes_on(publisher, own_broker, capsys):
    with Peer(own_broker.url) as peer:
        for each in DEVICES:
            say(peer, each, 1)
        start(capsys, own_broker, "tiny=3", *PLAN, "--once")
    path = publisher.path / "rollouts" / "line" / "tiny.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "step": 1}))
    assert start(capsys, own_broker, "tiny=3", "--once")[1]["percent"] == 50.0
    assert entries(publisher) == [(3, 50.0, 0), (1, 100.0, 0)]
    path.write_text(json.dumps({**record, "step": 1, "state": "stopping", "reason": "2 of 6 devices refused it"}))
    status, stopped = start(capsys, own_broker, "tiny=3", "--once")
    assert (status, stopped["state"], entries(publisher)) == (1, "stopped", [(1, 100.0, 0)])


def fates(installed: int = 0, refused: int = 0) -> ReleaseFates:
    """A group of 60 devices, where some of those that the release is for have told."""
    reasons = ({"kind": "refused", "reason": "a run takes p95 44 ms", "devices": refused},) if refused else ()
    told = installed + refused
    return ReleaseFates(60, installed=installed, refused=refused, not_meant=60 - told, reasons=reasons)


@pytest.mark.parametrize("share_before", [0.0, 20.0], ids=["nobody", "a-share"])
@pytest.mark.parametrize(
    ("end", "signed", "state"),
    [
        (fates(installed=6), [(3, 50.0, 0), (1, 100.0, 0)], "running"),
        (fates(installed=2, refused=4), [(1, 100.0, 0)], "stopped"),
    ],
    ids=["raised", "stopped"],
)
def test_a_rollout_killed_between_any_two_writes_goes_on_from_there(
    end: ReleaseFates, signed: Any, state: str, share_before: float, published: Path, tmp_path: Path
) -> None:
    """Its first step and what follows, with the process killed before the n-th change of a name, and started anew."""
    steps = RolloutPlan((10.0, 30.0, 50.0, 100.0) if share_before else (10.0, 50.0, 100.0), hold_s=0.0)
    number, seen = 0, set[tuple[str, float]]()
    while True:
        number += 1
        publisher = Publisher(shutil.copytree(published, tmp_path / str(number)))
        if share_before:
            publisher.carry_out(lambda repository: assign(repository, "line", "tiny", 3, share_before))
        disk = DyingDisk(number, counts=("rename",))
        with suppress(Killed):
            drive(publisher, disk, steps, end)
        conductor = new_conductor(publisher)
        record = conductor.file.read()
        if record is not None:
            seen.add((record.state, record.percent))
            assert record_json(record, is_driven=False)["began_percent"] == share_before
        drive(publisher, DyingDisk(), steps, end)
        record = conductor.file.read()
        assert record is not None
        assert (record.state, entries(publisher)) == (state, signed), f"killed before name {number}: {record.reason}"
        if not disk.is_dead:
            break
    assert number > 8
    assert len(seen) >= 2


def test_a_rollout_knows_whom_targets_moved_and_reads_it_again_in_time(publisher: Publisher) -> None:
    now_s = [1_000.0]
    conductor = Conductor(publisher.path, "line", "tiny", passphrases(), lambda change: None, now_s=lambda: now_s[0])
    assert conductor.moved() == {}
    publisher.carry_out(lambda repository: move(repository, ["cam-1"], "line"))
    assert conductor.moved() == {}
    now_s[0] += 61.0
    with publisher.opened():  # another publisher is at work
        assert conductor.moved() == {}
    assert conductor.moved() == {"cam-1": "line"}


def new_conductor(publisher: Publisher, disk: Disk = SYSTEM_DISK) -> Conductor:
    return Conductor(publisher.path, "line", "tiny", passphrases(), lambda change: None, disk=disk)


def drive(publisher: Publisher, disk: Disk, plan: RolloutPlan, end: ReleaseFates) -> None:
    """As `rollout start`: begin or go on; the devices of steps below 50 % run it, then come to their end."""
    conductor = new_conductor(publisher, disk)
    record = conductor.file.read()
    record = conductor.go_on() if record is not None else conductor.begin(3, plan, 0.0)
    while record.state == "running" and record.percent < 50.0:
        record = conductor.look(end)


def test_an_assignment_that_another_command_changed_is_left_alone(publisher, own_broker, capsys):
    with Peer(own_broker.url) as peer:
        for each in DEVICES:
            say(peer, each, 1)
        start(capsys, own_broker, "tiny=2", *PLAN, "--once")
        publisher.carry_out(lambda repository: assign(repository, "line", "tiny", 3))
        status, stopped = start(capsys, own_broker, "tiny=2", "--once")
    assert (status, stopped["state"]) == (1, "stopped")
    assert "another command changed" in stopped["reason"]
    assert entries(publisher) == [(3, 100.0, 0)]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("tiny=9", *PLAN), "has no version 9; published: 1, 2, 3"),
        (("tiny=1", *PLAN), "to all of its devices already"),
        (("tiny=3", "--steps", "10,5"), "wanted rising ones"),
        (("tiny=3", "--group", "nobody"), "there is no group 'nobody'; known: line"),
        (("tiny=3", "--stop-at", "x"), "got 'x', wanted a percentage"),
        (("tiny=3", "--hold", "soon"), "got 'soon', wanted a length of time"),
        (("tiny", *PLAN), "wanted MODEL=VERSION"),
    ],
)
def test_a_rollout_that_cannot_be_says_why_and_signs_nothing(words, error, publisher, broker, capsys):
    assert main(["repo", "rollout", "start", *words, "--mqtt", broker.url, "--once"]) in (1, 2)
    assert error in capsys.readouterr().err
    assert entries(publisher) == [(1, 100.0, 0)]
    assert main(["repo", "rollout", "stop", "tiny"]) == 1
    assert "there is no rollout of tiny to line" in capsys.readouterr().err


def test_a_rollout_is_driven_by_one_process(publisher, broker, capsys):
    from edge_runtime.rollouts.record import RecordFile

    with RecordFile(publisher.path, "line", "tiny").driven():
        assert main(["repo", "rollout", "start", "tiny=3", "--mqtt", broker.url]) == 1
    assert "another process drives this rollout" in capsys.readouterr().err


def test_a_key_that_a_person_keeps_signs_after_consent_alone(publisher, broker, capsys):
    def make(repository: Any) -> Change:
        from edge_runtime.publish.roles import rotate

        return rotate(repository, "fleet-line", NewKeys())

    publisher.carry_out(make)
    assert main(["repo", "rollout", "start", "tiny=3", "--mqtt", broker.url, "--once", *PLAN]) == 2
    assert "add --yes" in capsys.readouterr().err
    assert entries(publisher) == [(1, 100.0, 0)]
    assert main(["repo", "rollout", "start", "tiny=3", "--mqtt", broker.url, "--once", "--yes", *PLAN]) == 0
    assert entries(publisher) == [(3, 10.0, 0), (1, 100.0, 0)]


# ---- a whole daemon -------------------------------------------------------------------------------------------------


def test_a_daemon_is_woken_at_each_step_and_ends_the_rollout_of_a_release_beyond_its_bound(
    publisher: Publisher, own_broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"folder": str(publisher.path), "auto": True, "wake_jitter_s": 0.0, "min_check_s": 0.0, "poll_s": 1e6}
    update = update_settings(tmp_path, publisher.root_1, **changes)
    mqtt = MqttSettings(url=f"{own_broker.url}/dev1", state_interval_s=0.2)
    (tmp_path / "empty").mkdir()
    ends: list[int] = []

    def drive(version: int) -> list[Any]:
        words = ["start", f"tiny={version}", "--steps", "1,100", "--hold", "0s", "--mqtt", own_broker.url]
        thread = threading.Thread(target=lambda: ends.append(main(["repo", "rollout", *words])))
        thread.start()
        thread.join(ANSWER_S)
        assert not thread.is_alive()
        capsys.readouterr()
        return rollout(capsys, "status")[1]

    with Peer(own_broker.url) as peer:
        peer.subscribe("edge/dev1/state", 1)
        with running_daemon(tmp_path / "empty", tmp_path, mqtt=mqtt, update=update):
            while True:
                told = json.loads(peer.next().payload)["update"].get("models", {})
                if told.get("tiny", {}).get("release") == 1:
                    break
            (stopped,) = drive(2)
            assert (ends, stopped["state"], stopped["percent"]) == ([1], "stopped", 100.0)
            assert "1 of 1 devices refused it: a run takes p95" in stopped["reason"]
            assert "its signed bound here is 1e-06 ms" in stopped["reason"]
            assert entries(publisher) == [(1, 100.0, 0)]
            (done,) = drive(3)
            assert (ends, done["state"], done["counts"]["installed"]) == ([1, 0], "done", 1)
