"""What strangers send to the gRPC door: each gets one clear status or a closed connection, and nobody else notices."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.contract.running_daemon import ANSWER_S, RawClient, floats, put_model
from tests.fakes import http2_peer as peer
from tests.fakes.daemon_process import DaemonProcess
from tests.models import onnx_models

MAX_BODY_BYTES = 4 << 20
MAX_CONNECTIONS = 64
UNANSWERED_BYTES = 128 << 20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
INFER = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """A process of its own: what strangers hold is not part of its memory."""
    folder = tmp_path_factory.mktemp("run")
    put_model(folder / "models", "mlp", onnx_models.mlp)
    put_model(folder / "models", "queued", onnx_models.mlp, toml='mode = "workers"\n')
    put_model(folder / "models", "text", onnx_models.identity, datatype="BYTES")
    config = f"""[grpc]
endpoint = "127.0.0.1:0"
max_body_bytes = {MAX_BODY_BYTES}
max_connections = {MAX_CONNECTIONS}
[limits]
total_unanswered_bytes = {UNANSWERED_BYTES}
unanswered_bytes = {UNANSWERED_BYTES}
"""
    with DaemonProcess(folder, config=config) as daemon:
        daemon.wait_ready()
        yield daemon


@pytest.fixture(scope="module")
def address(daemon):
    return daemon.address("grpc").removeprefix("grpc://")


@pytest.fixture
def honest(address):
    """A client that was there before, and is answered as before afterwards."""
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert is_answered(stub)
        yield stub
        assert is_answered(stub)


@pytest.fixture
def channel(address, honest):
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


def good(model="mlp"):
    request = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[floats(1, 16).tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 16])
    return request


def is_answered(stub) -> bool:
    return all(
        len(stub.ModelInfer(good(model), timeout=ANSWER_S).raw_output_contents[0]) == 16 for model in ("mlp", "queued")
    )


def refused(channel, data: bytes) -> str:
    """The status of a message that cannot be served."""
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(INFER)(data, timeout=ANSWER_S)
    return caught.value.code().name


def test_bytes_that_are_not_a_message_are_refused(channel):
    for data in (b"\xff" * 100, b"\x0a\x05mlp", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x3a\x80", b"\x08"):
        assert refused(channel, data) == "INVALID_ARGUMENT"


def test_every_message_cut_or_changed_at_random_gets_one_status_or_answer(channel):
    dice, ask = random.Random(13), channel.unary_unary(INFER)
    whole = good().SerializeToString()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        data = bytes(data[: dice.randint(0, len(data))] if dice.random() < 0.3 else data)
        try:
            ask(data, timeout=ANSWER_S)
            status = "OK"
        except grpc.RpcError as error:
            status = error.code().name
        assert status in ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED"), data


@pytest.mark.parametrize(
    "spoil",
    [
        lambda request: request.inputs[0].shape.__setitem__(0, -1),
        lambda request: request.inputs[0].shape.__setitem__(0, 1 << 62),
        lambda request: request.inputs[0].shape.extend([1 << 40, 1 << 40]),
        lambda request: request.inputs[0].shape.extend([0, 1 << 62]),
        lambda request: request.inputs[0].ClearField("shape"),
        lambda request: request.inputs[0].__setattr__("datatype", "FP31"),
        lambda request: request.inputs[0].__setattr__("name", "x" * 10_000),
        lambda request: request.raw_input_contents.append(b""),
        lambda request: request.ClearField("raw_input_contents"),
        lambda request: request.raw_input_contents.__setitem__(0, b"1"),
        lambda request: request.inputs.extend([request.inputs[0]] * 5000),
        lambda request: request.inputs[0].contents.fp32_contents.append(1),
        lambda request: request.__setattr__("model_version", "x"),
        lambda request: request.__setattr__("model_version", "9" * 100),
        lambda request: request.__setattr__("id", "i" * 100_000),
        lambda request: request.parameters["timeout"].__setattr__("int64_param", -1),
        lambda request: request.parameters["priority"].__setattr__("string_param", "high"),
    ],
)
def test_a_request_that_lies_is_refused_each_time(channel, spoil):
    request = good()
    spoil(request)
    for _ in range(4):  # decoded, remembered, known
        assert refused(channel, request.SerializeToString()) == "INVALID_ARGUMENT"


def test_tensors_of_another_length_than_a_known_head_says_are_refused(channel):
    ask = channel.unary_unary(INFER)
    request = good()
    for _ in range(5):
        ask(request.SerializeToString(), timeout=ANSWER_S)
    for tensors in ([], [b""], [b"1" * 63], [b"1" * 65], [b"1" * 64] * 2):
        request.ClearField("raw_input_contents")
        request.raw_input_contents.extend(tensors)
        assert refused(channel, request.SerializeToString()) == "INVALID_ARGUMENT"


def test_text_whose_lengths_lie_is_refused(channel):
    for raw in (b"\xff\xff\xff\xff", b"\x05\x00\x00\x00abc", b"abc", b""):
        request = service_pb2.ModelInferRequest(model_name="text", raw_input_contents=[raw])
        request.inputs.add(name="x", datatype="BYTES", shape=[1, 1])
        assert refused(channel, request.SerializeToString()) == "INVALID_ARGUMENT"


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_a_message_over_the_limit_is_refused_before_and_after_it_is_inflated(daemon, channel, compression):
    before = daemon.resident_bytes()
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(INFER)(bytes(64 << 20), compression=compression, timeout=ANSWER_S)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert daemon.resident_bytes() - before < 128 << 20


def test_an_unknown_method_is_unimplemented(channel):
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/inference.GRPCInferenceService/Nothing")(b"", timeout=ANSWER_S)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_garbage_on_a_stream_is_an_error_of_its_own_and_the_stream_lives_on(channel):
    ask = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    messages = [b"\xff", good().SerializeToString(), b"\x0a\x05", good("queued").SerializeToString()]
    found = [service_pb2.ModelStreamInferResponse.FromString(each) for each in ask(iter(messages), timeout=ANSWER_S)]
    assert [bool(each.error_message) for each in found] == [True, False, True, False]


def test_each_refused_request_of_a_stream_is_named_by_its_id(channel):
    requests = {str(at): good("queued" if at % 2 else "mlp") for at in range(10)}
    for request_id, request in requests.items():
        request.id = request_id
    requests["1"].inputs[0].datatype = "FP31"
    requests["2"].inputs[0].shape[0] = -1
    requests["3"].parameters["sequence_id"].double_param = 5
    requests["4"].parameters["timeout_ms"].double_param = float("nan")
    requests["6"].parameters["priority"].double_param = 1.0
    requests["7"].model_version = "x"
    requests["8"].outputs.add(name="z")
    ask = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer
    for _ in range(4):  # decoded, remembered, known
        answers = ask(iter(requests.values()), timeout=ANSWER_S)
        assert [(each.infer_response.id, bool(each.error_message)) for each in answers] == [
            (str(at), at not in {0, 5, 9}) for at in range(10)
        ]


def test_a_client_that_cancels_is_forgotten(channel):
    futures = [channel.unary_unary(INFER).future(good("queued").SerializeToString()) for _ in range(500)]
    for each in futures:
        each.cancel()


# ---- bare sockets ---------------------------------------------------------------------------------------------------


def connected(address) -> socket.socket:
    host, _, port = address.partition(":")
    return socket.create_connection((host, int(port)), timeout=ANSWER_S)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def field(name: bytes, value: bytes) -> bytes:
    """A header, written out (RFC 7541, 6.2.2)."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


