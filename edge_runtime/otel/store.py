"""Bodies that no collector has taken yet, as files in the state folder, within a bound of bytes.

Owns: their order, oldest first, and which are given up for newer ones. A body that a power cut left broken is one that
the collector refuses. Thread: the exporter's.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from pathlib import Path

from edge_runtime.durable import make_folder, remove_parts, write_atomically
from edge_runtime.errors import StorageFailed

SUFFIX = ".json.gz"


class BodyStore:
    """Bodies on disk. nbytes: of all."""

    def __init__(self, folder: Path | None, most_bytes: int) -> None:
        """folder: None where no state is kept: then nothing is."""
        self._folder = folder
        self._most_bytes = most_bytes
        self._files: deque[tuple[Path, int]] = deque()
        self.nbytes = 0

    def open(self) -> None:
        """Take over what an earlier daemon left. Raises StorageFailed."""
        if self._folder is None:
            return
        make_folder(self._folder)
        remove_parts(self._folder)
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            with contextlib.suppress(OSError):
                self._count(path, path.stat().st_size)

    def __len__(self) -> int:
        return len(self._files)

    def put(self, signal: str, body: bytes) -> int:
        """Keep a body; return how many were lost for it, itself where it cannot be kept."""
        if self._folder is None or len(body) > self._most_bytes:
            return 1
        lost = 0
        while self._files and self.nbytes + len(body) > self._most_bytes:
            self._remove()
            lost += 1
        path = self._folder / f"{time.time_ns():020d}-{signal}{SUFFIX}"
        try:
            write_atomically(path, body, mode=0o600)
        except StorageFailed:
            return lost + 1
        self._count(path, len(body))
        return lost

    def oldest(self) -> tuple[str, bytes] | None:
        """Return the signal and the bytes of the oldest body; None without any."""
        while self._files:
            path, _ = self._files[0]
            try:
                return path.name.removesuffix(SUFFIX).partition("-")[2], path.read_bytes()
            except OSError:  # somebody removed it
                self._remove()
        return None

    def drop_oldest(self) -> None:
        """Forget the oldest body."""
        if self._files:
            self._remove()

    def _count(self, path: Path, nbytes: int) -> None:
        self._files.append((path, nbytes))
        self.nbytes += nbytes

    def _remove(self) -> None:
        path, nbytes = self._files.popleft()
        self.nbytes -= nbytes
        with contextlib.suppress(OSError):
            path.unlink()
