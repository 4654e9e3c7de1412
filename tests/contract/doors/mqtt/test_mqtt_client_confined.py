"""MqttClient on the broker configuration that we bring, where a certificate says what a client may do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edge_runtime.doors.mqtt.client import MqttClient
from edge_runtime.doors.mqtt.settings import MqttSettings
from tests.attacks.test_broker_configuration import Fleet, make_certificates, running_fleet
from tests.contract.running_daemon import ANSWER_S, floats, put_model, running_daemon
from tests.fakes.broker import needs_mosquitto
from tests.models import onnx_models

pytestmark = needs_mosquitto


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[Fleet]:
    """The broker, and behind it the device cam-7 with a model."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, "broker", "127.0.0.1")
    make_certificates(folder, "device", "cam-7")
    make_certificates(folder, "client", "alice")
    models = tmp_path_factory.mktemp("models")
    put_model(models, "mlp", onnx_models.mlp)
    with running_fleet(tmp_path_factory.mktemp("broker"), folder) as fleet:
        tls = fleet.device_tls("cam-7")
        mqtt = MqttSettings(
            url=f"{fleet.devices_url}/cam-7",
            ca_file=str(tls.ca),
            cert_file=str(tls.certificate),
            key_file=str(tls.key),
            reconnect_min_s=0.05,
        )
        with running_daemon(models, tmp_path_factory.mktemp("run"), mqtt=mqtt):
            with alice(fleet, username="client-alice") as client:
                client.wait_ready(ANSWER_S)
            yield fleet


def alice(fleet: Fleet, **options) -> MqttClient:
    tls = fleet.client_tls("alice")
    files = {"ca_file": str(tls.ca), "cert_file": str(tls.certificate), "key_file": str(tls.key), **options}
    return MqttClient(f"{fleet.clients_url}/cam-7", **files)


@pytest.mark.parametrize("qos", [0, 1])
def test_a_confined_client_asks_and_sees_who_is_there_over_its_one_connection(site, qos):
    with alice(site, username="client-alice", qos=qos) as client:
        x = floats(2, 16)
        pending = [client.submit("mlp", {"x": x}) for _ in range(20)]
        assert [device.device_id for device in client.devices()] == ["cam-7"]
        assert client.device_status() == "online"
        answers = [future.result(ANSWER_S)["y"] for future in pending]
        for answer in answers:
            np.testing.assert_array_equal(answer, answers[0])


def test_without_its_name_the_replies_do_not_reach_it_and_the_error_says_what_to_look_at(site):
    with (
        alice(site) as client,
        pytest.raises(TimeoutError, match=r"it is online: .*ACL keeps this client from .* reading reply/edge-client-"),
    ):
        client.infer("mlp", {"x": floats(1, 16)}, timeout_ms=-700)


def test_a_broker_of_another_authority_is_not_trusted_and_the_error_comes_at_once(site, tmp_path: Path):
    make_certificates(tmp_path, "broker", "127.0.0.1")
    make_certificates(tmp_path, "client", "alice")
    with (
        alice(site, ca_file=str(tmp_path / "clients" / "alice" / "ca.crt")) as client,
        pytest.raises(ConnectionError, match="certificate is not trusted"),
    ):
        client.models()


def test_a_client_without_a_certificate_gets_an_error_that_names_the_broker(site):
    ca = str(site.client_tls("alice").ca)
    with (
        MqttClient(f"{site.clients_url}/cam-7", ca_file=ca) as client,
        pytest.raises(ConnectionError, match=f"^{site.clients_url}: "),
    ):
        client.models()
