"""How to add a library that this copy of edge-runtime lacks: by the way in which this copy was installed.

Owns: the one sentence that every message about a missing library ends with. It never names edge-runtime as a package of
an index: it is on none, and anybody could take the name there. Installs nothing.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import edge_runtime
from edge_runtime.shipped import SHIPPED

DISTRIBUTION = "edge-runtime"
PACKAGE_HOME = Path("/usr/lib/edge-runtime")
"""The virtual environment of the Debian package (deploy/debian/build_deb.py)."""

FLAVOURS = "flavours"
"""A file in it: an extra and the package that adds its libraries, one a line."""

CLIENT_HOME = Path("/usr/lib/python3-edge-runtime")
"""The client's package for the distribution's own Python."""

IMAGE_HOME = Path("/opt/edge-runtime")
"""That of images made with deploy/containers; cross/build_image.py unpacks into Debian's own dist-packages."""


def install_advice(extra: str) -> str:
    """Return advice where a library of an extra is missing, as the end of a message. Raises nothing."""
    from importlib import metadata  # brings the parsers of e-mail, and only a missing library asks

    place = Path(edge_runtime.__file__).parent.parent
    try:
        found = metadata.distribution(DISTRIBUTION)
        told, required = found.read_text("direct_url.json"), list(found.requires or ())
    except metadata.PackageNotFoundError:
        told, required = None, []
    try:
        origin: dict[str, Any] = json.loads(told or "{}")
    except ValueError:
        origin = {}
    prefix = Path(sys.prefix)
    packages = added_by(PACKAGE_HOME) if prefix == PACKAGE_HOME else {}
    return advice_for(extra, origin, required, prefix=prefix, place=place, python=sys.executable, packages=packages)


def added_by(home: Path) -> dict[str, str]:
    """Return the package that adds each extra to the daemon's, as the file FLAVOURS in its home has them."""
    try:
        text = (home / FLAVOURS).read_text(encoding="utf-8")
    except OSError:
        return {}
    return {words[0]: words[1] for line in text.splitlines() if len(words := line.split()) == 2}


def advice_for(
    extra: str,
    origin: dict[str, Any],
    required: list[str],
    *,
    prefix: Path,
    place: Path,
    python: str,
    packages: Mapping[str, str],
) -> str:
    """As `install_advice`. Reads the disk only to see whether what was installed from is there still.

    origin: direct_url.json of the distribution (PEP 610). required: its requirements (PEP 508). prefix: of the
    environment. place: the folder that the package lies in. python: the interpreter. packages: Debian's, by extra.
    """
    if (package := packages.get(extra)) is not None:
        return f"the package {package} adds it: sudo apt install {package} (docs/install.md)"
    if prefix == PACKAGE_HOME or place == CLIENT_HOME:
        # Not into the package's own folder: what pip puts there as root no package knows, checks or removes.
        wanted = " ".join(f"'{each}'" for each in _requirements(extra, required)) or "its libraries"
        return (
            f"no Debian package of edge-runtime has it; in an environment of your own it is {wanted} (docs/install.md)"
        )
    if (prefix == IMAGE_HOME and _path_of(origin) is None) or (place.name == "dist-packages" and not origin):
        flavour = f"{next(iter(SHIPPED['backends']))},{extra}"  # every image has the first
        build = f"docker build -f deploy/containers/Containerfile --build-arg FLAVOUR={flavour} ."
        return f"this container image leaves it out; make one that has it, in a clone: {build}"
    return f"install it with: {python} -m pip install {_what(extra, origin, required)}"


def _what(extra: str, origin: dict[str, Any], required: list[str]) -> str:
    """Return the words after `pip install`: this copy once more with the extra, else the libraries alone."""
    url, path = str(origin.get("url", "")), _path_of(origin)
    if path is not None:
        is_editable = origin.get("dir_info", {}).get("editable", False)
        return f"{'--editable ' if is_editable else ''}'{path}[{extra}]'"
    if url and not url.startswith("file://"):
        vcs = origin.get("vcs_info", {})
        source = f"{vcs['vcs']}+{url}@{vcs['commit_id']}" if {"vcs", "commit_id"} <= vcs.keys() else url
        return f"'{DISTRIBUTION}[{extra}] @ {source}'"
    return " ".join(f"'{each}'" for each in _requirements(extra, required)) or f"'PATH-TO-THE-CLONE-OR-WHEEL[{extra}]'"


def _path_of(origin: dict[str, Any]) -> Path | None:
    """The clone or wheel that this copy was installed from, where it is still there."""
    url = str(origin.get("url", ""))
    path = Path(unquote(urlsplit(url).path)) if url.startswith("file://") else None
    return path if path is not None and path.exists() else None


def _requirements(extra: str, required: list[str]) -> list[str]:
    """The libraries of an extra, as pip takes them; an extra of ours among them is its own libraries."""
    found: list[str] = []
    for line in required:
        wanted, _, marker = line.partition(";")
        if not re.search(rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]", marker):
            continue
        ours = re.match(rf"{DISTRIBUTION}\[([^\]]+)\]", wanted.strip())
        parts = [part for name in ours[1].split(",") for part in _requirements(name.strip(), required)] if ours else []
        found += parts if ours else [wanted.strip()]
    return list(dict.fromkeys(found))
