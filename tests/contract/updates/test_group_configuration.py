"""A device and the signed configuration of its group: tried, kept, taken back, and who may say it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.daemon.core import Reloaded
from edge_runtime.updates.kept_configuration import ConfigurationStore, lay_over
from tests.contract.updates.updated_device import Fleet, UpdatedDevice
from tests.fakes.update_site import GROUP

DEBUG = '[log]\nlevel = "debug"\n'
ERROR = '[log]\nlevel = "error"\n'
ROLE, PATH = f"config-{GROUP}", f"config/{GROUP}/overlay.toml"


class FakeDaemon:
    """The daemon around the device's core: reads the configuration again as a daemon does.

    told: how a reload ends, by the level of the log. loses: what is lost with the level "debug".
    """

    def __init__(self, device: UpdatedDevice, told: Callable[[str], Reloaded]) -> None:
        self.is_ready = True
        self.lost: list[str] = []
        self.loses = ""
        self.level = ""
        self._core = device.runtime.core
        self.told = told
        self._core.daemon = self

    def reload(self, stop: threading.Event) -> Reloaded:
        self.level = lay_over(self._core.config, is_start=False).log.level
        if self.level == "debug" and self.loses:
            self.lost.append(self.loses)
        return self.told(self.level)

    def troubles(self) -> list[str]:
        return self.lost


def surround(device: UpdatedDevice, told: Callable[[str], Reloaded] = lambda _: Reloaded()) -> FakeDaemon:
    """A daemon around the device's core."""
    return FakeDaemon(device, told)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """Whose group has a role for its configuration, which says nothing yet."""
    fleet = Fleet(tmp_path)
    fleet.site.repository.delegate("targets", ROLE, [PATH])
    configure(fleet, "")
    fleet.site.repository.publish("targets", "snapshot", "timestamp")
    fleet.release(1)
    return fleet


def configure(fleet: Fleet, text: str | bytes, role: str = ROLE, path: str = PATH) -> None:
    """Let a role sign a configuration."""
    fleet.site.repository.add_target(path, text.encode() if isinstance(text, str) else text, role)
    fleet.site.repository.publish(role, "snapshot", "timestamp")
    fleet.sync()


def told(device: UpdatedDevice) -> dict[str, Any]:
    return device.status()["configuration"]


@pytest.mark.smoke
def test_configuration_is_tried_kept_and_in_force_after_a_restart(fleet: Fleet) -> None:
    configure(fleet, DEBUG)
    with fleet.device() as device:
        daemon = surround(device)
        device.outcome()
        assert daemon.level == "debug"
        assert (told(device)["state"], told(device)["reason"]) == ("kept", "")
        core = device.runtime.core.config
    assert lay_over(core, is_start=True).log.level == "debug"


def test_configuration_is_taken_back_where_a_camera_is_lost_since_and_never_tried_again(fleet: Fleet) -> None:
    configure(fleet, ERROR)
    with fleet.device() as device:
        daemon = surround(device)
        daemon.lost = ["camera old: gone before"]
        device.apply()
        assert told(device)["state"] == "kept"
        configure(fleet, DEBUG)
        daemon.loses = "camera gate: no route"
        assert device.apply()["is_ok"]
        assert daemon.level == "error"
        assert told(device)["reason"] == "refused: since it is in force: camera gate: no route"
        daemon.lost.clear()
        device.apply()
        assert daemon.level == "error"
        assert told(device)["reason"].startswith("refused before")
        daemon.loses = ""
        configure(fleet, DEBUG + "# again\n")
        device.apply()
        assert (daemon.level, told(device)["state"]) == ("debug", "kept")


def test_configuration_that_a_door_cannot_take_is_refused_with_its_reason(fleet: Fleet) -> None:
    configure(fleet, DEBUG)
    with fleet.device() as device:
        daemon = surround(device, lambda level: Reloaded("no such model" if level == "debug" else ""))
        device.apply()
        assert daemon.level == "info"
        assert told(device) | {"sha256": ""} == {
            "state": "none", "sha256": "", "reason": "refused: no such model", "needs_restart": [],
        }  # fmt: skip


def test_configuration_is_put_off_and_not_refused_where_the_devices_own_file_is_broken(fleet: Fleet) -> None:
    configure(fleet, DEBUG)
    with fleet.device() as device:
        daemon = surround(device, lambda _: Reloaded("config.toml:1: not TOML", is_read=False))
        device.apply()
        assert told(device)["reason"] == "put off: config.toml:1: not TOML"
        daemon.told = lambda _: Reloaded()
        device.apply()
        assert told(device)["state"] == "kept"


