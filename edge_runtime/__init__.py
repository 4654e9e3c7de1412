"""Ask models of an edge-runtime daemon, or serve a folder of models inside this process.

    from edge_runtime import Client

    with Client("ipc:///run/edge-runtime/infer.sock") as client:
        answer = client.infer("digits", {"image": image}, timeout_ms=20)  # numpy in, numpy out
        print(answer["digit"])

Client       asks over ZeroMQ, on this machine or over TCP; threads may share it
AsyncClient  the same for asyncio
OipClient    asks over HTTP or gRPC: this daemon, Triton, KServe and others of the Open Inference Protocol
MqttClient   asks devices through a broker
Runtime      serves a folder of models in this process, without a daemon

Each class is imported when it is first used; help(edge_runtime.Client) describes it. Errors are in
edge_runtime.errors: RequestError (mend the request), Refused (not now), BackendError (the device's fault). The daemon's
command line is `edge-runtime --help`, its handbook docs/clients.md. How the code is cut is in docs/architecture.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from edge_runtime.daemon.runtime import Runtime
    from edge_runtime.doors.mqtt.client import MqttClient
    from edge_runtime.doors.open_inference.client import OipClient
    from edge_runtime.doors.zmq.asyncio_client import AsyncClient
    from edge_runtime.doors.zmq.client import Client

__all__ = ["AsyncClient", "Client", "MqttClient", "OipClient", "Runtime", "__version__"]

_PUBLIC = {
    "AsyncClient": "edge_runtime.doors.zmq.asyncio_client",
    "Client": "edge_runtime.doors.zmq.client",
    "MqttClient": "edge_runtime.doors.mqtt.client",
    "OipClient": "edge_runtime.doors.open_inference.client",
    "Runtime": "edge_runtime.daemon.runtime",
}


def __getattr__(name: str) -> Any:
    """Import the public API when it is used: a client never pays for the daemon's imports."""
    if name in _PUBLIC:
        import importlib

        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "annotations"})
