"""The daemon that a verb talks to: a client made from the shared options, and help where a name is nearly right."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge_runtime.cli.arguments import nearest
from edge_runtime.client.zmq_client import Client, CurveKeys
from edge_runtime.config.endpoints import client_endpoint, control_endpoint_beside
from edge_runtime.errors import EdgeRuntimeError, ModelNotFound


@contextmanager
def connected(arguments: argparse.Namespace, *, through_control: bool = False) -> Iterator[Client]:
    """A client for the options `add_connection` added; an unknown model's error names the one that was nearly said.

    through_control: ask the control endpoint, which a daemon opens before its models are loaded.
    """
    endpoint = client_endpoint(arguments.connect)
    if through_control:
        endpoint = client_endpoint(arguments.control or control_endpoint_beside(endpoint))
    with Client(endpoint, control=arguments.control, curve=curve_keys(arguments)) as client:
        try:
            yield client
        except ModelNotFound as error:
            hint = _nearest_model(client, getattr(arguments, "model", None))
            raise ModelNotFound(error.message + hint) from None


@contextmanager
def connected_early(arguments: argparse.Namespace) -> Iterator[Client]:
    """As `connected`; asks the control endpoint while inference is not served yet, so that a start can be watched."""
    with connected(arguments) as client:
        silence = _silence(client)
        if silence is None:
            yield client
            return
    if arguments.control is None and not client.endpoint.startswith("ipc://"):
        raise silence
    with connected(arguments, through_control=True) as early:
        if _silence(early) is not None:
            raise silence
        yield early


def _silence(client: Client) -> ConnectionError | None:
    """Why nobody answers; None when somebody does."""
    try:
        client.models()
    except ConnectionError as error:
        return error
    return None


def curve_keys(arguments: argparse.Namespace) -> CurveKeys | None:
    """The keys in the file that was named, if one was."""
    if arguments.curve_keys is None:
        return None
    from edge_runtime.cli.curve_file import load_curve_keys

    return load_curve_keys(Path(arguments.curve_keys))


def _nearest_model(client: Client, model: str | None) -> str:
    if not model:
        return ""
    try:
        return nearest(model, {str(entry["name"]) for entry in client.models()})
    except (EdgeRuntimeError, ConnectionError, TimeoutError):
        return ""
