"""Sequences by each client, over a swap of the model, and many side by side while hosts die and versions change."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import threading

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.mqtt.client import MqttClient
from edge_runtime.doors.open_inference.client import OipClient
from edge_runtime.doors.zmq.asyncio_client import AsyncClient
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import EdgeRuntimeError, NotReady, SequenceLost
from tests.contract.raw_http import RawHttp, json_infer, request
from tests.contract.running_daemon import (
    ANSWER_S,
    RawClient,
    grpc_url,
    http_url,
    online_daemon,
    put_model,
    running_daemon,
)
from tests.contract.sequences.test_stateful_models import TOML
from tests.fakes.broker import Broker, needs_mosquitto
from tests.models import onnx_models


def x(value):
    return {"x": np.full((1, 1), value, np.float32)}


def total(result):
    return float(result["total"][0, 0])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    put_model(folder, "acc", onnx_models.accumulator, toml=TOML)
    return folder


@pytest.fixture(scope="module")
def daemon(models, tmp_path_factory):
    doors = {"http": HttpSettings(endpoint="127.0.0.1:0"), "grpc": GrpcSettings(endpoint="127.0.0.1:0")}
    with running_daemon(models, tmp_path_factory.mktemp("run"), **doors) as daemon:
        yield daemon


def clients(daemon):
    yield Client(daemon.endpoints[0])
    yield OipClient(daemon.doors["http"].endpoints[0])
    yield OipClient(daemon.doors["grpc"].endpoints[0])


def test_each_client_continues_its_sequence_and_may_begin_it_anew(daemon):
    for client in clients(daemon):
        with client, client.sequence("acc") as one, client.sequence("acc", "named") as other:
            assert [total(one.infer(x(value))) for value in (1, 2, 3)] == [1, 3, 6]
            assert total(other.infer(x(10))) == 10
            assert total(one.infer(x(4), end=True)) == 10
            assert total(one.infer(x(5))) == 5
            other.begin_anew()
            assert total(other.infer(x(7), end=True)) == 7


def test_a_request_that_was_refused_is_still_the_first(daemon):
    with Client(daemon.endpoints[0]) as client, client.sequence("acc") as steps:
        with pytest.raises(EdgeRuntimeError):
            steps.infer({"x": np.zeros((1, 5), np.float32)})
        assert total(steps.infer(x(2), end=True)) == 2


def test_an_asyncio_client_has_sequences_too(daemon):
    async def ask():
        async with AsyncClient(daemon.endpoints[0]) as client, client.sequence("acc") as steps:
            return [total(await steps.infer(x(value), end=value == 3)) for value in (1, 2, 3)]

    assert asyncio.run(ask()) == [1, 3, 6]


@pytest.fixture
def reading_daemon(models, tmp_path):
    """One whose doors may begin their threads for large bodies."""
    doors = {"http": HttpSettings(endpoint="127.0.0.1:0"), "grpc": GrpcSettings(endpoint="127.0.0.1:0")}
    with running_daemon(models, tmp_path / "run", **doors) as daemon:
        yield daemon


def step(value, **parameters):
    """A request in JSON of one sequence."""
    return json_infer([value], (1, 1), parameters={"sequence_id": 5, **parameters})


LARGE_BYTES = 4 << 20
"""Of a body that is read beside its door's thread, which takes the small one behind it meanwhile."""


def test_a_small_request_over_http_does_not_overtake_a_large_one_of_its_sequence(reading_daemon):
    bodies = [step(2.0, sequence_start=True).ljust(LARGE_BYTES), step(3.0), step(4.0).ljust(LARGE_BYTES), step(5.0)]
    with RawHttp(http_url(reading_daemon)) as http:
        http.send(b"".join(request("POST", "/v2/models/acc/infer", body) for body in bodies))
        answers = [http.response().fields for _ in bodies]
    assert [answer["outputs"][0]["data"] for answer in answers] == [[2.0], [5.0], [9.0], [14.0]], answers


