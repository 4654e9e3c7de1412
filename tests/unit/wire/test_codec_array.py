"""The array form: one payload cut into the bytes of frames, whatever it holds."""

from __future__ import annotations

import tracemalloc

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.errors import DecodeFailed, EdgeRuntimeError
from edge_runtime.messages import RequestHeader
from edge_runtime.wire import codec


@given(st.lists(st.binary(max_size=70_000), max_size=20))
def test_a_packed_array_is_cut_into_the_same_bytes(frames: list[bytes]) -> None:
    header = codec.pack_request(RequestHeader(model="m"))
    payload = codec.pack_array(header, frames)
    assert codec.unpack_array(payload) == (header, frames)
    assert msgpack.unpackb(payload) == [msgpack.unpackb(header), *frames]


@given(st.lists(st.binary(max_size=300), max_size=3), st.dictionaries(st.text(max_size=5), st.integers(0, 9)))
def test_the_header_keeps_its_own_bytes_however_they_were_packed(frames: list[bytes], fields: dict[str, int]) -> None:
    payload = msgpack.packb([fields, *frames])
    header, found = codec.unpack_array(payload)
    assert (msgpack.unpackb(header), found) == (fields, frames)
    assert header in payload


@given(st.binary(max_size=400))
def test_any_bytes_are_an_array_or_refused(payload: bytes) -> None:
    try:
        header, _ = codec.unpack_array(payload)
    except DecodeFailed:
        return
    assert header in payload


@pytest.mark.long
@given(st.recursive(st.none() | st.integers(-5, 5) | st.binary(max_size=5) | st.text(max_size=5), st.lists))
def test_any_msgpack_value_is_an_array_or_refused(value: object) -> None:
    try:
        header, _ = codec.unpack_array(msgpack.packb(value))
        codec.unpack_request(header)
    except EdgeRuntimeError:
        return


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"\x90", b"\x91\xc0", b"\x91\x80x", b"\x92\x80", b"\x92\x80\xa1x", b"\x92\x80\x91\xc4", b"\x80", b"{}",
        b"\xdd\xff\xff\xff\xff", b"\x92\x80\xc6\xff\xff\xff\xff", b"\x91\x81\xa1x" + b"\x91" * 5000,
        b"\x91\xdf\xff\xff\xff\xff", b"\x92\x80\xd4\x01x", b"\x91\x81\xa1x\xda\xff\xff" + b"y" * 0xFFFF + b"z",
        msgpack.packb([{"x": "y" * codec.MAX_HEADER_BYTES}]), msgpack.packb([{}] + [b""] * codec.MAX_ARRAY_FRAMES),
    ],
)  # fmt: skip
def test_a_payload_that_is_not_an_array_of_a_header_and_bins_is_refused(payload: bytes) -> None:
    with pytest.raises(DecodeFailed):
        codec.unpack_array(payload)


@pytest.mark.parametrize("request_id", [b"\x00\xff", "text", 7])
def test_an_id_joins_a_packed_header(request_id: bytes | str | int) -> None:
    header = codec.pack_answer("m", 1, [])
    assert msgpack.unpackb(codec.with_id(header, request_id)) == {**msgpack.unpackb(header), "id": request_id}


def test_reply_to_and_id_are_read_from_a_header_map() -> None:
    assert codec.reply_fields(msgpack.packb({"reply_to": "reply/x", "id": 5})) == ("reply/x", 5)
    assert codec.reply_fields(msgpack.packb({})) == (None, None)


@pytest.mark.parametrize("fields", [{"reply_to": 5}, {"id": True}, {"id": []}, {"id": b"x" * 65}, {"id": "é" * 33}])
def test_a_reply_to_or_id_that_cannot_be_used_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(DecodeFailed):
        codec.reply_fields(msgpack.packb(fields))


def test_a_list_in_a_tensors_place_is_refused_before_it_is_made_into_objects() -> None:
    """By memory: the bytes and the unpacker's own copy of them are 2.3 times the payload, the list would be 8 times."""
    payload = b"\x92\x80\xdc\x04\x00" + (b"\xdc\x10\x00" + b"\xc0" * 4096) * 1024
    tracemalloc.start()
    try:
        with pytest.raises(DecodeFailed, match="tensor 0 is not a msgpack bin"):
            codec.unpack_array(payload)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(payload)
    finally:
        tracemalloc.stop()
