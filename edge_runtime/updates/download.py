"""Download of one artifact to the disk: resumed where it stopped, hashed as it comes, named only when it is right.

Owns: the part of a file on disk, and its fate. Folders are the store's; whether a hash is trusted is `trust`'s. Called
by the store.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from edge_runtime.durable import SYSTEM_DISK, Disk, PartFile, growing
from edge_runtime.errors import DownloadError, TrustError
from edge_runtime.updates.fetch import PIECE_BYTES, FetchedBody, Fetcher, Pace

if TYPE_CHECKING:
    from typing_extensions import Self

ARTIFACT_MODE = 0o444
"""A verified file is never written again."""

# TUF leaves the choice open; these have one fixed length each. "blake2b-256" is python-tuf's own name.
_DIGEST_BYTES = {"sha256": 32, "sha384": 48, "sha512": 64, "sha3_256": 32, "sha3_512": 64, "blake2b": 64,
                 "blake2s": 32, "blake2b-256": 32, "sha224": 28}  # fmt: skip
_HEX = re.compile(r"[0-9a-f]+")


class ByteProgress(Protocol):
    """Follows a download."""

    def show_bytes(self, done_bytes: int, total_bytes: int) -> None:
        """Take the bytes fetched so far and in total. An error raised here ends the download, and the part stays."""
        ...


@dataclass(frozen=True, slots=True)
class ExpectedFile:
    """The length in bytes and the hashes by algorithm that signed metadata gives a file; all of them must match.

    Made by `of`, so that every hash is plain lower-case hex of its algorithm's length: it is used as a file name.
    """

    length: int
    hashes: Mapping[str, str]

    @classmethod
    def of(cls, length: int, hashes: Mapping[str, str]) -> Self:
        """Check the values of metadata. Raises TrustError: an unknown algorithm, or no hash of that algorithm."""
        if not hashes or length < 0:
            raise TrustError(f"got the length {length} and the hashes {dict(hashes)}; wanted a length and a hash")
        for algorithm, value in hashes.items():
            length_hex = 2 * _DIGEST_BYTES.get(algorithm, 0)
            if not length_hex:
                raise TrustError(f"got the hash algorithm {algorithm!r}; known are {', '.join(_DIGEST_BYTES)}")
            if len(value) != length_hex or not _HEX.fullmatch(value):
                raise TrustError(f"got the {algorithm} {value[:200]!r}; wanted {length_hex} lower-case hex digits")
        return cls(length, dict(hashes))

    @property
    def digest(self) -> str:
        """Return the hash that names the stored file: its SHA-256, where the publisher gave one (ours always does)."""
        return self.hashes.get("sha256") or next(iter(self.hashes.values()))


class HashCheck:
    """Hashes bytes as they come and compares them with the expected file. Thread: one owner."""

    def __init__(self, expected: ExpectedFile) -> None:
        self._expected = expected
        self._hashes: dict[str, _Hash] = {
            algorithm: hashlib.blake2b(digest_size=32) if algorithm == "blake2b-256" else hashlib.new(algorithm)
            for algorithm in expected.hashes
        }
        self.length = 0
        """The number of bytes so far."""

    def update(self, piece: bytes) -> None:
        """Add the next bytes."""
        self.length += len(piece)
        for running in self._hashes.values():
            running.update(piece)

    def mismatch(self) -> str | None:
        """Return the first difference from the expected file, in words; None: it is that file."""
        if self.length != self._expected.length:
            return f"got {self.length} bytes, wanted {self._expected.length}"
        for algorithm, running in self._hashes.items():
            if running.hexdigest() != self._expected.hashes[algorithm]:
                return f"got the {algorithm} {running.hexdigest()}, wanted {self._expected.hashes[algorithm]}"
        return None


def is_whole(path: Path, expected: ExpectedFile) -> bool:
    """Return whether a path is a regular file with the expected bytes; False where it is unreadable."""
    try:
        return path.stat(follow_symlinks=False).st_size == expected.length and _read(path, expected).mismatch() is None
    except OSError:
        return False


def download(
    fetcher: Fetcher,
    path: str,
    expected: ExpectedFile,
    part: Path,
    final: Path,
    *,
    pace: Pace,
    progress: ByteProgress | None = None,
    disk: Disk = SYSTEM_DISK,
) -> None:
    """Make `final` the wanted file, durably, through `part` on the same disk, which may hold bytes of an earlier try.

    Memory: one piece. Raises DownloadError (the part stays, and the next try resumes it), TrustError (the bytes are not
    the signed ones; the part is removed), StorageFailed. In each case `final` is as it was.
    """
    kept = _read_part(part, expected)
    is_resumed = kept.length > 0
    transfer = _Transfer(fetcher, path, expected, part, pace, progress, disk)
    mismatch = transfer.run(kept, final)
    if mismatch is not None and is_resumed:
        # The kept bytes are not part of the wanted file (a power cut, another mirror): fetch all of it.
        mismatch = transfer.run(HashCheck(expected), final)
    if mismatch is not None:
        raise TrustError(f"{path}: {mismatch}; the repository, or the way to it, changed the file")


# ---- private --------------------------------------------------------------------------------------------------------


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class _Transfer:
    fetcher: Fetcher
    path: str
    expected: ExpectedFile
    part: Path
    pace: Pace
    progress: ByteProgress | None
    disk: Disk

    def run(self, check: HashCheck, final: Path) -> str | None:
        """Fetch the bytes that `check` has not seen, and commit. Returns the difference, its part removed; or None."""
        if 0 < check.length == self.expected.length:
            return self._commit_or_remove(check, final)
        with self.fetcher.open(self.path, start_bytes=check.length, deadline_s=self.pace.deadline_s) as body:
            if body.start_bytes != check.length:
                check = HashCheck(self.expected)
            with growing(self.part, keep=check.length > 0, disk=self.disk) as file:
                self._receive(body, file, check)
        return self._commit_or_remove(check, final)

    def _receive(self, body: FetchedBody, file: PartFile, check: HashCheck) -> None:
        """Receive bytes until the file ends, or is one byte too long."""
        end = self.expected.length + 1
        while check.length < end and (piece := body.read(min(self.pace.piece_bytes, end - check.length))):
            check.update(piece)
            file.write(piece)
            if self.progress is not None:
                self.progress.show_bytes(check.length, self.expected.length)
            self.pace.count(len(piece))
        if check.length < self.expected.length:
            raise DownloadError(
                f"{self.path}: ended after {check.length} of {self.expected.length} bytes; "
                "these bytes are kept, and the next try resumes there"
            )

    def _commit_or_remove(self, check: HashCheck, final: Path) -> str | None:
        mismatch = check.mismatch()
        if mismatch is None:
            with growing(self.part, keep=True, disk=self.disk) as file:
                file.commit(final, mode=ARTIFACT_MODE)
        else:
            # A part that cannot be removed is found to be wrong again.
            with suppress(OSError):
                self.part.unlink(missing_ok=True)
        return mismatch


def _read_part(part: Path, expected: ExpectedFile) -> HashCheck:
    """Hash the bytes of an earlier try; none where the part is unreadable or too long."""
    try:
        if part.stat(follow_symlinks=False).st_size <= expected.length:
            return _read(part, expected)
    except OSError:
        pass
    return HashCheck(expected)


def _read(path: Path, expected: ExpectedFile) -> HashCheck:
    check = HashCheck(expected)
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb", buffering=0) as file:
        while check.length <= expected.length and (piece := file.read(PIECE_BYTES)):
            check.update(piece)
    return check
