"""A daemon with `[tracing]`, and a collector that checks what comes by opentelemetry-proto's messages."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import msgpack
import numpy as np
import pytest

from edge_runtime import __version__
from edge_runtime.config.settings import TracingSettings
from edge_runtime.daemon.daemon import Daemon
from edge_runtime.doors.grpc.protobuf_messages import METHODS, InferRequest
from edge_runtime.doors.http.settings import HttpSettings
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import DeadlineUnmeetable, EdgeRuntimeError, ModelNotFound, RunFailed, TensorMismatch
from edge_runtime.telemetry.tracing import read_traceparent
from edge_runtime.wire.codec import pack_extra
from tests.contract.open_doors import UnixConnection, open_doors
from tests.contract.running_daemon import ANSWER_S, RawClient, floats, header, put_model, running_daemon
from tests.fakes.broker import needs_mosquitto
from tests.fakes.mqtt_peer import Peer
from tests.fakes.otlp_receiver import OtlpReceiver, Span
from tests.models import onnx_models, python_models

INLINE, QUEUED = 'mode = "inline"\nisolation = "never"\n', 'mode = "workers"\nisolation = "never"\n'

TWO_STEPS = """
[[step]]
name = "first"
model = "plus"
inputs = {x = "input.x"}
[[step]]
name = "second"
model = "plus"
inputs = {x = "first.y"}
[output]
y = "second.y"
"""


def caller(number: int) -> str:
    """A context of a caller, whose trace and span are easily known again."""
    return f"00-{number:032x}-{number:016x}-01"


def tracing(receiver: OtlpReceiver, **settings) -> TracingSettings:
    return TracingSettings(endpoint=receiver.url, **{"metrics_s": 0.0, "logs": "off", "rate": 0.0, **settings})


@contextmanager
def traced_daemon(models: Path, folder: Path, receiver: OtlpReceiver, **settings) -> Iterator[Daemon]:
    own = {key: settings.pop(key) for key in TracingSettings.__struct_fields__ if key in settings}
    with running_daemon(models, folder, calibrate=False, tracing=tracing(receiver, **own), **settings) as daemon:
        yield daemon


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture
def models(tmp_path: Path) -> Path:
    models = tmp_path / "models"
    put_model(models, "mlp", onnx_models.mlp, toml=INLINE)
    return models


def of_trace(receiver: OtlpReceiver, number: int) -> dict[str, Span]:
    """The spans of a caller's trace by name, once all of an answered request's are there."""
    trace = f"{number:032x}"
    receiver.wait(lambda: sum(each.trace == trace for each in receiver.spans()) >= 4)
    return {each.name: each for each in receiver.spans() if each.trace == trace}


def texts(attributes) -> dict[str, str]:
    return {each.key: each.value.string_value for each in attributes}


def roots(receiver: OtlpReceiver) -> list[Span]:
    return [each for each in receiver.spans() if each.name.startswith("infer")]


@pytest.mark.smoke
@needs_mosquitto
def test_a_request_that_carries_a_context_is_traced_at_every_door(models, broker, tmp_path, receiver):
    put_model(models, "queued", onnx_models.mlp, toml=QUEUED)
    asked = {
        (door, model): 1 + index
        for index, (door, model) in enumerate(
            (door, model) for door in ("zmq-frames", "mqtt", "http-binary", "grpc") for model in ("mlp", "queued")
        )
    }
    settings = {"calibrate": False, "tracing": tracing(receiver)}
    with open_doors(models, broker, tmp_path / "run", "traced", **settings) as doors:
        for (door, model), number in asked.items():
            with doors.asking(door) as ask:
                ask(model, {"x": floats(3, 16)})
                ask(model, {"x": floats(3, 16)}, timeout_ms=60_000.0, parameters={"traceparent": caller(number)})
                ask(model, {"x": floats(3, 16)}, parameters={"traceparent": "00-ff-ff-01"})
                ask(model, {"x": floats(3, 16)}, parameters={"traceparent": caller(number)[:-2] + "00"})
        for (door, model), number in asked.items():
            spans = of_trace(receiver, number)
            root, batch, run = spans[f"infer {model}"], spans["batch"], spans["run"]
            assert (root.parent, root.kind, root.status) == (f"{number:016x}", 2, (0, ""))
            assert root.attributes["edge_runtime.door"] == {"zmq-frames": "zmq", "http-binary": "http"}.get(door, door)
            assert root.attributes["edge_runtime.version"] == 1
            assert root.attributes["edge_runtime.rows"] == 3
            assert 0 < root.attributes["edge_runtime.deadline_ms"] <= 60_000.0
            assert run.attributes["edge_runtime.backend"] == "onnxruntime"
            assert run.attributes["edge_runtime.device"] == "CPU"
            assert batch.attributes["edge_runtime.batch_rows"] == 3
            assert (spans["queue"].parent, batch.parent, run.parent) == (root.own, root.own, batch.own)
            assert root.begin_ns == spans["queue"].begin_ns <= spans["queue"].end_ns == batch.begin_ns == run.begin_ns
            assert run.begin_ns <= run.end_ns <= batch.end_ns == root.end_ns
            if model == "queued":
                assert root.attributes["edge_runtime.forecast_ms"] > 0
        assert len(roots(receiver)) == len(asked)
        assert {each.message.DESCRIPTOR.name for each in receiver.spans()} == {"Span"}
    (resource,) = {str(body.resource_spans[0].resource) for _, body in receiver.bodies}
    assert "edge-runtime" in resource
    assert __version__ in resource


@needs_mosquitto
def test_an_answer_says_the_span_that_its_request_became(models, broker, tmp_path, receiver):
    settings = {"calibrate": False, "tracing": tracing(receiver)}
    x, told = floats(1, 16), dict[str, str | None]()
    with open_doors(models, broker, tmp_path / "run", "told", **settings) as doors:
        with RawClient(doors.zmq) as raw:
            for number in (1, 2, 3, 4):  # a header that comes again is known, and answered another way
                reply = raw.ask(header(extra=True), b"id", x.tobytes(), pack_extra(None, caller(number)))
                told[f"zmq {number}"] = msgpack.unpackb(reply[0])["traceparent"]
                assert len(reply) == 3
            reply = raw.ask(header("none", extra=True), b"id", x.tobytes(), pack_extra(None, caller(5)))
            told["zmq refused"] = msgpack.unpackb(reply[0])["traceparent"]
            assert "traceparent" not in msgpack.unpackb(raw.ask(header(), b"id", x.tobytes())[0])
        connection = UnixConnection(f"{tmp_path}/run/http.sock")
        body = {"inputs": [{"name": "x", "shape": [1, 16], "datatype": "FP32", "data": x.reshape(-1).tolist()}]}
        for _ in range(4):
            connection.request("POST", "/v2/models/mlp/infer", json.dumps(body), {"traceparent": caller(11)})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            answer.read()
            told["http"] = answer.headers["traceparent"]
        connection.request("POST", "/v2/models/mlp/infer", json.dumps(body))
        answer = connection.getresponse()
        assert answer.read()
        assert "traceparent" not in answer.headers
        connection.close()
        message = InferRequest(model_name="mlp")
        message.inputs.add(name="x", datatype="FP32", shape=[1, 16])
        message.raw_input_contents.append(x.tobytes())
        method = METHODS["ModelInfer"]
        with grpc.insecure_channel(f"unix:{tmp_path}/run/grpc.sock") as channel:
            call = channel.unary_unary(method.path, InferRequest.SerializeToString, method.response.FromString)
            _, ended = call.with_call(message, metadata=(("traceparent", caller(21)),))
            told["grpc"] = dict(ended.trailing_metadata())["traceparent"]
            _, ended = call.with_call(message)
            assert "traceparent" not in dict(ended.trailing_metadata())
        with Peer(broker.url) as peer:
            peer.subscribe(peer.reply_topic)
            peer.publish(
                "edge/told/infer/mlp",
                json.dumps(body),
                response_topic=peer.reply_topic,
                user_properties=[("traceparent", caller(31))],
            )
            told["mqtt"] = dict(peer.next().properties.UserProperty)["traceparent"]
        receiver.wait(lambda: len(roots(receiver)) >= 4 + 1 + 4 + 1 + 1)
    spans = {(each.trace, each.own) for each in roots(receiver)}
    assert len(spans) == len(roots(receiver))
    for door, each in told.items():
        parent = read_traceparent(each)
        assert parent is not None, (door, each)
        assert (f"{parent.trace_id:032x}", f"{parent.span_id:016x}") in spans, door


@needs_mosquitto
def test_a_request_with_two_contexts_or_a_broken_one_is_traced_as_one_without_at_every_door(
    models, broker, tmp_path, receiver
):
    settings = {"calibrate": False, "tracing": tracing(receiver)}
    x, told = floats(1, 16), dict[str, bool]()
    twice, broken = [caller(1), caller(2)], [caller(0xABC).upper()]
    body = json.dumps({"inputs": [{"name": "x", "shape": [1, 16], "datatype": "FP32", "data": x.reshape(-1).tolist()}]})
    with open_doors(models, broker, tmp_path / "run", "twice", **settings) as doors:
        with RawClient(doors.zmq) as raw:
            packed = [b"\x82" + 2 * (msgpack.packb("traceparent") + msgpack.packb(caller(1)))]
            packed += [pack_extra(None, broken[0]), msgpack.packb({"traceparent": 7})]
            for _ in range(3):  # a header that comes again is known
                for index, extra in enumerate(packed):
                    reply = msgpack.unpackb(raw.ask(header(extra=True), b"id", x.tobytes(), extra)[0])
                    told[f"zmq {index}"] = "outputs" in reply and "traceparent" not in reply
        connection = UnixConnection(f"{tmp_path}/run/http.sock")
        for contexts in (twice, broken):
            connection.putrequest("POST", "/v2/models/mlp/infer")
            connection.putheader("Content-Length", str(len(body)))
            for each in contexts:
                connection.putheader("traceparent", each)
            connection.endheaders(body.encode())
            answer = connection.getresponse()
            answer.read()
            told[f"http {len(contexts)}"] = answer.status == 200 and "traceparent" not in answer.headers
        connection.close()
        message = InferRequest(model_name="mlp")
        message.inputs.add(name="x", datatype="FP32", shape=[1, 16])
        message.raw_input_contents.append(x.tobytes())
        method = METHODS["ModelInfer"]
        with grpc.insecure_channel(f"unix:{tmp_path}/run/grpc.sock") as channel:
            call = channel.unary_unary(method.path, InferRequest.SerializeToString, method.response.FromString)
            _, ended = call.with_call(message, metadata=[("traceparent", broken[0])])  # it sends no name twice
            told["grpc"] = "traceparent" not in dict(ended.trailing_metadata())
        with Peer(broker.url) as peer:
            peer.subscribe(peer.reply_topic)
            for contexts in (twice, broken):
                properties = [("traceparent", each) for each in contexts]
                topic = peer.reply_topic
                peer.publish("edge/twice/infer/mlp", body, response_topic=topic, user_properties=properties)
                reply = peer.next()
                said = getattr(reply.properties, "UserProperty", ())
                told[f"mqtt {len(contexts)}"] = b"outputs" in reply.payload and "traceparent" not in dict(said)
        assert told == dict.fromkeys(told, True)
        assert len(told) == 8
    assert not roots(receiver)


def test_all_requests_of_the_lean_path_are_traced_where_the_rate_says_so(models, tmp_path, receiver):
    count = 400
    with traced_daemon(models, tmp_path / "run", receiver, rate=1.0) as daemon, Client(daemon.endpoints[1]) as client:
        for each in [client.submit("mlp", {"x": floats(1, 16)}) for _ in range(count)]:
            each.result(ANSWER_S)
        receiver.wait(lambda: len(roots(receiver)) >= count)
    found = roots(receiver)
    assert len(found) == len({each.trace for each in found}) == count
    assert {(each.parent, each.attributes["edge_runtime.door"]) for each in found} == {("", "zmq")}
    assert {each.attributes["edge_runtime.mode"] for each in receiver.spans() if each.name == "batch"} == {"inline"}


def test_a_batch_links_the_requests_that_ran_together(tmp_path, receiver):
    models = tmp_path / "models"
    toml = f"{QUEUED}max_queue_delay_ms = {ANSWER_S * 1e3}\nmax_batch_rows = 2\npreferred_batch_rows = [2]\n"
    put_model(models, "pairs", onnx_models.mlp, toml=toml)
    with traced_daemon(models, tmp_path / "run", receiver) as daemon, Client(daemon.endpoints[1]) as client:
        asked = [
            client.submit("pairs", {"x": floats(1, 16)}, parameters={"traceparent": caller(number)})
            for number in (1, 2)
        ]
        for each in asked:
            each.result(ANSWER_S)
        first, second = of_trace(receiver, 1), of_trace(receiver, 2)
    for own, other in ((first, second), (second, first)):
        root = other["infer pairs"]
        assert own["batch"].attributes["edge_runtime.batch_rows"] == 2
        assert own["batch"].links == [(root.trace, root.own)]


def test_a_refused_request_has_a_span_with_its_code(models, tmp_path, receiver):
    put_model(models, "queued", onnx_models.slow, toml=QUEUED, constant=1.0, size=256)
    put_model(models, "small", onnx_models.mlp, toml=f"{QUEUED}max_queue_delay_ms = 60000\nmax_batch_rows = 4\n")
    settings = {"http": HttpSettings(endpoint=f"unix:{tmp_path}/http.sock")}
    with traced_daemon(models, tmp_path / "run", receiver, **settings) as daemon:
        with Client(daemon.endpoints[1]) as client:
            wanted = client.metadata("queued")["inputs"][0]
            x = np.ones([max(each, 1) for each in wanted["shape"]], np.float32)
            client.infer("queued", {wanted["name"]: x})

            def refused(number: int, kind: type[EdgeRuntimeError], model: str, array, timeout_ms=None) -> None:
                with pytest.raises(kind):
                    client.infer(
                        model,
                        {wanted["name"] if model == "queued" else "x": array},
                        timeout_ms=timeout_ms,
                        parameters={"traceparent": caller(number)},
                    )

            refused(1, ModelNotFound, "none", x)
            refused(2, TensorMismatch, "mlp", floats(1, 3))
            for number in (3, 4, 5, 6):  # a known header's refusals are made before there is a request
                refused(number, DeadlineUnmeetable, "queued", x, timeout_ms=0.001)
        connection = UnixConnection(f"{tmp_path}/http.sock")
        connection.request("POST", "/v2/models/mlp/infer", "{no json", {"traceparent": caller(7)})
        assert connection.getresponse().status == 400
        connection.close()
        receiver.wait(lambda: len(roots(receiver)) >= 7)
    codes = {int(each.trace, 16): each for each in roots(receiver)}
    assert {number: each.attributes["error.type"] for number, each in codes.items()} == {
        1: "model_not_found",
        2: "tensor_mismatch",
        **dict.fromkeys((3, 4, 5, 6), "deadline_unmeetable"),
        7: "decode_failed",
    }
    assert {each.status[0] for each in codes.values()} == {2}
    assert {each.parent for each in codes.values()} == {f"{number:016x}" for number in codes}
    late = codes[3]
    assert late.attributes["edge_runtime.deadline_ms"] == pytest.approx(0.001)
    assert "timeout" in late.status[1]
    assert {each.name for each in receiver.spans()} >= {"infer", "infer mlp", "infer queued"}
    assert codes[1].attributes["edge_runtime.model"] == "none"


def test_a_pipelines_steps_are_spans_below_its_own(tmp_path, receiver):
    models = tmp_path / "models"
    put_model(models, "plus", onnx_models.added, toml=QUEUED)
    (models / "both").mkdir()
    (models / "both" / "pipeline.toml").write_text(TWO_STEPS)
    with traced_daemon(models, tmp_path / "run", receiver) as daemon, Client(daemon.endpoints[1]) as client:
        client.infer("both", {"x": floats(1, 2)}, parameters={"traceparent": caller(9)})
        receiver.wait(lambda: len(receiver.spans()) >= 9)
    spans = receiver.spans()
    (root,) = roots(receiver)
    steps = {each.name: each for each in spans if each.name.startswith("step")}
    assert set(steps) == {"step first", "step second"}
    assert {each.trace for each in spans} == {f"{9:032x}"}
    assert {each.parent for each in steps.values()} == {root.own}
    assert root.parent == f"{9:016x}"
    assert steps["step first"].end_ns <= steps["step second"].end_ns <= root.end_ns
    assert {each.attributes["edge_runtime.model"] for each in steps.values()} == {"plus"}
    for step in steps.values():
        assert {each.name for each in spans if each.parent == step.own} == {"queue", "batch"}


def test_telemetry_waits_on_disk_for_a_collector_that_is_away(models, tmp_path):
    with OtlpReceiver() as receiver:
        port = int(receiver.url.rpartition(":")[2])
    with traced_daemon(models, tmp_path / "run", receiver) as daemon, Client(daemon.endpoints[1]) as client:
        client.infer("mlp", {"x": floats(1, 16)}, parameters={"traceparent": caller(3)})
    kept = list((tmp_path / "run" / "state" / "telemetry").iterdir())
    assert len(kept) == 1
    with OtlpReceiver(port) as receiver:
        receiver.answer(503)
        with traced_daemon(models, tmp_path / "run", receiver):
            receiver.wait(lambda: receiver.refused)
            receiver.answer(200)
            spans = of_trace(receiver, 3)
    assert set(spans) == {"infer mlp", "queue", "batch", "run"}
    assert not list((tmp_path / "run" / "state" / "telemetry").iterdir())


def test_metrics_and_log_lines_are_sent_and_a_line_names_its_trace(models, tmp_path, receiver):
    body = "os._exit(3)"
    put_model(models, "ends", python_models.on_first_value, body=body, toml="[warmup]\nruns = 0\n")
    settings = {"python_models": True, "logs": "warning", "metrics_s": 0.2, "device_id": "device-7"}
    with traced_daemon(models, tmp_path / "run", receiver, **settings) as daemon, Client(daemon.endpoints[1]) as client:
        client.infer("mlp", {"x": floats(1, 16)})
        with pytest.raises(RunFailed):
            client.infer("ends", {"x": floats(1, 1)}, parameters={"traceparent": caller(8)})
        receiver.wait(lambda: receiver.logs() and "edge_runtime.answers" in receiver.metrics() and len(roots(receiver)))
    lost = [each for each in receiver.logs() if each.body.string_value == "a run was lost"]
    assert {each.trace_id.hex() for each in lost} == {f"{8:032x}"}
    assert {(each.severity_text, each.severity_number) for each in lost} == {("WARNING", 13)}
    failed = next(each for each in roots(receiver) if each.attributes["edge_runtime.model"] == "ends")
    assert {each.span_id.hex() for each in lost} == {failed.own}
    assert failed.attributes["error.type"] == "run_failed"
    metrics = receiver.metrics()
    answers = {
        each.sum.data_points[0].attributes[0].value.string_value: each.sum.data_points[0].as_int
        for each in metrics["edge_runtime.answers"]
    }
    assert answers["mlp"] == 1
    total, *_ = [
        each.histogram.data_points[0]
        for each in metrics["edge_runtime.request_duration"]
        if {label.value.string_value for label in each.histogram.data_points[0].attributes} == {"mlp", "total"}
    ]
    assert (total.count, sum(total.bucket_counts)) == (1, 1)
    assert len(total.bucket_counts) == len(total.explicit_bounds) + 1
    assert math.isfinite(total.sum)
    assert 2.0 in {each.gauge.data_points[0].as_double for each in metrics["edge_runtime.models_ready"]}
    body = next(body for path, body in receiver.bodies if path == "/v1/metrics")
    facts = texts(body.resource_metrics[0].resource.attributes)
    build = texts(metrics["edge_runtime.build_info"][0].gauge.data_points[0].attributes)
    assert (facts["service.version"], facts["host.arch"]) == (build["version"], build["machine"])
    assert build["version"] == __version__
    assert (facts["host.name"], facts["service.instance.id"]) == (socket.gethostname(), "device-7")
    assert facts["edge_runtime.profile"]
    (begun_ns,) = {each.sum.data_points[0].start_time_unix_nano for each in metrics["edge_runtime.answers"]}
    assert begun_ns / 1e9 == pytest.approx(metrics["process_start_time"][0].gauge.data_points[0].as_double, abs=1e-3)


def test_a_collector_that_refuses_telemetry_for_good_is_not_sent_it_again(models, tmp_path, receiver):
    receiver.answer(400)
    settings = {"rate": 1.0, "headers_file": str(tmp_path / "headers")}
    (tmp_path / "headers").write_text("# of the tenant\nAuthorization: Bearer 123\n")
    with traced_daemon(models, tmp_path / "run", receiver, **settings) as daemon, Client(daemon.endpoints[1]) as client:
        client.infer("mlp", {"x": floats(1, 16)})
        receiver.wait(lambda: receiver.refused)
    assert not list((tmp_path / "run" / "state" / "telemetry").iterdir())
    assert receiver.refused == 1
    assert receiver.headers[0]["Authorization"] == "Bearer 123"
    assert receiver.headers[0]["Content-Type"] == "application/json"
