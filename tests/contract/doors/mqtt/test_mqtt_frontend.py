"""The MQTT receiver on a real core, with what it would publish kept: one message's trouble is nobody else's."""

from __future__ import annotations

import json
from queue import SimpleQueue
from types import SimpleNamespace

import msgpack
import pytest

from edge_runtime.config.settings import Config
from edge_runtime.daemon.assemble import assemble_core
from edge_runtime.doors.large_bodies import MAX_WAITING_BYTES
from edge_runtime.doors.mqtt.frontend import MqttFrontend
from edge_runtime.doors.mqtt.packets import MAX_PACKET_BYTES, Inbound
from edge_runtime.doors.mqtt.topics import DeviceTopics
from edge_runtime.request.infer_frontend import InferFrontend
from edge_runtime.request.operation_handlers import OperationHandlers
from edge_runtime.wire.json_codec import MAX_JSON_BYTES
from tests.contract.running_daemon import ANSWER_S, floats, header, put_model
from tests.fakes.clock import FakeClock
from tests.models import onnx_models

TOPICS = DeviceTopics("dev1")
REQUEST = msgpack.packb([msgpack.unpackb(header("mlp")), floats(1, 16).tobytes()])


class KeptMessages:
    """A transport as far as the frontend sees it: keeps what is posted."""

    packet_limit = MAX_PACKET_BYTES

    def __init__(self):
        self.posted = []

    def post(self, message):
        self.posted.append(message)

    def call(self, function):
        function()


class HeldCalls(KeptMessages):
    """One whose thread takes calls when the test does."""

    def __init__(self):
        super().__init__()
        self.calls = SimpleQueue()

    def call(self, function):
        self.calls.put(function)

    def take(self):
        self.calls.get(timeout=ANSWER_S)()


class FailingListener:
    """Listens to site/news, and fails."""

    topics = ("site/news",)
    takes_retained = False

    def message(self, message):
        raise RuntimeError("a bug")

    def online(self):
        pass

    beat = online


@pytest.fixture
def core(tmp_path):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    core = assemble_core(Config(models=str(tmp_path / "models"), state=str(tmp_path / "state"), calibrate=False))
    core.start()
    core.loader.has_settled.wait()
    yield core
    core.close(5.0)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def frontend(core, clock):
    control = OperationHandlers(core.table, core.loader, core.pending_loads, SimpleNamespace(is_ready=True, stats=dict))
    infer = InferFrontend(core.table, core.infer, control, core.clock, core.metrics)
    frontend = MqttFrontend(infer, TOPICS, TOPICS.reply_prefixes(), clock, core.metrics, max_packet_bytes=1 << 20)
    yield frontend
    frontend.close()


def asked(number):
    return Inbound("edge/dev1/infer/mlp", REQUEST, 0, False, "reply/x", b"%d" % number)


def test_a_message_that_meets_a_bug_loses_no_request_gathered_beside_it(core, frontend):
    frontend.listen([FailingListener()])
    transport = KeptMessages()
    for number in range(3):  # from the third on the header is known, and requests are gathered
        frontend.messages(transport, [asked(number)])
    frontend.messages(transport, [asked(3), Inbound("site/news", b"", 0, False), asked(4)])
    frontend.messages(transport, [asked(5)])
    assert len(transport.posted) == 6
    assert all(msgpack.unpackb(message.payload)[0]["model"] == "mlp" for message in transport.posted)
    assert core.metrics.counters()["mqtt_errors"] == 1


def test_a_request_that_wants_no_outputs_is_answered_and_silences_nobody(core, frontend):
    none_wanted = msgpack.packb([msgpack.unpackb(header("mlp", outputs=[])), floats(1, 16).tobytes()])
    transport = KeptMessages()
    for number in range(5):
        odd = Inbound("edge/dev1/infer/mlp", none_wanted, 0, False, "reply/x", b"odd%d" % number)
        frontend.messages(transport, [odd, asked(number), odd, asked(number)])
    answers = [msgpack.unpackb(message.payload) for message in transport.posted]
    assert sorted(len(frames) for frames in answers) == [1] * 10 + [2] * 10
    assert all(len(frames) == 1 + len(frames[0]["outputs"]) for frames in answers)
    assert "mqtt_errors" not in core.metrics.counters()