HEADERS = b"".join(
    field(name, value)
    for name, value in (
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", INFER.encode()), (b":authority", b"x"),
        (b"te", b"trailers"), (b"content-type", b"application/grpc"),
    )
)  # fmt: skip


def is_ended(connection: socket.socket) -> bool:
    """Whether the peer closes before long; what it sends until then is dropped."""
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:  # reset, or closed by the test
        pass
    return True


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(range(256)) * 64,
        PREFACE + b"\xff" * 4096,
        PREFACE + frame(4, 0, 0) + frame(1, 4, 1, b"\xff" * 200),
        PREFACE + frame(4, 0, 0) + frame(0, 0, 7, b"data of no stream") + frame(9, 4, 7, b"\x00"),
        PREFACE + frame(4, 0, 0, b"\x00" * 5),
        PREFACE + frame(4, 0, 0) + frame(8, 0, 0, b"\x00\x00\x00\x00"),
    ],
    ids=["http/1.1", "noise", "noise after the preface", "headers", "stray frames", "settings", "window"],
)
def test_bytes_that_are_not_http2_end_their_connection_only(address, honest, sent):
    with connected(address) as connection:
        with contextlib.suppress(OSError):  # it may be closed by now
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        assert is_ended(connection)


def test_a_storm_of_resets_disturbs_nobody(address, honest):
    with connected(address) as connection:
        connection.sendall(PREFACE + frame(4, 0, 0))
        drain = threading.Thread(target=is_ended, args=(connection,))
        drain.start()
        try:
            for start in range(1, 40_000, 200):
                connection.sendall(
                    b"".join(
                        frame(1, 4, stream, HEADERS) + frame(3, 0, stream, b"\x00\x00\x00\x08")
                        for stream in range(start, start + 200, 2)
                    )
                )
                if start % 4000 == 1:
                    assert is_answered(honest)
        except ConnectionError:
            pass  # it was closed for that
        finally:
            connection.close()
            drain.join()


