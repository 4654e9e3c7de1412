"""Default places of the daemon and its clients: the runtime folder and its sockets, the state folder, the service.

Owns: the order of the places, the checks that make a folder under `/tmp` safe, and the advice when no daemon answers.
The daemon's functions create missing folders; the clients' only look. Endpoints are strings (`ipc:///path`,
`tcp://host:port`), paths are Paths.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from edge_runtime import plugins
from edge_runtime.errors import ConfigError

ENDPOINT_VARIABLE = "EDGE_RUNTIME_ENDPOINT"
INFER_SOCKET = "infer.sock"
CONTROL_SOCKET = "control.sock"

_FORMS = ("ipc:///path", "tcp://host:port", *(each.form for each in plugins.addresses()))
ENDPOINT_FORMS = f"{', '.join(_FORMS[:-1])} or {_FORMS[-1]}"
"""Forms of a verb's --connect; each client class takes those of its protocol."""

MAX_PORT = 65_535

MAX_IPC_PATH_BYTES = 107
"""sun_path holds 108 bytes with its closing zero (unix(7))."""

CONFIGURATION = Path("/etc/edge-runtime/config.toml")
CONFIGURATION_VARIABLE = "EDGE_RUNTIME_CONFIG"
"""Names another file in its place: to `serve` without --config, and to every verb for its plug-ins."""
"""The file that a daemon reads without `--config`; the Debian package installs one there."""

UNIT = "edge-runtime.service"
UNIT_FOLDERS = (Path("/etc/systemd/system"), Path("/usr/lib/systemd/system"), Path("/lib/systemd/system"))
"""Of the folders in systemd.unit(5), those that packages and administrators use."""

START_ADVICE = (
    "start one with `edge-runtime serve --models DIR`, or name its endpoint (--connect, EDGE_RUNTIME_ENDPOINT)"
)
SERVICE_ADVICE = (
    "it belongs to the service edge-runtime: `systemctl status edge-runtime` and `journalctl -u edge-runtime` say "
    "whether it runs and why not, `sudo systemctl start edge-runtime` starts it; name the endpoint of another daemon "
    "(--connect, EDGE_RUNTIME_ENDPOINT)"
)

_NAME = "edge-runtime"
_OR = "name a folder that this user can write"
SYSTEM_RUNTIME = Path("/run")
SYSTEM_STATE = Path("/var/lib")
TEMPORARY = Path("/tmp")  # noqa: S108 (never $TMPDIR: both sides must agree; the folder's owner is checked)


def runtime_folder() -> Path:
    """The folder for this process's sockets, created if missing.

    `$RUNTIME_DIRECTORY`, else `/run/edge-runtime` if writable, else `$XDG_RUNTIME_DIR/edge-runtime`, else
    `/tmp/edge-runtime-<uid>`, which must be this user's alone. Raises ConfigError when that folder is not safe, or
    `$RUNTIME_DIRECTORY` cannot be created.
    """
    given = _first_folder(os.environ.get("RUNTIME_DIRECTORY"))
    if given is not None:
        make_named_folder(given, "RUNTIME_DIRECTORY")
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
    """The infer endpoint of a daemon without `--zmq`; creates the folder. Raises as `runtime_folder`."""
    return f"ipc://{runtime_folder() / INFER_SOCKET}"


def default_control_endpoint(infer: Sequence[str]) -> str:
    """The control endpoint of a daemon without `--control`: beside its first ipc endpoint.

    Without any it is `control.sock` in the runtime folder, which is created then. Raises as `runtime_folder`.
    """
    beside = next((endpoint for endpoint in infer if endpoint.startswith("ipc://")), None)
    return f"{beside}.control" if beside is not None else f"ipc://{runtime_folder() / CONTROL_SOCKET}"


def daemon_endpoints(infer: Sequence[str], control: str | None) -> tuple[list[str], str]:
    """Return the infer endpoints and the control endpoint of a daemon, by its settings. Raises as `runtime_folder`."""
    found = list(infer) or [default_infer_endpoint()]
    return found, control or default_control_endpoint(found)


