"""Builds on disk: engines and converted models, the reasons of failed builds, and the timings of kernels.

Owns: the folder of one kind of build, the format of its files, and its size. An engine is a file that carries the hash
of its name and content, a conversion a folder with the hashes of its files: what is damaged or swapped is found before
any library reads it, and built again. Builds nothing. Thread: any; a build's child too, for engines.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import struct
import threading
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from edge_runtime.backends.base import BuildOrder
from edge_runtime.durable import (
    PART_SUFFIX,
    make_folder,
    read_kept,
    sync_folder,
    write_atomically,
)
from edge_runtime.errors import LoadFailed, NotBuiltYet, StorageFailed
from edge_runtime.models.builds import Conversion
from edge_runtime.models.digest import sha256_of_file
from edge_runtime.models.names import is_file_name
from edge_runtime.models.walk import MAX_VERSION_FILES
from edge_runtime.sandbox.folder_lock import lock_folder, remove_unless_locked
from edge_runtime.sandbox.folder_tree import REMOVAL_S, remove_tree

log = logging.getLogger(__name__)

LIMIT_BYTES = 2 << 30
"""All builds of one kind together: some twenty engines of ResNet-50's size in f32 (100 MB), an eighth of a Jetson's
smallest eMMC (16 GB). The least recently used build goes first."""

ENGINE, FAILURE, TIMINGS, CONVERTED = ".engine", ".failure", ".timings", ".converted"

MAX_FAILURE_BYTES = 1 << 16
MAX_FAILURES = 256

MAX_REPORT_BYTES = 1 << 20
"""The longest report of a child's work, sandbox/child.py."""

_DESCRIPTION = "conversion.json"
_HEADER = struct.Struct("<8sQ32s")
_MAGIC = b"ERENGIN2"
_MODE = 0o600


class KeptFiles(Struct, frozen=True):
    """The record beside a conversion: its key, the SHA-256 of each file by name, and its report."""

    key: str
    files: dict[str, str]
    report: dict[str, Any]


_KEPT_FILES = msgspec.json.Decoder(KeptFiles)  # made by the thread that imports this, as hosts/messages.py says


