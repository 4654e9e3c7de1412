"""A device and the signed configuration of its group: tried, kept, taken back, and who may say it."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from edge_runtime.config.loading import configured
from edge_runtime.config.settings import Config
from edge_runtime.daemon.core import ObservedCondition, Reloaded
from edge_runtime.doors.mqtt.settings import MqttSettings
from edge_runtime.durable import SYSTEM_DISK, SystemDisk
from edge_runtime.errors import UpdateError
from edge_runtime.updates.group_configuration import judge_conditions
from edge_runtime.updates.kept_configuration import ConfigurationStore, lay_over
from edge_runtime.updates.states import MAX_TRIES
from tests.contract.updates.configured_fleet import PATH, ROLE, SurroundingDaemon, configure, configured_fleet
from tests.contract.updates.updated_device import ANSWER_S, Fleet, UpdatedDevice
from tests.fakes.update_site import GROUP

DEBUG = '[log]\nlevel = "debug"\n'
ERROR = '[log]\nlevel = "error"\n'
CAMERA = '[[camera]]\nname = "gate"\nurl = "rtsp://10.0.4.7/gate"\n'


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    fleet = configured_fleet(tmp_path)
    fleet.release(1)
    return fleet


def told(device: UpdatedDevice) -> dict[str, Any]:
    return device.status()["configuration"]


@pytest.mark.smoke
def test_configuration_is_tried_kept_and_in_force_after_a_restart(fleet: Fleet) -> None:
    configure(fleet, DEBUG)
    with fleet.device() as device:
        daemon = SurroundingDaemon(device)
        device.outcome()
        assert daemon.level == "debug"
        assert (told(device)["state"], told(device)["reason"]) == ("kept", "")
        core = device.runtime.core
    assert lay_over(core.config, core.state, is_start=True)[0].log.level == "debug"


def test_configuration_is_taken_back_where_a_camera_is_lost_since_and_never_tried_again(fleet: Fleet) -> None:
    configure(fleet, ERROR)
    with fleet.device() as device:
        daemon = SurroundingDaemon(device)
        daemon.health = {"camera old": "gone before"}
        device.apply()
        assert told(device)["state"] == "kept"
        configure(fleet, DEBUG)
        daemon.loses = {"camera gate": "no route"}
        assert device.apply()["is_ok"]
        assert daemon.level == "error"
        assert told(device)["reason"] == "refused: since it is in force: camera gate: no route"
        daemon.health.clear()
        device.apply()
        assert daemon.level == "error"
        assert told(device)["reason"].startswith("refused before")
        daemon.loses.clear()
        configure(fleet, DEBUG + "# again\n")
        device.apply()
        assert (daemon.level, told(device)["state"]) == ("debug", "kept")


def test_configuration_that_a_door_cannot_take_is_refused_with_its_reason(fleet: Fleet) -> None:
    configure(fleet, DEBUG)
    with fleet.device() as device:
        daemon = SurroundingDaemon(device)
        daemon.told = lambda config: Reloaded(("no such model",) if config.log.level == "debug" else ())
        device.apply()
        assert daemon.level == "info"
        assert told(device) | {"sha256": ""} == {
            "state": "none", "sha256": "", "reason": "refused: no such model", "needs_restart": [],
        }  # fmt: skip


def test_configuration_is_put_off_and_not_refused_where_the_devices_own_file_is_broken(fleet: Fleet) -> None:
    configure(fleet, DEBUG)
    with fleet.device() as device:
        daemon = SurroundingDaemon(device)
        daemon.told = lambda _: Reloaded(("config.toml:1: not TOML",), is_read=False)
        device.apply()
        assert told(device)["reason"] == "put off: config.toml:1: not TOML"
        daemon.told = lambda _: Reloaded()
        device.apply()
        assert told(device)["state"] == "kept"


def test_configuration_that_needs_a_restart_is_judged_after_it(fleet: Fleet) -> None:
    configure(fleet, "[limits]\nqueue_rows = 3\n")
    with fleet.device() as device:
        daemon = SurroundingDaemon(device)
        daemon.told = lambda _: Reloaded(needs_restart=("mqtt", "limits"))
        device.apply()
        device.apply()
        assert told(device)["state"] == "trying"
        assert told(device)["needs_restart"] == ["limits"]
        core = device.runtime.core
    assert lay_over(core.config, core.state, is_start=True)[0].limits.queue_rows == 3
    with fleet.device() as device:
        SurroundingDaemon(device)
        device.apply()
        assert told(device)["state"] == "kept"


def test_configuration_on_trial_goes_on_after_the_daemon_ended(fleet: Fleet) -> None:
    store = ConfigurationStore(fleet.folder / "state" / "update")
    with fleet.device() as device:
        SurroundingDaemon(device)
        device.apply()
    store.write(store.read().tried(DEBUG, {"camera a": "lost"}))
    with fleet.device() as device:
        device.check()  # the updater's thread is past its own start by then
        daemon = SurroundingDaemon(device)
        daemon.health = {"camera a": "lost otherwise", "camera b": "lost"}
        device.updates.updater.configuration.restart()
        assert told(device)["reason"] == "refused: since it is in force: camera b: lost"


def test_configuration_that_may_not_be_is_refused_and_models_are_updated_all_the_same(fleet: Fleet) -> None:
    configure(fleet, "[zmq]\ninsecure = true\n")
    with fleet.device() as device:
        SurroundingDaemon(device)
        assert device.outcome()[0] == "installed"
        assert "zmq: a signed configuration may not say this" in told(device)["reason"]
        assert told(device)["state"] == "none"


@pytest.mark.parametrize("data", [b"\xff\xfe", b"[log", b"x" * 70_000])
def test_configuration_that_is_no_text_keeps_no_model_from_its_update(fleet: Fleet, data: bytes) -> None:
    configure(fleet, data)
    with fleet.device() as device:
        SurroundingDaemon(device)
        assert device.outcome()[0] == "installed"
        assert told(device)["reason"]


def test_configuration_signed_by_the_group_that_is_assigned_releases_is_not_believed(fleet: Fleet) -> None:
    fleet.site.repository.add_target(PATH, DEBUG.encode(), f"fleet-{GROUP}")
    fleet.site.repository.publish(f"fleet-{GROUP}", "snapshot", "timestamp")
    fleet.sync()
    with fleet.device() as device:
        daemon = SurroundingDaemon(device)
        assert device.apply()["is_ok"]
        assert (daemon.level, told(device)["state"]) == ("", "none")


def test_configuration_is_looked_at_and_not_taken_by_a_check_that_installs_nothing(fleet: Fleet) -> None:
    configure(fleet, DEBUG)
    with fleet.device() as device:
        daemon = SurroundingDaemon(device)
        device.check()
        assert daemon.level == ""


def test_configuration_is_left_alone_where_the_device_says_so(fleet: Fleet) -> None:
    configure(fleet, DEBUG)
    with fleet.device(configuration=False) as device:
        daemon = SurroundingDaemon(device)
        device.apply()
        assert (daemon.level, told(device)["state"]) == ("", "off")


def test_configuration_that_is_signed_no_more_is_taken_back(fleet: Fleet) -> None:
    configure(fleet, DEBUG)
    with fleet.device() as device:
        daemon = SurroundingDaemon(device)
        device.apply()
        configure(fleet, "")
        device.apply()
        assert (daemon.level, told(device)["state"]) == ("info", "none")


def with_cameras(device: UpdatedDevice, *prefixes: str) -> Config:
    """The device's own settings with a broker, and with places where a configuration may have cameras."""
    own = device.runtime.core.config
    settings = {name: getattr(own, name) for name in type(own).__struct_fields__}
    assert own.update is not None
    changed = {"mqtt": MqttSettings(url="mqtt://h"), "update": replace(own.update, camera_prefixes=prefixes)}
    return configured(**{**settings, **changed})


