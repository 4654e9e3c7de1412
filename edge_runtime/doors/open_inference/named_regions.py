"""System shared memory that clients name: POSIX shared memory of theirs, registered under a name of their choice.

Owns: the registered regions, which all doors share. Off unless the configuration allows
it: any caller could name memory of any process of this user. A region is read and written by pread and pwrite,
and never mapped, so its owner can shrink it without a fault here. Thread: any.
"""

from __future__ import annotations

import os
import stat
import threading
import weakref
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from edge_runtime.errors import (
    DecodeFailed,
    QueueFull,
    RegionExists,
    RegionNotFound,
    RegionNotOpened,
    TensorMismatch,
    Unsupported,
)
from edge_runtime.sandbox.descriptors import Descriptors
from edge_runtime.wire.codec import short

FOLDER = Path("/dev/shm")  # noqa: S108 (where POSIX shared memory lies)

MAX_NAMED_REGIONS = 128
"""Each takes a descriptor of the daemon."""

REFUSED_KEYS = ("triton_python_backend_shm_region_", "triton_", "sem.")
"""Beginnings of keys that are not a client's regions: Triton's own, and semaphores."""

MAX_KEY_BYTES = 255
"""A file name's length."""


class RegionPart(NamedTuple):
    """Where a tensor lies in memory that the client named: a registered region, and bytes in it."""

    region: str
    offset: int
    nbytes: int


class NamedRegion(Struct, eq=False, weakref=True):
    """A registered region. offset, nbytes: the part of the file that was registered."""

    name: str
    key: str
    offset: int
    nbytes: int
    fd: int

    def fields(self) -> dict[str, Any]:
        """Describe the region for the status of regions."""
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.nbytes}


