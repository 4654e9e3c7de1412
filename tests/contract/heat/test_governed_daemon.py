"""A daemon on a simulated folder of sensors: what a hot device does, refuses and tells. No board was there."""

from __future__ import annotations

import json
import math
import time
import urllib.request
from contextlib import contextmanager

import jinja2
import msgpack
import pytest
from msgspec.structs import replace

from edge_runtime.config.settings import MetricsSettings
from edge_runtime.doors.mqtt.settings import MqttSettings
from edge_runtime.errors import ConfigError
from edge_runtime.heat.settings import ThermalSettings
from edge_runtime.heat.throttle import RETRY_S
from edge_runtime.telemetry.host import HostProbe
from tests.contract.running_daemon import ANSWER_S, RawClient, error_code, floats, header, put_model, running_daemon
from tests.fakes.broker import Broker, needs_mosquitto
from tests.fakes.mqtt_peer import Peer
from tests.fakes.warm_board import PI_5, WarmBoard
from tests.models import onnx_models

LOW, URGENT = 8, 1


@contextmanager
def hot_daemon(tmp_path, **settings):
    """A daemon on a board, whose temperature a test sets, and a client of it."""
    board = WarmBoard(tmp_path / "board", PI_5)
    put_model(tmp_path / "models", "mlp", onnx_models.mlp, toml='isolation = "always"\n')
    settings.setdefault("thermal", ThermalSettings(limit_celsius=80.0))
    with (
        running_daemon(tmp_path / "models", tmp_path / "run", host=HostProbe(board.root), **settings) as daemon,
        RawClient(daemon.endpoints[1]) as client,
    ):
        yield board, daemon, client


def set_celsius(board, celsius):
    board.celsius = celsius
    board.show()


def wait_stage(client, *stages):
    """The governor's part of stats, once it is at one of these stages."""
    end_s = time.monotonic() + ANSWER_S
    while (told := client.result("stats")["thermal"])["stage"] not in stages:
        assert time.monotonic() < end_s, told
    return told


def ask(client, model="mlp", priority=URGENT):
    return client.ask(header(model, priority=priority), b"", floats(1, 16).tobytes())


@pytest.mark.smoke
def test_a_daemon_slows_work_while_its_device_is_hot_and_tells_it(tmp_path):
    with hot_daemon(tmp_path, metrics=MetricsSettings(port=0)) as (board, daemon, client):
        told = wait_stage(client, "free")
        assert (told["limit_celsius"], told["low_priority"], told["low_share"]) == (80.0, 6, 1.0)

        set_celsius(board, 95.0)
        told = wait_stage(client, "fewer_cores")
        assert (told["celsius"], told["is_slowed"], told["frequency_share"]) == (pytest.approx(95, abs=1), True, 0.6)
        assert "80 °C" in told["reason"]
        assert "outputs" in msgpack.unpackb(ask(client)[0])
        with urllib.request.urlopen(daemon.metrics_url) as answer:
            text = answer.read().decode()
        assert 'edge_runtime_thermal_stage{stage="fewer_cores"} 1.0' in text
        assert "edge_runtime_thermal_limit_celsius 80.0" in text
        assert "edge_runtime_frequency_share 0.6" in text
        assert "edge_runtime_power_watts" not in text, "this board measures none"

        set_celsius(board, 40.0)
        wait_stage(client, "free")


@pytest.mark.parametrize("settings", ['isolation = "always"\n', 'mode = "inline"\n'], ids=["in a host", "inline"])
def test_low_priorities_alone_are_refused_at_last_with_the_time_to_ask_again(tmp_path, settings):
    put_model(tmp_path / "models", "net", onnx_models.mlp, toml=settings)
    with hot_daemon(tmp_path) as (board, daemon, client):
        for _ in range(3):  # its header is known then
            ask(client, "net", LOW)
        governor = daemon.doors["thermal"].governor
        set_celsius(board, 95.0)
        # What a minute of this heat leads to; it stays for a while.
        governor.throttle = replace(governor.throttle, pressure=2.0, refuses=True, changed_s=time.monotonic())
        governor.step()
        assert client.result("stats")["thermal"]["stage"] == "refuses_low"
        for _ in range(2):
            refused = ask(client, "net", LOW)
            assert error_code(refused) == "queue_full"
            error = msgpack.unpackb(refused[0])["error"]
            assert (error["retryable"], error["retry_after_ms"]) == (True, RETRY_S * 1e3)
            assert "too hot" in error["message"]
        assert "outputs" in msgpack.unpackb(ask(client, "net", URGENT)[0])

        set_celsius(board, 40.0)
        governor.throttle = replace(governor.throttle, changed_s=-math.inf)
        wait_stage(client, "free")
        assert "outputs" in msgpack.unpackb(ask(client, "net", LOW)[0])