def test_configuration_on_trial_that_the_start_left_out_is_put_off_and_not_kept(fleet: Fleet) -> None:
    configure(fleet, CAMERA)
    with fleet.device() as device:
        SurroundingDaemon(device, with_cameras(device, "rtsp://10.0.4.*/")).told = lambda _: Reloaded(
            needs_restart=("camera",)
        )
        device.apply()
        assert told(device)["state"] == "trying"
    with fleet.device() as device:
        device.check()  # the updater's thread is past its own start by then
        daemon = SurroundingDaemon(device, with_cameras(device))
        device.updates.updater.configuration.restart()
        assert told(device)["state"] == "none"
        assert told(device)["reason"].startswith("put off: the group's configuration: camera.url: ")
        daemon.own = with_cameras(device, "rtsp://10.0.4.*/")
        daemon.reload(threading.Event())
        device.apply()
        assert told(device) | {"sha256": ""} == {"state": "kept", "sha256": "", "reason": "", "needs_restart": []}


def test_configuration_that_was_kept_and_no_longer_fits_says_why_it_is_not_in_force(fleet: Fleet) -> None:
    configure(fleet, CAMERA + '[update]\nwindows = ["01:00-02:00"]\n')
    with fleet.device(windows=("03:00-04:00",)) as device:
        daemon = SurroundingDaemon(device, with_cameras(device, "rtsp://10.0.4.*/"))
        device.apply()
        assert told(device)["state"] == "kept"
        assert device.updates.updater.configuration.windows == ("01:00-02:00",)
        daemon.own = with_cameras(device)
        daemon.reload(threading.Event())
        device.apply()
        assert told(device)["state"] == "left out"
        assert "under no prefix that this device lists" in told(device)["reason"]
        assert device.updates.updater.configuration.windows == ("03:00-04:00",)
        daemon.own = with_cameras(device, "rtsp://10.0.4.*/")
        daemon.reload(threading.Event())
        assert (told(device)["state"], told(device)["reason"]) == ("kept", "")


