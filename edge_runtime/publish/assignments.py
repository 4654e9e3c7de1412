"""The assignments of a group of devices: releases by model, each for a share of the devices.

Owns: `fleet/<group>/assign.json`. A model has at most one release for all devices and one more for a share of them. A
device does not go to a lower counter, so a group is assigned none below its highest so far, but to go back on purpose.

Going back: a decision
Context: an operator assigned a wrong release. To publish the old bytes as a new release needs the team's key, which a
night shift does not have; and a device takes no lower counter, so that a thief cannot bring an old fault back.
Options: (a) a new release, by the team; (b) an entry with the old counter, by the group; (c) lower metadata versions.
Decision: (b). The group signs `going_back_from`, the highest counter that it goes back from. A device follows only if
that covers its own highest counter and it once committed the very manifest itself, by its hash. The versions of TUF's
roles still only rise, so an old entry cannot be replayed, and the device's highest counter stays: the release that was
left may be assigned again. A hash that the device refused stays refused.
Cost: who has the group's key may bring each device back to what it ran before, its faults included; never to what it
did not run. Older daemons ignore the field and say that the release is older.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class AssignableRelease:
    """A signed release that may be assigned."""

    path: ReleasePath
    version: int
    manifest_sha256: str

    def for_share(self, percent: float, going_back_from: int = 0) -> Assignment:
        """Return its assignment to a share of the devices."""
        path = self.path
        return Assignment(path.model, path.manifest, self.manifest_sha256, percent, going_back_from)

    def __str__(self) -> str:
        return f"{self.path.model} version {self.version} (release {self.path.counter})"


def assign(repository: Repository, group: str, model: str, version: int, percent: float = EVERYONE) -> Change:
    """Assign the newest release of a version to a group. model: `[team/]model`.

    percent under 100: the release for all devices stays beside it. Raises PublishError: no such group or release, or
    the group's devices would refuse it.
    """
    return assign_release(repository, group, find_release(repository, model, version), percent)


def assign_release(repository: Repository, group: str, release: AssignableRelease, percent: float) -> Change:
    """Assign a release to a share of a group, or to all of it. Raises PublishError as `assign`."""
    if not 0 < percent <= EVERYONE:
        raise PublishError(f"percent is {percent:g}; wanted above 0, at most 100 (`repo unassign` takes a model away)")
    model, counter = release.path.model, release.path.counter
    current, highest = read_assignments(repository, group), _highest(repository, group)
    given = highest.get(model, 0)
    if counter < given:
        raise PublishError(
            f"{model} version {release.version} is release {counter}, and {group} was given {given} before: devices do "
            "not go back unless their group asks for it; have those that ran it before go back with --going-back, or "
            "publish those bytes again, as a new release, and assign it"
        )
    new = release.for_share(percent)
    others = [each for each in current if each.model != model]
    same = [each for each in current if each.model == model and each.percent == EVERYONE]
    base = [] if percent == EVERYONE else [each for each in same if each.manifest_path != new.manifest_path]
    share = "" if percent == EVERYONE else f" to {percent:g} % of its devices"
    return _change(
        repository, group, [*others, *base, new], {**highest, model: counter}, f"give {group} {release}{share}"
    )


def go_back(repository: Repository, group: str, model: str, version: int) -> Change:
    """Have the devices of a group go back to a version that they ran before; others install it. model: `[team/]model`.

    Raises PublishError: no such group or release, or the group was never given a later one.
    """
    release = find_release(repository, model, version)
    given = _highest(repository, group).get(release.path.model, 0)
    if release.path.counter >= given:
        raise PublishError(
            f"{release} is not older than what {group} was given, release {given}: assign it without --going-back"
        )
    entries = [release.for_share(EVERYONE, going_back_from=given)]
    return replace_entries(repository, group, release.path.model, entries, f"have {group} go back to {release}")


def replace_entries(
    repository: Repository, group: str, model: str, entries: Sequence[Assignment], summary: str
) -> Change:
    """Give a group these entries of a model, and no others of it. Raises PublishError: no such group."""
    others = [each for each in read_assignments(repository, group) if each.model != model]
    return _change(repository, group, [*others, *entries], _highest(repository, group), summary)


def unassign(repository: Repository, group: str, model: str) -> Change:
    """Remove a model from a group. Raises PublishError: the group has none of that name."""
    current = read_assignments(repository, group)
    if all(each.model != model for each in current):
        names = ", ".join(sorted({each.model for each in current})) or "nothing"
        raise PublishError(f"{group} has no {model[:80]!r}; it has {names}")
    return replace_entries(repository, group, model, (), f"take {model} away from {group}")


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


def find_release(repository: Repository, model: str, version: int) -> AssignableRelease:
    """Return the newest release of a version. model: `[team/]model`. Raises PublishError: there is none."""
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
    release, target = versions[version]
    return AssignableRelease(release, version, target.hashes["sha256"])


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
