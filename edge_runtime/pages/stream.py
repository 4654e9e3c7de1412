"""The streams of the page: who looks, and the events that go to them.

Owns: the bound of viewers, and the end of those who do not read. Without viewers nothing is made. Thread: the I/O
loop's, but for `close`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from edge_runtime.clock import Clock
from edge_runtime.doors.http.answer import EventStream
from edge_runtime.wire import json_codec

MOST_VIEWERS = 32

MOST_UNREAD_BYTES = 512 << 10
"""Of a viewer: several overviews of 250 models. One that leaves more unread is closed."""

OVERVIEW_S = 5.0
"""As often as there is a sample."""

ALIVE_S = 15.0
"""Proxies close what is silent for a minute."""

RETRY_MS = 2000
"""A browser whose stream ended opens it again after so long."""


class Viewer(Struct, eq=False):
    """One stream. is_allowed: whether its viewer may still read; asked before each overview."""

    stream: EventStream
    is_allowed: Callable[[], bool]


class Viewers:
    """All streams. overview: makes the event of that name. events: those after a number."""

    def __init__(
        self,
        clock: Clock,
        overview: Callable[[], dict[str, Any]],
        events: Callable[[int], Sequence[dict[str, Any]]],
    ) -> None:
        self._monotonic_s = clock.monotonic_s
        self._overview = overview
        self._events = events
        self._lock = threading.Lock()
        self._viewers: list[Viewer] = []
        self._is_closed = False
        self._due_s = self._alive_s = 0.0
        self._told = 0

    @property
    def is_full(self) -> bool:
        """Whether there are as many as there may be. Thread: any."""
        return sum(each.stream.is_open for each in list(self._viewers)) >= MOST_VIEWERS

    def add(self, viewer: Viewer, hello: dict[str, Any], known: int) -> None:
        """Begin with a viewer. known: the number of the newest event that it need not be told. Thread: any."""
        with self._lock:
            if self._is_closed or self.is_full:
                viewer.stream.end()
                return
            if not self._viewers:
                self._told = known
            self._viewers.append(viewer)
        greeting = b"retry: %d\n" % RETRY_MS + event_text("hello", hello)
        viewer.stream.send(greeting + event_text("overview", self._overview()))

    def beat(self) -> None:
        """Send what is due."""
        if not self._viewers:
            return
        self._drop_gone()
        now_s = self._monotonic_s()
        text = b"".join(event_text("event", each) for each in self._news())
        if now_s >= self._due_s:
            self._due_s = now_s + OVERVIEW_S
            self._end_unallowed()
            text += event_text("overview", self._overview()) if self._viewers else b""
        if not text and now_s >= self._alive_s:
            text = b": \n\n"
        if text:
            self._alive_s = now_s + ALIVE_S
            for viewer in list(self._viewers):
                viewer.stream.send(text)

    def close(self) -> None:
        """End every stream, and take no more. Idempotent. Thread: any."""
        with self._lock:
            self._is_closed = True
            viewers, self._viewers = self._viewers, []
        for viewer in viewers:
            viewer.stream.end(event_text("bye", {}))

    # ---- private ----------------------------------------------------------------------------------------------------

    def _news(self) -> Sequence[dict[str, Any]]:
        found = self._events(self._told)
        if found:
            self._told = found[-1]["id"]
        return found

    def _drop_gone(self) -> None:
        for viewer in list(self._viewers):
            if viewer.stream.unread_bytes > MOST_UNREAD_BYTES:
                viewer.stream.drop()
            if not viewer.stream.is_open:
                self._remove(viewer)

    def _end_unallowed(self) -> None:
        for viewer in list(self._viewers):
            if not viewer.is_allowed():
                viewer.stream.end()
                self._remove(viewer)

    def _remove(self, viewer: Viewer) -> None:
        with self._lock:
            if viewer in self._viewers:
                self._viewers.remove(viewer)


def event_text(name: str, data: dict[str, Any]) -> bytes:
    """Write a server-sent event. JSON has no line break of its own."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), json_codec.dumps(data))
