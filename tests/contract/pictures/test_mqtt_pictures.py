"""Pictures over MQTT as a camera sends them, and what is published of them: a real daemon, a real broker."""

from __future__ import annotations

import base64
import io
import json
import shutil
import struct
import subprocess
import sys
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_runtime.config.settings import LimitSettings
from edge_runtime.doors.mqtt.settings import MqttSettings
from edge_runtime.doors.zmq.client import Client
from edge_runtime.site.settings import PublishRule
from tests.contract.pictures.test_pictures import COLOURS, picture
from tests.contract.running_daemon import online_daemon, put_model
from tests.fakes.broker import needs_mosquitto
from tests.fakes.mqtt_peer import Peer
from tests.models import onnx_models

pytestmark = needs_mosquitto

TOPIC = "edge/dev1/infer/colours"
PETS = '[input.image]\nrange = "0..1"\n[output.boxes]\nlayout = "yolov8"\nlabels = "labels.txt"\n'
HOW_READ = {"width": 64, "height": 48, "fit": "stretch", "color": "rgb"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "colours", onnx_models.colours, toml=COLOURS)
    (models / "colours" / "labels.txt").write_text("red\ngreen\nblue\n")
    put_model(models, "undeclared", onnx_models.colours)
    return models


@contextmanager
def serving(models, broker, folder, *rules, device="dev2", home_assistant=None, **settings):
    """A daemon that is online."""
    mqtt = MqttSettings(url=f"{broker.url}/{device}", reconnect_min_s=0.05, home_assistant=home_assistant)
    with online_daemon(models, folder, mqtt.url, mqtt=mqtt, publish=rules, **settings) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def daemon(models, broker, tmp_path_factory):
    with serving(models, broker, tmp_path_factory.mktemp("run"), device="dev1") as daemon:
        yield daemon


@pytest.fixture
def peer(daemon, broker):
    with Peer(broker.url) as peer:
        yield peer


def asked(peer, payload, topic=TOPIC, **options):
    return json.loads(peer.ask(topic, payload, **options).payload)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP"])
@pytest.mark.parametrize("names_type", [True, False])
def test_a_picture_as_payload_is_answered_in_json(peer, kind, names_type):
    options = {"content_type": f"image/{kind.lower()}"} if names_type else {}
    reply = peer.ask(TOPIC, picture("red", kind=kind), **options)
    assert reply.properties.ContentType == "application/json"
    said = json.loads(reply.payload)
    assert (said["model_name"], said["model_version"], said["picture"]) == ("colours", "1", HOW_READ)
    assert said["classes"][0]["label"] == "red"
    assert said["classes"][0]["score"] == pytest.approx(1.0, abs=0.02)
    assert "outputs" not in said


@pytest.mark.parametrize("head", [b"\0\0\0\x18ftypheic\0\0\0\0", b"II*\0", b"%PDF-1.7", b"\xff\x0a"])
def test_a_picture_of_another_kind_is_refused_in_json_with_the_kinds_that_are_read(peer, head):
    reply = peer.ask(TOPIC, head + bytes(60))
    assert reply.properties.ContentType == "application/json"
    error = json.loads(reply.payload)["error"]
    assert error["code"] == "decode_failed"
    assert "are not read; wanted JPEG, PNG, WEBP, BMP, GIF" in error["message"]


@pytest.mark.parametrize("payload", [b"hello", b"\x00\x01\x02", b"[1, 2]", b"\xff\xfe"])
def test_a_payload_of_an_unknown_kind_is_refused_in_json(peer, payload):
    reply = peer.ask(TOPIC, payload)
    assert reply.properties.ContentType == "application/json"
    error = json.loads(reply.payload)["error"]
    assert error["code"] == "decode_failed"
    assert "wanted JSON, a msgpack array, or a picture" in error["message"]


@pytest.mark.parametrize("kind", [None, "text/plain", "\u00e9"])
def test_a_message_without_a_byte_is_refused_whatever_its_type_says(peer, kind):
    error = asked(peer, b"", content_type=kind)["error"]
    assert error["code"] == "decode_failed"
    assert "the message is empty" in error["message"]


def test_pictures_in_json_are_answered_as_those_by_any_door(peer):
    texts = [base64.b64encode(picture(colour)).decode() for colour in ("blue", "lime")]
    one = asked(peer, json.dumps({"picture": texts[0], "id": "a"}))
    assert (one["id"], one["classes"][0]["label"], one["picture"]) == ("a", "blue", HOW_READ)
    several = asked(peer, json.dumps({"pictures": texts}))
    assert [each["classes"][0]["label"] for each in several["answers"]] == ["blue", "green"]


