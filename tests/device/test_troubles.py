"""What happens to devices in years: a daemon killed, stalled, a full disk, reboots."""

from __future__ import annotations

import pytest

from demo.booted_device import UNIT, BootedDevice
from tests.device.asking import (
    main_pid,
    wait_right_answer,
)
from tests.device.stalling import serving_thread, stall_until_killed

BACK_BAR_S = 2.0

pytestmark = pytest.mark.long


def test_a_killed_daemon_is_back_and_answers(device: BootedDevice) -> None:
    wait_right_answer(device)
    before = main_pid(device)
    device.run("systemctl", "kill", "--kill-whom=main", "--signal=KILL", UNIT)
    took_s = wait_right_answer(device)
    print(f"back after {took_s:.2f} s")
    assert took_s < 3 * BACK_BAR_S
    assert main_pid(device) != before
    assert device.unit("NRestarts") == "1"


def test_a_serving_loop_that_stalls_is_noticed_by_the_watchdog_and_started_again(device: BootedDevice) -> None:
    wait_right_answer(device)
    before = main_pid(device)
    print(f"noticed after {stall_until_killed(serving_thread(device)):.1f} s")
    wait_right_answer(device)
    assert main_pid(device) != before
    assert "Watchdog timeout" in device.journal()


def test_a_reboot_in_order_drains_and_serves_again(device: BootedDevice) -> None:
    wait_right_answer(device)
    device.shut_down()
    device.boot()
    wait_right_answer(device)
    last = device.run("journalctl", "--boot=-1", "--no-pager", "--output=cat", "--unit", "edge-runtime").output
    assert '"drained": true' in last
    assert "Failed with result" not in last


def test_a_device_whose_power_is_cut_again_and_again_serves_again(device: BootedDevice) -> None:
    for _ in range(3):
        wait_right_answer(device)
        device.cut_power()
        device.boot()
    wait_right_answer(device)
    assert device.unit("NRestarts") == "0"
