"""Patches from the files of the last releases to the new ones, so that devices fetch the changed part only.

Owns: which patches are made, and how: zstd with the old file as a prefix and long-distance matching; a model whose last
16 % changed needs 15 % of its bytes. A patch is made only where it saves enough, and tried before it is published.
Devices check the hash of the patched file; the whole file is always published too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from edge_runtime.errors import PublishError
from edge_runtime.extras import install_advice
from edge_runtime.publish.assignments import read_manifest
from edge_runtime.publish.folder import RepositoryFolder
from edge_runtime.publish.intake import StagedFile
from edge_runtime.publish.repository import Repository
from edge_runtime.updates.manifest import PATCH_ALGORITHM, Delta
from edge_runtime.updates.patch import MAX_PATCHED_BYTES, apply_patch, find_zstd, window_log
from edge_runtime.updates.release_paths import ReleasePath

LAST_RELEASES = 3
"""A device that was off for longer fetches the whole file."""

MAX_SHARE = 0.6
"""Of the whole file: a larger patch costs a device more memory and work than it saves."""

MIN_FILE_BYTES = 16 << 10
"""Below, one more request costs as much as it saves."""

_LEVEL = 3
_ID_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Patch:
    """A patch, and its entry in the manifest."""

    delta: Delta
    data: bytes


def make_patches(
    repository: Repository, release: ReleasePath, files: tuple[StagedFile, ...], last: int = LAST_RELEASES
) -> Iterator[Patch]:
    """Yield patches to a release's files from those of the same name in the `last` releases before it, newest first.

    Raises PublishError: an old file is not the signed one, or a patch does not give the new file.
    """
    before = [each for each in repository.catalog.releases() if each[0].model == release.model]
    before.sort(key=lambda each: -each[0].counter)
    seen: set[tuple[str, str]] = set()
    for old_release, target in before[:last]:
        for artifact in read_manifest(repository, old_release, target).artifacts:
            name = artifact.path.rpartition("/")[2]
            new = next((file for file in files if file.published_name == name and file.sha256 != artifact.sha256), None)
            if new is None or (artifact.sha256, new.sha256) in seen:
                continue
            seen.add((artifact.sha256, new.sha256))
            sizes = (artifact.length, new.length)
            if max(sizes) <= MAX_PATCHED_BYTES and min(sizes) >= MIN_FILE_BYTES:
                old_data = _read_blob(repository.folder, artifact.path, artifact.sha256)
                patch = _patch(release, artifact.sha256, new, old_data, new.path.read_bytes())
                if patch is not None:
                    yield patch


def compress_patch(zstd: ModuleType, old: bytes, new: bytes) -> bytes:
    """Return the patch from `old` to `new`. zstd: from `find_zstd`."""
    options = {
        zstd.CompressionParameter.compression_level: _LEVEL,
        zstd.CompressionParameter.window_log: window_log(len(old), len(new)),
        zstd.CompressionParameter.enable_long_distance_matching: 1,
        zstd.CompressionParameter.checksum_flag: 0,
    }
    patch: bytes = zstd.compress(new, options=options, zstd_dict=zstd.ZstdDict(old, is_raw=True).as_prefix)
    return patch


def _patch(release: ReleasePath, old_hash: str, new: StagedFile, old_data: bytes, new_data: bytes) -> Patch | None:
    zstd = find_zstd()
    if zstd is None:
        raise PublishError(f"zstd is not installed; {install_advice('publish')}; or give --patches 0")
    data = compress_patch(zstd, old_data, new_data)
    if len(data) > MAX_SHARE * new.length:
        return None
    if b"".join(apply_patch(zstd, old_data, data, new.length)) != new_data:
        raise PublishError(f"{new.name}: the patch from {old_hash} does not give it; publish with --patches 0")
    path = release.file(f"{new.sha256[:_ID_DIGITS]}-from-{old_hash[:_ID_DIGITS]}.patch")
    digest = hashlib.sha256(data).hexdigest()
    return Patch(Delta(old_hash, new.sha256, path, digest, PATCH_ALGORITHM, len(data)), data)


def _read_blob(folder: RepositoryFolder, path: str, digest: str) -> bytes:
    parent, _, name = path.rpartition("/")
    place = folder.targets / parent / f"{digest}.{name}"
    try:
        data = place.read_bytes()
    except OSError as error:
        raise PublishError(f"{place}: {error.strerror}; bring it back from a copy, or give --patches 0") from error
    if hashlib.sha256(data).hexdigest() != digest:
        raise PublishError(f"{place}: was changed after it was signed; bring it back from a copy, or give --patches 0")
    return data
