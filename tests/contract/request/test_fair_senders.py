"""Senders beside each other over real sockets: a burst delays its own, and every refusal is told once."""

from __future__ import annotations

import msgpack
import pytest

from tests.contract.running_daemon import RawClient, error_code, floats, header, put_model, running_daemon
from tests.models import onnx_models

X = floats(1, 16).tobytes()
QUEUE_ROWS = 8
REFUSED = 3000
"""More small requests than one sender has refused at once in a second."""

WAITING = f'mode = "workers"\nmax_batch_rows = 16\nmax_queue_delay_ms = 5_000\nmax_queue_rows = {QUEUE_ROWS}\n'
"""A model whose queue stays full for five seconds: a busy machine needs some for what is sent meanwhile."""


@pytest.fixture
def models(tmp_path):
    put_model(tmp_path / "models", "waiting", onnx_models.mlp, toml=WAITING)
    return tmp_path / "models"


def fill(client: RawClient, count: int) -> None:
    """Send requests, numbered, and wait until the daemon has taken them."""
    for number in range(count):
        client.send(header("waiting"), b"%d" % number, X)


def wait_until_taken(client: RawClient) -> list[list[bytes]]:
    """Ask for something that is answered at once; return the replies that came before it."""
    client.send(msgpack.packb({"v": 1, "op": "live"}), b"live")
    replies = []
    while (reply := client.receive())[1] != b"live":
        replies.append(reply)
    return replies


@pytest.mark.smoke
def test_one_that_fills_the_queue_gives_way_to_another(models, tmp_path):
    with running_daemon(models, tmp_path / "run", calibrate=False) as daemon:
        endpoint = daemon.endpoints[1]
        with RawClient(endpoint) as greedy, RawClient(endpoint) as polite:
            fill(greedy, QUEUE_ROWS)
            assert wait_until_taken(greedy) == []

            assert "outputs" in msgpack.unpackb(polite.ask(header("waiting"), b"polite", X)[0])

            replies = {reply[1]: reply for reply in (greedy.receive() for _ in range(QUEUE_ROWS))}
            last = replies.pop(b"%d" % (QUEUE_ROWS - 1))
            assert error_code(last) == "queue_full"
            assert all("outputs" in msgpack.unpackb(reply[0]) for reply in replies.values())


@pytest.mark.parametrize("stops", [False, True])
def test_a_storm_of_refusals_gets_each_reply_once_and_leaves_no_other_client_unheard(models, tmp_path, stops):
    with running_daemon(models, tmp_path / "run", calibrate=False) as daemon:
        endpoint = daemon.endpoints[1]
        with RawClient(endpoint, reads_all=True) as greedy, RawClient(endpoint) as polite:
            fill(greedy, QUEUE_ROWS + REFUSED)
            replies = wait_until_taken(greedy)
            assert "outputs" in msgpack.unpackb(polite.ask(header("waiting"), b"polite", X)[0])
            if stops:
                daemon.stop()
            replies += [greedy.receive() for _ in range(QUEUE_ROWS + REFUSED - len(replies))]

            assert len({reply[1] for reply in replies}) == QUEUE_ROWS + REFUSED
            assert greedy.is_silent(50)
            codes = [error_code(reply) for reply in replies if "error" in msgpack.unpackb(reply[0])]
            assert set(codes) <= {"queue_full", "draining"}
            assert len(codes) >= REFUSED - QUEUE_ROWS
