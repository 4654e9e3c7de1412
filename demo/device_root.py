"""The Debian root that a device of the demonstration boots.

Owns: which packages are in it, and what this machine needs for it. debian_root.py makes and keeps it; nothing here
boots it (booted_device.py), and devices write into layers of their own.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from demo.debian_root import kept_at, kept_root

SUITE = "bookworm"
"""The default Debian of a device: 12."""

PACKAGES = (
    "systemd-sysv", "dbus",                 # what boots
    "python3", "adduser",                   # what the package depends on, so that it installs with no network
    "init-system-helpers", "libgomp1", "libstdc++6",
)  # fmt: skip

OWN_SETTINGS = """\
set -eu
printf '[Journal]\\nStorage=persistent\\n' > "$1/etc/systemd/journald.conf"
ln -s /dev/null "$1/etc/systemd/system/console-getty.service"
"""
"""Keeps the journal over a power loss, and lets no user log in on the console."""

OPTIONS = ("--variant=minbase", f"--include={','.join(PACKAGES)}", f"--customize-hook={OWN_SETTINGS}")
NEEDED = {"mmdebstrap": "mmdebstrap", "systemd-nspawn": "systemd-container", "nsenter": "util-linux"}
APT_LINE = "sudo apt-get install mmdebstrap systemd-container"


def why_no_root() -> str | None:
    """Why no root can be created here, and what to do about it; None if one can."""
    if os.geteuid() != 0:
        return "booting a device needs root: sudo make demo-device"
    missing = [program for program in NEEDED if shutil.which(program) is None]
    if missing:
        return f"no {' and no '.join(missing)}: {APT_LINE}"
    return None


def is_made() -> bool:
    """Whether the root lies in the cache."""
    return kept_at(SUITE, OPTIONS).is_dir()


def device_root(suite: str = SUITE) -> Path:
    """The root's folder, created if missing in about a minute, with a network. Raises as `kept_root`."""
    return kept_root(suite, OPTIONS)
