"""Large bodies are read beside a door's thread: one that takes milliseconds there would hold up every other request.

Owns: the reading thread of one door, and the bound of the bodies that wait for it. Knows no protocol: a door says how a
body is read. Used by doors/http and doors/mqtt.
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
        try:
            self._reader.submit(lambda: call(partial(self._hand_over, nbytes, read(), done)))
        except RuntimeError:  # closed
            self._hand_over(nbytes, read(), done)

    def close(self) -> None:
        """Wait until all that was given is read, and end the thread. Idempotent. Thread: any but its own."""
        self._reader.shutdown()

    def _hand_over(self, nbytes: int, result: T, done: Callable[[T], None]) -> None:
        self._waiting_bytes -= nbytes
        done(result)
