"""The daemon that a verb talks to: a client made from the shared options, and help where a name is nearly right.

`--connect mqtt://broker/device` gives an `MqttClient`, everything else a `Client`; a verb that needs ZeroMQ says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

from edge_runtime.cli.arguments import MQTT_FILES, nearest
from edge_runtime.client.zmq_client import Client, CurveKeys
from edge_runtime.config.broker import is_broker_url
from edge_runtime.config.endpoints import client_endpoint, control_endpoint_beside
from edge_runtime.errors import ConfigError, EdgeRuntimeError, ModelNotFound
from edge_runtime.messages import InferResult

if TYPE_CHECKING:
    from edge_runtime.client.mqtt_client import MqttClient


class DaemonClient(Protocol):
    """What verbs ask of a client, whichever transport it is of."""

    endpoint: str

    def infer(
        self,
        model: str,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        version: int | None = None,
        outputs: Sequence[str] | None = None,
        timeout_ms: float | None = None,
        priority: int = 0,
        timing: bool = False,
    ) -> InferResult:
        """Run a model once."""
        ...

    def models(self) -> list[dict[str, Any]]:
        """Every version known."""
        ...

    def metadata(self, model: str, version: int | None = None) -> dict[str, Any]:
        """What a model takes and gives."""
        ...

    def stats(self) -> dict[str, Any]:
        """Counters and latencies."""
        ...

    def update_status(self) -> dict[str, Any]:
        """What runs by updates, and what is under way."""
        ...

    def update_history(self, count: int | None = None) -> list[dict[str, Any]]:
        """What happened, newest first."""
        ...


@contextmanager
def connected(arguments: argparse.Namespace) -> Iterator[DaemonClient]:
    """A client for the options `add_connection` added; an unknown model's error names the one that was nearly said."""
    endpoint = client_endpoint(arguments.connect)
    if is_broker_url(endpoint):
        with _mqtt_client(arguments, endpoint) as remote, _naming_the_nearest(remote, arguments):
            _check_device(remote)
            yield remote
    else:
        with connected_over_zmq(arguments, "this") as client:
            yield client


@contextmanager
def connected_over_zmq(arguments: argparse.Namespace, what: str, *, through_control: bool = False) -> Iterator[Client]:
    """As `connected`, for what only ZeroMQ offers. Raises ConfigError, naming `what`, when MQTT was asked for.

    through_control: ask the control endpoint, which a daemon opens before its models are loaded.
    """
    endpoint = client_endpoint(arguments.connect)
    if is_broker_url(endpoint):
        raise ConfigError(
            f"{what} is not offered over MQTT ({endpoint}): it goes to the device itself, over ZeroMQ; run it there, "
            "or name an ipc:// or tcp:// endpoint with --connect"
        )
    given = [option for option in MQTT_FILES if getattr(arguments, option) is not None]
    if given:
        raise ConfigError(f"--{given[0].replace('_', '-')} is for mqtt:// and mqtts:// endpoints; got {endpoint}")
    if through_control:
        endpoint = client_endpoint(arguments.control or control_endpoint_beside(endpoint))
    with (
        Client(endpoint, control=arguments.control, curve=curve_keys(arguments)) as client,
        _naming_the_nearest(client, arguments),
    ):
        yield client


@contextmanager
def connected_early(arguments: argparse.Namespace) -> Iterator[DaemonClient]:
    """As `connected`; asks the control endpoint while inference is not served yet, so that a start can be watched."""
    with connected(arguments) as client:
        silence = None if is_broker_url(client.endpoint) else _silence(client)
        if silence is None:
            yield client
            return
    if arguments.control is None and not client.endpoint.startswith("ipc://"):
        raise silence
    with connected_over_zmq(arguments, "this", through_control=True) as early:
        if _silence(early) is not None:
            raise silence
        yield early


def curve_keys(arguments: argparse.Namespace) -> CurveKeys | None:
    """The keys in the file that was named, if one was."""
    if arguments.curve_keys is None:
        return None
    from edge_runtime.cli.curve_file import load_curve_keys

    return load_curve_keys(Path(arguments.curve_keys))


def _mqtt_client(arguments: argparse.Namespace, url: str) -> MqttClient:
    try:
        from edge_runtime.client.mqtt_client import MqttClient
    except ImportError as error:
        raise ConfigError(f"{url}: {error}; install it with: pip install 'edge-runtime[mqtt]'") from None
    for option in ("control", "curve_keys"):
        if getattr(arguments, option) is not None:
            raise ConfigError(f"--{option.replace('_', '-')} is for ZeroMQ; got {url}")
    files = {option: getattr(arguments, option) for option in MQTT_FILES}
    return MqttClient(url, prefix=arguments.prefix, **files)


def _check_device(client: MqttClient) -> None:
    """Raise where it is plain that nobody will answer: no device named, one that is away, or one that is not known."""
    if client.device_id is None:
        raise ConfigError(
            f"{client.endpoint} names no device; wanted {client.endpoint}/DEVICE; {_who_is_online(client)}"
        )
    status = client.device_status()
    if status == "online":
        return
    if status:
        raise ConnectionError(f"the device at {client.endpoint} is {status}; {_who_is_online(client)}")
    if client.devices():  # else this client may not look, and asking is the only way to know
        raise ConnectionError(f"no device is known at {client.endpoint}; {_who_is_online(client)}")


def _who_is_online(client: MqttClient) -> str:
    online = [device.device_id for device in client.devices() if device.is_online]
    return f"online there: {', '.join(online) or 'none'}"


def _silence(client: DaemonClient) -> ConnectionError | None:
    """Why nobody answers; None when somebody does."""
    try:
        client.models()
    except ConnectionError as error:
        return error
    return None


@contextmanager
def _naming_the_nearest(client: DaemonClient, arguments: argparse.Namespace) -> Iterator[None]:
    try:
        yield
    except ModelNotFound as error:
        hint = _nearest_model(client, getattr(arguments, "model", None))
        raise ModelNotFound(error.message + hint) from None


def _nearest_model(client: DaemonClient, model: str | None) -> str:
    if not model:
        return ""
    try:
        return nearest(model, {str(entry["name"]) for entry in client.models()})
    except (EdgeRuntimeError, ConnectionError, TimeoutError):
        return ""
