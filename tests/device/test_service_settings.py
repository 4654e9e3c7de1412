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
from edge_runtime.sandbox.landlock import guard
from tests.device.asking import CONFIG, HOST, LIMIT_S, MODELS, main_pid, wait_right_answer
from tests.device.hanging_model import FOR_EVER, hanging
from tests.models import python_models

DROP_INS = "/usr/share/edge-runtime/drop-ins"
RETRY = "edge-runtime-retry.timer"
LOOK_S = 0.2

READING = """
import numpy as np

def infer(inputs):
    found = []
    for path in inputs["path"]:
        try:
            open(path, "rb").close()
            found.append(b"read")
        except OSError as error:
            found.append(type(error).__name__.encode())
    return {"found": np.array(found, object)}
"""

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


@pytest.mark.skipif(guard().version == 0, reason=f"no Landlock on this machine: {guard().reason}")
def test_the_unit_and_landlock_together_keep_a_models_code_to_its_own_files_and_a_device_without_says_why(
    device: BootedDevice, shared: Path
) -> None:
    put_reading(device, shared)
    own, others = f"{MODELS}/reading/1/model.py", [CONFIG, f"{MODELS}/digits/1/model.onnx", "/etc/shadow"]
    assert can_read(device, own, *others) == ["read", *["PermissionError"] * 3]
    with Client(device.endpoint) as client:
        assert client.stats()["sandbox"] == guard().as_json()
    # The same unit, where Landlock is filtered: what the model may read besides shows what kept it from that.
    lay_over(device, "[Service]\nSystemCallFilter=~landlock_create_ruleset\n")
    device.run("systemctl", "restart", UNIT)
    assert can_read(device, own, *others) == ["read", "read", "read", "PermissionError"]
    with Client(device.endpoint) as client:
        told = client.stats()["sandbox"]
    assert (told["landlock"], told["cause"]) == (0, "filtered")
    assert "filter of system calls keeps Landlock from this process" in device.journal()
    assert "open to hosts: other files" in device.run("edge-runtime", "status").output


def put_reading(device: BootedDevice, shared: Path) -> None:
    """Serve a model.py that says which of the files that a request names it may read."""
    python_models.write(shared / "reading", [("path", "BYTES", [-1])], [("found", "BYTES", [-1])], READING)
    (shared / "model.toml").write_text("[warmup]\nruns = 0\n")
    device.run("install", "-d", f"{MODELS}/reading/1")
    device.run("sh", "-c", f"install -m 644 {HOST}/reading/* {MODELS}/reading/1/")
    device.run("install", "-m", "644", f"{HOST}/model.toml", f"{MODELS}/reading/model.toml")
    device.run("sh", "-c", f"echo 'python_models = true' >> {CONFIG}")
    device.run("systemctl", "restart", UNIT)


def can_read(device: BootedDevice, *paths: str) -> list[str]:
    """What came of reading each file in the model's process."""
    with Client(device.endpoint) as client:
        client.wait_ready(LIMIT_S, "reading")
        told = client.infer("reading", {"path": np.array([each.encode() for each in paths], object)})["found"]
    return [each.decode() for each in told.tolist()]


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
