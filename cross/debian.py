"""Debian's files in an image: packages named and hashed in debian.lock, fetched once, unpacked without dpkg.

Owns: the lock's format, the cache of packages, and the choice of files. No maintainer script runs; the one effect that
an image needs is made here (`_bundle_certificates`).
"""

from __future__ import annotations

import hashlib
import io
import lzma
import posixpath
import re
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from cross.building import ShowStep, show_nothing
from cross.tree import Tree

LOCK = Path(__file__).with_name("debian.lock")

MIRRORS = {"debian": "http://deb.debian.org/debian", "debian-security": "http://deb.debian.org/debian-security"}
"""http is enough: the lock's hashes check each download."""

SNAPSHOT = "https://snapshot.debian.org/archive/{archive}/{day}T235959Z/{path}"
"""Keeps versions that the mirror dropped for newer ones; asked for the lock's day."""

LEFT_OUT = (
    "usr/share/man/*", "usr/share/locale/*", "usr/share/lintian/*", "usr/share/bug/*", "usr/share/info/*",
    "usr/share/base-files/*", "usr/share/applications/*", "usr/share/pixmaps/*", "usr/share/binfmts/*",
    "usr/share/polkit-1/*", "usr/share/gcc/*", "usr/share/gdb/*", "usr/share/python3/*", "usr/sbin/*",
    "etc/ca-certificates/*", "etc/python3.*/*", "usr/lib/python3.*/sitecustomize.py",
    "etc/update-motd.d/*", "etc/cron*", "etc/profile.d/*", "usr/lib/*/gconv/*",
    "usr/lib/*/audit/*", "usr/lib/python3.*/pydoc_data/*", "usr/lib/python3.*/_pyrepl/[!_p]*",
    "usr/lib/python3.*/turtle*", "usr/lib/python3.*/lib-dynload/_test*", "usr/lib/python3.*/lib-dynload/_curses*",
    "usr/lib/python3.*/lib-dynload/_dbm*", "usr/lib/python3.*/lib-dynload/readline*",
)  # fmt: skip
"""Manuals, translations, character sets that Python has itself, modules whose libraries are not in the image.

scikit-learn imports pydoc, and that _pyrepl.pager."""


@dataclass(frozen=True, slots=True)
class Package:
    """One line of the lock. path: below the archive's root."""

    architecture: str
    name: str
    version: str
    sha256: str
    archive: str
    path: str


def read_lock(architecture: str) -> list[Package]:
    """The lock's packages of an architecture, sorted by name."""
    lines = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    packages = [Package(*line.split()) for line in lines]
    return sorted((found for found in packages if found.architecture == architecture), key=lambda found: found.name)


def lock_day() -> str:
    """The day of the lock, as 20261121."""
    found = re.search(r"^# day (\d{8})$", LOCK.read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"{LOCK}: wanted a line '# day YYYYMMDD'")
    return found[1]


def fetch(package: Package, cache: Path) -> bytes:
    """The package's bytes, hash checked, from the cache, the mirror, or the snapshot archive."""
    place = cache / f"{package.sha256}.deb"
    if place.exists():
        data = place.read_bytes()
        if hashlib.sha256(data).hexdigest() == package.sha256:
            return data
    data = _download(package)
    cache.mkdir(parents=True, exist_ok=True)
    part = place.with_suffix(".part")
    part.write_bytes(data)
    part.replace(place)
    return data


def unpack(packages: list[Package], cache: Path, show_step: ShowStep = show_nothing) -> Tree:
    """The packages' files that an image needs, and dpkg's records of them for scanners."""
    missing = [package for package in packages if not (cache / f"{package.sha256}.deb").exists()]
    if missing:
        show_step(f"fetching {len(missing)} packages of debian.lock for {missing[0].architecture}")
    tree = Tree()
    for package in packages:
        members = dict(_ar_members(fetch(package, cache)))
        _add_files(tree, _open_tar(members, "data.tar"))
        control = _open_tar(members, "control.tar").extractfile("./control")
        assert control is not None
        tree.file(f"var/lib/dpkg/status.d/{package.name}", control.read())
    _bundle_certificates(tree)
    return tree


# ---- private --------------------------------------------------------------------------------------------------------


def _download(package: Package) -> bytes:
    places = (
        f"{MIRRORS[package.archive]}/{package.path}",
        SNAPSHOT.format(archive=package.archive, day=lock_day(), path=package.path),
    )
    failures = []
    for url in places:
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 (both are ours)
                data: bytes = answer.read()
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            failures.append(f"{url}: {error}")
            continue
        if hashlib.sha256(data).hexdigest() == package.sha256:
            return data
        failures.append(f"{url}: got other bytes than the lock names")
    raise SystemExit(
        f"{package.name} {package.version} cannot be fetched; Debian may have a newer one: make image-lock\n  "
        + "\n  ".join(failures)
    )


def _ar_members(deb: bytes) -> Iterator[tuple[str, bytes]]:
    """The three members of a .deb (deb(5)): an ar archive with headers of 60 bytes."""
    offset = 8
    while offset < len(deb):
        header = deb[offset : offset + 60]
        size = int(header[48:58])
        yield header[:16].decode().strip().rstrip("/"), deb[offset + 60 : offset + 60 + size]
        offset += 60 + size + size % 2


def _open_tar(members: dict[str, bytes], stem: str) -> tarfile.TarFile:
    (name,) = (name for name in members if name.startswith(stem))
    data = members[name]
    return tarfile.open(fileobj=io.BytesIO(lzma.decompress(data) if name.endswith(".xz") else data))


def _add_files(tree: Tree, archive: tarfile.TarFile) -> None:
    for member in archive:
        path = member.name.removeprefix("./").rstrip("/")
        if not path or path == "." or _is_left_out(path):
            continue
        # Packages may still name folders as before the merge of / and /usr.
        path = re.sub(r"^(bin|sbin|lib|lib64)/", r"usr/\1/", path)
        if member.isdir():
            tree.folder(path, member.mode & 0o1777)
        elif member.issym():
            tree.link(path, member.linkname)
        elif member.isfile() or member.islnk():
            content = archive.extractfile(member)
            assert content is not None
            tree.file(path, content.read(), member.mode & 0o777)  # no set-user-ID in an image
        else:
            raise ValueError(f"{path}: a device or a pipe in a package")


def _is_left_out(path: str) -> bool:
    if fnmatch(path, "usr/share/doc/*/*"):  # the folder itself may be a link to another package's
        return posixpath.basename(path) != "copyright"
    return any(fnmatch(path, pattern) or path == pattern.removesuffix("/*") for pattern in LEFT_OUT)


def _bundle_certificates(tree: Tree) -> None:
    """As update-ca-certificates: every authority in one file, where OpenSSL looks."""
    found = [entry.data for path, entry in tree if path.startswith("usr/share/ca-certificates/") and entry.data]
    if not found:
        return
    tree.file("etc/ssl/certs/ca-certificates.crt", b"".join(found))
    tree.link("usr/lib/ssl/cert.pem", "/etc/ssl/certs/ca-certificates.crt")
