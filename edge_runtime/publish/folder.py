"""The repository as a folder: its layout, one publisher at a time, and changes that are made whole or not at all.

Owns: the layout, the lock, and the journal. A server shows `metadata/` and `targets/`; `keys/`, `journal.json` and
`staging/` lie beside them. A change is first written to the journal, one durable file; then file by file, in an order
in which every reader finds one whole state; then the journal is removed. The next publisher finishes an interrupted
change.

Called by `repository` and `change`. Never decides what is published.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from edge_runtime.durable import (
    SYSTEM_DISK,
    Disk,
    growing,
    make_folder,
    remove_parts,
    sync_folder,
    write_atomically,
)
from edge_runtime.errors import PublishError

LOCK_WAIT_S = 60.0
"""A publish of a large model holds the lock for minutes; a refresh by cron that finds it held tries again next time."""

_LOCK_POLL_S = 0.05


class _Journal(Struct, frozen=True, forbid_unknown_fields=True):
    files: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class RepositoryFolder:
    """One repository's folder. Methods that write raise StorageFailed; only the lock's owner may call them."""

    path: Path
    disk: Disk = SYSTEM_DISK

    @property
    def metadata(self) -> Path:
        """Return the folder of signed metadata, which a server shows."""
        return self.path / "metadata"

    @property
    def targets(self) -> Path:
        """Return the folder of targets under their hash-prefixed names, which a server shows."""
        return self.path / "targets"

    @property
    def keys(self) -> Path:
        """Return the folder of private keys and the ring."""
        return self.path / "keys"

    @property
    def staging(self) -> Path:
        """Return the folder of copies that are not published yet, on the disk of the others."""
        return self.path / "staging"

    @property
    def settings(self) -> Path:
        """Return the file that says how long signatures stay good."""
        return self.path / "repository.toml"

    @property
    def is_repository(self) -> bool:
        """Return whether a repository is here, or a change that makes one was interrupted."""
        return (self.metadata / "1.root.json").exists() or self._journal.exists()

    @property
    def _journal(self) -> Path:
        return self.path / "journal.json"

    @contextmanager
    def locked(self, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
        """Lock the folder for one publisher, and finish an interrupted change. Raises PublishError: it is locked."""
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            end_s = time.monotonic() + wait_s
            while not _try_lock(fd):
                if time.monotonic() >= end_s:
                    raise PublishError(
                        f"{self.path}: another publisher is at work for over {wait_s:g} s; wait for it, or end it"
                    )
                time.sleep(_LOCK_POLL_S)
            self._finish_journal()
            shutil.rmtree(self.staging, ignore_errors=True)
            yield
        finally:
            os.close(fd)

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a metadata file; None: there is no such file."""
        try:
            return (self.metadata / name).read_bytes()
        except FileNotFoundError:
            return None

    def publish(self, files: Sequence[tuple[str, bytes]]) -> None:
        """Write metadata files: all of them, or the first few until the next publisher opens the folder.

        files: names in `metadata/` with their bytes, in the order in which readers may see them.
        """
        journal = _Journal(tuple((name, data.decode()) for name, data in files))
        write_atomically(self._journal, msgspec.json.encode(journal), disk=self.disk)
        self._finish_journal()

    def stage(self, name: str, pieces: Iterator[bytes]) -> Path:
        """Write a file that is not published yet, and return its path."""
        path = self.staging / name
        with growing(path.with_name(f"{path.name}.part"), keep=False, disk=self.disk) as part:
            for piece in pieces:
                part.write(piece)
            part.commit(path)
        return path

    def place(self, staged: Path, path: str) -> None:
        """Move a staged file to its place below `targets/`, unless it is there: its name holds its hash."""
        place = self.targets / path
        if place.exists():
            return
        make_folder(place.parent, disk=self.disk)
        try:
            self.disk.rename(staged, place)
            sync_folder(place.parent, disk=self.disk)
        except OSError as error:
            raise PublishError(f"{place}: {error.strerror}; nothing was published; look at the disk") from error

    def _finish_journal(self) -> None:
        try:
            data = self._journal.read_bytes()
        except FileNotFoundError:
            return
        try:
            journal = msgspec.json.decode(data, type=_Journal)
        except msgspec.DecodeError as error:
            raise PublishError(f"{self._journal}: is not a journal: {error}; restore the folder from a copy") from error
        remove_parts(self.metadata)
        for name, text in journal.files:
            write_atomically(self.metadata / name, text.encode(), disk=self.disk)
        self._journal.unlink()
        sync_folder(self.path, disk=self.disk)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
