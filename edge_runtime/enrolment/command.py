"""Make this a device of a fleet: its certificate, its configuration and its root of trust, from an authority's server.

The token says by fingerprints which authority and which repository are meant, so nothing need be trusted before. It is
--token, or in the file --token-file. What is written: the identity (certificate and key, which the daemon renews from
then on), the configuration, which is not overwritten without --replace, and the root file beside that. A try that did
not end, by a power cut say, is repeated with the same token.
"""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path

from edge_runtime.addresses import read_proxy
from edge_runtime.cli.arguments import UsageError
from edge_runtime.cli.screen import Screen
from edge_runtime.config.endpoints import CONFIGURATION
from edge_runtime.durable import write_atomically
from edge_runtime.errors import ConfigError
from edge_runtime.extras import install_advice

IDENTITY = Path("/var/lib/edge-runtime/identity")
ROOT_FILE = "1.root.json"
"""The repository's first root, beside the configuration: who can write it decides whose models the device runs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `enroll`."""
    parser.add_argument("url", metavar="URL", help="of `edge-runtime authority serve`: https://HOST[:PORT]")
    parser.add_argument("--token", metavar="T", help="what `edge-runtime authority token` printed")
    parser.add_argument("--token-file", metavar="F", type=Path, help="a file that holds it")
    parser.add_argument("--device-id", metavar="ID", help="default: the host's name")
    parser.add_argument(
        "--config", metavar="F", type=Path, default=CONFIGURATION, help=f"to write; default {CONFIGURATION}"
    )
    parser.add_argument("--identity", metavar="DIR", type=Path, default=IDENTITY, help=f"to write; default {IDENTITY}")
    parser.add_argument(
        "--proxy", metavar="URL", help="an HTTP proxy by which the authority is reached: http://HOST:PORT"
    )
    parser.add_argument(
        "--replace", action="store_true", help="overwrite the configuration; the old one stays beside it"
    )


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Enrol this device. Raises UsageError, ConfigError and what `device.enrol` raises."""
    if (arguments.token is None) == (arguments.token_file is None):
        raise UsageError("enroll wants one of --token and --token-file")
    try:
        from edge_runtime.enrolment import device
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "cryptography":
            raise
        raise ConfigError(f"{error.name} is not installed; {install_advice('enrolment')}") from error
    from edge_runtime.enrolment.messages import DEVICE_RULE, is_device_name, parse_token

    name = arguments.device_id or socket.gethostname().partition(".")[0]
    if not is_device_name(name):
        raise UsageError(f"--device-id: got {name[:80]!r}, wanted {DEVICE_RULE}")
    config: Path = arguments.config
    root = config.absolute().parent / ROOT_FILE
    _check_owner(config)
    if config.exists() and not arguments.replace:
        raise ConfigError(f"{config}: is there already; add --replace, which keeps the old one as {config}.before")
    text = arguments.token if arguments.token is not None else _read(arguments.token_file)
    identity = device.Identity(arguments.identity.absolute(), as_owner=True)
    link = device.AuthorityLink(read_proxy(arguments.proxy, key="--proxy"))
    enrolled = device.enrol(arguments.url, parse_token(text), name, identity, link)
    write_atomically(root, device.root_bytes(enrolled))
    text = device.filled(enrolled.configuration, enrolled, identity, root, arguments.url)
    # A repeated try finds its own configuration, and keeps what was there before the first.
    if config.exists() and (before := config.read_bytes()) != text.encode():
        write_atomically(config.with_name(f"{config.name}.before"), before)
    write_atomically(config, text.encode())
    identity.forget_enrolling()
    ends = f"{identity.certificate().not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}"
    if screen.wants_json:
        screen.json({
            "device": name, "group": enrolled.group, "config": str(config), "identity": str(identity.folder),
            "certificate_ends": ends,
        })  # fmt: skip
    else:
        screen.line(f"{name} is enrolled, in the group {enrolled.group}; its certificate is good until {ends}.")
        screen.line(f"Wrote {config}, {root} and {identity.folder}. Next: systemctl restart edge-runtime")
    return 0


def _check_owner(config: Path) -> None:
    """Raise ConfigError where root would write what another user can replace: the device's root of trust is there."""
    from edge_runtime.enrolment.device import owner_of

    user, _ = owner_of(config.parent) if os.geteuid() == 0 else (0, 0)
    if user:
        raise ConfigError(
            f"{config}: a part of this path belongs to user {user}, who could put another configuration and root of "
            f"trust there; wanted a folder of root's, such as {CONFIGURATION.parent}"
        )


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as a token: {error}") from None
