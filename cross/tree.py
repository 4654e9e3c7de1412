"""A root file system as a value: paths, modes, owners and contents, not on a disk, so that building needs no root.

Owns: what a layer may hold (files, folders, symbolic links) and the order and form in which tar holds it.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Entry:
    """A file (data), a symbolic link (target) or a folder (neither). Owners are numbers, as in the image."""

    data: bytes | None = None
    target: str | None = None
    mode: int = 0o644
    owner: int = 0


class Tree:
    """Entries by path, relative to the root and without a leading slash. Parent folders are added as needed."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def __iter__(self) -> Iterator[tuple[str, Entry]]:
        """Sorted by path, so a folder precedes its contents."""
        return iter(sorted(self._entries.items()))

    def file(self, path: str, data: bytes, mode: int = 0o644, owner: int = 0) -> None:
        """Add a file, or replace it."""
        self._add(path, Entry(data=data, mode=mode, owner=owner))

    def link(self, path: str, target: str) -> None:
        """Add a symbolic link."""
        self._add(path, Entry(target=target, mode=0o777))

    def folder(self, path: str, mode: int = 0o755, owner: int = 0) -> None:
        """Add a folder, or set its mode and owner."""
        self._add(path, Entry(mode=mode, owner=owner))

    def add_all(self, other: Tree) -> None:
        """Add every entry of another tree over those of this one."""
        self._entries.update(other._entries)

    def read(self, path: str) -> bytes:
        """A file's content. Raises KeyError for any other path."""
        data = self._entries[path].data
        if data is None:
            raise KeyError(path)
        return data

    def target(self, path: str) -> str | None:
        """The target of a symbolic link; None for any other path."""
        entry = self._entries.get(path)
        return entry.target if entry is not None else None

    def tar(self) -> bytes:
        """The tree as an archive that depends on nothing else: sorted, times 0, owners as numbers, no names."""
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path, entry in self:
                member = tarfile.TarInfo(path)
                member.mode, member.uid, member.gid, member.mtime = entry.mode, entry.owner, entry.owner, 0
                if entry.target is not None:
                    member.type, member.linkname = tarfile.SYMTYPE, entry.target
                    tar.addfile(member)
                elif entry.data is None:
                    member.type = tarfile.DIRTYPE
                    tar.addfile(member)
                else:
                    member.size = len(entry.data)
                    tar.addfile(member, io.BytesIO(entry.data))
        return archive.getvalue()

    def write(self, folder: Path) -> None:
        """Write files, folders and links below a folder, owned by the caller."""
        for path, entry in self:
            place = folder / path
            if entry.target is not None:
                place.symlink_to(entry.target)
            elif entry.data is None:
                place.mkdir(parents=True, exist_ok=True)
            else:
                place.write_bytes(entry.data)
                place.chmod(entry.mode)

    def _add(self, path: str, entry: Entry) -> None:
        """Invariant: each folder above is an entry, and no path leaves the root."""
        parts = path.split("/")
        if not path or ".." in parts or "" in parts:
            raise ValueError(f"{path!r} is not a path inside an image")
        for end in range(1, len(parts)):
            self._entries.setdefault("/".join(parts[:end]), Entry(mode=0o755))
        self._entries[path] = entry
