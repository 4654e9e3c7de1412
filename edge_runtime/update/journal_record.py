"""The second record of what is active, beside the database: what a device serves on from where that was lost.

Owns: its file. It is written after the database, and so may be one change behind.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from edge_runtime.repository.durable import Disk, read_kept, write_atomically
from edge_runtime.update.journal_tables import Release

RECORD = "active.json"
MAX_RECORD_BYTES = 1 << 20


class Record(msgspec.Struct, frozen=True):
    """The second record: what is active, and how often that had changed."""

    changes: int = 0
    active: list[Release] = []


def read_record(folder: Path) -> Record | None:
    """The second record; None when there is none that can be read."""
    try:
        return msgspec.json.decode(read_kept(folder / RECORD, MAX_RECORD_BYTES), type=Record)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def write_record(folder: Path, record: Record, *, disk: Disk) -> None:
    """Put a record in the place of the one before. Raises StorageFailed."""
    write_atomically(folder / RECORD, msgspec.json.encode(record), disk=disk)
