"""Clients of other makers, unmodified, against the gRPC door: Node's, C++, Go, curl, and nghttp2's load generator.

tests/contract/doors/grpc/test_grpc_door.py has grpcio and tritonclient, sync and asyncio.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.contract.running_daemon import floats, put_model
from tests.fakes import http2_peer as peer
from tests.fakes.daemon_process import DaemonProcess
from tests.models import onnx_models

PROGRAMS = Path(peer.__file__).parent
LIMIT_S = 300.0
COUNT = 200
GO_LIBRARIES = Path("/usr/share/gocode/src/google.golang.org/grpc")


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    put_model(folder / "models", "mlp", onnx_models.mlp)
    put_model(folder / "models", "text", onnx_models.identity, datatype="BYTES")
    with DaemonProcess(folder, config='[grpc]\nendpoint = "127.0.0.1:0"\n') as daemon:
        daemon.wait_ready()
        yield daemon.address("grpc").removeprefix("grpc://")


def request(request_id: str, x: np.ndarray) -> bytes:
    made = service_pb2.ModelInferRequest(model_name="mlp", id=request_id, raw_input_contents=[x.tobytes()])
    made.inputs.add(name="x", datatype="FP32", shape=list(x.shape))
    return made.SerializeToString()


def large_request(text: bytes) -> bytes:
    raw = len(text).to_bytes(4, "little") + text + bytes(4)
    made = service_pb2.ModelInferRequest(model_name="text", raw_input_contents=[raw])
    made.inputs.add(name="x", datatype="BYTES", shape=[1, 2])
    return made.SerializeToString()


def expected(x: np.ndarray) -> np.ndarray:
    first, second = onnx_models.mlp_weights()
    return np.maximum(x @ first, 0) @ second


@pytest.fixture(params=["node", "c++", "go"])
def program(request, tmp_path):
    """The words that run a client."""
    return {"node": in_node, "c++": in_cpp, "go": in_go}[request.param](tmp_path)


def in_node(folder: Path) -> list[str]:
    node = shutil.which("node")
    words = [node, "-e", "require('@grpc/grpc-js')"]
    if node is None or subprocess.run(words, capture_output=True, check=False, timeout=LIMIT_S).returncode:
        pytest.skip("no grpc-js: npm install @grpc/grpc-js, and its node_modules in $NODE_PATH")
    return [node, str(PROGRAMS / "grpc_client.js")]


def in_cpp(folder: Path) -> list[str]:
    if shutil.which("g++") is None or not Path("/usr/include/grpcpp").exists() or shutil.which("pkg-config") is None:
        pytest.skip("no gRPC for C++: sudo apt-get install g++ pkg-config libgrpc++-dev")
    made = folder / "client"
    told = subprocess.run(
        ["pkg-config", "--libs", "grpc++"], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    words = ["g++", str(PROGRAMS / "grpc_client.cc"), "-o", str(made), *told.stdout.split(), "-labsl_synchronization"]
    subprocess.run(words, check=True, timeout=LIMIT_S)
    return [str(made)]


def in_go(folder: Path) -> list[str]:
    if shutil.which("go") is None or not GO_LIBRARIES.exists():
        pytest.skip("no gRPC for Go: sudo apt-get install golang-go golang-google-grpc-dev")
    made = folder / "client"
    environment = {"GO111MODULE": "off", "GOPATH": "/usr/share/gocode", "GOCACHE": str(folder / "cache"), "GOFLAGS": ""}
    words = ["go", "build", "-o", str(made), str(PROGRAMS / "grpc_client.go")]
    subprocess.run(words, check=True, timeout=LIMIT_S, env={**os.environ, **environment})
    return [str(made)]


def test_a_client_of_another_language_is_answered_small_and_large_and_refused(program, address):
    rows = [floats(1 + seed % 3, 16, seed=seed) for seed in range(COUNT)]
    text = bytes(range(32, 127)) * 8000  # most of a megabyte there and back: windows of both sides
    asked = [request(f"id {at}", x) for at, x in enumerate(rows)] + [large_request(text), request("bad", floats(1, 3))]
    told = subprocess.run(
        [*program, address, peer.INFER], input="\n".join(each.hex() for each in asked) + "\n", capture_output=True,
        text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    *answers, large, refused = told.stdout.split("\n")[:-1]
    assert len(answers) == COUNT
    for at, (x, line) in enumerate(zip(rows, answers, strict=True)):
        answer = service_pb2.ModelInferResponse.FromString(bytes.fromhex(line))
        assert answer.id == f"id {at}"
        y = np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(len(x), 4)
        np.testing.assert_allclose(y, expected(x), rtol=1e-4, atol=1e-4)
    assert not large.startswith("error"), large
    answer = service_pb2.ModelInferResponse.FromString(bytes.fromhex(large))
    assert answer.raw_output_contents[0][4:-4] == text
    assert refused == "error 3 tensor_mismatch"


HEADERS = ("content-type: application/grpc", "te: trailers")


def test_curl_gets_a_message_and_the_status_behind_it(address, tmp_path):
    curl = shutil.which("curl")
    if curl is None or "HTTP2" not in subprocess.run([curl, "-V"], capture_output=True, text=True, check=True).stdout:
        pytest.skip("no curl with HTTP/2: sudo apt-get install curl")
    x = floats(2, 16)
    (tmp_path / "asked").write_bytes(peer.message(request("by curl", x)))
    words = [curl, "-sS", "--http2-prior-knowledge", "--data-binary", f"@{tmp_path}/asked", "-D", f"{tmp_path}/headers"]
    words += [word for each in HEADERS for word in ("-H", each)]
    done = subprocess.run([*words, f"http://{address}{peer.INFER}"], capture_output=True, timeout=LIMIT_S, check=True)
    answer = service_pb2.ModelInferResponse.FromString(done.stdout[5:])
    assert answer.id == "by curl"
    np.testing.assert_allclose(
        np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(2, 4), expected(x), rtol=1e-4, atol=1e-4
    )
    headers = (tmp_path / "headers").read_text()
    assert headers.startswith("HTTP/2 200")
    assert "grpc-status: 0" in headers


def test_every_request_of_h2load_is_answered(address, tmp_path):
    program = shutil.which("h2load")
    if program is None:
        pytest.skip("no h2load: sudo apt-get install nghttp2-client")
    (tmp_path / "asked").write_bytes(peer.message(request("", floats(1, 16))))
    words = [program, "-n", "5000", "-c", "5", "-m", "50", "-d", str(tmp_path / "asked")]
    words += [word for each in HEADERS for word in ("-H", each)]
    done = subprocess.run(
        [*words, f"http://{address}{peer.INFER}"], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert re.search(r"5000 done, 5000 succeeded, 0 failed, 0 errored, 0 timeout", done.stdout), done.stdout
    assert "status codes: 5000 2xx" in done.stdout
