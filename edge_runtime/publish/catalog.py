"""All metadata of a repository, read and verified, as one value.

Owns: reading it from the folder by the rules of devices, expiry aside, which a publisher's work ends; and the questions
about it. Never writes. It refuses a repository that was changed from outside, so that its publisher does not sign a
stranger's bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import Key, Metadata, MetaFile, Role, Root, Signed, Snapshot, TargetFile, Targets, Timestamp

from edge_runtime.errors import PublishError, UpdateError
from edge_runtime.publish.folder import RepositoryFolder
from edge_runtime.updates.release_paths import MANIFEST_FILE, ReleasePath, parse_release_file

TOP_LEVEL = ("root", "targets", "snapshot", "timestamp")

AnyRole = TypeVar("AnyRole", Root, Timestamp, Snapshot, Targets)


@dataclass(slots=True)
class Catalog:
    """The five kinds of metadata. delegated: of teams and groups, by role name."""

    root: Root
    targets: Targets
    snapshot: Snapshot
    timestamp: Timestamp
    delegated: dict[str, Targets] = field(default_factory=dict)

    def signed(self, role: str) -> Signed:
        """Return a role's content."""
        tops: dict[str, Signed] = {
            "root": self.root,
            "targets": self.targets,
            "snapshot": self.snapshot,
            "timestamp": self.timestamp,
        }
        return tops[role] if role in tops else self.delegated[role]

    def delegator(self, role: str) -> Root | Targets:
        """Return the metadata that names the keys of a role."""
        return self.root if role in TOP_LEVEL else self.targets

    def role(self, role: str) -> Role:
        """Return the key ids and the threshold of a role."""
        return self.delegator(role).get_delegated_role(role)

    def key(self, role: str, keyid: str) -> Key:
        """Return a key of a role."""
        return self.delegator(role).get_key(keyid)

    @property
    def roles(self) -> tuple[str, ...]:
        """Every role, the four of TUF first."""
        return (*TOP_LEVEL, *sorted(self.delegated))

    def owners(self, kind: str) -> list[str]:
        """Return the names of all teams (kind "team") or groups ("fleet")."""
        return sorted(role.removeprefix(f"{kind}-") for role in self.delegated if role.startswith(f"{kind}-"))

    def releases(self) -> Iterator[tuple[ReleasePath, TargetFile]]:
        """Yield every release of every team, with its manifest as a target."""
        for role, signed in sorted(self.delegated.items()):
            if not role.startswith("team-"):
                continue
            for path, target in signed.targets.items():
                try:
                    release, name = parse_release_file(path)
                except UpdateError:
                    continue
                if name == MANIFEST_FILE:
                    yield release, target

    def target(self, role: str, path: str) -> TargetFile | None:
        """Return a target that a role signs; None: it signs none of that path."""
        return self.delegated[role].targets.get(path)

    def blobs(self) -> Iterator[str]:
        """Yield the hash-prefixed names of all targets, as they lie below `targets/`."""
        for signed in (self.targets, *self.delegated.values()):
            for target in signed.targets.values():
                yield from target.get_prefixed_paths()


def load_catalog(folder: RepositoryFolder) -> Catalog:
    """Read and verify all metadata. Raises PublishError: a file is missing, or its signatures do not verify."""
    root = _newest_root(folder)
    timestamp = _load(folder, Timestamp, "timestamp", root)
    snapshot = _load(folder, Snapshot, "snapshot", root, timestamp.snapshot_meta)
    targets = _load(folder, Targets, "targets", root, snapshot.meta["targets.json"])
    catalog = Catalog(root, targets, snapshot, timestamp)
    roles = targets.delegations.roles if targets.delegations is not None else None
    for role in roles or {}:
        catalog.delegated[role] = _load(folder, Targets, role, targets, snapshot.meta[f"{role}.json"])
    return catalog


def _newest_root(folder: RepositoryFolder) -> Root:
    version, root = 0, None
    while (folder.metadata / f"{version + 1}.root.json").exists():
        version += 1
        metadata = _parse(folder, Root, f"{version}.root.json")
        for trusted in (root, metadata.signed):
            if trusted is not None:
                _verify(folder, "root", trusted, metadata, f"{version}.root.json")
        root = metadata.signed
    if root is None:
        raise PublishError(f"{folder.path}: is not a repository; make one with `edge-runtime repo init` or give --repo")
    return root


def _load(
    folder: RepositoryFolder,
    kind: type[AnyRole],
    role: str,
    delegator: Root | Targets,
    meta: MetaFile | None = None,
) -> AnyRole:
    """Return the content of a file that has the name and the hash of `meta`."""
    name = f"{role}.json" if meta is None else f"{meta.version}.{role}.json"
    metadata = _parse(folder, kind, name, meta)
    _verify(folder, role, delegator, metadata, name)
    return metadata.signed


def _parse(folder: RepositoryFolder, kind: type[AnyRole], name: str, meta: MetaFile | None = None) -> Metadata[AnyRole]:
    data = folder.read(name)
    if data is None:
        raise _damaged(folder, name, "is missing")
    try:
        if meta is not None:
            meta.verify_length_and_hashes(data)
        metadata = Metadata[AnyRole].from_bytes(data)
    except (RepositoryError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, name, str(error)) from error
    if not isinstance(metadata.signed, kind):
        raise _damaged(folder, name, f"is metadata of type {metadata.signed.type}")
    return metadata


def _verify(
    folder: RepositoryFolder, role: str, delegator: Root | Targets, metadata: Metadata[AnyRole], name: str
) -> None:
    try:
        delegator.verify_delegate(role, metadata.signed_bytes, metadata.signatures)
    except (RepositoryError, ValueError) as error:
        raise _damaged(folder, name, str(error)) from error


def _damaged(folder: RepositoryFolder, name: str, why: str) -> PublishError:
    return PublishError(
        f"{folder.metadata / name}: {why}; nothing is signed on top of metadata that does not verify: "
        "bring the folder back from a copy"
    )
