"""A signed apt repository of this test's own, its packages, and devices that are subscribed to it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from demo.booted_device import BootedDevice
from edge_runtime import __version__

if TYPE_CHECKING:
    from deploy.apt.repository import Repository

PLACE = "/media/apt"
"""Where a device sees the repository."""

KEYS_PACKAGE = "edge-runtime-archive-keyring_1~{suite}_all.deb"
LIMIT_S = 300.0


@dataclass(frozen=True)
class AptSite:
    """A repository of one distribution's packages. folder: shared with devices as PLACE."""

    folder: Path
    key: str
    suite: str = "bookworm"

    @property
    def pool(self) -> Path:
        """Where its packages lie."""
        return self.folder / "pool" / self.suite

    def publish(self, phase: int = 100, now_utc: datetime | None = None) -> None:
        """Write and sign the indices of what lies in the pool. now_utc: when that is; None: now."""
        from deploy.apt.repository import publish

        publish(self.repository, self.suite, phase=phase, now_utc=now_utc)

    @property
    def repository(self) -> Repository:
        """As the program that writes it has it."""
        from deploy.apt.repository import Repository

        return Repository(self.folder, (self.key,), f"file:{PLACE}")

    def signed_by(self, key: str, copy: Path) -> None:
        """Write a copy of it that another key signed, as whoever took over the server would."""
        from deploy.apt.repository import sign

        shutil.copytree(self.pool, copy / "pool" / self.suite, copy_function=os.link)
        shutil.copytree(self.folder / "dists", copy / "dists")
        sign(copy / "dists" / self.suite, (key,))

    def subscribe(self, device: BootedDevice) -> None:
        """Install the package of the keys, and take it for the device's only source."""
        device.run("rm", "-f", "/etc/apt/sources.list")
        device.run("dpkg", "--install", f"{PLACE}/pool/{self.suite}/{KEYS_PACKAGE.format(suite=self.suite)}")
        device.run("apt-get", "update", "-qq")


@contextmanager
def own_keys() -> Iterator[tuple[str, str]]:
    """A keyring of gpg with two keys, the repository's and a stranger's. Its agent ends with it."""
    if shutil.which("gpg") is None or shutil.which("apt-ftparchive") is None:
        pytest.skip("no gpg or no apt-ftparchive; do: apt-get install gnupg apt-utils")
    # A short path, since the agent's socket is in it.
    home = tempfile.mkdtemp(prefix="edge-gpg-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GNUPGHOME", home)
        try:
            for name in ("ours", "stranger"):
                gpg("--passphrase", "", "--quick-generate-key", name, "ed25519", "sign", "never")
            ours, stranger = re.findall(r"^fpr:+([0-9A-F]+):", gpg("--with-colons", "--list-keys"), re.MULTILINE)
            yield ours, stranger
        finally:
            subprocess.run(["gpgconf", "--kill", "all"], timeout=LIMIT_S, check=False, stdin=subprocess.DEVNULL)
            shutil.rmtree(home, ignore_errors=True)


def gpg(*words: str) -> str:
    """What gpg says."""
    return subprocess.run(
        ["gpg", "--batch", "--pinentry-mode", "loopback", *words],
        check=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    ).stdout  # fmt: skip


def changed_package(
    package: Path, folder: Path, version: str, edits: Mapping[str, tuple[str, str]], without: str = ""
) -> Path:
    """The package as another version. edits: by the file's path below site-packages, a text and what stands for it.

    An absolute path is the package's own. without: a folder below site-packages that the other version does not have.
    """
    suite = package.name.split("_")[1].partition("~")[2]
    with tempfile.TemporaryDirectory(prefix="edge-package-", dir=folder) as made:
        root = Path(made)
        dpkg_deb("--raw-extract", package, root)
        (packages,) = (root / "usr/lib/edge-runtime/lib").glob("*/site-packages")
        numbers = {"edge_runtime/__init__.py": (f'"{__version__}"', f'"{version}"')}
        for file, (before, after) in {**numbers, **edits}.items():
            place = root / file.lstrip("/") if file.startswith("/") else packages / file
            text = place.read_text()
            assert before in text, f"{file}: {before}"
            place.write_text(text.replace(before, after))
        if without:
            shutil.rmtree(packages / without)
        sums = root / "DEBIAN/md5sums"
        lines = sums.read_text().splitlines(keepends=True)
        sums.write_text("".join(line for line in lines if not line.rstrip().endswith((*numbers, *edits))))
        control = root / "DEBIAN/control"
        control.write_text(control.read_text().replace(f"Version: {__version__}~", f"Version: {version}~"))
        done = folder / f"edge-runtime_{version}~{suite}_amd64.deb"
        dpkg_deb("-Znone", "--root-owner-group", "--build", root, done)
    return done


def empty_package(folder: Path, name: str, version: str, fields: str = "") -> Path:
    """A package with nothing in it: what apt's solver sees of a distribution's."""
    with tempfile.TemporaryDirectory(prefix="edge-package-", dir=folder) as made:
        control = Path(made) / "DEBIAN/control"
        control.parent.mkdir()
        control.parent.chmod(0o755)
        control.write_text(
            f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: nobody <nobody@example.com>\n"
            f"{fields}Description: empty\n"
        )
        done = folder / f"{name}_{version}_amd64.deb"
        dpkg_deb("--root-owner-group", "--build", made, done)
    return done


def dpkg_deb(*words: str | Path) -> None:
    """Raises CalledProcessError with its words."""
    subprocess.run(["dpkg-deb", *map(str, words)], check=True, timeout=LIMIT_S, capture_output=True, text=True)
