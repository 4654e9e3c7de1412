"""Clients that leave or are killed: what waits of them is dropped, and nobody waits for it."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import zmq

from tests.contract.running_daemon import ANSWER_S, RawClient, floats, header, put_model, running_daemon
from tests.models import onnx_models

X = floats(1, 16).tobytes()
COUNT = 500
WAITING = 'mode = "workers"\nmax_queue_delay_ms = 600_000\nmax_batch_rows = 2_000\n'
"""Requests of this model wait for a batch that never comes."""

SENDER = """
import sys, time, zmq
client = zmq.Context().socket(zmq.DEALER)
client.connect(sys.argv[1])
for _ in range(int(sys.argv[2])):
    client.send_multipart([bytes.fromhex(sys.argv[3]), b"", bytes(64)])
print("sent", flush=True)
time.sleep(600)
"""


@pytest.fixture
def daemon(tmp_path):
    put_model(tmp_path / "models", "waiting", onnx_models.mlp, toml=WAITING)
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    with running_daemon(tmp_path / "models", tmp_path / "run") as daemon:
        yield daemon


@pytest.fixture
def good(daemon):
    with RawClient(daemon.endpoints[1]) as client:
        yield client


def wait_for_rows(good: RawClient, rows: int) -> None:
    """Until so many rows wait, as `stats` tells."""
    end_s = time.monotonic() + ANSWER_S
    while (found := good.result("stats")["metrics"]["models"]["waiting"]["queue_rows"]) != rows:
        assert time.monotonic() < end_s, f"{found} rows wait, wanted {rows}"


def dropped(good: RawClient) -> int:
    return good.result("stats")["metrics"]["counters"].get("requests_dropped", 0)


def test_requests_of_a_client_that_closes_are_dropped(daemon, good):
    good.send(header("waiting"), b"kept", X)
    with RawClient(daemon.endpoints[1]) as leaving:
        for _ in range(COUNT):
            leaving.send(header("waiting"), b"", X)
        wait_for_rows(good, COUNT + 1)
    wait_for_rows(good, 1)
    assert dropped(good) == COUNT


def test_requests_of_a_client_that_is_killed_are_dropped(daemon, good):
    arguments = [daemon.endpoints[1], str(COUNT), header("waiting").hex()]
    with subprocess.Popen([sys.executable, "-c", SENDER, *arguments], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"sent\n"
        wait_for_rows(good, COUNT)
        client.kill()
        wait_for_rows(good, 0)
    assert dropped(good) == COUNT


def test_a_message_that_outlives_its_connection_is_not_run(daemon, good):
    for number in range(50):
        with RawClient(daemon.endpoints[1]) as leaving:
            leaving.socket.set(zmq.LINGER, 5_000)
            leaving.send(header("waiting"), b"%d" % number, X)
            leaving.socket.close()
            leaving.context.term()
    good.ask(header(), b"", X)
    wait_for_rows(good, 0)