def test_a_burst_that_fails_strands_no_other(core, frontend, monkeypatch):
    two_rows = msgpack.packb([msgpack.unpackb(header("mlp", (2, 16))), floats(2, 16).tobytes()])
    other = Inbound("edge/dev1/infer/mlp", two_rows, 0, False, "reply/x", b"two")
    transport = KeptMessages()
    for number in range(3):
        frontend.messages(transport, [asked(number), other])
    transport.posted.clear()
    runs = []

    def fail_once(parts, rows):
        runs.append(rows)
        if len(runs) == 1:
            raise RuntimeError("a bug")
        return run_single(parts, rows)

    buffers = core.table.resolve("mlp", None).inline
    run_single = buffers.run_single
    monkeypatch.setattr(buffers, "run_single", fail_once)
    frontend.messages(transport, [asked(3), other, asked(4), other])
    frontend.messages(transport, [asked(5)])
    heads = [msgpack.unpackb(message.payload)[0] for message in transport.posted]
    assert [head.get("error", {}).get("code") for head in heads] == ["run_failed", "run_failed", None, None, None]


# ---- large JSON -----------------------------------------------------------------------------------------------------


def large(number, *, qos=0, nbytes=80 << 10, **fields):
    """A request in JSON that is mostly blanks."""
    item = {"name": "x", "shape": [1, 16], "datatype": "FP32", "data": floats(1, 16).ravel().tolist()}
    payload = json.dumps({"inputs": [item], **fields}).encode().ljust(nbytes)
    return Inbound("edge/dev1/infer/mlp", payload, qos, False, "reply/x", b"%d" % number)


def answered(transport):
    """The names of models that answered in JSON, and the codes of errors."""
    fields = [json.loads(message.payload) for message in transport.posted if message.payload[:1] == b"{"]
    return [each["error"]["code"] if "error" in each else each["model_name"] for each in fields]


def test_large_json_is_read_beside_the_thread_which_answers_others_meanwhile(core, frontend):
    transport = HeldCalls()
    for _ in range(3):
        frontend.messages(transport, [large(0), asked(1)])
    assert len(transport.posted) == 3
    assert answered(transport) == []
    for _ in range(3):
        transport.take()
    assert answered(transport) == ["mlp"] * 3
    frontend.messages(transport, [large(0, nbytes=1 << 10)])
    assert answered(transport) == ["mlp"] * 4


def test_a_small_request_of_a_sequence_does_not_overtake_a_large_one(core, frontend):
    transport, of_one = HeldCalls(), {"parameters": {"sequence_id": 5}}
    sizes = {0: 80 << 10, 1: 0, 2: 80 << 10, 3: 0}
    steps = [large(number, nbytes=nbytes, id=str(number), **of_one) for number, nbytes in sizes.items()]
    frontend.messages(transport, [*steps, large(4, nbytes=0, id="other")])
    for _ in sizes:
        transport.take()
    assert [json.loads(message.payload)["id"] for message in transport.posted] == ["other", "0", "1", "2", "3"]


def test_large_json_that_is_none_is_answered_with_why(core, frontend):
    transport = HeldCalls()
    message = large(0)
    message.payload = message.payload.replace(b"{", b"[", 1)
    frontend.messages(transport, [message])
    transport.take()
    assert answered(transport) == ["decode_failed"]


def test_the_time_for_which_large_json_waited_to_be_read_is_part_of_its_timeout(core, frontend, clock):
    transport = HeldCalls()
    frontend.messages(transport, [large(0, timeout_ms=500.0), large(1, timeout_ms=60_000.0)])
    clock.advance(1.0)
    transport.take()
    transport.take()
    assert answered(transport) == ["deadline_unmeetable", "mlp"]


def test_large_json_that_qos_1_delivers_twice_is_answered_once(core, frontend):
    transport = HeldCalls()
    frontend.messages(transport, [large(0, qos=1), large(0, qos=1)])
    transport.take()
    transport.take()
    assert answered(transport) == ["mlp"]
    assert core.metrics.counters()["mqtt_duplicates"] == 1


def test_large_json_beyond_the_bound_of_what_waits_is_refused(core, frontend):
    transport, message = HeldCalls(), large(0, nbytes=MAX_JSON_BYTES)
    count = MAX_WAITING_BYTES // MAX_JSON_BYTES
    frontend.messages(transport, [message] * (count + 1))
    assert answered(transport) == ["queue_full"]
    transport.take()
    frontend.messages(transport, [message])
    for _ in range(count):
        transport.take()
    assert answered(transport) == ["queue_full"] + ["mlp"] * (count + 1)


def test_all_large_json_that_came_before_the_end_is_answered(core, frontend):
    transport = HeldCalls()
    frontend.messages(transport, [large(number) for number in range(10)])
    frontend.close()
    assert transport.calls.qsize() == 10
    frontend.messages(transport, [large(10)])
    assert answered(transport) == ["mlp"]
