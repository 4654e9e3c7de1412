"""Choose the newest version of each Debian package of an image and write debian.lock: `make image-lock`.

Trust comes from Debian's key alone: InRelease (gpgv) -> hash of Packages.xz -> hash of each package.
"""

from __future__ import annotations

import hashlib
import lzma
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import astuple

from cross.debian import LOCK, MIRRORS, Package

SUITES = (("debian", "trixie"), ("debian", "trixie-updates"), ("debian-security", "trixie-security"))
ARCHITECTURES = ("amd64", "arm64")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"

PACKAGES = (
    "base-files", "ca-certificates", "gcc-14-base", "libbz2-1.0", "libc6", "libexpat1", "libffi8", "libgcc-s1",
    "libgomp1", "liblzma5", "libpython3.13-minimal", "libpython3.13-stdlib", "libsqlite3-0", "libssl3t64", "libstdc++6",
    "libuuid1", "libzstd1", "python3.13-minimal", "tzdata", "zlib1g",
)  # fmt: skip
"""Python, the libraries of its modules and of our wheels, authorities, time zones. No shell, no package manager.

gcc-14-base is the licence of libgcc-s1, libgomp1 and libstdc++6 and nothing else."""


def main() -> None:
    """Write the lock for every architecture."""
    chosen: dict[tuple[str, str], Package] = {}
    for archive, suite in SUITES:
        for package in _signed_packages(archive, suite):
            key = (package.architecture, package.name)
            if key not in chosen or _is_newer(package.version, chosen[key].version):
                chosen[key] = package
    missing = [f"{name} ({arch})" for arch in ARCHITECTURES for name in PACKAGES if (arch, name) not in chosen]
    if missing:
        sys.exit("not in the archive: " + ", ".join(missing))
    lines = [
        "# Debian packages of the images: architecture, name, version, sha256, archive, path. Made by: make image-lock",
        f"# day {time.strftime('%Y%m%d', time.gmtime())}",
        *(" ".join(astuple(package)) for _, package in sorted(chosen.items())),
    ]
    LOCK.write_text("\n".join(lines) + "\n")
    print(f"{LOCK}: {len(chosen)} packages")


# ---- private --------------------------------------------------------------------------------------------------------


def _signed_packages(archive: str, suite: str) -> Iterator[Package]:
    release = _verified(_get(f"{MIRRORS[archive]}/dists/{suite}/InRelease"))
    for architecture in ARCHITECTURES:
        path = f"main/binary-{architecture}/Packages.xz"
        listing = _get(f"{MIRRORS[archive]}/dists/{suite}/{path}")
        if hashlib.sha256(listing).hexdigest() != _stated_sha256(release, path):
            sys.exit(f"{archive} {suite} {path}: got other bytes than its signed Release names; try again later")
        for paragraph in lzma.decompress(listing).decode().split("\n\n"):
            fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and line[0] != " ")
            if fields.get("Package") in PACKAGES:
                yield Package(
                    architecture, fields["Package"], fields["Version"], fields["SHA256"], archive, fields["Filename"]
                )


def _verified(in_release: bytes) -> str:
    """The signed text. Exits when no key of Debian signed it."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(in_release)
        file.flush()
        done = subprocess.run(
            ["gpgv", "--quiet", "--keyring", KEYRING, "--output", "-", file.name], capture_output=True, check=False
        )
    if done.returncode != 0:
        sys.exit(f"InRelease is not signed by Debian: {done.stderr.decode()}")
    return done.stdout.decode()


def _stated_sha256(release: str, path: str) -> str:
    section = release.partition("\nSHA256:\n")[2]
    return next(line.split()[0] for line in section.splitlines() if line.endswith(f" {path}"))


def _is_newer(version: str, other: str) -> bool:
    return subprocess.run(["dpkg", "--compare-versions", version, "gt", other], check=False).returncode == 0


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 (Debian's mirror)
        data: bytes = answer.read()
    return data


if __name__ == "__main__":
    main()
