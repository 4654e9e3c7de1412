"""The Debian root that a device of the demonstration boots: made by mmdebstrap, once, and kept below `build/`.

Owns: which packages are in it. Nothing here boots it (booted_device.py), and nothing writes into it again: devices
write into layers of their own.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

SUITE = "bookworm"
"""Which Debian a device runs when nobody says so: 12."""

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
"""The journal survives a power loss, and nobody logs in on the console."""

MAKE_LIMIT_S = 600.0
CACHE = Path(__file__).parents[1] / "build" / "device"
NEEDED = {"mmdebstrap": "mmdebstrap", "systemd-nspawn": "systemd-container", "nsenter": "util-linux"}
APT_LINE = "sudo apt-get install mmdebstrap systemd-container"


def why_no_root() -> str | None:
    """Why no root can be made here, and what to do about it; None: it can."""
    if os.geteuid() != 0:
        return "booting a device needs root: sudo make demo-device"
    missing = [program for program in NEEDED if shutil.which(program) is None]
    if missing:
        return f"no {' and no '.join(missing)}: {APT_LINE}"
    return None


def is_made() -> bool:
    """Whether the root lies in the cache."""
    return _cached(SUITE).is_dir()


def debian_root(suite: str = SUITE) -> Path:
    """The root's folder, made if it is not there: about a minute, and the only thing here that needs a network.

    Raises CalledProcessError with mmdebstrap's words on stderr.
    """
    made = _cached(suite)
    if made.is_dir():
        return made
    CACHE.mkdir(parents=True, exist_ok=True)
    partial = CACHE / f"{made.name}.{os.getpid()}.part"
    try:
        subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}",
             "--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*",
             "--dpkgopt=path-exclude=/usr/share/locale/*", f"--customize-hook={OWN_SETTINGS}",
             suite, str(partial)],
            check=True, timeout=MAKE_LIMIT_S, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        if not made.is_dir():
            partial.rename(made)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return made


def _cached(suite: str) -> Path:
    made_of = "\n".join((suite, *PACKAGES, OWN_SETTINGS))
    return CACHE / f"root-{suite}-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"
