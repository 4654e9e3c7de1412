"""Memory that the daemon and a host share: made and sealed by the daemon, mapped by both.

Owns: the layout of tensors in it. Only the daemon makes such memory, and its size is sealed: a host that could make it
smaller would end the daemon with SIGBUS.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from collections.abc import Sequence

import numpy as np

from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.hosts.messages import BrokenMessage, SlotPlace, TensorPlace
from edge_runtime.messages import TensorHeader
from edge_runtime.tensors import DATATYPES, Array, datatype, pack_bytes, unpack_bytes

FIRST_SLOT_BYTES = 1 << 16
"""Untouched pages of a slot cost nothing; a slot that is too small is replaced."""

MAX_SLOT_BYTES = 1 << 32
"""More than any request may hold: the daemon must not promise what a broken host claims to need."""

_ALIGNMENT_BYTES = 64
"""A cache line, and the widest vector register of x86 (AVX-512)."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedMemory:
    """One mapping. The descriptor, where it is kept, is closed by `close`; the mapping ends with the last view."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Map a descriptor, which becomes this object's: to read only, where it is sealed so. Raises OSError."""
        self.descriptor = descriptor
        self.nbytes = nbytes
        try:
            try:
                mapping = mmap.mmap(descriptor, nbytes)
            except PermissionError:
                mapping = mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_READ)
            self.bytes: Array = np.frombuffer(mapping, np.uint8)
        except BaseException:
            self.close()
            raise

    @classmethod
    def new(cls, nbytes: int) -> SharedMemory:
        """Make memory whose size no process can change. Raises OSError."""
        descriptor = os.memfd_create("slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, nbytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, nbytes)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def view(self, name: str, place: SlotPlace) -> Array:
        """Return the tensor of a datatype at a place, as a view; BYTES as a copy. Raises BrokenMessage."""
        kind = datatype(name)
        end = place.offset + place.nbytes
        if min(place.offset, place.nbytes, *place.shape, 0) < 0 or end > self.nbytes:
            raise BrokenMessage(f"a tensor lies at {place.offset} to {end} of {self.nbytes} bytes")
        memory = self.bytes[place.offset : end]
        if not kind.itemsize:
            try:
                return unpack_bytes(memory.tobytes(), place.shape)
            except EdgeRuntimeError as error:
                raise BrokenMessage(f"a tensor is malformed: {error.message}") from error
        if math.prod(place.shape) * kind.itemsize != place.nbytes or place.offset % kind.itemsize:
            raise BrokenMessage(f"a {name} tensor of shape {list(place.shape)} has {place.nbytes} bytes")
        try:
            return memory.view(kind.dtype).reshape(place.shape)
        except ValueError as error:
            raise BrokenMessage(f"no array has the shape {list(place.shape)}: {error}") from error

    def write(self, place: SlotPlace, payload: Array) -> None:
        """Write a result of `payload_of`."""
        self.room(place, payload)[...] = payload

    def room(self, place: SlotPlace, payload: Array) -> Array:
        """Return the memory at a place as an array like `payload`."""
        memory = self.bytes[place.offset : place.offset + place.nbytes]
        return memory.view(payload.dtype).reshape(payload.shape)


def slot_bytes(nbytes: int) -> int:
    """Return the size of a slot that holds `nbytes`: a power of two, so that it grows seldom."""
    return max(1 << max(nbytes - 1, 0).bit_length(), FIRST_SLOT_BYTES)


def lay_out(shapes: Sequence[tuple[tuple[int, ...], int]], start: int = 0) -> tuple[tuple[SlotPlace, ...], int]:
    """Place tensors, given as shape and bytes, one after another; returns also where the next may begin."""
    places: list[SlotPlace] = []
    offset = aligned(start)
    for shape, nbytes in shapes:
        places.append(SlotPlace(shape, offset, nbytes))
        offset = aligned(offset + nbytes)
    return tuple(places), offset


def payload_of(name: str, array: Array) -> Array:
    """Return the elements that are written of a tensor of a datatype: its own, or the bytes of text."""
    kind = DATATYPES[name]
    if not kind.itemsize:
        return np.frombuffer(pack_bytes(array), np.uint8)
    return array.astype(kind.dtype, copy=False)


def lay_out_named(
    headers: Sequence[TensorHeader], arrays: Sequence[Array]
) -> tuple[tuple[TensorPlace, ...], list[Array], int]:
    """Place named tensors from 0; returns also the elements written of each, and where they end."""
    payloads = [payload_of(header.datatype, array) for header, array in zip(headers, arrays, strict=True)]
    sizes = [(array.shape, payload.nbytes) for array, payload in zip(arrays, payloads, strict=True)]
    places, end = lay_out(sizes)
    named = [TensorPlace(each.name, each.datatype, place) for each, place in zip(headers, places, strict=True)]
    return tuple(named), payloads, end


def aligned(offset: int) -> int:
    """Return the next offset at which a tensor may begin."""
    return -(-offset // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
