"""Wall clocks that jump by years under load, forwards and back: good work does not notice, in daemon and clients."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from edge_runtime.doors.mqtt.client import MqttClient
from edge_runtime.doors.open_inference.client import OipClient
from edge_runtime.doors.zmq.asyncio_client import AsyncClient
from edge_runtime.doors.zmq.client import Client
from tests.contract.running_daemon import ANSWER_S, floats, put_model
from tests.fakes.broker import Broker, needs_mosquitto
from tests.fakes.daemon_process import DaemonProcess
from tests.fakes.stepped_clock import SteppedClock
from tests.models import onnx_models, python_models

pytestmark = needs_mosquitto

MODELS = ("mlp", "queued", "hosted")
CALLS = 1500
TIMEOUT_MS = ANSWER_S * 1e3
"""Longer than any answer takes, shorter than any step."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("broker")) as broker:
        yield broker


@pytest.fixture(scope="module")
def clock(tmp_path_factory):
    return SteppedClock(tmp_path_factory.mktemp("clock"))


@pytest.fixture(scope="module")
def daemon(broker, clock, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    put_model(folder / "models", "mlp", onnx_models.mlp)
    put_model(folder / "models", "queued", onnx_models.mlp, toml='mode = "workers"\n')
    put_model(folder / "models", "hosted", python_models.mlp)
    config = f"""python_models = true
[http]
endpoint = "127.0.0.1:0"
[grpc]
endpoint = "127.0.0.1:0"
[mqtt]
url = "{broker.url}/dev1"
"""
    with DaemonProcess(folder, config=config, **clock.environment) as daemon:
        daemon.wait_ready()
        daemon.wait_said("MQTT broker reached")
        yield daemon


DOORS = ("zmq", "asyncio", "mqtt", "http", "grpc")
CLIENTS = {"zmq": Client, "mqtt": MqttClient, "http": OipClient, "grpc": OipClient}


@pytest.fixture
def urls(daemon, broker):
    http, grpc = daemon.address("http"), daemon.address("grpc")
    return dict(zip(DOORS, (daemon.endpoint, daemon.endpoint, f"{broker.url}/dev1", http, grpc), strict=True))


def ask_many(door: str, url: str) -> None:
    """Ask each model in turn; an answer that fails or is late raises."""
    x = {"x": floats(1, 16)}
    if door == "asyncio":
        asyncio.run(_ask_many(url, x))
        return
    with CLIENTS[door](url) as client:
        for index in range(CALLS):
            client.infer(MODELS[index % 3], x, timeout_ms=TIMEOUT_MS)


async def _ask_many(url: str, x: dict[str, np.ndarray]) -> None:
    async with AsyncClient(url) as client:
        for index in range(CALLS):
            await client.infer(MODELS[index % 3], x, timeout_ms=TIMEOUT_MS)


@pytest.mark.parametrize("door", DOORS)
def test_a_client_does_not_notice_that_its_clock_jumps(urls, tmp_path, door):
    clock = SteppedClock(tmp_path)
    with clock.stepping():
        client = subprocess.run(
            [sys.executable, "-c", f"from {__name__} import *; ask_many({door!r}, {urls[door]!r})"],
            env={**os.environ, **clock.environment}, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert client.returncode == 0, client.stderr


@pytest.mark.parametrize("door", DOORS)
def test_no_request_notices_that_the_daemons_clock_jumps(clock, daemon, urls, door):
    with clock.stepping():
        ask_many(door, urls[door])
    assert not [line for line in daemon.log() if line["level"] in {"warning", "error"}]


def test_no_deadline_of_grpc_ends_early_when_the_daemons_clock_jumps(clock, daemon):
    request = service_pb2.ModelInferRequest(model_name="queued", raw_input_contents=[floats(1, 16).tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 16])
    with grpc.insecure_channel(daemon.address("grpc").removeprefix("grpc://")) as channel:
        ask = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer", service_pb2.ModelInferRequest.SerializeToString
        )
        with clock.stepping():
            for _ in range(100):
                calls = [ask.future(request, timeout=ANSWER_S) for _ in range(100)]
                assert {(call.code().name, call.details()) for call in calls} == {("OK", "")}
