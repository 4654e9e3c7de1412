"""`track = true`: a real camera, detector, daemon and broker; results, events, pictures and Home Assistant."""

from __future__ import annotations

import io
import json

import pytest
from PIL import Image

from edge_runtime.doors.mqtt.settings import MqttSettings
from edge_runtime.site.settings import AlarmSettings, CameraSettings, LineSettings, PublishRule, ZoneSettings
from tests.contract.running_daemon import put_model
from tests.contract.site.test_camera_source import BOXES
from tests.contract.site.test_cameras import serving
from tests.fakes.broker import Broker, needs_mosquitto
from tests.fakes.mjpeg_camera import MjpegCamera, jpeg
from tests.models import onnx_models

ZONE = ZoneSettings("middle", ((0.1, 0.1), (0.9, 0.1), (0.9, 0.9), (0.1, 0.9)))
LINE = LineSettings("belt", (0.0, 0.95), (1.0, 0.95))
ALARM = AlarmSettings("busy", 0, zone="middle")
TOPIC = "edge/dev1/result/finder/door"


@pytest.fixture
def models(tmp_path):
    put_model(tmp_path / "models", "finder", onnx_models.finder, toml=BOXES)
    return tmp_path / "models"


@pytest.fixture
def broker(tmp_path):
    with Broker(tmp_path / "broker") as broker:
        yield broker


def until(listener, topic, wanted):
    """The next message of a topic that is wanted; JSON read, a picture as it is."""
    while True:
        message = listener.next()
        if message.topic == topic:
            content = message.payload if topic.endswith("picture") else json.loads(message.payload)
            if wanted(content):
                return content


@needs_mosquitto
def test_an_object_that_a_camera_sees_is_followed_counted_and_told(models, broker, tmp_path):
    rule = PublishRule(
        "finder", source="camera", camera="door", fps=50.0, on="every", track=True, lost_s=3.0, picture=True,
        zone=(ZONE,), line=(LINE,), alarm=(ALARM,),
    )  # fmt: skip
    with MjpegCamera(jpeg("black")) as server:
        cameras = [CameraSettings("door", server.url)]
        with serving(models, broker, tmp_path, cameras, [rule]) as (_, client, listener):
            assert until(listener, TOPIC, lambda _: True)["counts"] == {}
            server.picture = jpeg("white")
            entered = until(listener, f"{TOPIC}/event", lambda event: event["event"] == "entered")
            assert (entered["zone"], entered["track"], entered["camera"]) == ("middle", 1, "door")
            assert "boxes" not in entered
            raised = until(listener, f"{TOPIC}/event", lambda event: event["event"] == "raised")
            assert (raised["alarm"], raised["count"]) == ("busy", 1)
            result = until(listener, TOPIC, lambda result: result["counts"])
            (box,) = result["boxes"]
            assert (box["track"], box["zones"]) == (1, ["middle"])
            label = box["label"]
            assert result["zones"]["middle"]["counts"] == {label: 1}
            picture = until(listener, f"{TOPIC}/event/picture", lambda _: True)
            with Image.open(io.BytesIO(picture)) as drawn:
                assert (drawn.format, drawn.size) == ("JPEG", (64, 48))
            until(listener, TOPIC, lambda later: later["counts"] and later["frame"] > result["frame"])
            server.picture = jpeg("black")
            left = until(listener, f"{TOPIC}/event", lambda event: event["event"] == "left")
            assert (left["track"], left["label"]) == (1, label)
            assert left["dwell_s"] > 0
            assert until(listener, TOPIC, lambda result: not result["counts"])["alarms"]["busy"]["on"] is False
            assert client.stats()["metrics"]["counters"]["mqtt_events"] >= 4


@needs_mosquitto
def test_home_assistant_is_told_of_counts_and_sensors_of_labels_that_were_seen(models, broker, tmp_path):
    rule = PublishRule("finder", source="camera", camera="door", fps=50.0, track=True, zone=(ZONE,))
    mqtt = MqttSettings(url=f"{broker.url}/dev1", reconnect_min_s=0.05, home_assistant="homeassistant")
    with MjpegCamera(jpeg("white")) as server:
        cameras = [CameraSettings("door", server.url)]
        with serving(models, broker, tmp_path, cameras, [rule], mqtt=mqtt) as (_, _, listener):
            listener.subscribe("homeassistant/#", 1)
            found = {}
            while not any("in_middle" in key for key in found):
                message = listener.next()
                if message.topic.startswith("homeassistant/"):
                    found = json.loads(message.payload)["components"]
            (sensor,) = [component for key, component in found.items() if "in_middle" in key]
            assert (sensor["platform"], sensor["device_class"], sensor["state_topic"]) == (
                "binary_sensor", "occupancy", TOPIC,
            )  # fmt: skip