def control_endpoint_beside(endpoint: str) -> str:
    """Where a client finds the control endpoint of the daemon at an ipc infer endpoint.

    In a runtime folder that holds `control.sock` alone it is that one, of a daemon that serves over TCP only. Raises
    ConfigError for another transport.
    """
    if not endpoint.startswith("ipc://"):
        raise ConfigError(
            f"{endpoint} has no control endpoint beside it: that is so for ipc only; name it with control="
            " (from a shell: --control)"
        )
    beside = Path(f"{endpoint.removeprefix('ipc://')}.control")
    alone = beside.with_name(CONTROL_SOCKET)
    is_alone = beside.name == f"{INFER_SOCKET}.control" and not _exists(beside) and _exists(alone)
    return f"ipc://{alone if is_alone else beside}"


def memory_socket_beside(path: Path) -> Path:
    """The Unix socket that hands out shared memory for an ipc endpoint."""
    return path.with_name(path.name + ".memory")


def settings_file(path: Path | None, default_path: Path = CONFIGURATION) -> Path | None:
    """Return the daemon's settings file: `path`, else `$EDGE_RUNTIME_CONFIG`, else `default_path` if it is there."""
    if path is None and (said := os.environ.get(CONFIGURATION_VARIABLE)):
        return Path(said)
    return default_path if path is None and _is_there(default_path) else path


def client_endpoint(endpoint: str | None = None) -> str:
    """Return a client's endpoint: `endpoint`, else `$EDGE_RUNTIME_ENDPOINT`, else where a daemon's socket is.

    Looks in every place that a daemon may have chosen (systemd's daemon has another than this user's); one that starts
    has its control socket alone. Without a socket in any, it is the service's place where the service is installed,
    running or not, else where a daemon of this user would put it. A plain path (`/run/x.sock`) means ipc. Creates
    nothing.
    Raises ConfigError for a bare word, which is more likely a slip than a socket in the working folder.
    """
    endpoint = endpoint or os.environ.get(ENDPOINT_VARIABLE)
    if endpoint and "/" not in endpoint:
        raise ConfigError(f"endpoint {endpoint!r}: wanted a path with a /, or {ENDPOINT_FORMS}")
    if endpoint:
        return f"ipc://{Path(endpoint).absolute()}" if "://" not in endpoint else endpoint
    folders = list(_folders())
    names = (INFER_SOCKET, f"{INFER_SOCKET}.control", CONTROL_SOCKET)
    serving = [folder for name in names for folder in folders if _holds_socket(folder, name)]
    home = service_folder()
    is_closed = home.is_dir() and not os.access(home, os.X_OK)  # only a group may connect
    own = next((each for each in folders if _is_usable(each) and _is_ours(each)), folders[-1])
    folder = choose_folder(folders, serving, home, own, is_a_service=is_closed or _is_service_installed())
    return f"ipc://{folder / INFER_SOCKET}"


def choose_folder(
    folders: Sequence[Path], serving: Sequence[Path], home: Path, own: Path, *, is_a_service: bool
) -> Path:
    """The folder whose socket a client connects to: pure.

    folders: every place of a daemon, in order, at least one. serving: those with a socket, best first. home: the
    service's place. own: of a daemon of this user. is_a_service: whether the service is installed, running or not;
    connecting shows why it does not answer.
    """
    if serving:
        return serving[0]
    return home if is_a_service and home in folders else own


def service_folder() -> Path:
    """The folder with the sockets of systemd's daemon (`RuntimeDirectory=`)."""
    return SYSTEM_RUNTIME / _NAME


def no_daemon_advice(endpoint: str) -> str:
    """Return advice when no daemon answers at an endpoint: start one, or ask systemd about its own."""
    path = endpoint.removeprefix("ipc://")
    is_the_services = path != endpoint and Path(path).parent == service_folder()
    return SERVICE_ADVICE if is_the_services and _is_service_installed() else START_ADVICE


