"""Where a daemon and its clients meet when nobody says so: the runtime folder, the sockets in it, the state folder.

Owns: DESIGN 5's order of places, and the checks that make a folder under `/tmp` safe. The daemon's functions make what
is missing; the clients' only look. Endpoints are strings (`ipc:///path`, `tcp://host:port`), paths are Paths.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from edge_runtime.config import service
from edge_runtime.errors import ConfigError

ENDPOINT_VARIABLE = "EDGE_RUNTIME_ENDPOINT"
INFER_SOCKET = "infer.sock"
CONTROL_SOCKET = "control.sock"

MAX_IPC_PATH_BYTES = 107
"""sun_path holds 108 bytes with its closing zero (unix(7))."""

_NAME = "edge-runtime"
SYSTEM_RUNTIME = Path("/run")
SYSTEM_STATE = Path("/var/lib")
TEMPORARY = Path("/tmp")  # noqa: S108 (never $TMPDIR: both sides must agree; the folder's owner is checked)


def runtime_folder() -> Path:
    """The folder for this process's sockets, made if missing.

    `$RUNTIME_DIRECTORY`, else `/run/edge-runtime` if writable, else `$XDG_RUNTIME_DIR/edge-runtime`, else
    `/tmp/edge-runtime-<uid>`, which must be ours alone. Raises ConfigError when that folder is not safe to use.
    """
    given = _first_folder(os.environ.get("RUNTIME_DIRECTORY"))
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        return given
    system = SYSTEM_RUNTIME / _NAME
    if _is_usable(system):
        system.mkdir(exist_ok=True)
        return system
    user = _first_folder(os.environ.get("XDG_RUNTIME_DIR"))
    if user is not None and _is_usable(user / _NAME):
        (user / _NAME).mkdir(mode=0o700, exist_ok=True)
        return user / _NAME
    return _private_folder(_temporary_folder())


def default_infer_endpoint() -> str:
    """Where a daemon binds for inference when told nothing; makes the folder. Raises as `runtime_folder`."""
    return f"ipc://{runtime_folder() / INFER_SOCKET}"


def default_control_endpoint() -> str:
    """Where a daemon binds for control when it has no ipc endpoint to put it beside."""
    return f"ipc://{runtime_folder() / CONTROL_SOCKET}"


def control_endpoint_beside(endpoint: str) -> str:
    """The control endpoint that belongs to an ipc infer endpoint. Raises ConfigError for another transport."""
    if not endpoint.startswith("ipc://"):
        raise ConfigError(
            f"{endpoint} has no control endpoint beside it: that is so for ipc only; name it with control="
            " (from a shell: --control)"
        )
    return f"{endpoint}.control"


def client_endpoint(asked: str | None = None) -> str:
    """Where a client connects: what it was told, else `$EDGE_RUNTIME_ENDPOINT`, else where a daemon's socket is.

    Looks in every place a daemon may have chosen (one run by systemd has another than one of this user). With no socket
    in any it is the service's place where the service is installed, stopped or not, else this process's own default. A
    path alone (`/run/x.sock`) means ipc. Makes nothing.
    Raises ConfigError for a bare word, which is more likely a slip than a socket in the working folder.
    """
    endpoint = asked or os.environ.get(ENDPOINT_VARIABLE)
    if endpoint and "/" not in endpoint:
        raise ConfigError(f"endpoint {endpoint!r}: wanted ipc:///path/to/socket, tcp://host:port, or a path with a /")
    if endpoint:
        return f"ipc://{Path(endpoint).absolute()}" if "://" not in endpoint else endpoint
    folders = list(_folders())
    serving = [folder for folder in folders if _holds_socket(folder)]
    home = service_folder()
    is_closed = home.is_dir() and not os.access(home, os.X_OK)  # its clients are a group
    folder = choose_folder(folders, serving, home, is_a_service=is_closed or service.is_installed())
    return f"ipc://{folder / INFER_SOCKET}"


def choose_folder(folders: Sequence[Path], serving: Sequence[Path], home: Path, *, is_a_service: bool) -> Path:
    """Where a client looks for the socket: pure.

    folders: every place of a daemon, in order, at least one. serving: those with a socket. home: the service's place,
    is_a_service: whether there is one, whatever its state: why it does not answer is said when it is connected to.
    """
    if serving:
        return serving[0]
    return home if is_a_service and home in folders else folders[-1]


def service_folder() -> Path:
    """Where the sockets of the daemon that systemd runs are (`RuntimeDirectory=`)."""
    return SYSTEM_RUNTIME / _NAME


def no_daemon_advice(endpoint: str) -> str:
    """What to do when nobody answers at an endpoint: start a daemon, or ask systemd about the one it runs."""
    return service.advice(endpoint, service_folder(), is_service_installed=service.is_installed())


def check_endpoint(endpoint: str) -> str:
    """The endpoint itself when ZeroMQ can take it. Raises ConfigError: no such transport, no port, path too long."""
    transport, found, rest = endpoint.partition("://")
    if not found or transport not in ("ipc", "tcp") or not rest:
        raise ConfigError(f"endpoint {endpoint!r}: wanted ipc:///path/to/socket or tcp://host:port")
    if transport == "tcp" and not rest.rpartition(":")[2].isdigit() and not rest.endswith(":*"):
        raise ConfigError(f"endpoint {endpoint!r}: it has no port; wanted tcp://host:port")
    length = len(os.fsencode(rest))
    if transport == "ipc" and length > MAX_IPC_PATH_BYTES:
        raise ConfigError(
            f"endpoint {endpoint!r}: the path is {length} bytes and a socket's path may have {MAX_IPC_PATH_BYTES}; "
            "choose a shorter folder, for example below /run or /tmp"
        )
    return endpoint


def state_folder(asked: str | None = None) -> Path | None:
    """The folder that survives a restart, made if missing: calibration, update state.

    `asked`, else `$STATE_DIRECTORY`, `/var/lib/edge-runtime`, `$XDG_STATE_HOME/edge-runtime` (`~/.local/state`), the
    first one that can be written; None when none can. Raises ConfigError when the folder asked for cannot be used.
    """
    if asked is not None:
        try:
            Path(asked).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"state: {asked!r} cannot be made: {error.strerror}; name a folder that can be written"
            ) from None
        if not os.access(asked, os.W_OK | os.X_OK):
            raise ConfigError(
                f"state: {asked!r} cannot be written by this user; name another folder or change its owner"
            )
        return Path(asked)
    for folder in _state_folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    return None


def _state_folders() -> Iterator[Path]:
    given = _first_folder(os.environ.get("STATE_DIRECTORY"))
    if given is not None:
        yield given
        return
    yield SYSTEM_STATE / _NAME
    user = _first_folder(os.environ.get("XDG_STATE_HOME"))
    if user is None:
        try:
            user = Path.home() / ".local" / "state"
        except RuntimeError:
            return  # no home folder, as for a user made for one service
    yield user / _NAME


def _folders() -> Iterator[Path]:
    """Every place DESIGN 5 names, in its order."""
    given = _first_folder(os.environ.get("RUNTIME_DIRECTORY"))
    if given is not None:
        yield given
        return
    yield SYSTEM_RUNTIME / _NAME
    user = _first_folder(os.environ.get("XDG_RUNTIME_DIR"))
    if user is not None:
        yield user / _NAME
    yield _temporary_folder()


def _temporary_folder() -> Path:
    return TEMPORARY / f"{_NAME}-{os.getuid()}"


def _first_folder(value: str | None) -> Path | None:
    """First of the directories that systemd joins with colons: the unit's main one. Relative ones are no use."""
    first = (value or "").split(":")[0]
    return Path(first) if first.startswith("/") else None


def _is_usable(folder: Path) -> bool:
    place = folder if folder.exists() else folder.parent
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)


def _holds_socket(folder: Path) -> bool:
    """A daemon's socket is there, and its folder is ours or root's: below /tmp a stranger could answer instead.

    The one below /run is the service's own user's, who shares the sockets with a group; only root can have made it.
    """
    try:
        is_ours = folder == SYSTEM_RUNTIME / _NAME or folder.stat().st_uid in (0, os.getuid())
        return is_ours and (folder / INFER_SOCKET).is_socket()
    except OSError:
        return False  # a folder that this user may not look into


def _private_folder(folder: Path) -> Path:
    """Make a folder below a place where everybody may write. Raises ConfigError when somebody else was there first."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made: {error.strerror}; set RUNTIME_DIRECTORY to another folder"
        ) from None
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"{folder} is not a folder of this user alone (owner {found.st_uid}, mode {stat.filemode(found.st_mode)}); "
            "remove it, or set RUNTIME_DIRECTORY to another folder"
        )
    return folder
