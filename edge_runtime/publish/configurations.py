"""The configuration of a group of devices, signed; and which device is in which group.

Owns: `config/<group>/overlay.toml`, which a role of its own signs, and `groups.json`, which targets signs. What is
signed was checked by the rules of devices (updates/overlay.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from edge_runtime.config.loading import read_settings
from edge_runtime.errors import ConfigError, PublishError
from edge_runtime.publish.assignments import read_target
from edge_runtime.publish.change import Change, Draft
from edge_runtime.publish.key_ring import NewKeys
from edge_runtime.publish.repository import Repository
from edge_runtime.publish.roles import delegate
from edge_runtime.updates.groups import decode_groups, encode_groups
from edge_runtime.updates.overlay import MAX_OVERLAY_BYTES, read_overlay
from edge_runtime.updates.release_paths import GROUPS_FILE, configuration_path, configuration_role

DEVICE_RULE = "1 to 64 of letters, digits, '_' and '-'"

_DEVICE = re.compile(r"[A-Za-z0-9_-]{1,64}")


def add_configuration(repository: Repository, group: str, keys: NewKeys, threshold: int = 1) -> Change:
    """Let keys of their own sign a group's configuration, which says nothing yet.

    Raises PublishError: there is no such group, or it has such keys already.
    """
    _check_group(repository, group)
    role, path = configuration_role(group), configuration_path(group)
    draft = delegate(repository, "configuration of", group, role, path, keys, threshold)
    draft.add_data(role, path, b"")
    return draft.finish(f"let new keys configure the group {group}")


def configure(repository: Repository, group: str, file: Path) -> Change:
    """Sign a piece of `config.toml` for the devices of a group.

    Raises PublishError: the group has no keys for it, or the file says what a signed configuration may not.
    """
    role = configuration_role(group)
    if role not in repository.catalog.delegated:
        raise PublishError(
            f"nobody may configure {group[:80]!r}; `edge-runtime repo add-config {group[:80]}` makes the keys for it"
        )
    try:
        text = read_settings(file)
        read_overlay(text, str(file))
    except ConfigError as error:
        raise PublishError(error.message) from error
    data = text.encode()
    if len(data) > MAX_OVERLAY_BYTES:
        raise PublishError(f"{file}: has {len(data)} bytes; devices take {MAX_OVERLAY_BYTES}")
    draft = Draft(repository)
    draft.add_data(role, configuration_path(group), data)
    return draft.finish(f"configure the devices of {group} by {file}")


def move(repository: Repository, devices: Iterable[str], group: str | None) -> Change:
    """Put devices into a group, whatever their own configuration says; None: that counts again.

    Raises PublishError: there is no such group, or a name that no device has.
    """
    moved = list(dict.fromkeys(devices))
    for device in moved:
        if not _DEVICE.fullmatch(device):
            raise PublishError(f"{device[:80]!r} cannot be the id of a device; wanted {DEVICE_RULE}")
    found = read_groups(repository)
    if group is None:
        unknown = [device for device in moved if device not in found]
        if unknown:
            raise PublishError(f"{', '.join(unknown)[:200]}: in no group by `repo move`; nothing to take back")
        found = {device: of for device, of in found.items() if device not in moved}
        summary = f"leave the group of {_named(moved)} to the devices' own configuration"
    else:
        _check_group(repository, group)
        found |= dict.fromkeys(moved, group)
        summary = f"move {_named(moved)} to the group {group}"
    draft = Draft(repository)
    draft.add_data("targets", GROUPS_FILE, encode_groups(found))
    return draft.finish(summary)


def read_groups(repository: Repository) -> dict[str, str]:
    """Return the groups of the devices that were moved, by id. Raises PublishError: the file was changed."""
    target = repository.catalog.targets.targets.get(GROUPS_FILE)
    return {} if target is None else decode_groups(read_target(repository, target))


def _check_group(repository: Repository, group: str) -> None:
    known = repository.catalog.owners("fleet")
    if group not in known:
        raise PublishError(
            f"there is no group {group[:80]!r}; known: {', '.join(known) or 'none'}; `repo add-group` makes one"
        )


def _named(devices: list[str]) -> str:
    return ", ".join(devices) if len(devices) <= 5 else f"{len(devices)} devices"
