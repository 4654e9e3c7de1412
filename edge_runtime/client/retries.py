"""When a refused request is sent again, for `infer(..., retry=True)`.

Owns: the deadline that all tries share, and the pause between two of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from edge_runtime.client.frames import Options
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

    def pause_s(self, error: EdgeRuntimeError | ConnectionError, *, waits_for_daemon: bool) -> float:
        """How long to wait before the next try. Raises `error` where another try is of no use, or comes too late.

        waits_for_daemon: the daemon said that it stops, so that a ConnectionError means that none is back yet.
        """
        if isinstance(error, ConnectionError):
            if not waits_for_daemon:
                raise error
            after_ms = None
        elif not error.retryable or isinstance(error, DeadlineExceeded):
            raise error
        else:
            after_ms = error.retry_after_ms
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


def ask_until_due(
    options: Options, ask: Callable[[Options], T], waits_for_daemon: Callable[[], bool] = lambda: False
) -> T:
    """Ask, and again after each refusal, until the deadline. Waits on the calling thread; raises what `ask` raised.

    waits_for_daemon: as in `Retries.pause_s`, asked after an error.
    """
    retries = Retries(options)
    while True:
        try:
            return ask(retries.options)
        except (EdgeRuntimeError, ConnectionError) as error:
            pause_s = retries.pause_s(error, waits_for_daemon=waits_for_daemon())
        time.sleep(pause_s)
