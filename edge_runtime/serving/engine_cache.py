"""Engines on disk: those built for this device, the reasons of failed builds, and the timings of kernels.

Owns: the folder, the format of its files, and its size. A file carries the hash of its name and content, so a damaged
or swapped file is found before any library reads it, and built again. Builds nothing. Thread: any; the child too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
from pathlib import Path
from struct import Struct

from edge_runtime.backends.tensorrt_plan import EnginePlan
from edge_runtime.errors import LoadFailed, NotBuiltYet, StorageFailed
from edge_runtime.repository.durable import read_kept, remove_parts, write_atomically

log = logging.getLogger(__name__)

LIMIT_BYTES = 2 << 30
"""All files together: some twenty engines of ResNet-50's size in f32 (100 MB), an eighth of a Jetson's smallest eMMC
(16 GB). The least recently used file goes first."""

ENGINE, FAILURE, TIMINGS = ".engine", ".failure", ".timings"

MAX_FAILURE_BYTES = 1 << 16
MAX_FAILURES = 256

_HEADER = Struct("<8sQ32s")
_MAGIC = b"ERENGIN2"
_MODE = 0o600


class EngineCache:
    """An EngineSource that builds nothing: one folder. A key is 64 hexadecimal digits, of all an engine depends on."""

    def __init__(self, folder: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self.folder = folder
        self._limit_bytes = limit_bytes

    def clean(self) -> None:
        """Remove what interrupted writers left. The folder's owner calls it at start."""
        remove_parts(self.folder)

    def engine(self, plan: EnginePlan, key: str) -> bytes:
        """Return an engine that is built. Raises NotBuiltYet, LoadFailed."""
        del plan
        found = self.read(key)
        if found is None:
            failure = self.failure(key)
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

    def failure(self, key: str) -> str | None:
        """Read why an engine cannot be built; None where no reason is kept."""
        path = self.folder / f"{key}{FAILURE}"
        try:
            content = read_kept(path, MAX_FAILURE_BYTES)
            return f"{json.loads(content)['reason']} (not tried again until something changes; or remove {path})"
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep_failure(self, key: str, reason: str) -> None:
        """Keep why an engine cannot be built, so that no start tries it again in vain."""
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
            content = read_kept(path, self._limit_bytes + _HEADER.size)
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

    def _evict(self, newest: Path) -> None:
        """Remove files until the limit holds; the newest stays."""
        files = [path for path in self._by_age(ENGINE, TIMINGS) if path != newest]
        total = sum(_size(path) for path in (*files, newest))
        for path in files:
            if total <= self._limit_bytes:
                return
            total -= _size(path)
            with contextlib.suppress(OSError):
                path.unlink()
            log.info("an engine used long ago is removed to make room", extra={"file": path.name})

    def _by_age(self, *suffixes: str) -> list[Path]:
        """Files of these kinds, the least recently used first."""
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


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
