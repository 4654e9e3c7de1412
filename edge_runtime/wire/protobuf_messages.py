"""The messages of gRPC's protocols, from the compiled .proto files beside this; the only user of protobuf.

Owns: their classes, in a pool of their own, so that a program may use another library's messages of the same names
beside; and their forms as plain values. Knows no sockets. Imported only where gRPC is spoken.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import DecodeError

from edge_runtime.errors import ConfigError, DecodeFailed

COMPILED = "protocols.binpb"
"""Written by hatch_build.py when the package is built."""

CHOICE = "parameter_choice"
"""The oneof of every kind of parameter: a value of one of several types."""


class Method(NamedTuple):
    """One method of a service, with the classes of its messages. path: as gRPC calls it."""

    path: str
    name: str
    request: Any
    response: Any


def plain(message: Any) -> dict[str, Any]:
    """The fields of a message that are set, by name; a parameter is its value, whatever its type."""
    return {field.name: _plain(field, value) for field, value in message.ListFields()}


def parameter(message: Any) -> Any:
    """The value of a parameter; None where it has none."""
    chosen = message.WhichOneof(CHOICE)
    return getattr(message, chosen) if chosen is not None else None


def read(kind: Any, data: bytes) -> Any:
    """A message from its bytes. Raises DecodeFailed."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise DecodeFailed(f"the bytes are no {kind.DESCRIPTOR.name} of protobuf") from None


def packed(kind: Any, values: Mapping[str, Any]) -> bytes:
    """The bytes of a message with the values of a JSON form; fields that it does not have are left out."""
    made: bytes = json_format.ParseDict(values, kind(), ignore_unknown_fields=True).SerializeToString()
    return made


def _plain(field: Any, value: Any) -> Any:
    is_list = hasattr(value, "extend")
    if field.message_type is None:
        return list(value) if is_list else value
    if field.message_type.GetOptions().map_entry:
        is_plain = field.message_type.fields_by_name["value"].message_type is None
        return {key: value[key] if is_plain else _one(value[key]) for key in value}
    return [_one(each) for each in value] if is_list else _one(value)


def _one(message: Any) -> Any:
    return parameter(message) if CHOICE in message.DESCRIPTOR.oneofs_by_name else plain(message)


def _load() -> descriptor_pool.DescriptorPool:
    try:
        data = files("edge_runtime.wire").joinpath(COMPILED).read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"edge_runtime/wire/{COMPILED} is not there: this checkout was installed without grpcio-tools; install "
            "them, then it again: pip install grpcio-tools hatchling && pip install --no-build-isolation --editable ."
        ) from None
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
        pool.Add(file)
    return pool


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(name))


def _methods(service: str) -> dict[str, Method]:
    return {
        method.name: Method(
            f"/{service}/{method.name}",
            method.name,
            message_factory.GetMessageClass(method.input_type),
            message_factory.GetMessageClass(method.output_type),
        )
        for method in _POOL.FindServiceByName(service).methods
    }


_POOL = _load()

SERVICE, HEALTH = "inference.GRPCInferenceService", "grpc.health.v1.Health"
METHODS = _methods(SERVICE)
HEALTH_METHODS = _methods(HEALTH)

InferRequest = _class("inference.ModelInferRequest")
InferResponse = _class("inference.ModelInferResponse")
StreamResponse = _class("inference.ModelStreamInferResponse")
HealthRequest = _class("grpc.health.v1.HealthCheckRequest")
HealthResponse = _class("grpc.health.v1.HealthCheckResponse")
