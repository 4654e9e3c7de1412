"""A client's side of shared memory: arrays cut out of regions that the daemon hands out (docs/shared-memory.md).

Owns: the memory socket, the mappings, and which part of a region which array has. Without a memory socket (tcp, an
older daemon, none at all) there is no shared memory, and callers use ordinary arrays.

An array's part is free again when the array and all views of it are gone; an empty region is given back at once.
Thread: any. A finalizer may run inside any call, also one that holds the lock, so it only notes the freed parts.
"""

from __future__ import annotations

import array as packed_array
import contextlib
import errno
import mmap
import os
import resource
import socket
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_runtime.client import forks
from edge_runtime.client.frames import CallPlaces
from edge_runtime.config.endpoints import memory_socket_beside
from edge_runtime.errors import QueueFull
from edge_runtime.messages import RegionPlace
from edge_runtime.tensors import Array, element_count

ASK = Struct("<IIQ")
TOLD = Struct("<IIQQ16s")
_TIMEVAL = Struct("ll")
PROTOCOL, ALLOCATE, FREE, OK = 1, 1, 2, 0

ANSWER_LIMIT_S = 5
"""The daemon answers on its I/O thread, within milliseconds."""

REGION_BYTES = 1 << 20
"""The least that is asked for: many small arrays share a region. Only written pages take memory."""

ALIGN_BYTES = 64
"""Of each array: a cache line, and what the libraries that run models like best."""

NOT_ATTACHED = -1


class SharedRegion:
    """One mapped region. used: parts that arrays have, as (begin, end), in order."""

    def __init__(self, number: int, mapping: mmap.mmap, nbytes: int) -> None:
        self.number = number
        self.mapping = mapping
        self.nbytes = nbytes
        self.address = int(np.frombuffer(mapping, np.uint8).ctypes.data)
        self.used: list[tuple[int, int]] = []

    def cut(self, nbytes: int) -> int | None:
        """Take the first gap that is large enough; None where there is none."""
        begin = 0
        for index, (used_begin, used_end) in enumerate(self.used):
            if begin + nbytes <= used_begin:
                self.used.insert(index, (begin, begin + nbytes))
                return begin
            begin = used_end
        if begin + nbytes > self.nbytes:
            return None
        self.used.append((begin, begin + nbytes))
        return begin


