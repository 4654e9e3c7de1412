"""Where a conversion writes: into a folder of its own beside the target, which gets its names when all is whole.

Owns: the order file by file -> fsync -> rename -> fsync(folder). The folder's name begins with a dot and ends in
`.part`, so that no daemon that watches takes it; a conversion that fails leaves nothing, and what one that was killed
left goes with the next to the same target.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from edge_runtime.errors import ConversionFailed
from edge_runtime.repository.durable import PART_SUFFIX, sync_folder
from edge_runtime.repository.held_folder import hold, remove_unless_held


@contextmanager
def work_folder(target: Path) -> Iterator[Path]:
    """An empty folder on the target's disk, gone at the end. Raises ConversionFailed: it cannot be made."""
    folder = target.with_name(f".{target.name}.{secrets.token_hex(4)}{PART_SUFFIX}")
    held: int | None = None
    try:  # from before it is there: Ctrl-C comes at any moment
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with _alone_in(target.parent):
                _reclaim(target)
                folder.mkdir(0o700)
                held = hold(folder)
        except OSError as error:
            raise ConversionFailed(f"cannot write beside {target}: {error.strerror}; name another place") from error
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if held is not None:
            os.close(held)


@contextmanager
def whole(target: Path) -> Iterator[Path]:
    """A path to write the target to, and its companions beside; they get their names when the block ends well."""
    with work_folder(target) as folder:
        yield folder / target.name
        place(folder, target)


def place(folder: Path, target: Path, *, may_replace: bool = True) -> list[Path]:
    """Move all files of a folder beside the target, durably, the target last. Raises ConversionFailed.

    Who finds the target finds whole what it needs (`model.xml` its `model.bin`): an old one that has companions is
    gone before theirs change, and of several writers one has its turn after the other. Returns them, the target first.
    """
    made = folder / target.name
    if not made.is_file():
        raise ConversionFailed(f"the library wrote no {target.name} and gives no reason; look at its version")
    others = sorted(path for path in folder.iterdir() if path.name != target.name)
    try:
        for path in (*others, made):
            _sync(path)
        with _alone_in(target.parent):
            for path in (*others, made):
                check_free(target.parent / path.name, may_replace=may_replace)
            if others:
                target.unlink(missing_ok=True)
                sync_folder(target.parent)
            placed = [_renamed(path, target.parent) for path in (*others, made)]
            sync_folder(target.parent)
    except OSError as error:
        advice = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "name another with --output"
        raise ConversionFailed(f"{target} could not be written: {error.strerror}; {advice}") from error
    return placed[::-1]


def check_free(path: Path, *, may_replace: bool) -> None:
    """Raises ConversionFailed where a file of that name is there, and may not be replaced."""
    if path.exists() and not may_replace:
        raise ConversionFailed(f"{path} is there already; name another with --output, or replace it with --overwrite")


def total_bytes(paths: Sequence[Path]) -> int:
    """Bytes of some files, and of all that lies in those that are folders."""
    files = [file for path in paths for file in ((path, *path.rglob("*")) if path.is_dir() else (path,))]
    return sum(file.stat().st_size for file in files if file.is_file())


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """The only conversion that gives or takes names in a folder meanwhile. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a network's disk without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _reclaim(target: Path) -> None:
    """Remove work folders for this target that nobody holds: their conversions were killed."""
    for folder in target.parent.glob(f".{glob.escape(target.name)}.????????{PART_SUFFIX}"):
        remove_unless_held(folder)


def _renamed(path: Path, folder: Path) -> Path:
    return path.replace(folder / path.name)


def _sync(path: Path) -> None:
    path.chmod(0o644)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
