"""What each action of `repo` does: open the repository, make the change, carry it out, say what was done."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from edge_runtime.cli.arguments import UsageError
from edge_runtime.cli.repo_signing import carry_out, passphrases
from edge_runtime.cli.repo_status import print_status
from edge_runtime.cli.screen import Screen
from edge_runtime.publish.catalog import TOP_LEVEL
from edge_runtime.publish.change import Change
from edge_runtime.publish.delegations import add_group, add_team
from edge_runtime.publish.key_ring import NewKeys
from edge_runtime.publish.passphrases import Passphrases
from edge_runtime.publish.repository import Days, Founding, Repository, found_repository, open_repository
from edge_runtime.publish.rotation import refresh, revoke, rotate


def _init(arguments: argparse.Namespace, screen: Screen) -> None:
    path = Path(arguments.repo)
    keys: dict[str, NewKeys] = {}
    for role in TOP_LEVEL:
        uris = tuple(getattr(arguments, f"{role}_key"))
        count = getattr(arguments, f"{role}_keys", 1)
        keys[role] = NewKeys(count, uris, is_online=role in ("snapshot", "timestamp"))
    thresholds = {"root": arguments.root_threshold, "targets": arguments.targets_threshold}
    founding = Founding(keys, thresholds, _days(arguments.days))
    with found_repository(path, founding, passphrases(arguments, screen)) as change:
        done = carry_out(change, arguments, screen)
    root = path / "metadata" / "1.root.json"
    _say(
        screen, {**done, "root": str(root)}, f"Made {path}. Devices need {root}; keep copies of {path / 'keys'} apart."
    )


def _add_team(arguments: argparse.Namespace, screen: Screen) -> None:
    def change(repository: Repository) -> Change:
        return add_team(repository, arguments.team, _new_keys(arguments), arguments.threshold or 1)

    _change(arguments, screen, change)


def _add_group(arguments: argparse.Namespace, screen: Screen) -> None:
    def change(repository: Repository) -> Change:
        return add_group(repository, arguments.group, _new_keys(arguments), arguments.threshold or 1)

    _change(arguments, screen, change)


def _refresh(arguments: argparse.Namespace, screen: Screen) -> None:
    _change(arguments, screen, lambda repository: refresh(repository, arguments.roles))


def _rotate(arguments: argparse.Namespace, screen: Screen) -> None:
    has_said = arguments.key or arguments.online or arguments.keys
    keys = _new_keys(arguments) if has_said else None
    _change(arguments, screen, lambda repository: rotate(repository, arguments.role, keys, arguments.threshold))


def _revoke(arguments: argparse.Namespace, screen: Screen) -> None:
    keys = NewKeys(1, tuple(arguments.key), arguments.online) if arguments.key or arguments.online else None
    _change(arguments, screen, lambda repository: revoke(repository, arguments.key_name, keys))


def _status(arguments: argparse.Namespace, screen: Screen) -> None:
    with open_repository(Path(arguments.repo), Passphrases()) as repository:
        print_status(repository, screen)


VERBS: dict[str, Callable[[argparse.Namespace, Screen], None]] = {
    "init": _init,
    "add-team": _add_team,
    "add-group": _add_group,
    "refresh": _refresh,
    "rotate": _rotate,
    "revoke": _revoke,
    "status": _status,
}
"""By the names of `repo.ACTIONS`."""


@contextmanager
def _opened(arguments: argparse.Namespace, screen: Screen) -> Iterator[Repository]:
    with open_repository(Path(arguments.repo), passphrases(arguments, screen)) as repository:
        yield repository


def _change(arguments: argparse.Namespace, screen: Screen, make: Callable[[Repository], Change]) -> None:
    with _opened(arguments, screen) as repository:
        done = carry_out(make(repository), arguments, screen)
    _say(screen, done, f"Done: {done['done']}.")


def _say(screen: Screen, result: dict[str, Any], text: str) -> None:
    if screen.wants_json:
        screen.json(result)
    else:
        screen.line(text)


def _new_keys(arguments: argparse.Namespace) -> NewKeys:
    return NewKeys(arguments.keys or arguments.threshold or 1, tuple(arguments.key), arguments.online)


def _days(said: list[str]) -> Days:
    days = asdict(Days())
    for text in said:
        role, _, count = text.partition("=")
        if role not in days or not count.isdigit() or not 1 <= int(count) <= 3650:
            raise UsageError(f"--days {text}: wanted ROLE=N, ROLE one of {', '.join(days)}, N from 1 to 3650")
        days[role] = int(count)
    return Days(**days)
