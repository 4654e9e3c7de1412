"""The assignments of a repository, read and verified as a device does it, to be shown. Signs and changes nothing.

Owns: a folder of its own for verified metadata, gone with the process. A repository's address is believed by its root
file: the given one, that of a folder on this machine, or the first one that an address shows, which only a display may
do. Thread: one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from edge_runtime.errors import ConfigError, EdgeRuntimeError
from edge_runtime.extras import install_advice
from edge_runtime.fleet.fleet import AssignedRelease, SignedFleet

if TYPE_CHECKING:
    from edge_runtime.updates.manifest import Assignment
    from edge_runtime.updates.repository_view import RepositoryView
    from edge_runtime.updates.source import Source

MAX_ROOT_BYTES = 512_000
ROLE_PREFIX, ROLE_SUFFIX = "fleet-", ".json"
FIRST_ROOT = "1.root.json"

SCHEMES = ("http://", "https://", "oci://", "oci+http://")


class FleetRepository:
    """A repository, by its folder or its address. root_file: what it is believed by; None: its own first one."""

    def __init__(self, place: str, root_file: str | None = None, ca_file: str | None = None) -> None:
        self.place = place
        self._root_file = root_file
        self._ca_file = ca_file
        self._folder = tempfile.TemporaryDirectory(prefix="fleet-")
        self._root: bytes | None = None

    def close(self) -> None:
        """Remove what was kept. Idempotent."""
        self._folder.cleanup()

    def read(self) -> SignedFleet:
        """Read the assignments of all groups, by group and model, and what else tells whether a device's word can be.

        Raises EdgeRuntimeError: it is away, does not verify, or the `update` extra is missing.
        """
        try:
            from edge_runtime.updates.fetch import FetchLimits, Pacer, fetch_bytes
            from edge_runtime.updates.repository_view import RepositoryView
            from edge_runtime.updates.store import ArtifactStore, MetadataStore
            from edge_runtime.updates.trust import update_start
            from edge_runtime.updates.tuf_client import TufClient
        except ModuleNotFoundError as error:
            raise ConfigError(f"{self.place}: {error.name} is not installed; {install_advice('update')}") from None
        source, pacer, folder = self._source(), Pacer(FetchLimits(total_s=60.0)), Path(self._folder.name)
        if self._root is None:
            if self._root_file is not None:
                self._root = _read_file(self._root_file)
            else:
                self._root = fetch_bytes(source.metadata, FIRST_ROOT, max_bytes=MAX_ROOT_BYTES, pace=pacer.start())
        store = MetadataStore(folder / "metadata")
        with store.lock():
            client = TufClient(source.metadata, store, now_utc=update_start(), bootstrap=self._root)
            client.refresh()
            view = RepositoryView(client, source.targets, ArtifactStore(folder / "targets"), pacer)
            found: list[AssignedRelease] = []
            published: dict[str, frozenset[int]] = {}
            for group in _groups(client.trusted.snapshot.meta):
                for each in view.assignments(group):
                    release = each.release
                    published[each.model] = published.get(each.model, frozenset()) | _counters(view, each)
                    found.append(
                        AssignedRelease(
                            group,
                            each.model,
                            release.counter,
                            _version(view, each),
                            each.percent,
                            each.manifest_sha256,
                        )
                    )
            return SignedFleet(found, view.groups(), published)

    def _source(self) -> Source:
        from edge_runtime.clock import SystemClock
        from edge_runtime.config.settings import UpdateSettings
        from edge_runtime.updates.source import configured_source

        is_url = self.place.startswith(SCHEMES)
        if not is_url and not (Path(self.place) / "metadata").is_dir():
            raise ConfigError(f"{self.place}: is not a repository; wanted a folder with metadata/, or a URL")
        settings = UpdateSettings(
            root_file="",
            url=self.place if is_url else None,
            folder=None if is_url else self.place,
            ca_file=self._ca_file,
            allow_http=True,
        )
        source = configured_source(settings, SystemClock())
        assert source is not None
        return source


def _groups(names: Iterable[str]) -> list[str]:
    """Return the groups of a snapshot's roles."""
    inside = len(ROLE_PREFIX)
    return sorted(name[inside : -len(ROLE_SUFFIX)] for name in names if name.startswith(ROLE_PREFIX))


def _version(view: RepositoryView, assignment: Assignment) -> int | None:
    """Return the version of an assigned release; None where its manifest cannot be read."""
    try:
        return view.release(assignment).release.version
    except EdgeRuntimeError:
        return None


def _counters(view: RepositoryView, assignment: Assignment) -> frozenset[int]:
    """Return the releases of a model that its team signs; the assigned one alone where they cannot be read."""
    try:
        return view.counters(assignment) | {assignment.release.counter}
    except EdgeRuntimeError:
        return frozenset((assignment.release.counter,))


def _read_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"--root-file: {path}: {error.strerror}; wanted the repository's 1.root.json") from None
