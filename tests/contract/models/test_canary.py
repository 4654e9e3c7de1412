"""A release answers some of the requests, however they come in, and each answer says who gave it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from edge_runtime.config.loading import configured
from edge_runtime.config.settings import ZmqSettings
from edge_runtime.daemon.assemble import assemble_core, assemble_daemon
from edge_runtime.doors.mqtt.client import MqttClient
from edge_runtime.doors.mqtt.settings import MqttSettings
from edge_runtime.errors import LoadFailed
from edge_runtime.request import infer
from edge_runtime.request.plan import plan_request
from edge_runtime.updates.mirror import begin_shadow
from tests.contract.models.release_kits import (
    INLINE,
    WORKERS,
    Hammer,
    X,
    answer_of,
    put_adder,
    release,
    release_of,
    runtime,
)
from tests.contract.running_daemon import RawClient, header
from tests.fakes.broker import Broker
from tests.models import onnx_models

MODES = pytest.mark.parametrize("toml", [INLINE, WORKERS], ids=["inline", "workers"])


@pytest.fixture
def canary(tmp_path, request):
    """A runtime whose model adds 1, and an exchange with one that adds 2."""
    toml = getattr(request, "param", INLINE)
    put_adder(tmp_path / "models", 1, toml=toml)
    with runtime(tmp_path / "models", tmp_path) as rt:
        yield rt, rt.core.loader.swap(release(tmp_path / "r1", 2, version=2, toml=toml))


BOTH_MODES = pytest.mark.parametrize("canary", [INLINE, WORKERS], ids=["inline", "workers"], indirect=True)


@BOTH_MODES
@pytest.mark.parametrize(("percent", "asked", "expected"), [(25, 100, 25), (1, 200, 2), (100, 10, 10), (0.5, 400, 2)])
def test_so_many_percent_of_the_requests_go_to_the_candidate(canary, percent, asked, expected):
    rt, swap = canary
    swap.split(percent)
    assert Counter(answer_of(rt) for _ in range(asked))[2, 2.0] == expected


@BOTH_MODES
def test_they_are_spread_evenly(canary):
    rt, swap = canary
    swap.split(25)
    assert [answer_of(rt)[0] for _ in range(12)] == [1, 1, 1, 2] * 3


def test_a_plan_that_was_made_before_the_split_is_not_kept_after_it(canary, monkeypatch):
    rt, swap = canary

    def plan_late(table, asked, origin):
        plan = plan_request(table, asked, origin)
        monkeypatch.setattr(infer, "plan_request", plan_request)
        swap.split(50)
        answer_of(rt, timeout_ms=1e4)  # another request sees the split before this one keeps its plan
        return plan

    monkeypatch.setattr(infer, "plan_request", plan_late)
    answer_of(rt)
    assert {answer_of(rt)[0] for _ in range(4)} == {1, 2}


@BOTH_MODES
def test_a_request_that_names_a_version_gets_that_one(canary):
    rt, swap = canary
    swap.split(50)
    assert {answer_of(rt, version=1) for _ in range(8)} == {(1, 1)}
    assert {answer_of(rt, version=2) for _ in range(8)} == {(2, 2)}


def test_versions_of_the_same_number_are_split_too_and_the_current_answers_to_the_number(tmp_path):
    put_adder(tmp_path / "models", 1)
    with runtime(tmp_path / "models", tmp_path) as rt:
        rt.core.loader.swap(release(tmp_path / "r1", 2)).split(50)
        assert [answer_of(rt)[1] for _ in range(4)] == [1, 2, 1, 2]
        assert {answer_of(rt, version=1)[1] for _ in range(4)} == {1}


@BOTH_MODES
@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (lambda swap: swap.split(0), (1, 1)),
        (lambda swap: swap.roll_back(), (1, 1)),
        (lambda swap: swap.switch(), (2, 2)),
        (lambda swap: swap.commit(), (2, 2)),
    ],
    ids=["split 0", "roll back", "swap", "commit"],
)
def test_it_ends_with_any_decision_and_loses_no_request(canary, end, expected):
    rt, swap = canary
    with Hammer().asking(lambda: answer_of(rt)) as hammer:
        swap.split(50)
        while swap.candidate.metrics.requests < 20:
            answer_of(rt)
        end(swap)
        assert {answer_of(rt) for _ in range(20)} == {expected}
    assert hammer.errors == []


@pytest.mark.parametrize(
    ("maker", "reason"),
    [
        (lambda folder: onnx_models.identity(folder, "FP16"), "input 'x' was FP32"),
        (onnx_models.mlp, "input 'x' was FP32 .-1, 2., and is FP32 .-1, 16."),
        (onnx_models.where_nonzero, "rows were a batch|outputs were y, and are places"),
        (onnx_models.two_in_two_out, "inputs were x, and are a, b"),
    ],
    ids=["datatype", "shape", "outputs", "inputs"],
)
def test_a_release_of_other_specs_cannot_answer_some_and_can_answer_all(tmp_path, maker, reason):
    put_adder(tmp_path / "models", 1)
    with runtime(tmp_path / "models", tmp_path) as rt:
        swap = rt.core.loader.swap(release_of(tmp_path / "r1", maker, version=2))
        with pytest.raises(LoadFailed, match=reason):
            swap.split(10)
        with pytest.raises(LoadFailed, match="use switch"):
            begin_shadow(swap, 0.5)
        assert answer_of(rt) == (1, 1)
        swap.commit()
        assert rt.models()[0]["version"] == 2


def test_there_is_no_canary_with_nothing_beside(tmp_path, canary):
    rt, _ = canary
    lonely = rt.core.loader.swap(release(tmp_path / "r2", 2, name="new"))
    with pytest.raises(LoadFailed, match="nothing answers beside"):
        lonely.split(10)


@pytest.mark.parametrize("end", ["commit", "roll_back"])
def test_after_a_swap_both_may_answer_again(canary, end):
    rt, swap = canary
    swap.switch()
    assert {answer_of(rt) for _ in range(10)} == {(2, 2)}
    swap.split(50)
    assert {answer_of(rt) for _ in range(10)} == {(1, 1), (2, 2)}
    getattr(swap, end)()
    assert {answer_of(rt) for _ in range(10)} == ({(2, 2)} if end == "commit" else {(1, 1)})


# ---- other ways in --------------------------------------------------------------------------------------------------


@pytest.fixture
def daemon(tmp_path, request):
    """A daemon on a socket and on a broker, and an exchange in which every second request is the candidate's."""
    put_adder(tmp_path / "models", 1, toml=request.param)
    with Broker(tmp_path / "broker") as broker:
        config = configured(
            models=str(tmp_path / "models"), state=str(tmp_path / "state"), watch=False, calibrate=False,
            zmq=ZmqSettings(endpoints=(f"ipc://{tmp_path}/infer.sock",)),
            mqtt=MqttSettings(url=broker.url, device_id="dev1"),
        )  # fmt: skip
        core = assemble_core(config)
        daemon = assemble_daemon(config, core)
        daemon.start()
        try:
            swap = core.loader.swap(release(tmp_path / "r1", 2, version=2, toml=request.param))
            yield tmp_path, broker, swap
        finally:
            daemon.stop()


