"""The messages of each door: good ones, odd ones, and good ones with one thing wrong, from a seed, always the same.

They are made once, when the promises are recorded (record.py), and kept beside their replies. Bytes are kept as text of
latin-1, so that a reader sees what lies in them.
"""

from __future__ import annotations

import itertools
import json
import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from tritonclient.grpc import service_pb2

from tests.contract.running_daemon import put_model
from tests.models import onnx_models, python_models
from tests.pictures import encoded, photo

DATATYPES = ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64")
MODELS = ("fp32", "queued", "hosted", "lone", "python", "two")
"""Each takes x FP32 [rows, 2] and answers y, the same."""

ODD_VALUES = (None, True, -1, 0, 1.5, "", "x", [], {}, [[]], 2**40, "ÿ")
PICTURES = tuple(encoded(photo(16, 16), kind) for kind in ("JPEG", "PNG"))
PIPELINE = """
[[step]]
name = "first"
model = "fp32"
inputs = {x = "input.x"}

[[step]]
name = "second"
model = "hosted"
inputs = {x = "first.y"}

[output]
y = "second.y"
"""
PICTURE = """
[input.image]
range = "0..1"
[output.scores]
answer = "classes"
labels = ["red", "green", "blue"]
"""


def write_models(models: Path) -> None:
    """Write the folder that the messages are meant for: numbers come back as they went, so every machine agrees."""
    for datatype in (*DATATYPES, "BYTES"):
        put_model(models, datatype.lower(), onnx_models.identity, datatype=datatype)
    put_model(models, "queued", onnx_models.identity, datatype="FP32", toml='mode = "workers"\n')
    put_model(models, "hosted", onnx_models.identity, datatype="FP32", toml='isolation = "always"\n')
    put_model(models, "lone", onnx_models.identity, datatype="FP32", toml="batch = false\n")
    put_model(models, "python", python_models.identity, datatype="FP32")
    put_model(models, "two", onnx_models.identity, datatype="FP32", toml="[versions]\nall = true\n")
    put_model(models, "two", onnx_models.identity, version=2, datatype="FP32")
    put_model(models, "finder", onnx_models.finder, label=2)
    put_model(models, "pair", onnx_models.two_in_two_out)
    put_model(models, "photo", onnx_models.colours, toml=PICTURE)
    (models / "line").mkdir()
    (models / "line" / "pipeline.toml").write_text(PIPELINE)
    (models / "broken" / "1").mkdir(parents=True)
    (models / "broken" / "1" / "model.onnx").write_bytes(b"\x08\x09not a model")


def values_of(datatype: str, rows: int = 2) -> list[list[Any]]:
    """`rows` rows of two values."""
    if datatype == "BYTES":
        return [["né", "x" * row] for row in range(rows)]
    if datatype == "BOOL":
        return [[True, bool(row % 2)] for row in range(rows)]
    return [[row, 7] for row in range(rows)]


def bytes_of(datatype: str, rows: int = 2) -> bytes:
    """The same values as a frame."""
    if datatype == "BYTES":
        elements = [each.encode() for row in values_of(datatype, rows) for each in row]
        return b"".join(struct.pack("<I", len(each)) + each for each in elements)
    dtype = {"BOOL": "?", "FP16": "f2", "FP32": "f4", "FP64": "f8"}.get(datatype, datatype.lower())
    return np.array(values_of(datatype, rows), dtype).tobytes()


def tensor(datatype: str = "FP32", rows: int = 2, name: str = "x", **fields: Any) -> dict[str, Any]:
    """A tensor's description."""
    return {"name": name, "datatype": datatype, "shape": [rows, 2], **fields}


PAIR = [{"name": "a", "datatype": "FP32", "shape": [1, 3]}, {"name": "b", "datatype": "INT64", "shape": [1, 2]}]
PAIR_FRAMES = [np.array([[1, 2, 3]], "f4").tobytes(), np.array([[4, 5]]).tobytes()]


