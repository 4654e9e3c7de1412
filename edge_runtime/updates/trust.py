"""The rules that make metadata trusted: TUF 1.0.34, section 5, without I/O.

Owns: the order root -> timestamp -> snapshot -> targets -> delegated targets, and for each the signatures, versions,
hashes and expiry. Each `accept_*` either takes the bytes, which may then be kept, or raises TrustError and changes
nothing. Metadata kept earlier comes back by `recall_*`: it guards against rollback, and is used again while it is
current. The journal's marks guard against rollback where those files were lost. tuf's metadata API checks signatures.
Called by the client and the updater.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import TypeVar

from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import Metadata, MetaFile, Root, Signed, Snapshot, Targets, Timestamp

from edge_runtime.errors import MetadataExpired, TrustError
from edge_runtime.models.names import MAX_VERSION

Role = TypeVar("Role", Root, Timestamp, Snapshot, Targets)


def update_start(floor_utc: datetime | None = None) -> datetime:
    """Return the instant that expiry is judged by during one check: now, or the floor where the clock is behind it.

    By a clock that fell back to 1970 nothing would expire. floor_utc: an instant that has surely passed; None: trust
    the clock.
    """
    now_utc = datetime.now(timezone.utc)
    return now_utc if floor_utc is None else max(now_utc, floor_utc)


class TrustedSet:
    """The top-level metadata that one check trusts so far. Thread: one owner."""

    def __init__(self, root: bytes, now_utc: datetime) -> None:
        """Start from a root that is trusted already; it may be expired, but must be signed by its own keys.

        Raises TrustError: its own keys did not sign it.
        """
        self._now_utc = now_utc
        self._root, signed = _parse(Root, "root", root)
        _verify("root", self._root, signed)
        self._timestamp: Timestamp | None = None
        self._timestamp_data = b""
        self._snapshot: Snapshot | None = None

    @property
    def root(self) -> Root:
        """Return the newest root accepted."""
        return self._root

    @property
    def timestamp(self) -> Timestamp:
        """Return the timestamp accepted last. Only after `accept_timestamp`."""
        assert self._timestamp is not None
        return self._timestamp

    @property
    def snapshot(self) -> Snapshot:
        """Return the snapshot accepted last. Only after `accept_snapshot` or `recall_snapshot`."""
        assert self._snapshot is not None
        return self._snapshot

    def accept_root(self, data: bytes) -> None:
        """Accept the next root (5.3): its version is one more, a threshold of the old keys and of its own signed it.

        It may be expired: only the last one must not be (`check_last_root`).
        """
        new, signed = _parse(Root, "root", data)
        self._verify_top("root", signed)
        _verify("root", new, signed)
        if new.version != self._root.version + 1:
            raise TrustError(f"root: got version {new.version}, wanted {self._root.version + 1}; none is left out")
        self._root = new

    def check_last_root(self, now_utc: datetime) -> None:
        """Raise MetadataExpired where the newest root has expired (5.3.10).

        now_utc: the instant that expiry is judged by from here on; it may depend on the root.
        """
        self._now_utc = now_utc
        self._check_expiry("root", self._root)

    def recall_timestamp(self, data: bytes) -> None:
        """Remember a timestamp kept earlier, expired or not.

        Raises TrustError: the keys of the root, which may have changed since, did not sign it. Then it is forgotten,
        which is how a repository recovers from versions that a thief raised (5.3.11).
        """
        self._timestamp = self._parse_top(Timestamp, "timestamp", data)
        self._timestamp_data = data

    def accept_timestamp(self, data: bytes) -> bool:
        """Accept the repository's timestamp (5.4). False: its version is the one that is here, which stays.

        Raises TrustError: it, or the snapshot that it names, is older than one seen before. MetadataExpired.
        """
        old = self._timestamp
        if old is not None and data == self._timestamp_data:
            # The usual answer. It was verified a moment ago, and pure Python takes 5 ms for a signature.
            self._check_expiry("timestamp", old)
            return False
        new = self._parse_top(Timestamp, "timestamp", data)
        if old is not None:
            _check_not_older("timestamp", new.version, old.version)
            if new.version == old.version:
                self._check_expiry("timestamp", old)
                return False
            _check_not_older("snapshot", new.snapshot_meta.version, old.snapshot_meta.version)
        self._check_expiry("timestamp", new)
        self._timestamp, self._timestamp_data = new, data
        return True

    def recall_snapshot(self, data: bytes) -> bool:
        """Remember a snapshot kept earlier. True: it is the one that the timestamp names, and not expired.

        Its hash is not compared: it was when it was accepted. Raises TrustError as `recall_timestamp`.
        """
        self._snapshot = self._parse_top(Snapshot, "snapshot", data)
        return self._snapshot.version == self.timestamp.snapshot_meta.version and not self._is_expired(self._snapshot)

    def accept_snapshot(self, data: bytes) -> None:
        """Accept the snapshot that the timestamp names (5.5).

        Raises TrustError: it is another one, or a role in it is missing or older than it was. MetadataExpired.
        """
        wanted = self.timestamp.snapshot_meta
        _check_hashes("snapshot", wanted, data)
        new = self._parse_top(Snapshot, "snapshot", data)
        if self._snapshot is not None:
            for name, old in self._snapshot.meta.items():
                if name not in new.meta:
                    raise TrustError(f"snapshot: {name} was there and is missing; roles may only be added")
                _check_not_older(name, new.meta[name].version, old.version)
        _check_version("snapshot", new.version, wanted.version)
        self._check_expiry("snapshot", new)
        self._snapshot = new

    def accept_targets(self, data: bytes, role: str, delegator: Root | Targets) -> Targets:
        """Accept the metadata of `targets` or of a delegated role (5.6), with the keys that `delegator` gives it.

        Nothing is remembered: one delegator's keys say nothing about another's. Raises TrustError: the snapshot names
        another one, or none, or the delegator's keys did not sign it. MetadataExpired.
        """
        wanted = self.meta(role)
        _check_hashes(role, wanted, data)
        new, signed = _parse(Targets, role, data)
        _verify(role, delegator, signed)
        _check_version(role, new.version, wanted.version)
        self._check_expiry(role, new)
        return new

    def meta(self, role: str) -> MetaFile:
        """Return the snapshot's entry of a role. Raises TrustError: it has none."""
        meta = self.snapshot.meta.get(f"{role}.json")
        if meta is None:
            raise TrustError(f"{role}: it was delegated to, but the snapshot does not name it")
        return meta

    def _parse_top(self, kind: type[Role], role: str, data: bytes) -> Role:
        new, signed = _parse(kind, role, data)
        self._verify_top(role, signed)
        return new

    def _verify_top(self, role: str, metadata: Metadata[Role]) -> None:
        """As `_verify` by the root; where no key that it names for the role signed, say what that means."""
        known = self._root.roles[role].keyids
        if not any(key in known for key in metadata.signatures):
            raise TrustError(
                f"{role}: was signed by no key that this device trusts: update.root_file is another repository's root, "
                "or somebody signed these files with other keys; compare it with the repository's 1.root.json"
            )
        _verify(role, self._root, metadata)

    def _check_expiry(self, role: str, signed: Signed) -> None:
        if self._is_expired(signed):
            raise MetadataExpired(
                f"{role}: version {signed.version} expired at {signed.expires:%Y-%m-%d %H:%M:%S} UTC, and it is "
                f"{self._now_utc:%Y-%m-%d %H:%M:%S}; look at this device's clock, and at the repository"
            )

    def _is_expired(self, signed: Signed) -> bool:
        return signed.is_expired(self._now_utc)


