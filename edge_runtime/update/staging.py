"""What one release needs, brought into the artifact store: what is here is not fetched, what changed is patched.

Owns: which files a device needs, which patch is taken, and what becomes of a patch that does not do. A patch is only a
quicker way: the whole file's hash decides, and whatever is wrong with a patch, the whole file is fetched instead. A
link that breaks is not the patch's fault: what came is gone on with at the next check. Called by the update loop.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.errors import DownloadError, NotPublished, TrustError, UpdateError
from edge_runtime.repository.manifest import PATCH_ALGORITHM, Artifact, Delta, Golden, Manifest
from edge_runtime.repository.patch import MAX_PATCHED_BYTES, apply_patch, find_zstd, memory_bytes
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.update.download import Progress, Wanted, is_whole
from edge_runtime.update.fetch import Body, Fetcher, Pace
from edge_runtime.update.release_rules import check_served, file_name
from edge_runtime.update.store import ArtifactStore
from edge_runtime.update.tuf_client import TufClient, wanted

log = logging.getLogger(__name__)

MEMORY_SHARE = 0.5
"""Of the memory that is free: applying a patch must not take it from what serves."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """One file that is not here. delta: the patch that makes it, where one is worth trying."""

    file: Artifact | Golden
    delta: Delta | None = None

    @property
    def nbytes(self) -> int:
        """How much there is to fetch, if all goes well."""
        return self.delta.size if self.delta is not None else self.file.length


def choose_artifacts(
    manifest: Manifest, suffixes: Collection[str], precisions: Collection[str] = ()
) -> tuple[Artifact, ...]:
    """Of a release's files, those of backends of which one can be loaded here: the graph, and the data beside it.

    suffixes: of the artifacts that backends here load (`offers.Device`). precisions: of the variants that are of use
    here; the model itself is always taken. Empty where none can be loaded.
    """
    endings = tuple(suffixes)
    backends = {each.backend for each in manifest.artifacts if file_name(each.path).endswith(endings)}
    wanted = {"", *precisions}
    return tuple(each for each in manifest.artifacts if each.backend in backends and each.precision in wanted)


def plan_fetches(
    manifest: Manifest,
    files: Sequence[Artifact | Golden],
    here: Collection[str],
    bases: Mapping[str, int],
    memory_limit_bytes: float,
) -> list[Fetch]:
    """What is to be fetched, and how: what is `here` is not, each other file once, by its smallest patch or whole.

    bases: by digest, the length of files that a patch may begin from. memory_limit_bytes: what applying one may take.
    """
    plan: dict[str, Fetch] = {}
    for file in files:
        if file.sha256 in here:
            continue
        usable = [
            delta
            for delta in manifest.delta
            if (delta.to_sha256, delta.algorithm) == (file.sha256, PATCH_ALGORITHM)
            and delta.from_sha256 in bases
            and delta.size < file.length
            and max(file.length, bases[delta.from_sha256]) <= MAX_PATCHED_BYTES
            and memory_bytes(bases[delta.from_sha256], file.length, delta.size) <= memory_limit_bytes
        ]
        plan[file.sha256] = Fetch(file, min(usable, key=lambda delta: delta.size, default=None))
    return list(plan.values())


class Staging:
    """Brings releases here in one check of a repository, whose client was refreshed. Thread: one owner.

    fetched_bytes: what was fetched so far, broken off or not.
    """

    def __init__(
        self,
        client: TufClient,
        fetcher: Fetcher,
        artifacts: ArtifactStore,
        *,
        make_pace: Callable[[], Pace],
        free_bytes: Callable[[], int | None] | None = None,
    ) -> None:
        """make_pace: starts the time that one file may take. free_bytes: how much memory is free now."""
        self._client = client
        self._counted = _CountingFetcher(fetcher)
        self._artifacts = artifacts
        self._make_pace = make_pace
        self._free_bytes = free_bytes or HostProbe().memory_available_bytes
        self._zstd = find_zstd()

    @property
    def fetched_bytes(self) -> int:
        """See the class."""
        return self._counted.fetched_bytes

    def stage(
        self,
        manifest: Manifest,
        suffixes: Collection[str],
        here: Mapping[str, Path],
        progress: Progress | None = None,
        *,
        precisions: Collection[str] = (),
    ) -> tuple[Artifact, ...]:
        """Bring a release's files into the store, durably; returns the chosen artifacts, for `Releases.lay_out`.

        suffixes: of the artifacts that backends here load. precisions: of the variants that the profile asks for; the
        release's own settings may ask for one too. here: by digest, files of releases that are laid out.
        progress: told the bytes that are done and those in all, over all files. Raises UpdateError (the release may not
        be served, or has nothing for this device), TrustError (its team does not sign what its manifest says),
        DownloadError (the next call goes on with what came), StorageFailed.
        """
        settings = check_served(manifest, f"release {manifest.release_counter} of {manifest.model}")
        chosen = choose_artifacts(manifest, suffixes, {*precisions, settings.precision or ""})
        if not chosen:
            raise UpdateError(f"release {manifest.release_counter} of {manifest.model}: no backend here loads it")
        files: tuple[Artifact | Golden, ...] = (*chosen, manifest.golden)
        free_bytes = self._free_bytes()
        limit_bytes = math.inf if free_bytes is None else free_bytes * MEMORY_SHARE
        plan = plan_fetches(manifest, files, self._whole(files, here), self._bases(manifest, here), limit_bytes)
        tally = _Tally(sum(fetch.nbytes for fetch in plan), progress)
        for fetch in plan:
            if fetch.delta is None or not self._patch(fetch.file, fetch.delta, here[fetch.delta.from_sha256], tally):
                self._fetch(fetch.file.path, fetch.file, tally)
        return chosen

    # ---- private ----------------------------------------------------------------------------------------------------

    def _whole(self, files: Sequence[Artifact | Golden], here: Mapping[str, Path]) -> set[str]:
        """Digests of the files that need no fetching: their bytes are here, in the store or in a release."""
        found: set[str] = set()
        for file in files:
            want = _wanted(file)
            places = (self._artifacts.path(want), here.get(file.sha256))
            if any(place is not None and is_whole(place, want) for place in places):
                found.add(file.sha256)
        return found

    def _bases(self, manifest: Manifest, here: Mapping[str, Path]) -> dict[str, int]:
        named = {delta.from_sha256 for delta in manifest.delta}
        if self._zstd is None and named:
            log.warning("whole files are fetched, not patches: zstd is missing; pip install 'edge-runtime[update]'")
            return {}
        return {digest: path.stat().st_size for digest, path in here.items() if digest in named and path.is_file()}

    def _patch(self, file: Artifact | Golden, delta: Delta, base: Path, tally: _Tally) -> bool:
        """Make a file from an old one and a patch; false where that does not do, for whatever reason."""
        try:
            want = self._fetch(delta.target, delta, tally)
            try:
                self._apply(file, self._artifacts.path(want).read_bytes(), base)
            finally:
                self._artifacts.let_go([want.digest])
        except (UpdateError, OSError, MemoryError) as error:
            if isinstance(error, DownloadError) and not isinstance(error, NotPublished):
                raise
            # A stick has no patches, and needs none.
            level = logging.DEBUG if isinstance(error, NotPublished) else logging.WARNING
            log.log(level, "%s cannot be used, so the whole file is fetched: %s", delta.target, error)
            tally.add_in_all(file.length)
            return False
        return True

    def _apply(self, file: Artifact | Golden, patch: bytes, base: Path) -> None:
        assert self._zstd is not None
        with base.open("rb") as source:
            old = source.read(MAX_PATCHED_BYTES)
        self._artifacts.adopt(_wanted(file), apply_patch(self._zstd, old, patch, file.length))

    def _fetch(self, path: str, file: Artifact | Golden | Delta, tally: _Tally) -> Wanted:
        """A target's bytes into the store, if its team signs what the manifest says of it."""
        target = self._client.look_up(path)
        if target is None:
            raise TrustError(f"{path}: the manifest names it, and no team that may speak of it signs it")
        want, said = wanted(target), _wanted(file)
        if (want.length, want.hashes.get("sha256")) != (said.length, said.digest):
            raise TrustError(f"{path}: its team signs {want}, its manifest says {said}; both must be the same")
        self._artifacts.fetch(
            self._counted, self._client.file_path(target), want, pace=self._make_pace(), progress=tally.tell
        )
        tally.finish(want.length)
        return want


