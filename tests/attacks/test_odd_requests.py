"""Odd but legal requests of the Open Inference Protocol: each gets a right answer or a refusal with its reason.

Never a 500, never silence: a property of bodies that are drawn at random, by HTTP in JSON, binary form and both mixed,
and by gRPC in raw and typed contents.
"""

from __future__ import annotations

import json
import logging
import struct
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from edge_runtime.doors.grpc.settings import GrpcSettings
from edge_runtime.doors.http.settings import HttpSettings
from tests.contract.raw_http import RawHttp
from tests.contract.running_daemon import ANSWER_S, grpc_url, http_url, put_model, running_daemon
from tests.models import onnx_models, triton_models

KINDS = {"FP32": "f", "INT64": "q", "BOOL": "?"}
MODELS = {
    "inline": {"x": ("FP32", 16)},
    "queued": {"x": ("FP32", 16)},
    "pair": {"a": ("FP32", 3), "b": ("INT64", 2)},
    "text": {"x": ("BYTES", 2)},
    "flags": {"x": ("BOOL", 2)},
    "optional": {"a": ("FP32", 2), "b": ("FP32", 2)},
}
"""Inputs of each model, by datatype and length of a row."""

OPTIONAL = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.ones((1, 1), np.float32))]) for _ in requests]
"""

SETTINGS = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "x", "y", "1", "NaN", "ä" * 300, "\ud800", "\0", "FP32", "-1", "1e400"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
PARAMETERS = st.dictionaries(
    st.sampled_from(
        (
            *("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "timeout_ms", "timing", "raw"),
            *("binary_data_output", "binary_data", "binary_data_size", "classification", "top_k", "door", "self_check"),
            *("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size", "headers", "unknown", ""),
            "triton_enable_empty_final_response",
        )
    ),
    ANYTHING,
    max_size=3,
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "inline", onnx_models.mlp)
    put_model(models, "queued", onnx_models.mlp, toml='mode = "workers"\n')
    put_model(models, "pair", onnx_models.two_in_two_out)
    put_model(models, "text", onnx_models.identity, datatype="BYTES")
    put_model(models, "flags", onnx_models.identity, datatype="BOOL")
    both = [triton_models.tensor(name, "FP32", 2, optional=True) for name in ("a", "b")]
    triton_models.rows(models, "optional", OPTIONAL, input=both, output=[triton_models.tensor("y", "FP32", 1)])
    doors = {"http": HttpSettings(endpoint="127.0.0.1:0"), "grpc": GrpcSettings(endpoint="127.0.0.1:0")}
    with running_daemon(
        models, tmp_path_factory.mktemp("run"), python_models=True, calibrate=False, watch=False, **doors
    ) as daemon:
        yield daemon


@pytest.fixture
def nothing_is_logged(caplog):
    """No request makes the daemon log an exception."""
    yield
    assert not [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]


def element(draw: st.DrawFn, datatype: str) -> Any:
    if datatype == "BYTES":
        return draw(st.sampled_from(["", "a", "ä", "\0", "7" * 300]))
    if datatype == "BOOL":
        return draw(st.booleans())
    return draw(st.integers(-100, 100))


def packed(datatype: str, items: list[Any]) -> bytes:
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(each.encode())) + each.encode() for each in items)
    return struct.pack(f"<{len(items)}{KINDS[datatype]}", *items)


def nested(draw: st.DrawFn, items: list[Any]) -> Any:
    """The same elements in another nesting."""
    form = draw(st.sampled_from(["flat", "rows", "deep", "pairs"]))
    if form == "flat" or not items:
        return items
    if form == "deep":
        return [[[items]]]
    size = 1 if form == "rows" else 2
    return [items[start : start + size] for start in range(0, len(items), size)]


@st.composite
def http_bodies(draw) -> tuple[str, bytes, int | None, bool, list[Any]]:
    """A model, a body, the bytes of its JSON head (None: all of it), whether it must be answered, its last elements."""
    model = draw(st.sampled_from(sorted(MODELS)))
    rows = draw(st.sampled_from([1, 1, 1, 2, 3]))
    inputs, tail, is_good, items = [], b"", True, []
    for name, (datatype, size) in MODELS[model].items():
        if model == "optional" and draw(st.booleans()):
            continue
        items = [element(draw, datatype) for _ in range(rows * size)]
        item: dict[str, Any] = {"name": name, "datatype": datatype, "shape": [rows, size]}
        if draw(st.booleans()):
            data = packed(datatype, items)
            item["parameters"] = {"binary_data_size": len(data)}
            tail += data
        else:
            item["data"] = nested(draw, items)
        if draw(st.integers(0, 9)) == 0:
            is_good = False
            key = draw(st.sampled_from(["name", "datatype", "shape", "data", "parameters", "unknown"]))
            choice = st.sampled_from([[0, size], [rows, 0], [0], [], [1, 1 << 62], [-1, size], [2, 8], [rows, size, 1]])
            item[key] = draw(choice if key == "shape" else PARAMETERS if key == "parameters" else ANYTHING)
        inputs.append(item)
    fields: dict[str, Any] = {"inputs": draw(st.permutations(inputs))} if not tail else {"inputs": inputs}
    if draw(st.booleans()):
        fields["id"] = draw(st.sampled_from(["", "7", "ä", "a" * 250, '"\\', "\n"]))
    if draw(st.booleans()):
        fields["parameters"] = {"unknown": draw(ANYTHING), "sequence_id": draw(st.integers(0, 2**64 - 1))}
    if draw(st.integers(0, 5)) == 0:
        is_good = False
        key = draw(st.sampled_from(["inputs", "outputs", "parameters", "id", "picture", "model_name", "v", "op"]))
        fields[key] = draw(PARAMETERS | ANYTHING if key == "parameters" else ANYTHING)
    if draw(st.integers(0, 5)) == 0:
        name = draw(st.sampled_from(["y", "sum", "x", ""]))
        is_good = False
        fields["outputs"] = [{"name": name, "parameters": draw(PARAMETERS)}]
    text = json.dumps(fields)
    if draw(st.integers(0, 9)) == 0:  # a key that is there twice, of which the last one counts
        text = '{"inputs":7,"id":"first",' + text[1:]
        is_good = is_good and "id" in fields
    if draw(st.integers(0, 9)) == 0:
        is_good = False
        tail += b"more"
    head = text.encode("utf-8", "surrogatepass")
    return model, head + tail, len(head) if tail or draw(st.booleans()) else None, is_good, items


@SETTINGS
@given(drawn=http_bodies())
def test_http_answers_or_says_why_not(daemon, nothing_is_logged, drawn):
    model, body, head_bytes, is_good, items = drawn
    headers = {} if head_bytes is None else {"inference_header_content_length": head_bytes}
    with RawHttp(http_url(daemon)) as http:
        answer = http.ask("POST", f"/v2/models/{model}/infer", body, **headers)
    if answer.status == 200:
        length = answer.headers.get("inference-header-content-length")
        fields = json.loads(answer.body if length is None else answer.body[: int(length)])
        assert fields["model_name"] == model
        for output in fields["outputs"]:
            if "data" in output:
                assert len(output["data"]) == np.prod(output["shape"], dtype=int)
        if is_good and model in {"text", "flags"}:
            assert fields["outputs"][0]["data"] == items
        return
    assert answer.status in {400, 404, 501, 503, 504}, answer.body
    assert answer.code not in {"run_failed", "internal"}
    assert not is_good, answer.body


@st.composite
def grpc_requests(draw) -> tuple[Any, bool]:
    """A request, and whether it must be answered."""
    model = draw(st.sampled_from(sorted(MODELS)))
    rows = draw(st.sampled_from([1, 1, 2]))
    request = service_pb2.ModelInferRequest(model_name=model, id=draw(st.sampled_from(["", "7", "ä" * 99])))
    is_good, is_raw = True, draw(st.booleans())
    for name, (datatype, size) in MODELS[model].items():
        if model == "optional" and draw(st.booleans()):
            continue
        items = [element(draw, datatype) for _ in range(rows * size)]
        added = request.inputs.add(name=name, datatype=datatype, shape=[rows, size])
        if is_raw:
            request.raw_input_contents.append(packed(datatype, items))
        else:
            field = {"FP32": "fp32", "INT64": "int64", "BOOL": "bool", "BYTES": "bytes"}[datatype] + "_contents"
            items = [each.encode() if isinstance(each, str) else each for each in items]
            getattr(added.contents, field).extend(items)
        if draw(st.integers(0, 9)) == 0:
            is_good = False
            odd = draw(st.sampled_from(["name", "datatype", "shape", "contents", "parameters"]))
            if odd == "shape":
                wrong = st.lists(st.sampled_from([0, 1, 2, -1, 1 << 62, -(1 << 63)]), max_size=4)
                added.shape[:] = draw(wrong)
            elif odd == "contents":
                added.contents.uint_contents.extend([1, 2])
            elif odd == "parameters":
                put_parameter(draw, added.parameters)
            else:
                setattr(added, odd, draw(st.sampled_from(["", "y", "FP31", "BF16", "FP16", "BYTES", "\0"])))
    if draw(st.integers(0, 4)) == 0:
        is_good = False
        odd = draw(st.sampled_from(["version", "output", "parameters", "raw", "raw text", "none"]))
        if odd == "version":
            request.model_version = draw(st.sampled_from(["x", "0", "-1", "1.0", "9" * 40, "1"]))
        elif odd == "output":
            put_parameter(draw, request.outputs.add(name=draw(st.sampled_from(["y", "sum", ""]))).parameters)
        elif odd == "parameters":
            put_parameter(draw, request.parameters)
        elif odd == "raw":
            request.raw_input_contents.append(draw(st.binary(max_size=20)))
        elif odd == "raw text" and is_raw and request.raw_input_contents:
            request.raw_input_contents[0] = struct.pack("<I", 2) + b"\xff\xfe" + struct.pack("<I", 0)
        else:
            del request.inputs[:]
    return request, is_good


def put_parameter(draw: st.DrawFn, parameters: Any) -> None:
    names = ("sequence_id", "sequence_start", "classification", "timeout", "timeout_ms", "priority", "binary_data_size")
    kept = parameters[
        draw(st.sampled_from((*names, "shared_memory_region", "shared_memory_byte_size", "raw", "x", "")))
    ]
    kind = draw(st.sampled_from(["bool_param", "int64_param", "string_param", "double_param", "uint64_param", ""]))
    values = {
        "bool_param": st.booleans(),
        "int64_param": st.integers(-(2**63), 2**63 - 1),
        "string_param": st.sampled_from(["", "7", "ä" * 99]),
        "double_param": st.floats(),
        "uint64_param": st.integers(0, 2**64 - 1),
    }
    if kind:
        setattr(kept, kind, draw(values[kind]))


REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "UNAVAILABLE", "DEADLINE_EXCEEDED"}


@SETTINGS
@given(drawn=grpc_requests())
def test_grpc_answers_or_says_why_not(channel, nothing_is_logged, drawn):
    request, is_good = drawn
    ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    call = ask.future(request.SerializeToString(), timeout=ANSWER_S)
    if call.code() is not grpc.StatusCode.OK:
        assert call.code().name in REFUSALS, call
        assert call.details()
        assert not is_good, call
        return
    answer = service_pb2.ModelInferResponse.FromString(call.result())
    assert (answer.model_name, answer.id) == (request.model_name, request.id)
    assert len(answer.raw_output_contents) == len(answer.outputs)


@pytest.fixture
def channel(daemon):
    with grpc.insecure_channel(grpc_url(daemon).partition("://")[2]) as channel:
        yield channel
