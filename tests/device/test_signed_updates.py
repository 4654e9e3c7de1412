"""Signed updates on a device that boots: taken, rolled back, and cut off by a loss of power."""

from __future__ import annotations

import random
import time
from contextlib import closing
from pathlib import Path

import pytest

from demo.booted_device import BootedDevice
from edge_runtime import Client
from tests.device.asking import HOST, LIMIT_S, STATE
from tests.device.followed_site import FollowedSite, Remembered, added, over, remembered, under_way_or_over, wait_told
from tests.power_loss.loop_disk import EXT4, FileSystem, LoopDisk, why_no_cut

REBOOTS = 20
LONGEST_CALM_S = 0.9
"""From the start of an update to the cut: a whole one takes about a second where nothing else runs."""

SMALL = FileSystem("small ext4", EXT4.make, EXT4.options, 64 << 20)

pytestmark = pytest.mark.long


def test_a_device_takes_a_signed_release_and_refuses_one_whose_golden_output_is_wrong(
    device: BootedDevice, shared: Path
) -> None:
    site = FollowedSite(shared)
    first = site.release(1)
    site.let_follow(device)
    with Client(device.endpoint) as client:
        wait_told(client, over(first))
        wait_told(client, over(site.release(2)))
        assert added(client) == (2, 2.0)
        told = wait_told(client, over(site.release(3, says=4.0)))
        assert "golden" in told["refused"][0]["reason"]
        assert added(client) == (2, 2.0)
    device.shut_down()
    device.boot()
    with Client(device.endpoint) as client:
        client.wait_ready(LIMIT_S, "adder")
        assert added(client) == (2, 2.0)
        assert [each["release"] for each in client.update_status()["refused"]] == [3]


def test_a_device_whose_power_is_cut_in_the_middle_of_updates_always_comes_back_serving(
    device: BootedDevice, shared: Path, tmp_path: Path
) -> None:
    chance = random.Random("power")
    site = FollowedSite(shared)
    made = site.release(1)
    site.let_follow(device)
    with Client(device.endpoint) as client:
        wait_told(client, over(made))
    lives: list[Remembered] = []
    in_the_middle = 0
    for _ in range(REBOOTS):
        time.sleep(chance.random() * LONGEST_CALM_S)
        device.cut_power()
        lives.append(remembered(device, tmp_path))
        assert forgotten(lives) == []
        in_the_middle += lives[-1].under_way == made.release.counter
        if lives[-1].active == made.release.counter or made.release.manifest_sha256 in lives[-1].refused:
            made = site.release(made.release.counter + 1)
        device.boot()
        with Client(device.endpoint) as client:
            client.wait_ready(LIMIT_S, "adder")
            version, number = added(client)
            assert version == number
            assert lives[-1].active <= version <= made.release.counter
            wait_told(client, under_way_or_over(made))
    updates = len({life.active for life in lives})
    print(
        f"{in_the_middle} of {REBOOTS} cuts in the middle of an update; {made.release.counter} releases, {updates} ran"
    )
    assert in_the_middle >= REBOOTS / 4, "too few cuts came in the middle of an update to say much"
    with Client(device.endpoint) as client:
        wait_told(client, over(made))
    assert device.unit("NRestarts") == "0"


def forgotten(lives: list[Remembered]) -> list[str]:
    """What the device knew in the life before the last, or at its beginning, and does not know in the last."""
    before, now = (lives[-2] if len(lives) > 1 else Remembered(active=1)), lives[-1]
    wrong = {
        "its journal was lost": now.is_lost,
        "the active release went back": now.active < before.active,
        "a mark went back": any(now.marks.get(name, 0) < version for name, version in before.marks.items()),
        "a refused release is forgotten": not before.refused <= now.refused,
    }
    return [sentence for sentence, is_so in wrong.items() if is_so]


def test_a_device_whose_disk_is_full_says_so_and_serves_on_through_a_restart(
    installed: list[Path], shared: Path, tmp_path: Path
) -> None:
    reason = why_no_cut(SMALL, tmp_path / "trial")
    if reason is not None:
        pytest.skip(reason)
    disk = LoopDisk(SMALL, tmp_path / "small")
    disk.mount()
    with closing(disk), BootedDevice(tmp_path / "device", installed, {HOST: shared, STATE: disk.path}) as device:
        device.boot()
        site = FollowedSite(shared)
        first = site.release(1)
        site.let_follow(device)
        with Client(device.endpoint) as client:
            wait_told(client, over(first))
            full = device.run("dd", "if=/dev/zero", f"of={STATE}/core.1", "bs=64k", is_checked=False)
            assert "No space left on device" in full.output
            second = site.release(2)
            told = wait_told(client, lambda told: not told["checked"]["is_ok"])
            assert "No space left on device" in told["checked"]["reason"]
            assert added(client) == (1, 1.0)
        assert "No space left on device" in device.journal()
        device.run("systemctl", "restart", "edge-runtime")
        with Client(device.endpoint) as client:
            assert added(client) == (1, 1.0)
            device.run("rm", f"{STATE}/core.1")
            wait_told(client, over(second))
            assert added(client) == (2, 2.0)
