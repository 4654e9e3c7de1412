"""The MQTT receiver on a real core, with what it would publish kept: one message's trouble is nobody else's."""

from __future__ import annotations

import msgpack
import pytest

from edge_runtime.config.settings import Config
from edge_runtime.daemon.assemble import assemble_core
from edge_runtime.frontend.control_frontend import ControlFrontend
from edge_runtime.frontend.infer_frontend import InferFrontend
from edge_runtime.frontend.mqtt_frontend import MqttFrontend
from edge_runtime.transports.mqtt_connection import NO_LIMIT
from edge_runtime.transports.mqtt_packets import Inbound
from edge_runtime.wire.topics import DeviceTopics
from tests.contract.running_daemon import floats, header, put_model
from tests.models import onnx_models

TOPICS = DeviceTopics("dev1")
REQUEST = msgpack.packb([msgpack.unpackb(header("mlp")), floats(1, 16).tobytes()])


class KeptMessages:
    """A transport as far as the frontend sees it: keeps what is posted."""

    packet_limit = NO_LIMIT

    def __init__(self):
        self.posted = []

    def post(self, message):
        self.posted.append(message)

    def call(self, function):
        function()


@pytest.fixture
def core(tmp_path):
    put_model(tmp_path / "models", "mlp", onnx_models.mlp)
    core = assemble_core(Config(models=str(tmp_path / "models"), state=str(tmp_path / "state"), calibrate=False))
    core.start()
    core.loader.has_settled.wait()
    yield core
    core.close(5.0)


@pytest.fixture
def frontend(core):
    control = ControlFrontend(core.servables, core.loader, core.lobby, stats=dict, is_ready=lambda: True)
    infer = InferFrontend(core.servables, core.infer, control, core.clock, core.metrics)
    return MqttFrontend(infer, TOPICS, TOPICS.reply_prefixes(), core.clock, core.metrics, max_packet_bytes=1 << 20)


def asked(number):
    return Inbound("edge/dev1/infer/mlp", REQUEST, 0, False, "reply/x", b"%d" % number)


def test_a_message_that_meets_a_bug_loses_no_request_gathered_beside_it(core, frontend):
    def fail(message):
        raise RuntimeError("a bug")

    frontend.listen("site/news", fail)
    transport = KeptMessages()
    for number in range(3):  # from the third on the header is known, and requests are gathered
        frontend.messages(transport, [asked(number)])
    frontend.messages(transport, [asked(3), Inbound("site/news", b"", 0, False), asked(4)])
    frontend.messages(transport, [asked(5)])
    assert len(transport.posted) == 6
    assert all(msgpack.unpackb(message.payload)[0]["model"] == "mlp" for message in transport.posted)
    assert core.metrics.counters()["mqtt_errors"] == 1
