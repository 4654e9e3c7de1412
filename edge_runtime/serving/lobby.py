"""Requests for a model that is loaded on demand wait here until it is there, within their deadlines.

Owns: who waits for which model. A lobby is a scheduled model that never runs, so bounds, priorities and expiry by the
timer are the dispatcher's own. Thread: any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from edge_runtime.errors import EdgeRuntimeError
from edge_runtime.scheduling.dispatcher import Dispatcher, Layout, ScheduledModel
from edge_runtime.scheduling.queue import Outcome, Pending

MAX_WAITING = 1024
MAX_WAITING_BYTES = 64 << 20
"""Bounds of one model's lobby: a load takes under a second for most, and memory is short while it lasts."""


@dataclass(frozen=True, slots=True)
class Guest:
    """What to do with a waiting request: `enter` submits it again, `fail` answers it. One of them is called, once."""

    enter: Callable[[], None]
    fail: Callable[[EdgeRuntimeError], None]


class Lobby:
    """One waiting room a model."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._rooms: dict[str, ScheduledModel] = {}
        self._lock = threading.Lock()

    def wait(self, model: str, guest: Guest, *, arrived_s: float, timeout_s: float, nbytes: int, priority: int) -> None:
        """Let a request wait for its model. Raises QueueFull, DeadlineUnmeetable."""
        with self._lock:
            room = self._rooms.get(model)
            if room is None:
                room = self._rooms[model] = _room(model)
            # Under this lock, so that `open` cannot pass between finding the room and entering it.
            self._dispatcher.admit(room, Pending((), 1, nbytes, None, priority, arrived_s, timeout_s, _settle, guest))

    def open(self, model: str, error: EdgeRuntimeError | None) -> None:
        """The model's load ended: everybody enters, or is told why not."""
        with self._lock:
            room = self._rooms.pop(model, None)
            waiting = self._dispatcher.take_all(room) if room is not None else []
        for request in waiting:
            guest: Guest = request.tag  # type: ignore[assignment]
            if error is None:
                guest.enter()
            else:
                guest.fail(error)


def _room(model: str) -> ScheduledModel:
    return ScheduledModel(
        model,
        Layout(run=list, concurrency=0),
        max_queue_rows=MAX_WAITING,
        max_queue_bytes=MAX_WAITING_BYTES,
    )


def _settle(request: Pending, outcome: Outcome) -> None:
    """Only the timer settles a guest: expired."""
    guest: Guest = request.tag  # type: ignore[assignment]
    assert isinstance(outcome, EdgeRuntimeError)
    guest.fail(outcome)
