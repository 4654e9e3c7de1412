"""Closes connections whose unfinished messages make the daemon grow.

libzmq hands a message out when all its frames are there, and bounds a frame, never their number: what a client sends of
a message that does not end is held out of sight. So the daemon looks at its own memory. A connection within
such a message brings no other one, so those that brought nothing while memory grew by more than one whole message are
closed: first those that were seen to bring bytes, and when memory grows on all that wait for no reply. A client that
was only silent connects again by itself and notices nothing. Growth while models are loaded is theirs. Thread: I/O.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Sequence
from typing import Protocol

from edge_runtime.telemetry.metrics import Counters
from edge_runtime.transports.zmq_connections import Connections

log = logging.getLogger(__name__)

LOOK_S, CLOSE_LOOK_S = 0.25, 0.025
"""Between two looks, and while memory grows: tiny frames fill 640 MB a second."""

FREE_LOOKS = 20
"""Looks after a closing until what is left counts as grown for good: libzmq frees what it held within some."""


class WatchedEndpoint(Protocol):
    """An endpoint, as far as its connections are watched. heard: identities that brought a message; None: not kept."""

    connections: Connections
    heard: set[bytes | None] | None

    def is_owed(self, identity: bytes | None) -> bool:
        """Whether a reply is still to come for this connection."""
        ...

    def has_messages(self) -> bool:
        """Whether whole messages wait to be read: any connection may have brought them."""
        ...


class WatchedMemory(Protocol):
    """The memory of this process. daemon/doors.py reads the real one."""

    @property
    def private_bytes(self) -> int:
        """Memory that this process shares with no other."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes of admitted requests, which are bounded elsewhere."""
        ...

    @property
    def is_loading(self) -> bool:
        """Whether models are loaded now: growth is theirs."""
        ...

    def trim(self) -> None:
        """Return free memory to the system."""
        ...


class GrowthWatch:
    """Looks at the memory of this process, and closes connections when it has grown by `bound_bytes`."""

    def __init__(self, bound_bytes: int, counters: Counters, memory: WatchedMemory) -> None:
        self._bound_bytes = bound_bytes
        self._counters = counters
        self._memory = memory
        self._due_s = 0.0
        self._least_bytes: int | None = None
        self._listened_bytes = 0
        self._is_listening = False
        self._freeing_looks = 0

    @property
    def interval_s(self) -> float:
        """Seconds between two looks."""
        return CLOSE_LOOK_S if self._is_listening else LOOK_S

    def look(self, endpoints: Sequence[WatchedEndpoint], now_s: float) -> None:
        """Look, if it is time to."""
        if now_s >= self._due_s:
            self._look(endpoints)
            self._due_s = now_s + self.interval_s

    def _look(self, endpoints: Sequence[WatchedEndpoint]) -> None:
        now_bytes = max(self._memory.private_bytes - self._memory.held_bytes, 0)
        if self._least_bytes is None or now_bytes < self._least_bytes or self._memory.is_loading:
            self._least_bytes = now_bytes
        growth_bytes = now_bytes - self._least_bytes
        if self._freeing_looks:
            self._freeing_looks -= 1
            if self._freeing_looks == FREE_LOOKS // 2:
                self._memory.trim()
            if not self._freeing_looks:
                self._least_bytes, growth_bytes = now_bytes, 0
        if growth_bytes < self._bound_bytes // 2:
            if self._is_listening:
                self._listen(endpoints, is_on=False)
            return
        if not self._is_listening:
            self._listened_bytes = now_bytes
            self._listen(endpoints, is_on=True)
        # From the first look on: a connection within one message, as large as may be, has not brought that yet either.
        grown_bytes = now_bytes - self._listened_bytes
        if grown_bytes >= self._bound_bytes and not self._freeing_looks:
            # Those that were seen at an earlier look: what comes now may be whole in a moment.
            closed = self._close(endpoints, suspects_only=True)
            # Whole messages that wait may be what grew, and their connections are not heard yet: they are read first.
            patience = 4 if any(endpoint.has_messages() for endpoint in endpoints) else 2
            if not closed and grown_bytes >= patience * self._bound_bytes:
                closed = self._close(endpoints, suspects_only=False)
                self._freeing_looks = FREE_LOOKS
            if closed:
                self._freeing_looks = FREE_LOOKS
                self._counters.count("connections_closed_unfinished", closed)
                log.warning(
                    "closed connections that brought no whole message while memory grew",
                    extra={"connections": closed, "grown_bytes": grown_bytes, "bound_bytes": self._bound_bytes},
                )
        for endpoint in endpoints:
            if endpoint.heard is not None:
                endpoint.connections.suspect(endpoint.heard)

    def _listen(self, endpoints: Sequence[WatchedEndpoint], *, is_on: bool) -> None:
        self._is_listening = is_on
        for endpoint in endpoints:
            endpoint.heard = set() if is_on else None

    def _close(self, endpoints: Sequence[WatchedEndpoint], *, suspects_only: bool) -> int:
        return sum(
            connection.close()
            for endpoint in endpoints
            if endpoint.heard is not None and not (suspects_only and endpoint.has_messages())
            for connection in endpoint.connections.unfinished(endpoint.heard, suspects_only=suspects_only)
            if suspects_only or not endpoint.is_owed(connection.identity)
        )


def trim_memory() -> None:
    """Return what malloc keeps of freed memory, on a thread of its own: it takes some milliseconds.

    Where libzmq's thread freed hundreds of MB the C library keeps them otherwise.
    """
    threading.Thread(target=_trim, name="edge-trim", daemon=True).start()


def _trim() -> None:
    with contextlib.suppress(AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)


def private_bytes() -> int:
    """Memory of this process that is neither a file's nor shared; 0 where /proc does not tell."""
    try:
        statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)  # a file object costs nine calls of the system
        try:
            fields = os.read(statm, 256).split()
        finally:
            os.close(statm)
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
