"""The signed configuration of a group, and the daemon as a process: taken over as it serves, and at its next start."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_runtime import Client
from edge_runtime.daemon.state_lock import StateLock
from edge_runtime.updates.kept_configuration import ConfigurationStore, KeptConfiguration
from tests.contract.updates.configured_fleet import configure, configured_fleet
from tests.contract.updates.updated_device import Fleet, update_settings
from tests.fakes.daemon_process import START_S, DaemonProcess
from tests.fakes.update_site import GROUP

TWO_OF_ONE_NAME = '[[publish]]\nmodel = "a"\nname = "x"\n[[publish]]\nmodel = "b"\nname = "x"\n'
"""Rules that no daemon can publish, which only its door of results knows."""


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    (tmp_path / "models").mkdir()
    return configured_fleet(tmp_path)


@pytest.fixture
def config(fleet: Fleet) -> str:
    root = update_settings(fleet.folder, fleet.site.root).root_file
    return f"""
        [update]
        root_file = "{root}"
        folder = "{fleet.mirror}"
        group = "{GROUP}"
        device_id = "dev1"
        window_s = 0.0
        wake_jitter_s = 0.0
        min_check_s = 0.0
    """


@pytest.fixture
def store(fleet: Fleet) -> ConfigurationStore:
    return ConfigurationStore(fleet.folder / "state" / "update")


def test_served_configuration_is_taken_over_without_a_restart_and_limits_by_the_next_start(
    fleet: Fleet, config: str
) -> None:
    configure(fleet, '[log]\nlevel = "debug"\n')
    with DaemonProcess(fleet.folder, config=config) as daemon:
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
    with DaemonProcess(fleet.folder, config=config) as daemon:
        daemon.wait_said("the group's configuration is kept")
        with Client(daemon.endpoint) as client:
            told = client.update_status()["configuration"]
        assert (told["state"], told["needs_restart"]) == ("kept", [])
        assert daemon.stop() == 0


def test_served_configuration_by_which_a_start_fails_is_taken_back_by_the_next_start(
    fleet: Fleet, config: str, store: ConfigurationStore
) -> None:
    config += '[mqtt]\nurl = "mqtt://127.0.0.1:1"\n'
    store.write(KeptConfiguration(text='[log]\nlevel = "debug"\n').tried(TWO_OF_ONE_NAME, {}))
    with DaemonProcess(fleet.folder, config=config) as daemon:
        assert daemon.process.wait(START_S) == 1, daemon.messages()
        assert "the group's configuration is taken back" in daemon.messages()
    (why,) = store.read().doubts.values()
    assert why[0].startswith("the daemon's start failed with it: publish.name: two rules are named 'x'")
    with DaemonProcess(fleet.folder, config=config) as daemon:
        daemon.wait_ready()
        assert daemon.stop() == 0


def test_served_configuration_of_the_devices_own_by_which_a_start_fails_ends_with_status_2(
    fleet: Fleet, config: str
) -> None:
    config += f'[mqtt]\nurl = "mqtt://127.0.0.1:1"\n{TWO_OF_ONE_NAME}'
    with DaemonProcess(fleet.folder, config=config) as daemon:
        assert daemon.process.wait(START_S) == 2, daemon.messages()


def test_served_configuration_on_trial_is_not_counted_by_a_start_beside_the_daemon_that_has_the_state(
    fleet: Fleet, config: str, store: ConfigurationStore
) -> None:
    store.write(KeptConfiguration().tried('[log]\nlevel = "debug"\n', {}))
    lock = StateLock(fleet.folder / "state", may_share=False)
    lock.take()
    try:
        with DaemonProcess(fleet.folder, config=config) as daemon:
            assert daemon.process.wait(START_S) == 1
        assert "is another daemon's" in (fleet.folder / "log").read_text()
    finally:
        lock.release()
    assert store.read().tries == 0