def test_header_and_ping_floods_disturb_nobody(address, honest):
    for flood in (
        frame(6, 0, 0, b"12345678") * 5000,
        frame(1, 0, 1, HEADERS) + frame(9, 0, 1, field(b"a", b"b" * 120) * 100) * 200,
    ):
        with connected(address) as connection:
            try:
                connection.sendall(PREFACE + frame(4, 0, 0) + flood)
                assert is_answered(honest)
                connection.shutdown(socket.SHUT_WR)
                assert is_ended(connection)
            except ConnectionError:
                pass


FLOODS = {
    "settings": [peer.settings({4: 100})] * 40_000,
    "windows": [peer.window(1)] * 40_000,
    "priorities": [frame(2, 0, 1, bytes(5))] * 40_000,
    "unknown frames": [frame(200, 0, 0, bytes(20))] * 40_000,
    "empty data": [peer.frame(1, 4, 1, peer.block()), *[frame(0, 0, 1)] * 10_000],
    "continuations": [frame(1, 0, 1, HEADERS), *[frame(9, 0, 1)] * 10_000],
    "endless headers": [frame(1, 0, 1, HEADERS), *[frame(9, 0, 1, peer.field("a", "b" * 1000) * 10)] * 80],
    "entries of a table": [frame(1, 5, 1, HEADERS + peer.field("x", "y" * 3900, 0x40)), frame(1, 5, 3, b"\xbe" * 9000)],
    "rapid resets": [
        peer.call(number, good().SerializeToString()) + frame(3, 0, number, b"\0\0\0\x08")
        for number in range(1, 12_000, 2)
    ],
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_ends_its_connection_with_a_reason(address, honest, flood):
    sent = FLOODS[flood]
    with connected(address) as connection:
        reading = threading.Thread(target=lambda: said.append(until_its_end(connection)))
        said = []
        reading.start()
        with contextlib.suppress(OSError):  # it may be closed by now
            connection.sendall(peer.BEGIN)
            for begin in range(0, len(sent), 5000):  # credit comes back meanwhile: on a busy machine much
                connection.sendall(b"".join(sent[begin : begin + 5000]))
                assert is_answered(honest)
        reading.join()
    goaway = [each for each in peer.Replies().take(said[0]) if each.kind == peer.GOAWAY][-1]
    assert goaway.payload[4:8] == b"\0\0\0\x0b"  # ENHANCE_YOUR_CALM


def until_its_end(connection: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(OSError):
        while part := connection.recv(1 << 16):
            data += part
    return data


def test_peers_that_take_no_answers_hold_no_more_than_is_bounded(daemon, address, honest):
    text = struct.pack("<I", 1 << 19) + bytes(1 << 19) + bytes(4)
    request = service_pb2.ModelInferRequest(model_name="text", raw_input_contents=[text])
    request.inputs.add(name="x", datatype="BYTES", shape=[1, 2])
    asked = request.SerializeToString()
    with contextlib.ExitStack() as stack, RawClient(daemon.endpoint) as beside:
        stalled = [stack.enter_context(connected(address)) for _ in range(4)]
        for connection in stalled:
            with contextlib.suppress(OSError):  # it may be closed by now
                connection.sendall(peer.PREFACE + peer.settings({4: 0}))
                for number in range(1, 400, 2):
                    connection.sendall(peer.call(number, asked))
            assert is_answered(honest)
        end_s = time.monotonic() + ANSWER_S
        while not beside.result("stats")["metrics"]["counters"].get("connections_closed_unread"):
            assert time.monotonic() < end_s


def test_connections_that_send_nothing_leave_room_for_the_honest_one(address, honest):
    strangers = [connected(address) for _ in range(3 * MAX_CONNECTIONS)]
    try:
        assert is_answered(honest)
    finally:
        for each in strangers:
            each.close()
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as later:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(later)
        until_s = time.monotonic() + ANSWER_S
        assert stub.ModelInfer(good(), timeout=until_s - time.monotonic(), wait_for_ready=True).model_name == "mlp"
