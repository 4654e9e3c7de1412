"""Read the fields of a protobuf file one after another, in bounded memory, without a protobuf library.

Owns: the part of the wire format (https://protobuf.dev/programming-guides/encoding) that ONNX uses, and SavedModels and
PaddlePaddle with it. Copies a field only on request, so a 2 GB model costs one window. Called by
backends/onnx/files.py, backends/onnx/interface.py and model_files.py. Reads with `pread`, not mmap: a file that shrinks
meanwhile is then an error, not a signal that ends the daemon.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from edge_runtime.errors import LoadFailed

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5

_WINDOW_BYTES = 1 << 18
"""One read; tags and small fields are decoded from it. Reads larger than 256 KiB are not faster."""

_LONGEST_TAG_AND_LENGTH = 20
"""A tag and a length are two varints of at most ten bytes each."""

_MAX_FIELDS = 20_000_000
"""A tree ensemble of two million nodes has about this many; more would keep a core busy for half a minute."""


class ProtobufFields:
    """Reads the fields of one open file, message by message.

    Thread: one at a time. Every method raises LoadFailed, naming the byte, for bytes that are not protobuf.
    """

    def __init__(
        self, descriptor: int, size: int, name: str, most_fields: int = _MAX_FIELDS, kind: str = "ONNX file"
    ) -> None:
        """kind: what the file should be, in the words of errors."""
        self.size = size
        self._kind = kind
        self._descriptor = descriptor
        self._name = name
        self._window = b""
        self._window_start = 0
        self._most_fields = self._fields_left = most_fields

    def fields(self, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (field number, wire type, value or content start, content end) for the message in [start, end).

        For a varint the third is its value and the fourth 0; otherwise both are offsets in the file.
        """
        position = start
        while position < end:
            self._fields_left -= 1
            if self._fields_left < 0:
                raise self._broken(
                    position, f"it has more than {self._most_fields} fields; split or simplify the model"
                )
            tag, position = self._varint(position, end)
            number, wire_type = tag >> 3, tag & 7
            if number == 0 or tag > 0xFFFFFFFF:
                raise self._broken(position, f"field number {number} is outside 1..536870911")
            if wire_type == VARINT:
                value, position = self._varint(position, end)
                yield number, VARINT, value, 0
                continue
            if wire_type == LENGTH_DELIMITED:
                length, position = self._varint(position, end)
            elif wire_type == FIXED32:
                length = 4
            elif wire_type == FIXED64:
                length = 8
            else:
                raise self._broken(position, f"wire type {wire_type} is never used there")
            if length > self.size - position:
                raise self._cut(position, length)
            if length > end - position:
                raise self._broken(position, f"field {number} says {length} bytes, {end - position} are left")
            yield number, wire_type, position, position + length
            position += length

    def content(self, start: int, end: int) -> bytes:
        """The bytes of one field."""
        return self._read(start, end - start)

    def _varint(self, position: int, end: int) -> tuple[int, int]:
        """Decode the varint at `position`; returns its value and the position after it."""
        index = position - self._window_start
        if index < 0 or index + _LONGEST_TAG_AND_LENGTH > len(self._window):
            self._window = self._read(position, min(_WINDOW_BYTES, self.size - position))
            self._window_start, index = position, 0
        window, value, shift = self._window, 0, 0
        while position < end:
            byte = window[index]
            position += 1
            if byte < 0x80:
                return value | byte << shift, position
            value |= (byte & 0x7F) << shift
            index += 1
            shift += 7
            if shift > 63:
                raise self._broken(position, "a number has more than ten bytes")
        if position >= self.size:
            raise self._cut(position, 1)
        raise self._broken(position, "a number is cut off")

    def _read(self, start: int, length: int) -> bytes:
        parts: list[bytes] = []
        while length > 0:
            part = os.pread(self._descriptor, length, start)
            if not part:
                raise self._broken(start, "the file became shorter while it was read")
            parts.append(part)
            start += len(part)
            length -= len(part)
        return b"".join(parts) if len(parts) != 1 else parts[0]

    def _broken(self, position: int, reason: str) -> LoadFailed:
        return LoadFailed(
            f"{self._name} is not a sound {self._kind}: at byte {position}, {reason}; it is damaged or something else, "
            "copy it again"
        )

    def _cut(self, position: int, length: int) -> LoadFailed:
        missing = position + length - self.size
        return LoadFailed(
            f"{self._name} is cut short, or no {self._kind}: at its end, byte {self.size}, at least {missing} bytes "
            "are missing; copy it again"
        )


def signed(value: int) -> int:
    """An int64 as protobuf writes it."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def varints(content: bytes) -> list[int]:
    """The numbers of a packed field of int64. Raises ValueError: one is cut off, or longer than a number is."""
    numbers: list[int] = []
    value = shift = 0
    for byte in content:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(signed(value))
            value = shift = 0
        elif shift > 63:
            raise ValueError("a number has more than ten bytes")
    if shift:
        raise ValueError("a number is cut off")
    return numbers