def test_configuration_that_needs_a_restart_is_judged_after_it(fleet: Fleet) -> None:
    configure(fleet, "[limits]\nqueue_rows = 3\n")
    with fleet.device() as device:
        surround(device, lambda _: Reloaded(needs_restart=("mqtt", "limits")))
        device.apply()
        device.apply()
        assert told(device)["state"] == "trying"
        assert told(device)["needs_restart"] == ["limits"]
        config = device.runtime.core.config
    assert lay_over(config, is_start=True).limits.queue_rows == 3
    with fleet.device() as device:
        surround(device)
        device.apply()
        assert told(device)["state"] == "kept"


def test_configuration_on_trial_goes_on_after_the_daemon_ended(fleet: Fleet) -> None:
    store = ConfigurationStore(fleet.folder / "state" / "update")
    with fleet.device() as device:
        surround(device)
        device.apply()
    store.write(store.read().tried(DEBUG, ("camera a: lost",)))
    with fleet.device() as device:
        daemon = surround(device)
        daemon.lost = ["camera a: lost", "camera b: lost"]
        device.updates.updater.configuration.restart()
        assert told(device)["reason"] == "refused: since it is in force: camera b: lost"


def test_configuration_that_may_not_be_is_refused_and_models_are_updated_all_the_same(fleet: Fleet) -> None:
    configure(fleet, "[zmq]\ninsecure = true\n")
    with fleet.device() as device:
        surround(device)
        assert device.outcome()[0] == "installed"
        assert "zmq: a signed configuration may not say this" in told(device)["reason"]
        assert told(device)["state"] == "none"


@pytest.mark.parametrize("data", [b"\xff\xfe", b"[log", b"x" * 70_000])
def test_configuration_that_is_no_text_keeps_no_model_from_its_update(fleet: Fleet, data: bytes) -> None:
    configure(fleet, data)
    with fleet.device() as device:
        surround(device)
        assert device.outcome()[0] == "installed"
        assert told(device)["reason"]


def test_configuration_signed_by_the_group_that_is_assigned_releases_is_not_believed(fleet: Fleet) -> None:
    fleet.site.repository.add_target(PATH, DEBUG.encode(), f"fleet-{GROUP}")
    fleet.site.repository.publish(f"fleet-{GROUP}", "snapshot", "timestamp")
    fleet.sync()
    with fleet.device() as device:
        daemon = surround(device)
        assert device.apply()["is_ok"]
        assert (daemon.level, told(device)["state"]) == ("", "none")


def test_configuration_is_looked_at_and_not_taken_by_a_check_that_installs_nothing(fleet: Fleet) -> None:
    configure(fleet, DEBUG)
    with fleet.device() as device:
        daemon = surround(device)
        device.check()
        assert daemon.level == ""


def test_configuration_is_left_alone_where_the_device_says_so(fleet: Fleet) -> None:
    configure(fleet, DEBUG)
    with fleet.device(configuration=False) as device:
        daemon = surround(device)
        device.apply()
        assert (daemon.level, told(device)["state"]) == ("", "off")


def test_configuration_that_is_signed_no_more_is_taken_back(fleet: Fleet) -> None:
    configure(fleet, DEBUG)
    with fleet.device() as device:
        daemon = surround(device)
        device.apply()
        configure(fleet, "")
        device.apply()
        assert (daemon.level, told(device)["state"]) == ("info", "none")


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
        daemon = surround(device)
        device.outcome()
        groups(fleet, {"dev1": "other", "dev2": "nowhere"})
        device.apply()
        assert device.status()["group"] == "other"
        assert device.status()["models"] == {}
        assert daemon.level == "debug"
    with fleet.device() as device:
        assert device.status()["group"] == "other"
        assert device.updates.groups == ("other",)
        surround(device)
        groups(fleet, {})
        assert device.outcome()[0] == "installed"
        assert device.status()["group"] == GROUP


def test_group_that_another_role_says_is_not_followed(fleet: Fleet) -> None:
    groups(fleet, {"dev1": "other"}, ROLE)
    with fleet.device() as device:
        surround(device)
        assert device.outcome()[0] == "installed"
        assert device.status()["group"] == GROUP


@pytest.mark.parametrize("devices", [{"dev1": "../x"}, {"a/b": "x"}, [], {"dev1": 1}])
def test_groups_file_that_makes_no_sense_changes_no_group(fleet: Fleet, devices: Any) -> None:
    with fleet.device() as device:
        surround(device)
        device.outcome()
        groups(fleet, devices)
        assert "groups.json" in device.apply()["reason"]
        assert device.status()["group"] == GROUP
        assert device.adds() == 1.0
