"""Text that no file and no UTF-8 can have, in every place that a client fills in, by gRPC, msgpack, JSON and MQTT.

Each message gets one reply that is not a bug of the daemon's, and no line of the log is broken by it. HTTP is looked at
in test_hostile_http.py.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import grpc
import msgpack
import pytest
from google.protobuf.descriptor import FieldDescriptor
from tritonclient.grpc import service_pb2

from edge_runtime.operations import OPERATIONS
from tests.contract.running_daemon import ANSWER_S, RawClient, floats, header, put_model
from tests.fakes.broker import Broker, needs_mosquitto
from tests.fakes.daemon_process import DaemonProcess
from tests.fakes.mqtt_peer import Peer
from tests.models import onnx_models

pytestmark = needs_mosquitto

ODD = {
    "bytes that are not UTF-8": b"\xff\xfe\xfa\xfb",
    "half of a surrogate pair": b"-\xed\xa0\x80",
    "an overlong NUL": b"ab\xc0\x80",
    "NUL": b"a\0b\0",
    "a line break and a colour": b"a\r\nERROR \x1b[31mb",
    "other line breaks": "a\u2028b\u2029c\x85d\x0be\x0c".encode(),
    "text from right to left": "\u202eabc\u2066".encode(),
    "marks of a format": b"%s%n%(a)s{0}{a!r}$A`id`",
    "a path": b"../../../etc/passwd",
    "64 KiB": b"x" * 65_536,
    "20 000 bytes that are not ASCII": "\u00e4".encode() * 10_000,
    "no character yet": "\U000e0001\ufdd0\uffff".encode(),
}
X = floats(1, 16).tobytes()

REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED", "ALREADY_EXISTS", "UNAVAILABLE"}
AS_TRITON = ("load failed for model 'spare'", "Unable to open shared memory region")
"""What Triton answers with INTERNAL, and so do we."""

CODES = {"decode_failed", "unsupported", "model_not_found", "tensor_mismatch", "forbidden", "load_failed", "not_ready"}
"""not_ready: of the model that these tests load and unload."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("broker"), config="max_queued_messages 0\n") as broker:
        yield broker


