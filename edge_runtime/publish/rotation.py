"""Other keys for a role, one key out of every role, and new signatures before the old ones expire."""

from __future__ import annotations

from collections.abc import Sequence

from tuf.api.metadata import Key

from edge_runtime.errors import PublishError
from edge_runtime.publish.catalog import TOP_LEVEL
from edge_runtime.publish.change import Change, Draft
from edge_runtime.publish.key_ring import NewKeys
from edge_runtime.publish.repository import Repository, check_threshold


def rotate(repository: Repository, role: str, keys: NewKeys | None = None, threshold: int | None = None) -> Change:
    """Give a role new keys only. keys: None makes as many as there were, of the same kind.

    Raises PublishError: no such role, or too few of the old keys are within reach where the old ones must sign.
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
    """Take a key (its name, or the beginning of its id) out of every role, a new one taking its place in each.

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
    """Sign the timestamp anew, the snapshot when half its time is over, and the roles named, as they are."""
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
    # Who may sign a role is written in its delegator, and what the new keys vouch for has to carry their signatures.
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