class BuildCache:
    """The builds of one kind, in one folder. A key is 64 hexadecimal digits, of all that a build depends on.

    As it is, it is a BuildSource that builds nothing.
    """

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes

    def clean(self) -> None:
        """Remove the parts that interrupted writers left. The folder's owner calls it at start."""
        with contextlib.suppress(OSError):
            for part in self.folder.glob(f"*{PART_SUFFIX}"):
                if part.is_dir() and not part.is_symlink():
                    remove_unless_locked(part)
                else:
                    part.unlink(missing_ok=True)

    # ---- engines ----------------------------------------------------------------------------------------------------

    def built(self, order: BuildOrder) -> bytes:
        """Return an engine that is built. Raises NotBuiltYet, LoadFailed."""
        found = self.read(order.key)
        if found is None:
            failure = self.failure(order.key)
            raise NotBuiltYet("its engine is not built yet") if failure is None else LoadFailed(failure)
        return found

    def wait(self, key: str, stop: threading.Event) -> bool:
        """Return at once: no build is ever running. False: `stop` is set."""
        del key
        return not stop.is_set()

    def read(self, key: str) -> bytes | None:
        """Read an engine; None where there is none. A damaged one is removed and logged, and counts as none."""
        return self._read(self.folder / f"{key}{ENGINE}")

    def write(self, key: str, engine: bytes | memoryview) -> None:
        """Write an engine durably, and remove the least recently used to make room. Raises StorageFailed."""
        path = self.folder / f"{key}{ENGINE}"
        self._write(path, engine)
        self.forget_failure(key)
        self._evict(path)

    def remove(self, key: str) -> None:
        """Remove an engine."""
        with contextlib.suppress(OSError):
            (self.folder / f"{key}{ENGINE}").unlink(missing_ok=True)

    def timings(self, device: str) -> bytes:
        """Read the kernel timings of a device; empty where there are none."""
        return self._read(self.folder / f"{_name_of(device)}{TIMINGS}") or b""

    def keep_timings(self, device: str, timings: bytes) -> None:
        """Write kernel timings. A failing disk is logged, and costs the next build some time."""
        try:
            self._write(self.folder / f"{_name_of(device)}{TIMINGS}", timings)
        except StorageFailed as error:
            log.warning("kernel timings are not kept: %s", error)

    # ---- conversions ------------------------------------------------------------------------------------------------

    def conversion(self, key: str) -> Conversion | None:
        """Return a conversion; None where there is none. A damaged one is removed and logged, and counts as none."""
        folder = self.folder / f"{key}{CONVERTED}"
        try:
            kept = _KEPT_FILES.decode(read_kept(folder / _DESCRIPTION, 2 * MAX_REPORT_BYTES))
            is_whole = kept.key == key and all(map(is_file_name, kept.files))
            is_whole = is_whole and all(_plain_digest(folder / name) == said for name, said in kept.files.items())
        except (OSError, msgspec.MsgspecError):
            if not folder.exists():
                return None
            is_whole = False
        if not is_whole:
            log.warning("%s is damaged or was kept as another; it is removed, and converted again", folder)
            self._remove(folder)
            return None
        with contextlib.suppress(OSError):  # a disk that is read-only still serves
            os.utime(folder)
        return Conversion(folder, {name: folder / name for name in kept.files}, kept.report)

    @contextlib.contextmanager
    def work_folder(self, key: str) -> Iterator[Path]:
        """Make an empty folder beside the conversions for the work on one, removed at the end. Raises StorageFailed.

        Locked meanwhile, so that `clean` of another process removes it only where its owner was killed.
        """
        make_folder(self.folder)
        work = self.folder / f"{key}.{os.urandom(4).hex()}{PART_SUFFIX}"
        held: int | None = None
        try:
            try:
                work.mkdir(0o700)
                held = lock_folder(work)
            except OSError as error:
                raise StorageFailed(f"{work}: {error.strerror}; free some space, or name another --state") from error
            yield work
        finally:
            remove_tree(work, REMOVAL_S)
            if held is not None:
                os.close(held)

    def keep_conversion(
        self, key: str, made: Path, artifact: str, report: Mapping[str, Any], in_use: Collection[Path] = ()
    ) -> None:
        """Move a folder of converted files to its place, durably, and make room. Raises StorageFailed.

        LoadFailed: it holds something else than plain files, or no artifact of that name. made: in `work_folder`.
        in_use: folders of conversions that are served now, and must not go.
        """
        place = self.folder / f"{key}{CONVERTED}"
        if not stat.S_ISDIR(made.lstat().st_mode):
            raise LoadFailed("the converter left no folder of files; it is not served")
        try:
            found = sorted(islice(made.iterdir(), MAX_VERSION_FILES + 1))
            if len(found) > MAX_VERSION_FILES:
                raise LoadFailed(f"the converter left more than {MAX_VERSION_FILES} files; it is not served")
            digests = {path.name: _sealed(path) for path in found}
            if artifact not in digests:
                raise LoadFailed(f"the converter left no {artifact}; it is not served")
            kept = KeptFiles(key, digests, dict(report))
            write_atomically(made / _DESCRIPTION, msgspec.json.encode(kept), mode=_MODE)
            if not place.exists():  # another process with this state folder was quicker
                made.rename(place)
            sync_folder(self.folder)
        except OSError as error:
            raise StorageFailed(
                f"{place}: keeping the conversion failed: {error.strerror}; free some space, or name another --state"
            ) from error
        self.forget_failure(key)
        self._evict(place, *in_use)

    # ---- failures ---------------------------------------------------------------------------------------------------

    def failure(self, key: str) -> str | None:
        """Read why a build cannot be made; None where no reason is kept."""
        path = self.folder / f"{key}{FAILURE}"
        try:
            content = read_kept(path, MAX_FAILURE_BYTES)
            return f"{json.loads(content)['reason']} (not tried again until something changes; or remove {path})"
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep_failure(self, key: str, reason: str) -> None:
        """Keep why a build cannot be made, so that no start tries it again in vain."""
        try:
            write_atomically(self.folder / f"{key}{FAILURE}", json.dumps({"reason": reason}).encode())
        except StorageFailed as error:
            log.warning("the reason of a failed build is not kept: %s", error)
        failures = self._by_age(FAILURE)
        for path in failures[: max(len(failures) - MAX_FAILURES, 0)]:
            path.unlink(missing_ok=True)

    def forget_failure(self, key: str) -> None:
        """Drop the reason of a failed build: it worked after all, or must be tried again."""
        with contextlib.suppress(OSError):
            (self.folder / f"{key}{FAILURE}").unlink(missing_ok=True)

    # ---- private ----------------------------------------------------------------------------------------------------

    def _read(self, path: Path) -> bytes | None:
        try:
            content = read_kept(path, self.limit_bytes + _HEADER.size)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s cannot be read, and is built again: %s", path, error.strerror)
            return None
        body = _body(content, path.name)
        if body is None:
            log.warning("%s is damaged or was written as another; it is removed, and built again", path)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):  # a disk that is read-only still serves
            os.utime(path)
        return body

    def _write(self, path: Path, body: bytes | memoryview) -> None:
        header = _HEADER.pack(_MAGIC, len(body), _digest(path.name, body))
        write_atomically(path, b"".join((header, body)), mode=_MODE)

    def _evict(self, *stay: Path) -> None:
        """Remove the least recently used builds until the limit holds, but those that stay."""
        builds = self._by_age(ENGINE, TIMINGS, CONVERTED)
        total = sum(map(_size, builds))
        for path in builds:
            if total <= self.limit_bytes:
                return
            if path not in stay:
                total -= _size(path)
                self._remove(path)
                log.info("a build used long ago is removed to make room", extra={"file": path.name})

    def _remove(self, path: Path) -> None:
        """Remove a build at once: a folder under the name of a part, so that no half of it is ever found."""
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                path = path.rename(path.with_name(f"{path.name}.{os.urandom(4).hex()}{PART_SUFFIX}"))
                remove_tree(path)
            else:
                path.unlink(missing_ok=True)

    def _by_age(self, *suffixes: str) -> list[Path]:
        """Files and folders of these kinds, the least recently used first."""
        ages: list[tuple[float, Path]] = []
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                if path.suffix in suffixes:
                    with contextlib.suppress(OSError):
                        ages.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(ages)]


