"""Folders listed and files stamped, inside the models folder only.

Owns: the bounds on depth and number, which symbolic links are followed (those to places inside the models folder), and
which folders could not be read. Knows no model, opens no file. Called by walk.py; a listing lives for one walk.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from edge_runtime.repository.folder import Fingerprint, Problem, Stamp
from edge_runtime.repository.names import is_ignored

MAX_DEPTH = 4
"""Folders below a version folder whose files are watched (external data may lie there); deeper ones are reported."""

MAX_VERSION_FILES = 4096
"""Files of one version that are watched: a model split into one file a tensor has fewer, a wrong mount has more."""


@dataclass(slots=True)
class Files:
    """Plain files of one folder while it is read: their names, stamps of everything below, and what is wrong."""

    names: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    stamps: list[Stamp] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def fingerprint(self) -> Fingerprint:
        """Of all that was stamped."""
        return tuple(sorted(self.stamps))


class Listing:
    """One models folder while it is read. Paths are text: building Path objects costs more than the system calls."""

    def __init__(self, root: Path) -> None:
        self.unreadable: set[str] = set()
        """Folders that are there (or were) and could not be listed."""
        self._home = os.path.realpath(root)

    def entries(
        self, path: str, problems: list[Problem], *, absent_is_a_problem: bool = False
    ) -> list[os.DirEntry[str]]:
        """List a folder. One that vanished meanwhile is empty; one that cannot be read is noted as unreadable."""
        try:
            with os.scandir(path) as found:
                return list(found)
        except FileNotFoundError:
            if absent_is_a_problem:
                problems.append(Problem(Path(path), "no such folder; create it, or name another one with --models"))
                self.unreadable.add(path)
        except OSError as error:
            problems.append(Problem(Path(path), f"cannot be listed: {error.strerror}"))
            self.unreadable.add(path)
        return []

    def read_files(self, entries: list[os.DirEntry[str]], files: Files, prefix: str = "", depth: int = 0) -> None:
        """Stamp every plain file; those of the folder itself (no prefix) are named too."""
        for entry in entries:
            if is_ignored(entry.name):
                continue
            if len(files.stamps) >= MAX_VERSION_FILES:
                files.problems.append(Problem(Path(entry.path), f"more than {MAX_VERSION_FILES} files; not watched"))
                return
            try:
                if entry.is_dir(follow_symlinks=False):
                    if not prefix:
                        files.folders.append(entry.name)
                    self._read_folder(entry, files, prefix, depth)
                    continue
                is_plain = entry.is_file(follow_symlinks=False)
                found = entry.stat(follow_symlinks=False) if is_plain else self._stat_other(entry, files.problems)
                if found is not None:
                    files.stamps.append(
                        (prefix + entry.name, found.st_size, found.st_mtime_ns, found.st_ino, found.st_mode)
                    )
                    if not prefix:
                        files.names.append(entry.name)
            except FileNotFoundError:
                continue  # it vanished since the folder was listed: the next scan sees the rest

    def why_not_followed(self, entry: os.DirEntry[str]) -> str | None:
        """Why a symbolic link is refused; None for what is no link, or leads to a place inside the models folder."""
        if not entry.is_symlink():
            return None
        try:
            target = os.path.realpath(entry.path, strict=True)
        except OSError as error:
            return f"is a symbolic link that cannot be followed: {error.strerror}"
        if not Path(target).is_relative_to(self._home):
            return f"is a symbolic link that leads outside the models folder, to {target}; copy the files instead"
        if Path(os.path.realpath(Path(entry.path).parent)).is_relative_to(target):
            return f"is a symbolic link to a folder that it lies in, {target}"
        return None

    def _read_folder(self, entry: os.DirEntry[str], files: Files, prefix: str, depth: int) -> None:
        if depth >= MAX_DEPTH:
            files.problems.append(Problem(Path(entry.path), f"more than {MAX_DEPTH} folders deep; not watched"))
            return
        self.read_files(self.entries(entry.path, files.problems), files, f"{prefix}{entry.name}/", depth + 1)

    def _stat_other(self, entry: os.DirEntry[str], problems: list[Problem]) -> os.stat_result | None:
        """The plain file that a link inside the models folder leads to; anything else is a problem."""
        if entry.is_symlink():
            reason = self.why_not_followed(entry)
            if reason is not None:
                problems.append(Problem(Path(entry.path), reason))
                return None
        found = entry.stat()
        if stat.S_ISREG(found.st_mode):
            return found
        problems.append(Problem(Path(entry.path), "is not a plain file; ignored"))
        return None