def test_the_version_in_the_topic_and_parameters_in_user_properties_count(peer):
    assert asked(peer, picture("red"), f"{TOPIC}/1")["model_version"] == "1"
    assert asked(peer, picture("red"), f"{TOPIC}/2")["error"]["code"] == "model_not_found"
    bare = asked(peer, picture("red"), user_properties=[("raw", "true"), ("priority", "1")])
    assert [each["shape"] for each in bare["outputs"]] == [[1, 3]]
    late = asked(peer, picture("red"), user_properties=[("timeout_ms", "0")])
    assert late["error"]["code"] == "deadline_unmeetable"
    odd = asked(peer, picture("red"), user_properties=[("raw", "maybe")])
    assert odd["error"]["code"] == "decode_failed"
    assert "raw" in odd["error"]["message"]


def test_raw_counts_for_tensors_too(peer):
    item = {"name": "image", "shape": [1, 3, 8, 8], "datatype": "FP32", "data": [1.0] * 64 + [0.0] * 128}
    request = json.dumps({"inputs": [item]})
    assert asked(peer, request)["outputs"][0]["shape"] == [1, 3]
    assert asked(peer, request, user_properties=[("raw", "false")])["outputs"][0]["shape"] == [1, 2, 2]


def test_a_model_that_declares_no_steps_refuses_a_picture_and_says_what_to_write(peer):
    error = asked(peer, picture("red"), "edge/dev1/infer/undeclared")["error"]
    assert error["code"] == "tensor_mismatch"
    assert "[input.image]" in error["message"]


def bomb():
    """A PNG whose head promises 40 000 x 40 000 pixels, in a few bytes."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("payload", "options"),
    [
        (picture("red")[:60], {}),
        (bomb(), {}),
        (b"\xff\xd8\xff" + bytes(500), {}),
        (b"", {"content_type": "image/jpeg"}),
        (b'{"inputs": []}', {"content_type": "image/png"}),
        (b"GIF89a" + bytes(20), {"content_type": "image/gif"}),
    ],
    ids=["cut", "bomb", "zeros", "nothing", "json", "gif"],
)
def test_a_payload_that_is_not_a_picture_fails_alone_and_those_beside_it_are_answered(peer, payload, options):
    peer.subscribe("reply/beside", 1)
    peer.publish(TOPIC, picture("blue"), response_topic="reply/beside")
    error = asked(peer, payload, **options)["error"]
    assert error["code"] == "decode_failed"
    assert error["message"]
    assert json.loads(peer.next().payload)["classes"][0]["label"] == "blue"


def restarts(client):
    """How often each model's host was started again: of a busy model it may be another process, which is none."""
    found = {each["name"]: each["host"] for each in client.stats()["models"]}
    return {name: host and host["restarts"] for name, host in found.items()}


def test_changed_pictures_get_one_answer_each_and_the_host_lives_on(daemon, peer):
    rng = np.random.default_rng(14)
    whole = np.frombuffer(picture("red", kind="JPEG"), np.uint8)
    with Client(daemon.endpoints[1]) as client:
        before = restarts(client)
        peer.subscribe("reply/changed", 1)
        for _ in range(200):
            changed = whole.copy()
            changed[rng.integers(3, len(whole), 4)] = rng.integers(0, 256, 4)
            peer.publish(TOPIC, changed.tobytes(), 1, response_topic="reply/changed", correlation=rng.bytes(8))
        said = [json.loads(peer.next().payload) for _ in range(200)]
        after = restarts(client)
    assert {each["error"]["code"] if "error" in each else "answered" for each in said} <= {"answered", "decode_failed"}
    assert sum("error" not in each for each in said) > 20
    assert peer.is_silent(0.2)
    assert before == after
    assert before["colours"] is not None


def test_a_picture_that_the_broker_delivers_twice_is_answered_once(peer):
    peer.subscribe("reply/twice", 1)
    for _ in range(2):
        peer.publish(TOPIC, picture("red"), 1, response_topic="reply/twice", correlation=b"once")
    peer.publish(TOPIC, picture("lime"), 1, response_topic="reply/twice", correlation=b"last")
    labels = [json.loads(peer.next().payload)["classes"][0]["label"] for _ in range(2)]
    assert sorted(labels) == ["green", "red"]
    assert peer.is_silent(0.3)


def test_a_picture_counts_by_its_bytes_against_what_may_wait(models, broker, tmp_path):
    noise = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 200, 3), np.uint8)).save(noise, "PNG")
    assert len(noise.getvalue()) > 100_000
    limits = LimitSettings(total_unanswered_bytes=100_000)
    with Peer(broker.url) as peer, serving(models, broker, tmp_path / "run", device="dev6", limits=limits):
        topic = "edge/dev6/infer/colours"
        error = asked(peer, noise.getvalue(), topic)["error"]
        assert (error["code"], error["retryable"]) == ("queue_full", True)
        assert asked(peer, picture("red"), topic)["classes"][0]["label"] == "red"


