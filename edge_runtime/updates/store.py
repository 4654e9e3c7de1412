"""Verified files on disk: metadata by role, artifacts by hash. Each survives a power cut, whole or not at all.

Owns: the two folders and their names. No text from another host becomes a path: roles are URL-quoted, artifacts are
named by a checked hash. Never verifies metadata: it keeps what `trust` accepted. Only one process uses a folder at a
time, which `lock` ensures.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

from edge_runtime.durable import (
    PART_SUFFIX,
    SYSTEM_DISK,
    Disk,
    growing,
    make_folder,
    read_kept,
    remove_parts,
    write_atomically,
)
from edge_runtime.errors import StorageFailed, TrustError, UpdateError
from edge_runtime.updates.download import ARTIFACT_MODE, ByteProgress, ExpectedFile, HashCheck, download, is_whole
from edge_runtime.updates.fetch import PIECE_BYTES, Fetcher, Pace

ANCHOR_BYTES = 64
"""A SHA-256 in hexadecimal digits."""

LONGEST_NAME = 200
"""Of a file made from a target path; file systems end at 255 bytes, and a part's ending must fit as well."""


class MetadataStore:
    """A folder that holds `<role>.json` for each trusted role, the bytes as they were signed.

    Thread: one owner. Each `save` is durable when it returns.
    """

    def __init__(self, folder: Path, *, disk: Disk = SYSTEM_DISK) -> None:
        self._folder = folder
        self._disk = disk

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder for this process, and remove the parts that a killed one left.

        Raises UpdateError: another process has it. StorageFailed: it cannot be written to.
        """
        make_folder(self._folder, disk=self._disk)
        try:
            fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageFailed(f"{self._folder}: cannot be locked: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if isinstance(error, BlockingIOError):
                raise UpdateError(f"{self._folder}: another process updates from it; wait for its end") from None
            raise StorageFailed(f"{self._folder}: cannot be locked: {error.strerror}") from error
        try:
            remove_parts(self._folder)
            yield
        finally:
            os.close(fd)

    def load(self, role: str, max_bytes: int) -> bytes | None:
        """Return the kept bytes of a role; None: none, unreadable, or more than `max_bytes`."""
        try:
            data = read_kept(self._path(role), max_bytes)
        except (OSError, ValueError):
            return None
        return data if len(data) <= max_bytes else None

    def save(self, role: str, data: bytes) -> None:
        """Keep the accepted bytes of a role. Raises StorageFailed; those kept before are untouched."""
        write_atomically(self._path(role), data, disk=self._disk)

    def load_anchor(self) -> str | None:
        """Return the SHA-256 of the root file from which the kept root was reached; None: unknown."""
        try:
            return read_kept(self._folder / "anchor", ANCHOR_BYTES).decode("ascii")
        except (OSError, ValueError):
            return None

    def save_anchor(self, digest: str) -> None:
        """Keep the SHA-256 of the root file from which the kept root was reached. Raises StorageFailed."""
        write_atomically(self._folder / "anchor", digest.encode("ascii"), disk=self._disk)

    def _path(self, role: str) -> Path:
        # No role can leave the folder ("/" is quoted, and ".json" follows), nor meet `anchor` and `lock`.
        return self._folder / f"{quote(role, safe='')}.json"


class ArtifactStore:
    """A folder of verified files, each named by its hash, read-only; their parts lie in `parts/`.

    Thread: one owner.
    """

    def __init__(
        self,
        folder: Path,
        *,
        reserve_bytes: int = 0,
        disk: Disk = SYSTEM_DISK,
    ) -> None:
        """reserve_bytes: what must stay free on the disk after a download."""
        self._folder = folder
        self._parts = folder / "parts"
        self._reserve_bytes = reserve_bytes
        self._disk = disk

    def path(self, expected: ExpectedFile) -> Path:
        """Return the path of the file, whether it is there or not."""
        return self._folder / expected.digest

    def fetch(
        self,
        fetcher: Fetcher,
        path: str,
        expected: ExpectedFile,
        *,
        pace: Pace,
        progress: ByteProgress | None = None,
        keeps_reserve: bool = True,
    ) -> Path:
        """Return the expected file; fetch it from the fetcher's `path` unless it is here. Resumes an earlier part.

        keeps_reserve: whether the disk must keep its reserve free beside it; False for the small files of a check. When
        it returns, the file is durable. Raises DownloadError, TrustError, StorageFailed (also: the disk has too little
        free); the store has no file of that name then.
        """
        final = self.path(expected)
        if is_whole(final, expected):
            return final
        make_folder(self._parts, disk=self._disk)
        part = self._parts / f"{expected.digest}{PART_SUFFIX}"
        try:
            self._check_reserve(expected, part, self._reserve_bytes if keeps_reserve else 0)
            # Invariant: no reader finds a wrong file under this name meanwhile.
            final.unlink(missing_ok=True)
        except OSError as error:
            raise StorageFailed(f"{self._folder}: cannot be prepared: {error.strerror}; look at the disk") from error
        download(fetcher, path, expected, part, final, pace=pace, progress=progress, disk=self._disk)
        return final

    def adopt(self, expected: ExpectedFile, pieces: Iterable[bytes]) -> Path:
        """Store a file that was made here, with the promises of `fetch`.

        Stops at the piece that makes it too long. Raises TrustError (it is not the wanted file) and StorageFailed; none
        of its bytes stay then.
        """
        final = self.path(expected)
        # Not the part of a download: a bad patch result must never be resumed.
        part = self._parts / f"{expected.digest}.made{PART_SUFFIX}"
        make_folder(self._parts, disk=self._disk)
        self._check_reserve(expected, part, self._reserve_bytes)
        check = HashCheck(expected)
        try:
            with growing(part, keep=False, disk=self._disk) as file:
                for piece in pieces:
                    check.update(piece)
                    if check.length > expected.length:
                        break
                    file.write(piece)
                mismatch = check.mismatch()
                if mismatch is not None:
                    raise TrustError(f"{final}: the file made here is another file: {mismatch}")
                file.commit(final, mode=ARTIFACT_MODE)
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)
        return final

    def remove(self, digests: Iterable[str]) -> None:
        """Remove files that have another place now; ignores absent ones. Raises StorageFailed.

        A power cut may bring a name back; nothing depends on its absence.
        """
        try:
            for digest in digests:
                (self._folder / digest).unlink(missing_ok=True)
        except OSError as error:
            raise StorageFailed(f"{self._folder}: cannot be tidied: {error.strerror}; look at the disk") from error

    def keep_only(self, digests: Collection[str]) -> None:
        """Remove every file and part but these. Raises StorageFailed."""
        try:
            for file in [*self._folder.glob("*"), *self._parts.glob("*")]:
                if file.is_file() and file.name.removesuffix(PART_SUFFIX) not in digests:
                    file.unlink(missing_ok=True)
        except OSError as error:
            raise StorageFailed(f"{self._folder}: cannot be tidied: {error.strerror}; look at the disk") from error

    def _check_reserve(self, expected: ExpectedFile, part: Path, reserve_bytes: int) -> None:
        have_bytes = part.stat().st_size if part.is_file() else 0
        free_bytes = self._disk.free_bytes(self._folder)
        needed_bytes = max(0, expected.length - have_bytes) + reserve_bytes
        if free_bytes < needed_bytes:
            raise StorageFailed(
                f"{self._folder}: {free_bytes} bytes are free, wanted {needed_bytes}, {reserve_bytes} of them to "
                "stay free; free some space, or name another folder"
            )


def target_file(folder: Path, path: str) -> Path:
    """Return the file of a target in a person's folder: its path, URL-quoted; too long a name is cut.

    Two targets never share a file, no target leaves the folder, and none is hidden in it.
    """
    name = quote(path, safe="")
    if name.startswith("."):
        name = f"%2E{name[1:]}"
    if len(name) > LONGEST_NAME:
        name = f"{name[: LONGEST_NAME - 65]}-{sha256(path.encode()).hexdigest()}"
    return folder / name


def place(source: Path, file: Path, *, disk: Disk = SYSTEM_DISK) -> None:
    """Make `file` a copy of a stored artifact, durably, whole or not at all. Raises StorageFailed."""
    # A leading dot: no target's own file is ever called so.
    part = file.with_name(f".{file.name}{PART_SUFFIX}")
    try:
        with growing(part, keep=False, disk=disk) as copy, source.open("rb", buffering=0) as original:
            while piece := original.read(PIECE_BYTES):
                copy.write(piece)
            copy.commit(file, mode=ARTIFACT_MODE)
    except OSError as error:
        raise StorageFailed(f"{source}: cannot be read: {error.strerror}; look at the disk") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
