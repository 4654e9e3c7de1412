"""Memory that clients make libzmq hold: messages without an end, and replies that nobody reads."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from tests.contract.running_daemon import ANSWER_S, RawClient, error_code, floats, header, put_model
from tests.fakes.daemon_process import DaemonProcess
from tests.models import onnx_models

X = floats(1, 16).tobytes()
BOUND_BYTES = 16 << 20
LIMITS = (
    f"[limits]\nmessage_bytes = {BOUND_BYTES}\nunanswered_bytes = {64 << 10}\ntotal_unanswered_bytes = {256 << 10}\n"
)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
WHOLE = b"".join(bytes((flags, len(part))) + part for flags, part in ((1, header()), (1, b"id"), (0, X)))
"""A request, as the frames that carry it."""
WAITING = 'mode = "workers"\nmax_queue_delay_ms = 600_000\nmax_batch_rows = 4_000\n'
"""Requests of this model wait for a batch that never comes."""


@pytest.fixture
def daemon(tmp_path):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    put_model(tmp_path / "models", "waiting", onnx_models.mlp, toml=WAITING)
    with DaemonProcess(tmp_path, config=LIMITS) as daemon:
        daemon.wait_ready()
        yield daemon


@pytest.fixture
def good(daemon):
    with RawClient(daemon.endpoint) as client:
        yield client


@contextlib.contextmanager
def connected(daemon):
    """A bare socket that has shaken hands as a DEALER."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bare:
        bare.settimeout(ANSWER_S)
        bare.connect(daemon.endpoint.removeprefix("ipc://"))
        # In step, as libzmq's own clients: it closes some connections that send frames before it has said READY.
        bare.sendall(GREETING)
        bare.recv(len(GREETING), socket.MSG_WAITALL)
        bare.sendall(READY)
        _, length = bare.recv(2, socket.MSG_WAITALL)
        bare.recv(length, socket.MSG_WAITALL)
        yield bare


def frame(payload: bytes) -> bytes:
    """One frame with more to come (ZMTP 3.0)."""
    return b"\x03" + len(payload).to_bytes(8, "big") + payload


@pytest.mark.parametrize(
    "payload", [pytest.param(bytes(64 << 10), id="large frames"), pytest.param(b".", id="tiny frames")]
)
def test_a_message_without_an_end_ends_its_connection_and_costs_no_other_an_answer(daemon, good, payload):
    assert good.ask(header(), b"before", X)[1] == b"before"
    least = daemon.resident_bytes()
    block = frame(payload) if len(payload) > 1 else b"\x01\x01." * 20_000
    sent = 0
    with connected(daemon) as endless:
        while sent < 4 << 30:
            try:
                endless.sendall(block)
            except OSError:
                break
            sent += len(block)
            if not sent % (len(block) * 50):
                assert good.ask(header(), b"meanwhile", X)[1] == b"meanwhile"
    assert good.ask(header(), b"after", X)[1] == b"after"
    counters = good.result("stats")["metrics"]["counters"]
    # Where memory grows within one look, silent connections are closed too; theirs open again by themselves.
    assert counters["connections_closed_unfinished"] >= 1
    end_s = time.monotonic() + ANSWER_S
    while daemon.resident_bytes() - least > 2 * BOUND_BYTES:
        assert time.monotonic() < end_s, "the memory did not come back"


DOCUMENTED_BYTES = 2 * (128 << 20)
"""docs/serve.md: twice limits.message_bytes at worst."""


def reconnect_without_end(daemon, stop: threading.Event, sent: list[int], payload: bytes, begins: bytes) -> None:
    """Send a message without an end, and connect again as often as the daemon closes."""
    block = frame(payload) if len(payload) > 1 else b"\x01\x01." * 20_000
    while not stop.is_set():
        with contextlib.suppress(OSError, ValueError), connected(daemon) as endless:
            endless.sendall(begins)
            while not stop.is_set():
                endless.sendall(block)
                sent.append(len(block))


@pytest.mark.parametrize(
    ("attackers", "payload", "begins"),
    [
        pytest.param(1, bytes(64 << 10), b"", id="one"),
        pytest.param(4, bytes(64 << 10), b"", id="four"),
        pytest.param(4, bytes(64 << 10), WHOLE, id="four that bring a whole message first"),
    ],
)
def test_attackers_that_reconnect_are_held_to_the_documented_bound(tmp_path, attackers, payload, begins):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    stop, sent, peak = threading.Event(), [], 0
    with DaemonProcess(tmp_path) as daemon, RawClient(daemon.endpoint) as good:
        daemon.wait_ready()
        assert good.ask(header(), b"before", X)[1] == b"before"
        least = daemon.resident_bytes()
        threads = [
            threading.Thread(target=reconnect_without_end, args=(daemon, stop, sent, payload, begins))
            for _ in range(attackers)
        ]
        for each in threads:
            each.start()
        try:
            end_s = time.monotonic() + ANSWER_S
            while sum(sent) < 4 * DOCUMENTED_BYTES and time.monotonic() < end_s:
                # Closed connections open again by themselves, but nobody who is answered is closed.
                assert good.ask(header(), b"meanwhile", X)[1] == b"meanwhile"
                peak = max(peak, daemon.resident_bytes())
        finally:
            stop.set()
            for each in threads:
                each.join()
        # Half as much again for a machine that gives the daemon's thread no core for some looks.
        assert peak - least < 1.5 * DOCUMENTED_BYTES
        assert good.result("stats")["metrics"]["counters"]["connections_closed_unfinished"] >= 2


def test_the_waiting_requests_of_one_connection_are_bounded_in_bytes(daemon, good):
    with RawClient(daemon.endpoint) as greedy:
        for number in range(200):
            greedy.send(header("waiting"), b"%d" % number, X)
        refused = [greedy.receive() for _ in range(200 - (64 << 10) // (1024 + len(X)))]
        assert {error_code(reply) for reply in refused} == {"queue_full"}
        assert greedy.is_silent()
        good.send(header("waiting"), b"", X)
        assert good.ask(header(), b"", X)[1] == b""
        assert good.is_silent()


def test_the_waiting_requests_of_all_connections_have_one_bound_that_is_shared(daemon, good):
    with contextlib.ExitStack() as stack:
        greedy = [stack.enter_context(RawClient(daemon.endpoint)) for _ in range(5)]
        for each in greedy:
            for _ in range(60):
                each.send(header("waiting"), b"", X)
            each.ask(header(), b"", X) if each is greedy[0] else None
        good.send(header("waiting"), b"polite", X)
        assert good.ask(header(), b"", X)[1] == b""
        assert good.is_silent()


def test_peers_that_never_read_cost_little_and_no_other_an_answer(daemon, good):
    assert good.ask(header(), b"before", X)[1] == b"before"
    least = daemon.resident_bytes()
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            deaf = stack.enter_context(connected(daemon))
            deaf.settimeout(0.5)
            with contextlib.suppress(OSError):  # it takes no more, or has been closed
                deaf.sendall(WHOLE * 1_500)
        end_s = time.monotonic() + ANSWER_S
        while not good.result("stats")["metrics"]["counters"].get("connections_closed_unread"):
            assert time.monotonic() < end_s, "no connection was closed"
        assert good.ask(header(), b"after", X)[1] == b"after"
        assert daemon.resident_bytes() - least < BOUND_BYTES * 4