def options() -> Iterator[dict[str, Any]]:
    """What a request may add, each alone and a few together."""
    alone: list[dict[str, Any]] = [
        {}, {"version": 1}, {"version": 2}, {"version": 0}, {"outputs": ["y"]}, {"outputs": []}, {"outputs": ["z"]},
        {"outputs": ["y", "y"]}, {"timeout_ms": 60_000}, {"timeout_ms": 0}, {"timeout_ms": -1}, {"priority": 0},
        {"priority": 1}, {"priority": 99}, {"parameters": {}}, {"parameters": {"timeout_ms": 50_000}},
        {"parameters": {"unknown": "x"}}, {"unknown": 1},
    ]  # fmt: skip
    yield from alone
    yield {"version": 1, "outputs": ["y"], "timeout_ms": 60_000, "priority": 1}


def sizes() -> Iterator[tuple[str, str, int]]:
    """Model, datatype, rows: good requests of every kind."""
    for datatype, rows in itertools.product((*DATATYPES, "BYTES"), (1, 2, 3, 8)):
        yield datatype.lower(), datatype, rows
    for model, rows in itertools.product((*MODELS, "line"), (1, 2, 3, 4, 5, 8, 16, 33)):
        yield model, "FP32", rows


def spoiled(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The fields with one missing, or one of another kind; in the first input too."""
    for name in fields:
        yield {each: value for each, value in fields.items() if each != name}
        for value in ODD_VALUES:
            yield {**fields, name: value}
    first, *others = fields.get("inputs", [{}])
    for name in first:
        yield {**fields, "inputs": [{each: value for each, value in first.items() if each != name}, *others]}
        for value in ODD_VALUES:
            yield {**fields, "inputs": [{**first, name: value}, *others]}


def damaged(data: bytes, seed: int, count: int) -> Iterator[bytes]:
    """Cut at places, and with a byte changed at others."""
    chance = random.Random(seed)
    for place in sorted(chance.sample(range(len(data)), min(len(data), count // 3))):
        yield data[:place]
    for _ in range(count - count // 3):
        place = chance.randrange(len(data))
        yield data[:place] + bytes([chance.randrange(256)]) + data[place + 1 :]


# ---- ZeroMQ ---------------------------------------------------------------------------------------------------------


def _packed(**fields: Any) -> bytes:
    data: bytes = msgpack.packb({"v": 1, "op": "infer", **fields})
    return data


def zmq_messages() -> Iterator[list[bytes]]:
    """Frames after the identity."""
    x = bytes_of("FP32")
    for model, more in itertools.product((*MODELS, "line"), options()):
        yield [_packed(model=model, inputs=[tensor()], **more), b"id", x]
    for (model, datatype, rows), repetition in itertools.product(sizes(), (b"", b"again", b"known")):
        yield [_packed(model=model, inputs=[tensor(datatype, rows)]), repetition, bytes_of(datatype, rows)]
    for outputs in (None, ["sum"], ["twice", "sum"], []):
        more = {} if outputs is None else {"outputs": outputs}
        yield [_packed(model="pair", inputs=PAIR, **more), b"p", *PAIR_FRAMES]
        yield [_packed(model="pair", inputs=PAIR[::-1], **more), b"p", *PAIR_FRAMES[::-1]]
        yield [_packed(model="pair", inputs=PAIR[:1], **more), b"p", PAIR_FRAMES[0]]
    for picture in (*PICTURES, b"GIF89a", b""):
        frame = struct.pack("<I", len(picture)) + picture
        yield [_packed(model="photo", inputs=[{"name": "", "datatype": "BYTES", "shape": [1]}]), b"", frame]
    good = {"v": 1, "op": "infer", "model": "fp32", "inputs": [tensor()]}
    for fields in spoiled(good):
        yield [msgpack.packb(fields), b"s", x]
    for header in damaged(msgpack.packb(good), 1, 150):
        yield [header, b"d", x]
    header = msgpack.packb(good)
    for frames in ([], [x, x], [x[:-1]], [x + b"\0"], [b""]):
        yield [header, b"f", *frames]
    for request_id in (b"", b"\0", b"i" * 64, b"i" * 65):
        yield [header, request_id, x]
    for model in ("nobody", "broken", "", "a/b", "../x", "x" * 300):
        yield [_packed(model=model, inputs=[tensor()]), b"n", x]
    for operation in (
        "live",
        "ready",
        "metadata",
        "load",
        "unload",
        "fly",
        "attach_memory",
        "update_status",
        "model_config",
    ):
        yield [msgpack.packb({"v": 1, "op": operation}), b"o"]
        for model in ("fp32", "two", "broken", "nobody", "line", "photo"):
            yield [msgpack.packb({"v": 1, "op": operation, "model": model}), b"o"]
    for fields in json_requests():
        yield [json.dumps(fields).encode()]
    for text in damaged(json.dumps({"model": "fp32", **next(json_bodies())}).encode(), 2, 60):
        yield [text]


# ---- JSON, as ZeroMQ, MQTT and HTTP have it -------------------------------------------------------------------------


def json_bodies() -> Iterator[dict[str, Any]]:
    """Requests for `fp32` and its like, without a model."""
    good = {"inputs": [tensor(data=values_of("FP32"))]}
    yield good
    yield {"inputs": [tensor(data=[0, 7, 1, 7])]}
    yield {"inputs": [tensor(data=[0, 7, 1])]}
    yield {"inputs": [tensor(data=[[0, 7], [1]])]}
    yield {"inputs": [tensor(data=["0", 7, 1, 7])]}
    yield {"inputs": [tensor(data=[1e300, 7, 1, 7])]}
    for more in options():
        parameters = {name: more[name] for name in ("timeout_ms", "priority") if name in more}
        yield {**good, **more, **({"parameters": parameters} if parameters else {})}
    yield {**good, "id": "a"}
    yield {**good, "id": 7}
    yield {**good, "id": "i" * 65}


def json_requests() -> Iterator[dict[str, Any]]:
    """With their model."""
    for model, body in itertools.product(("fp32", "hosted", "line"), json_bodies()):
        yield {"model": model, **body}
    for datatype in (*DATATYPES, "BYTES"):
        yield {"model": datatype.lower(), "inputs": [tensor(datatype, data=values_of(datatype))]}
    yield from spoiled({"model": "fp32", "inputs": [tensor(data=values_of("FP32"))]})


# ---- HTTP -----------------------------------------------------------------------------------------------------------


def _http(method: str, path: str, body: bytes = b"", **headers: Any) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    length = f"content-length: {len(body)}\r\n" if body or method == "POST" else ""
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{length}{lines}\r\n".encode() + body


def _binary(body: Mapping[str, Any], *frames: bytes) -> tuple[bytes, int]:
    head = json.dumps(body).encode()
    return head + b"".join(frames), len(head)


def http_messages() -> Iterator[bytes]:
    """Whole requests."""
    paths = [
        "/", "/v2", "/v2/", "/v2/health/live", "/v2/health/ready", "/v2/models", "/v2/models/stats", "/v2/nothing",
        "/v2/repository/index", "/v2/logging", "/v2/trace/setting", "/v2/systemsharedmemory/status", "/metrics",
        "/v2/systemsharedmemory/region/r/register", "/v2/systemsharedmemory/unregister",
    ]  # fmt: skip
    for model in ("fp32", "two", "broken", "nobody", "line", "photo", "%66p32", "..", "a%2Fb"):
        for version in ("", "/versions/1", "/versions/9", "/versions/x"):
            paths += [f"/v2/models/{model}{version}{end}" for end in ("", "/ready", "/config", "/stats", "/infer")]
        paths += [f"/v2/repository/models/{model}/load", f"/v2/repository/models/{model}/unload"]
        paths += [f"/v2/models/{model}/generate"]
    for path, method in itertools.product(paths, ("GET", "POST")):
        yield _http(method, path, b"{}" if method == "POST" else b"")
    for method in ("HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"):
        yield _http(method, "/v2/models/fp32")
    for model, body in itertools.product(("fp32", "queued", "hosted", "line"), json_bodies()):
        yield _http("POST", f"/v2/models/{model}/infer", json.dumps(body).encode())
    for datatype in (*DATATYPES, "BYTES"):
        path = f"/v2/models/{datatype.lower()}/infer"
        if datatype != "FP16":
            yield _http("POST", path, json.dumps({"inputs": [tensor(datatype, data=values_of(datatype))]}).encode())
        data = bytes_of(datatype)
        for output in ({}, {"parameters": {"binary_data_output": True}}):
            body = {"inputs": [tensor(datatype, parameters={"binary_data_size": len(data)})], **output}
            packed, length = _binary(body, data)
            yield _http("POST", path, packed, inference_header_content_length=length)
        yield _http("POST", path, data, inference_header_content_length=0)
    for model, datatype, rows in sizes():
        data = bytes_of(datatype, rows)
        packed, length = _binary({"inputs": [tensor(datatype, rows, parameters={"binary_data_size": len(data)})]}, data)
        yield _http("POST", f"/v2/models/{model}/infer", packed, inference_header_content_length=length)
        if datatype != "FP16":
            good = {"inputs": [tensor(datatype, rows, data=values_of(datatype, rows))]}
            yield _http("POST", f"/v2/models/{model}/infer", json.dumps(good).encode())
    for fields in spoiled(next(json_bodies())):
        yield _http("POST", "/v2/models/fp32/infer", json.dumps(fields).encode())
    good = next(json_bodies())
    for text in damaged(json.dumps(good).encode(), 3, 60):
        yield _http("POST", "/v2/models/fp32/infer", text)
    x = bytes_of("FP32")
    packed, length = _binary({"inputs": [tensor(parameters={"binary_data_size": len(x)})]}, x)
    for wrong in (-1, 0, 1, length - 1, length + 1, 10**9, "x"):
        yield _http("POST", "/v2/models/fp32/infer", packed, inference_header_content_length=wrong)
    for size in (*ODD_VALUES, len(x) - 1, len(x) + 1):
        packed, length = _binary({"inputs": [tensor(parameters={"binary_data_size": size})]}, x)
        yield _http("POST", "/v2/models/fp32/infer", packed, inference_header_content_length=length)
    outputs: list[Sequence[Any]] = [
        [{"name": "y"}], [{"name": "z"}], [], [{"name": "y", "parameters": {"binary_data": True}}], [{}], ["y"],
        [{"name": "y", "parameters": {"classification": 1}}], [{"name": "y", "parameters": {"classification": "1"}}],
    ]  # fmt: skip
    for wanted in outputs:
        yield _http("POST", "/v2/models/fp32/infer", json.dumps({**good, "outputs": wanted}).encode())
    body = json.dumps(good).encode()
    for name, value in (
        ("x-request-timeout-ms", "60000"), ("x-request-timeout-ms", "0"), ("x-request-timeout-ms", "x"),
        ("x-request-timeout-seconds", "60"), ("content-type", "text/plain"), ("content-encoding", "gzip"),
        ("content-encoding", "br"), ("accept-encoding", "identity"), ("authorization", "Bearer x"),
        ("connection", "close"),
    ):  # fmt: skip
        yield _http("POST", "/v2/models/fp32/infer", body, **{name: value})
    for picture in (*PICTURES, b"GIF89a"):
        for path in ("/v2/models/photo/infer", "/v2/models/fp32/infer"):
            yield _http("POST", path, picture, content_type="image/jpeg")


# ---- gRPC -----------------------------------------------------------------------------------------------------------


def _grpc_request(model: str, datatype: str = "FP32", rows: int = 2, **fields: Any) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[bytes_of(datatype, rows)], **fields)
    request.inputs.add(name="x", datatype=datatype, shape=[rows, 2])
    return request


def grpc_messages() -> Iterator[tuple[str, bytes]]:
    """Method and message."""
    infer = "ModelInfer"
    for model, version in itertools.product((*MODELS, "line", "broken", "nobody", ""), ("", "1", "2", "x")):
        yield infer, _grpc_request(model, model_version=version).SerializeToString()
        yield infer, _grpc_request(model, id="a", model_version=version).SerializeToString()
    for (model, datatype, rows), repetition in itertools.product(sizes(), ("", "again", "known")):
        yield infer, _grpc_request(model, datatype, rows, id=repetition).SerializeToString()
    typed = {
        "BOOL": "bool_contents", "INT32": "int_contents", "INT64": "int64_contents", "UINT32": "uint_contents",
        "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "INT8": "int_contents",
        "BYTES": "bytes_contents",
    }  # fmt: skip
    for datatype, field in typed.items():
        for count in (4, 3):
            flat = [each for row in values_of(datatype) for each in row][:count]
            contents = [each.encode() for each in flat] if datatype == "BYTES" else flat
            request = service_pb2.ModelInferRequest(model_name=datatype.lower())
            request.inputs.add(name="x", datatype=datatype, shape=[2, 2])
            getattr(request.inputs[0].contents, field).extend(contents)
            yield infer, request.SerializeToString()
    for name, value in itertools.product(
        ("timeout", "timeout_ms", "priority", "sequence_id", "sequence_start", "binary_data", "unknown"),
        ({"int64_param": 60_000_000}, {"int64_param": -1}, {"string_param": "x"}, {"bool_param": True}),
    ):
        request = _grpc_request("fp32")
        request.parameters[name].CopyFrom(service_pb2.InferParameter(**value))
        yield infer, request.SerializeToString()
    for names in (["y"], ["z"], ["y", "y"]):
        request = _grpc_request("hosted")
        for name in names:
            request.outputs.add(name=name)
        yield infer, request.SerializeToString()
    for name, datatype, shape in itertools.product(
        ("x", "", "z"), ("FP32", "fp32", "INT8", ""), ([2, 2], [4], [2, -1], [], [0, 2])
    ):
        request = _grpc_request("fp32")
        request.inputs[0].name, request.inputs[0].datatype = name, datatype
        request.inputs[0].shape[:] = shape
        yield infer, request.SerializeToString()
    for model in ("fp32", "hosted"):
        data = _grpc_request(model, id="id").SerializeToString()
        for message in damaged(data, 4, 240):
            yield infer, message
    for method in (
        "ServerLive", "ServerReady", "ServerMetadata", "RepositoryIndex", "SystemSharedMemoryStatus", "TraceSetting",
        "LogSettings", "CudaSharedMemoryStatus", "NoSuchMethod",
    ):  # fmt: skip
        yield method, b""
        yield method, b"\xff\xff"
    for method, message in itertools.product(
        ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"),
        ("fp32", "two", "broken", "nobody", "line", "photo", ""),
    ):
        for version in ("", "1", "9", "x"):
            yield method, getattr(service_pb2, f"{method}Request")(name=message, version=version).SerializeToString()
    for method, model in itertools.product(("RepositoryModelLoad", "RepositoryModelUnload"), ("fp32", "nobody", "")):
        yield method, getattr(service_pb2, f"{method}Request")(model_name=model).SerializeToString()


# ---- MQTT -----------------------------------------------------------------------------------------------------------


def mqtt_messages() -> Iterator[tuple[str, str, bytes]]:
    """What follows `edge/<device>/`, the content type ("" for none), and the payload."""
    x = bytes_of("FP32")
    for model, more in itertools.product((*MODELS, "line"), options()):
        yield (
            f"infer/{model}",
            "application/msgpack",
            msgpack.packb([{"v": 1, "op": "infer", "inputs": [tensor()], **more}, x]),
        )
    for model, body in itertools.product(("fp32", "hosted", "line"), json_bodies()):
        yield f"infer/{model}", "application/json", json.dumps(body).encode()
    for datatype in (*DATATYPES, "BYTES"):
        header = {"v": 1, "op": "infer", "inputs": [tensor(datatype)]}
        yield f"infer/{datatype.lower()}", "application/msgpack", msgpack.packb([header, bytes_of(datatype)])
        yield (
            f"infer/{datatype.lower()}",
            "",
            json.dumps({"inputs": [tensor(datatype, data=values_of(datatype))]}).encode(),
        )
    for (model, datatype, rows), kind in itertools.product(sizes(), ("application/msgpack", "application/json", "")):
        if kind == "application/msgpack":
            packed = [{"v": 1, "op": "infer", "inputs": [tensor(datatype, rows)]}, bytes_of(datatype, rows)]
            yield f"infer/{model}", kind, msgpack.packb(packed)
        elif datatype != "FP16":
            body = {"inputs": [tensor(datatype, rows, data=values_of(datatype, rows))]}
            yield f"infer/{model}", kind, json.dumps(body).encode()
    good = {"v": 1, "op": "infer", "inputs": [tensor()]}
    for fields in spoiled(good):
        yield "infer/fp32", "application/msgpack", msgpack.packb([fields, x])
    for fields in spoiled({"inputs": [tensor(data=values_of("FP32"))]}):
        yield "infer/fp32", "application/json", json.dumps(fields).encode()
    for payload in damaged(msgpack.packb([good, x]), 5, 200):
        yield "infer/fp32", "application/msgpack", payload
    for payload in damaged(json.dumps(next(json_bodies())).encode(), 6, 60):
        yield "infer/fp32", "", payload
    for topic, kind in itertools.product(
        ("infer/fp32/1", "infer/fp32/9", "infer/fp32/x", "infer/nobody", "infer/broken", "infer/two/2", "infer/line"),
        ("application/msgpack", "application/json", "", "text/plain", "image/jpeg"),
    ):
        data = json.dumps(next(json_bodies())).encode() if kind == "application/json" else msgpack.packb([good, x])
        yield topic, kind, data
    for picture in (*PICTURES, b"GIF89a", b""):
        for topic, kind in itertools.product(("infer/photo", "infer/fp32"), ("image/jpeg", "image/png", "")):
            yield topic, kind, picture
    for operation in ("live", "ready", "metadata", "load", "unload", "fly"):
        for topic, more in (("infer", {}), ("infer", {"model": "two"}), ("infer/two", {})):
            yield topic, "application/json", json.dumps({"op": operation, **more}).encode()
            yield topic, "application/msgpack", msgpack.packb([{"v": 1, "op": operation, **more}])


# ---- Frigate ---------------------------------------------------------------------------------------------------------


def frigate_messages() -> Iterator[list[bytes]]:
    """Frames after a REQ's delimiter, all on one connection: it may ask once its handshake has named a model."""
    picture = np.full((1, 3, 32, 32), 255, np.uint8).tobytes()
    good = {"shape": [1, 3, 32, 32], "dtype": "uint8", "model_type": "yologeneric"}
    yield [json.dumps(good).encode(), picture]
    handshake = {"model_request": True, "model_name": "mapped.onnx"}
    for fields in spoiled(handshake):
        yield [json.dumps(fields).encode()]
    for name in ("nobody.onnx", "fp32", "../mapped.onnx", "mapped"):
        yield [json.dumps({**handshake, "model_name": name}).encode()]
        yield [json.dumps({"model_data": True, "model_name": name}).encode(), b"not a model"]
    yield [json.dumps(handshake).encode()]
    for repetition in range(20):
        yield [json.dumps(good).encode(), bytes([repetition * 10]) * len(picture)]
    for fields in spoiled(good):
        yield [json.dumps(fields).encode(), picture]
    shapes = ([1, 3, 32, 32], [1, 32, 32, 3], [3, 32, 32], [1, 3, 8, 8])
    for shape, dtype in itertools.product(shapes, ("uint8", "float32", "FP32")):
        yield [json.dumps({**good, "shape": shape, "dtype": dtype}).encode(), picture]
    for kind in ("yologeneric", "dfine", "rfdetr", "yolonas", "ssd", "yolox", "nothing"):
        yield [json.dumps({**good, "model_type": kind}).encode(), picture]
    for frames in ([], [picture[:-1]], [picture + b"\0"], [b""], [picture, picture]):
        yield [json.dumps(good).encode(), *frames]
    for header in damaged(json.dumps(good).encode(), 7, 200):
        yield [header, picture]
    for header in damaged(json.dumps(handshake).encode(), 8, 100):
        yield [header]
