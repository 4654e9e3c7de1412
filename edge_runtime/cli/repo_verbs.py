"""What each action of `repo` does: open the repository, make the change, carry it out, say what was done."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from msgspec.structs import asdict

from edge_runtime.cli.arguments import UsageError
from edge_runtime.cli.repo_signing import carry_out, passphrases
from edge_runtime.cli.repo_status import print_status
from edge_runtime.cli.screen import Screen, size_text
from edge_runtime.errors import PublishError
from edge_runtime.publish.assignments import assign, unassign
from edge_runtime.publish.bundle import write_bundle
from edge_runtime.publish.catalog import TOP_LEVEL
from edge_runtime.publish.change import Change
from edge_runtime.publish.cleaning import sweep, withdraw
from edge_runtime.publish.delegations import add_group, add_team
from edge_runtime.publish.folder import RepositoryFolder
from edge_runtime.publish.key_ring import NewKeys
from edge_runtime.publish.passphrases import Passphrases
from edge_runtime.publish.patches import LAST_RELEASES
from edge_runtime.publish.releases import MIN_RUNTIME, ReleaseWish, prepare_release
from edge_runtime.publish.repository import Days, Founding, Repository, found_repository, open_repository
from edge_runtime.publish.rotation import refresh, revoke, rotate
from edge_runtime.publish.static_server import StaticServer
from edge_runtime.publish.trial import LIMIT_S
from edge_runtime.repository.golden import TOLERANCES
from edge_runtime.repository.manifest import Tolerance
from edge_runtime.repository.names import parse_version


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


def _publish(arguments: argparse.Namespace, screen: Screen) -> None:
    wish = ReleaseWish(
        arguments.team,
        Path(arguments.path),
        arguments.model,
        arguments.version,
        Path(arguments.golden) if arguments.golden else None,
        arguments.min_runtime or MIN_RUNTIME,
        tuple(arguments.profile),
        _tolerances(arguments.tolerance),
        arguments.limit_s or LIMIT_S,
        LAST_RELEASES if arguments.patches is None else arguments.patches,
        arguments.counter,
    )
    with _opened(arguments, screen) as repository:
        with screen.progress(f"trying {arguments.path}"):
            prepared = prepare_release(repository, wish)
        for note in prepared.notes:
            screen.note(note)
        done = carry_out(prepared.change, arguments, screen)
    result = {**done, "manifest": to_builtins(prepared.manifest), "notes": list(prepared.notes)}
    _say(screen, result, f"Done: {done['done']}.")


def _assign(arguments: argparse.Namespace, screen: Screen) -> None:
    model, equals, version = arguments.model.partition("=")
    number = parse_version(version)
    if not equals or number is None:
        raise UsageError(f"{arguments.model}: wanted MODEL=VERSION, for example digits=3")
    _change(arguments, screen, lambda repository: assign(repository, arguments.group, model, number, arguments.percent))


def _unassign(arguments: argparse.Namespace, screen: Screen) -> None:
    _change(arguments, screen, lambda repository: unassign(repository, arguments.group, arguments.model))


def _clean(arguments: argparse.Namespace, screen: Screen) -> None:
    result: dict[str, Any] = {"done": "nothing to take out", "signed": []}
    with _opened(arguments, screen) as repository:
        change = withdraw(repository, arguments.keep) if arguments.keep is not None else None
        if change is not None:
            result = carry_out(change, arguments, screen)
        swept = sweep(repository)
    result |= {"deleted": [str(path) for path in swept.files], "deleted_bytes": swept.nbytes}
    _say(screen, result, f"Deleted {len(swept.files)} files, {size_text(swept.nbytes)}.")


def _bundle(arguments: argparse.Namespace, screen: Screen) -> None:
    out = Path(arguments.out)
    with open_repository(Path(arguments.repo), Passphrases()) as repository:
        bundled = write_bundle(repository, arguments.group, out)
    result = {
        "out": str(out),
        "files": bundled.files,
        "bytes": bundled.nbytes,
        "releases": [release.folder for release in bundled.releases],
    }
    _say(screen, result, f"Wrote {out}: {bundled.files} files, {size_text(bundled.nbytes)}.")


def _serve(arguments: argparse.Namespace, screen: Screen) -> None:
    folder = RepositoryFolder(Path(arguments.repo))
    if not folder.is_repository:
        raise PublishError(f"{folder.path}: is no repository; make one with `edge-runtime repo init`, or give --repo")
    with StaticServer(folder.path, arguments.bind, arguments.port) as server:
        _say(screen, {"url": server.url}, f"Serving {folder.path} at {server.url}; Ctrl-C ends it.")
        screen.flush()
        server.serve()


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
    "publish": _publish,
    "assign": _assign,
    "unassign": _unassign,
    "clean": _clean,
    "bundle": _bundle,
    "serve": _serve,
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


def _tolerances(said: list[str]) -> dict[str, Tolerance]:
    tolerances: dict[str, Tolerance] = {}
    for text in said:
        precision, _, share = text.partition("=")
        try:
            number = float(share)
        except ValueError:
            number = -1.0
        if precision not in TOLERANCES or not 0 <= number < 1:
            raise UsageError(f"--tolerance {text}: wanted PRECISION=X, one of {', '.join(TOLERANCES)}, X from 0 to 1")
        tolerances[precision] = Tolerance(number, number, TOLERANCES[precision].exact)
    return tolerances


def _days(said: list[str]) -> Days:
    days = asdict(Days())
    for text in said:
        role, _, count = text.partition("=")
        if role not in days or not count.isdigit() or not 1 <= int(count) <= 3650:
            raise UsageError(f"--days {text}: wanted ROLE=N, ROLE one of {', '.join(days)}, N from 1 to 3650")
        days[role] = int(count)
    return Days(**days)
