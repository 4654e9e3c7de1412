"""Publish signed models from a repository that any HTTP server can serve (needs the `publish` extra).

init DIR, then add-team, add-group, publish, assign. An action that signs first shows what it will sign, and asks on a
terminal unless --yes is given. The repository is --repo DIR, else $EDGE_RUNTIME_REPO, else this folder.
Devices trust DIR/metadata/1.root.json; serve DIR/metadata and DIR/targets, never DIR/keys.
"""

from __future__ import annotations

import argparse
import os
from importlib import import_module

from edge_runtime.cli.arguments import UsageError, positive, seconds
from edge_runtime.cli.screen import Screen
from edge_runtime.errors import PublishError
from edge_runtime.extras import install_advice
from edge_runtime.rollouts import command as rollouts

REPOSITORY_VARIABLE = "EDGE_RUNTIME_REPO"

AUTH_FILE_VARIABLE = "REGISTRY_AUTH_FILE"
"""The name that podman, skopeo and buildah read too."""

ACTIONS = {
    "init": "make a repository: root and targets keys for people, snapshot and timestamp keys for cron",
    "add-team": "let a team publish models, with keys of its own",
    "add-group": "add a group of devices, which can be assigned releases",
    "publish": "try a model and publish it as a new release of its team",
    "assign": "let the devices of a group run a version, all of them or a share",
    "unassign": "take a model away from a group",
    "rollout": "give a release to more and more devices of a group; it stops itself where they refuse it",
    "add-config": "let keys of their own sign the configuration of a group",
    "configure": "sign a piece of config.toml for the devices of a group, which try it before they keep it",
    "move": "put devices into a group, whatever their own configuration says (signed by targets)",
    "clean": "delete files that no metadata names; with --keep, take old releases out first",
    "refresh": "renew signatures: the timestamp's, at half time the snapshot's, and those of the roles named",
    "rotate": "give a role new keys",
    "revoke": "replace one key in every role that has it",
    "bundle": "write a folder with all files that a device of a group needs, for a USB stick",
    "push": "copy the repository to an OCI registry, from which devices take it as from a server",
    "serve": "serve metadata and targets over HTTP, for trying it",
    "status": "roles, keys, expiry, releases, and what groups run",
}

