"""The daemon and its clients on the ready broker configuration: certificates, access lists, limits."""

from __future__ import annotations

import json
import threading

import msgpack
import pytest

from edge_runtime.doors.mqtt.settings import MqttSettings
from tests.attacks.test_broker_configuration import certificates, fleet, make_certificates  # noqa: F401 (fixtures)
from tests.contract.doors.mqtt.test_mqtt_faults import eventually
from tests.contract.doors.mqtt.test_mqtt_wire import counted, error_of, wait_status
from tests.contract.running_daemon import ANSWER_S, floats, header, put_model, running_daemon
from tests.fakes.broker import Broker, needs_mosquitto
from tests.fakes.mqtt_peer import Peer
from tests.models import onnx_models

pytestmark = needs_mosquitto

REQUEST = msgpack.packb([msgpack.unpackb(header("mlp")), floats(1, 16).tobytes()])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "mlp", onnx_models.mlp)
    return models


def settings(fleet, device, *, certificate=None, **options):  # noqa: F811
    tls = fleet.device_tls(certificate or device)
    options = {"ca_file": str(tls.ca), "cert_file": str(tls.certificate), "key_file": str(tls.key), **options}
    return MqttSettings(url=f"{fleet.devices_url}/{device}", reconnect_min_s=0.05, reconnect_max_s=0.2, **options)


def test_a_client_with_its_certificate_is_answered_by_a_device_with_its_own(fleet, models, tmp_path):  # noqa: F811
    with (
        running_daemon(models, tmp_path, mqtt=settings(fleet, "cam-7")),
        fleet.client("alice") as alice,
    ):
        wait_status(alice, "cam-7", b"online")
        alice.reply_topic = "reply/client-alice/1"

        reply = alice.ask("edge/cam-7/infer/mlp", REQUEST)

        assert msgpack.unpackb(reply.payload)[0]["model"] == "mlp"
        alice.subscribe("edge/cam-7/state", 1)
        assert json.loads(alice.next().payload)["device_id"] == "cam-7"


def test_a_connection_that_speaks_tls_is_served_by_a_thread_of_its_own(fleet, models, tmp_path):  # noqa: F811
    with running_daemon(models, tmp_path, mqtt=settings(fleet, "cam-7")) as daemon:
        transport, names, was_called = daemon.doors["mqtt"].transport, [], threading.Event()
        eventually(lambda: transport.is_online)
        transport.call(lambda: (names.append(threading.current_thread().name), was_called.set()))
        assert was_called.wait(ANSWER_S)
    assert names == ["edge-mqtt"]


def test_a_reply_cannot_be_sent_to_another_client(fleet, models, tmp_path):  # noqa: F811
    """The broker keeps a client from reading replies that are not its own: what it asks for others, it never sees."""
    with (
        running_daemon(models, tmp_path, mqtt=settings(fleet, "cam-7")),
        fleet.client("alice") as alice,
        fleet.client("mallory") as mallory,
    ):
        wait_status(alice, "cam-7", b"online")
        mallory.subscribe("reply/#", 1)
        alice.reply_topic = "reply/client-alice/1"

        alice.ask("edge/cam-7/infer/mlp", REQUEST)

        assert mallory.is_silent(0.15)


def test_a_device_that_says_it_is_another_learns_that_the_broker_refuses_it(fleet, models, tmp_path):  # noqa: F811
    with running_daemon(models, tmp_path, mqtt=settings(fleet, "cam-8", certificate="cam-9")) as daemon:
        eventually(lambda: counted(daemon, "mqtt_publish_refused") >= 1)
        with fleet.client("alice") as alice:
            alice.subscribe("edge/cam-8/status", 1)
            assert alice.is_silent(0.15)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cert_file": None, "key_file": None}, "does the broker want another client certificate?"),
        ({"ca_file": None}, "the broker's certificate is not trusted"),
    ],
)
def test_a_connection_that_tls_refuses_is_explained(fleet, models, tmp_path, options, reason):  # noqa: F811
    with running_daemon(models, tmp_path, mqtt=settings(fleet, "cam-7", **options)) as daemon:
        eventually(lambda: reason in daemon.status.stats()["mqtt"]["reason"])


def test_a_certificate_of_somebody_elses_authority_is_refused(fleet, models, tmp_path):  # noqa: F811
    make_certificates(tmp_path / "foreign", "broker", "127.0.0.1")
    make_certificates(tmp_path / "foreign", "device", "cam-7")
    foreign = tmp_path / "foreign" / "devices" / "cam-7"
    mqtt = settings(
        fleet, "cam-7", cert_file=str(foreign / "device.crt"), key_file=str(foreign / "device.key")
    )  # fmt: skip
    with running_daemon(models, tmp_path / "run", mqtt=mqtt) as daemon:
        eventually(lambda: counted(daemon, "mqtt_connect_failures") >= 2)
        assert not daemon.status.stats()["mqtt"]["connected"]


def test_an_answer_that_the_broker_would_not_take_becomes_an_error_that_says_so(models, tmp_path):
    with Broker(tmp_path / "broker", config="max_packet_size 600\n") as broker, Peer(broker.url) as peer:
        mqtt = MqttSettings(url=f"{broker.url}/small", reconnect_min_s=0.05)
        with running_daemon(models, tmp_path / "run", mqtt=mqtt) as daemon:
            wait_status(peer, "small", b"online")

            reply = peer.ask("edge/small/infer", '{"op": "stats"}')

            assert error_of(reply) == "tensor_mismatch"
            message = json.loads(reply.payload)["error"]["message"]
            assert "at most 600" in message
            assert "ZeroMQ" in message
            assert counted(daemon, "mqtt_connections_lost") == 0
            limit = json.loads(peer.ask("edge/small/infer/mlp", '{"op": "metadata"}').payload)["result"]
            assert limit["max_frame_bytes"] == 600
