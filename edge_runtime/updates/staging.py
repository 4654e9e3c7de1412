"""Staging of a release: brings its files into the artifact store. Fetches only files that are not here, or patches.

Owns: which files a device needs, which patch is used, and what happens when a patch fails. A patch only saves bytes:
the whole file's hash decides, and after any fault of a patch the whole file is fetched instead. A broken link is not
a fault of the patch: the next check resumes the download. Called by the rollout.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.errors import DownloadError, NotPublished, TrustError, UpdateError
from edge_runtime.extras import install_advice
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.updates.download import ByteProgress, ExpectedFile, is_whole
from edge_runtime.updates.fetch import Pacer
from edge_runtime.updates.manifest import PATCH_ALGORITHM, Artifact, Delta, Golden, Manifest
from edge_runtime.updates.patch import MAX_PATCHED_BYTES, apply_patch, find_zstd, memory_bytes
from edge_runtime.updates.release_checks import check_served, described_file, is_loaded
from edge_runtime.updates.repository_view import RepositoryView

log = logging.getLogger(__name__)

MEMORY_SHARE = 0.5
"""Of the free memory: applying a patch must not take it from serving models."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """One file to fetch. delta: the patch to make it from, if one is usable."""

    file: Artifact | Golden
    delta: Delta | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes to fetch, if the patch does not fail."""
        return self.delta.size if self.delta is not None else self.file.length


def choose_artifacts(
    manifest: Manifest, suffixes: Collection[str], precisions: Collection[str] = ()
) -> tuple[Artifact, ...]:
    """Return the files of a release that this device needs: graphs that a backend here loads, and what belongs to them.

    suffixes: of the artifacts that backends here load, as of `DeviceTraits`. precisions: of the variants that are
    useful here; the model itself is always taken. Empty where no backend here loads any.
    """
    loaded = {(each.model, each.backend) for each in manifest.artifacts if is_loaded(each, suffixes)}
    wanted = {"", *precisions}
    return tuple(
        each
        for each in manifest.artifacts
        if (not each.backend or (each.model, each.backend) in loaded) and each.precision in wanted
    )