class ClientMemory:
    """The shared memory of one client. attached: the number of the connection that may name the regions."""

    def __init__(self, endpoint: str) -> None:
        self._path = memory_socket_beside(Path(endpoint.removeprefix("ipc://"))) if "ipc://" in endpoint else None
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._close_socket: weakref.finalize[..., Any] | None = None
        self._regions: tuple[SharedRegion, ...] = ()
        self._freed: deque[tuple[SharedRegion, int]] = deque()
        self._forks = forks.count
        self._is_closed = False
        self.secret = b""
        self.attached = NOT_ATTACHED

    def allocate(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array | None:
        """Make a zeroed array, C-contiguous; None where no memory is shared.

        Raises QueueFull: over a bound, or this process may open no further file.
        """
        kind = np.dtype(dtype)
        lengths = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = element_count(lengths) * kind.itemsize
        if self._path is None or nbytes <= 0 or kind.kind in "OSUT":
            return None
        cut = self._cut(-(-nbytes // ALIGN_BYTES) * ALIGN_BYTES)
        if cut is None:
            return None
        region, begin = cut
        flat: Array = np.frombuffer(memoryview(region.mapping)[begin : begin + nbytes], np.uint8)
        # Invariant: numpy makes this the base of every view, so it ends with the last of them.
        base: Any = flat.base
        assert isinstance(base, memoryview)
        weakref.finalize(base, self._release, region, begin).atexit = False
        flat[...] = 0  # the part may have been another array's; and the pages are there before the first frame
        return flat.view(kind).reshape(lengths)

    def call_places(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> CallPlaces | None:
        """Where the arrays of one call lie; None where none lies in shared memory."""
        if not self._regions:
            return None
        sources, destinations = self._places(inputs), self._places(outputs)
        if not (sources or destinations) or not self._is_there():
            return None
        # Of an output the daemon must know the end: behind it lie other arrays.
        ends = {name: place._replace(nbytes=outputs[name].nbytes) for name, place in destinations.items()}
        return CallPlaces(self.attached, sources, ends)

    def close(self) -> None:
        """Give every region back. Arrays stay, and read as zeros. Idempotent."""
        if self._forks != forks.count:
            self._is_closed = True  # the regions are the parent's
            return
        with self._lock:
            self._is_closed = True
            self._lose()

    def lose(self) -> None:
        """Use no region any more: the daemon does not know them. Arrays stay as they are."""
        with self._lock:
            self._lose()

    # ---- private ----------------------------------------------------------------------------------------------------

    def _places(self, arrays: Mapping[str, Array]) -> dict[str, RegionPlace]:
        """Where the arrays lie; not those elsewhere, with gaps, or of datatypes that go in frames."""
        regions = self._regions
        if self._forks != forks.count:
            return {}
        found: dict[str, RegionPlace] = {}
        for name, array in arrays.items():
            if not array.flags.c_contiguous or not array.dtype.isnative or array.dtype.kind not in "fiubV":
                continue
            address = array.__array_interface__["data"][0]
            for region in regions:
                offset = address - region.address
                if 0 <= offset < region.nbytes and array.nbytes and not offset % array.dtype.itemsize:
                    found[name] = RegionPlace(region.number, offset)
        return found

    def _cut(self, nbytes: int) -> tuple[SharedRegion, int] | None:
        if self._forks != forks.count and self._lock.locked():
            raise forks.crossed()
        with self._lock:
            self._take_back()
            if self._is_closed or not self._connect():
                return None
            for region in self._regions:
                begin = region.cut(nbytes)
                if begin is not None:
                    return region, begin
            new = self._new_region(nbytes)
            if new is None:
                return None
            self._regions = (*self._regions, new)
            begin = new.cut(nbytes)
            assert begin is not None
            return new, begin

    def _connect(self) -> bool:
        """Connect unless connected. The lock is held. Raises QueueFull: no file can be opened."""
        if self._forks != forks.count:
            self._lose()
            self._forks = forks.count
        if self._socket is not None and not self._hears():
            self._lose()
        if self._socket is not None:
            return True
        try:
            found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise _no_descriptor(error) from error
        try:
            found.connect(str(self._path))
        except OSError:
            found.close()
            return False
        # Not settimeout, with which Python waits also where MSG_DONTWAIT says not to.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(ANSWER_LIMIT_S, 0))
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(ANSWER_LIMIT_S, 0))
        self._socket = found
        self._close_socket = weakref.finalize(self, found.close)
        return True

    def _new_region(self, nbytes: int) -> SharedRegion | None:
        """Ask for a region. The lock is held. Raises QueueFull."""
        for wanted in (max(nbytes, REGION_BYTES), nbytes):
            told = self._ask(wanted)
            if told is None:
                self._lose()
                return None
            answer, number, size, fd = told
            if answer == OK:
                return self._map(number, fd, size)
            if size < nbytes:
                break
        if size >= nbytes:
            raise QueueFull(
                f"{nbytes} bytes of shared memory were asked for, and the daemon has {size} left, but as many "
                "regions or open files as it may have; drop arrays that are not needed, or raise LimitNOFILE="
            )
        raise QueueFull(
            f"{nbytes} bytes of shared memory were asked for, and the daemon has {size} left for this client; drop "
            "arrays that are not needed, or raise [shared_memory] in its configuration"
        )

    def _map(self, number: int, fd: int, nbytes: int) -> SharedRegion:
        """Map a region that was handed out. Raises QueueFull: this process can take no descriptor of it."""
        try:
            if fd < 0:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return SharedRegion(number, mmap.mmap(fd, nbytes), nbytes)
        except OSError as error:
            self._give_back(number)
            raise _no_descriptor(error) from error
        finally:
            if fd >= 0:
                socket.close(fd)

    def _ask(self, nbytes: int) -> tuple[int, int, int, int] | None:
        """Answer, region, bytes and descriptor; None where the daemon does not answer, or speaks another version.

        The descriptor is -1 where there is none: of a refusal, or because this process may open no further file.
        """
        assert self._socket is not None
        fds = packed_array.array("i")
        try:
            self._socket.send(ASK.pack(PROTOCOL, ALLOCATE, nbytes), socket.MSG_NOSIGNAL)
            message, ancillary, flags, _ = self._socket.recvmsg(
                TOLD.size, socket.CMSG_SPACE(fds.itemsize), socket.MSG_CMSG_CLOEXEC
            )
        except OSError:
            return None
        for _, _, rights in ancillary:
            fds.frombytes(rights[: fds.itemsize])
        if len(message) != TOLD.size:
            return None
        _, answer, number, size, self.secret = TOLD.unpack(message)
        is_cut = bool(flags & socket.MSG_CTRUNC)  # the kernel drops what finds no free descriptor
        if answer > 1 or (answer == OK) != (bool(fds) or is_cut):
            return None
        return answer, number, size, fds[0] if fds else -1

    def _is_there(self) -> bool:
        """Whether the daemon still knows the regions; without the lock, as often as a request is sent."""
        if self._hears():
            return True
        self.lose()
        return False

    def _hears(self) -> bool:
        found = self._socket
        if found is None:
            return False
        try:
            return bool(found.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK))
        except BlockingIOError:
            return True  # no news: the connection is there
        except OSError:
            return False

    def _lose(self) -> None:
        self._regions = ()
        self._freed.clear()
        self.attached = NOT_ATTACHED
        self._socket = None
        if self._close_socket is not None:
            self._close_socket()
            self._close_socket = None

    def _release(self, region: SharedRegion, begin: int) -> None:
        """Note that an array is gone. Thread: any, inside any call."""
        if self._forks != forks.count:
            return  # the array is the parent's too
        self._freed.append((region, begin))
        while self._freed and self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        """Make the parts of arrays that are gone free again, and give empty regions back. The lock is held."""
        while self._freed:
            region, begin = self._freed.popleft()
            region.used = [part for part in region.used if part[0] != begin]
            if region.used or region not in self._regions or self._socket is None:
                continue
            self._regions = tuple(each for each in self._regions if each is not region)
            self._give_back(region.number)

    def _give_back(self, number: int) -> None:
        """Tell the daemon that a region is not used any more. The lock is held."""
        assert self._socket is not None
        with contextlib.suppress(OSError):
            self._socket.send(ASK.pack(PROTOCOL, FREE, number), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)


def _no_descriptor(error: OSError) -> QueueFull:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return QueueFull(
        f"no shared memory: {error.strerror} (this process may have {limit}); close some, or raise the limit with "
        "`ulimit -n`; arrays that are there already stay good"
    )