def test_a_small_request_over_grpc_does_not_overtake_a_compressed_one_of_its_sequence(reading_daemon):
    with grpc.insecure_channel(grpc_url(reading_daemon).removeprefix("grpc://")) as channel:
        infer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        first = message(1.0, sequence_start=True, sequence_end=True)
        infer(first, timeout=ANSWER_S)  # it is connected now
        large = message(2.0, blanks=LARGE_BYTES, sequence_start=True)
        calls = [infer.future(large, compression=grpc.Compression.Gzip), infer.future(message(3.0))]
        answers = [call.result(ANSWER_S).raw_output_contents[0] for call in calls]
    assert [np.frombuffer(answer, np.float32)[0] for answer in answers] == [2.0, 5.0]


def message(value, *, blanks=0, **parameters):
    """A request of gRPC of one sequence. blanks: so many bytes of another parameter."""
    made = service_pb2.ModelInferRequest(model_name="acc", raw_input_contents=[np.float32(value).tobytes()])
    made.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    made.parameters["sequence_id"].int64_param = 6
    for name, is_set in parameters.items():
        made.parameters[name].bool_param = is_set
    if blanks:
        made.parameters["note"].string_param = " " * blanks
    return made


@needs_mosquitto
def test_a_client_over_mqtt_has_sequences_too(models, tmp_path):
    with Broker(tmp_path / "broker") as broker:
        url = f"{broker.url}/line-3"
        with online_daemon(models, tmp_path / "run", url), MqttClient(url) as client:
            steps = client.sequence("acc")
            assert [total(steps.infer(x(value), end=value == 3)) for value in (1, 2, 3)] == [1, 3, 6]


def test_a_running_sequence_ends_on_the_version_that_it_began_on(tmp_path):
    put_model(tmp_path / "models", "acc", onnx_models.accumulator, toml=TOML)
    with (
        running_daemon(tmp_path / "models", tmp_path / "run", drain_s=ANSWER_S) as daemon,
        Client(daemon.endpoints[0]) as client,
    ):
        old, new = client.sequence("acc"), client.sequence("acc")
        assert total(old.infer(x(1))) == 1
        put_model(tmp_path / "models", "acc", onnx_models.accumulator, version=2, gain=100.0)
        while total(new.infer(x(1), end=True)) != 100:
            assert total(old.infer(x(0))) == 1
        assert total(old.infer(x(2))) == 3
        assert total(old.infer(x(3), end=True)) == 6
        with pytest.raises(SequenceLost):
            client.infer("acc", x(1), parameters={"sequence_id": old.id})


def test_a_sequence_left_of_a_version_after_its_time_is_lost_and_told(tmp_path):
    put_model(tmp_path / "models", "acc", onnx_models.accumulator, toml=TOML)
    with (
        running_daemon(tmp_path / "models", tmp_path / "run", drain_s=0.01) as daemon,
        Client(daemon.endpoints[0]) as client,
    ):
        old, new = client.sequence("acc"), client.sequence("acc")
        old.infer(x(1))
        put_model(tmp_path / "models", "acc", onnx_models.accumulator, version=2, gain=100.0)
        while total(new.infer(x(1), end=True)) != 100:
            pass
        with pytest.raises(SequenceLost):
            asked_until_it_is_gone(old)


def asked_until_it_is_gone(steps):
    while True:
        assert total(steps.infer(x(0))) == 1


STEPS = int(os.environ.get("SEQUENCE_STEPS", "600"))
"""Of all sequences together; 10 000 are the bar of a soak."""


