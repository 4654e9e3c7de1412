"""Clients that mean harm: the daemon lives, forgets them, and answers everybody else."""

from __future__ import annotations

import random
import socket

import pytest
import zmq

from edge_runtime.config.settings import ZmqSettings
from tests.contract.running_daemon import RawClient, error_code, floats, header, put_model
from tests.fakes.daemon_process import GROWTH_BYTES, DaemonProcess
from tests.models import onnx_models

X = floats(1, 16).tobytes()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """A process of its own: what the attackers hold is not part of its memory."""
    folder = tmp_path_factory.mktemp("run")
    put_model(folder / "models", "mlp", onnx_models.mlp)
    put_model(folder / "models", "queued", onnx_models.mlp, toml='mode = "workers"\n')
    with DaemonProcess(folder) as daemon:
        daemon.wait_ready()
        yield daemon


@pytest.fixture
def good(daemon):
    with RawClient(daemon.endpoint) as client:
        yield client


def path_of(daemon) -> str:
    return daemon.endpoint.removeprefix("ipc://")


def answers(client) -> None:
    for index in range(20):
        assert client.ask(header(), b"%d" % index, X)[1] == b"%d" % index
        assert client.ask(header("queued"), b"q%d" % index, X)[1] == b"q%d" % index


def test_200_silent_connections_spoil_nothing(daemon, good):
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(200)]
    try:
        for each in silent:
            each.connect(path_of(daemon))
        answers(good)
    finally:
        for each in silent:
            each.close()
    answers(good)


def test_connections_of_garbage_are_closed_and_leave_no_memory(daemon, good):
    generator = random.Random(1)

    def attack():
        for _ in range(200):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as each:
                each.connect(path_of(daemon))
                try:
                    each.sendall(generator.randbytes(4096))
                except OSError:
                    continue

    attack()
    answers(good)
    before = daemon.resident_bytes()
    for _ in range(3):
        attack()
    answers(good)
    assert daemon.resident_bytes() - before < GROWTH_BYTES


def test_half_messages_are_forgotten_with_their_connection(daemon, good):
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
    ready = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    for _ in range(100):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as each:
            each.connect(path_of(daemon))
            each.sendall(greeting + ready)
            # A first frame that promises more, and a second cut in the middle.
            each.sendall(b"\x01\x03abc" + b"\x01\x40" + b"x" * 10)
    answers(good)


def test_25_000_hostile_messages_leave_no_memory(daemon, good):
    generator = random.Random(2)
    pieces = [header(), header("queued"), X, b"", b"{", b'{"model":"mlp"}', b"\x80" * 1000, b"\xdf" + b"\xff" * 60_000]

    def attack(count):
        with RawClient(daemon.endpoint) as hostile:
            hostile.socket.set(zmq.SNDHWM, 100)
            for _ in range(count):
                frames = [generator.choice(pieces) for _ in range(generator.randrange(1, 5))]
                hostile.send(*frames)
                while not hostile.is_silent():
                    hostile.socket.recv_multipart()

    attack(5_000)
    answers(good)
    before = daemon.resident_bytes()
    attack(20_000)
    answers(good)
    assert daemon.resident_bytes() - before < GROWTH_BYTES


def test_a_flood_of_new_headers_does_not_grow_the_cache_without_bound(daemon, good):
    def attack(start):
        for index in range(start, start + 6_000):
            good.send(header(timeout_ms=1_000.0 + index / 7, parameters={"pad": "x" * 500}), b"", X)
            good.receive()

    attack(0)
    before = daemon.resident_bytes()
    attack(6_000)
    attack(6_000)
    assert daemon.resident_bytes() - before < GROWTH_BYTES


def test_a_deaf_flood_is_bounded_and_others_are_answered(daemon, good):
    with RawClient(daemon.endpoint) as deaf:
        deaf.socket.set(zmq.RCVHWM, 1)
        big = header(shape=(128, 16)), b"", floats(128, 16).tobytes()
        before = daemon.resident_bytes()
        for _ in range(30_000):
            try:
                deaf.socket.send_multipart(big, zmq.DONTWAIT)
            except zmq.Again:
                answers(good)
        answers(good)
        assert daemon.resident_bytes() - before < ZmqSettings().send_bound_bytes + GROWTH_BYTES


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param([b"."] * 400_000, id="many frames"),
        pytest.param([bytes(48 << 20)] * 3, id="many bytes"),
    ],
)
def test_a_message_that_is_too_large_is_refused_and_costs_nobody_else_an_answer(daemon, good, tensors):
    with RawClient(daemon.endpoint) as greedy:
        greedy.send(header(), b"first", X)
        greedy.send(header(), b"large", *tensors)
        greedy.send(header(), b"last", X)
        answers(good)
        replies = [greedy.receive() for _ in range(3)]
    assert [reply[1] for reply in replies] == [b"first", b"large", b"last"]
    assert error_code(replies[1]) == "decode_failed"


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(b"\x80" * (60 << 20), id="header of 60 MB"),
        pytest.param(
            header(inputs=[{"name": "x", "datatype": "FP32", "shape": [1]}] * 1_500), id="one input 1 500 times"
        ),
        pytest.param(b"\x81\xa1v\xdc\x10\x00" + b"\x9f" * 60_000, id="deep nesting"),
        pytest.param(b'{"model":"mlp","inputs":' + b"[" * 1_000_000, id="JSON that nests for ever"),
        pytest.param(b'{"a":' + b"[[]," * 1_000_000 + b"[]" + b"]" * 1_000_000 + b"}", id="JSON that nests oddly"),
    ],
)
def test_an_odd_header_is_refused_and_costs_nobody_else_an_answer(daemon, good, frame):
    with RawClient(daemon.endpoint) as odd:
        for _ in range(10):
            odd.send(frame, b"odd") if frame[:1] != b"{" else odd.send(frame)
        answers(good)
        for _ in range(10):
            odd.receive()
