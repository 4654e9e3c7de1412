"""Debian packages for a device of the demonstration, built from this tree: one to install and a later one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from demo.device_root import SUITE

ARCHITECTURE = "amd64"
QUICK = None
"""No compression: such a package lives for a minute."""


def why_no_package() -> str | None:
    """Why no package can be built here, and what to do about it; None if one can."""
    if find_spec("tomllib") is None:
        return "building the package needs Python 3.11 or later: make PYTHON=python3.11 VENV=build/3.11 …"
    return None


def build_package(folder: Path, version: str | None = None, suite: str = SUITE) -> Path:
    """The package for a device's Debian, in a folder. version: another than the source's.

    Downloads wheels the first time. Raises CalledProcessError with a tool's output.
    """
    from deploy.debian.build_deb import build  # Python 3.11 and later

    return build(ARCHITECTURE, suite, folder, version=version, level=QUICK)
