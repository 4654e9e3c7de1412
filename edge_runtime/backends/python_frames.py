"""Messages between the daemon and the child process that runs a `model.py`.

Owns: the layout: a uint32 and a uint64 little-endian (bytes of header, bytes of tensors), a JSON header, then each
tensor's bytes as on the wire (tensors.py). No object ever travels as code: nothing here can build more than arrays,
numbers and text.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.tensors import Array, array_from_wire, array_to_wire

Named = tuple[str, str, Array]
"""A tensor on its way: name, wire datatype, array."""

_PREFIX = struct.Struct("<IQ")
_MAX_HEADER_BYTES = 1 << 20
_MAX_TENSOR_BYTES = 1 << 31
"""Above what any request may hold; a child that claims more is broken, and must not make the daemon allocate it."""


class BrokenMessage(Exception):
    """The other side ended, or sent what is no message. The channel cannot be used again."""


def send_message(channel: socket.socket, header: dict[str, Any], tensors: Sequence[Named]) -> None:
    """Send one message. Raises BrokenMessage when the other side is gone, TimeoutError as the socket is set."""
    frames = [memoryview(array_to_wire(array)) for _, _, array in tensors]
    header["tensors"] = [
        {"name": name, "datatype": datatype, "shape": list(array.shape), "bytes": frame.nbytes}
        for (name, datatype, array), frame in zip(tensors, frames, strict=True)
    ]
    encoded = json.dumps(header).encode()
    try:
        channel.sendall(_PREFIX.pack(len(encoded), sum(frame.nbytes for frame in frames)) + encoded)
        for frame in frames:
            if frame.nbytes:
                channel.sendall(frame)
    except TimeoutError:
        raise
    except OSError as error:
        raise BrokenMessage(f"the other side is gone ({error.strerror})") from error


def receive_message(channel: socket.socket, timeout_s: float | None) -> tuple[dict[str, Any], dict[str, Array]]:
    """Receive one whole message within `timeout_s`; arrays are writeable. Raises BrokenMessage, TimeoutError."""
    until = None if timeout_s is None else time.monotonic() + timeout_s
    header_bytes, tensor_bytes = _PREFIX.unpack(_receive(channel, _PREFIX.size, until).tobytes())
    if header_bytes > _MAX_HEADER_BYTES or tensor_bytes > _MAX_TENSOR_BYTES:
        raise BrokenMessage(f"a message of {header_bytes} + {tensor_bytes} bytes is over the limit")
    try:
        header = json.loads(_receive(channel, header_bytes, until).tobytes())
        described = header["tensors"]
        if sum(int(tensor["bytes"]) for tensor in described) != tensor_bytes:
            raise BrokenMessage("the tensors of a message do not add up to its length")
        arrays = {
            str(tensor["name"]): array_from_wire(
                tensor["datatype"], tensor["shape"], _receive(channel, int(tensor["bytes"]), until).data
            )
            for tensor in described
        }
    except (ValueError, KeyError, TypeError, EdgeRuntimeError) as error:
        raise BrokenMessage(f"a message is malformed: {error}") from error
    return header, arrays


def _receive(channel: socket.socket, length: int, until: float | None) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if length < 0:
        raise BrokenMessage(f"a tensor of {length} bytes")
    memory = np.empty(length, np.uint8)
    view, position = memory.data, 0
    while position < length:
        if until is not None:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            channel.settimeout(left)
        try:
            count = channel.recv_into(view[position:])
        except TimeoutError:
            raise
        except OSError as error:
            raise BrokenMessage(f"the other side is gone ({error.strerror})") from error
        if count == 0:
            raise BrokenMessage("the other side has ended")
        position += count
    return memory
