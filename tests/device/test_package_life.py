"""The package on a device that boots: installed, upgraded under load, removed, purged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from demo.booted_device import UNIT, BootedDevice
from demo.device_package import build_package
from demo.train_digits import MODEL_FILE
from edge_runtime import Client
from tests.device.asking import (
    CONFIG,
    HOST,
    MODELS,
    STATE,
    main_pid,
    start_took_s,
    wait_right_answer,
)

READY_BAR_S = 1.5
"""Boot of the service to READY=1, with one tiny model. Asserted with three times the slack, for a busy machine."""

NEWER = "99.0.0"
ROOM_KB = 64 << 10
"""On a /var of its own, before it is full."""
SEVEN = Path("demo/seven.json").resolve()

pytestmark = pytest.mark.long


def test_an_installed_device_boots_into_a_service_that_is_ready_and_answers(device: BootedDevice) -> None:
    assert device.unit("ActiveState") == "active"
    assert device.unit("UnitFileState") == "enabled"
    assert device.run("systemctl", "is-system-running").output.strip() == "running"
    wait_right_answer(device)
    print(f"from start to ready: {start_took_s(device):.2f} s")
    assert start_took_s(device) < 3 * READY_BAR_S
    assert "1 of 1 model versions ready" in device.unit("StatusText")


def test_debian_13_boots_into_a_service_that_is_ready_answers_and_is_started_again(device_13: BootedDevice) -> None:
    assert device_13.path("/etc/debian_version").read_text().startswith("13")
    wait_right_answer(device_13)
    device_13.run("systemctl", "kill", "--kill-whom=main", "--signal=KILL", UNIT)
    wait_right_answer(device_13)
    assert device_13.unit("NRestarts") == "1"
    device_13.run("systemctl", "reload", UNIT)
    wait_right_answer(device_13)


def test_users_of_the_group_are_answered_and_others_are_not(device: BootedDevice, shared: Path) -> None:
    (shared / "seven.json").write_bytes(SEVEN.read_bytes())
    group = device.unit("Group") or device.unit("User")
    device.run("useradd", "--groups", group, "technician")
    device.run("useradd", "stranger")
    ask = ("edge-runtime", "infer", "digits", "--input", f"{HOST}/seven.json", "--json")
    answer = json.loads(device.run(*ask, user="technician").output)
    assert answer["outputs"][1]["data"] == [7]
    refused = device.run(*ask, user="stranger", is_checked=False)
    assert refused.status == 1
    assert "outputs" not in refused.output


def test_removing_keeps_configuration_and_models_and_installing_again_serves_them(
    device: BootedDevice, package: Path, shared: Path
) -> None:
    (shared / package.name).write_bytes(package.read_bytes())
    device.run("apt-get", "remove", "-qq", "-y", "edge-runtime")
    assert device.unit("LoadState") == "not-found"
    assert not device.path("/run/edge-runtime").exists()
    assert not device.path("/usr/bin/edge-runtime").exists()
    assert device.path(CONFIG).is_file()
    assert device.path(f"{MODELS}/digits/1/model.onnx").read_bytes() == MODEL_FILE.read_bytes()
    device.run("apt-get", "install", "-qq", "-y", f"{HOST}/{package.name}")
    wait_right_answer(device)


def test_purging_leaves_no_file_of_the_package_and_no_service(device: BootedDevice) -> None:
    device.run("apt-get", "purge", "-qq", "-y", "edge-runtime")
    left = device.run("find", "/etc", "/usr", "/var", "/run", "-xdev", "-name", "*edge*runtime*").output
    assert [path for path in left.splitlines() if not path.startswith("/var/log/")] == []
    assert not device.path(STATE).exists()
    assert device.run("systemctl", "is-system-running", is_checked=False).output.strip() == "running"


def test_a_purge_is_done_where_the_program_was_deleted_by_hand_and_spares_a_disk_that_is_mounted_below(
    device: BootedDevice,
) -> None:
    disk = f"{MODELS}/disk"
    device.run("mkdir", disk)
    device.run("mount", "-t", "tmpfs", "tmpfs", disk)
    device.run("touch", f"{disk}/precious")
    device.run("rm", "-r", "/usr/lib/edge-runtime")
    said = device.run("apt-get", "purge", "-qq", "-y", "edge-runtime").output
    assert "Left: the user and group edge-runtime, what is mounted below" in said
    assert device.run("find", STATE, "-type", "f").output == f"{disk}/precious\n"
    assert device.run("dpkg-query", "--show", "edge-runtime", is_checked=False).status != 0
    assert device.unit("LoadState") == "not-found"


def test_a_group_that_was_made_beforehand_becomes_the_services(
    root: Path, package: Path, shared: Path, tmp_path: Path
) -> None:
    (shared / package.name).write_bytes(package.read_bytes())
    with BootedDevice(tmp_path / "device", [root], {HOST: shared}) as device:
        device.boot()
        device.run("groupadd", "--gid", "4321", "edge-runtime")
        device.run("apt-get", "install", "-qq", "-y", f"{HOST}/{package.name}")
        assert device.run("id", "--group", "edge-runtime").output == "4321\n"
        assert device.unit("ActiveState") == "active"
        # Once more, the same: nothing asks, nothing breaks.
        device.run("apt-get", "install", "--reinstall", "-qq", "-y", f"{HOST}/{package.name}")
        assert device.unit("ActiveState") == "active"


def test_a_package_whose_modules_cannot_be_compiled_is_configured_says_so_and_serves(device: BootedDevice) -> None:
    program = "/usr/lib/edge-runtime"
    device.run("mount", "--bind", program, program)
    device.run("mount", "-o", "remount,bind,ro", program)
    said = device.run("/var/lib/dpkg/info/edge-runtime.postinst", "configure", "0.0.1").output
    assert "could not be compiled" in said
    assert "Traceback" not in said
    wait_right_answer(device)


def test_an_upgrade_that_finds_var_full_leaves_the_old_version_serving_and_is_done_when_there_is_room(
    device: BootedDevice, shared: Path
) -> None:
    newer = build_package(shared, NEWER)
    var_of_its_own(device)
    device.run("systemctl", "restart", UNIT)
    wait_right_answer(device)
    before = main_pid(device)
    device.run("dd", "if=/dev/zero", "of=/var/full", "bs=4k", is_checked=False)
    upgrade = ("apt-get", "install", "-qq", "-y", f"{HOST}/{newer.name}")
    assert "No space left on device" in device.run(*upgrade, is_checked=False).output
    wait_right_answer(device)
    assert main_pid(device) == before
    device.run("systemctl", "restart", UNIT)
    wait_right_answer(device)
    device.run("rm", "/var/full")
    device.run("dpkg", "--configure", "--pending")
    device.run(*upgrade)
    wait_right_answer(device)
    with Client(device.endpoint) as asked:
        assert asked.stats()["version"] == NEWER


def var_of_its_own(device: BootedDevice) -> None:
    """Give /var a small file system, in memory, with what was in it."""
    used_kb = int(device.run("du", "-sk", "/var").output.split()[0])
    device.run("cp", "-a", "/var", "/root/var")
    device.run("mount", "-t", "tmpfs", "-o", f"size={used_kb + ROOM_KB}k", "tmpfs", "/var")
    device.run("sh", "-c", "cp -a /root/var/. /var/ && rm -r /root/var")
