"""Snapshots of sequences: taken and given by each client, over a restart, to another device, and what is none."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import urllib.request
from contextlib import contextmanager

import numpy as np
import pytest

from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.zmq.asyncio_client import AsyncClient
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import DecodeFailed, EdgeRuntimeError, SequenceLost, Unsupported
from tests.contract.running_daemon import http_url, put_model, running_daemon
from tests.contract.sequences.test_sequences_of_clients import clients, total, x
from tests.contract.sequences.test_stateful_models import TOML
from tests.models import onnx_models

SNAPSHOT = TOML.replace("[sequence]", "[sequence]\nsnapshot = true\nmax_sequences = 4")

GROWING = """
[sequence]
snapshot = true

[[sequence.state]]
input = "past"
output = "next"
shape = [0]
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    put_model(folder, "acc", onnx_models.accumulator, toml=SNAPSHOT)
    put_model(folder, "other", onnx_models.accumulator, toml=SNAPSHOT)
    put_model(folder, "plain", onnx_models.accumulator, toml=TOML)
    return folder


@pytest.fixture(scope="module")
def daemon(models, tmp_path_factory):
    doors = {"http": HttpSettings(endpoint="127.0.0.1:0"), "grpc": GrpcSettings(endpoint="127.0.0.1:0")}
    with running_daemon(models, tmp_path_factory.mktemp("run"), **doors) as daemon:
        yield daemon


@contextmanager
def asking(models, folder):
    with running_daemon(models, folder) as daemon, Client(daemon.endpoints[0]) as client:
        yield client


@pytest.fixture
def client(daemon):
    with Client(daemon.endpoints[0]) as client:
        yield client


@pytest.fixture
def steps(client):
    with client.sequence("acc") as steps:
        assert [total(steps.infer(x(value))) for value in (1, 2)] == [1, 3]
        yield steps


@pytest.mark.smoke
def test_snapshot_of_each_client_is_a_state_from_which_another_sequence_begins(daemon):
    for client in clients(daemon):
        with client, client.sequence("acc") as one, client.sequence("acc") as other:
            assert [total(one.infer(x(value))) for value in (1, 2)] == [1, 3]
            state = one.snapshot()
            assert total(one.infer(x(10))) == 13
            other.restore(state)
            result = other.infer(x(4))
            assert (total(result), result["number"][0, 0]) == (7, 3)


def test_snapshot_of_an_asyncio_client_is_alike(daemon):
    async def ask():
        async with AsyncClient(daemon.endpoints[0]) as client, client.sequence("acc") as steps:
            await steps.infer(x(1))
            state = await steps.snapshot(end=True)
            await steps.restore(state)
            return total(await steps.infer(x(2)))

    assert asyncio.run(ask()) == 3


def test_snapshot_that_ends_a_sequence_is_its_last_request(steps):
    state = steps.snapshot(end=True)
    assert total(steps.infer(x(5))) == 5
    steps.restore(state)
    assert total(steps.infer(x(5))) == 8


def test_snapshot_survives_a_restart_and_moves_to_a_device_that_shares_the_key(models, tmp_path):
    with asking(models, tmp_path / "run") as client, client.sequence("acc", 7) as steps:
        steps.infer(x(1))
        state = steps.snapshot()
    key = tmp_path / "run" / "state" / "sequences.key"
    assert key.stat().st_mode & 0o777 == 0o600
    with asking(models, tmp_path / "run") as client, client.sequence("acc", 7) as steps:
        steps.restore(state)
        assert total(steps.infer(x(2))) == 3
    (tmp_path / "second" / "state").mkdir(parents=True)
    shutil.copy(key, tmp_path / "second" / "state")
    with asking(models, tmp_path / "second") as client, client.sequence("acc", 8) as steps:
        steps.restore(state)
        assert total(steps.infer(x(2))) == 3


def test_snapshot_of_a_device_with_another_key_is_refused(steps, models, tmp_path):
    state = steps.snapshot()
    with (
        asking(models, tmp_path / "run") as client,
        client.sequence("acc") as stranger,
        pytest.raises(DecodeFailed, match=r"another sequences\.key"),
    ):
        stranger.restore(state)


