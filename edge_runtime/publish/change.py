"""One change of a repository: shown before it is signed, then signed and published.

Owns: which roles change with which (a target changes its role, the role the snapshot, the snapshot the timestamp),
versions, expiry, which keys sign, and the order of publication. Verbs edit a `Draft`; `finish` makes it a `Change`,
which can be shown and then committed. Nothing is written before `commit`.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import Metadata, MetaFile, Signed, TargetFile, Targets
from tuf.api.serialization.json import JSONSerializer

from edge_runtime.errors import PublishError
from edge_runtime.publish.catalog import TOP_LEVEL, Catalog
from edge_runtime.updates.release_paths import ISSUED_FIELD

if TYPE_CHECKING:
    from edge_runtime.publish.repository import Repository

MAX_BYTES = {"root": 512_000, "timestamp": 16_384, "snapshot": 2_000_000}
MAX_TARGETS_BYTES = 5_000_000
"""The limits of python-tuf's client (`ngclient/config.py`), and of devices."""


@dataclass(frozen=True, slots=True)
class Signing:
    """One role to be signed. keys: their names. is_online: none of them needs a person."""

    role: str
    version: int
    expires_utc: datetime
    keys: tuple[str, ...]
    is_online: bool


@dataclass(frozen=True, slots=True)
class _Signature:
    role: str
    keyids: tuple[str, ...]
    covers_old_keys: bool = True


class Draft:
    """A copy of the catalog, to be edited. `touch` every role that was edited."""

    def __init__(self, repository: Repository, catalog: Catalog | None = None) -> None:
        """catalog: of a repository in the making; None: the repository's own."""
        self._repository = repository
        self._old = None if catalog is not None else repository.catalog
        self.catalog = catalog or copy.deepcopy(repository.catalog)
        self._touched: set[str] = set()
        self._blobs: list[tuple[Path, str]] = []

    def touch(self, *roles: str) -> None:
        """Mark roles to be signed."""
        self._touched.update(roles)

    def add_data(self, role: str, path: str, data: bytes, custom: dict[str, Any] | None = None) -> None:
        """Add a target of a few bytes to a role, and stage it now."""
        digest = hashlib.sha256(data).hexdigest()
        staged = self._repository.folder.stage(f"{len(self._blobs)}.data", iter((data,)))
        self.add_file(role, path, staged, TargetFile(len(data), {"sha256": digest}, path), custom)

    def add_file(
        self, role: str, path: str, staged: Path, target: TargetFile, custom: dict[str, Any] | None = None
    ) -> None:
        """Add a target to a role; `commit` moves its staged file into place."""
        if custom is not None:
            target.unrecognized_fields["custom"] = custom
        signer = self.catalog.targets if role == "targets" else self.catalog.delegated[role]
        signer.targets[path] = target
        self._blobs.extend((staged, name) for name in target.get_prefixed_paths())
        self.touch(role)

    def finish(self, summary: str) -> Change:
        """Return the change, ready to be signed. summary: one sentence that begins with a verb.

        Raises PublishError: too few keys are within reach.
        """
        signatures = self._signatures(self._touched)
        for each in signatures:
            signed = self.catalog.signed(each.role)
            signed.version = self._next_version(each.role)
            signed.expires = self._repository.now_utc + timedelta(days=self._repository.days.of(each.role))
        return Change(self._repository, self.catalog, summary, signatures, self._blobs)

    def check_keys(self, *roles: str) -> None:
        """Raise PublishError where too few keys are within reach to sign a change of the roles."""
        self._signatures(roles)

    def _signatures(self, touched: Iterable[str]) -> list[_Signature]:
        """The keys that sign the touched roles, and those that follow them."""
        roles = set(touched)
        if any(role not in ("root", "snapshot", "timestamp") for role in roles):
            roles.add("snapshot")
        if "snapshot" in roles:
            roles.add("timestamp")
        return [self._signature(role) for role in _in_order(roles)]

    def _next_version(self, role: str) -> int:
        if self._old is None or role not in self._old.roles:
            return 1
        return self._old.signed(role).version + 1

    def _signature(self, role: str) -> _Signature:
        """Choose the keys that sign a role: enough of its own, and while they change, enough of the old ones too.

        A device with the old root believes only the old keys, a device with the new root only the new ones: signed by
        both, it does not matter which root it sees first. TUF demands it for root; elsewhere an old key may be lost.
        """
        chosen = self._enough(self.catalog, role, ())
        if role not in TOP_LEVEL or self._old is None or _trust(self._old, role) == _trust(self.catalog, role):
            return _Signature(role, chosen)
        try:
            return _Signature(role, self._enough(self._old, role, chosen))
        except PublishError:
            if role == "root":
                raise
            return _Signature(role, chosen, covers_old_keys=False)

    def _enough(self, catalog: Catalog, role: str, chosen: tuple[str, ...]) -> tuple[str, ...]:
        """Return the chosen keys, and as many more as the role's threshold demands."""
        keys, wanted = self._repository.keys, catalog.role(role)
        usable = [keyid for keyid in wanted.keyids if keys.can_sign(keyid)]
        missing = wanted.threshold - len(set(chosen) & set(wanted.keyids))
        more = [keyid for keyid in usable if keyid not in chosen][: max(missing, 0)]
        if len(more) < missing:
            absent = ", ".join(keys.name(keyid) for keyid in wanted.keyids if keyid not in usable)
            raise PublishError(
                f"{role}: {len(usable)} of its keys are within reach, wanted {wanted.threshold}; bring {absent} "
                "(plug in what holds it, or set its environment variable); nothing was signed"
            )
        return (*chosen, *more)


