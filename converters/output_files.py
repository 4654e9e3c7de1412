"""Where a conversion writes: into a folder of its own beside the target, which gets its names when all is whole.

Owns: the order file by file -> fsync -> rename -> fsync(folder). The folder's name begins with a dot and ends in
`.part`, so that no daemon that watches takes it; a conversion that fails leaves nothing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from edge_runtime.errors import ConversionFailed
from edge_runtime.repository.durable import PART_SUFFIX, sync_folder


@contextmanager
def work_folder(target: Path) -> Iterator[Path]:
    """An empty folder on the target's disk, gone at the end. Raises ConversionFailed: it cannot be made."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=PART_SUFFIX, dir=target.parent))
    except OSError as error:
        raise ConversionFailed(f"cannot write beside {target}: {error.strerror}; name another place") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def whole(target: Path) -> Iterator[Path]:
    """A path to write the target to, and its companions beside; they get their names when the block ends well."""
    with work_folder(target) as folder:
        yield folder / target.name
        place(folder, target)


def place(folder: Path, target: Path) -> list[Path]:
    """Move all files of a folder beside the target, durably, the target last. Raises ConversionFailed.

    Who finds the target finds whole what it needs (`model.xml` its `model.bin`). Returns them, the target first.
    """
    made = folder / target.name
    if not made.is_file():
        raise ConversionFailed(f"the library wrote no {target.name} and gives no reason; look at its version")
    others = sorted(path for path in folder.iterdir() if path.name != target.name)
    try:
        for path in (*others, made):
            _sync(path)
        placed = [_renamed(path, target.parent) for path in (*others, made)]
        sync_folder(target.parent)
    except OSError as error:
        raise ConversionFailed(f"{target} could not be written: {error.strerror}; free some space") from error
    return placed[::-1]


def total_bytes(paths: Sequence[Path]) -> int:
    """Bytes of some files, and of all that lies in those that are folders."""
    files = [file for path in paths for file in ((path, *path.rglob("*")) if path.is_dir() else (path,))]
    return sum(file.stat().st_size for file in files if file.is_file())


def _renamed(path: Path, folder: Path) -> Path:
    return path.replace(folder / path.name)


def _sync(path: Path) -> None:
    path.chmod(0o644)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
