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
    PatientClient,
    main_pid,
    start_took_s,
    wait_right_answer,
)

READY_BAR_S = 1.5
"""Boot of the service to READY=1, with one tiny model. Asserted with three times the slack, for a busy machine."""

NEWER = "99.0.0"
SEVEN = Path("demo/seven.json").resolve()

pytestmark = pytest.mark.long


def test_an_installed_device_boots_into_a_service_that_is_ready_and_answers(device: BootedDevice) -> None:
    assert device.unit("ActiveState") == "active"
    assert device.unit("UnitFileState") == "enabled"
    assert device.run("systemctl", "is-system-running").said.strip() == "running"
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
    answer = json.loads(device.run(*ask, user="technician").said)
    assert answer["outputs"][1]["data"] == [7]
    refused = device.run(*ask, user="stranger", is_checked=False)
    assert refused.status == 1
    assert "outputs" not in refused.said


def test_an_upgrade_under_load_fails_no_request_of_a_client_that_tries_again(
    device: BootedDevice, shared: Path
) -> None:
    newer = build_package(shared, NEWER)
    device.run("sh", "-c", f"echo '# ours' >> {CONFIG}")
    wait_right_answer(device)
    before = main_pid(device)
    with PatientClient(device.endpoint) as client:
        client.wait_answers(200)
        device.run("apt-get", "install", "-qq", "-y", f"{HOST}/{newer.name}")
        client.wait_answers(200)
    print(f"{client.answered} answered, tried again {dict(client.tried_again)}, longest {client.longest_s:.2f} s")
    assert client.failed == []
    assert main_pid(device) != before
    with Client(device.endpoint) as asked:
        assert asked.stats()["version"] == NEWER
    assert device.run("tail", "-n1", CONFIG).said == "# ours\n"
    assert (
        device.run("dpkg-query", "--show", "--showformat=${Version}", "edge-runtime").said == newer.name.split("_")[1]
    )


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
    left = device.run("find", "/etc", "/usr", "/var", "/run", "-xdev", "-name", "*edge*runtime*").said
    assert [path for path in left.splitlines() if not path.startswith("/var/log/")] == []
    assert not device.path(STATE).exists()
    assert device.run("systemctl", "is-system-running", is_checked=False).said.strip() == "running"
