"""A folder with everything that a device of one group needs, and nothing else: for a USB stick or a server of its own.

It has the repository's own layout: a device reads and verifies it as any repository.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.durable import Disk, growing, make_folder
from edge_runtime.errors import PublishError
from edge_runtime.publish.assignments import read_assignments, read_manifest
from edge_runtime.publish.repository import Repository
from edge_runtime.updates.release_paths import (
    GROUPS_FILE,
    ReleasePath,
    assignments_path,
    configuration_role,
    group_role,
    team_role,
)

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Bundled:
    """The written files, their bytes, and the releases among them."""

    files: int
    nbytes: int
    releases: tuple[ReleasePath, ...]


def write_bundle(repository: Repository, group: str, out: Path) -> Bundled:
    """Copy a group's files into an empty or new folder, the timestamp last.

    Raises PublishError: no such group, `out` is not empty, or a file is not the signed one. StorageFailed.
    """
    releases = tuple(dict.fromkeys(each.release for each in read_assignments(repository, group)))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PublishError(f"{out}: holds something already; wanted a new or empty folder")
    folder, disk = repository.folder, repository.folder.disk
    make_folder(out, disk=disk)
    count = nbytes = 0
    for name, digest in _targets(repository, group, releases):
        nbytes += _copy(folder.targets / name, out / "targets" / name, disk, digest)
        count += 1
    for name in _metadata(repository, group, releases):
        nbytes += _copy(folder.metadata / name, out / "metadata" / name, disk)
        count += 1
    return Bundled(count, nbytes, releases)


def _targets(repository: Repository, group: str, releases: tuple[ReleasePath, ...]) -> Iterator[tuple[str, str]]:
    catalog = repository.catalog
    wanted = {path for release in releases for path in _files(repository, release)}
    moved = catalog.targets.targets.get(GROUPS_FILE)
    if moved is not None:
        yield moved.get_prefixed_paths()[0], moved.hashes["sha256"]
    for role in _configuring(repository, group):
        for target in catalog.delegated[role].targets.values():
            yield target.get_prefixed_paths()[0], target.hashes["sha256"]
    for role in (group_role(group), *sorted({team_role(release.team) for release in releases})):
        for path, target in catalog.delegated[role].targets.items():
            if path == assignments_path(group) or (role != group_role(group) and path in wanted):
                yield target.get_prefixed_paths()[0], target.hashes["sha256"]


def _configuring(repository: Repository, group: str) -> tuple[str, ...]:
    """Return the role that configures the group, if there is one."""
    role = configuration_role(group)
    return (role,) if role in repository.catalog.delegated else ()


def _files(repository: Repository, release: ReleasePath) -> Iterator[str]:
    """Yield the paths of a release's files, without its patches: the whole files are on the same stick."""
    target = repository.catalog.target(team_role(release.team), release.manifest)
    if target is None:
        raise PublishError(f"{release.manifest}: is assigned, and no team signs it; assign another release")
    manifest = read_manifest(repository, release, target)
    yield from (release.manifest, manifest.golden.path, *(artifact.path for artifact in manifest.artifacts))


def _metadata(repository: Repository, group: str, releases: tuple[ReleasePath, ...]) -> Iterator[str]:
    catalog = repository.catalog
    yield from (f"{version}.root.json" for version in range(1, catalog.root.version + 1))
    teams = sorted({team_role(release.team) for release in releases})
    for role in (*teams, group_role(group), *_configuring(repository, group), "targets", "snapshot"):
        yield f"{catalog.signed(role).version}.{role}.json"
    yield "timestamp.json"


def _copy(source: Path, place: Path, disk: Disk, digest: str | None = None) -> int:
    """Copy a file, check its hash where one is given, and return its length."""
    hashed, length = hashlib.sha256(), 0
    try:
        with source.open("rb") as file, growing(place.with_name(f"{place.name}.part"), keep=False, disk=disk) as part:
            while piece := file.read(_PIECE_BYTES):
                hashed.update(piece)
                length += len(piece)
                part.write(piece)
            if digest is not None and hashed.hexdigest() != digest:
                raise PublishError(f"{source}: was changed after it was signed; bring it back from a copy")
            part.commit(place)
    except OSError as error:
        raise PublishError(f"{source}: {error.strerror}; bring it back from a copy") from error
    return length
