"""Bytes handed to libzmq for each peer that are not yet on their way.

Owns: the bound in memory on replies to a peer that does not read. libzmq bounds messages, not bytes, and lowering its
mark on a live connection wedges it (the writer counts reads in steps of half the old mark), so replies that are large
beside a message's own cost are tracked here. Thread: I/O.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

TRACKED_BYTES = 4096
"""Replies from here on are tracked, which costs about 10 us each; smaller ones are bounded by libzmq's mark."""


class Tracker(Protocol):
    """What tells when libzmq has let go of a buffer."""

    @property
    def done(self) -> bool:
        """Whether the buffer was sent, or dropped with its connection."""
        ...


class UnsentReplies:
    """Tracked bytes by peer."""

    def __init__(self, bound_bytes: int) -> None:
        self._bound_bytes = bound_bytes
        self._replies: dict[bytes, deque[tuple[Tracker, int]]] = {}
        self._nbytes: dict[bytes, int] = {}

    def has_room(self, peer: bytes, nbytes: int) -> bool:
        """Whether one more reply of so many bytes may be handed over; one always may."""
        waiting = self._replies.get(peer)
        if not waiting:
            return True
        while waiting and waiting[0][0].done:
            self._nbytes[peer] -= waiting.popleft()[1]
        return not waiting or self._nbytes[peer] + nbytes <= self._bound_bytes

    def add(self, peer: bytes, tracker: Tracker, nbytes: int) -> None:
        """A buffer was handed over."""
        self._replies.setdefault(peer, deque()).append((tracker, nbytes))
        self._nbytes[peer] = self._nbytes.get(peer, 0) + nbytes

    def sweep(self) -> None:
        """Forget what was sent, and peers that wait for nothing."""
        for peer in list(self._replies):
            if self.has_room(peer, 0) and not self._replies[peer]:
                del self._replies[peer], self._nbytes[peer]
