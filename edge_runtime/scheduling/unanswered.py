"""How many bytes of requests wait for their answers, of each sender and in all, and the bounds on them.

Owns: those sums. A door holds a request here before it submits it; the request gives its bytes back when it ends.
Thread: any.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

from edge_runtime.errors import QueueFull

REQUEST_BYTES = 1024
"""A request's own objects, which outweigh small tensors."""

NO_BOUND_BYTES = 1 << 62


class UnansweredBytes:
    """Bytes of unanswered requests. total: of all senders; total_bytes: the bound on it.

    Invariant: no sender gets more than is then left free for the others, so that none shuts another out: of k greedy
    ones each ends with 1/(k + 1) of the bound in all, and as much stays free.
    """

    def __init__(self, sender_bytes: int = NO_BOUND_BYTES, total_bytes: int = NO_BOUND_BYTES) -> None:
        self._sender_bytes = sender_bytes
        self.total_bytes = total_bytes
        self._lock = threading.Lock()
        self._of: dict[Hashable, int] = {}
        self.total = 0

    def hold(self, sender: Hashable, nbytes: int) -> int:
        """Count one more request; return what to give back when it ends. Raises QueueFull.

        A sender without any may have one above its own bound.
        """
        nbytes += REQUEST_BYTES
        with self._lock:
            before = self._of.get(sender, 0)
            if before and before + nbytes > self._sender_bytes:
                raise QueueFull(
                    f"{before} bytes of this connection's requests wait for their answers, its bound is "
                    f"{self._sender_bytes} (limits.unanswered_bytes); wait for answers before you send more"
                )
            if before + nbytes > self.total_bytes - self.total:
                raise QueueFull(
                    f"{self.total} bytes of requests wait for their answers, the bound is {self.total_bytes} "
                    "(limits.total_unanswered_bytes)"
                )
            self._of[sender] = before + nbytes
            self.total += nbytes
        return nbytes

    def give_back(self, sender: Hashable, nbytes: int) -> None:
        """End what `hold` counted."""
        with self._lock:
            self.total -= nbytes
            left = self._of[sender] - nbytes
            if left:
                self._of[sender] = left
            else:
                del self._of[sender]

    def has(self, sender: Hashable) -> bool:
        """Whether a request of this sender waits."""
        return sender in self._of