@pytest.fixture(scope="module")
def daemon(broker, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    for name in ("mlp", "spare"):
        put_model(folder / "models", name, onnx_models.mlp)
    put_model(folder / "models", "queued", onnx_models.mlp, toml='mode = "workers"\n')
    put_model(folder / "models", "text", onnx_models.identity, datatype="BYTES")
    config = f"""[grpc]
endpoint = "127.0.0.1:0"
control = true
[shared_memory]
client_named = true
[mqtt]
url = "{broker.url}/dev1"
"""
    with DaemonProcess(folder, config=config) as daemon:
        daemon.wait_ready()
        daemon.wait_said("MQTT broker reached")
        yield daemon


@pytest.fixture(autouse=True)
def log_stays_whole(daemon):
    """Every line of the log is one object, and none is of a bug."""
    yield
    assert not [line for line in daemon.log() if "exception" in line or line["level"] == "error"]


@pytest.fixture(params=ODD.values(), ids=ODD)
def odd(request) -> bytes:
    return request.param


def stand_in(odd: bytes) -> str:
    """A text that is as long, for which a packed message then gets the odd bytes."""
    return ("\x01Qq" * len(odd))[: len(odd)]


def spoiled(message: bytes, odd: bytes) -> bytes:
    assert stand_in(odd).encode() in message
    return message.replace(stand_in(odd).encode(), odd)


# ---- gRPC -----------------------------------------------------------------------------------------------------------

KEYS = ("timeout_ms", "shared_memory_region", "config", "file:1/model.onnx")
TEXTS = {FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES}


def filled(message: Any, text: str) -> Iterator[Any]:
    """The message once for each place where a text can stand, with the text there; other places stay as they are."""
    for field in message.DESCRIPTOR.fields:
        for put in _places(field, text):
            copy = type(message)()
            copy.CopyFrom(message)
            put(copy)
            yield copy


def _places(field: FieldDescriptor, text: str) -> Iterator[Any]:
    """Functions that put the text into a field of a message."""
    name, repeated = field.name, field.label == FieldDescriptor.LABEL_REPEATED
    if field.type in TEXTS:
        value = text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        if repeated:
            yield lambda message: getattr(message, name).append(value)
        else:
            yield lambda message: setattr(message, name, value)
        return
    if field.message_type is None:
        return
    if field.message_type.GetOptions().map_entry:
        kept = field.message_type.fields_by_name["value"]
        if kept.message_type is None:
            return
        yield lambda message: getattr(message, name)[text].SetInParent()
        for put in (each for inner in kept.message_type.fields for each in _places(inner, text)):
            for key in (text, *KEYS):
                yield lambda message, put=put, key=key: put(getattr(message, name)[key])
        return
    for put in (each for inner in field.message_type.fields for each in _places(inner, text)):
        if repeated:
            yield lambda message, put=put: put((getattr(message, name) or [getattr(message, name).add()])[0])
        else:
            yield lambda message, put=put: put(getattr(message, name))


def bases() -> Iterator[tuple[str, Any]]:
    """Each method of the protocol with messages that it answers."""
    (file,) = {service_pb2.ModelInferRequest.DESCRIPTOR.file}
    for method in file.services_by_name["GRPCInferenceService"].methods:
        kind = getattr(service_pb2, method.input_type.name)
        if method.name == "ModelInfer":
            for model in ("mlp", "queued"):
                request = kind(model_name=model, raw_input_contents=[X])
                request.inputs.add(name="x", datatype="FP32", shape=[1, 16])
                request.outputs.add(name="y")
                yield method.name, request
            request = kind(model_name="text")
            added = request.inputs.add(name="x", datatype="BYTES", shape=[1, 2])
            added.contents.bytes_contents.append(b"a")
            yield method.name, request
        elif method.name != "ModelStreamInfer":
            fields = {each.name: "spare" for each in method.input_type.fields if each.name in {"name", "model_name"}}
            yield method.name, kind(**fields)


@pytest.fixture
def channel(daemon):
    with grpc.insecure_channel(daemon.address("grpc").removeprefix("grpc://")) as channel:
        yield channel


def test_grpc_answers_odd_text_or_says_why_not(channel, odd):
    count = 0
    for method, base in bases():
        ask = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
        for message in filled(base, stand_in(odd)):
            data = spoiled(message.SerializeToString(), odd)
            call = ask.future(data, timeout=ANSWER_S)
            if call.code() is not grpc.StatusCode.OK:
                is_triton = call.code() is grpc.StatusCode.INTERNAL and call.details().startswith(AS_TRITON)
                assert call.code().name in REFUSALS or is_triton, (method, message, call)
                assert call.details(), (method, message)
            count += 1
    assert count > 50


def test_a_stream_answers_each_odd_text_once(channel, odd):
    ask = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    messages = [
        spoiled(message.SerializeToString(), odd)
        for method, base in bases()
        if method == "ModelInfer"
        for message in filled(base, stand_in(odd))
    ]

    answers = list(ask(iter(messages), timeout=ANSWER_S))

    assert len(answers) == len(messages)


# ---- msgpack, JSON and MQTT -----------------------------------------------------------------------------------------


def headers(text: str) -> Iterator[dict[str, Any]]:
    """Headers of every operation and of inference, with the text in each place that a client fills in."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 16]}
    good = {"v": 1, "op": "infer", "model": "mlp", "inputs": [tensor]}
    for key in ("op", "model", "version", "outputs", "timeout_ms", "priority", "timing", "parameters", "inputs", "v"):
        yield {**good, key: text}
    yield {**good, text: text}
    for model in ("mlp", "queued"):
        asked = {**good, "model": model}
        yield {**asked, "outputs": [text]}
        yield {**asked, "outputs": [{"name": text, "region": 0, "offset": 0}]}
        yield {**asked, "outputs": [{"name": "y", "region": text, "offset": text}]}
        for key in (*tensor, "region", "offset", text):
            yield {**asked, "inputs": [{**tensor, key: text}]}
        for key in (text, "sequence_id", "sequence_start", "classification", "shared_memory_region", "headers"):
            yield {**asked, "parameters": {key: text}}
    for name, row in OPERATIONS.items():
        if name == "stop_notice":
            continue
        named = {"v": 1, "op": name, "model": "spare"}
        yield {**named, "model": text}
        yield {**named, "parameters": {text: text}}
        for parameter in row.parameters:
            if not parameter.in_header:
                yield {**named, "parameters": {parameter.name: text}}
                yield {**named, "parameters": {parameter.name: f"/{text}"}}


def is_reply(fields: dict[str, Any]) -> bool:
    error = fields.get("error")
    return error is None or (error["code"] in CODES and bool(error["message"]))


@pytest.mark.parametrize("control", [False, True])
def test_msgpack_answers_odd_text_or_says_why_not(daemon, odd, control):
    with RawClient(daemon.endpoint + (".control" if control else "")) as client:
        for fields in headers(stand_in(odd)):
            packed = msgpack.packb(fields)
            if stand_in(odd).encode() not in packed:
                continue
            reply = client.ask(spoiled(packed, odd), b"id", X)
            assert reply[1] == b"id", fields
            assert is_reply(msgpack.unpackb(reply[0])), (fields, reply)
        assert client.is_silent(), "a second reply"


def test_an_odd_id_comes_back_or_is_refused(daemon, odd):
    with RawClient(daemon.endpoint) as client:
        reply = client.ask(header(), odd, X)
        fields = msgpack.unpackb(reply[0])
        assert reply[1] == odd if "error" not in fields else fields["error"]["code"] == "decode_failed"


def test_odd_elements_are_answered_as_they_are_or_refused(daemon, odd):
    data = len(odd).to_bytes(4, "little") + odd
    inputs = [{"name": "x", "datatype": "BYTES", "shape": [1, 2]}]
    with RawClient(daemon.endpoint) as client:
        reply = client.ask(header("text", inputs=inputs), b"id", data * 2)
    fields = msgpack.unpackb(reply[0])
    assert reply[2] == data * 2 if "error" not in fields else fields["error"]["code"] == "tensor_mismatch"


SURROGATES = ("\ud800", "x\udfff", "\udc80", "\ud83d\ude00\ud83d")
TEXT = [each.decode("utf-8", "surrogateescape") for each in ODD.values()]


@pytest.mark.parametrize("escaped", [True, False])
@pytest.mark.parametrize("text", [*TEXT, *SURROGATES], ids=[*ODD, *map(ascii, SURROGATES)])
def test_json_answers_odd_text_or_says_why_not(daemon, text, escaped):
    with RawClient(daemon.endpoint) as client:
        for fields in headers(text):
            if isinstance(fields.get("inputs"), list):
                fields["inputs"] = [{**each, "data": [0.0] * 16} for each in fields["inputs"]]
            said = json.dumps({**fields, "id": text}, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
            reply = client.ask(said)
            assert is_reply(json.loads(reply[0])), (fields, reply)
        assert client.is_silent(), "a second reply"


@pytest.fixture(scope="module")
def peer(broker, daemon):
    with Peer(broker.url) as peer:
        peer.subscribe("reply/harm", 1)
        yield peer


def test_mqtt_answers_odd_text_or_says_why_not(daemon, peer, odd):
    def asked(payload: bytes, **options: Any) -> bytes:
        correlation = uuid.uuid4().bytes
        peer.publish("edge/dev1/infer/mlp", payload, 1, response_topic="reply/harm", correlation=correlation, **options)
        message = peer.next()
        assert message.properties.CorrelationData == correlation, payload
        return message.payload

    for fields in headers(stand_in(odd)):
        packed = msgpack.packb([fields, X])
        if stand_in(odd).encode() not in packed:
            continue
        answer = msgpack.unpackb(asked(spoiled(packed, odd)))
        assert is_reply(answer[0] if isinstance(answer, list) else answer), (fields, answer)
        text = odd.decode("utf-8", "surrogateescape")
        said = json.loads(json.dumps(fields).replace(json.dumps(stand_in(odd))[1:-1], json.dumps(text)[1:-1]))
        answer = asked(json.dumps(said).encode())
        assert is_reply(json.loads(answer)), (said, answer)
    asked(odd)
    assert peer.is_silent(0), "a second reply"
