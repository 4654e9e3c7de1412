"""Closes connections whose unfinished messages make the daemon grow.

libzmq hands a message out when all its frames are there, and bounds a frame, never their number: what a client sends of
a message that does not end is held out of sight. So the daemon looks at its own memory. When that has grown by more
than one whole message, those are closed that had bytes on their way for the longest and brought no message meanwhile,
at each look again: who connects anew is as suspect as before. Only where nobody is seen to bring bytes, and memory
grows on, all are closed that wait for no reply. A client that was only silent connects again by itself and notices
nothing. Growth while models are loaded is theirs. Thread: I/O.
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

LOOK_S, CLOSE_LOOK_S = 0.05, 0.025
"""Between two looks, and while memory grows: libzmq's thread takes in up to 1 GB a second, all connections together,
so that it grows by less than half a message of 128 MiB from one look to the next."""

CLOSE_SHARE, FREE_SHARE = 1.125, 1.75
"""Growth, in whole messages, at which suspects are closed, and at which all are that wait for no reply."""

FREE_LOOKS = 20
"""Looks after such a closing until what is left counts as grown for good: libzmq frees what it held within some."""

TRIM_LOOKS = 2
"""Looks after a closing until free memory is returned, once: the C library would keep it, and it counts as grown."""


class WatchedEndpoint(Protocol):
    """An endpoint, as far as its connections are watched.

    heard: identities that brought a message since the last look; None: not kept.
    """

    connections: Connections
    heard: set[bytes | None] | None

    def is_owed(self, identity: bytes | None) -> bool:
        """Whether a reply is still to come for this connection."""
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
        self._freeing_bytes = 0
        self._is_listening = False
        self._freeing_looks = self._trim_looks = 0

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
        self._await_freed(now_bytes)
        grown_bytes = now_bytes - self._least_bytes
        if grown_bytes < self._bound_bytes // 2:
            if self._is_listening:
                self._listen(endpoints, is_on=False)
            return
        if not self._is_listening:
            self._listen(endpoints, is_on=True)
        for endpoint in endpoints:
            endpoint.connections.suspect(endpoint.heard or ())
            endpoint.heard = set()
        closed = 0
        if grown_bytes >= CLOSE_SHARE * self._bound_bytes:
            closed = self._close_suspects(endpoints)
        if not closed and grown_bytes >= FREE_SHARE * self._bound_bytes and not self._freeing_looks:
            closed = self._close_quiet(endpoints)
            self._freeing_looks, self._freeing_bytes = FREE_LOOKS, now_bytes
        if closed:
            self._trim_looks = self._trim_looks or TRIM_LOOKS
            self._counters.count("connections_closed_unfinished", closed)
            log.warning(
                "closed connections that brought no whole message while memory grew",
                extra={"connections": closed, "grown_bytes": grown_bytes, "bound_bytes": self._bound_bytes},
            )

    def _await_freed(self, now_bytes: int) -> None:
        """Return free memory some looks after a closing; what is left after more of them counts as grown for good."""
        if self._trim_looks:
            self._trim_looks -= 1
            if not self._trim_looks:
                self._memory.trim()
        if self._freeing_looks:
            self._freeing_looks -= 1
            # The least since then: what comes meanwhile may be another attack.
            self._freeing_bytes = min(self._freeing_bytes, now_bytes)
            if not self._freeing_looks:
                self._least_bytes = self._freeing_bytes

    def _listen(self, endpoints: Sequence[WatchedEndpoint], *, is_on: bool) -> None:
        self._is_listening = is_on
        for endpoint in endpoints:
            endpoint.heard = set() if is_on else None
            if not is_on:
                endpoint.connections.trust()

    def _close_suspects(self, endpoints: Sequence[WatchedEndpoint]) -> int:
        """Close those that have been suspect for at least half as long as the longest; libzmq serves all in turn."""
        suspects = [each for endpoint in endpoints for each in endpoint.connections.suspects()]
        longest = max((each.suspect_looks for each in suspects), default=0)
        return sum(each.close() for each in suspects if each.suspect_looks >= longest / 2)

    def _close_quiet(self, endpoints: Sequence[WatchedEndpoint]) -> int:
        return sum(
            each.close()
            for endpoint in endpoints
            for each in endpoint.connections.quiet()
            if not endpoint.is_owed(each.identity)
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
