"""What the service's unit says, tried on a device that boots: reload, what it may do, drop-ins, a model that hangs."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from demo.booted_device import UNIT, BootedDevice
from edge_runtime import Client
from edge_runtime.errors import EdgeRuntimeError
from tests.device.asking import CONFIG, HOST, LIMIT_S, MODELS, main_pid, wait_right_answer
from tests.device.hanging_model import FOR_EVER, hanging

DROP_INS = "/usr/share/edge-runtime/drop-ins"
RETRY = "edge-runtime-retry.timer"
LOOK_S = 0.2

pytestmark = pytest.mark.long


def test_the_service_as_installed_is_exposed_no_more_than_was_promised(device: BootedDevice) -> None:
    assert "edge-runtime.service" in device.run("systemd-analyze", "security", "--threshold=12", UNIT).output


def test_a_reload_takes_new_settings_and_keeps_the_daemon(device: BootedDevice) -> None:
    wait_right_answer(device)
    before = main_pid(device)
    with device.path(CONFIG).open("a") as config:
        config.write('\n[log]\nlevel = "debug"\n')
    device.run("systemctl", "reload", UNIT)
    wait_right_answer(device)
    assert main_pid(device) == before
    assert "configuration reloaded" in device.journal()


def test_a_wrong_setting_fails_the_service_at_once_says_so_and_the_mended_file_serves(device: BootedDevice) -> None:
    wait_right_answer(device)
    config = device.path(CONFIG)
    before = config.read_text()
    config.write_text(before.replace("models = ", "modles = "))
    assert device.run("systemctl", "restart", UNIT, is_checked=False).status != 0
    assert (device.unit("ActiveState"), device.unit("NRestarts")) == ("failed", "0")
    assert device.unit("ExecMainStatus") == "2"
    shown = device.run("systemctl", "status", "--no-pager", UNIT, is_checked=False).output
    assert f"{CONFIG}: modles" in shown
    assert "Traceback" not in shown
    assert device.unit("ActiveState", RETRY) == "active"
    config.write_text(before)
    device.run("systemctl", "restart", UNIT)
    wait_right_answer(device)


def test_a_service_whose_configuration_was_lost_serves_the_models_in_its_own_folder(device: BootedDevice) -> None:
    device.run("rm", "-r", "/etc/edge-runtime")
    device.run("systemctl", "restart", UNIT)
    wait_right_answer(device)


def test_a_configuration_that_only_root_can_read_is_named_and_not_passed_over(device: BootedDevice) -> None:
    device.run("chmod", "700", "/etc/edge-runtime")
    assert device.run("systemctl", "restart", UNIT, is_checked=False).status != 0
    assert f"{CONFIG}: cannot be read: Permission denied" in device.journal()
    assert device.unit("NRestarts") == "0"


@pytest.mark.parametrize("name", ["openvino", "memory", "credentials"])
def test_a_drop_in_for_what_a_device_has_leaves_a_service_that_serves(device: BootedDevice, name: str) -> None:
    lay_over(device, device.path(f"{DROP_INS}/{name}.conf").read_text())
    if name == "credentials":
        device.run("install", "-d", "-m", "700", "/etc/edge-runtime/credentials")
        device.run("sh", "-c", "umask 077; echo secret > /etc/edge-runtime/credentials/mqtt-password")
    device.run("systemctl", "restart", UNIT)
    wait_right_answer(device)
    if name == "credentials":
        given = device.path(f"/run/credentials/{UNIT}/mqtt-password")
        assert given.read_text() == "secret\n"


def test_a_model_that_hangs_costs_its_own_host_and_the_service_goes_on(
    device: BootedDevice, shared: Path, tmp_path: Path
) -> None:
    put_hanging(device, shared, tmp_path)
    before = main_pid(device)
    with Client(device.endpoint) as client:
        ask_for_ever(client)
        wait_right_answer(device)
        client.wait_ready(LIMIT_S, "hanging")
        assert client.infer("hanging", {"x": np.ones((1, 2), np.float32)})["y"].tolist() == [[2.0, 2.0]]
    assert main_pid(device) == before
    assert device.unit("NRestarts") == "0"


def test_a_model_that_hangs_inside_is_noticed_by_the_watchdog_and_the_others_are_served_again(
    device: BootedDevice, shared: Path, tmp_path: Path
) -> None:
    lay_over(device, "[Service]\nWatchdogSec=2\n")
    put_hanging(device, shared, tmp_path, settings='isolation = "never"\n')
    before = main_pid(device)
    with Client(device.endpoint) as client:
        ask_for_ever(client)
    end_s = time.monotonic() + LIMIT_S
    while device.unit("NRestarts") == "0" and time.monotonic() < end_s:
        time.sleep(LOOK_S)
    wait_right_answer(device)
    assert main_pid(device) != before
    assert "Watchdog timeout" in device.journal()


def put_hanging(device: BootedDevice, shared: Path, tmp_path: Path, settings: str = "") -> None:
    """Serve a model that runs for as long as a request says."""
    shutil.copy(hanging(tmp_path / "made"), shared / "hanging.onnx")
    (shared / "model.toml").write_text(settings)
    device.run("install", "-D", "-m", "644", f"{HOST}/hanging.onnx", f"{MODELS}/hanging/1/model.onnx")
    device.run("install", "-m", "644", f"{HOST}/model.toml", f"{MODELS}/hanging/model.toml")
    device.run("systemctl", "restart", UNIT)
    wait_right_answer(device)


def ask_for_ever(client: Client) -> None:
    """See that it works, and ask for a run without an end."""
    client.wait_ready(LIMIT_S, "hanging")
    assert client.infer("hanging", {"x": np.ones((1, 2), np.float32)})["y"].tolist() == [[2.0, 2.0]]
    with pytest.raises((EdgeRuntimeError, ConnectionError, TimeoutError)):
        client.infer("hanging", {"x": np.full((1, 2), FOR_EVER, np.float32)})


def lay_over(device: BootedDevice, text: str) -> None:
    """Give the service a drop-in, and let systemd read it."""
    file = device.path(f"/etc/systemd/system/{UNIT}.d/ours.conf")
    file.parent.mkdir(parents=True)
    file.write_text(text)
    device.run("systemctl", "daemon-reload")
