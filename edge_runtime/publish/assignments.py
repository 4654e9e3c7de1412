"""The assignments of a group of devices: releases by model, each for a share of the devices.

Owns: `fleet/<group>/assign.json`. A model has at most one release for all devices and one more for a share of them. A
device never goes back to a lower counter, so a group is assigned none below its highest so far; to go back on purpose,
publish the old bytes as a new release.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from tuf.api.metadata import TargetFile

from edge_runtime.errors import PublishError
from edge_runtime.publish.change import Change, Draft
from edge_runtime.publish.repository import Repository
from edge_runtime.updates.manifest import (
    Assignment,
    Manifest,
    decode_assignments,
    decode_manifest,
    encode_assignments,
)
from edge_runtime.updates.release_paths import ReleasePath, assignments_path, group_role

HIGHEST_FIELD = "highest_counters"
"""Custom field of the target, for publishers: the highest counter of each model that this group was ever assigned."""

EVERYONE = 100.0


def assign(repository: Repository, group: str, model: str, version: int, percent: float = EVERYONE) -> Change:
    """Assign the newest release of a version to a group. model: `[team/]model`.

    percent under 100: the release for all devices stays beside it. Raises PublishError: no such group or release, or
    the group's devices would refuse it.
    """
    if not 0 < percent <= EVERYONE:
        raise PublishError(f"percent is {percent:g}; wanted above 0, at most 100 (`repo unassign` takes a model away)")
    release, target = _newest_release(repository, model, version)
    current = read_assignments(repository, group)
    highest = _highest(repository, group)
    given = highest.get(release.model, 0)
    if release.counter < given:
        raise PublishError(
            f"{release.model} version {version} is release {release.counter}, and {group} was given {given} before: "
            "devices do not go back; publish those bytes again, as a new release, and assign it"
        )
    new = Assignment(release.model, release.manifest, target.hashes["sha256"], percent)
    others = [each for each in current if each.model != release.model]
    same = [each for each in current if each.model == release.model and each.percent == EVERYONE]
    base = [] if percent == EVERYONE else [each for each in same if each.manifest_path != new.manifest_path]
    highest[release.model] = release.counter
    share = "" if percent == EVERYONE else f" to {percent:g} % of its devices"
    summary = f"give {group} {release.model} version {version} (release {release.counter}){share}"
    return _change(repository, group, [*others, *base, new], highest, summary)


def unassign(repository: Repository, group: str, model: str) -> Change:
    """Remove a model from a group. Raises PublishError: the group has none of that name."""
    current = read_assignments(repository, group)
    kept = [each for each in current if each.model != model]
    if len(kept) == len(current):
        names = ", ".join(sorted({each.model for each in current})) or "nothing"
        raise PublishError(f"{group} has no {model[:80]!r}; it has {names}")
    return _change(repository, group, kept, _highest(repository, group), f"take {model} away from {group}")


def read_assignments(repository: Repository, group: str) -> tuple[Assignment, ...]:
    """Return a group's assignments. Raises PublishError: no such group, or its file was changed."""
    path = assignments_path(group)
    return decode_assignments(read_target(repository, _assign_target(repository, group)), path)


def read_manifest(repository: Repository, release: ReleasePath, target: TargetFile) -> Manifest:
    """Return the manifest of a release. Raises PublishError: its file was changed or is gone."""
    return decode_manifest(read_target(repository, target), release.manifest)


def read_target(repository: Repository, target: TargetFile) -> bytes:
    """Return a small target's bytes. Raises PublishError: they are not the signed ones."""
    place = repository.folder.targets / target.get_prefixed_paths()[0]
    try:
        data = place.read_bytes()
    except OSError as error:
        raise PublishError(f"{place}: {error.strerror}; bring it back from a copy") from error
    if hashlib.sha256(data).hexdigest() != target.hashes["sha256"]:
        raise PublishError(f"{place}: was changed after it was signed; bring it back from a copy")
    return data


def _newest_release(repository: Repository, model: str, version: int) -> tuple[ReleasePath, TargetFile]:
    team, _, name = model.rpartition("/")
    found = [
        (release, target)
        for release, target in repository.catalog.releases()
        if release.model == name and team in ("", release.team)
    ]
    if not found:
        raise PublishError(_no_model(repository, model))
    versions: dict[int, tuple[ReleasePath, TargetFile]] = {}
    for release, target in sorted(found, key=lambda each: each[0].counter):
        versions[read_manifest(repository, release, target).version] = (release, target)
    if version not in versions:
        known = ", ".join(map(str, sorted(versions)))
        raise PublishError(f"{model[:80]!r} has no version {version}; published: {known}; `repo publish` adds one")
    return versions[version]


def _no_model(repository: Repository, model: str) -> str:
    releases = [release for release, _ in repository.catalog.releases()]
    names = sorted({f"{each.team}/{each.model}" if "/" in model else each.model for each in releases})
    teams = repository.catalog.owners("team")
    order = f"edge-runtime repo publish MODEL_DIR --team {teams[0] if len(teams) == 1 else 'TEAM'}"
    return f"no model {model[:80]!r} is published; known: {', '.join(names) or 'none'}; `{order}` publishes one"


def _assign_target(repository: Repository, group: str) -> TargetFile:
    role = group_role(group)
    if role not in repository.catalog.delegated:
        known = ", ".join(repository.catalog.owners("fleet")) or "none"
        raise PublishError(f"there is no group {group[:80]!r}; known: {known}; `repo add-group` makes one")
    target = repository.catalog.target(role, assignments_path(group))
    if target is None:
        raise PublishError(f"{role}: signs no {assignments_path(group)}; bring the folder back from a copy")
    return target


def _highest(repository: Repository, group: str) -> dict[str, int]:
    custom = _assign_target(repository, group).custom or {}
    return dict(custom.get(HIGHEST_FIELD, {}))


def _change(
    repository: Repository, group: str, entries: Iterable[Assignment], highest: dict[str, int], summary: str
) -> Change:
    ordered = sorted(entries, key=lambda each: (each.model, -each.release.counter))
    draft = Draft(repository)
    data = encode_assignments(ordered)
    draft.add_data(group_role(group), assignments_path(group), data, {HIGHEST_FIELD: highest})
    return draft.finish(summary)
