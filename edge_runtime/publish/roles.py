"""Roles and their keys: new teams and groups, other keys for a role, and new signatures before the old ones expire.

Owns: which paths a team or a group may sign. Delegations are signed with the offline targets keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from tuf.api.metadata import DelegatedRole, Delegations, Key, Targets

from edge_runtime.errors import PublishError
from edge_runtime.publish.catalog import TOP_LEVEL
from edge_runtime.publish.change import Change, Draft
from edge_runtime.publish.key_ring import NewKeys
from edge_runtime.publish.repository import Repository, check_threshold
from edge_runtime.updates.manifest import encode_assignments
from edge_runtime.updates.release_paths import (
    OWNER_RULE,
    assignments_path,
    group_role,
    is_owner_name,
    team_pattern,
    team_role,
)


def add_team(repository: Repository, team: str, keys: NewKeys, threshold: int = 1) -> Change:
    """Add a team, which publishes below `team/<team>/` with its own keys. Raises PublishError: a bad or taken name."""
    return delegate(repository, "team", team, team_role(team), team_pattern(team), keys, threshold).finish(
        f"add the team {team}"
    )


def add_group(repository: Repository, group: str, keys: NewKeys, threshold: int = 1) -> Change:
    """Add a group of devices, with no assignments. Raises PublishError as `add_team`."""
    role, path = group_role(group), assignments_path(group)
    draft = delegate(repository, "group", group, role, path, keys, threshold)
    draft.add_data(role, path, encode_assignments(()))
    return draft.finish(f"add the group {group}")


def delegate(  # noqa: PLR0917
    repository: Repository, kind: str, name: str, role: str, pattern: str, keys: NewKeys, threshold: int
) -> Draft:
    """Begin a change that lets a new role sign the paths of a pattern. kind, name: for messages.

    Raises PublishError: a bad or taken name.
    """
    if not is_owner_name(name):
        raise PublishError(f"{name[:80]!r} cannot be the name of a {kind}; wanted {OWNER_RULE}")
    if role in repository.catalog.delegated:
        raise PublishError(f"the {kind} {name} is there already; `repo rotate {role}` gives it other keys")
    draft = Draft(repository)
    targets = draft.catalog.targets
    if targets.delegations is None:
        targets.delegations = Delegations({}, {})
    assert targets.delegations.roles is not None
    # Terminating: no other role may sign the paths of this one.
    targets.delegations.roles[role] = DelegatedRole(role, [], threshold, True, [pattern])
    found = repository.keys.add(role, keys)
    check_threshold(role, len(found), threshold)
    for key in found:
        targets.add_key(key, role)
    draft.catalog.delegated[role] = Targets(expires=repository.now_utc)
    draft.touch(role, "targets")
    return draft


def rotate(repository: Repository, role: str, keys: NewKeys | None = None, threshold: int | None = None) -> Change:
    """Replace all keys of a role. keys: None makes as many as there were, of the same kind.

    Raises PublishError: no such role, or too few of the old keys are within reach where those must sign.
    """
    _check_role(repository, role)
    old = repository.catalog.role(role)
    wanted = keys or NewKeys(len(old.keyids), is_online=_are_online(repository, old.keyids))
    found = repository.keys.add(role, wanted)
    draft = Draft(repository)
    for keyid in list(old.keyids):
        draft.catalog.delegator(role).revoke_key(keyid, role)
    _add_keys(draft, role, found)
    draft.catalog.role(role).threshold = old.threshold if threshold is None else threshold
    check_threshold(role, len(found), draft.catalog.role(role).threshold)
    return draft.finish(f"give {role} new keys: {', '.join(repository.keys.name(key.keyid) for key in found)}")


def revoke(repository: Repository, key: str, replacement: NewKeys | None = None) -> Change:
    """Replace a key (its name, or the beginning of its id) in every role that has it.

    Raises PublishError: no role has it, or too few other keys of its role are within reach.
    """
    catalog, ring = repository.catalog, repository.keys
    keyid = _find_key(repository, key)
    name = ring.name(keyid)
    draft = Draft(repository)
    roles = [role for role in catalog.roles if keyid in catalog.role(role).keyids]
    for role in roles:
        found = ring.add(role, replacement or NewKeys(is_online=ring.is_online(keyid)))
        draft.catalog.delegator(role).revoke_key(keyid, role)
        _add_keys(draft, role, found)
    return draft.finish(f"take {name} out of {', '.join(roles)}")


def refresh(repository: Repository, roles: Sequence[str] = ()) -> Change:
    """Sign the timestamp again, the snapshot when half its time is over, and the named roles, unchanged."""
    for role in roles:
        _check_role(repository, role)
    draft = Draft(repository)
    draft.touch("timestamp", *roles)
    left = repository.catalog.snapshot.expires - repository.now_utc
    if left.days < repository.days.snapshot / 2:
        draft.touch("snapshot")
    return draft.finish("sign anew what expires")


def _add_keys(draft: Draft, role: str, keys: Sequence[Key]) -> None:
    for key in keys:
        draft.catalog.delegator(role).add_key(key, role)
    # The delegator names the keys of a role, and the role's metadata must have the signatures of its new keys.
    draft.touch(role, "root" if role in TOP_LEVEL else "targets")


def _check_role(repository: Repository, role: str) -> None:
    if role not in repository.catalog.roles:
        raise PublishError(f"there is no role {role[:80]!r}; wanted one of {', '.join(repository.catalog.roles)}")


def _find_key(repository: Repository, key: str) -> str:
    catalog = repository.catalog
    trusted = {keyid for role in catalog.roles for keyid in catalog.role(role).keyids}
    named = [keyid for keyid in trusted if repository.keys.name(keyid) == key]
    found = named or [keyid for keyid in trusted if len(key) >= 4 and keyid.startswith(key)]
    if len(found) != 1:
        names = ", ".join(sorted(repository.keys.name(keyid) for keyid in trusted))
        raise PublishError(f"{key[:80]!r} is {len(found)} of the keys that roles trust; wanted one of {names}")
    return found[0]


def _are_online(repository: Repository, keyids: Sequence[str]) -> bool:
    return all(repository.keys.is_online(keyid) for keyid in keyids)
