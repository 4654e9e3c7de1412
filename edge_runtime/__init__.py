"""edge-runtime: an inference daemon for devices.

One page map, lowest level first (a module imports its own package and lower levels, never a neighbour):
errors, tensors, messages, model_spec, clock: nouns | config, profiles, telemetry | backends, repository, scheduling,
wire, transports | serving, client | frontend, update, publish | fleet | daemon | tuning
| cli.
docs/architecture.md has the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from edge_runtime.client.asyncio_client import AsyncClient
    from edge_runtime.client.mqtt_client import MqttClient
    from edge_runtime.client.oip_client import OipClient
    from edge_runtime.client.zmq_client import Client
    from edge_runtime.daemon.runtime import Runtime

__all__ = ["AsyncClient", "Client", "MqttClient", "OipClient", "Runtime", "__version__"]

_PUBLIC = {
    "AsyncClient": "edge_runtime.client.asyncio_client",
    "Client": "edge_runtime.client.zmq_client",
    "MqttClient": "edge_runtime.client.mqtt_client",
    "OipClient": "edge_runtime.client.oip_client",
    "Runtime": "edge_runtime.daemon.runtime",
}


def __getattr__(name: str) -> Any:
    """Import the public API when it is used: a client never pays for the daemon's imports."""
    if name in _PUBLIC:
        import importlib

        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
