"""OpenVINO's graphs that keep states of their own: with [sequence] they belong to a sequence."""

from __future__ import annotations

import numpy as np
import pytest

from edge_runtime.doors.zmq.client import Client
from tests.contract.running_daemon import put_model, running_daemon
from tests.contract.sequences.test_sequences_of_clients import total, x
from tests.models import stateful_ir


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "ir", stateful_ir.accumulator, toml="[sequence]\nsnapshot = true\n")
    put_model(models, "fixed", stateful_ir.accumulator, rows=1, toml="[sequence]\n")
    put_model(models, "none", stateful_ir.accumulator)
    with running_daemon(models, tmp_path_factory.mktemp("run")) as daemon:
        yield daemon


@pytest.fixture
def client(daemon):
    with Client(daemon.endpoints[0]) as client:
        yield client


@pytest.mark.smoke
@pytest.mark.parametrize("model", ["ir", "fixed"])
def test_states_of_a_graph_belong_to_their_sequence_and_begin_as_the_graph_says(client, model):
    with client.sequence(model) as one, client.sequence(model) as other:
        assert [total(one.infer(x(value))) for value in (1, 2)] == [6, 8]
        assert total(other.infer(x(10))) == 15
        result = one.infer(x(3))
        assert (total(result), result["number"][0, 0]) == (11, 3)
    described = client.metadata(model)
    assert [each["name"] for each in described["inputs"]] == ["x"]
    assert [each["name"] for each in described["outputs"]] == ["total", "number"]


def test_states_of_a_graph_are_handed_out(client):
    with client.sequence("ir") as one, client.sequence("ir") as other:
        one.infer(x(1))
        other.restore(one.snapshot())
        assert total(other.infer(x(2))) == 8


def test_states_of_a_graph_run_together_however_many_are_in_flight(client):
    def ask(sequence, value, *, start):
        return client.submit("ir", x(value), parameters={"sequence_id": sequence, "sequence_start": start})

    answers = [[ask(sequence, sequence, start=turn == 0) for turn in range(20)] for sequence in range(1, 9)]
    for sequence, each in enumerate(answers, 1):
        assert [total(answer.result()) for answer in each] == [5 + sequence * turn for turn in range(1, 21)]


def test_states_of_a_graph_without_sequences_begin_anew_with_each_request(client):
    assert [total(client.infer("none", x(1))) for _ in range(3)] == [6, 6, 6]
    assert client.infer("none", {"x": np.ones((2, 1), np.float32)})["total"].tolist() == [[6], [6]]
