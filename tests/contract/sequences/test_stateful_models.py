"""A model that keeps state, served by a daemon: sequences over ZeroMQ, side by side, and what is told of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgpack
import numpy as np
import pytest

from tests.contract.running_daemon import RawClient, header, put_model, running_daemon
from tests.models import onnx_models

TOML = """
[sequence]
controls = { START = "START" }

[[sequence.state]]
input = "a_sum"
output = "z_sum"

[[sequence.state]]
input = "b_count"
output = "y_count"
"""


def extra(sequence, *, start=False, end=False) -> bytes:
    return msgpack.packb({"sequence": {"id": sequence, "start": start, "end": end}})


class Steps(RawClient):
    """Asks an accumulator by frames."""

    def step(self, value, sequence, model="acc", **marks):
        """The totals and the count of one step, or its error."""
        reply = self.ask(header(model, (1, 1), extra=True), b"", np.float32(value).tobytes(), extra(sequence, **marks))
        said = msgpack.unpackb(reply[0])
        return said["error"] if "error" in said else tuple(np.frombuffer(each, np.float32)[0] for each in reply[2:])


@pytest.fixture
def steps(tmp_path):
    put_model(tmp_path / "models", "acc", onnx_models.accumulator, toml=TOML)
    with running_daemon(tmp_path / "models", tmp_path / "run") as daemon, Steps(daemon.endpoints[0]) as client:
        client.daemon = daemon
        yield client


@pytest.mark.smoke
def test_a_sequence_continues_its_own_state_and_no_other(steps):
    assert steps.step(1, 7, start=True) == (1, 1)
    assert steps.step(10, "7", start=True) == (10, 1)
    assert [steps.step(value, 7) for value in (2, 3)] == [(3, 2), (6, 3)]
    assert steps.step(20, "7", end=True) == (30, 2)
    assert steps.step(4, 7, end=True) == (10, 4)


def test_a_sequence_that_is_not_there_is_told_as_triton_does(steps):
    error = steps.step(1, 7)
    assert (error["code"], error["retryable"]) == ("sequence_lost", False)
    assert error["message"] == (
        "inference request for sequence 7 to model 'acc' must specify the START flag on the first request of the "
        "sequence"
    )
    steps.step(1, 7, start=True, end=True)
    assert steps.step(1, 7)["code"] == "sequence_lost"


def test_a_start_in_the_middle_begins_anew(steps):
    steps.step(1, 7, start=True)
    assert steps.step(5, 7, start=True) == (5, 1)
    assert steps.step(6, 7) == (11, 2)


@pytest.mark.parametrize("sequence", [0, ""])
def test_a_request_of_no_sequence_is_refused(steps, sequence):
    assert steps.step(1, sequence, start=True)["code"] == "tensor_mismatch"


def test_more_than_one_row_is_refused(steps):
    reply = steps.ask(header("acc", (2, 1), extra=True), b"", np.float32([1, 2]).tobytes(), extra(7, start=True))
    assert "must specify batch-size 1" in msgpack.unpackb(reply[0])["error"]["message"]


def test_states_and_controls_are_no_inputs_of_callers(steps):
    assert [each["name"] for each in steps.result("metadata", model="acc")["inputs"]] == ["x"]
    assert [each["name"] for each in steps.result("metadata", model="acc")["outputs"]] == ["total", "number"]


def test_a_sequence_that_died_with_its_host_is_told_and_never_begins_from_zeros(steps):
    steps.step(1, 7, start=True)
    (entry,) = steps.result("models")
    os.kill(entry["host"]["pid"], signal.SIGKILL)
    told = steps.step(2, 7)
    assert told["code"] == "sequence_lost"
    assert steps.step(2, 7, start=True) == (2, 1)


def test_requests_of_one_sequence_keep_their_order_however_many_are_in_flight(steps):
    marks = {0: {"start": True}, 59: {"end": True}}
    for number in range(60):
        steps.send(
            header("acc", (1, 1), extra=True),
            b"%d" % number,
            np.float32(1).tobytes(),
            extra(3, **marks.get(number, {})),
        )
    replies = [steps.receive() for _ in range(60)]
    assert [int(each[1]) for each in replies] == list(range(60))
    assert [np.frombuffer(each[2], np.float32)[0] for each in replies] == list(range(1, 61))


def test_a_refused_request_neither_counts_nor_ends(steps):
    steps.step(1, 7, start=True)
    refused = steps.ask(header("acc", (1, 2), extra=True), b"", np.float32([1, 1]).tobytes(), extra(7, end=True))
    assert msgpack.unpackb(refused[0])["error"]["code"] == "tensor_mismatch"
    assert steps.step(2, 7) == (3, 2)


def test_an_extra_frame_that_is_none_is_refused(steps):
    for _ in range(4):  # the header becomes a known one
        reply = steps.ask(header("acc", (1, 1), extra=True), b"", np.float32(1).tobytes(), b"\xc1")
        assert msgpack.unpackb(reply[0])["error"]["code"] == "decode_failed"
    assert msgpack.unpackb(steps.ask(header("acc", (1, 1), extra=True), b"")[0])["error"]["code"] == "decode_failed"


def test_a_model_without_state_ignores_a_sequence(tmp_path):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    with running_daemon(tmp_path / "models", tmp_path / "run") as daemon, RawClient(daemon.endpoints[0]) as client:
        for _ in range(4):
            reply = client.ask(header(extra=True), b"", bytes(64), extra(7))
            assert len(reply) == 3


def test_a_state_begins_with_its_file(tmp_path):
    folder = tmp_path / "models" / "acc" / "initial_state"
    folder.mkdir(parents=True)
    (folder / "sum.bin").write_bytes(np.float32(100).tobytes())
    toml = TOML.replace('output = "z_sum"', 'output = "z_sum"\ninitial = "sum.bin"')
    put_model(tmp_path / "models", "acc", onnx_models.accumulator, toml=toml)
    with running_daemon(tmp_path / "models", tmp_path / "run") as daemon, Steps(daemon.endpoints[0]) as client:
        assert client.step(1, 7, start=True) == (101, 1)
        assert client.step(2, 7) == (103, 2)


def test_a_model_without_rows_keeps_state_too(tmp_path):
    put_model(tmp_path / "models", "acc", onnx_models.accumulator, rows=None, toml=TOML)
    with running_daemon(tmp_path / "models", tmp_path / "run") as daemon, RawClient(daemon.endpoints[0]) as client:
        totals = []
        for value in (1, 2, 3):
            reply = client.ask(
                header("acc", (1,), extra=True), b"", np.float32(value).tobytes(), extra(5, start=value == 1)
            )
            totals.append(np.frombuffer(reply[2], np.float32)[0])
        assert totals == [1, 3, 6]


def test_a_state_may_grow(tmp_path):
    toml = '[[sequence.state]]\ninput = "past"\noutput = "next"\nshape = [0]\n'
    put_model(tmp_path / "models", "grow", onnx_models.growing, toml=toml)
    with running_daemon(tmp_path / "models", tmp_path / "run") as daemon, RawClient(daemon.endpoints[0]) as client:
        sizes = []
        for number in range(1, 4):
            reply = client.ask(header("grow", (1,), extra=True), b"", bytes(4), extra(5, start=number == 1))
            sizes.append(np.frombuffer(reply[2], np.int64)[0])
        assert sizes == [1, 2, 3]


def test_controls_say_what_the_request_says(tmp_path):
    toml = (
        '[sequence]\ncontrols = { START = "START", END = "END", READY = "READY", CORRID = "CORRID" }\n'
        '[[sequence.state]]\ninput = "h_in"\noutput = "h_out"\n'
    )
    put_model(tmp_path / "models", "told", onnx_models.controls, toml=toml)
    with running_daemon(tmp_path / "models", tmp_path / "run") as daemon, RawClient(daemon.endpoints[0]) as client:

        def told(sequence, **marks):
            reply = client.ask(header("told", (1, 1), extra=True), b"", bytes(4), extra(sequence, **marks))
            said = msgpack.unpackb(reply[0])
            return said["error"]["code"] if "error" in said else np.frombuffer(reply[2], np.int32).tolist()

        assert told(9, start=True) == [1, 0, 1, 9]
        assert told(9) == [0, 0, 1, 9]
        assert told(9, end=True) == [0, 1, 1, 9]
        assert told("nine", start=True) == "tensor_mismatch"


def test_a_start_beyond_the_room_is_refused_and_no_middle_is(tmp_path):
    toml = TOML.replace("[sequence]\n", "[sequence]\nmax_sequences = 2\n")
    put_model(tmp_path / "models", "acc", onnx_models.accumulator, toml=toml)
    with running_daemon(tmp_path / "models", tmp_path / "run") as daemon, Steps(daemon.endpoints[0]) as client:
        assert [client.step(1, each, start=True) for each in (1, 2)] == [(1, 1), (1, 1)]
        assert client.step(1, 3, start=True)["code"] == "queue_full"
        assert client.step(1, 2) == (2, 2)
        assert client.step(1, 1, end=True) == (2, 2)
        assert client.step(1, 3, start=True) == (1, 1)


@pytest.mark.parametrize(
    ("was", "wanted", "words"),
    [
        ('"a_sum"', '"nope"', "state input 'nope'"),
        ('"z_sum"', '"nope"', "state output 'nope'"),
        ('"START" }', '"nope" }', "sequence control 'nope'"),
        ('output = "z_sum"', 'output = "z_sum"\ninitial = "none.bin"', "failed to open text file for read"),
        ('output = "z_sum"', 'output = "z_sum"\ndatatype = "INT32"', "all must be the same"),
        ('output = "z_sum"', 'output = "z_sum"\nshape = [2]', "is declared with the shape [2]"),
    ],
)
def test_a_state_that_the_model_has_not_is_a_failed_load(tmp_path: Path, was, wanted, words):
    put_model(tmp_path / "models", "acc", onnx_models.accumulator, toml=TOML.replace(was, wanted))
    with running_daemon(tmp_path / "models", tmp_path / "run") as daemon, RawClient(daemon.endpoints[0]) as client:
        (entry,) = client.result("models")
        assert entry["state"] == "failed"
        assert words in entry["reason"]