def test_a_lighter_variant_answers_while_it_is_hot_and_the_model_itself_afterwards(tmp_path):
    folder = put_model(tmp_path / "models", "net", onnx_models.mlp)
    onnx_models.mlp_int8(folder)
    put_model(tmp_path / "models", "plain", onnx_models.mlp)

    def precisions(client):
        return {each["name"]: each["precision"] for each in client.result("models")}

    with hot_daemon(tmp_path, thermal=ThermalSettings(limit_celsius=80.0, lighter=True)) as (board, daemon, client):
        before = precisions(client)
        governor = daemon.doors["thermal"].governor
        set_celsius(board, 79.0)  # above the aim, so that it stays
        governor.throttle = replace(governor.throttle, pressure=2.0, is_lighter=True, changed_s=time.monotonic())
        governor.step()
        end_s = time.monotonic() + ANSWER_S
        while precisions(client) != {**before, "net": "int8"}:
            assert time.monotonic() < end_s, precisions(client)
            assert "outputs" in msgpack.unpackb(ask(client, "net")[0]), "no request is lost on the way"
        set_celsius(board, 40.0)
        governor.throttle = replace(governor.throttle, pressure=0.0, changed_s=-math.inf)
        governor.step()
        while precisions(client) != before:
            assert time.monotonic() < end_s, precisions(client)
            assert "outputs" in msgpack.unpackb(ask(client, "net")[0])


@needs_mosquitto
def test_the_device_s_state_and_home_assistant_have_the_stage(tmp_path):
    with Broker(tmp_path / "broker") as broker, Peer(broker.url) as peer:
        peer.subscribe("homeassistant/device/dev1/config", 1)
        peer.subscribe("edge/dev1/state", 1)
        mqtt = MqttSettings(
            url=f"{broker.url}/dev1", reconnect_min_s=0.05, state_interval_s=600.0, home_assistant="homeassistant"
        )
        with hot_daemon(tmp_path, mqtt=mqtt) as (board, _, client):
            entity = None
            set_celsius(board, 95.0)
            wait_stage(client, "fewer_cores", "refuses_low")
            while True:
                said = json.loads((message := peer.next()).payload)
                if message.topic.endswith("/config"):
                    entity = said["components"].get("heat", entity)
                elif entity is not None and said["thermal"]["governor"]["state"] != "free":
                    break
            shown = jinja2.Environment(autoescape=False).from_string(entity["value_template"]).render(value_json=said)
            assert shown in entity["options"]
            assert shown == said["thermal"]["governor"]["state"]
            assert "80 °C" in said["thermal"]["governor"]["reason"]


@pytest.mark.parametrize(
    ("thermal", "words"),
    [
        (ThermalSettings(zones=("gpu-thermal",), limit_celsius=80.0), r"thermal.zones: got 'gpu-thermal'.*cpu-thermal"),
        (ThermalSettings(), r"thermal.limit_celsius: the profile arm64-generic does not say"),
    ],
)
def test_a_governor_that_cannot_know_what_is_too_hot_says_what_to_do(tmp_path, thermal, words):
    with pytest.raises(ConfigError, match=words), hot_daemon(tmp_path, thermal=thermal, profile="arm64-generic"):
        pass


def test_the_limit_lies_below_where_the_profile_says_that_the_device_throttles(tmp_path):
    with hot_daemon(tmp_path, thermal=ThermalSettings(), profile="raspberry-pi-5") as (_, _, client):
        assert client.result("stats")["thermal"]["limit_celsius"] == 78.0
