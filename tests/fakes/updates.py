"""An updater as the daemon's doors see one: tells what a test says, and keeps orders until the test ends them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

Done = Callable[[Any], None]

STEP: dict[str, Any] = {
    "model": "digits",
    "release": 4,
    "version": 3,
    "state": "staging",
    "detail": "",
    "done_bytes": 12 << 20,
    "total_bytes": 48 << 20,
}

STATUS: dict[str, Any] = {
    "source": "https://models.example",
    "next_check_s": 3125.0,
    "state": "idle",
    "group": "line-1",
    "device_id": "dev1",
    "state_lost": False,
    "clock": {
        "now_utc": "2026-11-21T12:00:00Z",
        "floor_utc": "2026-11-21T11:00:00Z",
        "is_behind": False,
        "is_synchronised": True,
    },
    "under_way": None,
    "checked": {
        "at_utc": "2026-11-21T11:55:00Z",
        "is_ok": True,
        "reason": "",
        "source": "https://models.example",
        "offers": [],
    },
    "models": {
        "digits": {
            "version": 2,
            "release": 3,
            "manifest_sha256": "5" * 64,
            "previous_release": 1,
            "not_served": "",
        }
    },
    "refused": [{"model": "digits", "release": 2, "reason": "output 'scores' is not what its golden output says"}],
}
"""What `update_status` answers between two checks."""

ENTRY: dict[str, Any] = {
    "at_utc": "2026-11-21T11:55:00Z",
    "model": "digits",
    "counter": 3,
    "what": "committed",
    "reason": "",
}


def offered(action: str, reason: str = "", **changed: Any) -> dict[str, Any]:
    """One release as a check tells of it."""
    return {
        "model": "digits", "release": 4, "percent": 100.0, "action": action, "reason": reason, "version": 3, **changed,
    }  # fmt: skip


def checked(*offers: dict[str, Any], reason: str = "") -> dict[str, Any]:
    """What a check answers; with a reason, one that failed."""
    return {**STATUS["checked"], "is_ok": not reason, "reason": reason, "offers": list(offers)}


@dataclass(frozen=True)
class Order:
    """What was asked for: the words, and whom to answer."""

    words: tuple[str, ...]
    done: Done


class FakeUpdates:
    """Implements `Updates`, and what the daemon's core and its door to a broker ask of an UpdateWorker."""

    def __init__(self) -> None:
        self.groups = ("line-1",)
        self.told = STATUS
        self.counts: list[int] = []
        self.orders: SimpleQueue[Order] = SimpleQueue()
        self.has_opened = threading.Event()

    def reserve(self) -> None:
        pass

    def start(self) -> None:
        self.has_opened.set()

    def stop(self) -> None:
        pass

    def close(self, limit_s: float | None = None) -> None:
        pass

    @property
    def is_running(self) -> bool:
        return False

    def look(self) -> None:
        pass

    def status(self) -> dict[str, Any]:
        return self.told

    def summary(self) -> dict[str, Any]:
        return self.told

    def history(self, count: int) -> list[dict[str, Any]]:
        self.counts.append(count)
        return [ENTRY]

    def check(self, done: Done) -> None:
        self.orders.put(Order(("check",), done))

    def apply(self, done: Done) -> None:
        self.orders.put(Order(("apply",), done))

    def import_folder(self, folder: str, done: Done) -> None:
        self.orders.put(Order(("import", folder), done))

    def roll_back(self, model: str, done: Done) -> None:
        self.orders.put(Order(("roll back", model), done))
