"""Pending calls over gRPC, and how requests are cut: a request may have several answers, the last is marked."""

from __future__ import annotations

import pytest
from tritonclient.grpc import service_pb2

from edge_runtime.doors.grpc.frontend import STREAM_WAITING, PendingCall, RequestStream
from edge_runtime.doors.grpc.http2 import Http2
from edge_runtime.doors.grpc.message import cut_request, find_tensor, varint
from edge_runtime.doors.grpc.message import stream_answer as as_message
from edge_runtime.doors.grpc.transport import GrpcMethod
from tests.fakes import http2_peer as peer


def open_stream(*, window: int = 65_535):
    """A connection with one call that is open, and the stream of its requests. window: what its peer takes."""
    http2 = Http2(
        lambda path: GrpcMethod(lambda data, call: None, is_stream=True),
        lambda: None,
        max_message_bytes=100,
        now_s=0.0,
    )
    begin = peer.PREFACE + peer.settings({4: window})
    http2.receive(begin + peer.frame(peer.HEADERS, peer.END_HEADERS, 1, peer.block()), 0.0)
    call = http2.calls[1]
    return http2, call, RequestStream(call, lambda call: None)


def written(http2) -> list[bytes]:
    """The messages that went out."""
    found = peer.Replies().take(b"".join(http2.take()))
    data = b"".join(each.payload for each in found if each.kind == peer.DATA)
    messages = []
    while data:
        end = 5 + int.from_bytes(data[1:5], "big")
        messages.append(data[5:end])
        data = data[end:]
    return messages


def test_answers_leave_a_stream_in_the_order_of_its_requests_and_the_last_ends_each():
    http2, call, stream = open_stream()
    first, second = PendingCall(call, stream), PendingCall(call, stream)
    stream.add(first)
    stream.add(second)
    second.put(b"second")
    assert written(http2) == []
    first.put(b"1", is_last=False)
    first.put(b"2", is_last=False)
    assert written(http2) == [as_message(b"1"), as_message(b"2")]
    first.put(b"3")
    assert written(http2) == [as_message(b"3"), as_message(b"second")]
    assert call.is_open
    stream.ended()
    assert not call.is_open


def test_a_stream_with_too_many_requests_is_paused_until_some_are_answered():
    http2, call, stream = open_stream()
    waiting = [PendingCall(call, stream) for _ in range(STREAM_WAITING)]
    for each in waiting:
        assert not call.pauses
        stream.add(each)
    assert call.pauses == 1
    stream.ended()
    for each in waiting:
        each.put(b"")
    assert len(written(http2)) == STREAM_WAITING
    assert not call.is_open


def infer_request(request_id, sizes=(64,)):
    request = service_pb2.ModelInferRequest(model_name="mlp", id=request_id)
    for index, size in enumerate(sizes):
        request.inputs.add(name=str(index), datatype="UINT8", shape=[1, size])
        request.raw_input_contents.append(bytes([index]) * size)
    return request.SerializeToString()


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (127,), (128,), (16_384, 3), (2_100_000,)])
def test_requests_that_differ_in_id_and_data_only_have_one_head(sizes):
    with_id, without = cut_request(infer_request("an id", sizes)), cut_request(infer_request("", sizes))
    assert with_id is not None
    assert without is not None
    assert with_id.head == without.head
    assert with_id.id == b"\x1a\x05an id"
    assert without.id == b""
    assert with_id.tensors == [bytes([index]) * size for index, size in enumerate(sizes)]


def test_the_tensors_of_a_view_are_views_of_it():
    data = infer_request("an id", (3, 20_000))
    whole, cut = cut_request(data), cut_request(memoryview(data))
    assert whole is not None
    assert cut is not None
    assert (cut.head, cut.id) == (whole.head, whole.id)
    assert [type(each) for each in (cut.head, cut.id, *cut.tensors)] == [bytes, bytes, memoryview, memoryview]
    assert [bytes(each) for each in cut.tensors] == whole.tensors
    assert cut_request(memoryview(data[:-1])) is None


def test_the_tensor_of_a_request_is_found_from_its_first_bytes():
    data = infer_request("an id", (20_000,))
    cut = cut_request(data)
    assert cut is not None
    begin = len(data) - 20_000
    for there in range(begin + 100):
        found = find_tensor(data[:there], len(data))
        assert found in (None, (cut.head, begin, 20_000))
    assert find_tensor(data[: begin + 5], len(data)) is not None
    assert find_tensor(data[: begin + 5], len(data) + 1) is None
    assert find_tensor(infer_request("", (20_000, 5))[:200], len(infer_request("", (20_000, 5)))) is None
    assert find_tensor(b"\xff" * 100, 20_000) is None


@pytest.mark.parametrize(
    "spoiled",
    [
        infer_request("a")[:-1],
        infer_request("a") + b"\x0a",
        infer_request("a") + b"\x0a\x03abc",  # a field behind the tensors
        infer_request("a") + b"\x08\x01",  # a field without a length
        b"\x1a\x01a" * 2,
        b"\x3a\xff\xff\xff\xff\xff\xff\x01",
        b"\x3a\x00" * 100,
    ],
)
def test_a_message_that_is_not_a_plain_request_is_left_to_protobuf(spoiled):
    assert cut_request(spoiled) is None


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 16_383, 16_384, 2**31 - 1])
def test_a_length_is_written_as_protobuf_reads_it(number):
    field = b"\x1a" + varint(number)
    assert service_pb2.ModelInferRequest.FromString(b"\x3a" + varint(len(field)) + field).raw_input_contents[0] == field
    assert sum((byte & 0x7F) << 7 * index for index, byte in enumerate(varint(number))) == number


def test_a_request_whose_id_is_not_ascii_is_decoded_before_its_id_is_repeated() -> None:
    spoiled = infer_request("an id", [64]).replace(b"an id", b"an \xff\xfe")
    assert cut_request(spoiled) is None
    assert cut_request(infer_request("né", [64])) is None
