"""Which of a model's versions are served. Pure: numbers in, numbers out; the folder and the live table are others'."""

from __future__ import annotations

from collections.abc import Collection

from edge_runtime.config.settings import Versions

DEFAULT_LATEST = 1
"""A device has memory for one version of a model; a new one replaces it (DESIGN 6)."""


def select_versions(available: Collection[int], policy: Versions) -> tuple[int, ...]:
    """Choose from the versions that are there; newest first, so that the one most asked for is loaded first.

    `specific` names exactly which (those absent are left out: see `missing_versions`), else `all` takes everything,
    else the newest `latest` are taken. Empty when nothing is there or nothing named is there.
    """
    newest_first = sorted(set(available), reverse=True)
    if policy.specific:
        wanted = set(policy.specific)
        return tuple(number for number in newest_first if number in wanted)
    if policy.all:
        return tuple(newest_first)
    return tuple(newest_first[: policy.latest or DEFAULT_LATEST])


def missing_versions(available: Collection[int], policy: Versions) -> tuple[int, ...]:
    """Versions that `specific` names and that are not there, newest first: to be reported as status."""
    return tuple(sorted(set(policy.specific) - set(available), reverse=True))
