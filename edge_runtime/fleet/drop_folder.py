"""A folder that others put files into: which of them are whole and new, and what becomes of them afterwards.

Owns: what was seen and what is done with. Reads content, decodes nothing. Nothing that is no plain file is opened or
followed. Thread: one caller's.
"""

from __future__ import annotations

import errno
import heapq
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.errors import TensorMismatch
from edge_runtime.wire.codec import MAX_JSON_BYTES

MAX_FILE_BYTES = 64 << 20
"""As the largest frame that a client may send."""

IGNORED_SUFFIXES = (".part", ".tmp")
"""What careful writers call a file that they will rename; as in the models folder (DESIGN 6)."""

FAILED_FOLDER = ".failed"

TAKEN_AT_ONCE = 256
"""Files that one look returns: the oldest."""

REMEMBERED_FILES = 16_384
"""Files that stay and are known to be done with; beyond, those as old as a forgotten one are taken for done with."""

Mark = tuple[int, int, int]
"""What tells one state of a file from another: time of change (ns), bytes, inode."""


@dataclass(frozen=True, slots=True)
class Drop:
    """One state of one file."""

    mark: Mark
    name: str


class DropFolder:
    """One folder. Every method raises OSError where the file system does."""

    def __init__(self, path: Path, remembered: int = REMEMBERED_FILES) -> None:
        self.path = path
        self._remembered = remembered
        self._seen: dict[str, Mark] = {}
        self._done: dict[str, Mark] = {}
        self._done_until_ns = -1

    def look(self) -> list[Drop]:
        """Files that are as they were at the last look, and not done with; the oldest first."""
        found = self._scan()
        for name in self._done.keys() - found.keys():
            del self._done[name]
        new = {name: mark for name, mark in found.items() if not self._is_done(name, mark)}
        settled = [Drop(mark, name) for name, mark in new.items() if self._seen.get(name) == mark]
        self._seen = new
        return heapq.nsmallest(TAKEN_AT_ONCE, settled, key=lambda drop: (drop.mark[0], drop.name))

    def read(self, drop: Drop) -> bytes | None:
        """A file's content; None when it is no longer as it was seen.

        Raises TensorMismatch for a link, device or other thing that is no plain file, and for one that is too large.
        """
        path = self.path / drop.name
        if not stat.S_ISREG(path.lstat().st_mode):
            raise TensorMismatch(f"{drop.name} is no plain file; links are not followed")
        limit = MAX_JSON_BYTES if path.suffix.lower() == ".json" else MAX_FILE_BYTES
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if _mark(os.fstat(descriptor)) != drop.mark:
                return None
            if drop.mark[1] > limit:
                raise TensorMismatch(f"{drop.name} has {drop.mark[1]} bytes; at most {limit} are read")
            return file.read(limit)

    def remember(self, drop: Drop) -> None:
        """It is done with, and stays where it is."""
        self._done.pop(drop.name, None)
        self._done[drop.name] = drop.mark
        if len(self._done) > self._remembered:
            oldest = next(iter(self._done))
            self._done_until_ns = max(self._done_until_ns, self._done.pop(oldest)[0])

    def remove(self, drop: Drop) -> None:
        """It is done with, and goes, unless it was written anew meanwhile."""
        if self._is_unchanged(drop):
            (self.path / drop.name).unlink()

    def set_aside(self, drop: Drop) -> None:
        """It is no good: into FAILED_FOLDER, over an older one of its name, unless it was written anew meanwhile."""
        aside = self.path / FAILED_FOLDER
        aside.mkdir(exist_ok=True)
        if aside.is_symlink():
            raise OSError(errno.ELOOP, "a link is not followed", str(aside))
        if self._is_unchanged(drop):
            (self.path / drop.name).replace(aside / drop.name)

    # ---- private ----------------------------------------------------------------------------------------------------

    def _scan(self) -> dict[str, Mark]:
        found: dict[str, Mark] = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name.endswith(IGNORED_SUFFIXES):
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if not stat.S_ISDIR(status.st_mode):
                    found[entry.name] = _mark(status)
        return found

    def _is_done(self, name: str, mark: Mark) -> bool:
        known = self._done.get(name)
        return known == mark if known is not None else mark[0] <= self._done_until_ns

    def _is_unchanged(self, drop: Drop) -> bool:
        try:
            return _mark((self.path / drop.name).lstat()) == drop.mark
        except FileNotFoundError:
            return False


def _mark(status: os.stat_result) -> Mark:
    return (status.st_mtime_ns, status.st_size, status.st_ino)
