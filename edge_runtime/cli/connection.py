"""Connects a verb to its daemon: a client made from the shared options, and help for a misspelt model.

The scheme of `--connect` says which door's client it is, as the door's declaration has it; any other is ZeroMQ's
`Client`. A verb may require that.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from edge_runtime import plugins
from edge_runtime.cli.arguments import nearest
from edge_runtime.cli.screen import Screen
from edge_runtime.client.core import how_far
from edge_runtime.config.endpoints import client_endpoint, control_endpoint_beside
from edge_runtime.doors.zmq.channel import starting_control
from edge_runtime.doors.zmq.client import Client, CurveKeys
from edge_runtime.errors import ConfigError, EdgeRuntimeError, ModelNotFound
from edge_runtime.extras import install_advice

if TYPE_CHECKING:
    from edge_runtime.client.blocking_client import BlockingClient, ControllingClient
    from edge_runtime.doors.door import DoorDeclaration


START_WAIT_S = 60.0
"""How long a verb waits for a daemon that starts: twice the default of start_limit_s, after which it answers anyway."""

_LOOK_S = 0.1


@contextmanager
def connected(arguments: argparse.Namespace, *, waits: bool = True) -> Iterator[BlockingClient]:
    """Open a client from the options of `add_connection`. The error for an unknown model names the nearest one.

    waits: for a daemon on this machine that is starting, and say so.
    """
    endpoint = client_endpoint(arguments.connect)
    door = door_of(endpoint)
    if door is None:
        if waits:
            wait_started(arguments)
        with connected_over_zmq(arguments, "this") as client:
            yield client
        return
    try:
        connect = plugins.named(door.client)
    except ImportError as error:
        raise ConfigError(f"{endpoint}: {error}; {install_advice(door.extra)}") from None
    with connect(arguments, endpoint) as remote, _naming_the_nearest(remote, arguments):
        yield remote


def door_of(endpoint: str) -> DoorDeclaration | None:
    """Return the door whose client takes an address; None: ZeroMQ's."""
    scheme, has_scheme, _ = endpoint.partition("://")
    ours = {scheme: each.door for each in plugins.addresses() for scheme in each.schemes}
    if not has_scheme or scheme in ours:
        return plugins.declared("doors", ours[scheme]) if has_scheme else None
    others = (name for name in plugins.names("doors") if plugins.is_plugin("doors", name))
    declared: Iterator[DoorDeclaration] = (plugins.declared("doors", name) for name in others)
    return next((each for each in declared if scheme in each.schemes), None)


def connected_to_control(arguments: argparse.Namespace, command: str) -> AbstractContextManager[ControllingClient]:
    """Connect for a command of the control endpoint: over ZeroMQ, or through a door whose client offers it."""
    door = door_of(client_endpoint(arguments.connect))
    if door is not None and command in door.offers:
        return cast("AbstractContextManager[ControllingClient]", connected(arguments))
    return connected_over_zmq(arguments, command)


@contextmanager
def connected_over_zmq(arguments: argparse.Namespace, what: str, *, through_control: bool = False) -> Iterator[Client]:
    """Connect over ZeroMQ. Raises ConfigError, naming `what`, for an endpoint of another kind.

    through_control: use the control endpoint, which a daemon opens before its models are loaded.
    """
    endpoint = client_endpoint(arguments.connect)
    door = door_of(endpoint)
    if door is not None:
        raise ConfigError(
            f"{what} is not offered over {door.name.upper()} ({endpoint}): it goes to the device itself, over ZeroMQ; "
            "run it there, or name an ipc:// or tcp:// endpoint with --connect"
        )
    of_doors = (each.attribute for each in plugins.options("connect") if each.default is None)
    *doors, last = (each.door.upper() for each in plugins.addresses())
    refuse_options(arguments, endpoint, of_doors, f"for {', '.join(doors)} and {last}")
    if through_control:
        endpoint = client_endpoint(arguments.control or control_endpoint_beside(endpoint))
    with (
        Client(endpoint, control=arguments.control, curve=curve_keys(arguments)) as client,
        _naming_the_nearest(client, arguments),
    ):
        yield client


