"""Clients that do with sequences what no client should: they are refused, and nobody else's state moves."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request

import msgpack
import numpy as np
import pytest

from edge_runtime.config.settings import LimitSettings
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import QueueFull, SequenceLost
from tests.contract.running_daemon import ANSWER_S, RawClient, header, http_url, put_model, running_daemon
from tests.contract.sequences.test_sequences_of_clients import total, x
from tests.contract.sequences.test_stateful_models import TOML, extra
from tests.models import onnx_models

MANY, FLOOD = 10_000, 1_000


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "acc", onnx_models.accumulator, toml=TOML)
    put_model(models, "few", onnx_models.accumulator, toml=TOML.replace("[sequence]", "[sequence]\nmax_sequences = 4"))
    doors = {"http": HttpSettings(endpoint="127.0.0.1:0")}
    with running_daemon(models, tmp_path_factory.mktemp("run"), **doors) as daemon:
        yield daemon


@pytest.fixture
def client(daemon):
    with Client(daemon.endpoints[0]) as client:
        yield client


@pytest.fixture
def bystander(client):
    """A sequence that has to go on as if nothing had been."""
    with client.sequence("acc", "bystander") as steps:
        assert total(steps.infer(x(1))) == 1
        yield steps
        assert total(steps.infer(x(2))) == 3


def code_of(reply):
    said = msgpack.unpackb(reply[0])
    return said["error"]["code"] if "error" in said else ""


@pytest.mark.parametrize(
    ("sequence", "code"),
    [
        ("x" * 65536, "decode_failed"),
        ("ä" * 65, "decode_failed"),
        ("", "tensor_mismatch"),
        (0, "tensor_mismatch"),
        (1.5, "decode_failed"),
        (True, "decode_failed"),
        ([7], "decode_failed"),
        ({"a": 1}, "decode_failed"),
        (-(1 << 63), ""),
        ((1 << 64) - 1, ""),
        ("\0", ""),
        ("a\0", ""),
        ("x" * 128, ""),
    ],
)
def test_ids_that_are_none_are_refused_and_odd_ones_are_ids(daemon, bystander, sequence, code):
    with RawClient(daemon.endpoints[0]) as raw:
        for _ in range(3):  # its header becomes a known one
            reply = raw.ask(
                header("acc", (1, 1), extra=True),
                b"",
                np.float32(1).tobytes(),
                extra(sequence, start=True, end=True),
            )
            assert code_of(reply) == code


@pytest.mark.parametrize("sequence", ["x" * 4096, "", 0, 1.5, True, [7], None, {"a": 1}, 1 << 64, -(1 << 70)])
def test_ids_over_http_are_refused_as_the_callers_fault(daemon, bystander, sequence):
    body = {
        "parameters": {"sequence_id": sequence, "sequence_start": True},
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}],
    }
    request = urllib.request.Request(f"{http_url(daemon)}/v2/models/acc/infer", json.dumps(body).encode())
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == 400
    refused.value.close()


def test_ids_that_end_in_nul_are_not_one_sequence(client):
    with client.sequence("acc", "a") as one, client.sequence("acc", "a\0") as other:
        assert [total(one.infer(x(1))), total(other.infer(x(10))), total(one.infer(x(2)))] == [1, 10, 3]


def test_ends_without_a_start_change_nothing(client, bystander):
    for _ in range(100):
        with pytest.raises(SequenceLost):
            client.infer("acc", x(1), parameters={"sequence_id": 99, "sequence_end": True})


def test_two_starts_in_flight_leave_the_state_of_the_second(client, bystander):
    ask = {"sequence_id": 5}
    for _ in range(20):
        sent = [client.submit("acc", x(value), parameters={**ask, "sequence_start": True}) for value in (1, 10, 100)]
        sent.append(client.submit("acc", x(1000), parameters={**ask, "sequence_end": True}))
        assert [total(each.result(ANSWER_S)) for each in sent] == [1, 10, 100, 1100]


def test_requests_of_several_headers_keep_their_order_in_one_sequence(daemon):
    """Known headers, whose requests are gathered, and others between them."""
    plain = header("acc", (1, 1), extra=True)
    some = header("acc", (1, 1), extra=True, outputs=["total"])
    with RawClient(daemon.endpoints[0]) as raw:
        for turn in range(20):
            value = np.float32(1).tobytes()
            raw.send(plain, b"", value, extra(3, start=True))
            for number in range(30):
                odd = header("acc", (1, 1), extra=True, timeout_ms=1e5 + turn * 100 + number)
                raw.send((plain, plain, some, odd)[number % 4], b"", value, extra(3))
            raw.send(some, b"", value, extra(3, end=True))
            replies = [raw.receive() for _ in range(32)]
            assert [np.frombuffer(each[2], np.float32)[0] for each in replies] == list(range(1, 33))


def test_ten_thousand_sequences_come_and_go_in_the_room_of_four(client):
    answers = []
    for number in range(1, MANY + 1):
        ask = {"sequence_id": number, "sequence_start": True, "sequence_end": True}
        answers.append(client.submit("few", x(number), parameters=ask))
        if len(answers) == 4:  # each has ended when the next ones begin
            assert [total(each.result(ANSWER_S)) for each in answers] == list(range(number - 3, number + 1))
            answers.clear()


def test_many_starts_without_an_end_take_the_room_that_there_is_and_no_more(client, bystander):
    def start(number):
        marks = {"sequence_id": number, "sequence_start": True}
        return client.submit("few", x(1), parameters=marks, timeout_ms=500.0)  # refusals of a flood are held till then

    counts = {"": 0, "queue_full": 0}
    answers = []
    for number in range(1, FLOOD + 1):
        answers.append(start(number))
        if len(answers) == 100:
            for each in answers:
                error = each.exception(ANSWER_S)
                counts["" if error is None else error.code] += 1
            answers.clear()
    assert counts == {"": 4, "queue_full": FLOOD - 4}
    for number in range(1, 5):
        assert total(client.infer("few", x(1), parameters={"sequence_id": number, "sequence_end": True})) == 2
    with client.sequence("few") as steps:
        assert total(steps.infer(x(1))) == 1


def test_a_restart_of_a_sequence_needs_room_too_and_leaves_the_one_that_runs(client):
    running = [client.sequence("few") for _ in range(4)]
    assert [total(each.infer(x(1))) for each in running] == [1, 1, 1, 1]
    with pytest.raises(QueueFull):
        client.infer("few", x(1), parameters={"sequence_id": running[0].id, "sequence_start": True})
    assert [total(each.infer(x(2), end=True)) for each in running] == [3, 3, 3, 3]


def test_ends_during_a_swap_are_answered_by_the_version_of_their_start_or_told(tmp_path):
    put_model(tmp_path / "models", "acc", onnx_models.accumulator, toml=TOML)
    with running_daemon(tmp_path / "models", tmp_path / "run") as daemon, Client(daemon.endpoints[0]) as client:
        sequences = [client.sequence("acc") for _ in range(64)]
        for steps in sequences:
            steps.infer(x(1))
        swapping = threading.Thread(
            target=lambda: put_model(tmp_path / "models", "acc", onnx_models.accumulator, version=2, gain=100.0)
        )
        swapping.start()
        assert [total(steps.infer(x(2), end=True)) for steps in sequences] == [3] * 64
        swapping.join()
        while total(client.sequence("acc").infer(x(1), end=True)) != 100:
            pass
        while any(each["version"] == 1 and each["state"] == "ready" for each in client.models()):
            pass


def test_states_that_memory_does_not_hold_are_a_failed_load_and_nothing_else_suffers(tmp_path):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    toml = '[sequence]\nmax_sequences = 100000\n[[sequence.state]]\ninput = "h_in"\noutput = "h_out"\n'
    put_model(tmp_path / "models", "large", lambda folder: onnx_models.recurrent(folder, 512), toml=toml)
    limits = LimitSettings(memory_bytes=64 << 20)
    with (
        running_daemon(tmp_path / "models", tmp_path / "run", limits=limits) as daemon,
        Client(daemon.endpoints[0]) as client,
    ):
        entries = {each["name"]: each for each in client.models()}
        assert entries["large"]["state"] == "failed"
        assert "memory" in entries["large"]["reason"]
        assert client.is_ready("mlp")
