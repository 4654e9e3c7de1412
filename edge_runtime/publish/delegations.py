"""New teams and groups: who may sign which paths (DESIGN 8). Signed with the offline targets keys."""

from __future__ import annotations

from tuf.api.metadata import DelegatedRole, Delegations, Targets

from edge_runtime.errors import PublishError
from edge_runtime.publish.change import Change, Draft
from edge_runtime.publish.key_ring import NewKeys
from edge_runtime.publish.repository import Repository, check_threshold
from edge_runtime.repository.manifest import encode_assignments
from edge_runtime.repository.release_paths import (
    OWNER_RULE,
    assignments_path,
    group_role,
    is_owner_name,
    team_pattern,
    team_role,
)


def add_team(repository: Repository, team: str, keys: NewKeys, threshold: int = 1) -> Change:
    """Let a team publish below `team/<team>/`, with keys of its own. Raises PublishError: a bad name, or taken."""
    return _delegate(repository, "team", team, team_role(team), team_pattern(team), keys, threshold).finish(
        f"add the team {team}"
    )


def add_group(repository: Repository, group: str, keys: NewKeys, threshold: int = 1) -> Change:
    """A group of devices, which runs nothing until something is assigned. Raises PublishError as `add_team`."""
    role, path = group_role(group), assignments_path(group)
    draft = _delegate(repository, "group", group, role, path, keys, threshold)
    draft.add_data(role, path, encode_assignments(()))
    return draft.finish(f"add the group {group}")


def _delegate(  # noqa: PLR0917
    repository: Repository, kind: str, name: str, role: str, pattern: str, keys: NewKeys, threshold: int
) -> Draft:
    if not is_owner_name(name):
        raise PublishError(f"{name[:80]!r} cannot be the name of a {kind}; wanted {OWNER_RULE}")
    if role in repository.catalog.delegated:
        raise PublishError(f"the {kind} {name} is there already; `repo rotate {role}` gives it other keys")
    draft = Draft(repository)
    targets = draft.catalog.targets
    if targets.delegations is None:
        targets.delegations = Delegations({}, {})
    assert targets.delegations.roles is not None
    # Terminating: what this role does not say of its own paths, nobody says.
    targets.delegations.roles[role] = DelegatedRole(role, [], threshold, True, [pattern])
    found = repository.keys.add(role, keys)
    check_threshold(role, len(found), threshold)
    for key in found:
        targets.add_key(key, role)
    draft.catalog.delegated[role] = Targets(expires=repository.now_utc)
    draft.touch(role, "targets")
    return draft
