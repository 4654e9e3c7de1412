"""The client of a verb of the command line, over MQTT: `--connect mqtt://broker/device`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from edge_runtime.cli.connection import refuse_options
from edge_runtime.doors.mqtt.client import MqttClient
from edge_runtime.errors import ConfigError

OPTIONS = ("password_file", "ca_file", "cert_file", "key_file")
"""Of `MqttClient` and of the command line alike."""


@contextmanager
def connect(arguments: argparse.Namespace, url: str) -> Iterator[MqttClient]:
    """Connect to a device. Raises ConfigError, ConnectionError: none is named, or it is away or unknown."""
    refuse_options(arguments, url, ("control", "curve_keys"), "for ZeroMQ")
    refuse_options(arguments, url, ("token_file",), "for HTTP and gRPC")
    files = {option: getattr(arguments, option) for option in OPTIONS}
    with MqttClient(url, prefix=arguments.prefix, **files) as client:
        _check_device(client)
        yield client


def _check_device(client: MqttClient) -> None:
    """Raise where no answer can come: no device is named, or the device is away or unknown."""
    if client.device_id is None:
        raise ConfigError(
            f"{client.endpoint} names no device; wanted {client.endpoint}/DEVICE; {_who_is_online(client)}"
        )
    status = client.device_status()
    if status == "online":
        return
    if status:
        raise ConnectionError(f"the device at {client.endpoint} is {status}; {_who_is_online(client)}")
    if client.devices():  # else this client may not list devices, and only a request can tell
        raise ConnectionError(f"no device is known at {client.endpoint}; {_who_is_online(client)}")


def _who_is_online(client: MqttClient) -> str:
    online = [device.device_id for device in client.devices() if device.is_online]
    return f"online there: {', '.join(online) or 'none'}"
