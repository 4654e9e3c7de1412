"""Cleaning a repository: old releases leave their team's role, and files that no metadata names are deleted.

A device in the middle of a check may miss a file then; its check fails, and the next one sees the new state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.errors import PublishError
from edge_runtime.publish.assignments import read_assignments
from edge_runtime.publish.change import Change, Draft
from edge_runtime.publish.repository import Repository
from edge_runtime.updates.release_paths import ReleasePath, parse_release_file, team_role


@dataclass(frozen=True, slots=True)
class Swept:
    """The deleted files, and their bytes."""

    files: tuple[Path, ...]
    nbytes: int


def withdraw(repository: Repository, keep: int) -> Change | None:
    """Draft the removal of releases that no group runs, but the newest `keep` of each model. None: there are none.

    keep is 1 or more: publishers know the next counter by the newest release.
    """
    if keep < 1:
        raise PublishError(f"keep is {keep}; wanted 1 or more: counters go on from the newest release")
    old = set(_old_releases(repository, keep))
    if not old:
        return None
    draft = Draft(repository)
    for team in {release.team for release in old}:
        role = team_role(team)
        targets = draft.catalog.delegated[role].targets
        for path in [path for path in targets if parse_release_file(path)[0] in old]:
            del targets[path]
        draft.touch(role)
    names = ", ".join(sorted(release.folder.removeprefix("team/") for release in old))
    return draft.finish(f"take out the releases {names}")


def sweep(repository: Repository) -> Swept:
    """Delete blobs that no metadata names, and all but the newest metadata. Roots stay for ever."""
    folder = repository.folder
    named = {folder.targets / blob for blob in repository.catalog.blobs()}
    named |= {folder.metadata / name for name in _current_metadata(repository)}
    deleted: list[Path] = []
    nbytes = 0
    for path in [*_files_below(folder.targets), *_files_below(folder.metadata)]:
        if path not in named and not path.name.endswith(".root.json"):
            nbytes += path.lstat().st_size
            path.unlink()
            deleted.append(path.relative_to(folder.path))
    _remove_empty(folder.targets)
    return Swept(tuple(deleted), nbytes)


def _old_releases(repository: Repository, keep: int) -> Iterator[ReleasePath]:
    used = {
        each.release for group in repository.catalog.owners("fleet") for each in read_assignments(repository, group)
    }
    by_model: dict[tuple[str, str], list[ReleasePath]] = defaultdict(list)
    for release, _ in repository.catalog.releases():
        by_model[release.team, release.model].append(release)
    for releases in by_model.values():
        releases.sort(key=lambda release: -release.counter)
        yield from (release for release in releases[keep:] if release not in used)


def _current_metadata(repository: Repository) -> Iterator[str]:
    catalog = repository.catalog
    yield "timestamp.json"
    for role in catalog.roles:
        if role not in ("root", "timestamp"):
            yield f"{catalog.signed(role).version}.{role}.json"


def _files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())


def _remove_empty(folder: Path) -> None:
    below = [path for path in folder.rglob("*") if path.is_dir()]
    for path in sorted(below, key=lambda path: -len(path.parts)):
        if not any(path.iterdir()):
            path.rmdir()
