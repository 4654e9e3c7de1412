"""What a call over gRPC waits for, and how requests are cut: a request may have several answers, the last is marked."""

from __future__ import annotations

import asyncio

import pytest
from tritonclient.grpc import service_pb2

from edge_runtime.frontend.grpc_frontend import PendingCall
from edge_runtime.frontend.grpc_message import cut_request, varint


def test_several_answers_of_one_request_come_in_order_and_the_last_says_so():
    async def ask():
        pending = PendingCall()
        loop = asyncio.get_running_loop()
        pending.put(b"1", is_last=False)
        pending.put(b"2", is_last=False)
        loop.call_soon(lambda: pending.put(b"3", is_last=False))
        loop.call_soon(lambda: loop.call_soon(lambda: pending.put(b"4")))
        found = []
        while not found or not found[-1][1]:
            found.append(await pending.next())
        return found

    assert asyncio.run(ask()) == [(b"1", False), (b"2", False), (b"3", False), (b"4", True)]


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
def test_what_is_no_plain_request_is_left_to_protobuf(spoiled):
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
