"""Protobuf messages by name, and their forms as bytes, as plain values, as JSON and as text. The only user of protobuf.

Owns: the pool of the compiled .proto files, which is apart from protobuf's own, so that a program may use another
library's messages of the same names beside. Imported only where messages are: gRPC's doors, Triton's configurations.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory, text_format
from google.protobuf.message import DecodeError

from edge_runtime.errors import ConfigError, DecodeFailed

COMPILED = "protocols.binpb"
"""Written by hatch_build.py when the package is built."""

CHOICE = "parameter_choice"
"""The oneof of every kind of parameter: a value of one of several types."""


def message_class(name: str) -> Any:
    """The class of a message, by its full name. Raises ConfigError: the checkout was not built."""
    return message_factory.GetMessageClass(pool().FindMessageTypeByName(name))


@cache
def pool() -> descriptor_pool.DescriptorPool:
    """Every message and service of the package. Raises ConfigError: the checkout was not built."""
    try:
        data = files("edge_runtime.wire").joinpath(COMPILED).read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"edge_runtime/wire/{COMPILED} is not there: this checkout was installed without grpcio-tools; install "
            "them, then it again: pip install grpcio-tools hatchling && pip install --no-build-isolation --editable ."
        ) from None
    made = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
        made.Add(file)
    return made


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
        raise DecodeFailed(f"the bytes are not {kind.DESCRIPTOR.name} of protobuf") from None


def packed(kind: Any, values: Mapping[str, Any]) -> bytes:
    """The bytes of a message with the values of a JSON form; fields that it does not have are left out."""
    made: bytes = json_format.ParseDict(values, kind(), ignore_unknown_fields=True).SerializeToString()
    return made


def from_text(kind: Any, text: str) -> Any:
    """A message from protobuf's text format. Raises DecodeFailed `line:column: why`."""
    try:
        return text_format.Parse(text, kind())
    except (text_format.ParseError, ValueError, RecursionError) as error:
        raise DecodeFailed(_PLACE.sub(r"\1:\2:", str(error)[:300], count=1)) from None


def from_json(kind: Any, values: Mapping[str, Any]) -> Any:
    """A message from its JSON form. Raises DecodeFailed for a field that it does not have, or of another type."""
    try:
        return json_format.ParseDict(values, kind())
    except (json_format.ParseError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DecodeFailed(str(error)[:300]) from None


def whole(message: Any) -> dict[str, Any]:
    """The JSON form with each field that has a default, as Triton writes it: 64 bits as numbers, enums by name.

    Raises DecodeFailed: an enum has a number that stands for nothing.
    """
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            of_value = field.message_type.fields_by_name["value"]
            found[field.name] = {str(key): _json(of_value, value[key]) for key in sorted(value)}
        elif hasattr(value, "extend"):
            found[field.name] = [_json(field, each) for each in value]
        elif not field.has_presence or message.HasField(field.name):
            found[field.name] = _json(field, value)
    return found


# ---- private --------------------------------------------------------------------------------------------------------

_PLACE = re.compile(r"^(\d+):(\d+) ?:?")
"""Where a text cannot be read, as protobuf says it."""


def _json(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return whole(value)
    if field.enum_type is not None:
        named = field.enum_type.values_by_number.get(value)
        if named is None:
            raise DecodeFailed(f"{field.name}: got {value}, wanted one of {', '.join(field.enum_type.values_by_name)}")
        return named.name
    # Of 32 bits: 0.1 and not 0.10000000149011612.
    return float(f"{value:.7g}") if field.type == field.TYPE_FLOAT else value


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
