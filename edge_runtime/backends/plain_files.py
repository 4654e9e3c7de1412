"""Whether a file that a model names is a plain file inside the model's own folder.

Owns: the rule that a location in a model never leads elsewhere (DESIGN 6). Opens nothing but folders, and follows no
link. Called by onnx_files.py and ir_files.py before a library sees the model.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from edge_runtime.errors import LoadFailed

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_artifact(artifact: Path) -> tuple[int, os.stat_result]:
    """Open a model file for reading. The descriptor is the caller's. Raises LoadFailed unless it is a regular file."""
    try:
        # O_NONBLOCK: opening a fifo would otherwise wait for its other end.
        descriptor = os.open(artifact, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise LoadFailed(f"cannot read {artifact}: {error.strerror}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise LoadFailed(f"{artifact} is {_kind(status.st_mode)}; wanted a regular file")
    return descriptor, status


def artifact_size(artifact: Path) -> int:
    """Size in bytes of a model file. Raises LoadFailed unless it is a regular file."""
    descriptor, status = open_artifact(artifact)
    os.close(descriptor)
    return status.st_size


def plain_file_size(folder: Path, location: str) -> int:
    """Size in bytes of the plain file `location` names, relative to `folder`.

    Plain: a regular file with one name (no hard link), reached through real folders only (no symbolic link), inside
    `folder`. Raises LoadFailed saying which rule it breaks. Source: the escapes published for onnx and onnxruntime,
    CVE-2022-25882, CVE-2024-27318, CVE-2026-27489 (symlink), CVE-2026-34446 (hard link).
    """
    parts = _parts(location)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            below = os.open(part, _FOLDER, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        status = os.stat(parts[-1], dir_fd=descriptor, follow_symlinks=False)
    except OSError as error:
        reason = f"{error.strerror}; wanted a plain file inside {folder}, reached without symbolic links"
        raise _refused(location, reason) from error
    finally:
        os.close(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise _refused(location, f"it is {_kind(status.st_mode)}; wanted a plain file, so copy the data there")
    if status.st_nlink > 1:
        raise _refused(location, f"it has {status.st_nlink} names (hard links); wanted one, so copy the data there")
    return status.st_size


def _parts(location: str) -> list[str]:
    """Split a location into names. Raises LoadFailed for what could mean something else to another reader."""
    if not location:
        raise _refused(location, "it is empty; wanted a file name")
    if "\0" in location or "\\" in location:
        raise _refused(location, "it holds a NUL or a backslash; wanted names separated by /")
    if location.startswith("/"):
        raise _refused(location, "it is absolute; wanted a path relative to the model's folder")
    if location.startswith("*/") or "_MEM_ADDR_" in location:
        raise _refused(location, "it is a mark for an address in memory, which no file may carry")
    parts = [part for part in location.split("/") if part != "."]
    if ".." in parts:
        raise _refused(location, "it leaves the model's folder; wanted a path inside it")
    if not parts or "" in parts:
        raise _refused(location, "it holds an empty name; wanted a file name")
    return parts


def _refused(location: str, reason: str) -> LoadFailed:
    return LoadFailed(f"the model's data file {location[:200]!r} is refused: {reason}")


def _kind(mode: int) -> str:
    for is_kind, words in (
        (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a fifo"),
        (stat.S_ISSOCK, "a socket"),
    ):
        if is_kind(mode):
            return words
    return "a device"
