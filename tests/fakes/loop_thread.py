"""An I/O loop and the thread that serves it."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING

from edge_runtime.doors.io_loop import IoLoop
from edge_runtime.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from typing_extensions import Self


class LoopThread:
    """A loop that goes round until `end`. Use as a context manager."""

    def __init__(self) -> None:
        self.loop = IoLoop(Metrics())
        self._thread = threading.Thread(target=self.loop.run, args=(self.loop.sweep, 0.1), name="test-loop")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()
        self.loop.close()

    def end(self) -> None:
        """Serve no more. Idempotent."""
        self.loop.stop()
        self._thread.join()
