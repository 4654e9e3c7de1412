"""Make and withdraw tokens, which callers of the HTTP and gRPC doors show: Authorization: Bearer TOKEN.

The file of tokens is --file, else tokens_file of [http] and [grpc] in the configuration, else
/etc/edge-runtime/tokens.toml. It keeps a SHA-256 of each token, never the token. A running daemon reads it
again on SIGHUP (systemctl reload edge-runtime).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

from edge_runtime import plugins
from edge_runtime.cli.arguments import UsageError
from edge_runtime.cli.screen import Screen
from edge_runtime.config.loading import load_config
from edge_runtime.doors.access.tokens import DEFAULT_TOKENS, RIGHTS, Right, TokenFile, read_tokens
from edge_runtime.durable import make_folder, write_atomically
from edge_runtime.errors import ConfigError

ACTIONS = {
    "add": "make a token and print it, once",
    "list": "show the names of tokens, and what each may do",
    "remove": "withdraw a token",
}

FILE_MODE = 0o600

SERVICE_USER = "edge-runtime"
"""The user of the service, who must be able to read a file that root makes."""

RELOAD_ADVICE = "a running daemon takes it over on SIGHUP: systemctl reload edge-runtime"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `token` and their options."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions")
    parsers = {name: actions.add_parser(name, help=text, description=__doc__) for name, text in ACTIONS.items()}
    for name in ("add", "remove"):
        parsers[name].add_argument("name", metavar="NAME", help="what the token is called here, such as its bearer")
    parsers["add"].add_argument(
        "--may",
        metavar="RIGHTS",
        type=_rights,
        default=("infer",),
        help="what its bearer may do: infer (default), control, view (the pictures of cameras), or several, as in"
        " infer,control",
    )
    for action in parsers.values():
        action.add_argument("--file", metavar="F", type=Path, help="the file of tokens")
        action.add_argument("--config", metavar="F", type=Path, help="the configuration that names the file")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Do the action."""
    if arguments.action is None:
        raise UsageError("token wants an action: add NAME, list or remove NAME")
    path = _path(arguments).resolve()
    if arguments.action == "add":
        _add(path, arguments.name, arguments.may, screen)
    elif arguments.action == "remove":
        _remove(path, arguments.name, screen)
    else:
        _list(read_tokens(path, "tokens"), screen)
    return 0


def _add(path: Path, name: str, may: tuple[Right, ...], screen: Screen) -> None:
    with _locked(path):
        known = read_tokens(path, "tokens") if path.exists() else TokenFile()
        changed, token = known.with_token(name, may)
        _write(path, changed)
    if screen.wants_json:
        screen.json({"name": name, "token": token, "may": list(changed.tokens[name].may), "file": str(path)})
        return
    screen.line(token)
    screen.note(
        f"{name} may {' and '.join(changed.tokens[name].may)}; this token is shown only now. {path} has its hash."
    )
    screen.note(RELOAD_ADVICE)


def _remove(path: Path, name: str, screen: Screen) -> None:
    with _locked(path):
        _write(path, read_tokens(path, "tokens").without_token(name))
    if screen.wants_json:
        screen.json({"name": name, "removed": True, "file": str(path)})
        return
    screen.note(f"{name} is removed from {path}; {RELOAD_ADVICE}")


def _list(file: TokenFile, screen: Screen) -> None:
    if screen.wants_json:
        screen.json([{"name": name, "may": list(entry.may)} for name, entry in file.tokens.items()])
    else:
        screen.table(("name", "may"), [[name, ", ".join(entry.may)] for name, entry in file.tokens.items()])


def _path(arguments: argparse.Namespace) -> Path:
    """The file of tokens. Raises UsageError when the two doors name different ones."""
    if arguments.file is not None:
        return Path(arguments.file)
    config = load_config(arguments.config, {})
    tables = {name: config.table(name) for name in plugins.names("doors")}
    files = {name: file for name, table in tables.items() if (file := getattr(table, "tokens_file", None)) is not None}
    named = set(files.values())
    if len(named) > 1:
        doors = " and ".join(f"[{name}]" for name in files)
        raise UsageError(f"{doors} name different files of tokens; say which one: --file {' or '.join(named)}")
    return Path(named.pop()) if named else DEFAULT_TOKENS


def _rights(text: str) -> tuple[Right, ...]:
    found = tuple(right for right in RIGHTS if right in text.split(","))
    if not found or set(text.split(",")) != set(found):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted infer, control, view or several, as in infer,control")
    return found


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep others from changing the file meanwhile. The lock is the folder's, as each change replaces the file."""
    make_folder(path.parent)
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"tokens: {path.parent} cannot be opened: {error.strerror}; name another file: --file"
        ) from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _write(path: Path, file: TokenFile) -> None:
    owner = _owner(path)
    write_atomically(path, file.text().encode(), mode=FILE_MODE)
    if owner is not None and os.geteuid() == 0:
        os.chown(path, *owner)


def _owner(path: Path) -> tuple[int, int] | None:
    """Who must be able to read the file: its owner so far, else the user of the service, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        found = path.stat()
        return found.st_uid, found.st_gid
    with contextlib.suppress(KeyError):
        user = pwd.getpwnam(SERVICE_USER)
        return user.pw_uid, user.pw_gid
    return None
