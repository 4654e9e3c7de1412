"""What a repository offers to one group of devices, verified: its assignments, and the manifests that they name.

One object is one check: it asks the client, fetches small files through the artifact store, so that what is here is not
asked for again, and remembers which it needed. Thread: one owner.
"""

from __future__ import annotations

from collections.abc import Callable

from edge_runtime.errors import TrustError, UpdateError
from edge_runtime.repository.manifest import (
    MAX_ASSIGNMENTS_BYTES,
    MAX_MANIFEST_BYTES,
    Assignment,
    Manifest,
    decode_assignments,
    decode_manifest,
)
from edge_runtime.repository.release_paths import assignments_path
from edge_runtime.update.download import Wanted
from edge_runtime.update.fetch import Fetcher, Pace
from edge_runtime.update.store import ArtifactStore
from edge_runtime.update.tuf_client import TufClient, wanted


class Catalogue:
    """A refreshed repository. digests: of the files that were needed so far, by which they are kept."""

    def __init__(
        self, client: TufClient, fetcher: Fetcher, artifacts: ArtifactStore, make_pace: Callable[[], Pace]
    ) -> None:
        self.client = client
        self.fetcher = fetcher
        self.digests: set[str] = set()
        self._artifacts = artifacts
        self._make_pace = make_pace

    def assignments(self, group: str) -> tuple[Assignment, ...]:
        """What a group's devices are to run. Raises UpdateError: there is no such group, or what it signed is none."""
        path = assignments_path(group)
        data = self._read(path, MAX_ASSIGNMENTS_BYTES)
        if data is None:
            raise UpdateError(
                f"the repository has no group {group!r}; its owner adds it with: edge-runtime repo add-group {group}"
            )
        return decode_assignments(data, path)

    def manifest(self, assignment: Assignment) -> tuple[Manifest, bytes]:
        """The manifest that a group chose, if a team signs that very one, and its bytes. Raises UpdateError."""
        path = assignment.manifest_path
        data = self._read(path, MAX_MANIFEST_BYTES, assignment.manifest_sha256)
        if data is None:
            raise TrustError(f"{path}: is assigned, and no team that may speak of it signs it")
        return decode_manifest(data, path), data

    def _read(self, path: str, max_bytes: int, sha256: str | None = None) -> bytes | None:
        """A small target's bytes; None: nobody signs it."""
        target = self.client.look_up(path)
        if target is None:
            return None
        want = wanted(target)
        if want.length > max_bytes:
            raise UpdateError(f"{path}: has {want.length} bytes, wanted at most {max_bytes}")
        if sha256 is not None:
            _check_same(path, want, sha256)
        file = self._artifacts.fetch(self.fetcher, self.client.file_path(target), want, pace=self._make_pace())
        self.digests.add(file.name)
        return file.read_bytes()


def _check_same(path: str, signed: Wanted, sha256: str) -> None:
    got = signed.hashes.get("sha256")
    if got != sha256:
        raise TrustError(f"{path}: its team signs {got or 'no sha256'}, its group {sha256}; both must name the same")
