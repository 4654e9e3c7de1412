"""Write a signed apt repository of the packages, for several distributions: `make apt-repository`.

A folder of plain files, which any web server gives out. Debian's apt-ftparchive writes the indices and gpg signs them,
with keys of the operator's own keyring. What lies in it stays, for devices that go back to an older version.
Beside the packages of the daemon it has one with the public key, apt's source and the origin for unattended-upgrades.
"""

from __future__ import annotations

import argparse
import functools
import lzma
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path

from cross.building import ShowStep, run_program, show_nothing, watched
from cross.wheels import MACHINES, ROOT
from deploy.debian.build_deb import DISTRIBUTIONS, MAINTAINER, build
from edge_runtime import __version__

ORIGIN = "edge-runtime"
COMPONENT = "main"
KEYRING = "edge-runtime-archive-keyring"
KEYRING_FILE = f"usr/share/keyrings/{KEYRING}.gpg"
SOURCES_FILE = "etc/apt/sources.list.d/edge-runtime.sources"
ORIGINS_FILE = "etc/apt/apt.conf.d/52edge-runtime"
NEEDED = {"apt-ftparchive": "apt-utils", "gpg": "gnupg", "dpkg-deb": "dpkg"}
LIMIT_S = 600.0

VALID_DAYS = 30
"""What is signed is good for so long: who holds an old copy back from a device, with a fault that was mended since, can
do so until then. A weekly renewal may fail three times before devices complain."""

SOURCES = """\
Types: deb
URIs: {url}
Suites: {name}
Components: {component}
Signed-By: /{keyring}
"""

ORIGINS = """\
// Holds back for unattended-upgrades, too, what is not for this device yet: apt's default does so for upgrades alone.
APT::Get::Phase-Policy "true";
// Lets unattended-upgrades take packages of this origin. The codename is the device's own.
Unattended-Upgrade::Origins-Pattern { "origin=edge-runtime,codename=${distro_codename}"; };
"""

CONTROL = """\
Package: {package}
Version: {version}
Architecture: all
Maintainer: {maintainer}
Section: misc
Priority: optional
Description: keys and apt's source of the packages of edge-runtime
 The public keys that sign this repository of edge-runtime, apt's source that
 trusts these keys for it alone, and its origin for unattended-upgrades.
"""


@dataclass(frozen=True)
class Repository:
    """A repository's folder, the fingerprints of its keys, and where devices find it; url "": nobody says."""

    folder: Path
    keys: tuple[str, ...]
    url: str = ""

    def pool(self, name: str) -> Path:
        """The folder of a distribution's packages."""
        return self.folder / "pool" / name


def why_no_repository() -> str | None:
    """Why none can be written here, and what to do about it; None if one can."""
    missing = {program: package for program, package in NEEDED.items() if shutil.which(program) is None}
    return f"no {', '.join(missing)}. Do: sudo apt-get install {' '.join(missing.values())}" if missing else None


def fingerprints(keys: Sequence[str]) -> tuple[str, ...]:
    """The fingerprints of secret keys in gpg's keyring, by any name that gpg takes. Raises ValueError."""
    return tuple(map(_fingerprint, keys))


def publish(
    repository: Repository,
    name: str,
    *,
    phase: int = 100,
    days: int = VALID_DAYS,
    now_utc: datetime | None = None,
    show_step: ShowStep = show_nothing,
) -> None:
    """Write a distribution's indices of what lies in its pool, with the package of the keys, and sign them.

    phase: the percentage of devices that apt upgrades to the newest version. days, now_utc: as of `renew`. Raises
    CalledProcessError.
    """
    show_step(f"{name}: indices and signatures")
    _pack_keyring(repository, name)
    suite = repository.folder / "dists" / name
    pool = repository.pool(name)
    machines = sorted({file.stem.rpartition("_")[2] for file in pool.glob("*.deb")} - {"all"})
    for index in (suite / COMPONENT).glob("binary-*"):
        if index.name.removeprefix("binary-") not in machines:
            shutil.rmtree(index)
    for machine in machines:
        # Paths in the index are from the repository's folder.
        listed = _run("apt-ftparchive", "--arch", machine, "packages", f"pool/{name}", within=repository.folder)
        index = suite / COMPONENT / f"binary-{machine}"
        index.mkdir(parents=True, exist_ok=True)
        packages = _phased(listed, phase).encode()
        (index / "Packages").write_bytes(packages)
        (index / "Packages.xz").write_bytes(lzma.compress(packages))
    renew(repository, name, days=days, now_utc=now_utc)