class NamedRegions:
    """Registered regions by name."""

    def __init__(self, *, is_allowed: bool, max_tensor_bytes: int) -> None:
        """max_tensor_bytes: largest tensor that is read from a region."""
        self.is_allowed = is_allowed
        self._max_tensor_bytes = max_tensor_bytes
        self._regions: dict[str, NamedRegion] = {}
        self._lock = threading.Lock()

    def register(self, name: str, key: str, offset: int, nbytes: int) -> None:
        """Open a region.

        Raises Unsupported (not allowed), RegionExists, RegionNotOpened, DecodeFailed, TensorMismatch.
        """
        self._check_allowed()
        if not name:
            raise DecodeFailed("name: wanted a name for the region")
        if name in self._regions:
            raise RegionExists(f"shared memory region '{name}' already in manager")
        if len(self._regions) >= MAX_NAMED_REGIONS:
            raise DecodeFailed(f"{MAX_NAMED_REGIONS} regions are registered; unregister one first")
        if not Descriptors().may_open():
            raise QueueFull("no descriptor is left for a region; unregister one first")
        fd = _open(name, key)
        region = NamedRegion(name, key, offset, nbytes, fd)
        # Invariant: the descriptor is closed after the last use of the region, wherever that is.
        weakref.finalize(region, os.close, fd)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise RegionNotOpened(f"Unable to open shared memory region: '{key}': it is not shared memory")
        if offset + nbytes > found.st_size or not nbytes:
            raise TensorMismatch(
                f"failed to register shared memory region '{name}': invalid args: bytes {offset} to "
                f"{offset + nbytes} are wanted of '{key}', which has {found.st_size}; wanted 1 or more, all inside"
            )
        with self._lock:
            if self._regions.setdefault(name, region) is not region:
                raise RegionExists(f"shared memory region '{name}' already in manager")

    def unregister(self, name: str | None) -> None:
        """Forget one region, or all; one in use is closed later. An unknown name is not an error, as with Triton.

        Raises Unsupported (not allowed).
        """
        self._check_allowed()
        with self._lock:
            if name:
                self._regions.pop(name, None)
            else:
                self._regions.clear()

    def status(self, name: str | None) -> list[dict[str, Any]]:
        """Tell one region, or all. Raises RegionNotFound."""
        if name:
            return [self._find(name, "system shared memory region").fields()]
        return [region.fields() for region in list(self._regions.values())]

    def read(self, what: str, part: RegionPart) -> bytearray:
        """Copy a tensor out of a region. what: names it in errors. Raises RegionNotFound, TensorMismatch."""
        region, begin = self._place(what, part)
        if part.nbytes > self._max_tensor_bytes:
            raise TensorMismatch(f"{what}: {part.nbytes} bytes; at most {self._max_tensor_bytes} are read")
        data = bytearray(part.nbytes)
        view, done = memoryview(data), 0
        while done < part.nbytes:
            got = os.preadv(region.fd, [view[done:]], begin + done)
            if not got:
                raise TensorMismatch(
                    f"{what}: region '{region.name}' was shrunk: byte {part.offset + done} is not there"
                )
            done += got
        return data

    def write(self, what: str, part: RegionPart, data: memoryview) -> None:
        """Copy a tensor into a region. Raises RegionNotFound, TensorMismatch (also: it has become too small)."""
        region, begin = self._place(what, part)
        if data.nbytes > part.nbytes:
            raise TensorMismatch(
                f"shared memory size specified with the request for {what} ({part.nbytes} bytes) should be at least "
                f"{data.nbytes} bytes to hold the results"
            )
        if os.fstat(region.fd).st_size < begin + data.nbytes:
            raise TensorMismatch(f"{what}: region '{region.name}' was shrunk")
        done = 0
        while done < data.nbytes:
            try:
                done += os.pwrite(region.fd, data[done:], begin + done)
            except OSError as error:
                raise TensorMismatch(f"{what}: region '{region.name}' cannot be written: {error.strerror}") from None

    def check(self, what: str, part: RegionPart) -> None:
        """Raise the errors of `read` and `write`, as far as they are known by now."""
        self._place(what, part)

    def _place(self, what: str, part: RegionPart) -> tuple[NamedRegion, int]:
        """The region, and the byte of its file at which the part begins."""
        region = self._find(part.region)
        if part.offset >= region.nbytes:
            raise TensorMismatch(
                f"Invalid offset for shared memory region: '{part.region}': {what} wants its bytes from {part.offset} "
                f"on, it has {region.nbytes}"
            )
        if part.offset + part.nbytes > region.nbytes:
            raise TensorMismatch(
                f"Invalid offset + byte size for shared memory region: '{part.region}': {what} wants bytes "
                f"{part.offset} to {part.offset + part.nbytes}, it has {region.nbytes}"
            )
        return region, region.offset + part.offset

    def _find(self, name: str, kind: str = "shared memory region") -> NamedRegion:
        self._check_allowed()
        region = self._regions.get(name)
        if region is None:
            raise RegionNotFound(f"Unable to find {kind}: '{name}'; register it first")
        return region

    def _check_allowed(self) -> None:
        if not self.is_allowed:
            raise Unsupported(
                "Client shared memory is disabled: serve with --client-shared-memory, or set client_named = true in "
                "[shared_memory]"
            )


def _open(region: str, key: str) -> int:
    """Open shared memory by its key, as shm_open(3) does. region: its name in errors.

    Raises DecodeFailed, RegionNotOpened.
    """
    name = key.removeprefix("/")
    try:
        nbytes = len(os.fsencode(name))
    except UnicodeEncodeError:  # half a surrogate pair, which JSON may have
        nbytes = 0
    is_name = 0 < nbytes <= MAX_KEY_BYTES and "/" not in name and "\0" not in name and name not in {".", ".."}
    what = f"cannot register shared memory region {short(region)}"
    if prefix := next((each for each in REFUSED_KEYS if name.lstrip("/").startswith(each)), ""):
        raise DecodeFailed(
            f"{what} with key {short(key)} as the key contains the reserved prefix '{prefix}'; choose another one"
        )
    if not is_name:
        raise DecodeFailed(f"{what} - invalid shm key {short(key)}; wanted the name of POSIX memory, such as /frames")
    try:
        return os.open(FOLDER / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise RegionNotOpened(f"Unable to open shared memory region: '{key}': {error.strerror}") from None