def _body(content: bytes, name: str) -> bytes | None:
    """Return a file's content; None where it is not whole, or was written under another name."""
    if len(content) < _HEADER.size:
        return None
    magic, length, digest = _HEADER.unpack_from(content)
    body = content[_HEADER.size :]
    whole = magic == _MAGIC and length == len(body) and _digest(name, body) == digest
    return body if whole else None


def _digest(name: str, body: bytes | memoryview) -> bytes:
    """Hash content with its name: an engine in another's place would answer with another model's numbers."""
    digest = hashlib.sha256(name.encode() + b"\n")
    digest.update(body)
    return digest.digest()


def _name_of(device: str) -> str:
    return hashlib.sha256(device.encode()).hexdigest()


def _plain_digest(path: Path) -> str:
    """The SHA-256 of a file; "" where it is not a plain file. Raises OSError."""
    return sha256_of_file(path) if stat.S_ISREG(path.lstat().st_mode) else ""


def _sealed(path: Path) -> str:
    """Make one file of a conversion durable and unchanging; returns its SHA-256. Raises LoadFailed, OSError."""
    status = path.lstat()
    # Of one name only: the child may have linked to a file that is not its own.
    if not is_file_name(path.name) or not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        raise LoadFailed(f"the converter left {path.name[:80]!r}, which is not a plain file; it is not served")
    if path.name == _DESCRIPTION:
        raise LoadFailed(f"the converter left {path.name!r}, whose place is the cache's own; it is not served")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(descriptor, _MODE)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return sha256_of_file(path)


def _size(path: Path) -> int:
    """Bytes of a file, or of the files in a folder; 0 where it is gone."""
    try:
        if path.is_dir():
            return sum(each.lstat().st_size for each in path.iterdir())
        return path.stat().st_size
    except OSError:
        return 0
