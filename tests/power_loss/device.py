"""A device without a daemon: fetches release after release and remembers them, and says what it has for sure.

Only what the updater itself stands on, in the updater's order: the TUF client, the stores, the journal, the releases.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path

from tuf.api.metadata import Metadata, Timestamp

from edge_runtime.durable import SYSTEM_DISK, Disk
from edge_runtime.updates.device_time import utc_text
from edge_runtime.updates.fetch import FetchLimits, FolderFetcher, Pace, Pacer
from edge_runtime.updates.journal import Journal
from edge_runtime.updates.manifest import Assignment, Manifest
from edge_runtime.updates.releases import Releases
from edge_runtime.updates.repository_view import RepositoryView
from edge_runtime.updates.states import ReleaseState
from edge_runtime.updates.store import ArtifactStore, MetadataStore
from edge_runtime.updates.trust import check_marks, marks_of
from edge_runtime.updates.tuf_client import TufClient
from tests.fakes.release_series import GROUP, ReleaseSeries

Fact = tuple[str, str, int]
"""What is durable from now on: its kind, a name, a number.

"role": trusted metadata, its version · "mark": how far a role had come, as the journal names it · "file": a verified
artifact by its digest · "release": one laid out, by its manifest's hash · "sweep": files told before may go ·
"active": a model's release counter · "refused": the hash of a manifest
"""

BAD_COUNTER = 2
"""The release that this device finds to be bad."""

LIMITS = FetchLimits(total_s=600.0)


class Device:
    """What is in one state folder. tell: called when a fact has become durable, never before."""

    def __init__(
        self, state: Path, series: ReleaseSeries, tell: Callable[[Fact], None], *, disk: Disk = SYSTEM_DISK
    ) -> None:
        self._series = series
        self._tell = tell
        self._journal = Journal(state, disk=disk)
        self._metadata = MetadataStore(state / "metadata", disk=disk)
        self._artifacts = ArtifactStore(state / "artifacts", disk=disk)
        self._releases = Releases(state / "releases", self._artifacts, disk=disk)

    def live(self) -> None:
        """Begin, or begin again, and go on until the last release is active. Raises StorageFailed."""
        with closing(self._journal) as journal:
            journal.open()
            journal.restart(_now())
            for era in self._series.eras:
                if _timestamp_version((era / "metadata" / "timestamp.json").read_bytes()) >= self._seen():
                    self._check(era)

    # ---- private ----------------------------------------------------------------------------------------------------

    def _seen(self) -> int:
        kept = self._metadata.load("timestamp", 1 << 20)
        return 0 if kept is None else _timestamp_version(kept)

    def _check(self, era: Path) -> None:
        with self._metadata.lock():
            client = self._refresh(era)
            repository = RepositoryView(client, FolderFetcher(era / "targets"), self._artifacts, Pacer(LIMITS))
            (assignment,) = repository.assignments(GROUP)
            passed_over = {release.manifest_sha256 for release in self._journal.active().values()}
            if assignment.manifest_sha256 not in passed_over | set(self._journal.refused()):
                self._update(repository, assignment)

    def _refresh(self, era: Path) -> TufClient:
        now_utc = datetime.now(timezone.utc)
        client = TufClient(
            FolderFetcher(era / "metadata"), self._metadata, now_utc=now_utc, bootstrap=self._series.root
        )
        client.refresh()
        trusted = client.trusted
        self._tell(("role", "root", trusted.root.version))
        self._tell(("role", "timestamp", trusted.timestamp.version))
        self._tell(("role", "snapshot", trusted.snapshot.version))
        marks = marks_of(trusted.root, trusted.timestamp, trusted.snapshot)
        check_marks(marks, self._journal.marks())
        self._journal.raise_marks(marks)
        for name, version in marks.items():
            self._tell(("mark", name, version))
        self._journal.found_whole()
        return client

    def _update(self, repository: RepositoryView, assignment: Assignment) -> None:
        journal = self._journal
        signed = repository.release(assignment)
        release, manifest = signed.release, signed.manifest
        journal.advance(release, ReleaseState.VERIFYING, _now())
        journal.advance(release, ReleaseState.STAGING, _now())
        self._fetch_all(repository, manifest)
        self._releases.lay_out(release, signed.manifest_data, manifest.artifacts)
        self._tell(("release", release.manifest_sha256, 0))
        journal.advance(release, ReleaseState.WARMING, _now())
        self._releases.open(release)
        journal.advance(release, ReleaseState.OBSERVING, _now())
        if release.counter == BAD_COUNTER:
            journal.advance(release, ReleaseState.ROLLING_BACK, _now(), "bad")
            journal.reject(release, _now(), "bad")
            self._tell(("refused", release.manifest_sha256, 0))
        else:
            journal.commit(release, _now())
            self._tell(("active", release.model, release.counter))
        self._tell(("sweep", "", 0))
        kept = [each.manifest_sha256 for each in (*journal.active().values(), *journal.previous().values())]
        self._releases.keep_only(kept, digests=repository.digests)

    def _fetch_all(self, repository: RepositoryView, manifest: Manifest) -> None:
        for path in (manifest.golden.path, *(artifact.path for artifact in manifest.artifacts)):
            signed = repository.client.look_up(path)
            assert signed is not None
            file = repository.fetch(signed, Pace(LIMITS))
            self._tell(("file", file.name, 0))


def _timestamp_version(data: bytes) -> int:
    return Metadata[Timestamp].from_bytes(data).signed.version


def _now() -> str:
    return utc_text(datetime.now(timezone.utc))
