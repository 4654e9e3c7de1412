"""Our own writing of the protocol's messages against those of Triton's client: same fields, numbers and types."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from tritonclient.grpc import model_config_pb2, service_pb2

from edge_runtime.protobufs import COMPILED
from hatch_build import FOLDER, compile_protocols

ROOT = Path(__file__).parents[3]


def declared(file) -> dict[str, object]:
    """Every field, value and method of a file, by its dotted name."""
    found = {}

    def add_message(prefix, message):
        name = f"{prefix}.{message.name}"
        oneofs = [each.name for each in message.oneof_decl]
        for field in message.field:
            oneof = oneofs[field.oneof_index] if field.HasField("oneof_index") else None
            found[f"{name}.{field.name}"] = (field.number, field.label, field.type, field.type_name, oneof)
        for each in message.nested_type:
            add_message(name, each)
        for each in message.enum_type:
            add_enum(name, each)

    def add_enum(prefix, enum):
        for value in enum.value:
            found[f"{prefix}.{enum.name}.{value.name}"] = value.number

    for message in file.message_type:
        add_message(file.package, message)
    for enum in file.enum_type:
        add_enum(file.package, enum)
    for service in file.service:
        for method in service.method:
            streams = (method.client_streaming, method.server_streaming)
            found[f"{file.package}.{service.name}.{method.name}"] = (method.input_type, method.output_type, *streams)
    return found


def tritons(module) -> dict[str, object]:
    file = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(file)
    return declared(file)


@pytest.fixture(scope="module")
def ours() -> dict[str, object]:
    files = descriptor_pb2.FileDescriptorSet.FromString((ROOT / FOLDER / COMPILED).read_bytes()).file
    return {name: what for file in files if file.package == "inference" for name, what in declared(file).items()}


def test_every_field_is_tritons(ours):
    known = {**tritons(service_pb2), **tritons(model_config_pb2)}
    assert {name: what for name, what in ours.items() if known.get(name) != what} == {}


def test_nothing_of_the_service_is_missing(ours):
    assert set(tritons(service_pb2)) - set(ours) == set()


def test_nothing_of_a_configuration_is_missing(ours):
    assert set(tritons(model_config_pb2)) - set(ours) == set()


def test_the_compiled_protocol_is_the_written_one(tmp_path):
    compile_protocols(ROOT, tmp_path / COMPILED)
    assert (tmp_path / COMPILED).read_bytes() == (ROOT / FOLDER / COMPILED).read_bytes(), "do: make"
