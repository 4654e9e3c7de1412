"""The actions of `repo`: open the repository, draft the change, show it, ask for consent, sign and publish.

Owns: consent. Keys that a person keeps sign only after `--yes` or a yes on a terminal; with --json, or without a
terminal, there is no question. Each signature is announced on stderr, and listed in the result with --json.
"""

from __future__ import annotations

import argparse
import dataclasses
import getpass
import os
import ssl
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from msgspec.structs import asdict

from edge_runtime.cli.arguments import UsageError
from edge_runtime.cli.screen import Screen, size_text
from edge_runtime.errors import PublishError
from edge_runtime.models.names import parse_version
from edge_runtime.publish.assignments import EVERYONE, assign, go_back, unassign
from edge_runtime.publish.bundle import write_bundle
from edge_runtime.publish.catalog import TOP_LEVEL
from edge_runtime.publish.change import Change, Signing
from edge_runtime.publish.cleaning import sweep, withdraw
from edge_runtime.publish.configurations import add_configuration, configure, move
from edge_runtime.publish.folder import RepositoryFolder
from edge_runtime.publish.key_ring import NewKeys
from edge_runtime.publish.next_steps import assign_next, publish_next, rotate_next
from edge_runtime.publish.passphrases import Passphrases
from edge_runtime.publish.patches import LAST_RELEASES
from edge_runtime.publish.releases import MIN_RUNTIME, ReleaseOptions, prepare_release
from edge_runtime.publish.repository import Days, Founding, Repository, found_repository, open_repository
from edge_runtime.publish.roles import add_group, add_team, refresh, revoke, rotate
from edge_runtime.publish.static_server import StaticServer
from edge_runtime.publish.survey import RoleState, Survey, survey
from edge_runtime.publish.trial import LIMIT_S
from edge_runtime.rollouts import command as rollouts
from edge_runtime.updates.golden import TOLERANCES
from edge_runtime.updates.manifest import ReleaseBounds, Tolerance

UNLOCKING_VARIABLE = "EDGE_RUNTIME_PASSPHRASE"


def _init(arguments: argparse.Namespace, screen: Screen) -> None:
    path = Path(arguments.repo)
    keys: dict[str, NewKeys] = {}
    for role in TOP_LEVEL:
        uris = tuple(getattr(arguments, f"{role}_key"))
        count = getattr(arguments, f"{role}_keys", 1)
        keys[role] = NewKeys(count, uris, is_online=role in ("snapshot", "timestamp"))
    thresholds = {"root": arguments.root_threshold, "targets": arguments.targets_threshold}
    founding = Founding(keys, thresholds, _days(arguments.days))
    with found_repository(path, founding, _passphrases(arguments, screen)) as change:
        done = _sign_and_publish(change, arguments, screen)
    root = path / "metadata" / "1.root.json"
    _say(
        screen, {**done, "root": str(root)}, f"Made {path}. Devices need {root}; keep copies of {path / 'keys'} apart."
    )


def _add_team(arguments: argparse.Namespace, screen: Screen) -> None:
    with _open(arguments, screen) as repository:
        _finish(add_team(repository, arguments.team, _new_keys(arguments), arguments.threshold or 1), arguments, screen)


def _add_group(arguments: argparse.Namespace, screen: Screen) -> None:
    with _open(arguments, screen) as repository:
        change = add_group(repository, arguments.group, _new_keys(arguments), arguments.threshold or 1)
        _finish(change, arguments, screen)


def _add_config(arguments: argparse.Namespace, screen: Screen) -> None:
    with _open(arguments, screen) as repository:
        change = add_configuration(repository, arguments.group, _new_keys(arguments), arguments.threshold or 1)
        _finish(change, arguments, screen)


def _configure(arguments: argparse.Namespace, screen: Screen) -> None:
    with _open(arguments, screen) as repository:
        _finish(configure(repository, arguments.group, Path(arguments.file)), arguments, screen)


def _move(arguments: argparse.Namespace, screen: Screen) -> None:
    with _open(arguments, screen) as repository:
        _finish(move(repository, arguments.devices, arguments.to), arguments, screen)


def _publish(arguments: argparse.Namespace, screen: Screen) -> None:
    from edge_runtime.updates.pipeline_trials import describe_pipeline_in_child  # the serving core, for this verb alone

    options = ReleaseOptions(
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
        Path(arguments.models) if arguments.models else None,
        _bounds(arguments),
    )
    with _open(arguments, screen) as repository:
        with screen.progress(f"trying {arguments.path}"):
            prepared = prepare_release(repository, options, describe_pipeline_in_child)
        for note in prepared.notes:
            screen.note(note)
        done = _sign_and_publish(prepared.change, arguments, screen)
    manifest = prepared.manifest
    next_step = publish_next(repository.catalog.owners("fleet"), manifest.model, manifest.version)
    result = {**done, "manifest": to_builtins(manifest), "notes": list(prepared.notes), "next": next_step}
    _say(screen, result, f"Done: {done['done']}.\n{next_step}")