def check_endpoint(endpoint: str) -> str:
    """Return the endpoint if ZeroMQ can take it. Raises ConfigError: no such transport, no port, path too long."""
    transport, found, rest = endpoint.partition("://")
    others = {scheme: each.client_class for each in plugins.addresses() for scheme in each.schemes}
    if transport in others and found:
        raise ConfigError(
            f"endpoint {endpoint!r} is not a ZeroMQ endpoint, which is ipc:///path/to/socket or tcp://host:port; "
            f"edge_runtime.{others[transport]} asks there, and the verbs do with --connect"
        )
    if not found or transport not in ("ipc", "tcp") or not rest or "\0" in rest:
        raise ConfigError(f"endpoint {endpoint!r}: wanted {ENDPOINT_FORMS}")
    port = rest.rpartition(":")[2]
    if transport == "tcp" and port != "*" and not is_port(port):
        raise ConfigError(f"endpoint {endpoint!r}: got no port; wanted tcp://host:port, with a port up to {MAX_PORT}")
    length = len(os.fsencode(rest))
    if transport == "ipc" and length > MAX_IPC_PATH_BYTES:
        raise ConfigError(
            f"endpoint {endpoint!r}: the path has {length} bytes and a socket's path may have {MAX_IPC_PATH_BYTES}; "
            "choose a shorter folder, for example below /run or /tmp"
        )
    return endpoint


def make_named_folder(folder: Path, named_by: str) -> None:
    """Create a folder that a person named, but none of those it lies in: a slip in a path shall make no folders.

    named_by: what names it, for the message. Raises ConfigError: it cannot be created.
    """
    try:
        if not folder.parent.exists():
            reason = f"{folder.parent} is not there; make it, or {_OR}"
            raise ConfigError(f"{named_by}: {folder} cannot be created: {reason}")
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{named_by}: {folder} cannot be created: {error.strerror}; {_OR}") from None


def is_port(text: str) -> bool:
    """Return whether a text is the number of a TCP port; int() takes digits of any script."""
    return text.isascii() and text.isdigit() and len(text) <= len(str(MAX_PORT)) and int(text) <= MAX_PORT


def state_folder(folder: str | None = None) -> Path | None:
    """The folder that survives a restart, created if missing: calibration, update state.

    `folder`, else the first writable of `$STATE_DIRECTORY`, `/var/lib/edge-runtime`, `$XDG_STATE_HOME/edge-runtime`
    (`~/.local/state`); None when none is. Raises ConfigError when `folder` cannot be used.
    """
    if folder is not None:
        make_named_folder(Path(folder), "state")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(
                f"state: {folder!r} cannot be written by this user; name another folder or change its owner"
            )
        return Path(folder).absolute()  # child processes work in another folder
    for each in _state_folders():
        try:
            each.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(each, os.W_OK | os.X_OK):
            return each
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
            return  # a user made for one service has no home folder
    yield user / _NAME


def _folders() -> Iterator[Path]:
    """Every place of a daemon's sockets, in the order of `runtime_folder`."""
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
    """First of the folders that systemd joins with colons, the unit's main one; None for a relative path."""
    first = (value or "").split(":")[0]
    return Path(first) if first.startswith("/") else None


def _is_usable(folder: Path) -> bool:
    place = folder if _exists(folder) else folder.parent
    return _exists(place / ".") and os.access(place, os.W_OK | os.X_OK)


def _holds_socket(folder: Path, name: str) -> bool:
    """Whether a daemon's socket is in a folder of this user or root: below /tmp a stranger could answer instead.

    The folder below /run belongs to the service's own user, who shares the sockets with a group; only root creates it.
    """
    try:
        return _is_ours(folder) and (folder / name).is_socket()
    except OSError:
        return False  # a folder that this user may not look into


def _is_ours(folder: Path) -> bool:
    """Whether no stranger made a folder; a missing one is safe. Raises OSError."""
    return folder == SYSTEM_RUNTIME / _NAME or not _exists(folder) or folder.stat().st_uid in (0, os.getuid())


def _private_folder(folder: Path) -> Path:
    """Create a folder below a world-writable one. Raises ConfigError when another user created it first."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be created: {error.strerror}; set RUNTIME_DIRECTORY to another folder"
        ) from None
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"{folder} is not a folder of this user alone (owner {found.st_uid}, mode {stat.filemode(found.st_mode)}); "
            "remove it, or set RUNTIME_DIRECTORY to another folder"
        )
    return folder


def _is_service_installed() -> bool:
    """Whether the service's unit or configuration is on this machine; a path that may not be looked at is not.

    A stopped service leaves nothing below /run, as RuntimeDirectory is removed with it (systemd.exec(5)).
    """
    return any(_exists(path) for path in (*(folder / UNIT for folder in UNIT_FOLDERS), CONFIGURATION))


def _is_there(path: Path) -> bool:
    """Whether anything has that name. A path that cannot be looked at counts: reading it reports why."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False
