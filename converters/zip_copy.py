"""A clean copy of a zip archive: only members that were looked at, so that no other reader of zips finds more in it.

Owns: the bounds, and what is refused for being read differently by different readers. PyTorch reads zips with miniz,
Python with zipfile; an archive made to mean one thing to each would pass a check of the one and be loaded by the other.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from edge_runtime.errors import ConversionFailed

MAX_BYTES = 8_000_000_000
_BLOCK = 1 << 20


class Fate(Enum):
    """What becomes of a member, other than being copied."""

    LEFT_OUT = "left out"


Check = Callable[[str, Callable[[], bytes]], bytes | Fate | None]
"""Member name below the archive's top folder, and how to read it whole -> its bytes instead, None to copy it as it is.
Raises ConversionFailed: this member is refused.
"""


def copy_checked(source: Path, target: Path, check: Check) -> None:
    """Write `target` with the members of `source` that `check` lets through, uncompressed. Raises ConversionFailed."""
    try:
        with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as clean:
            for member in _members(archive, source):
                _copy(archive, clean, member, check)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError, RuntimeError, KeyError) as error:
        raise ConversionFailed(f"{source}: a damaged archive ({error}); copy it again") from error
    except OSError as error:
        raise ConversionFailed(f"{source}: {error.strerror or error}") from error


def _members(archive: zipfile.ZipFile, source: Path) -> list[zipfile.ZipInfo]:
    members = archive.infolist()
    names = [member.filename for member in members]
    if len({name.lower() for name in names}) != len(names):
        raise ConversionFailed(f"{source}: two members of one name; no exporter writes that")
    if any(".." in name.split("/") or name.startswith("/") or "\\" in name or "\0" in name for name in names):
        raise ConversionFailed(f"{source}: a member's name leads out of the archive; no exporter writes that")
    if len({name.partition("/")[0] for name in names}) != 1:
        raise ConversionFailed(f"{source}: members are not below one folder, as PyTorch writes them")
    total = sum(member.file_size for member in members)
    if total > min(MAX_BYTES, 2 * source.stat().st_size + 65536):
        raise ConversionFailed(
            f"{source}: says it holds {total} bytes and is {source.stat().st_size}; PyTorch compresses nothing"
        )
    return members


def _copy(archive: zipfile.ZipFile, clean: zipfile.ZipFile, member: zipfile.ZipInfo, check: Check) -> None:
    name = member.filename.partition("/")[2]
    replaced = check(name, lambda: archive.read(member))
    if isinstance(replaced, Fate):
        return
    info = zipfile.ZipInfo(f"model/{name}")
    if replaced is not None:
        clean.writestr(info, replaced)
        return
    with archive.open(member) as reader, clean.open(info, "w", force_zip64=True) as writer:
        while block := reader.read(_BLOCK):
            writer.write(block)