def renew(repository: Repository, name: str, *, days: int = VALID_DAYS, now_utc: datetime | None = None) -> None:
    """Sign a distribution's indices as they are, for some days from now on; 0: without an end.

    Raises ValueError: it has none; CalledProcessError.
    """
    suite = repository.folder / "dists" / name
    machines = sorted(folder.name.removeprefix("binary-") for folder in (suite / COMPONENT).glob("binary-*"))
    if not machines:
        raise ValueError(f"{suite}: has no packages yet; run it without RENEW=1")
    now_utc = now_utc or datetime.now(timezone.utc)
    fields = {
        "Origin": ORIGIN, "Label": ORIGIN, "Suite": name, "Codename": name, "Components": COMPONENT,
        "Architectures": " ".join(machines),
    }  # fmt: skip
    for old in ("InRelease", "Release", "Release.gpg"):
        (suite / old).unlink(missing_ok=True)  # else the new one lists them
    said = _run(
        "apt-ftparchive", "-o", "APT::FTPArchive::DoByHash=true",
        *(word for key, value in fields.items() for word in ("-o", f"APT::FTPArchive::Release::{key}={value}")),
        "release", ".", within=suite,
    )  # fmt: skip
    dates = f"Date: {format_datetime(now_utc, usegmt=True)}\n"
    if days:
        dates += f"Valid-Until: {format_datetime(now_utc + timedelta(days=days), usegmt=True)}\n"
    dated, count = re.subn(r"^Date: .*\n", dates, said, flags=re.MULTILINE)
    assert count == 1, said
    (suite / "Release").write_text(dated, encoding="utf-8")
    sign(suite, repository.keys)


def sign(suite: Path, keys: Sequence[str]) -> None:
    """Sign a distribution's Release, beside it and within. Raises CalledProcessError."""
    by = ("gpg", "--batch", "--yes", "--digest-algo", "SHA512", *_by(keys))
    _run(*by, "--armor", "--detach-sign", "--output", "Release.gpg", "Release", within=suite)
    _run(*by, "--clearsign", "--output", "InRelease", "Release", within=suite)
    for signed in ("Release.gpg", "InRelease"):
        (suite / signed).chmod(0o644)


# ---- private --------------------------------------------------------------------------------------------------------


def _fingerprint(key: str) -> str:
    try:
        said = _run("gpg", "--batch", "--with-colons", "--list-secret-keys", "--", key)
    except subprocess.CalledProcessError:
        said = ""
    found = re.search(r"^fpr:+([0-9A-F]+):", said, re.MULTILINE)
    if found is None:
        raise ValueError(
            f"KEY: gpg has no secret key {key!r}. To make one: gpg --quick-generate-key "
            "'edge-runtime packages <you@example.com>' ed25519 sign 3y, then name its fingerprint"
        )
    return found[1]


def _by(keys: Sequence[str]) -> list[str]:
    return [word for key in keys for word in ("--local-user", f"{key}!")]


def _phased(packages: str, phase: int) -> str:
    """The index with the newest version of each package for so many percent of the devices; without it for 0.

    apt-ftparchive's overrides would name packages and not versions, and hold back devices from every one. apt draws
    from 0 to 100 and takes what is not above the percentage: 0 would be one device of a hundred.
    """
    if phase >= 100:
        return packages
    entries = packages.strip().split("\n\n")
    newest: dict[str, str] = {}
    for entry in entries:
        package, version = _field(entry, "Package"), _field(entry, "Version")
        newest[package] = max(newest.get(package, version), version, key=functools.cmp_to_key(_compared))
    del newest[KEYRING]
    shown = []
    for entry in entries:
        is_newest = newest.get(_field(entry, "Package")) == _field(entry, "Version")
        if phase > 0 or not is_newest:
            shown.append(f"{entry}\nPhased-Update-Percentage: {phase}\n\n" if is_newest else f"{entry}\n\n")
    return "".join(shown)


def _field(entry: str, name: str) -> str:
    found = re.search(rf"^{name}: (.*)$", entry, re.MULTILINE)
    assert found is not None, entry
    return found[1]


def _compared(one: str, other: str) -> int:
    """Less than 0, 0 or more, as dpkg orders versions."""
    if one == other:
        return 0
    is_less = subprocess.run(["dpkg", "--compare-versions", one, "lt", other], timeout=LIMIT_S, check=False)
    return -1 if is_less.returncode == 0 else 1


