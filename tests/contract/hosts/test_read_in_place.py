"""Large inputs of known headers: received where the host reads them, whatever else is under way, and freed again."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import grpc
import msgpack
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.hosts.regions import MAX_LENT
from tests.contract.raw_http import RawHttp
from tests.contract.running_daemon import ANSWER_S, RawClient, header, put_model, running_daemon
from tests.models import onnx_models

ROWS = 600_000
KEY = header("m", (ROWS, 2))


@pytest.fixture
def daemon(tmp_path: Path):
    toml = 'isolation = "always"\nbatch = false\n'
    put_model(tmp_path / "models", "m", onnx_models.added, toml=toml)
    doors = {
        "http": HttpSettings(endpoint=f"unix:{tmp_path}/http"),
        "grpc": GrpcSettings(endpoint=f"unix:{tmp_path}/grpc"),
    }
    with running_daemon(tmp_path / "models", tmp_path / "run", calibrate=False, **doors) as made:
        yield made


@pytest.fixture
def client(daemon):
    with RawClient(daemon.endpoints[1]) as made:
        for _ in range(3):
            made.ask(KEY, b"known", values(0))
        yield made


def values(value: float) -> bytes:
    return np.full((ROWS, 2), value, np.float32).tobytes()


def value_of(data: bytes) -> float:
    found = set(np.frombuffer(data, np.float32).tolist())
    assert len(found) == 1
    return found.pop()


def host_of(client: RawClient) -> int:
    (host,) = {each["host"]["pid"] for each in client.result("models")}
    return host


def regions_mapped(host: int) -> int:
    """How many: each runner of the host maps them."""
    lines = [line.split() for line in Path(f"/proc/{host}/maps").read_text().splitlines()]
    return len({line[4] for line in lines if any("edge-runtime-region" in part for part in line[5:])})


@pytest.mark.smoke
def test_a_large_input_of_a_known_header_lies_where_its_host_reads_it(client) -> None:
    for at in range(5):
        assert value_of(client.ask(KEY, b"a", values(at))[2]) == at + 1
    assert regions_mapped(host_of(client)) == 1


def test_many_in_flight_get_each_their_own_and_the_memory_stays_bounded(client) -> None:
    count = MAX_LENT + 4
    for at in range(count):
        client.send(KEY, b"%d" % at, values(at))
    for _ in range(count):
        head, request_id, data = client.receive()
        assert "error" not in msgpack.unpackb(head)
        assert value_of(data) == float(request_id) + 1
    assert 1 <= regions_mapped(host_of(client)) <= MAX_LENT


def test_over_http_a_body_lies_where_its_host_reads_it(daemon, client, tmp_path: Path) -> None:
    head = json.dumps(
        {
            "inputs": [
                {"name": "x", "datatype": "FP32", "shape": [ROWS, 2], "parameters": {"binary_data_size": 8 * ROWS}}
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    with RawHttp(f"unix:{tmp_path}/http") as http:
        for at in range(5):
            response = http.ask(
                "POST", "/v2/models/m/infer", head + values(at), **{"Inference-Header-Content-Length": str(len(head))}
            )
            assert response.status == 200, response.body
            assert value_of(response.body[int(response.headers["inference-header-content-length"]) :]) == at + 1
    assert regions_mapped(host_of(client)) >= 1


def test_over_grpc_a_message_lies_where_its_host_reads_it(daemon, client, tmp_path: Path) -> None:
    with grpc.insecure_channel(f"unix:{tmp_path}/grpc", [("grpc.max_receive_message_length", -1)]) as channel:
        ask = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        for at in range(6):
            request = service_pb2.ModelInferRequest(
                model_name="m", id=str(at) * (at % 2), raw_input_contents=[values(at)]
            )
            request.inputs.add(name="x", datatype="FP32", shape=[ROWS, 2])
            answer = ask(request, timeout=ANSWER_S)
            assert answer.id == request.id
            assert value_of(answer.raw_output_contents[0]) == at + 1
    assert regions_mapped(host_of(client)) >= 1


def test_clients_that_leave_in_the_middle_of_a_frame_take_no_memory_from_others(daemon, client, tmp_path: Path) -> None:
    for _ in range(2 * MAX_LENT):
        with RawHttp(f"unix:{tmp_path}/http") as http:
            lengths = f"Inference-Header-Content-Length: 100\r\nContent-Length: {8 * ROWS}"
            http.send(f"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\n{lengths}\r\n\r\n".encode() + b"x" * 1000)
            http.socket.shutdown(socket.SHUT_RDWR)
    for at in range(3):
        assert value_of(client.ask(KEY, b"a", values(at))[2]) == at + 1
    assert regions_mapped(host_of(client)) <= MAX_LENT
