"""Durable output: a conversion writes into its own folder beside the target, and its files are renamed when complete.

Owns: the order file by file -> fsync -> rename -> fsync(folder). The folder's name begins with a dot and ends in
`.part`, so that no watching daemon loads it. A failed conversion leaves nothing; the next conversion to the same target
removes what a killed one left.
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

from edge_runtime.durable import PART_SUFFIX, sync_folder
from edge_runtime.errors import ConversionFailed
from edge_runtime.sandbox.folder_lock import lock_folder, remove_unless_locked


@contextmanager
def work_folder(target: Path) -> Iterator[Path]:
    """An empty folder on the target's disk, removed at the end. Raises ConversionFailed: it cannot be made."""
    folder = target.with_name(f".{target.name}.{secrets.token_hex(4)}{PART_SUFFIX}")
    held: int | None = None
    try:  # begins before the folder exists, because Ctrl-C comes at any moment
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with _alone_in(target.parent):
                _reclaim(target)
                folder.mkdir(0o700)
                held = lock_folder(folder)
        except OSError as error:
            raise ConversionFailed(f"cannot write beside {target}: {error.strerror}; name another place") from error
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if held is not None:
            os.close(held)
            # Once more: a child that a killed conversion was about to start had the lock too, until it ran its program.
            with suppress(OSError), _alone_in(target.parent):
                _reclaim(target)


@contextmanager
def whole(target: Path) -> Iterator[Path]:
    """A path to write the target to, with companions beside; renamed to their names when the block succeeds."""
    with work_folder(target) as folder:
        yield folder / target.name
        place(folder, target)


def place(folder: Path, target: Path, *, may_replace: bool = True) -> list[Path]:
    """Move all files of a folder beside the target, durably, the target last. Raises ConversionFailed.

    A reader that finds the target finds its companions whole (`model.xml` its `model.bin`): an old target is removed
    before its companions change, and writers take turns. Returns the files, the target first.
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
    """Raise ConversionFailed where the file exists and may not be replaced."""
    if path.exists() and not may_replace:
        raise ConversionFailed(f"{path} is there already; name another with --output, or replace it with --overwrite")


def total_bytes(paths: Sequence[Path]) -> int:
    """Bytes of files, and of all files in folders."""
    files = [file for path in paths for file in ((path, *path.rglob("*")) if path.is_dir() else (path,))]
    return sum(file.stat().st_size for file in files if file.is_file())


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Lock a folder against other conversions' renames. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a network disk without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _reclaim(target: Path) -> None:
    """Remove work folders for this target that no conversion has locked: theirs were killed."""
    for folder in target.parent.glob(f".{glob.escape(target.name)}.????????{PART_SUFFIX}"):
        remove_unless_locked(folder)


def _renamed(path: Path, folder: Path) -> Path:
    return path.replace(folder / path.name)


def _sync(path: Path) -> None:
    path.chmod(0o644)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