def wait_started(arguments: argparse.Namespace) -> None:
    """Wait while the daemon at the endpoint of the options starts, until it has loaded the model of the options.

    Raises ConnectionError: it takes long, or there is none.
    """
    endpoint = client_endpoint(arguments.connect)
    model = getattr(arguments, "model", None)
    screen, told, end_s = Screen(sys.stdout, sys.stderr), "", time.monotonic() + START_WAIT_S
    _wait_bound(arguments, endpoint, end_s)
    with Client(endpoint, control=arguments.control, curve=curve_keys(arguments)) as client:
        while not client.is_ready():
            models = client.models()
            found = [each for each in models if each.get("name") == model]
            if found and not any(each.get("state") == "loading" for each in found):
                return
            text = how_far(models)
            if time.monotonic() >= end_s:
                raise ConnectionError(f"the daemon at {endpoint} is still {text}; edge-runtime status shows each model")
            if text != told:
                screen.note(f"the daemon at {endpoint} is {text}")
                told = text
            time.sleep(_LOOK_S)


def _wait_bound(arguments: argparse.Namespace, endpoint: str, end_s: float) -> None:
    """Wait for the endpoint of a daemon that has begun: its control endpoint listens before its libraries are there."""
    control = arguments.control and client_endpoint(arguments.control)
    while starting_control(endpoint, control) is not None and time.monotonic() < end_s:
        time.sleep(_LOOK_S)


@contextmanager
def connected_early(arguments: argparse.Namespace) -> Iterator[BlockingClient]:
    """Connect, through the control endpoint where no other answers, and say so where the daemon is starting."""
    with connected(arguments, waits=False) as client:
        silence = _silence(client) if isinstance(client, Client) else None
        if silence is None:
            if isinstance(client, Client):
                _tell_start(client)
            yield client
            return
    if arguments.control is None and not client.endpoint.startswith("ipc://"):
        raise silence
    with connected_over_zmq(arguments, "this", through_control=True) as early:
        if _silence(early) is not None:
            raise silence
        while not (models := early.models()) and starting_control(client.endpoint, early.endpoint) is not None:
            time.sleep(_LOOK_S)
        Screen(sys.stdout, sys.stderr).note(f"the daemon at {client.endpoint} is {how_far(models)}")
        yield early


def _tell_start(client: Client) -> None:
    """Say how far a daemon is that starts; nothing of one that is ready, or stops."""
    while not client.is_ready():
        models = client.models()
        if any(each.get("state") == "loading" for each in models):
            Screen(sys.stdout, sys.stderr).note(f"the daemon at {client.endpoint} is {how_far(models)}")
        # Until the folder was read once nothing is known, which would look like an empty one.
        if models:
            return
        time.sleep(_LOOK_S)


def curve_keys(arguments: argparse.Namespace) -> CurveKeys | None:
    """The keys in the file of `--curve-keys`, if one was given. Raises ConfigError naming the file and the key."""
    if arguments.curve_keys is None:
        return None
    from edge_runtime.typed_toml import build, parse_toml

    path = Path(arguments.curve_keys)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return build(CurveKeys, parse_toml(text, str(path)), str(path))


def refuse_options(arguments: argparse.Namespace, url: str, options: Iterable[str], why: str) -> None:
    """Raise ConfigError for an option that is set and does not go with an address. why: what it is for."""
    for option in options:
        if getattr(arguments, option) is not None:
            raise ConfigError(f"--{option.replace('_', '-')} is {why}; got {url}")


def _silence(client: BlockingClient) -> ConnectionError | None:
    """Return why no daemon answers; None when one does."""
    try:
        client.models()
    except ConnectionError as error:
        return error
    return None


@contextmanager
def _naming_the_nearest(client: BlockingClient, arguments: argparse.Namespace) -> Iterator[None]:
    try:
        yield
    except ModelNotFound as error:
        hint = _nearest_model(client, getattr(arguments, "model", None))
        raise ModelNotFound(error.message + hint) from None


def _nearest_model(client: BlockingClient, model: str | None) -> str:
    if not model:
        return ""
    try:
        known = {str(entry["name"]) for entry in client.models() if entry["state"] != "not_served"}
        return "" if model in known else nearest(model, known)
    except (EdgeRuntimeError, ConnectionError, TimeoutError):
        return ""
