"""Bytes that a connection has not sent yet: kept when the system takes no more, and sent when it has room again.

Used by the doors that own sockets; each bounds the bytes that it keeps. Thread: the connection's.
"""

from __future__ import annotations

import itertools
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

SENT_PARTS = 256
"""Handed to the system at once."""


def keep_unsent(unsent: deque[memoryview], parts: Sequence[Any], sent: int) -> tuple[int, int]:
    """Append the unsent bytes of parts, whose first `sent` bytes went out; return their number, and how many parts."""
    kept_bytes = kept = 0
    for part in parts:
        size = part.nbytes if isinstance(part, memoryview) else len(part)
        if sent >= size:
            sent -= size
            continue
        view = memoryview(part).cast("B")[sent:]
        sent = 0
        unsent.append(view)
        kept_bytes += view.nbytes
        kept += 1
    return kept_bytes, kept


def send_unsent(sock: socket.socket, unsent: deque[memoryview]) -> tuple[int, int]:
    """Send as much as the system takes; return the bytes that went out, and how many parts are gone. Raises OSError."""
    count = sock.sendmsg([*itertools.islice(unsent, SENT_PARTS)])
    return count, drop_sent(unsent, count)


def drop_sent(unsent: deque[memoryview], count: int) -> int:
    """Take bytes that went out from those that wait; return how many parts are gone."""
    gone = 0
    while count:
        part = unsent[0]
        if count < part.nbytes:
            unsent[0] = part[count:]
            break
        count -= part.nbytes
        unsent.popleft()
        gone += 1
    return gone