def test_a_retained_picture_is_not_a_request(broker, models, tmp_path):
    with Peer(broker.url) as peer:
        topic = "edge/dev2/infer/colours"
        peer.subscribe("reply/kept", 1)
        peer.publish(topic, picture("red"), 1, retain=True, response_topic="reply/kept")
        try:
            with serving(models, broker, tmp_path / "run") as daemon, Client(daemon.endpoints[1]) as client:
                while not client.stats()["metrics"]["counters"].get("mqtt_retained_ignored"):
                    pass
                assert peer.is_silent(0.1)
        finally:
            peer.publish(topic, b"", 1, retain=True)


def test_a_camera_that_can_name_no_topic_is_answered_on_the_devices_own(daemon, broker):
    with Peer(broker.url, protocol=4) as camera:
        camera.subscribe("edge/dev1/reply/#")
        camera.publish(TOPIC, picture("red", kind="JPEG"))
        message = camera.next()
    assert message.topic == "edge/dev1/reply/colours"
    assert json.loads(message.payload)["classes"][0]["label"] == "red"


def file_of(folder, colour):
    path = folder / "photo.jpg"
    path.write_bytes(picture(colour, kind="JPEG"))
    return str(path)


def test_mosquitto_rr_sends_a_file_and_prints_the_answer(daemon, broker, tmp_path):
    port = broker.url.rpartition(":")[2]
    command = ["mosquitto_rr", "-p", port, "-V", "5", "-t", TOPIC, "-e", "reply/me", "-W", "20"]
    if shutil.which("mosquitto_rr") is None:
        pytest.skip("mosquitto_rr is not installed (apt-get install mosquitto-clients)")
    done = subprocess.run([*command, "-f", file_of(tmp_path, "blue")], capture_output=True, check=True, timeout=60)
    said = json.loads(done.stdout)
    if "mosquitto_rr" in said.get("error", {}).get("message", ""):
        pytest.skip(f"this mosquitto_rr sends nothing of a file: {said['error']['message']}")
    assert said["classes"][0]["label"] == "blue"


def test_mosquitto_pub_sends_a_file_and_the_answer_goes_where_it_says(peer, broker, tmp_path):
    if shutil.which("mosquitto_pub") is None:
        pytest.skip("mosquitto_pub is not installed (apt-get install mosquitto-clients)")
    port = broker.url.rpartition(":")[2]
    peer.subscribe("reply/shell", 1)
    where = ["-D", "publish", "response-topic", "reply/shell"]
    path = file_of(tmp_path, "blue")
    subprocess.run(["mosquitto_pub", "-p", port, "-V", "5", "-t", TOPIC, "-f", path, *where], check=True, timeout=60)
    assert json.loads(peer.next().payload)["classes"][0]["label"] == "blue"


def test_an_empty_message_is_refused_in_words(peer):
    error = asked(peer, b"")["error"]
    assert error["code"] == "decode_failed"
    assert "empty" in error["message"]


# ---- what is published ----------------------------------------------------------------------------------------------


def test_answers_are_published_in_words(models, broker, tmp_path):
    with (
        Peer(broker.url) as listener,
        serving(models, broker, tmp_path / "run", PublishRule("colours", outputs=("scores",))) as daemon,
        Client(daemon.endpoints[1]) as client,
    ):
        listener.subscribe("edge/dev2/result/#", 1)
        array = np.empty(1, object)
        for colour in ("red", "red", "lime"):
            array[0] = picture(colour)
            client.infer("colours", {"image": array})
        first, second = (json.loads(listener.next().payload) for _ in range(2))
        assert listener.is_silent(0.3), "the same answer is published once"
    assert [each["classes"][0]["label"] for each in (first, second)] == ["red", "green"]
    assert (first["model_name"], first["model_version"], first["picture"]) == ("colours", "1", HOW_READ)
    assert first["time"]
    assert "outputs" not in first


