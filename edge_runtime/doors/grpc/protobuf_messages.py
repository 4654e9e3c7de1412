"""The methods and messages of gRPC's services, from the compiled .proto files beside this. Knows no sockets.

Imported only where gRPC is spoken.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from edge_runtime.protobufs import message_class, pool


class Method(NamedTuple):
    """One method of a service, with the classes of its messages. path: as gRPC calls it."""

    path: str
    name: str
    request: Any
    response: Any


def _methods(service: str) -> dict[str, Method]:
    return {
        method.name: Method(
            f"/{service}/{method.name}",
            method.name,
            message_class(method.input_type.full_name),
            message_class(method.output_type.full_name),
        )
        for method in pool().FindServiceByName(service).methods
    }


SERVICE, HEALTH = "inference.GRPCInferenceService", "grpc.health.v1.Health"
METHODS = _methods(SERVICE)
HEALTH_METHODS = _methods(HEALTH)

InferRequest = message_class("inference.ModelInferRequest")
InferResponse = message_class("inference.ModelInferResponse")
HealthRequest = message_class("grpc.health.v1.HealthCheckRequest")
HealthResponse = message_class("grpc.health.v1.HealthCheckResponse")
