"""Large bodies are read beside a door's thread: one that takes milliseconds there would hold up every other request.

Owns: the reading thread of one door, the bound of the bodies that wait for it, and their order: a request of a sequence
must not overtake an earlier one whose large body is still read. Knows no protocol: a door says how a body is read. Used
by doors/http, doors/grpc and doors/mqtt.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from edge_runtime.errors import QueueFull

T = TypeVar("T")

LARGE_JSON_BYTES = 64 << 10
"""JSON from here on is read beside a door's thread: 64 KiB take about half a millisecond."""

MAX_WAITING_BYTES = 256 << 20
"""Most bytes of bodies that wait to be read."""


class LargeBodies:
    """The large bodies of one door. name: of its reading thread, which begins with the first."""

    def __init__(self, name: str, most_bytes: int = MAX_WAITING_BYTES) -> None:
        self._reader = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._most_bytes = most_bytes
        self._waiting_bytes = 0
        self._unread = 0
        self._hands_over = False

    @property
    def has_earlier(self) -> bool:
        """Whether bodies are still read that came before what the door handles now. Thread: the door's."""
        return self._unread > 0 and not self._hands_over

    def behind(self, nbytes: int, call: Callable[[Callable[[], None]], None], go_on: Callable[[], None]) -> None:
        """Have `go_on` run on the door's thread behind the bodies that came before. Raises and thread as `read`."""
        self.read(nbytes, lambda: None, call, lambda _: go_on())

    def read(
        self, nbytes: int, read: Callable[[], T], call: Callable[[Callable[[], None]], None], done: Callable[[T], None]
    ) -> None:
        """Have `read` run on the reading thread, and `done` then take its result on the door's. Raises QueueFull.

        nbytes: of the body. read: raises nothing. call: runs a function on the door's thread soon. After `close` both
        run at once. Thread: the door's.
        """
        if self._waiting_bytes + nbytes > self._most_bytes:
            raise QueueFull("too many large bodies wait to be read")
        self._waiting_bytes += nbytes
        self._unread += 1
        try:
            self._reader.submit(lambda: call(partial(self._hand_over, nbytes, read(), done)))
        except RuntimeError:  # closed
            self._hand_over(nbytes, read(), done)

    def close(self) -> None:
        """Wait until all that was given is read, and end the thread. Idempotent. Thread: any but its own."""
        self._reader.shutdown()

    def _hand_over(self, nbytes: int, result: T, done: Callable[[T], None]) -> None:
        self._waiting_bytes -= nbytes
        self._unread -= 1
        self._hands_over = True
        try:
            done(result)
        finally:
            self._hands_over = False