def marks_of(root: Root, timestamp: Timestamp, snapshot: Snapshot) -> dict[str, int]:
    """Return the version of each role, by its name and a digest of its keys; targets roles as the snapshot names them.

    A mark belongs to a role and the keys that sign it: when root gives the role other keys, it starts again, which is
    how a repository recovers from a stolen key that raised versions without bound (5.3.11).
    """
    found = {
        "root": root.version,
        _name(root, "timestamp"): timestamp.version,
        _name(root, "snapshot"): snapshot.version,
    }
    signer = signer_of(root, "snapshot")
    for file, meta in snapshot.meta.items():
        found[f"{file.removesuffix('.json')} {signer}"] = meta.version
    return found


def check_marks(marks: Mapping[str, int], known: Mapping[str, int]) -> None:
    """Raise TrustError where a role is behind its mark, or beyond the highest version that a mark can hold."""
    for name, version in marks.items():
        seen = known.get(name, 0)
        if version > MAX_VERSION:
            raise TrustError(
                f"{name.partition(' ')[0]}: got version {version}, wanted at most {MAX_VERSION}; a thief has its key: "
                "give the role another one"
            )
        if version < seen:
            raise TrustError(
                f"{name.partition(' ')[0]}: got version {version}, but version {seen} was seen here; somebody "
                "replays old files, or the repository was restored from an old copy (sign anew, with higher versions)"
            )


def signer_of(root: Root, role: str) -> str:
    """Return a digest of the keys that root gives a role: another one when they change."""
    keys = "\n".join(sorted(root.roles[role].keyids))
    return hashlib.sha256(keys.encode()).hexdigest()[:16]


# ---- private --------------------------------------------------------------------------------------------------------


def _parse(kind: type[Role], role: str, data: bytes) -> tuple[Role, Metadata[Role]]:
    """Parse metadata of one type, not yet trusted. Raises TrustError."""
    with _refusing(role):
        metadata = Metadata[Role].from_bytes(data)
    if not isinstance(metadata.signed, kind):
        raise TrustError(f"{role}: got metadata of type {metadata.signed.type!r}, wanted {kind.type!r}")
    return metadata.signed, metadata


def _verify(role: str, delegator: Root | Targets, metadata: Metadata[Role]) -> None:
    """Raise TrustError unless a threshold of the keys that the delegator gives the role has signed."""
    with _refusing(role):
        delegator.verify_delegate(role, metadata.signed_bytes, metadata.signatures)


def _check_hashes(role: str, wanted: MetaFile, data: bytes) -> None:
    with _refusing(role):
        wanted.verify_length_and_hashes(data)


def _check_version(role: str, got: int, wanted: int) -> None:
    if got != wanted:
        raise TrustError(f"{role}: got version {got}, wanted {wanted}, which is signed for")


def _check_not_older(role: str, got: int, seen: int) -> None:
    if got < seen:
        raise TrustError(f"{role}: got version {got}, but version {seen} was seen already; somebody replays old files")


@contextmanager
def _refusing(role: str) -> Iterator[None]:
    try:
        yield
    except (RepositoryError, ValueError, KeyError, TypeError) as error:
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        raise TrustError(f"{role}: {error}{cause}") from error


def _name(root: Root, role: str) -> str:
    return f"{role} {signer_of(root, role)}"
