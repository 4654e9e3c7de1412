"""`repo status` as a person reads it, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from edge_runtime.cli.screen import Screen, size_text
from edge_runtime.publish.repository import Repository
from edge_runtime.publish.survey import RoleState, Survey, survey


def print_status(repository: Repository, screen: Screen) -> None:
    """Everything about a repository at one look."""
    found = survey(repository)
    if screen.wants_json:
        screen.json(_as_json(found))
    else:
        _print(found, screen)


def _as_json(found: Survey) -> dict[str, Any]:
    value = asdict(found)
    for role in value["roles"]:
        role["expires"] = f"{role.pop('expires_utc'):%Y-%m-%dT%H:%M:%SZ}"
    return value


def _print(found: Survey, screen: Screen) -> None:
    screen.heading("Roles")
    screen.table(("role", "version", "good until", "signs", "keys"), [_role_row(role) for role in found.roles])
    screen.line()
    screen.heading("Releases")
    columns = ("team", "model", "version", "release", "size", "groups")
    screen.table(
        columns,
        [
            [each.team, each.model, str(each.version), str(each.release_counter), size_text(each.nbytes),
             ", ".join(each.groups)]
            for each in found.releases
        ],
        right=("version", "release", "size"),
    )  # fmt: skip
    screen.line()
    screen.heading("Groups")
    rows = [
        [each.group, each.model, str(each.release_counter), f"{each.percent:g} %"] for each in found.assignments
    ] + [
        [group, "nothing", "", ""] for group in found.groups if group not in {each.group for each in found.assignments}
    ]
    screen.table(("group", "runs", "release", "devices"), rows, right=("release",))
    if found.advice:
        screen.line()
        screen.heading("To do")
        for sentence in found.advice:
            screen.line(f"  {sentence}")


def _role_row(role: RoleState) -> list[str]:
    keys = ", ".join(key.name if key.can_sign else f"{key.name} (not here)" for key in role.keys)
    until = f"{role.expires_utc:%Y-%m-%d %H:%M}" + (" (expired)" if role.is_expired else "")
    return [role.role, str(role.version), until, f"{role.threshold} of {len(role.keys)}", keys]
