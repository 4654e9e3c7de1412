"""Give new devices of a fleet what they need: certificate, configuration, root of trust (needs the `enrolment` extra).

init DIR makes an authority with what every device gets; token makes what `edge-runtime enroll` asks for; serve answers
devices, over HTTPS. The folder is --authority DIR, else $EDGE_RUNTIME_AUTHORITY, else this folder. Who can read
authority.key can pose as any device: keep the folder on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_runtime.cli.arguments import UsageError, positive
from edge_runtime.cli.screen import Screen
from edge_runtime.errors import ConfigError
from edge_runtime.extras import install_advice

if TYPE_CHECKING:
    from edge_runtime.enrolment.authority import Authority, AuthorityFolder

FOLDER_VARIABLE = "EDGE_RUNTIME_AUTHORITY"

ACTIONS = {
    "init": "make an authority",
    "token": "make a token, with which devices enrol",
    "serve": "answer devices that enrol or renew",
    "certify": "make a key and a certificate for another server of the fleet, such as the broker",
    "devices": "list the devices that were enrolled",
    "revoke": "renew no certificate of a device any more",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `authority` and their options."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions")
    parsers = {name: actions.add_parser(name, help=text, description=text) for name, text in ACTIONS.items()}
    for name, action in parsers.items():
        if name != "init":
            default = os.environ.get(FOLDER_VARIABLE, ".")
            action.add_argument(
                "--authority", metavar="DIR", type=Path, default=default, help="default $EDGE_RUNTIME_AUTHORITY"
            )
    _add_init(parsers["init"])
    token = parsers["token"]
    token.add_argument("--group", metavar="GROUP", default="default", help="of the devices; default: default")
    token.add_argument("--device", metavar="ID", default="", help="the only device that it is for; else any new one")
    token.add_argument("--uses", metavar="N", type=positive, default=1, help="how many devices may use it; default 1")
    token.add_argument("--days", metavar="N", type=positive, default=7, help="how long; default 7")
    token.add_argument("--name", metavar="NAME", default="", help="what it is called here")
    serve = parsers["serve"]
    serve.add_argument("--bind", metavar="ADDRESS", default="127.0.0.1", help="default 127.0.0.1")
    serve.add_argument("--port", metavar="N", type=int, default=8444, help="default 8444; 0: any")
    serve.add_argument("--life-days", metavar="N", type=positive, default=90, help="of certificates; default 90")
    certify = parsers["certify"]
    certify.add_argument("names", metavar="NAME", nargs="+", help="host names and addresses that it is reached by")
    certify.add_argument("--out", metavar="DIR", type=Path, required=True, help="where server.key and server.crt go")
    parsers["revoke"].add_argument("device", metavar="DEVICE")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Run the action. Raises ConfigError: it cannot be, or the extra is not installed."""
    if arguments.action is None:
        raise UsageError(f"authority wants an action: {', '.join(ACTIONS)}")
    try:
        from edge_runtime.enrolment.authority import Authority, AuthorityFolder
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "cryptography":
            raise
        raise ConfigError(f"{error.name} is not installed; {install_advice('enrolment')}") from error
    if arguments.action == "init":
        _init(AuthorityFolder(arguments.folder), arguments, screen)
        return 0
    folder = AuthorityFolder(arguments.authority)
    if arguments.action == "certify":
        folder.certify_server(arguments.names, arguments.out, _now())
        place = str(arguments.out)
        _say(screen, {"out": place}, f"Wrote server.key, server.crt and devices-ca.crt to {place}.")
        return 0
    authority = Authority(folder, life=timedelta(days=getattr(arguments, "life_days", 90)))
    try:
        {"token": _token, "serve": _serve, "devices": _devices, "revoke": _revoke}[arguments.action](
            authority, arguments, screen
        )
    finally:
        authority.close()
    return 0


