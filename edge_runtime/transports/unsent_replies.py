"""Replies that libzmq was handed and has not sent: their bytes by peer, and which connections to close for them.

Owns: the bounds in memory on replies to peers that do not read. libzmq bounds messages, not bytes, and lowering its
mark on a live connection wedges it (the writer counts reads in steps of half the old mark). So replies are tracked:
each that is large beside a message's own cost, and of small ones every few to a peer that left something unread. What
a peer has read is thus known within MARK_BYTES, and a peer that reads misses nothing, however much it is sent.
Thread: I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from edge_runtime.transports.zmq_connections import ZmqConnection

TRACKED_BYTES = 4096
"""Replies from here on are tracked, which costs about 10 us each; smaller ones are bounded by libzmq's mark."""

REPLY_BYTES = 512
"""A small reply's cost in libzmq beside its bytes: a message of 64 bytes a frame, and what each refers to."""

MARK_BYTES = 16 << 10
"""Bytes of small replies between two tracked ones, to a peer that left something unread."""

UNREAD_S = 30.0
"""A peer that reads nothing of its replies for so long is closed: longer than a client that is stopped for a moment, or
a slow link, and no client waits longer for a reply unless it asked for that."""


class Tracker(Protocol):
    """Says when libzmq has released a buffer."""

    @property
    def done(self) -> bool:
        """Whether the buffer was sent, or dropped with its connection."""
        ...


class UnsentReplies:
    """Replies that libzmq has not sent yet, by peer.

    unread: the peers that had left something unread at the last look, by identity.
    """

    def __init__(self, bound_bytes: int, total_bytes: int) -> None:
        """bound_bytes: for one peer. total_bytes: for all that left something unread."""
        self.unread: frozenset[bytes] = frozenset()
        self._bound_bytes = bound_bytes
        self._total_bytes = total_bytes
        self._mark_bytes = min(MARK_BYTES, bound_bytes // 2)
        self._total = 0
        self._tracked: dict[bytes, deque[tuple[Tracker, int]]] = {}
        self._nbytes: dict[bytes, int] = {}
        self._unmarked: dict[bytes, int] = {}
        self._readers: set[bytes] = set()

    def has_room(self, peer: bytes, nbytes: int) -> bool:
        """Whether one more reply of `nbytes` may be handed over; a first one always may."""
        waiting = self._tracked.get(peer)
        while waiting and waiting[0][0].done:
            sent = waiting.popleft()[1]
            self._nbytes[peer] -= sent
            self._total -= sent
            self._readers.add(peer)
        if peer in self.unread and self._total + nbytes > self._total_bytes:
            return False
        return not waiting or self._nbytes[peer] + self._unmarked.get(peer, 0) + nbytes <= self._bound_bytes

    def needs_mark(self, peer: bytes, nbytes: int) -> bool:
        """Count a small reply to a peer of `unread`; True: it is to be tracked."""
        unmarked = self._unmarked[peer] = self._unmarked.get(peer, 0) + nbytes + REPLY_BYTES
        return unmarked >= self._mark_bytes

    def add(self, peer: bytes, tracker: Tracker, nbytes: int) -> None:
        """Count a tracked frame that was handed over, and the small replies before it."""
        nbytes += self._unmarked.pop(peer, 0)
        self._tracked.setdefault(peer, deque()).append((tracker, nbytes))
        self._nbytes[peer] = self._nbytes.get(peer, 0) + nbytes
        self._total += nbytes

    def sweep(self) -> None:
        """Forget replies that were sent, and peers without any."""
        for peer in list(self._tracked):
            self.has_room(peer, 0)
            if not self._tracked[peer]:
                del self._tracked[peer], self._nbytes[peer]

    def take_readers(self) -> set[bytes]:
        """The peers that have taken something tracked since the last call."""
        readers, self._readers = self._readers, set()
        return readers

    def look(self, unread: Sequence[ZmqConnection], now_s: float) -> list[ZmqConnection]:
        """Take in which peers left something unread, the longest first; return the connections to close."""
        self.unread = frozenset(each.identity for each in unread if each.identity is not None)
        self._unmarked = {peer: nbytes for peer, nbytes in self._unmarked.items() if peer in self.unread}
        nbytes = {each: each.unread_bytes + self._of(each.identity) for each in unread}
        total = sum(nbytes.values())
        closed = []
        for each in unread:
            assert each.unread_since_s is not None
            if now_s - each.unread_since_s < UNREAD_S and total <= self._total_bytes:
                break
            closed.append(each)
            total -= nbytes[each]
        return closed

    def _of(self, peer: bytes | None) -> int:
        return self._nbytes.get(peer, 0) + self._unmarked.get(peer, 0) if peer is not None else 0