def test_configuration_that_does_not_fit_the_device_is_not_remembered_as_refused_and_costs_no_reload(
    fleet: Fleet,
) -> None:
    configure(fleet, CAMERA)
    with fleet.device() as device:
        daemon = SurroundingDaemon(device)
        device.apply()
        device.apply()
        assert told(device)["reason"].startswith("put off: the group's configuration: publish: results go to a broker")
        assert daemon.reloads == 0
        daemon.own = with_cameras(device, "rtsp://10.0.4.*/")
        daemon.reload(threading.Event())
        device.apply()
        assert told(device)["state"] == "kept"


def test_configuration_is_kept_where_a_source_that_was_lost_before_is_lost_in_another_way(fleet: Fleet) -> None:
    configure(fleet, DEBUG)
    with fleet.device() as device:
        daemon = SurroundingDaemon(device)
        daemon.health = {"camera old": "no route to host"}
        daemon.loses = {"camera old": "timed out after 10 s"}
        device.apply()
        assert told(device)["state"] == "kept"


def test_configuration_is_put_off_twice_where_the_devices_own_camera_is_lost_meanwhile_and_then_refused(
    fleet: Fleet,
) -> None:
    configure(fleet, DEBUG)
    with fleet.device() as device:
        daemon = SurroundingDaemon(device)
        for number in range(1, MAX_TRIES + 1):
            daemon.health, daemon.loses = {"camera door": ""}, {"camera door": "no route"}
            device.apply()
            assert daemon.level == "info"
            ending = "put off" if number < MAX_TRIES else "refused"
            assert told(device)["reason"].startswith(f"{ending}: since it is in force: camera door: no route")
        daemon.loses = {}
        device.apply()
        assert told(device)["reason"].startswith("refused before")


def test_configuration_is_kept_where_a_fault_that_was_there_before_is_not_its_matter(fleet: Fleet) -> None:
    configure(fleet, DEBUG)
    with fleet.device() as device:
        SurroundingDaemon(device).told = lambda _: Reloaded(("tls: the certificate is gone",))
        device.apply()
        assert told(device)["state"] == "kept"


