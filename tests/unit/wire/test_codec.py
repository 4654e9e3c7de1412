"""Wire v1 headers: what is packed is read back, and hostile bytes raise nothing but our own errors."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edge_runtime.errors import (
    WIRE_ERRORS,
    DecodeFailed,
    EdgeRuntimeError,
    QueueFull,
    RunFailed,
    TensorMismatch,
    Unsupported,
)
from edge_runtime.messages import RegionPlace, RequestHeader, TensorHeader
from edge_runtime.tensors import DATATYPES
from edge_runtime.wire.codec import (
    MAX_DIMENSION,
    MAX_HEADER_BYTES,
    MAX_VERSION,
    check_id,
    error_fields,
    frame_sizes,
    pack_answer,
    pack_error,
    pack_request,
    pack_result,
    unpack_reply,
    unpack_request,
)

TENSORS = st.builds(
    TensorHeader,
    name=st.text(min_size=1, max_size=20),
    datatype=st.sampled_from(list(DATATYPES)),
    shape=st.lists(st.integers(0, MAX_DIMENSION), max_size=5).map(tuple),
)
REQUESTS = st.builds(
    RequestHeader,
    op=st.sampled_from(["infer", "models", "live"]),
    model=st.text(min_size=1, max_size=64),
    version=st.none() | st.integers(1, MAX_VERSION),
    inputs=st.lists(TENSORS, max_size=4, unique_by=lambda tensor: tensor.name).map(tuple),
    outputs=st.none() | st.lists(st.text(max_size=10), max_size=4, unique=True).map(tuple),
    timeout_ms=st.none() | st.floats(0, 1e9),
    priority=st.integers(0, 9),
    timing=st.booleans(),
    parameters=st.dictionaries(st.text(max_size=5), st.integers(-9, 9) | st.text(max_size=5) | st.none(), max_size=3),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=9)
    | st.binary(max_size=9) | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=5))
    | st.builds(msgpack.Timestamp, st.integers(0, 1 << 32)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
KEYS = ("v", "op", "model", "version", "inputs", "outputs", "timeout_ms", "priority", "timing", "parameters")


def decode(frame: bytes) -> RequestHeader | EdgeRuntimeError:
    """The header, or the error of ours that was raised; any other error fails the test."""
    try:
        return unpack_request(frame)
    except EdgeRuntimeError as error:
        return error


@given(REQUESTS)
def test_a_request_is_read_back_as_it_was_packed(header: RequestHeader) -> None:
    packed = pack_request(header)
    wanted = header
    if header.op != "infer":
        wanted = RequestHeader(
            header.op, header.model, header.version, (), header.outputs, header.timeout_ms, header.priority,
            header.timing, header.parameters,
        )  # fmt: skip
    assert unpack_request(packed) == wanted
    assert pack_request(header) == packed, "equal requests give equal bytes"


@settings(max_examples=300)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\xc1")
@example(b"\x81\xa1v")
@example(msgpack.packb({"v": 1}) + b"\0")
def test_random_bytes_raise_only_our_errors(frame: bytes) -> None:
    for unpack in (unpack_request, unpack_reply):
        with pytest.raises(EdgeRuntimeError) as caught:
            unpack(frame)
        assert caught.value.code in ("decode_failed", "unsupported")


@pytest.mark.long
@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), VALUES, max_size=8), st.booleans())
def test_maps_of_anything_give_a_header_or_one_of_our_errors(fields: dict[str, Any], is_v1: bool) -> None:
    frame = msgpack.packb({**fields, "v": 1} if is_v1 else fields)
    decoded = decode(frame)
    if isinstance(decoded, RequestHeader):
        assert unpack_request(pack_request(decoded)).model == decoded.model
    else:
        assert decoded.code in ("decode_failed", "unsupported", "tensor_mismatch")
        assert len(pack_error(decoded)) < 2_000, "an error must not send back what it was sent"


@given(REQUESTS, st.data())
def test_a_request_with_bytes_changed_or_cut_raises_only_our_errors(header: RequestHeader, data: st.DataObject) -> None:
    frame = bytearray(pack_request(header))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frame = frame[: data.draw(st.integers(0, len(frame)))]
    decoded = decode(bytes(frame))
    assert isinstance(decoded, RequestHeader) or decoded.code in ("decode_failed", "unsupported", "tensor_mismatch")


@pytest.mark.parametrize(
    "frame",
    [
        b"\x80" * (1 << 20),
        b"\x80" * MAX_HEADER_BYTES,
        b"\x91" * 10_000,
        b"\x81\xa1v" * 10_000,
        b"\x81\xa1v\x01" + bytes(MAX_HEADER_BYTES),
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\xdc\xff\xff" + b"\x80" * 65_000,
        msgpack.packb([1, 2]),
        msgpack.packb("text"),
        msgpack.packb(None),
        msgpack.packb({1: 2}),
        msgpack.packb({"v": 1, "x": b"\xff" * 70_000}),
        msgpack.packb({str(number): number for number in range(65)}),
        b"\x82\xa1v\x01\xa5model\xa2\xff\xfe",
        b"\x82\xa1v\x01\x90\x01",
        msgpack.packb({"v": 1, "x": msgpack.ExtType(5, b"data")}),
    ],
    ids=lambda frame: frame[:12].hex() + f"-{len(frame)}",
)
def test_a_frame_that_is_not_a_header_fails_to_decode(frame: bytes) -> None:
    with pytest.raises(DecodeFailed) as caught:
        unpack_request(frame)
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"v": 2}, Unsupported),
        ({"v": "1"}, Unsupported),
        ({"v": True}, Unsupported),
        ({}, Unsupported),
        ({"v": [[[[0] * 4_000]]]}, Unsupported),
        ({"v": 1, "model": 5}, DecodeFailed),
        ({"v": 1, "version": 0}, DecodeFailed),
        ({"v": 1, "version": -1}, DecodeFailed),
        ({"v": 1, "version": 1.0}, DecodeFailed),
        ({"v": 1, "version": True}, DecodeFailed),
        ({"v": 1, "version": 1 << 63}, DecodeFailed),
        ({"v": 1, "timeout_ms": -1}, DecodeFailed),
        ({"v": 1, "timeout_ms": float("nan")}, DecodeFailed),
        ({"v": 1, "timeout_ms": float("inf")}, DecodeFailed),
        ({"v": 1, "timeout_ms": "20"}, DecodeFailed),
        ({"v": 1, "timeout_ms": True}, DecodeFailed),
        ({"v": 1, "priority": 10}, DecodeFailed),
        ({"v": 1, "priority": -1}, DecodeFailed),
        ({"v": 1, "timing": 1}, DecodeFailed),
        ({"v": 1, "inputs": {"name": "x"}}, DecodeFailed),
        ({"v": 1, "inputs": ["x"]}, DecodeFailed),
        ({"v": 1, "inputs": [{"name": "x", "datatype": "FP32"}]}, DecodeFailed),
        ({"v": 1, "inputs": [{"name": 1, "datatype": "FP32", "shape": []}]}, DecodeFailed),
        ({"v": 1, "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1]}]}, DecodeFailed),
        ({"v": 1, "inputs": [{"name": "x", "datatype": "FP32", "shape": [1.0]}]}, DecodeFailed),
        ({"v": 1, "inputs": [{"name": "x", "datatype": "FP32", "shape": [True]}]}, DecodeFailed),
        ({"v": 1, "inputs": [{"name": "x", "datatype": "FP32", "shape": [1 << 63]}]}, DecodeFailed),
        ({"v": 1, "inputs": [{"name": "x", "datatype": "FP32", "shape": [1] * 33}]}, DecodeFailed),
        ({"v": 1, "inputs": [{"name": "x", "datatype": "FP32", "shape": [1]}] * 2}, TensorMismatch),
        ({"v": 1, "outputs": [1]}, DecodeFailed),
        ({"v": 1, "outputs": ["y", "y"]}, TensorMismatch),
        ({"v": 1, "parameters": {"at": msgpack.Timestamp(1)}}, DecodeFailed),
        ({"v": 1, "parameters": [1]}, DecodeFailed),
    ],
)
def test_a_wrong_field_is_refused_with_a_short_reason(fields: dict[str, Any], error: type[EdgeRuntimeError]) -> None:
    with pytest.raises(error) as caught:
        unpack_request(msgpack.packb(fields))
    assert 0 < len(caught.value.message) < 400


def test_a_shape_nested_as_deep_as_msgpack_goes_is_refused() -> None:
    nested: Any = 1
    for _ in range(480):
        nested = [nested]
    frame = msgpack.packb({"v": 1, "inputs": [{"name": "x", "datatype": "FP32", "shape": [nested]}]})
    with pytest.raises(DecodeFailed, match="wanted integers of 0 or more"):
        unpack_request(frame)


def test_of_a_key_named_twice_the_last_one_counts() -> None:
    frame = b"\x83" + b"".join(msgpack.packb(part) for part in ("v", 1, "model", "first", "model", "last"))
    assert unpack_request(frame).model == "last"


def test_absent_and_null_fields_are_the_same() -> None:
    full = dict.fromkeys(KEYS)
    assert unpack_request(msgpack.packb({**full, "v": 1})) == unpack_request(msgpack.packb({"v": 1})) == RequestHeader()


def test_fields_of_a_newer_client_are_passed_over() -> None:
    assert unpack_request(msgpack.packb({"v": 1, "model": "digits", "novelty": [1]})).model == "digits"


def test_a_number_that_the_wire_cannot_carry_is_refused_when_packing() -> None:
    with pytest.raises(DecodeFailed, match="64 bits"):
        pack_request(RequestHeader(model="digits", version=1 << 70))


@pytest.mark.parametrize(("length", "is_allowed"), [(0, True), (64, True), (65, False)])
def test_an_id_is_at_most_64_bytes(length: int, is_allowed: bool) -> None:
    if is_allowed:
        check_id(bytes(length))
        return
    with pytest.raises(DecodeFailed, match="65 bytes; at most 64"):
        check_id(bytes(length))


def test_frame_sizes_are_exact_even_where_they_are_absurd() -> None:
    tensors = (
        TensorHeader("a", "FP32", (2, 3)),
        TensorHeader("b", "BYTES", (5,)),
        TensorHeader("c", "BF16", ()),
        TensorHeader("d", "INT8", (MAX_DIMENSION,) * 32),
    )
    assert frame_sizes(tensors) == (24, -1, 2, MAX_DIMENSION**32)


# ---- replies


@given(
    st.text(max_size=20),
    st.integers(1, MAX_VERSION),
    st.lists(TENSORS, max_size=4).map(tuple),
    st.none() | st.fixed_dictionaries({"queue_ms": st.floats(0, 9), "run_ms": st.floats(0, 9)}),
)
def test_an_answer_is_read_back_as_it_was_packed(
    model: str, version: int, outputs: tuple[TensorHeader, ...], timing: dict[str, float] | None
) -> None:
    packed = pack_answer(model, version, outputs, timing)
    assert packed[0] == (0x84 if timing is None else 0x85)
    reply = unpack_reply(packed)
    assert (reply.model, reply.version, reply.outputs, reply.timing) == (model, version, outputs, timing)
    assert reply.error is None


@pytest.mark.parametrize("kind", WIRE_ERRORS.values())
def test_every_error_is_read_back_with_its_code(kind: type[EdgeRuntimeError]) -> None:
    reply = unpack_reply(pack_error(kind("what happened", retry_after_ms=1.23456)))
    assert reply.error == {
        "code": kind.code, "message": "what happened", "retryable": kind.retryable, "retry_after_ms": 1.235,
    }  # fmt: skip


def test_an_error_without_a_forecast_has_no_forecast() -> None:
    assert "retry_after_ms" not in error_fields(QueueFull("full"))


def test_an_error_that_quotes_a_name_without_utf_8_still_reaches_the_client() -> None:
    reply = unpack_reply(pack_error(RunFailed("no file model-\udcff.onnx")))
    assert reply.error is not None
    assert reply.error["message"] == "no file model-\\udcff.onnx"


def test_a_result_far_over_the_limits_of_a_request_is_read_back() -> None:
    result = [{"name": f"model-{number}", "reason": "x" * 200, "version": number} for number in range(5_000)]
    assert len(pack_result(result)) > MAX_HEADER_BYTES
    assert unpack_reply(pack_result(result)).result == result
    many = {f"key-{number}": number for number in range(1_000)}
    assert unpack_reply(pack_result(many)).result == many


@pytest.mark.parametrize(
    "fields",
    [
        {"v": 1},
        {"v": 1, "error": "text"},
        {"v": 1, "error": {}},
        {"v": 1, "error": {"code": 1, "message": "m"}},
        {"v": 1, "error": {"code": "c", "message": "m", "retry_after_ms": "soon"}},
        {"v": 1, "outputs": 1},
        {"v": 1, "outputs": [1]},
        {"v": 1, "outputs": [], "timing": 1},
    ],
)
def test_a_reply_that_is_none_fails_to_decode(fields: dict[str, Any]) -> None:
    with pytest.raises(DecodeFailed):
        unpack_reply(msgpack.packb(fields))


def test_a_reply_of_another_protocol_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="this client speaks v 1"):
        unpack_reply(msgpack.packb({"v": 2, "outputs": []}))


def test_a_double_in_place_of_an_integer_is_not_taken_for_one() -> None:
    frame = b"\x82" + msgpack.packb("v") + b"\x01" + msgpack.packb("priority") + b"\xcb" + struct.pack(">d", 5.0)
    with pytest.raises(DecodeFailed, match="priority: got float, wanted int"):
        unpack_request(frame)


def test_places_in_shared_memory_survive_the_wire() -> None:
    header = RequestHeader(
        model="m",
        inputs=(TensorHeader("x", "FP32", (1, 4), RegionPlace(1, 64)), TensorHeader("y", "FP32", (1, 4))),
        outputs=("a", "b", "c"),
        output_places=(RegionPlace(2, 0), None, RegionPlace(2, 128, 16)),
    )
    assert unpack_request(pack_request(header)) == header
