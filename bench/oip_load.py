"""Requests of the Open Inference Protocol as bytes, and the generator that sends them (oip_load.c)."""

from __future__ import annotations

import http.client
import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.load import Load, built, run_load
from bench.makers import BenchModel
from bench.servers import BenchError

HERE = Path(__file__).parent
INFER = "/inference.GRPCInferenceService/ModelInfer"
HEAD_LENGTH = "Inference-Header-Content-Length"
Door = Literal["http", "grpc"]


@dataclass(frozen=True, slots=True)
class OipGenerator:
    """The built oip_load.c."""

    program: Path

    def closed(self, door: Door, address: str, request: Path, in_flight: int, seconds: float) -> Load:
        """Keep `in_flight` requests in flight. Raises BenchError when none was answered."""
        load = self._run(door, address, request, ("--conc", str(in_flight)), seconds, 0.3)
        if not load.answered:
            raise BenchError(f"{door} {address}: nothing answered: {dict(load.codes)}, {load.lost} lost")
        return load

    def open(
        self, door: Door, address: str, request: Path, rate: float, seconds: float, deadline_ms: float, seed: int
    ) -> Load:
        """Poisson arrivals, `rate` a second; goodput counts answers within `deadline_ms` of their scheduled arrival."""
        words = ("--rate", f"{rate:.3f}", "--slo-ms", f"{deadline_ms:.3f}", "--seed", str(seed))
        return self._run(door, address, request, words, seconds, 1.0)

    def _run(
        self, door: Door, address: str, request: Path, words: Sequence[str], seconds: float, warm_s: float
    ) -> Load:
        kind = ("--grpc", INFER) if door == "grpc" else ()
        command = [str(self.program), "--addr", address, "--req", str(request), *kind, *words]
        return run_load(command, seconds, warm_s)


def find_oip_generator() -> OipGenerator:
    """Build it. Raises BenchError without a C compiler."""
    program = built(HERE / "oip_load.c")
    if program is None:
        raise BenchError("oip_load.c cannot be built: apt-get install gcc libc6-dev")
    return OipGenerator(program)


def write_http_request(path: Path, model: BenchModel, *, timeout_ms: float | None = None) -> Path:
    """One whole request for one row of `model`, binary both ways; values are 0.5 everywhere."""
    tensor = _row(model)
    x: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, *model.row_shape]}
    x["parameters"] = {"binary_data_size": len(tensor)}
    return _write_http(path, model, [x], tensor, timeout_ms)


def write_region_request(path: Path, model: BenchModel, region: str) -> Path:
    """The same with the tensor in a registered region of system shared memory."""
    x: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [1, *model.row_shape]}
    x["parameters"] = {"shared_memory_region": region, "shared_memory_byte_size": len(_row(model))}
    return _write_http(path, model, [x], b"", None)


def write_grpc_request(path: Path, model: BenchModel, *, timeout_ms: float | None = None) -> Path:
    """One message of the same, with raw contents."""
    from tritonclient.grpc import service_pb2

    message = service_pb2.ModelInferRequest(model_name=model.name, raw_input_contents=[_row(model)])
    message.inputs.add(name="x", datatype="FP32", shape=[1, *model.row_shape])
    if timeout_ms is not None:
        message.parameters["timeout"].int64_param = int(timeout_ms * 1e3)
    path.write_bytes(message.SerializeToString())
    return path


def ask_http(address: str, request: Path) -> bytes:
    """The whole answer to a request, head and body. Raises BenchError for a refusal."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(request.read_bytes())
        found = b""
        while not _is_whole(found):
            part = connection.recv(1 << 16)
            if not part:
                raise BenchError(f"{address}: closed after {found[:200]!r}")
            found += part
    if not found.startswith(b"HTTP/1.1 200"):
        raise BenchError(f"{address}: {found[:500]!r}")
    return found


def ask_grpc(address: str, request: Path) -> bytes:
    """The message that answers a request. Raises BenchError for a refusal."""
    import grpc

    with grpc.insecure_channel(address) as channel:
        try:
            answer: bytes = channel.unary_unary(INFER)(request.read_bytes(), timeout=30)
        except grpc.RpcError as error:
            raise BenchError(f"{address}: {error}") from None
    return answer


def call_http(address: str, path: str, fields: object) -> None:
    """POST JSON. Raises BenchError."""
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.request("POST", path, json.dumps(fields))
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    if answer.status != http.HTTPStatus.OK:
        raise BenchError(f"{address}{path}: {answer.status} {body[:300]!r}")


def _row(model: BenchModel) -> bytes:
    return struct.pack("<f", 0.5) * (model.row_bytes // 4)


def _write_http(path: Path, model: BenchModel, inputs: list[Any], tensors: bytes, timeout_ms: float | None) -> Path:
    parameters: dict[str, Any] = {"binary_data_output": True}
    if timeout_ms is not None:
        parameters["timeout"] = int(timeout_ms * 1e3)
    head = json.dumps({"inputs": inputs, "parameters": parameters}, separators=(",", ":")).encode()
    lines = (
        f"POST /v2/models/{model.name}/infer HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/octet-stream",
        f"{HEAD_LENGTH}: {len(head)}",
        f"Content-Length: {len(head) + len(tensors)}",
    )
    path.write_bytes("\r\n".join(lines).encode() + b"\r\n\r\n" + head + tensors)
    return path


def _is_whole(found: bytes) -> bool:
    head, end, body = found.partition(b"\r\n\r\n")
    if not end:
        return False
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(lengths) and len(body) >= int(lengths[0])