# ---- private --------------------------------------------------------------------------------------------------------


def _wanted(file: Artifact | Golden | Delta) -> Wanted:
    length = file.size if isinstance(file, Delta) else file.length
    return Wanted.of(length, {"sha256": file.sha256})


class _Tally:
    """Bytes of files that are done, and of all. Thread: one owner."""

    def __init__(self, in_all: int, progress: Progress | None) -> None:
        self._done = 0
        self._in_all = in_all
        self._progress = progress

    def tell(self, done_of_file: int, _: int) -> None:
        if self._progress is not None:
            self._progress(self._done + done_of_file, self._in_all)

    def finish(self, nbytes: int) -> None:
        self._done += nbytes
        self.tell(0, 0)

    def add_in_all(self, nbytes: int) -> None:
        self._in_all += nbytes


class _CountingFetcher:
    """Counts what really came, whatever became of it."""

    def __init__(self, fetcher: Fetcher) -> None:
        self.fetched_bytes = 0
        self._fetcher = fetcher

    @contextmanager
    def open(self, path: str, *, start_bytes: int, deadline_s: float) -> Iterator[Body]:
        with self._fetcher.open(path, start_bytes=start_bytes, deadline_s=deadline_s) as body:
            yield _CountedBody(body, self)


class _CountedBody:
    def __init__(self, body: Body, counter: _CountingFetcher) -> None:
        self.start_bytes = body.start_bytes
        self._body = body
        self._counter = counter

    def read(self, limit: int) -> bytes:
        piece = self._body.read(limit)
        self._counter.fetched_bytes += len(piece)
        return piece
