"""Regions: memory that the daemon makes, seals and shares with clients on this machine.

Owns: the memory files, their mappings, the bounds, and which connection may name which region. A file is sealed against
resizing, so no client can make a mapping fault. Knows no socket: doors/zmq/memory_socket.py hands regions out.

A region belongs to one owner, the client at the other end of a memory socket. The owner's requests come by another
connection (ZeroMQ), which shows the owner's secret once: `attach`. Its number alone never suffices.

Memory of a client changes under its reader at any moment. A reader that must not be surprised by that copies it first.

Thread: one (the I/O thread); `find`, `allocate` for an owner of a thread's own, and the end of a mapping: any.
`edge-regions` gives up the pages of regions that ended, since that takes longer than any of these may wait; it lives
only meanwhile.
"""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from functools import cache
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from edge_runtime.errors import DecodeFailed, QueueFull, TensorMismatch
from edge_runtime.messages import RegionPlace, TensorHeader
from edge_runtime.tensors import Array, datatype, element_count

log = logging.getLogger(__name__)

SECRET_BYTES = 16

MAX_REGIONS = 64
"""Of one owner. Each takes up to two descriptors of the daemon; our client cuts its arrays out of a few large ones."""

MAX_ALL_REGIONS = 192
"""Of all owners together: 384 descriptors, within the 1 024 that a process may have by default."""

SEALS = 0x1 | 0x2 | 0x4
"""F_SEAL_SEAL, F_SEAL_SHRINK and F_SEAL_GROW (fcntl(2))."""

READ_ONLY_SEALS = SEALS | 0x10
"""And F_SEAL_FUTURE_WRITE (Linux 5.1): who maps it from now on can only read."""

LENT_BYTES, MAX_LENT = 64 << 20, 16
"""Bytes and regions of one host's inputs on their way to it, and of its results on their way to the next; more are
copied once more instead."""

MAX_LENT_REGIONS = MAX_ALL_REGIONS // 2
"""Of all lenders and owners together, when another is lent: half is kept for clients that ask for regions."""

LENDER = -1
"""The user of an owner that is not a client."""

PUNCH_HOLE = 0x2 | 0x1
"""FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE (fallocate(2))."""

F_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)


class RegionBounds(Struct, frozen=True):
    """Most bytes of one owner, of the owners of one user, and of all together."""

    per_connection_bytes: int
    per_user_bytes: int
    total_bytes: int


class MappedFile(NamedTuple):
    """One memory file of the daemon. serial: never used again; address: where the daemon maps it."""

    serial: int
    fd: int
    address: int
    nbytes: int


class FoundPlace(NamedTuple):
    """Where an address lies: a memory file and the offset in it."""

    file: MappedFile
    offset: int


class SharedTensor(Struct, frozen=True):
    """An input in a region: a view of memory that its client can change at any moment."""

    array: Array
    nbytes: int


class Region:
    """One region of an owner. data: its bytes, which keep the mapping as long as any view of them."""

    __slots__ = ("data", "file")

    def __init__(self, file: MappedFile, data: Array) -> None:
        self.file = file
        self.data = data