def test_configuration_with_cameras_is_put_off_while_the_devices_own_cannot_be_taken_over(fleet: Fleet) -> None:
    configure(fleet, CAMERA)
    with fleet.device() as device:
        daemon = SurroundingDaemon(device, with_cameras(device, "rtsp://10.0.4.*/"))
        daemon.told = lambda _: Reloaded(("publish.topic: two rules have one",))
        device.apply()
        assert told(device)["reason"] == "put off: publish.topic: two rules have one"
        assert told(device)["state"] == "none"
        daemon.told = lambda _: Reloaded()
        device.apply()
        assert told(device)["state"] == "kept"


class FullDisk(SystemDisk):
    """The real disk, until it `is_full`: no configuration is written then."""

    is_full = False

    def rename(self, source: Path, target: Path) -> None:  # type: ignore[override]
        """As Disk."""
        if self.is_full and Path(target).name == "configuration.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        SYSTEM_DISK.rename(source, target)


def test_configuration_is_tried_again_once_the_disk_has_room(fleet: Fleet) -> None:
    configure(fleet, DEBUG)
    disk = FullDisk()
    with fleet.device(disk=disk) as device:
        daemon = SurroundingDaemon(device)
        disk.is_full = True
        device.apply()
        assert "configuration.json" in told(device)["reason"]
        assert (daemon.level, told(device)["state"]) == ("info", "none")
        disk.is_full = False
        device.apply()
        assert (daemon.level, told(device)["state"]) == ("debug", "kept")


def test_configuration_whose_trial_cannot_be_committed_is_taken_over_and_observed_again(fleet: Fleet) -> None:
    configure(fleet, DEBUG)
    disk = FullDisk()
    with fleet.device(disk=disk) as device:
        daemon = SurroundingDaemon(device)

        def full(config: Config) -> Reloaded:
            disk.is_full = config.log.level == "debug"
            return Reloaded()

        daemon.told = full
        device.apply()
        assert told(device)["state"] == "trying"
        daemon.told = lambda _: Reloaded()
        disk.is_full = False
        before = daemon.reloads
        device.apply()
        assert daemon.reloads == before + 2
        assert told(device)["state"] == "kept"


def test_configuration_that_is_taken_out_is_not_tried(fleet: Fleet) -> None:
    configure(fleet, DEBUG)
    with fleet.device() as device:
        daemon = SurroundingDaemon(device)
        daemon.health = {"camera door": ""}
        device.apply()

        def lose(config: Config) -> Reloaded:
            daemon.health["camera door"] = "lost"
            return Reloaded()

        daemon.told = lose
        configure(fleet, "")
        device.apply()
        assert (daemon.level, told(device)["state"], told(device)["reason"]) == ("info", "none", "")


class Readying(SurroundingDaemon):
    """Says when it is asked whether it is ready, which begins an observation."""

    def __init__(self, device: UpdatedDevice) -> None:
        self.asked = threading.Event()
        super().__init__(device)

    @property
    def is_ready(self) -> bool:  # type: ignore[override]
        self.asked.set()
        return True

    @is_ready.setter
    def is_ready(self, value: bool) -> None: ...


def test_operations_are_refused_while_a_configuration_is_observed_and_a_stop_does_not_count_as_a_try(
    fleet: Fleet,
) -> None:
    configure(fleet, DEBUG)
    store = ConfigurationStore(fleet.folder / "state" / "update")
    with fleet.device(window_s=3600.0) as device:
        daemon = Readying(device)
        device.updates.apply(lambda _: None)
        assert daemon.asked.wait(ANSWER_S)
        for ask in (device.check, device.apply, lambda: device.roll_back("adder")):
            with pytest.raises(UpdateError, match=r"the group's configuration is observed.*ask again at its end"):
                ask()
        assert told(device)["state"] == "trying"
    store.write(replace(store.read(), tries=1))  # as the next start counts
    with fleet.device(window_s=3600.0) as device:
        device.check()  # the updater's thread is past its own start by then
        daemon = Readying(device)
        resumed = threading.Thread(target=device.updates.updater.configuration.restart)
        resumed.start()
        assert daemon.asked.wait(ANSWER_S)
        device.updates.stop()
        resumed.join(ANSWER_S)
    assert (store.read().trying, store.read().tries) == (DEBUG, 0)