def _assign(arguments: argparse.Namespace, screen: Screen) -> None:
    model, equals, version = arguments.model.partition("=")
    number = parse_version(version)
    if not equals or number is None:
        raise UsageError(f"{arguments.model}: wanted MODEL=VERSION, for example digits=3")
    if arguments.going_back and arguments.percent != EVERYONE:
        raise UsageError("--going-back is for all devices that ran the version; leave out --percent")
    with _open(arguments, screen) as repository:
        if arguments.going_back:
            change = go_back(repository, arguments.group, model, number)
        else:
            change = assign(repository, arguments.group, model, number, arguments.percent)
        _finish(change, arguments, screen, assign_next(arguments.group, arguments.model, arguments.percent))


def _unassign(arguments: argparse.Namespace, screen: Screen) -> None:
    with _open(arguments, screen) as repository:
        _finish(unassign(repository, arguments.group, arguments.model), arguments, screen)


def _clean(arguments: argparse.Namespace, screen: Screen) -> None:
    result: dict[str, Any] = {"done": "nothing to take out", "signed": []}
    with _open(arguments, screen) as repository:
        change = withdraw(repository, arguments.keep) if arguments.keep is not None else None
        if change is not None:
            result = _sign_and_publish(change, arguments, screen)
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


def _push(arguments: argparse.Namespace, screen: Screen) -> None:
    from edge_runtime.publish.registry import push
    from edge_runtime.updates.oci import RegistryLogin, parse_address

    address = parse_address(arguments.to)
    login = RegistryLogin(address, arguments.auth_file, "--auth-file")
    tls = None
    if arguments.ca_file is not None:
        try:
            tls = ssl.create_default_context(cafile=arguments.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise PublishError(f"--ca-file {arguments.ca_file}: {error}; wanted certificates in PEM") from None
    with (
        open_repository(Path(arguments.repo), Passphrases()) as repository,
        screen.progress(f"copying to {address}") as progress,
    ):
        pushed = push(repository, address, login, tls, progress.show)
    result = {"to": str(address), "tags": pushed.tags, "sent": pushed.sent, "sent_bytes": pushed.nbytes}
    what = f"{pushed.sent} files were new, {size_text(pushed.nbytes)}" if pushed.sent else "it had all of them"
    _say(screen, result, f"Copied {pushed.tags} tags to {address}; {what}.")


def _serve(arguments: argparse.Namespace, screen: Screen) -> None:
    folder = RepositoryFolder(Path(arguments.repo))
    if not folder.is_repository:
        raise PublishError(f"{folder.path}: is not a repository; make one with `edge-runtime repo init` or give --repo")
    with StaticServer(folder.path, arguments.bind, arguments.port) as server:
        _say(screen, {"url": server.url}, f"Serving {folder.path} at {server.url}; Ctrl-C ends it.")
        screen.flush()
        server.serve()


def _refresh(arguments: argparse.Namespace, screen: Screen) -> None:
    with _open(arguments, screen) as repository:
        _finish(refresh(repository, arguments.roles), arguments, screen)


def _rotate(arguments: argparse.Namespace, screen: Screen) -> None:
    has_said = arguments.key or arguments.online or arguments.keys
    keys = _new_keys(arguments) if has_said else None
    with _open(arguments, screen) as repository:
        change = rotate(repository, arguments.role, keys, arguments.threshold)
        _finish(change, arguments, screen, rotate_next(arguments.role, Path(arguments.repo)))


def _revoke(arguments: argparse.Namespace, screen: Screen) -> None:
    keys = NewKeys(1, tuple(arguments.key), arguments.online) if arguments.key or arguments.online else None
    with _open(arguments, screen) as repository:
        _finish(revoke(repository, arguments.key_name, keys), arguments, screen)


def _rollout(arguments: argparse.Namespace, screen: Screen) -> int:
    has_agreed = False

    def agree(change: Change) -> None:
        nonlocal has_agreed
        _show_change(change, screen)
        if not has_agreed and arguments.rollout_action == "start":
            screen.note("and the same roles again at each further step, and where it stops")
        _check_consent(change, screen, has_consent=arguments.yes or has_agreed)
        has_agreed = True

    passphrases = Passphrases() if arguments.rollout_action in (None, "status") else _passphrases(arguments, screen)
    return rollouts.run(arguments, screen, passphrases, agree)


def _status(arguments: argparse.Namespace, screen: Screen) -> None:
    with open_repository(Path(arguments.repo), Passphrases()) as repository:
        _print_status(repository, screen)


VERBS: dict[str, Callable[[argparse.Namespace, Screen], int | None]] = {
    "init": _init,
    "add-team": _add_team,
    "add-group": _add_group,
    "add-config": _add_config,
    "configure": _configure,
    "move": _move,
    "publish": _publish,
    "assign": _assign,
    "unassign": _unassign,
    "rollout": _rollout,
    "clean": _clean,
    "bundle": _bundle,
    "push": _push,
    "serve": _serve,
    "refresh": _refresh,
    "rotate": _rotate,
    "revoke": _revoke,
    "status": _status,
}
"""By the names of `repo.ACTIONS`."""


def _open(arguments: argparse.Namespace, screen: Screen) -> AbstractContextManager[Repository]:
    return open_repository(Path(arguments.repo), _passphrases(arguments, screen))


def _finish(change: Change, arguments: argparse.Namespace, screen: Screen, next_step: str = "") -> None:
    done = _sign_and_publish(change, arguments, screen)
    if next_step:
        _say(screen, {**done, "next": next_step}, f"Done: {done['done']}.\n{next_step}")
    else:
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


def _bounds(arguments: argparse.Namespace) -> ReleaseBounds | None:
    """Return the bounds of the command line; None without any. Raises UsageError."""
    longest: dict[str, float] = {}
    for text in arguments.max_p95_ms:
        profile, equals, limit = text.partition("=")
        milliseconds = _number(limit)
        if not equals or milliseconds is None or not 0 < milliseconds <= 1e9:
            raise UsageError(f"--max-p95-ms {text}: wanted PROFILE=MS, MS above 0, or *=MS for every other profile")
        longest[profile] = milliseconds
    failures, agreement = _share(arguments, "max_failures"), _share(arguments, "min_agreement")
    if not longest and failures is None and agreement is None:
        return None
    return ReleaseBounds(longest, failures, agreement)


def _share(arguments: argparse.Namespace, name: str) -> float | None:
    """Return a percentage of the command line as a share; None: it is not there. Raises UsageError."""
    text = getattr(arguments, name)
    if text is None:
        return None
    percent = _number(text.removesuffix("%"))
    if percent is None or not 0 <= percent <= 100:
        raise UsageError(f"--{name.replace('_', '-')} {text}: wanted a percentage, 0 to 100, for example 1%")
    return percent / 100


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _days(said: list[str]) -> Days:
    days = asdict(Days())
    for text in said:
        role, _, count = text.partition("=")
        if role not in days or not count.isdigit() or not 1 <= int(count) <= 3650:
            raise UsageError(f"--days {text}: wanted ROLE=N, ROLE one of {', '.join(days)}, N from 1 to 3650")
        days[role] = int(count)
    return Days(**days)


Ask = Callable[[str], str]


def _passphrases(arguments: argparse.Namespace, screen: Screen) -> Passphrases:
    """Return the passphrases of --passphrase-file, else of the environment, else those typed on a terminal."""
    if arguments.passphrase_file is not None:
        lines = Path(arguments.passphrase_file).read_text(encoding="utf-8").splitlines()
        return Passphrases(lines[:1])
    if UNLOCKING_VARIABLE in os.environ:
        return Passphrases([os.environ[UNLOCKING_VARIABLE]])
    return Passphrases(ask=getpass.getpass if _has_terminal(screen) else None)


def _sign_and_publish(change: Change, arguments: argparse.Namespace, screen: Screen) -> dict[str, Any]:
    """Show the change, ask, sign and publish. Returns the JSON of it.

    Raises UsageError: a person must say yes, and there is no terminal. PublishError: that person said no.
    """
    _show_change(change, screen)
    _check_consent(change, screen, has_consent=arguments.yes)
    change.commit()
    return {"done": change.summary, "signed": [_signing_json(signing) for signing in change.signings]}


def _show_change(change: Change, screen: Screen) -> None:
    screen.note(f"To {change.summary}, this will sign:")
    for signing in change.signings:
        screen.note(f"  {_signing_text(signing)}")


def _signing_json(signing: Signing) -> dict[str, Any]:
    return {
        "role": signing.role,
        "version": signing.version,
        "expires": f"{signing.expires_utc:%Y-%m-%dT%H:%M:%SZ}",
        "keys": list(signing.keys),
    }


def _signing_text(signing: Signing) -> str:
    expires = f"{signing.expires_utc:%Y-%m-%d %H:%M} UTC"
    return f"{signing.role} version {signing.version}, good until {expires}, with {', '.join(signing.keys)}"


def _check_consent(change: Change, screen: Screen, *, has_consent: bool) -> None:
    if has_consent or not change.needs_a_person:
        return
    if not _has_terminal(screen):
        raise UsageError(
            "keys that a person keeps would sign, and there is no terminal to ask on; add --yes; nothing done"
        )
    screen.note("Sign? [y/N] ")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise PublishError("nothing was signed")


def _has_terminal(screen: Screen) -> bool:
    return not screen.wants_json and sys.stdin.isatty() and sys.stderr.isatty()


def _print_status(repository: Repository, screen: Screen) -> None:
    found = survey(repository)
    if screen.wants_json:
        screen.json(_as_json(found))
    else:
        _print(found, screen)


def _as_json(found: Survey) -> dict[str, Any]:
    value = dataclasses.asdict(found)
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