def test_snapshot_is_taken_and_given_by_bare_json(daemon, steps):
    def ask(text, **parameters):
        body = {
            "parameters": {"sequence_id": steps.id, **parameters},
            "inputs": [{"name": "sequence_state", "datatype": "BYTES", "shape": [1], "data": [text]}],
        }
        request = urllib.request.Request(f"{http_url(daemon)}/v2/models/acc/infer", json.dumps(body).encode())
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["outputs"][0]["data"][0]

    state = ask("")
    steps.infer(x(100))
    assert ask(state, sequence_start=True) == state
    assert total(steps.infer(x(4))) == 7


def changed(state, index):
    data = bytearray(base64.b64decode(state))
    data[index] ^= 1
    return base64.b64encode(bytes(data))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda state: state[:-8], "not a snapshot|only a part"),
        (lambda state: state[:20], "not a snapshot"),
        (lambda _: b"\xff\x00", "not a snapshot"),
        (lambda _: b"x" * 100_000, "not a snapshot"),
        (lambda state: changed(state, 0), "signature"),
        (lambda state: changed(state, -1), "signature"),
        (lambda _: base64.b64encode(b"\x94" * 4096), "not a snapshot"),
    ],
)
def test_snapshot_that_was_cut_or_changed_is_refused_and_nothing_is_lost(steps, make, words):
    state = steps.snapshot()
    with pytest.raises(DecodeFailed, match=words):
        steps.restore(make(state))
    assert total(steps.infer(x(4))) == 7


def test_snapshot_of_another_model_is_refused_and_leaves_room(client, steps):
    state = steps.snapshot()
    for _ in range(10):  # more than there is room for
        with pytest.raises(DecodeFailed, match="of model 'acc' version 1; this is 'other' version 1"):
            client.sequence("other").restore(state)


def test_snapshot_of_another_version_or_of_other_shapes_is_refused(tmp_path):
    models = tmp_path / "models"
    put_model(models, "acc", onnx_models.accumulator, toml=SNAPSHOT)
    with asking(models, tmp_path / "run") as client, client.sequence("acc") as steps:
        steps.infer(x(1))
        state = steps.snapshot()
    put_model(models, "acc", onnx_models.accumulator, version=2)
    with (
        asking(models, tmp_path / "run") as client,
        client.sequence("acc") as steps,
        pytest.raises(DecodeFailed, match="this is 'acc' version 2"),
    ):
        steps.restore(state)
    shutil.rmtree(models / "acc")
    put_model(models, "acc", onnx_models.growing, toml=GROWING)
    with (
        asking(models, tmp_path / "run") as client,
        client.sequence("acc") as steps,
        pytest.raises(DecodeFailed, match=r"'a_sum' FP32 .* keeps 'past' FP32"),
    ):
        steps.restore(state)


def test_snapshot_of_a_sequence_that_is_not_there_is_told(client):
    with client.sequence("acc") as steps:
        steps.infer(x(1), end=True)
        with pytest.raises(SequenceLost):
            client.infer(
                "acc",
                {"sequence_state": np.array([b""], object)},
                parameters={"sequence_id": steps.id},
            )


def test_snapshot_of_a_model_that_hands_none_out_says_what_to_set(client, steps):
    state = steps.snapshot()
    with client.sequence("plain") as plain:
        plain.infer(x(1))
        with pytest.raises(Unsupported, match="snapshot = true"):
            plain.snapshot()
        with pytest.raises(DecodeFailed, match="snapshot = true"):
            plain.restore(state)
        assert total(plain.infer(x(2))) == 3


def test_snapshot_of_a_growing_state_has_its_length(tmp_path):
    put_model(tmp_path / "models", "grow", onnx_models.growing, toml=GROWING)
    with running_daemon(tmp_path / "models", tmp_path / "run") as daemon, Client(daemon.endpoints[0]) as client:
        sent = {"x": np.zeros(1, np.float32)}
        with client.sequence("grow") as one, client.sequence("grow") as other:
            for _ in range(3):
                one.infer(sent)
            other.restore(one.snapshot())
            assert other.infer(sent)["size"].tolist() == [4]


def test_block_that_ends_or_fails_ends_its_sequence(client):
    for _ in range(10):  # more than there is room for
        with client.sequence("acc") as steps:
            steps.infer(x(1))
    for _ in range(10):
        with pytest.raises(ZeroDivisionError):
            fail_in_a_block(client)
    with client.sequence("plain") as steps:
        steps.infer(x(1))
    with pytest.raises(EdgeRuntimeError):
        client.infer("plain", x(1), parameters={"sequence_id": steps.id})


def fail_in_a_block(client):
    with client.sequence("acc") as steps:
        steps.infer(x(1))
        raise ZeroDivisionError
