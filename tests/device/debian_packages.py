"""Debian's own packages on a device that boots: fetched from its archive, or the reason why not."""

from __future__ import annotations

import shutil

import pytest

from demo.booted_device import BootedDevice, DeviceFailed

LIMIT_S = 300.0


def install_from_debian(device: BootedDevice, *packages: str) -> None:
    """Install packages of the device's distribution, and forget its archive again. Skips the test without a network."""
    names = device.path("/etc/resolv.conf")
    names.unlink(missing_ok=True)
    shutil.copyfile("/etc/resolv.conf", names)
    try:
        device.run("apt-get", "update", "-qq", limit_s=LIMIT_S)
        device.run("apt-get", "install", "-qq", "-y", "--no-install-recommends", *packages, limit_s=LIMIT_S)
    except DeviceFailed as error:
        pytest.skip(f"Debian's packages cannot be fetched (no network?): {str(error)[:300]}")
    device.run("rm", "-rf", "/etc/apt/sources.list", "/var/lib/apt/lists")
