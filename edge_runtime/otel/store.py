"""Bodies that no collector has taken yet, as files in the state folder, within a bound of bytes for all signals.

Owns: their order, oldest first of each signal, and which are given up for newer ones: the oldest of the signal that
holds most. So a flood of one signal pushes no other below its even share. A body that a power cut left broken is one
that the collector refuses. Thread: the exporter's.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from pathlib import Path

from edge_runtime.durable import make_folder, remove_parts, write_atomically
from edge_runtime.errors import StorageFailed
from edge_runtime.otel.otlp import SIGNALS

SUFFIX = ".json.gz"


class BodyStore:
    """Bodies on disk. nbytes: of all."""

    def __init__(self, folder: Path | None, most_bytes: int) -> None:
        """folder: None where no state is kept: then nothing is."""
        self._folder = folder
        self._most_bytes = most_bytes
        self._files: dict[str, deque[tuple[Path, int]]] = {signal: deque() for signal in SIGNALS}
        self._bytes = dict.fromkeys(SIGNALS, 0)
        self.nbytes = 0

    def open(self) -> None:
        """Take over what an earlier daemon left. Raises StorageFailed."""
        if self._folder is None:
            return
        make_folder(self._folder)
        remove_parts(self._folder)
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            signal = path.name.removesuffix(SUFFIX).partition("-")[2]
            if signal in self._files:
                with contextlib.suppress(OSError):
                    self._count(signal, path, path.stat().st_size)

    def __len__(self) -> int:
        return sum(map(len, self._files.values()))

    def put(self, signal: str, body: bytes) -> int:
        """Keep a body; return how many were lost for it, itself where it cannot be kept."""
        if self._folder is None or len(body) > self._most_bytes:
            return 1
        lost = 0
        while self.nbytes + len(body) > self._most_bytes:
            held = {each: nbytes + len(body) * (each == signal) for each, nbytes in self._bytes.items()}
            most = max((each for each in held if self._files[each]), key=lambda each: held[each])
            self._remove(most)
            lost += 1
        path = self._folder / f"{time.time_ns():020d}-{signal}{SUFFIX}"
        try:
            write_atomically(path, body, mode=0o600)
        except StorageFailed:
            return lost + 1
        self._count(signal, path, len(body))
        return lost

    def oldest(self, signal: str) -> bytes | None:
        """Return the oldest body of a signal; None without any."""
        while self._files[signal]:
            path, _ = self._files[signal][0]
            try:
                return path.read_bytes()
            except OSError:  # somebody removed it
                self._remove(signal)
        return None

    def drop_oldest(self, signal: str) -> None:
        """Forget the oldest body of a signal."""
        if self._files[signal]:
            self._remove(signal)

    def _count(self, signal: str, path: Path, nbytes: int) -> None:
        self._files[signal].append((path, nbytes))
        self._bytes[signal] += nbytes
        self.nbytes += nbytes

    def _remove(self, signal: str) -> None:
        path, nbytes = self._files[signal].popleft()
        self._bytes[signal] -= nbytes
        self.nbytes -= nbytes
        with contextlib.suppress(OSError):
            path.unlink()
