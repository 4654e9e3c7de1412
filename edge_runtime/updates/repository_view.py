"""A refreshed repository as a group of devices sees it: its assignments, and the releases that they name.

One object is one check. It asks the TUF client for targets, fetches small files through the artifact store, which does
not fetch what is here, and notes which files it needed. Thread: one owner.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.errors import StorageFailed, TrustError, UpdateError
from edge_runtime.updates.download import ByteProgress
from edge_runtime.updates.fetch import Fetcher, Pace, Pacer
from edge_runtime.updates.groups import MAX_GROUPS_BYTES, decode_groups
from edge_runtime.updates.manifest import (
    MAX_ASSIGNMENTS_BYTES,
    MAX_MANIFEST_BYTES,
    Assignment,
    Manifest,
    decode_assignments,
    decode_manifest,
)
from edge_runtime.updates.overlay import MAX_OVERLAY_BYTES
from edge_runtime.updates.release_paths import (
    GROUPS_FILE,
    MANIFEST_FILE,
    assignments_path,
    configuration_path,
    parse_release_file,
)
from edge_runtime.updates.states import Release
from edge_runtime.updates.store import ArtifactStore
from edge_runtime.updates.tuf_client import SignedFile, TufClient


@dataclass(frozen=True, slots=True)
class SignedRelease:
    """A release whose manifest its team signs and a group names. manifest_data: the signed bytes."""

    release: Release
    manifest: Manifest
    manifest_data: bytes


class RepositoryView:
    """The assignments and manifests of a refreshed repository, and its files. digests: of the small files it read."""

    def __init__(self, client: TufClient, fetcher: Fetcher, artifacts: ArtifactStore, pacer: Pacer) -> None:
        """fetcher: of the place of targets. pacer: starts the time that a small file may take."""
        self.client = client
        self.artifacts = artifacts
        self.digests: set[str] = set()
        self._fetcher = fetcher
        self._pacer = pacer

    def assignments(self, group: str) -> tuple[Assignment, ...]:
        """Return a group's assignments. Raises UpdateError: there is no such group, or its file makes no sense."""
        path = assignments_path(group)
        data = self._read(path, MAX_ASSIGNMENTS_BYTES)
        if data is None:
            raise UpdateError(
                f"the repository has no group {group!r}; its owner adds it with: edge-runtime repo add-group {group}"
            )
        return decode_assignments(data, path)

    def groups(self) -> dict[str, str]:
        """Return the groups that targets says of devices, by id. Raises UpdateError: its file makes no sense."""
        data = self._read(GROUPS_FILE, MAX_GROUPS_BYTES)
        return {} if data is None else decode_groups(data)

    def overlay(self, group: str) -> str:
        """Return the signed configuration of a group; "" for none. Raises UpdateError: it is not text."""
        path = configuration_path(group)
        data = self._read(path, MAX_OVERLAY_BYTES)
        try:
            return "" if data is None else data.decode()
        except UnicodeDecodeError:
            raise UpdateError(f"{path}: is not UTF-8; its owner signs it again from a text file") from None

    def release(self, assignment: Assignment) -> SignedRelease:
        """Return the release that an assignment names. Raises UpdateError: no team signs that very manifest."""
        path, sha256 = assignment.manifest_path, assignment.manifest_sha256
        data = self._read(path, MAX_MANIFEST_BYTES, sha256)
        if data is None:
            raise TrustError(f"{path}: is assigned, and no team that may speak of it signs it")
        manifest = decode_manifest(data, path)
        release = Release(manifest.model, manifest.version, manifest.release_counter, sha256)
        return SignedRelease(release, manifest, data)

    def counters(self, assignment: Assignment) -> frozenset[int]:
        """Return the release counters of the assigned model that its team signs now. Raises as `release`."""
        release, found = assignment.release, set()
        for path in self.client.signed_beside(assignment.manifest_path):
            with contextlib.suppress(UpdateError):  # not a file of a release
                each, name = parse_release_file(path)
                if (each.team, each.model, name) == (release.team, release.model, MANIFEST_FILE):
                    found.add(each.counter)
        return frozenset(found)

    def fetch(self, signed: SignedFile, pace: Pace, progress: ByteProgress | None = None) -> Path:
        """Bring a file into the artifact store, unless it is there. Raises as `ArtifactStore.fetch`."""
        return self.artifacts.fetch(self._fetcher, signed.path, signed.expected, pace=pace, progress=progress)

    # ---- private ----------------------------------------------------------------------------------------------------

    def _read(self, path: str, max_bytes: int, sha256: str | None = None) -> bytes | None:
        """Fetch a small target; None: no role signs it. sha256: the hash that the group signs for it, if it does."""
        signed = self.client.look_up(path)
        if signed is None:
            return None
        if signed.expected.length > max_bytes:
            raise UpdateError(f"{path}: has {signed.expected.length} bytes, wanted at most {max_bytes}")
        signed_sha256 = signed.expected.hashes.get("sha256")
        if sha256 not in (None, signed_sha256):
            raise TrustError(
                f"{path}: its team signs {signed_sha256 or 'no sha256'}, its group {sha256}; both must name the same"
            )
        file = self.artifacts.fetch(  # a disk below its reserve must not keep a device from learning what is wanted
            self._fetcher, signed.path, signed.expected, pace=self._pacer.start(), keeps_reserve=False
        )
        self.digests.add(file.name)
        try:
            return file.read_bytes()
        except OSError as error:  # what was written a moment ago may have left memory, and its disk be gone
            raise StorageFailed(f"{file}: cannot be read: {error.strerror}; look at the disk") from error
