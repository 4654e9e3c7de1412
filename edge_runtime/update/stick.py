"""Where on a stick the repository is: the folder that was named, or one above or below it, which is then said.

Owns: what makes a folder a repository's, and what to say where it is not. A stick is somebody else's: only plain
folders are looked into, a bounded number of them, and a name is quoted before it is shown. Never decides whether what
lies there is to be believed. Thread: any.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from edge_runtime.errors import UpdateError
from edge_runtime.update.source import METADATA, TARGETS

LOOKED_AT = 1_000
"""Entries of a folder: a person's stick has fewer, a stranger's may have any number."""

NAMED = 3
"""Repositories that a message names; one is usual."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What was found at a folder that was named. above, below: repositories, where it is none itself."""

    folder: Path
    is_repository: bool
    above: Path | None = None
    below: tuple[Path, ...] = ()


def find_repository(folder: str) -> Path:
    """The folder, where it is a repository's. Raises UpdateError, naming the right one where it is near."""
    path = Path(folder)
    try:
        found = _look(path)
    except FileNotFoundError:
        raise UpdateError(
            f"{folder}: the daemon sees no such folder; wanted what `edge-runtime repo bundle` wrote. A service "
            "sees neither /home nor this /tmp: copy or mount it elsewhere, for example below /mnt"
        ) from None
    except OSError as error:
        raise UpdateError(
            f"{folder}: the daemon cannot look there: {error.strerror}; it runs as a user of its own, so copy or "
            "mount it where everybody may read, for example below /mnt"
        ) from None
    reason = why_not(found)
    if reason is not None:
        raise UpdateError(reason)
    return path


def why_not(found: Surroundings) -> str | None:
    """Why a folder is not imported, with the one that may be meant; None: it is a repository. Pure."""
    if found.is_repository:
        return None
    near: Sequence[Path] = (found.above,) if found.above is not None else found.below
    what = f"{found.folder}: is no repository: it has no {METADATA}/ with {TARGETS}/ beside it"
    if not near:
        return f"{what}; wanted the folder that `edge-runtime repo bundle` wrote"
    place = "the folder above it is one" if found.above is not None else "one level down there is one"
    orders = " or ".join(f"edge-runtime update import {_quoted(each)}" for each in near[:NAMED])
    return f"{what}, but {place}: {orders}"


def _look(folder: Path) -> Surroundings:
    """Raises FileNotFoundError: it is no folder; OSError: it may not be looked into."""
    if not _is_folder(folder):
        raise FileNotFoundError
    if _is_repository(folder):
        return Surroundings(folder, is_repository=True)
    if folder.name in (METADATA, TARGETS) and _is_repository(folder.parent):
        return Surroundings(folder, is_repository=False, above=folder.parent)
    with os.scandir(folder) as entries:
        folders = [each.name for each in islice(entries, LOOKED_AT) if each.is_dir(follow_symlinks=False)]
    below = (folder / name for name in sorted(folders))
    return Surroundings(folder, is_repository=False, below=tuple(each for each in below if _may_be_repository(each)))


def _is_repository(folder: Path) -> bool:
    """Not whether it is whole: what is missing is told when it is read. Raises OSError: it may not be looked at."""
    return _is_folder(folder / METADATA) and _is_folder(folder / TARGETS)


def _may_be_repository(folder: Path) -> bool:
    try:
        return _is_repository(folder)
    except OSError:
        return False


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _quoted(path: Path) -> str:
    """As a shell takes it; what is not printable is escaped, so that a name does nothing to a terminal."""
    text = str(path)
    return shlex.quote(text) if text.isprintable() else ascii(text)
