"""One artifact from a place to the disk: gone on with where it stopped, hashed as it comes, named only when right.

Owns: the part of a file on disk and what becomes of it. Where files lie is the store's; whether a hash is to be
believed is `trust`'s. Called by the store.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from edge_runtime.errors import DownloadError, TrustError
from edge_runtime.repository.durable import SYSTEM_DISK, Disk, PartFile, growing
from edge_runtime.update.fetch import PIECE_BYTES, Body, Fetcher, Pace

if TYPE_CHECKING:
    from typing_extensions import Self

Progress = Callable[[int, int], object]
"""Told how many bytes are here and how many there will be; what it raises ends the download, the part stays."""

ARTIFACT_MODE = 0o444
"""What was verified is never written again."""

# TUF leaves the choice open; these have one fixed length each. "blake2b-256" is python-tuf's own name.
_DIGEST_BYTES = {"sha256": 32, "sha384": 48, "sha512": 64, "sha3_256": 32, "sha3_512": 64, "blake2b": 64,
                 "blake2s": 32, "blake2b-256": 32, "sha224": 28}  # fmt: skip
_HEX = re.compile(r"[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What signed metadata says of a file: its length in bytes, and its hashes by algorithm, all of which must match.

    Made by `of`, so that every hash is plain lower-case hex of its algorithm's length: it is used as a file name.
    """

    length: int
    hashes: Mapping[str, str]

    @classmethod
    def of(cls, length: int, hashes: Mapping[str, str]) -> Self:
        """Check what metadata says. Raises TrustError: an unknown algorithm, or a value that is none of its hashes."""
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
        """The hash that the file is kept under: its SHA-256, where the publisher gave one (ours always does)."""
        return self.hashes.get("sha256") or next(iter(self.hashes.values()))


class Check:
    """Hashes bytes as they come and compares them with what is wanted. Thread: one owner."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._hashes = {algorithm: _new_hash(algorithm) for algorithm in wanted.hashes}
        self.length = 0
        """How many bytes came."""

    def update(self, piece: bytes) -> None:
        """The next bytes."""
        self.length += len(piece)
        for running in self._hashes.values():
            running.update(piece)

    def mismatch(self) -> str | None:
        """What is not as wanted, in words; None: it is the very file."""
        if self.length != self._wanted.length:
            return f"got {self.length} bytes, wanted {self._wanted.length}"
        for algorithm, running in self._hashes.items():
            if running.hexdigest() != self._wanted.hashes[algorithm]:
                return f"got the {algorithm} {running.hexdigest()}, wanted {self._wanted.hashes[algorithm]}"
        return None


def is_whole(path: Path, wanted: Wanted) -> bool:
    """Whether a regular file is there and is the very one, by its bytes. Never raises OSError: unreadable is no."""
    try:
        return path.stat(follow_symlinks=False).st_size == wanted.length and _read(path, wanted).mismatch() is None
    except OSError:
        return False


def download(
    fetcher: Fetcher,
    path: str,
    wanted: Wanted,
    part: Path,
    final: Path,
    *,
    pace: Pace,
    progress: Progress | None = None,
    disk: Disk = SYSTEM_DISK,
) -> None:
    """Make `final` the wanted file, durably, by way of `part` on the same disk, where an earlier try may have got to.

    Memory: one piece. Raises DownloadError (the part stays: the next try goes on), TrustError (the bytes are others
    than were signed; the part is gone), StorageFailed. In each case `final` is as it was.
    """
    kept = _read_part(part, wanted)
    goes_on = kept.length > 0
    transfer = _Transfer(fetcher, path, wanted, part, pace, progress, disk)
    mismatch = transfer.run(kept, final)
    if mismatch is not None and goes_on:
        # What was kept was no part of the wanted file (a power cut, another mirror): all of it anew.
        mismatch = transfer.run(Check(wanted), final)
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
    wanted: Wanted
    part: Path
    pace: Pace
    progress: Progress | None
    disk: Disk

    def run(self, check: Check, final: Path) -> str | None:
        """Fetch what `check` has not seen, and commit; or say what is wrong, the part being gone then."""
        if 0 < check.length == self.wanted.length:
            return self._settle(check, final)
        with self.fetcher.open(self.path, start_bytes=check.length, deadline_s=self.pace.deadline_s) as body:
            if body.start_bytes != check.length:
                check = Check(self.wanted)
            with growing(self.part, keep=check.length > 0, disk=self.disk) as file:
                self._receive(body, file, check)
        return self._settle(check, final)

    def _receive(self, body: Body, file: PartFile, check: Check) -> None:
        """Until the file is over, or one byte too long."""
        end = self.wanted.length + 1
        while check.length < end and (piece := body.read(min(self.pace.piece_bytes, end - check.length))):
            check.update(piece)
            file.write(piece)
            if self.progress is not None:
                self.progress(check.length, self.wanted.length)
            self.pace.count(len(piece))
        if check.length < self.wanted.length:
            raise DownloadError(
                f"{self.path}: ended after {check.length} of {self.wanted.length} bytes; "
                "what came is kept, and the next try goes on from there"
            )

    def _settle(self, check: Check, final: Path) -> str | None:
        mismatch = check.mismatch()
        if mismatch is None:
            with growing(self.part, keep=True, disk=self.disk) as file:
                file.commit(final, mode=ARTIFACT_MODE)
        else:
            # A part that cannot be removed is found to be wrong again.
            with suppress(OSError):
                self.part.unlink(missing_ok=True)
        return mismatch


def _read_part(part: Path, wanted: Wanted) -> Check:
    """What is there of an earlier try; nothing where it is unreadable or too long."""
    try:
        if part.stat(follow_symlinks=False).st_size <= wanted.length:
            return _read(part, wanted)
    except OSError:
        pass
    return Check(wanted)


def _read(path: Path, wanted: Wanted) -> Check:
    check = Check(wanted)
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb", buffering=0) as file:
        while check.length <= wanted.length and (piece := file.read(PIECE_BYTES)):
            check.update(piece)
    return check


def _new_hash(algorithm: str) -> _Hash:
    return hashlib.blake2b(digest_size=32) if algorithm == "blake2b-256" else hashlib.new(algorithm)