class Change:
    """A change ready to be signed and published. `commit` once, or never."""

    def __init__(
        self,
        repository: Repository,
        catalog: Catalog,
        summary: str,
        signatures: list[_Signature],
        blobs: list[tuple[Path, str]],
    ) -> None:
        self.summary = summary
        self._repository = repository
        self._catalog = catalog
        self._signatures = signatures
        self._blobs = blobs

    @property
    def signings(self) -> tuple[Signing, ...]:
        """Return the roles to be signed, in order."""
        return tuple(self._signing(each) for each in self._signatures)

    @property
    def needs_a_person(self) -> bool:
        """Return whether a key signs that a person keeps."""
        return not all(signing.is_online for signing in self.signings)

    def commit(self) -> None:
        """Sign, then write keys and blobs, and the metadata as one.

        Raises PublishError (a wrong passphrase, a key that cannot be used) before anything is written; StorageFailed:
        nothing has changed, or, once the journal is written, the next `open_repository` finishes the change.
        """
        files = self._sign_all()
        self._repository.keys.save()
        for staged, name in self._blobs:
            self._repository.folder.place(staged, name)
        self._repository.folder.publish(self._ordered(files))
        self._repository.catalog = self._catalog

    def _sign_all(self) -> dict[str, bytes]:
        files: dict[str, bytes] = {}
        for each in self._signatures:
            signed = self._catalog.signed(each.role)
            if each.role == "timestamp":
                signed.unrecognized_fields[ISSUED_FIELD] = f"{self._repository.now_utc:%Y-%m-%dT%H:%M:%SZ}"
            data = self._sign(each, signed)
            files[each.role] = data
            meta = MetaFile(signed.version, len(data), {"sha256": hashlib.sha256(data).hexdigest()})
            if each.role == "snapshot":
                self._catalog.timestamp.snapshot_meta = meta
            elif isinstance(signed, Targets):
                self._catalog.snapshot.meta[f"{each.role}.json"] = meta
        return files

    def _sign(self, signature: _Signature, signed: Signed) -> bytes:
        metadata = Metadata(cast("Any", signed))
        for keyid in signature.keyids:
            metadata.sign(self._repository.keys.signer(self._key(signature.role, keyid)), append=True)
        # A fault, of a signing device for example, must show here and not on devices.
        try:
            self._catalog.delegator(signature.role).verify_delegate(
                signature.role, metadata.signed_bytes, metadata.signatures
            )
        except RepositoryError as error:
            raise PublishError(
                f"{signature.role}: what was signed does not verify: {error}; nothing was published"
            ) from error
        data = metadata.to_bytes(JSONSerializer(compact=True, validate=True))
        limit = MAX_BYTES.get(signature.role, MAX_TARGETS_BYTES)
        if len(data) > limit:
            raise PublishError(
                f"{signature.role}: its metadata has {len(data)} bytes, devices take {limit}; "
                "take old releases out with `repo clean --keep N`"
            )
        return data

    def _key(self, role: str, keyid: str) -> Any:
        """Return a key of the role: of the new catalog, else of the old one."""
        is_new = keyid in self._catalog.role(role).keyids
        return (self._catalog if is_new else self._repository.catalog).key(role, keyid)

    def _ordered(self, files: dict[str, bytes]) -> list[tuple[str, bytes]]:
        """Order files so that a file comes after those that it names, and the root last: all else fits both roots then.

        Where the old keys are gone the root is first, so that no device meets metadata its root does not vouch for.
        """
        names = {
            role: "timestamp.json" if role == "timestamp" else f"{self._catalog.signed(role).version}.{role}.json"
            for role in files
        }
        has_gap = not all(each.covers_old_keys for each in self._signatures)
        is_first = has_gap or self._repository.is_new
        ordered = sorted(files, key=lambda role: (role == "root") != is_first)
        return [(names[role], files[role]) for role in ordered]

    def _signing(self, signature: _Signature) -> Signing:
        keys = self._repository.keys
        signed = self._catalog.signed(signature.role)
        names = tuple(keys.name(keyid) for keyid in signature.keyids)
        is_online = all(keys.is_online(keyid) for keyid in signature.keyids)
        return Signing(signature.role, signed.version, signed.expires, names, is_online)


def _in_order(roles: Iterable[str]) -> list[str]:
    """Sort roles so that each comes before the one that names it."""
    last = ("targets", "snapshot", "timestamp", "root")
    return sorted(roles, key=lambda role: (last.index(role) if role in last else -1, role))


def _trust(catalog: Catalog, role: str) -> tuple[frozenset[str], int]:
    found = catalog.role(role)
    return frozenset(found.keyids), found.threshold