def plan_fetches(
    manifest: Manifest,
    files: Sequence[Artifact | Golden],
    here: Collection[str],
    bases: Mapping[str, int],
    memory_limit_bytes: float,
) -> list[Fetch]:
    """Plan the files to fetch: those that are not `here`, each once, by its smallest usable patch or whole.

    bases: lengths, by digest, of files that a patch may start from. memory_limit_bytes: for applying one.
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
    """Stages releases in one check of a refreshed repository. Thread: one owner."""

    def __init__(self, repository: RepositoryView, pacer: Pacer, *, probe: HostProbe | None = None) -> None:
        """pacer: starts the time that one file may take. probe: says how much memory is free."""
        self._repository = repository
        self._artifacts = repository.artifacts
        self._pacer = pacer
        self._probe = probe or HostProbe()
        self._zstd = find_zstd()

    def stage(
        self,
        manifest: Manifest,
        suffixes: Collection[str],
        here: Mapping[str, Path],
        progress: ByteProgress | None = None,
        *,
        precisions: Collection[str] = (),
    ) -> tuple[Artifact, ...]:
        """Bring a release's files into the store, durably; returns the chosen artifacts, for `Releases.lay_out`.

        suffixes: of the artifacts that backends here load. precisions: of the variants that the profile asks for; the
        release's own settings may ask for one too. here: by digest, files of releases that are laid out. progress:
        gets the bytes done and in total, over all files. Raises UpdateError (the release may not be served, or
        has no file for this device), TrustError (its team signs other files than its manifest describes), DownloadError
        (the next call resumes), StorageFailed.
        """
        settings = check_served(manifest, f"release {manifest.release_counter} of {manifest.model}")
        asked = {each.precision or "" for each in (settings.own, *settings.models.values())}
        chosen = choose_artifacts(manifest, suffixes, {*precisions, *asked})
        left = {each.model for each in manifest.artifacts} - {each.model for each in chosen if each.backend}
        if left:
            what = f"its model {min(left)}" if min(left) else "it"
            raise UpdateError(f"release {manifest.release_counter} of {manifest.model}: no backend here loads {what}")
        files: tuple[Artifact | Golden, ...] = (*chosen, manifest.golden)
        free_bytes = self._probe.memory_available_bytes()
        limit_bytes = math.inf if free_bytes is None else free_bytes * MEMORY_SHARE
        plan = plan_fetches(manifest, files, self._whole(files, here), self._bases(manifest, here), limit_bytes)
        count = _ByteCount(sum(fetch.nbytes for fetch in plan), progress)
        for fetch in plan:
            if fetch.delta is None or not self._patch(fetch.file, fetch.delta, here[fetch.delta.from_sha256], count):
                self._fetch(fetch.file.path, fetch.file, count)
        return chosen

    # ---- private ----------------------------------------------------------------------------------------------------

    def _whole(self, files: Sequence[Artifact | Golden], here: Mapping[str, Path]) -> set[str]:
        """Return the digests of the files whose bytes are here, in the store or in a release."""
        found: set[str] = set()
        for file in files:
            want = described_file(file)
            places = (self._artifacts.path(want), here.get(file.sha256))
            if any(place is not None and is_whole(place, want) for place in places):
                found.add(file.sha256)
        return found

    def _bases(self, manifest: Manifest, here: Mapping[str, Path]) -> dict[str, int]:
        named = {delta.from_sha256 for delta in manifest.delta}
        if self._zstd is None and named:
            log.warning("whole files are fetched, not patches: zstd is missing; %s", install_advice("update"))
            return {}
        return {digest: path.stat().st_size for digest, path in here.items() if digest in named and path.is_file()}

    def _patch(self, file: Artifact | Golden, delta: Delta, base: Path, count: _ByteCount) -> bool:
        """Make a file from an old one and a patch; False: the patch cannot be used, for any reason."""
        try:
            want = self._fetch(delta.target, delta, count)
            try:
                self._apply(file, self._artifacts.path(want).read_bytes(), base)
            finally:
                self._artifacts.remove([want.digest])
        except (UpdateError, OSError, MemoryError) as error:
            if isinstance(error, DownloadError) and not isinstance(error, NotPublished):
                raise
            # A stick has no patches: whole files are as near.
            level = logging.DEBUG if isinstance(error, NotPublished) else logging.WARNING
            log.log(level, "%s cannot be used, so the whole file is fetched: %s", delta.target, error)
            count.add_to_total(file.length)
            return False
        return True

    def _apply(self, file: Artifact | Golden, patch: bytes, base: Path) -> None:
        assert self._zstd is not None
        with base.open("rb") as source:
            old = source.read(MAX_PATCHED_BYTES)
        self._artifacts.adopt(described_file(file), apply_patch(self._zstd, old, patch, file.length))

    def _fetch(self, path: str, file: Artifact | Golden | Delta, count: _ByteCount) -> ExpectedFile:
        """Fetch a target into the store, if its team signs the length and hash in the manifest."""
        signed = self._repository.client.look_up(path)
        if signed is None:
            raise TrustError(f"{path}: the manifest names it, and no team that may speak of it signs it")
        want, said = signed.expected, described_file(file)
        if (want.length, want.hashes.get("sha256")) != (said.length, said.digest):
            raise TrustError(f"{path}: its team signs {want}, its manifest says {said}; both must be the same")
        self._repository.fetch(signed, self._pacer.start(), count)
        count.finish(want.length)
        return want


# ---- private --------------------------------------------------------------------------------------------------------


class _ByteCount:
    """The bytes of finished files, and of all files. Thread: one owner."""

    def __init__(self, total: int, progress: ByteProgress | None) -> None:
        self._done = 0
        self._total = total
        self._progress = progress

    def show_bytes(self, done_bytes: int, _: int) -> None:
        if self._progress is not None:
            self._progress.show_bytes(self._done + done_bytes, self._total)

    def finish(self, nbytes: int) -> None:
        self._done += nbytes
        self.show_bytes(0, 0)

    def add_to_total(self, nbytes: int) -> None:
        self._total += nbytes