WAYS_IN = pytest.mark.parametrize("daemon", [INLINE, WORKERS], ids=["inline", "workers"], indirect=True)


@pytest.mark.smoke
@WAYS_IN
def test_requests_over_zeromq_json_and_mqtt_are_split_and_say_who_answered(daemon):
    folder, broker, swap = daemon
    swap.split(50)
    with RawClient(f"ipc://{folder}/infer.sock") as client:
        frames = [client.ask(header("m", (1, 2)), b"", X.tobytes()) for _ in range(8)]
        inputs = [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [0, 0]}]
        fields = [client.ask_json(model="m", inputs=inputs) for _ in range(8)]
    with MqttClient(broker.url, "dev1") as client:
        results = [client.infer("m", {"x": X}) for _ in range(8)]
    answers = [float(np.frombuffer(frame[2], np.float32)[0]) for frame in frames]
    assert answers == [1, 2] * 4
    assert [b"\xa7version\x02" in frame[0] for frame in frames] == [False, True] * 4
    assert [(each["model_version"], each["outputs"][0]["data"][0]) for each in fields] == [("1", 1), ("2", 2)] * 4
    assert Counter((each.version, float(each["y"][0, 0])) for each in results) == {(1, 1.0): 4, (2, 2.0): 4}


@pytest.mark.parametrize("daemon", [INLINE], indirect=True)
@pytest.mark.parametrize("begin", ["split", "mirror"])
def test_tiny_models_run_request_by_request_meanwhile_and_in_batches_again_after_it(daemon, begin):
    folder, _, swap = daemon
    metrics = swap.current.metrics
    with RawClient(f"ipc://{folder}/infer.sock") as client:

        def rows_a_run():
            runs, rows = metrics.runs, metrics.rows
            for _ in range(10):
                for _ in range(100):
                    client.send(header("m", (1, 2)), b"", X.tobytes())
                for _ in range(100):
                    client.receive()
            client.result("stats")  # counts are brought up to date for it
            return (metrics.rows - rows) / (metrics.runs - runs)

        assert rows_a_run() > 1
        swap.split(50) if begin == "split" else begin_shadow(swap, 0.5)
        assert rows_a_run() == 1
        swap.split(0)
        assert rows_a_run() > 1
