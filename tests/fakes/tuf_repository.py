"""A small TUF repository in memory, which can also be a bad one: tests change anything, sign it and publish it.

`serve` puts it behind a real HTTP server, metadata under `metadata/`, artifacts under `targets/`. Signed with tuf's own
metadata API; keys are made once for a test run, since an RSA key takes a while.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from functools import cache
from typing import Any, cast
from urllib.parse import quote, unquote

from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import (
    DelegatedRole,
    Delegations,
    Metadata,
    MetaFile,
    Root,
    Signed,
    Snapshot,
    SuccinctRoles,
    TargetFile,
    Targets,
    Timestamp,
)
from tuf.api.serialization.json import JSONSerializer

from tests.fakes.http_server import HttpServer

TOP = ("root", "timestamp", "snapshot", "targets")
NOW = datetime.now(timezone.utc).replace(microsecond=0)


@cache
def signer(number: int, kind: str = "ed25519") -> CryptoSigner:
    """The key of that number: always the same one in a test run."""
    make: dict[str, Callable[[], CryptoSigner]] = {
        "ed25519": CryptoSigner.generate_ed25519,
        "ecdsa": CryptoSigner.generate_ecdsa,
        "rsassa-pss-sha256": CryptoSigner.generate_rsa,
        "rsa-pkcs1v15-sha256": lambda: CryptoSigner.generate_rsa(scheme="rsa-pkcs1v15-sha256"),
    }
    return make[kind]()


class TufRepository:
    """Begins whole: four roles of one key each, all published as version 1.

    `signed`: the current content of each role, to change; `signers`: who signs it at the next `publish`; `published`:
    each role's versions as bytes, the last one being version `len`; `artifacts`: bytes by path.
    """

    def __init__(self) -> None:
        self.expires = NOW + timedelta(days=30)
        self.has_hashes = False
        """Whether snapshot and timestamp say lengths and hashes of what they name."""
        self.has_prefixes = True
        """Whether artifacts are found under hash-prefixed names, where snapshots are consistent."""
        self.signed: dict[str, Signed] = {
            "root": Root(expires=self.expires),
            "timestamp": Timestamp(expires=self.expires),
            "snapshot": Snapshot(expires=self.expires),
            "targets": Targets(expires=self.expires),
        }
        self.signers: dict[str, list[CryptoSigner]] = {}
        self.published: dict[str, list[bytes]] = {}
        self.artifacts: dict[str, bytes] = {}
        self._next_key = 100
        for role in TOP:
            self.signers[role] = [self.new_key()]
            self.root.add_key(self.signers[role][0].public_key, role)
        self.publish("root", "targets", "snapshot", "timestamp")

    @property
    def root(self) -> Root:
        return cast("Root", self.signed["root"])

    @property
    def timestamp(self) -> Timestamp:
        return cast("Timestamp", self.signed["timestamp"])

    @property
    def snapshot(self) -> Snapshot:
        return cast("Snapshot", self.signed["snapshot"])

    def targets(self, role: str = "targets") -> Targets:
        return cast("Targets", self.signed[role])

    def new_key(self, kind: str = "ed25519") -> CryptoSigner:
        """A key that this repository has not used yet."""
        self._next_key += 1
        return signer(self._next_key, kind)

    def add_key(self, role: str, key: CryptoSigner | None = None) -> CryptoSigner:
        """One more key for a top-level role; it signs from the next `publish` on."""
        key = key or self.new_key()
        self.root.add_key(key.public_key, role)
        self.signers[role].append(key)
        return key

    def rotate(self, role: str) -> None:
        """Other keys for a top-level role, as many as its threshold. Takes effect with the next root."""
        self.root.roles[role].keyids.clear()
        self.signers[role] = []
        for _ in range(self.root.roles[role].threshold):
            self.add_key(role)

    def publish(self, *roles: str) -> None:
        """Sign each role and show it as its next version, telling the snapshot, or the timestamp, of it."""
        for role in roles:
            versions = self.published.setdefault(role, [])
            if versions:
                self.signed[role].version += 1
            self.republish(role)

    def publish_all(self) -> None:
        """Everything but the root, in the order that a publisher must keep."""
        delegated = [role for role in self.signed if role not in TOP]
        self.publish(*delegated, "targets", "snapshot", "timestamp")

    def republish(self, role: str) -> None:
        """As `publish`, with the version as it stands."""
        data = self.sign(role)
        self.published.setdefault(role, []).append(data)
        meta = MetaFile(self.signed[role].version)
        if self.has_hashes:
            meta = MetaFile(meta.version, len(data), {"sha256": hashlib.sha256(data).hexdigest()})
        if role == "snapshot":
            self.timestamp.snapshot_meta = meta
        elif role not in TOP or role == "targets":
            self.snapshot.meta[f"{role}.json"] = meta

    def sign(self, role: str) -> bytes:
        """A role's current content, signed by its signers."""
        metadata = Metadata(cast("Any", copy.deepcopy(self.signed[role])))
        for key in self.signers[role]:
            metadata.sign(key, append=True)
        return metadata.to_bytes(JSONSerializer())

    def start_again(self, role: str, version: int = 1) -> None:
        """Show a role as this version and forget the later ones: what one does who rolls it back, or raises it."""
        self.signed[role].version = version
        self.published[role] = [b""] * (version - 1)
        self.republish(role)

    def add_target(self, path: str, data: bytes, role: str = "targets", hashes: tuple[str, ...] = ("sha256",)) -> None:
        """An artifact, and what a role says of it."""
        self.targets(role).targets[path] = TargetFile.from_data(path, data, list(hashes))
        self.artifacts[path] = data

    def delegate(
        self,
        delegator: str,
        role: str,
        paths: list[str] | None = None,
        *,
        terminating: bool = False,
        key: CryptoSigner | None = None,
        hash_prefixes: list[str] | None = None,
    ) -> None:
        """Let a role speak of paths. A role that has keys already gets the new one as well."""
        key = key or self.new_key()
        above = self.targets(delegator)
        if above.delegations is None:
            above.delegations = Delegations({}, {})
        assert above.delegations.roles is not None
        where = None if hash_prefixes is not None else (["*"] if paths is None else paths)
        above.delegations.roles[role] = DelegatedRole(role, [], 1, terminating, where, path_hash_prefixes=hash_prefixes)
        above.add_key(key.public_key, role)
        self.signers.setdefault(role, []).append(key)
        self.signed.setdefault(role, Targets(expires=self.expires))

    def delegate_bins(self, bit_length: int, prefix: str) -> None:
        """Spread all paths over 2^bit_length roles by their hash (TAP 15), all of one key."""
        key = self.new_key()
        bins = SuccinctRoles([], 1, bit_length, prefix)
        self.targets().delegations = Delegations({}, None, bins)
        self.targets().add_key(key.public_key)
        for role in bins.get_roles():
            self.signers[role] = [key]
            self.signed[role] = Targets(expires=self.expires)

    def edit(self, role: str, change: Callable[[dict[str, Any]], None]) -> None:
        """Change the JSON of a role's newest version after it was signed."""
        document = json.loads(self.published[role][-1])
        change(document)
        self.published[role][-1] = json.dumps(document).encode()

    def find(self, path: str) -> bytes | None:
        """The file of a quoted URL path, as a plain file server would have it."""
        kind, _, name = path.partition("/")
        if kind == "metadata" and name.endswith(".json"):
            return self._metadata(name.removesuffix(".json"))
        if kind == "targets":
            return self._artifact(unquote(name))
        return None

    def _metadata(self, name: str) -> bytes | None:
        number, _, role = name.partition(".")
        if name != "timestamp" and number.isdigit() and (self.root.consistent_snapshot or role == "root"):
            versions = self.published.get(unquote(role), [])
            return versions[int(number) - 1] or None if 0 < int(number) <= len(versions) else None
        if name == "timestamp" or not self.root.consistent_snapshot:
            return self.published.get(unquote(name), [None])[-1]
        return None

    def _artifact(self, path: str) -> bytes | None:
        if not (self.root.consistent_snapshot and self.has_prefixes):
            return self.artifacts.get(path)
        folder, slash, name = path.rpartition("/")
        prefix, _, name = name.partition(".")
        whole = f"{folder}{slash}{name}"
        known = any(
            whole in signed.targets and prefix in signed.targets[whole].hashes.values()
            for signed in self.signed.values()
            if isinstance(signed, Targets)
        )
        return self.artifacts.get(whole) if known else None


@contextmanager
def serve(repository: TufRepository) -> Iterator[HttpServer]:
    """The repository behind a real server."""
    with HttpServer(repository.find) as server:
        yield server


def role_file(role: str) -> str:
    """The name of a role's file in a client's folder."""
    return f"{quote(role, safe='')}.json"