def _pack_keyring(repository: Repository, name: str) -> None:
    """The package of the keys into the pool; what is there already stays if it says the same, else has one more."""
    public = subprocess.run(
        ["gpg", "--batch", "--export", *(f"{key}!" for key in repository.keys)],
        check=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL, capture_output=True,
    ).stdout  # fmt: skip
    (repository.folder / f"{KEYRING}.gpg").write_bytes(public)
    files = {KEYRING_FILE: public, ORIGINS_FILE: ORIGINS.encode()}
    if repository.url:
        source = SOURCES.format(url=repository.url, name=name, component=COMPONENT, keyring=KEYRING_FILE)
        files[SOURCES_FILE] = source.encode()
    pool = repository.pool(name)
    there = {int(file.name.split("_")[1].partition("~")[0]): file for file in pool.glob(f"{KEYRING}_*")}
    latest = max(there, default=0)
    if latest and _content(there[latest]) == files:
        return
    version = f"{latest + 1}~{name}"
    with tempfile.TemporaryDirectory(prefix="edge-runtime-keyring-") as made:
        root = Path(made)
        root.chmod(0o755)
        texts = {
            "DEBIAN/control": CONTROL.format(package=KEYRING, version=version, maintainer=MAINTAINER).encode(),
            "DEBIAN/conffiles": "".join(f"/{file}\n" for file in files if file.startswith("etc/")).encode(),
        }
        for file, content in {**files, **texts}.items():
            place = root / file
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        for path in root.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        _run("dpkg-deb", "--root-owner-group", "--build", made, str(pool / f"{KEYRING}_{version}_all.deb"))


def _content(package: Path) -> Mapping[str, bytes]:
    """The files of a package, by their paths."""
    with tempfile.TemporaryDirectory(prefix="edge-runtime-keyring-") as made:
        _run("dpkg-deb", "--extract", str(package), made)
        return {str(file.relative_to(made)): file.read_bytes() for file in Path(made).rglob("*") if file.is_file()}


def _run(*words: str, within: Path = ROOT) -> str:
    return subprocess.run(
        words, cwd=within, check=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL, capture_output=True, text=True
    ).stdout


def main() -> int:
    """Build what is missing, publish it, and print where. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Write a signed apt repository.", allow_abbrev=False)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "apt")
    parser.add_argument("--packages", type=Path, default=ROOT / "dist", help="packages that were built, for the pool")
    parser.add_argument("--distributions", nargs="+", choices=sorted(DISTRIBUTIONS), default=["bookworm", "trixie"])
    parser.add_argument("--architectures", nargs="+", choices=sorted(MACHINES), default=sorted(MACHINES))
    parser.add_argument("--keys", nargs="*", default=[], help="gpg's names of those that sign")
    parser.add_argument("--url", default="", help="where devices will find it, for the source in the keys' package")
    parser.add_argument("--phase", type=int, choices=range(101), metavar="0..100", default=100)
    parser.add_argument("--days", type=int, choices=range(367), metavar="0..366", default=VALID_DAYS)
    parser.add_argument("--renew", action="store_true", help="sign again what is there, and publish nothing new")
    parser.add_argument("--level", type=int, choices=range(10), default=6)
    arguments = parser.parse_args()
    return run_program("apt-repository", lambda: _make(arguments))


def _make(arguments: argparse.Namespace) -> None:
    reason = why_no_repository()
    if reason is not None:
        raise ValueError(reason)
    if not arguments.keys:
        raise ValueError("KEY= names no key: apt takes nothing unsigned. A fingerprint of gpg --list-secret-keys")
    with watched("the keys") as show_step:
        repository = Repository(arguments.folder.absolute(), fingerprints(arguments.keys), arguments.url)
        if arguments.renew:
            for name in arguments.distributions:
                renew(repository, name, days=arguments.days)
            names = " ".join(arguments.distributions)
            sys.stdout.write(f"{repository.folder}  {names}, signed again{_until(arguments)}\n")
            return
        for name in arguments.distributions:
            for architecture in arguments.architectures:
                if not list(arguments.packages.glob(f"edge-runtime_{__version__}~{name}_{architecture}.deb")):
                    show_step(f"{name} {architecture}: building the package")
                    build(architecture, name, arguments.packages, level=arguments.level, show_step=show_step)
            _fill_pool(repository.pool(name), sorted(arguments.packages.glob(f"*~{name}_*.deb")))
            publish(repository, name, phase=arguments.phase, days=arguments.days, show_step=show_step)
    percent = f", for {arguments.phase} % of the devices" if arguments.phase < 100 else ""
    sys.stdout.write(f"{repository.folder}  {' '.join(arguments.distributions)}{percent}{_until(arguments)}\n")
    for name in arguments.distributions:
        sys.stdout.write("".join(f"  {file.name}\n" for file in sorted(repository.pool(name).glob("*.deb"))))


def _until(arguments: argparse.Namespace) -> str:
    return f", good for {arguments.days} days" if arguments.days else ""


def _fill_pool(pool: Path, packages: Sequence[Path]) -> None:
    """Copy packages that the pool lacks. Raises ValueError: a device would not take other bytes of the same version."""
    pool.mkdir(parents=True, exist_ok=True)
    for package in packages:
        there = pool / package.name
        if not there.exists():
            part = pool / f".{package.name}.part"
            shutil.copyfile(package, part)
            part.replace(there)
        elif there.read_bytes() != package.read_bytes():
            raise ValueError(
                f"{package} is not what the repository has as {there}: devices with that version would not take it. "
                "Raise __version__, or remove the one in the repository where no device has it"
            )


if __name__ == "__main__":
    raise SystemExit(main())
