"""The signed configuration of a group, and the daemon as a process: taken over as it serves, and at its next start."""

from __future__ import annotations

from pathlib import Path

from edge_runtime import Client
from tests.contract.updates.updated_device import Fleet, update_settings
from tests.fakes.daemon_process import DaemonProcess
from tests.fakes.update_site import GROUP

ROLE, PATH = f"config-{GROUP}", f"config/{GROUP}/overlay.toml"


def configure(fleet: Fleet, text: str) -> None:
    fleet.site.repository.add_target(PATH, text.encode(), ROLE)
    fleet.site.repository.publish(ROLE, "snapshot", "timestamp")
    fleet.sync()


def test_served_configuration_is_taken_over_without_a_restart_and_limits_by_the_next_start(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.site.repository.delegate("targets", ROLE, [PATH])
    configure(fleet, '[log]\nlevel = "debug"\n')
    fleet.site.repository.publish("targets", "snapshot", "timestamp")
    fleet.sync()
    root = update_settings(tmp_path, fleet.site.root).root_file
    (tmp_path / "models").mkdir()
    config = f"""
        [update]
        root_file = "{root}"
        folder = "{fleet.mirror}"
        group = "{GROUP}"
        device_id = "dev1"
        window_s = 0.0
        wake_jitter_s = 0.0
        min_check_s = 0.0
    """
    with DaemonProcess(tmp_path, config=config) as daemon:
        daemon.wait_said("the group's configuration is kept")
        assert "configuration reloaded" in daemon.messages()
        with Client(daemon.endpoint) as client:
            assert client.update_status()["configuration"]["state"] == "kept"
            configure(fleet, "[limits]\nqueue_rows = 3\n")
            client.update_apply()
            told = client.update_status()["configuration"]
            assert (told["state"], told["needs_restart"]) == ("trying", ["limits"])
            configure(fleet, '[[publish]]\nmodel = "m"\n')
            client.update_apply()
            assert "this device has no [mqtt]" in client.update_status()["configuration"]["reason"]
            configure(fleet, "[limits]\nqueue_rows = 4\n")
            client.update_apply()
        assert daemon.stop() == 0
    with DaemonProcess(tmp_path, config=config) as daemon:
        daemon.wait_said("the group's configuration is kept")
        with Client(daemon.endpoint) as client:
            told = client.update_status()["configuration"]
        assert (told["state"], told["needs_restart"]) == ("kept", [])
        assert daemon.stop() == 0
