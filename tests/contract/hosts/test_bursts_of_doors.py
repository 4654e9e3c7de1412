"""Bursts of small requests over HTTP and gRPC to a model in a host: each caller gets its own rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from tests.contract.raw_http import RawHttp, request
from tests.contract.running_daemon import ANSWER_S, put_model, running_daemon
from tests.models import onnx_models

COUNT, ROUNDS = 24, 5


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("bursts")
    put_model(folder / "models", "m", onnx_models.added, toml='isolation = "always"\nmax_batch_rows = 32\n')
    doors: dict[str, Any] = {
        "http": HttpSettings(endpoint="127.0.0.1:0"),
        "grpc": GrpcSettings(endpoint="127.0.0.1:0"),
    }
    with running_daemon(folder / "models", folder / "run", calibrate=False, **doors) as running:
        yield running


def tensor(value: int) -> dict[str, Any]:
    return {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [float(value), 0.0]}


def in_json(value: int) -> bytes:
    return request("POST", "/v2/models/m/infer", json.dumps({"id": str(value), "inputs": [tensor(value)]}).encode())


@pytest.mark.parametrize("kind", ["text", "binary"])
def test_pipelined_requests_over_http_are_answered_in_order_each_with_its_rows(daemon: Daemon, kind: str) -> None:
    def binary(value: int) -> bytes:
        named = {"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}
        outputs = {"parameters": {"binary_data_output": False}}
        head = json.dumps({"id": str(value), "inputs": [named], **outputs}).encode()
        data = np.array([value, 0], np.float32).tobytes()
        length = {"Inference-Header-Content-Length": str(len(head))}
        return request("POST", "/v2/models/m/infer", head + data, **length)

    write = in_json if kind == "text" else binary
    with RawHttp(daemon.doors["http"].endpoints[0]) as web:
        for turn in range(ROUNDS):
            values = range(turn * COUNT, (turn + 1) * COUNT)
            web.send(b"".join(map(write, values)))
            for value in values:
                answer = json.loads(web.response().body)
                assert answer["id"] == str(value)
                assert answer["outputs"][0]["data"] == [value + 1.0, 1.0]


def test_calls_over_grpc_at_once_are_answered_each_with_its_rows(daemon: Daemon) -> None:
    with grpc.insecure_channel(daemon.doors["grpc"].endpoints[0].removeprefix("grpc://")) as channel:
        infer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        for turn in range(ROUNDS):
            calls = {}
            for value in range(turn * COUNT, (turn + 1) * COUNT):
                data = np.array([value, 0], np.float32).tobytes()
                asked = service_pb2.ModelInferRequest(model_name="m", id=str(value), raw_input_contents=[data])
                asked.inputs.add(name="x", datatype="FP32", shape=[1, 2])
                calls[value] = infer.future(asked)
            for value, call in calls.items():
                answer = call.result(ANSWER_S)
                assert answer.id == str(value)
                assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [value + 1.0, 1.0]