class RegionOwner:
    """One client's regions by number, from its memory connection to the end of that.

    sender: the connection that showed the secret; None until then. nbytes: mapped, regions that requests still use
    included. lent: regions of a lender; idle: those of them that hold no tensor now.
    """

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.secret = os.urandom(SECRET_BYTES)
        self.regions: dict[int, Region] = {}
        self.lent = 0
        self.idle: list[Region] = []
        self.sender: Hashable = None
        self.nbytes = 0

    def input(self, tensor: TensorHeader) -> SharedTensor:
        """View an input in its region. Raises TensorMismatch, and Unsupported for an unknown datatype."""
        assert tensor.place is not None
        kind = datatype(tensor.datatype)
        what = f"input {tensor.name!r}"
        if not kind.itemsize:
            raise TensorMismatch(f"{what}: BYTES tensors are sent in frames, never in a region")
        nbytes = element_count(tensor.shape) * kind.itemsize
        part = self._part(what, tensor.place, nbytes, kind.itemsize)
        return SharedTensor(part.view(kind.dtype).reshape(tensor.shape), nbytes)

    def output(self, name: str, place: RegionPlace) -> Array:
        """View the bytes that an output may be written to. Raises TensorMismatch."""
        what = f"output {name!r}"
        nbytes = place.nbytes
        if nbytes is None:
            nbytes = max(self._region(what, place.region).data.nbytes - place.offset, 0)
        return self._part(what, place, nbytes, 1)

    def _part(self, what: str, place: RegionPlace, nbytes: int, itemsize: int) -> Array:
        data = self._region(what, place.region).data
        if place.offset + nbytes > data.nbytes:
            raise TensorMismatch(
                f"{what}: bytes {place.offset} to {place.offset + nbytes} are wanted of region {place.region}, "
                f"which has {data.nbytes}"
            )
        if place.offset % itemsize:
            raise TensorMismatch(f"{what}: offset {place.offset} is not a multiple of {itemsize}, an element's size")
        return data[place.offset : place.offset + nbytes]

    def _region(self, what: str, number: int) -> Region:
        region = self.regions.get(number)
        if region is None:
            raise TensorMismatch(f"{what}: this connection has no region {number}; ask the memory socket for one")
        return region


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class Regions:
    """Every region of the daemon."""

    def __init__(self, bounds: RegionBounds) -> None:
        self.bounds = bounds
        self._owners: dict[bytes, RegionOwner] = {}
        self._by_sender: dict[Hashable, RegionOwner] = {}
        # Invariant: reentrant, because a mapping may end (its last view dropped) on a thread that holds the lock.
        self._lock = threading.RLock()
        self._by_user: dict[int, int] = {}
        self._nbytes = 0
        self._serial = 0
        self._files: list[MappedFile] = []
        self._addresses: list[int] = []
        self._serials: set[int] = set()
        self._keeps_pages = False
        self._ended: deque[tuple[RegionOwner, MappedFile]] = deque()
        self._giver: threading.Thread | None = None
        self.ends = 0
        """Counts regions that ended."""
        self.on_end: list[Callable[[], None]] = []
        """Called when a region ended, on any thread; must not wait."""

    # ---- owners: one thread -----------------------------------------------------------------------------------------

    def add_owner(self, uid: int) -> RegionOwner:
        """Begin a client's memory connection."""
        owner = RegionOwner(uid)
        self._owners[owner.secret] = owner
        return owner

    def remove_owner(self, owner: RegionOwner) -> None:
        """End a client's memory connection: its regions end with the requests that use them. Idempotent."""
        self._owners.pop(owner.secret, None)
        if self._by_sender.get(owner.sender) is owner:
            del self._by_sender[owner.sender]
        owner.regions.clear()

    def attach(self, secret: bytes, sender: Hashable) -> RegionOwner:
        """Let one connection name the regions of the owner of a secret, and no other from now on.

        Raises DecodeFailed for a secret that is not one.
        """
        owner = self._owners.get(secret)
        if owner is None:
            raise DecodeFailed("secret: no memory connection has it; it ends with the connection that was told it")
        if self._by_sender.get(owner.sender) is owner:
            del self._by_sender[owner.sender]
        owner.sender = sender
        self._by_sender[sender] = owner
        return owner

    def owner_of(self, sender: Hashable) -> RegionOwner:
        """The owner whose regions a connection may name. Raises TensorMismatch without one."""
        owner = self._by_sender.get(sender)
        if owner is None:
            raise TensorMismatch("this connection has no regions: attach_memory comes first, with the secret")
        return owner

    def allocate(self, owner: RegionOwner, nbytes: int) -> tuple[int, Region]:
        """Make a region of at least `nbytes`, zeroed, and give it a number. Raises QueueFull over a bound."""
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        free = self.free_bytes(owner)
        if nbytes > free or len(owner.regions) >= MAX_REGIONS or len(self._files) >= MAX_ALL_REGIONS:
            raise QueueFull(f"{nbytes} bytes were asked for, and {free} are free; see [shared_memory]")
        region = self._map(owner, nbytes)
        number = next(each for each in range(1, MAX_REGIONS + 1) if each not in owner.regions)
        owner.regions[number] = region
        return number, region

    def free(self, owner: RegionOwner, number: int) -> bool:
        """End a region; False when there is none of this number."""
        return owner.regions.pop(number, None) is not None

    def free_bytes(self, owner: RegionOwner) -> int:
        """How much more an owner may have."""
        bounds = self.bounds
        with self._lock:
            return min(
                bounds.per_connection_bytes - owner.nbytes,
                bounds.per_user_bytes - self._by_user.get(owner.uid, 0),
                bounds.total_bytes - self._nbytes,
            )

    def close(self) -> None:
        """End every region, and leave its pages to its client: a restart of the daemon costs no client its data."""
        self._keeps_pages = True
        for owner in list(self._owners.values()):
            self.remove_owner(owner)
        self.drain()

    def drain(self) -> None:
        """Wait until the regions that ended are given up."""
        giver = self._giver
        if giver is not None:
            giver.join()

    # ---- any thread -------------------------------------------------------------------------------------------------

    @property
    def are_none(self) -> bool:
        """Whether there is no region now."""
        return not self._files

    def find(self, address: int) -> FoundPlace | None:
        """Where an address lies; None outside of all regions. Valid as long as the caller holds a view of it."""
        if not self._files:
            return None
        with self._lock:
            index = bisect.bisect_right(self._addresses, address) - 1
            if index < 0:
                return None
            file = self._files[index]
        offset = address - file.address
        return FoundPlace(file, offset) if offset < file.nbytes else None

    def is_there(self, serial: int) -> bool:
        """Whether a memory file has not ended. Takes no lock: it is asked under the locks of its listeners."""
        return serial in self._serials

    def snapshot(self) -> dict[str, int]:
        """Owners, regions and their bytes, for `stats`."""
        with self._lock:
            return {"connections": len(self._owners), "regions": len(self._files), "bytes": self._nbytes}

    def lend(self, lender: RegionOwner, nbytes: int) -> Array | None:
        """Bytes for a tensor that a host reads in place, from a client or from another host; back with their last view.

        lender: one for each host whose inputs or results go there, so that no host maps memory that others than its own
        are given. Hosts can only read it: two steps may be given the same tensor.
        Returns None where so much is lent already. Contents are left over from the last tensor.
        """
        size = 1 << max(nbytes - 1, mmap.PAGESIZE - 1).bit_length()
        with self._lock:
            region = next((each for each in lender.idle if each.file.nbytes == size), None)
            if region is not None:
                lender.idle.remove(region)
            elif lender.nbytes + size > LENT_BYTES or lender.lent >= MAX_LENT or len(self._files) >= MAX_LENT_REGIONS:
                lender.lent -= len(lender.idle)  # of other sizes: a tensor that comes later has their place
                lender.idle.clear()
                return None
            else:
                lender.lent += 1
        try:
            region = region or self._map(lender, size, is_read_only=True)
        except QueueFull:
            with self._lock:
                lender.lent -= 1
            return None
        # Views of the tensor hold this array, and not the region's own: it ends with the last of them.
        lent: Array = np.frombuffer(region.data.data, np.uint8)
        weakref.finalize(lent, lender.idle.append, region).atexit = False
        return lent[:nbytes]

    # ---- private ----------------------------------------------------------------------------------------------------

    def _map(self, owner: RegionOwner, nbytes: int, *, is_read_only: bool = False) -> Region:
        try:
            fd = os.memfd_create("edge-runtime-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise QueueFull(f"no memory file could be made: {error.strerror}") from None
        try:
            os.ftruncate(fd, nbytes)
            mapping = mmap.mmap(fd, nbytes)
            fcntl.fcntl(fd, F_ADD_SEALS, READ_ONLY_SEALS if is_read_only else SEALS)
        except OSError as error:
            os.close(fd)
            raise QueueFull(f"no memory file of {nbytes} bytes could be made: {error.strerror}") from None
        data: Array = np.frombuffer(mapping, np.uint8)
        with self._lock:
            self._serial += 1
            file = MappedFile(self._serial, fd, data.ctypes.data, nbytes)
            index = bisect.bisect(self._addresses, file.address)
            self._addresses.insert(index, file.address)
            self._files.insert(index, file)
            self._serials.add(file.serial)
            self._count(owner, nbytes)
        # Invariant: the file ends after the last view of it, wherever that is dropped.
        weakref.finalize(mapping, self._end, owner, file).atexit = False
        return Region(file, data)

    def _end(self, owner: RegionOwner, file: MappedFile) -> None:
        """Have a file given up that nothing views any more. Thread: any, inside any call."""
        with self._lock:
            self._ended.append((owner, file))
            if self._giver is None:
                self._giver = threading.Thread(target=self._give_up_ended, name="edge-regions", daemon=True)
                self._giver.start()

    def _give_up_ended(self) -> None:
        """Body of `edge-regions`, which lives while there is anything to give up: a GiB takes some 300 ms."""
        while True:
            with self._lock:
                if not self._ended:
                    self._giver = None
                    return
                owner, file = self._ended.popleft()
            try:
                self._give_up(owner, file)
            except Exception:
                log.exception("the memory of a region could not be given up")

    def _give_up(self, owner: RegionOwner, file: MappedFile) -> None:
        with self._lock:
            index = self._files.index(file)
            del self._files[index], self._addresses[index]
            self._serials.discard(file.serial)
            self.ends += 1
            self._count(owner, -file.nbytes)
        try:
            if not self._keeps_pages:
                # Invariant: the pages go even where the client still maps the file. By ctypes, which lets other threads
                # run meanwhile, as mmap.madvise does not.
                _libc().fallocate(file.fd, PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(file.nbytes))
        finally:
            os.close(file.fd)
        for told in tuple(self.on_end):
            told()

    def _count(self, owner: RegionOwner, nbytes: int) -> None:
        owner.nbytes += nbytes
        if owner.uid == LENDER:
            return  # no client's bounds
        self._nbytes += nbytes
        left = self._by_user.get(owner.uid, 0) + nbytes
        if left:
            self._by_user[owner.uid] = left
        else:
            self._by_user.pop(owner.uid, None)
