"""A signed repository on a folder that a device sees, and what the device remembers of it when its power is off."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from demo.booted_device import BootedDevice
from edge_runtime import Client
from edge_runtime.updates.journal import Journal
from tests.device.asking import CONFIG, HOST, LIMIT_S, STATE
from tests.fakes.releases import Made
from tests.fakes.update_site import GROUP, UpdateSite, adder

LOOK_S = 0.02

Told = Callable[[Mapping[str, Any]], bool]
"""Whether what a device tells of updates is as wanted."""

SETTINGS = f"""
[update]
folder = "{HOST}/mirror"
root_file = "/etc/edge-runtime/root.json"
group = "{GROUP}"
reserve_bytes = 1048576
poll_s = 1
poll_jitter = 0
min_check_s = 0
wake_jitter_s = 0
window_s = 0.3
"""


class FollowedSite:
    """The repository and its mirror in a folder that the device sees as HOST. Makes releases of the model "adder"."""

    def __init__(self, shared: Path) -> None:
        self._site = UpdateSite()
        self._shared = shared
        self._made = shared.parent / "made"

    def release(self, number: int, **others: Any) -> Made:
        """Publish a release that adds its number, for every device, and write the mirror."""
        made = self._site.release(adder(self._made, number, **others))
        self._site.write(self._shared / "mirror")
        return made

    def let_follow(self, device: BootedDevice) -> None:
        """Name the repository in the device's configuration, and start its service again."""
        self._site.write(self._shared / "mirror")
        device.path("/etc/edge-runtime/root.json").write_bytes(self._site.root)
        with device.path(CONFIG).open("a") as config:
            config.write(SETTINGS)
        device.run("systemctl", "restart", "edge-runtime")


@dataclass(frozen=True)
class Remembered:
    """What the device's journal says. active: the release of "adder" that serves, 0 for none."""

    active: int = 0
    under_way: int = 0
    marks: Mapping[str, int] = field(default_factory=dict)
    refused: frozenset[str] = frozenset()
    is_lost: bool = False


def remembered(device: BootedDevice, folder: Path) -> Remembered:
    """Read a copy of the journal of a device that is off, as its next boot will find it."""
    aside = folder / "aside"
    if not device.path(f"{STATE}/update/journal").exists():
        return Remembered()
    shutil.copytree(device.path(f"{STATE}/update/journal"), aside)
    try:
        with closing(Journal(aside)) as journal:
            journal.open()
            release, rollout = journal.active().get("adder"), journal.rollouts().get("adder")
            return Remembered(
                release.counter if release else 0,
                rollout.release.counter if rollout else 0,
                journal.marks(),
                frozenset(journal.refused()),
                is_lost=journal.is_state_lost,
            )
    finally:
        shutil.rmtree(aside)


def added(client: Client) -> tuple[int, float]:
    """Ask the device to add to nothing: the version that did, and what it added."""
    answer = client.infer("adder", {"x": np.zeros((1, 2), np.float32)})
    return answer.version, float(answer["y"][0, 0])


def wait_told(client: Client, holds: Told) -> Mapping[str, Any]:
    """What the device tells of updates, once it is as wanted. Raises AssertionError."""
    end_s = time.monotonic() + LIMIT_S
    told: Mapping[str, Any] = {}
    while time.monotonic() < end_s:
        told = client.update_status()
        if "models" in told and holds(told):
            return told
        time.sleep(LOOK_S)
    raise AssertionError(f"the device still tells {told}")


def over(made: Made) -> Told:
    """Whether a release of "adder" is committed or refused, and nothing is under way."""

    def holds(told: Mapping[str, Any]) -> bool:
        number = made.release.counter
        is_refused = any(each["release"] == number for each in told["refused"])
        is_active = told["models"].get("adder", {}).get("version") == number
        return (is_refused or is_active) and told["under_way"] is None

    return holds


def under_way_or_over(made: Made) -> Told:
    """Whether a rollout has begun, or there is nothing to roll out any more."""
    return lambda told: told["under_way"] is not None or over(made)(told)
