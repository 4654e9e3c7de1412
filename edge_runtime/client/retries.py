"""When a refused request is sent again, for `infer(..., retry=True)`.

Owns: the deadline that all tries share, and the pause between two of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from edge_runtime.client.frames import Options
from edge_runtime.client.in_flight import NotBack
from edge_runtime.errors import DeadlineExceeded, EdgeRuntimeError
from edge_runtime.wire.operations import DEFAULT_WAIT_S

T = TypeVar("T")

LEAST_PAUSE_S = 0.001
MOST_PAUSE_S = 1.0
"""Bounds of the pause after a refusal without a forecast: it doubles from the first to the second."""


class Retries:
    """The tries of one request. options: of the next one, with what is left of the time."""

    def __init__(self, options: Options) -> None:
        """options: of the first try; without a timeout, a request is tried again for 30 s."""
        self.options = options
        timeout_s = DEFAULT_WAIT_S if options.timeout_ms is None else options.timeout_ms / 1e3
        self._until_s = time.monotonic() + timeout_s
        self._pause_s = LEAST_PAUSE_S

    def pause_s(self, error: EdgeRuntimeError | NotBack) -> float:
        """How long to wait before the next try. Raises `error` where another try is of no use, or comes too late."""
        if not isinstance(error, NotBack) and (not error.retryable or isinstance(error, DeadlineExceeded)):
            raise error
        after_ms = None if isinstance(error, NotBack) else error.retry_after_ms
        if after_ms is None:
            pause_s = self._pause_s
            self._pause_s = min(2 * pause_s, MOST_PAUSE_S)
        else:
            pause_s = max(after_ms / 1e3, LEAST_PAUSE_S)
        left_s = self._until_s - time.monotonic() - pause_s
        if left_s <= 0:
            raise error
        if self.options.timeout_ms is not None:
            self.options = self.options._replace(timeout_ms=left_s * 1e3)
        return pause_s


def ask_until_due(options: Options, ask: Callable[[Options], T]) -> T:
    """Ask, and again after each refusal, until the deadline. Waits on the calling thread; raises what `ask` raised."""
    retries = Retries(options)
    while True:
        try:
            return ask(retries.options)
        except (EdgeRuntimeError, NotBack) as error:
            pause_s = retries.pause_s(error)
        time.sleep(pause_s)