def test_a_camera_by_mqtt_is_shown_in_home_assistant_with_its_label_count_and_picture(models, broker, tmp_path):
    put_model(models, "pets", onnx_models.detector, toml=PETS)
    (models / "pets" / "labels.txt").write_text("cat\ndog\n")
    rules = (PublishRule("pets", source="mqtt", picture=True), PublishRule("pets", topic="site/zmq"))
    with (
        Peer(broker.url) as assistant,
        serving(models, broker, tmp_path / "run", *rules, device="dev5", home_assistant="ha5"),
        Peer(broker.url, protocol=4) as camera,
    ):
        assistant.subscribe("ha5/device/dev5/config", 1)
        found = {}
        while "pets picture" not in found:
            parts = json.loads(assistant.next().payload)["components"].values()
            found = {each["name"]: each for each in parts if each.get("state_topic", "").endswith("result/pets")}
            found |= {each["name"]: each for each in parts if each["platform"] == "image"}
        assert found.keys() == {"pets label", "pets score", "pets count", "pets picture"}
        assistant.subscribe(found["pets label"]["state_topic"], 1)
        assistant.subscribe(found["pets picture"]["image_topic"], 1)
        assistant.subscribe("site/zmq", 1)
        camera.publish("edge/dev5/infer/pets", picture("white", (320, 240), "JPEG"))
        said = json.loads(assistant.next().payload)
        assert [each["label"] for each in said["boxes"]] == ["cat", "dog"]
        left, top, *_ = said["boxes"][0]["box"]
        # What describes the device may come meanwhile, and the result again behind it.
        while (message := assistant.next()).topic != found["pets picture"]["image_topic"]:
            assert message.topic == found["pets label"]["state_topic"]
        drawn = read_drawn(message)
        red, green, blue = drawn.getpixel((round(left), round(top) + 60))
        assert min(red, green, blue) < 200, "the box's left side is drawn on white"
        while not assistant.is_silent(0.3):  # the last result is said again behind what describes the device
            assert assistant.next().topic != "site/zmq", "the other rule hears ZeroMQ's clients only"
        assistant.publish(found["pets picture"]["image_topic"], b"", 1, retain=True)


def read_drawn(message):
    assert message.properties.ContentType == "image/jpeg"
    drawn = Image.open(io.BytesIO(message.payload))
    assert drawn.format == "JPEG"
    return drawn.convert("RGB")


@contextmanager
def pictures_of(broker, device):
    """A listener on the drawn pictures of a device."""
    with Peer(broker.url) as peer:
        peer.subscribe(f"edge/{device}/result/+/picture", 1)
        yield peer


RED = (254, 0, 0)
FAR_FROM_TEXT = (310, 230)


def test_the_picture_of_the_last_result_is_published_with_its_answer_drawn(models, broker, tmp_path):
    rule = PublishRule("colours", picture=True)
    with (
        pictures_of(broker, "dev3") as listener,
        serving(models, broker, tmp_path / "run", rule, device="dev3") as daemon,
        Client(daemon.endpoints[1]) as client,
    ):
        array = np.empty(1, object)
        array[0] = picture("red", (320, 240), "JPEG")
        client.infer("colours", {"image": array})
        drawn = read_drawn(listener.next())
        assert drawn.size == (320, 240)
        assert drawn.getpixel(FAR_FROM_TEXT) == pytest.approx(RED, abs=6)
        assert len(drawn.getcolors(1 << 20)) > 50, "the label is drawn above the plain colour"
        with pictures_of(broker, "dev3") as late:
            assert late.next().retain, "Home Assistant shows it after its own start"
        frame = np.zeros((1, 240, 320, 3), np.uint8)
        frame[..., 2] = 255
        client.infer("colours", {"image": frame})
        assert read_drawn(listener.next()).getpixel(FAR_FROM_TEXT) == pytest.approx((0, 0, 254), abs=6)
        listener.publish("edge/dev3/result/colours/picture", b"", 1, retain=True)


def test_the_daemon_itself_decodes_and_draws_no_picture(models, broker, tmp_path):
    config = tmp_path / "config.toml"
    endpoint = f"ipc://{tmp_path}/infer.sock"
    config.write_text(f"""
models = "{models}"
state = "{tmp_path}/state"
zmq.endpoints = ["{endpoint}"]
mqtt.url = "{broker.url}/dev4"
[[publish]]
model = "colours"
picture = true
""")
    command = [sys.executable, "-m", "edge_runtime", "serve", "--config", str(config)]
    with pictures_of(broker, "dev4") as listener, Peer(broker.url) as watcher:
        daemon = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            watcher.subscribe("edge/dev4/status", 1)
            while watcher.next().payload != b"online":
                pass
            with Client(endpoint) as client:
                array = np.empty(1, object)
                array[0] = picture("red", (320, 240), "JPEG")
                client.infer("colours", {"image": array})
            read_drawn(listener.next())
            assert "/PIL/" not in Path(f"/proc/{daemon.pid}/maps").read_text()
        finally:
            daemon.terminate()
            daemon.wait(60)
            listener.publish("edge/dev4/result/colours/picture", b"", 1, retain=True)
