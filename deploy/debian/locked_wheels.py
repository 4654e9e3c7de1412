"""What of requirements.lock runs on another machine, as wheels: resolved from the lock alone, fetched by hash, kept.

Owns: which packages an extra needs, and the cache below build/wheels. Called by builders of packages and images, for an
architecture and a Python that need not be this machine's.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from packaging.markers import Marker

from edge_runtime.typed_toml import parse_toml

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "wheels"
FETCH_LIMIT_S = 900.0

MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Debian's word for an architecture, and the kernel's."""

NOT_NEEDED = {
    "cryptography": "securesystemslib's extra `crypto`: who publishes, signs; devices check ed25519 without it",
    "coloredlogs": "onnxruntime 1.23 imports it in its tools alone",
    "sympy": "onnxruntime 1.23 imports it in its tools alone",
}
"""Packages that the lock has for others' sake."""


@dataclass(frozen=True)
class Platform:
    """Where wheels are to run. glibc: its minor version, as in 2.36."""

    architecture: str
    python: str
    glibc: int

    @property
    def machine(self) -> str:
        """The kernel's name of the architecture."""
        return MACHINES[self.architecture]

    def tags(self) -> list[str]:
        """Platform tags of wheels, newest first (PEP 600): 2.17 is the oldest glibc that any aarch64 wheel is for."""
        oldest = 5 if self.architecture == "amd64" else 17
        tags = [f"manylinux_2_{minor}_{self.machine}" for minor in range(self.glibc, oldest - 1, -1)]
        return [*tags, *(f"{old}_{self.machine}" for old in ("manylinux2014", "manylinux2010", "manylinux1"))]


@dataclass(frozen=True)
class Locked:
    """One entry of the lock. text: as it stands there, with hashes, without marker. wanted_by: what requires it."""

    name: str
    text: str
    wanted_by: frozenset[str]


def lock_entries(platform: Platform) -> dict[str, Locked]:
    """The entries whose markers hold on that platform, by name."""
    words = {
        "python_version": platform.python,
        "python_full_version": f"{platform.python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "platform_machine": platform.machine,
        "sys_platform": "linux",
    }
    blocks = re.split(r"\n(?=[a-z0-9])", (ROOT / "requirements.lock").read_text(encoding="utf-8"))
    found: dict[str, Locked] = {}
    for block in blocks:
        match = re.match(r"([a-z0-9-]+)==\S+(?: ; ([^\\\n]+?))? \\\n", block)
        if match and (match[2] is None or Marker(match[2]).evaluate(words)):
            wanted_by = frozenset(re.findall(r"^ +# +(?:via )?([a-z0-9-]+)", block, re.MULTILINE))
            # Without its marker, which pip would ask of the Python that it runs on itself.
            text = block if match[2] is None else block.replace(f" ; {match[2]}", "", 1)
            found[match[1]] = Locked(match[1], text.strip(), wanted_by)
    return found


def needed(extras: Sequence[str], platform: Platform) -> list[Locked]:
    """The package's own requirements with these extras, and all that those require, by name."""
    project = parse_toml((ROOT / "pyproject.toml").read_text(encoding="utf-8"), "pyproject.toml")["project"]
    stated = [*project["dependencies"]]
    for extra in extras:
        stated += project["optional-dependencies"][extra]
    entries = lock_entries(platform)
    taken = {_name(each) for each in stated} & entries.keys()
    while more := {each.name for each in entries.values() if each.wanted_by & taken} - taken - NOT_NEEDED.keys():
        taken |= more
    return [entries[name] for name in sorted(taken)]


def fetch_wheels(extras: Sequence[str], platform: Platform) -> list[Path]:
    """The wheels, by name; downloaded where they are not there yet. pip checks each against the lock's hashes."""
    text = "\n".join(each.text for each in needed(extras, platform)) + "\n"
    key = hashlib.sha256("\n".join([*platform.tags(), platform.python, text]).encode()).hexdigest()[:16]
    folder = CACHE / f"{platform.architecture}-{platform.python}-{key}"
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "requirements.txt").write_text(text, encoding="utf-8")
        _download(folder, platform)
        (folder / "complete").touch()
    return sorted(folder.glob("*.whl"))


def unpack_wheel(wheel: Path, folder: Path) -> None:
    """What a wheel puts into site-packages. Scripts, headers and lists of files (RECORD) are left out."""
    with zipfile.ZipFile(wheel) as archive:
        for name, inside in _site_packages(archive):
            target = folder / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))


def _site_packages(archive: zipfile.ZipFile) -> Iterator[tuple[str, PurePosixPath]]:
    for name in archive.namelist():
        path = PurePosixPath(name)
        if name.endswith("/") or ".." in path.parts or path.is_absolute():
            continue
        if not path.parts[0].endswith(".data"):
            if not (path.parts[0].endswith(".dist-info") and path.name in {"RECORD", "RECORD.jws"}):
                yield name, path
        elif path.parts[1] in {"purelib", "platlib"}:
            yield name, PurePosixPath(*path.parts[2:])


def _download(folder: Path, platform: Platform) -> None:
    tags = [word for tag in platform.tags() for word in ("--platform", tag)]
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "-qq",
         "--require-hashes", "--no-deps", "--only-binary", ":all:", "--implementation", "cp",
         "--python-version", platform.python, *tags, "--dest", str(folder),
         "--requirement", str(folder / "requirements.txt")],
        check=True, timeout=FETCH_LIMIT_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return re.sub(r"[-_.]+", "-", match[0]).lower()
