"""What a model.py keeps for a sequence: a dict in its host that lives as long, and is told where it is lost."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import DecodeFailed, RunFailed, SequenceLost
from tests.contract.running_daemon import put_model, running_daemon
from tests.models import python_models

CODE = """
import numpy as np


def load(folder):
    return None


def infer(model, inputs, request):
    kept = request.sequence
    heard = kept.setdefault("heard", [])
    heard.append(inputs["x"].copy())
    if inputs["x"][0, 0] == 666:
        raise ValueError("a bad value")
    if inputs["x"][0, 0] == 777:
        kept["lock"] = __import__("threading").Lock()
    total = np.sum([each[:1] for each in heard], axis=0)
    shape = inputs["x"].shape
    return {
        "total": np.broadcast_to(total, shape).astype(np.float32),
        "steps": np.full(shape, len(heard), np.int64),
    }
"""


def keeping(folder):
    column = [-1, 1]
    return python_models.write(
        folder, [("x", "FP32", column)], [("total", "FP32", column), ("steps", "INT64", column)], CODE
    )


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "code", keeping, toml="[sequence]\nmax_sequences = 2\n")
    put_model(models, "bare", keeping, toml="[warmup]\nruns = 0\n")
    put_model(models, "small", keeping, toml="[sequence]\nmax_sequences = 8\nvalues_mb = 1\n")
    put_model(models, "handed", keeping, toml="[sequence]\nsnapshot = true\n")
    with running_daemon(models, tmp_path_factory.mktemp("run"), python_models=True) as daemon:
        yield daemon


@pytest.fixture
def client(daemon):
    with Client(daemon.endpoints[0]) as client:
        yield client


def x(value):
    return {"x": np.full((1, 1), value, np.float32)}


def said(result):
    return float(result["total"][0, 0]), int(result["steps"][0, 0])


@pytest.mark.smoke
def test_values_live_as_long_as_their_sequence(client):
    with client.sequence("code") as one, client.sequence("code") as other:
        assert [said(one.infer(x(value))) for value in (1, 2)] == [(1, 1), (3, 2)]
        assert said(other.infer(x(10))) == (10, 1)
        assert said(one.infer(x(3), end=True)) == (6, 3)
        assert said(one.infer(x(5))) == (5, 1)
    with client.sequence("code") as one:  # in the place of one that ended
        assert said(one.infer(x(1))) == (1, 1)


def test_values_are_as_before_where_a_run_fails_that_changed_them(client):
    with client.sequence("code") as steps:
        steps.infer(x(1))
        with pytest.raises(RunFailed, match="a bad value"):
            steps.infer(x(666))
        assert said(steps.infer(x(2))) == (3, 2)


def test_values_of_a_host_that_died_are_told_to_be_lost(client):
    with client.sequence("code") as steps:
        steps.infer(x(1))
        entry = next(each for each in client.models() if each["name"] == "code")
        os.kill(entry["host"]["pid"], signal.SIGKILL)
        with pytest.raises(SequenceLost, match="must specify the START flag"):
            steps.infer(x(2))
        steps.begin_anew()
        assert said(steps.infer(x(3))) == (3, 1)


def test_values_that_cannot_be_copied_fail_the_run_with_the_reason(client):
    with client.sequence("code") as steps:
        steps.infer(x(777))
        with pytest.raises(RunFailed, match="cannot be copied"):
            steps.infer(x(1))


def test_values_of_a_model_without_sequences_say_what_to_add(client):
    with pytest.raises(RunFailed, match=r"add \[sequence\] to model.toml"):
        client.infer("bare", x(1))


def test_values_are_bounded_and_a_run_that_would_keep_more_says_so_and_changes_nothing(client):
    block = {"x": np.zeros((31 << 10, 1), np.float32)}  # 124 KiB more a step, of which two steps are kept
    with client.sequence("small") as steps:
        for number in range(1, 5):
            assert steps.infer(block)["steps"][0, 0] == number
        for _ in range(2):
            with pytest.raises(RunFailed, match="raise values_mb"):
                steps.infer(block)
        assert said(steps.infer(x(1)))[1] == 5


def test_values_of_sequences_that_ended_make_room_for_others(client):
    block = {"x": np.zeros((31 << 10, 1), np.float32)}
    for _ in range(8):
        with client.sequence("small") as steps:
            assert [steps.infer(block)["steps"][0, 0] for _ in range(3)] == [1, 2, 3]


def test_values_are_counted_as_memory_of_their_model(client):
    found = {each["name"]: each["memory_bytes"] for each in client.models()}
    assert found["code"] >= 64 << 20
    assert 1 << 20 <= found["small"] < 64 << 20
    assert found["bare"] < 64 << 20


def test_values_of_code_are_handed_out_by_nobody(client):
    entry = next(each for each in client.models() if each["name"] == "handed")
    assert "keeps its state itself" in entry["reason"]
    with client.sequence("code") as steps, pytest.raises(DecodeFailed, match="snapshot = true"):
        steps.restore(b"x")