def _add_init(action: argparse.ArgumentParser) -> None:
    action.add_argument("folder", metavar="DIR", type=Path)
    action.add_argument(
        "--name", metavar="NAME", action="append", required=True, help="a name or address of its server; again for more"
    )
    action.add_argument("--root", metavar="FILE", type=Path, required=True, help="1.root.json of the repository")
    action.add_argument(
        "--config", metavar="FILE", type=Path, required=True,
        help="config.toml of devices, with @DEVICE@, @GROUP@, @IDENTITY@, @ROOT_FILE@ and @ENROLMENT_URL@ in it",
    )  # fmt: skip
    action.add_argument(
        "--trust", metavar="FILE", type=Path, help="PEM of whom devices trust too: the broker's authority"
    )
    action.add_argument("--ca-cert", metavar="FILE", type=Path, help="an authority's certificate that is there already")
    action.add_argument("--ca-key", metavar="FILE", type=Path, help="and its key")


def _init(folder: AuthorityFolder, arguments: argparse.Namespace, screen: Screen) -> None:
    if (arguments.ca_cert is None) != (arguments.ca_key is None):
        raise UsageError("wanted both of --ca-cert and --ca-key, or none")
    folder.make(
        names=arguments.name,
        root=_bytes(arguments.root),
        configuration=_bytes(arguments.config).decode(),
        issuer=None if arguments.ca_cert is None else (_bytes(arguments.ca_cert), _bytes(arguments.ca_key)),
        trusted=None if arguments.trust is None else _bytes(arguments.trust),
        now_utc=_now(),
    )
    _say(screen, {"folder": str(folder.path)}, f"Made {folder.path}. Next: edge-runtime authority token, and serve.")


def _token(authority: Authority, arguments: argparse.Namespace, screen: Screen) -> None:
    token = authority.add_token(
        arguments.name, group=arguments.group, uses=arguments.uses, days=arguments.days, device=arguments.device
    )
    if screen.wants_json:
        screen.json({"token": str(token), "group": arguments.group, "uses": arguments.uses})
    else:
        screen.line(str(token))
        devices = "1 device" if arguments.uses == 1 else f"{arguments.uses} devices"
        screen.note(f"Good for {devices}, within {arguments.days:g} days; shown only now.")


def _serve(authority: Authority, arguments: argparse.Namespace, screen: Screen) -> None:
    from edge_runtime.enrolment.server import AuthorityServer

    with AuthorityServer(authority, arguments.bind, arguments.port) as server:
        url = f"https://{arguments.bind}:{server.port}"
        _say(screen, {"url": url}, f"Enrolling devices at {url}; Ctrl-C ends it.")
        screen.flush()
        server.serve()


def _devices(authority: Authority, _: argparse.Namespace, screen: Screen) -> None:
    found = authority.devices()
    if screen.wants_json:
        screen.json([
            {
                "device": each.device, "group": each.group,
                "certificate_ends": f"{each.expires_utc:%Y-%m-%dT%H:%M:%SZ}",
                "enrolled": f"{each.enrolled_utc:%Y-%m-%dT%H:%M:%SZ}", "revoked": each.is_revoked,
            }
            for each in found
        ])  # fmt: skip
        return
    rows = [
        [each.device, each.group, f"{each.enrolled_utc:%Y-%m-%d}", f"{each.expires_utc:%Y-%m-%d}",
         "revoked" if each.is_revoked else ""]
        for each in found
    ]  # fmt: skip
    screen.table(("device", "group", "enrolled", "certificate until", ""), rows)


def _revoke(authority: Authority, arguments: argparse.Namespace, screen: Screen) -> None:
    authority.revoke(arguments.device)
    _say(
        screen,
        {"device": arguments.device, "revoked": True},
        f"{arguments.device} gets no other certificate. The one that it has is good until its end: shut the device out "
        "at the broker too.",
    )


def _say(screen: Screen, result: dict[str, Any], text: str) -> None:
    if screen.wants_json:
        screen.json(result)
    else:
        screen.line(text)


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None


def _now() -> datetime:
    return datetime.now(timezone.utc)
