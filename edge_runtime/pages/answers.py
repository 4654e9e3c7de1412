"""The operations of the page: what it shows, for every client. Thread: their door's; each waits for nothing."""

from __future__ import annotations

from typing import Any

from edge_runtime.doors.http.door import HttpDoor
from edge_runtime.errors import Unsupported
from edge_runtime.pages.protocol import Page


def overview(door: HttpDoor) -> dict[str, Any]:
    """The device at a glance."""
    return _page(door).overview.now()


def history(door: HttpDoor, model: str) -> dict[str, Any]:
    """The samples of the last quarter of an hour, of a model or of all."""
    return _page(door).samples_of(model or None)


def events(door: HttpDoor, count: int) -> list[dict[str, Any]]:
    """The last events, newest first."""
    return _page(door).events.last(count)


def doctor(door: HttpDoor) -> dict[str, Any]:
    """The files of a bug report."""
    return {"files": _page(door).report()}


def tuning(door: HttpDoor, model: str) -> dict[str, Any]:
    """Return what a tune found out about a model."""
    return _page(door).tuned(model)


def example(door: HttpDoor, model: str) -> dict[str, Any]:
    """Return an input to try a model with. Thread: one of its own."""
    return _page(door).example(model)


def _page(door: HttpDoor) -> Page:
    page = door.protocol(Page)
    if page is None:
        raise Unsupported("the daemon keeps this for its page, which is off; set page = true in [http], and restart it")
    return page