def test_rollback_that_waited_while_another_release_came_takes_back_nothing(fleet: Fleet) -> None:
    with fleet.device() as device:
        device.outcome()
        configure(fleet, DEBUG)
        fleet.release(2)
        daemon = SurroundingDaemon(device)
        answers: list[Any] = []

        def ask(_: Config) -> Reloaded:
            if not answers:
                answers.append(None)
                device.updates.roll_back("adder", answers.append)
            return Reloaded()

        daemon.told = ask
        assert device.outcome()[0] == "installed"
        device.check()  # after it the rollback has been answered
        assert "release 1 served when this was asked, and by now it is 2; nothing is taken back" in str(answers[1])
        assert device.adds() == 2.0


@pytest.mark.parametrize(
    ("before", "now", "tables", "certain", "doubtful"),
    [
        ({}, ObservedCondition("camera", "new", "lost"), {"camera"}, ["camera new: lost"], []),
        ({"camera own": ""}, ObservedCondition("camera", "own", "lost"), {"camera"}, [], ["camera own: lost"]),
        ({"camera own": "lost"}, ObservedCondition("camera", "own", "lost otherwise"), {"camera"}, [], []),
        ({"model a": ""}, ObservedCondition("model", "a", "no memory"), {"limits"}, ["model a: no memory"], []),
        ({"model a": ""}, ObservedCondition("model", "a", "no file"), {"log"}, [], ["model a: no file"]),
        ({}, ObservedCondition("model", "a", "no file"), {"limits"}, [], []),
        ({"model a": "no file"}, ObservedCondition("model", "a"), {"limits"}, [], []),
    ],
)
def test_judgement_tells_what_an_overlay_broke_from_what_the_device_may_have(
    before: dict[str, str], now: ObservedCondition, tables: set[str], certain: list[str], doubtful: list[str]
) -> None:
    assert judge_conditions(before, [now], dict.fromkeys(tables)) == (certain, doubtful)


def groups(fleet: Fleet, devices: Any, role: str = "targets") -> None:
    """Let a role say which device is in which group."""
    configure(fleet, json.dumps({"devices": devices}), role, "groups.json")


def test_group_that_targets_says_is_followed_with_its_models_and_configuration_and_remembered(fleet: Fleet) -> None:
    repository = fleet.site.repository
    for role, path in (("fleet-other", "fleet/other/assign.json"), ("config-other", "config/other/overlay.toml")):
        repository.delegate("targets", role, [path])
    repository.add_target("fleet/other/assign.json", b"[]", "fleet-other")
    repository.publish("fleet-other", "targets", "snapshot", "timestamp")
    configure(fleet, DEBUG, "config-other", "config/other/overlay.toml")
    with fleet.device() as device:
        daemon = SurroundingDaemon(device)
        device.outcome()
        groups(fleet, {"dev1": "other", "dev2": "nowhere"})
        device.apply()
        assert device.status()["group"] == "other"
        assert device.status()["models"] == {}
        assert daemon.level == "debug"
    with fleet.device() as device:
        assert device.status()["group"] == "other"
        assert device.updates.groups == ("other",)
        SurroundingDaemon(device)
        groups(fleet, {})
        assert device.outcome()[0] == "installed"
        assert device.status()["group"] == GROUP


def test_group_that_another_role_says_is_not_followed(fleet: Fleet) -> None:
    groups(fleet, {"dev1": "other"}, ROLE)
    with fleet.device() as device:
        SurroundingDaemon(device)
        assert device.outcome()[0] == "installed"
        assert device.status()["group"] == GROUP


@pytest.mark.parametrize("devices", [{"dev1": "../x"}, {"a/b": "x"}, [], {"dev1": 1}])
def test_groups_file_that_makes_no_sense_changes_no_group(fleet: Fleet, devices: Any) -> None:
    with fleet.device() as device:
        SurroundingDaemon(device)
        device.outcome()
        groups(fleet, devices)
        assert "groups.json" in device.apply()["reason"]
        assert device.status()["group"] == GROUP
        assert device.adds() == 1.0