_PACKAGES = ("tuf", "securesystemslib", "cryptography")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `repo` and their options."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions")
    parsers = {name: actions.add_parser(name, help=text, description=text) for name, text in ACTIONS.items()}
    for name, action in parsers.items():
        if name == "rollout":
            rollouts.add_arguments(action, _add_repository)
        elif name == "init":
            _add_signing(action)
        else:
            _add_repository(action, signs=name not in ("status", "bundle", "push", "serve"))
    _add_init(parsers["init"])
    parsers["add-team"].add_argument("team", metavar="TEAM")
    parsers["add-group"].add_argument("group", metavar="GROUP")
    parsers["rotate"].add_argument(
        "role", metavar="ROLE", help="root, targets, snapshot, timestamp, team-T, fleet-G or config-G"
    )
    parsers["revoke"].add_argument("key_name", metavar="KEY", help="its name, or the beginning of its id (see status)")
    parsers["add-config"].add_argument("group", metavar="GROUP")
    parsers["configure"].add_argument("group", metavar="GROUP")
    parsers["configure"].add_argument("file", metavar="FILE", help="log, limits, camera, publish, update.windows")
    parsers["move"].add_argument("devices", metavar="DEVICE", nargs="+")
    parsers["move"].add_argument("--to", metavar="GROUP", help="without it the device's own configuration counts again")
    for name in ("add-team", "add-group", "add-config", "rotate", "revoke"):
        _add_keys(parsers[name], has_count=name != "revoke")
    parsers["refresh"].add_argument("roles", metavar="ROLE", nargs="*")
    _add_publish(parsers["publish"])
    parsers["assign"].add_argument("group", metavar="GROUP")
    parsers["assign"].add_argument("model", metavar="MODEL=VERSION", help="TEAM/MODEL=VERSION names the team as well")
    parsers["assign"].add_argument("--percent", metavar="N", type=float, default=100.0, help="of devices (default 100)")
    parsers["assign"].add_argument(
        "--going-back", action="store_true", help="devices that ran this older version before go back to it"
    )
    parsers["unassign"].add_argument("group", metavar="GROUP")
    parsers["unassign"].add_argument("model", metavar="MODEL")
    parsers["clean"].add_argument("--keep", metavar="N", type=positive, help="releases of each model that stay")
    parsers["bundle"].add_argument("--group", metavar="GROUP", required=True)
    parsers["bundle"].add_argument("out", metavar="OUT", help="a new or empty folder")
    parsers["push"].add_argument("to", metavar="ADDRESS", help="oci://HOST/NAME, or oci+http://HOST/NAME without TLS")
    parsers["push"].add_argument(
        "--auth-file",
        metavar="FILE",
        default=os.environ.get(AUTH_FILE_VARIABLE),
        help="the registry's login, as `podman login --authfile FILE` writes it (default $REGISTRY_AUTH_FILE)",
    )
    parsers["push"].add_argument("--ca-file", metavar="FILE", help="PEM certificates that may sign the registry's")
    parsers["serve"].add_argument("--bind", metavar="ADDRESS", default="127.0.0.1", help="default 127.0.0.1")
    parsers["serve"].add_argument("--port", metavar="N", type=int, default=8080, help="default 8080; 0: any")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Run the action; returns 0, or 1 for a rollout that stopped. Raises PublishError: it failed, or wants an extra."""
    if arguments.action is None:
        raise UsageError(f"repo wants an action: {', '.join(ACTIONS)}")
    try:
        verbs = import_module("edge_runtime.publish.verbs")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _PACKAGES:
            raise
        raise PublishError(
            f"{error.name} is not installed: packages and images for devices leave out what signs, so publish from "
            f"another machine; {install_advice('publish')}"
        ) from error
    return int(verbs.VERBS[arguments.action](arguments, screen) or 0)


def _add_repository(action: argparse.ArgumentParser, *, signs: bool) -> None:
    default = os.environ.get(REPOSITORY_VARIABLE, ".")
    action.add_argument("--repo", metavar="DIR", default=default, help="the repository (default $EDGE_RUNTIME_REPO)")
    if signs:
        _add_signing(action)


def _add_init(action: argparse.ArgumentParser) -> None:
    action.add_argument("repo", metavar="DIR")
    for role, count, threshold in (("root", 3, 2), ("targets", 2, 1)):
        action.add_argument(f"--{role}-keys", metavar="N", type=positive, default=count, help=f"default {count}")
        action.add_argument(
            f"--{role}-threshold", metavar="N", type=positive, default=threshold, help=f"must sign; default {threshold}"
        )
    for role in ("root", "targets", "snapshot", "timestamp"):
        action.add_argument(
            f"--{role}-key",
            metavar="URI",
            action="append",
            default=[],
            help="a key that is there already (file:PATH, envvar:NAME, hsm:…); again for more",
        )
    action.add_argument(
        "--days", metavar="ROLE=N", action="append", default=[], help="how long its signatures stay good"
    )


def _add_publish(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "path", metavar="MODEL_DIR", help="a folder of a model or a pipeline, or one of its version folders"
    )
    action.add_argument("--team", metavar="TEAM", required=True)
    action.add_argument("--model", metavar="NAME", help="default: the folder's name")
    action.add_argument("--models", metavar="DIR", help="the folder of a pipeline's models; default: beside it")
    action.add_argument("--version", metavar="N", type=positive, help="default: the newest in the folder")
    action.add_argument("--golden", metavar="FILE", help=".npz with one array an input, a picture that the model's"
                        " steps read, texts, one a line, or a prompt; default: made up")  # fmt: skip
    action.add_argument(
        "--tolerance",
        metavar="PRECISION=X",
        action="append",
        default=[],
        help="share that outputs may be off, f16=0.05",
    )
    action.add_argument("--profile", metavar="NAME", action="append", default=[], help="only for these device profiles")
    action.add_argument("--min-runtime", metavar="VERSION", help="oldest edge-runtime that may run it")
    action.add_argument(
        "--max-p95-ms",
        metavar="PROFILE=MS",
        action="append",
        default=[],
        help="no device of the profile keeps it where 5 of 100 runs take longer; *=MS: all others",
    )
    action.add_argument("--max-failures", metavar="P%", help="no device keeps it where more of its requests fail")
    action.add_argument(
        "--min-agreement",
        metavar="P%",
        help="no device keeps it where fewer rows of the golden output have their highest score in the same place",
    )
    action.add_argument(
        "--patches", metavar="N", type=int, choices=range(11), help="from the last N releases; default 3"
    )
    action.add_argument(
        "--counter",
        metavar="N",
        type=positive,
        help="of the release, where devices know of higher ones than the repository does; default: the next",
    )
    action.add_argument("--limit-s", metavar="S", type=seconds, help="how long loading and running may take")


def _add_keys(action: argparse.ArgumentParser, *, has_count: bool) -> None:
    action.add_argument(
        "--key",
        metavar="URI",
        action="append",
        default=[],
        help="a key that is there already (file:PATH, envvar:NAME, hsm:…); again for more",
    )
    action.add_argument("--online", action="store_true", help="a key without passphrase, which signs without asking")
    if has_count:
        action.add_argument("--keys", metavar="N", type=positive, help="how many to make")
        action.add_argument("--threshold", metavar="N", type=positive, help="how many must sign")


def _add_signing(action: argparse.ArgumentParser) -> None:
    action.add_argument("--yes", action="store_true", help="sign without asking")
    action.add_argument(
        "--passphrase-file",
        metavar="FILE",
        help="file with the passphrase of key files (else $EDGE_RUNTIME_PASSPHRASE)",
    )
