"""The changes of a fleet, in SQLite: bounded, and lost without harm, since the broker has the truth.

Thread: one at a time; each method takes milliseconds.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from edge_runtime.errors import ConfigError
from edge_runtime.fleet.fleet import FleetEvent

MAX_ROWS = 100_000
"""Some 10 MB; ten changes a day of each of 10 000 devices."""

MAX_SHOWN = 500

MEMORY = ":memory:"


class FleetHistory:
    """The changes that were seen. path: of a file; MEMORY: gone with the process. Raises ConfigError for a bad file."""

    def __init__(self, path: str = MEMORY) -> None:
        try:
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY, at_s REAL NOT NULL, device TEXT NOT NULL,"
                " what TEXT NOT NULL)"
            )
            self._database.execute("CREATE INDEX IF NOT EXISTS by_device ON events (device, id)")
        except sqlite3.Error as error:
            raise ConfigError(f"--history: {path}: {error}; wanted a new file, or one that `fleet` wrote") from None

    @staticmethod
    def read(path: str, count: int, device: str = "") -> list[dict[str, Any]]:
        """Return what `last` would of a file, which another process may be writing. Raises ConfigError."""
        try:
            with closing(sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True)) as database:
                return _last(database, count, device)
        except sqlite3.Error as error:
            raise ConfigError(f"--history: {path}: {error}; wanted the file that `fleet --history` writes") from None

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._database.close()

    def add(self, events: Sequence[FleetEvent]) -> None:
        """Keep events, and drop the oldest beyond MAX_ROWS."""
        if not events:
            return
        with self._database:
            self._database.execute("BEGIN")
            rows = [(each.at_s, each.device_id, each.text) for each in events]
            self._database.executemany("INSERT INTO events (at_s, device, what) VALUES (?, ?, ?)", rows)
            self._database.execute("DELETE FROM events WHERE id <= (SELECT max(id) FROM events) - ?", (MAX_ROWS,))

    def last(self, count: int, device: str = "") -> list[dict[str, Any]]:
        """Return the last events, newest first, at most MAX_SHOWN. device: of it alone."""
        return _last(self._database, min(count, MAX_SHOWN), device)


def _last(database: sqlite3.Connection, count: int, device: str) -> list[dict[str, Any]]:
    most = max(count, 1)
    if device:
        found = database.execute(
            "SELECT at_s, device, what FROM events WHERE device = ? ORDER BY id DESC LIMIT ?", (device, most)
        )
    else:
        found = database.execute("SELECT at_s, device, what FROM events ORDER BY id DESC LIMIT ?", (most,))
    with closing(found) as rows:
        return [{"time": at_s, "device": of, "what": what} for at_s, of, what in rows]