def test_many_sequences_side_by_side_equal_their_own_histories_or_are_told_their_loss(tmp_path):
    models = tmp_path / "models"
    put_model(models, "acc", onnx_models.accumulator, toml=TOML.replace("[sequence]", "[sequence]\nidle_ms = 2000"))
    counts = {"right": 0, "lost": 0, "wrong": [], "left": STEPS}
    lock = threading.Lock()

    def ask(daemon, number):
        random_of = random.Random(number)
        with Client(daemon.endpoints[0]) as client:
            own, expected, steps = number, None, None
            while True:
                with lock:
                    counts["left"] -= 1
                    if counts["left"] < 0:
                        return
                if steps is None:
                    steps, expected = client.sequence("acc", own), 0.0
                value, end = float(random_of.randrange(1, 9)), random_of.random() < 0.02
                try:
                    result = steps.infer(x(value), end=end)
                except SequenceLost:
                    counts["lost"] += 1
                    steps = None
                    continue
                except NotReady:
                    continue
                expected += value
                if total(result) != expected:
                    counts["wrong"].append((number, expected, total(result)))
                counts["right"] += 1
                steps = None if end else steps

    with running_daemon(models, tmp_path / "run", drain_s=0.2) as daemon:
        threads = [threading.Thread(target=ask, args=(daemon, number)) for number in range(1, 51)]
        for thread in threads:
            thread.start()
        with RawClient(daemon.endpoints[0]) as raw:
            version = 1
            for turn in range(4):
                while counts["left"] > STEPS * (3 - turn) / 4 and any(map(threading.Thread.is_alive, threads)):
                    threads[0].join(0.05)
                if turn % 2:
                    version += 1
                    put_model(models, "acc", onnx_models.accumulator, version=version)
                    shutil.rmtree(models / "acc" / str(version - 1))
                    continue
                for entry in raw.result("models"):
                    if entry["host"] and entry["state"] == "ready":
                        os.kill(entry["host"]["pid"], signal.SIGKILL)
        for thread in threads:
            thread.join(10 * ANSWER_S)
    assert counts["wrong"] == []
    assert counts["right"] > STEPS / 2
    assert counts["lost"] > 0


def test_a_version_whose_sequences_run_on_holds_up_no_other_load(tmp_path):
    put_model(tmp_path / "models", "acc", onnx_models.accumulator, toml=TOML)
    with (
        running_daemon(tmp_path / "models", tmp_path / "run", drain_s=10 * ANSWER_S) as daemon,
        Client(daemon.endpoints[0]) as client,
        client.sequence("acc") as old,
    ):
        assert total(old.infer(x(1))) == 1
        for version in (2, 3):
            put_model(tmp_path / "models", "acc", onnx_models.accumulator, version=version, gain=100.0)
            put_model(tmp_path / "models", f"other-{version}", onnx_models.mlp)
            client.wait_ready(ANSWER_S, f"other-{version}")
        assert [each["version"] for each in client.models() if each["state"] == "ready" and each["name"] == "acc"] == [
            3
        ]
        assert total(old.infer(x(2))) == 3


def test_a_start_beyond_the_room_is_sent_again_until_there_is_some_or_its_deadline(tmp_path):
    toml = TOML.replace("[sequence]", "[sequence]\nmax_sequences = 1")
    put_model(tmp_path / "models", "acc", onnx_models.accumulator, toml=toml)
    with running_daemon(tmp_path / "models", tmp_path / "run") as daemon, Client(daemon.endpoints[0]) as client:
        first = client.sequence("acc")
        assert total(first.infer(x(1))) == 1
        with client.sequence("acc") as late, pytest.raises(EdgeRuntimeError) as refused:
            late.infer(x(1), retry=True, timeout_ms=200.0)
        assert refused.value.code in ("queue_full", "deadline_unmeetable", "deadline_exceeded")
        answers = []
        waiting = threading.Thread(target=wait_for_room, args=(daemon, answers))
        waiting.start()
        assert total(first.infer(x(2), end=True)) == 3
        waiting.join(ANSWER_S)
    assert answers == [5]


def wait_for_room(daemon, answers):
    with Client(daemon.endpoints[0]) as client, client.sequence("acc") as steps:
        answers.append(total(steps.infer(x(5), retry=True, timeout_ms=1e3 * ANSWER_S)))
