"""`[[camera]]`: cameras with names, several models at one of them, and all that changes while the daemon serves."""

from __future__ import annotations

import json
import re
import shlex
import struct
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

import av
import numpy as np
import psutil
import pytest

from edge_runtime.cli.main import main
from edge_runtime.config.loading import configured
from edge_runtime.config.settings import MetricsSettings
from edge_runtime.doors.mqtt.settings import MqttSettings
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import ConfigError, DecodeFailed, Unsupported
from edge_runtime.hosts.regions import RegionBounds, Regions
from edge_runtime.site.camera import MAX_SLOTS
from edge_runtime.site.cameras import by_name, place_of
from edge_runtime.site.settings import CameraSettings, PublishRule
from tests.contract.running_daemon import ANSWER_S, put_model, running_daemon
from tests.contract.site.test_camera_source import BLUE, BOXES, COLOURS, GREEN, RED, Watched, colour_of, write_video
from tests.fakes.broker import Broker, needs_mosquitto
from tests.fakes.home_assistant import UNAVAILABLE, HomeAssistant
from tests.fakes.mjpeg_camera import MjpegCamera, jpeg
from tests.fakes.mqtt_peer import Peer
from tests.fakes.rtsp_camera import RtspCamera
from tests.models import onnx_models

ROOT = Path(__file__).parents[3]
LABELS = ("red", "green", "blue")


def quarters(path, codec="libx264", size=(64, 48)):
    """A video whose pictures have a colour a quarter: red, green, blue and black, from the left top clockwise."""
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    high, wide = size[1] // 2, size[0] // 2
    pixels[:high, :wide, RED] = pixels[:high, wide:, GREEN] = pixels[high:, wide:, BLUE] = 255
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for _ in range(10):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
        container.mux(stream.encode())
    return path


def corners(frame):
    """The colour of each quarter's middle, from the left top clockwise; None for black."""
    high, wide = frame.shape[0] // 4, frame.shape[1] // 4
    places = [(high, wide), (high, -wide), (-high, -wide), (-high, wide)]
    return [int(frame[place].argmax()) if frame[place].max() > 100 else None for place in places]


def declare_rotation(path):
    """Have an MP4 say that its pictures are to be shown turned clockwise by 90 degrees, as telephones do."""
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 4 + 40  # ISO/IEC 14496-12, 8.3.2, version 0: the matrix
    data[at : at + 36] = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 48 << 16, 0, 1 << 30)
    path.write_bytes(data)


# ---- one camera -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rotate", "seen"),
    [
        (0, [RED, GREEN, BLUE, None]),
        (90, [None, RED, GREEN, BLUE]),
        (180, [BLUE, None, RED, GREEN]),
        (270, [GREEN, BLUE, None, RED]),
    ],
)
def test_a_camera_is_turned_clockwise_as_its_settings_say(tmp_path, rotate, seen):
    with Watched(quarters(tmp_path / "a.mp4"), rotate=rotate) as watched:
        frame = watched.frame()
        assert frame.shape == ((48, 64, 3) if rotate % 180 == 0 else (64, 48, 3))
        assert corners(frame) == seen
        assert watched.frame("nv12").shape == (frame.shape[0] * 3 // 2, frame.shape[1])


def test_the_rotation_that_a_video_declares_is_honoured_and_the_settings_come_after_it(tmp_path):
    declare_rotation(quarters(tmp_path / "a.mp4"))
    with Watched(tmp_path / "a.mp4") as watched:
        assert corners(watched.frame()) == [None, RED, GREEN, BLUE]
    with Watched(tmp_path / "a.mp4", rotate=270) as watched:
        assert corners(watched.frame()) == [RED, GREEN, BLUE, None]


def test_a_part_is_cropped_after_the_turn(tmp_path):
    quarters(tmp_path / "a.mp4")
    with Watched(tmp_path / "a.mp4", crop=(0.5, 0.0, 1.0, 0.5)) as watched:
        frame = watched.frame()
        assert (frame.shape, colour_of(frame)) == ((24, 32, 3), GREEN)
    with Watched(tmp_path / "a.mp4", rotate=90, crop=(0.5, 0.0, 1.0, 0.5)) as watched:
        frame = watched.frame()
        assert (frame.shape, colour_of(frame)) == ((32, 24, 3), RED)
        assert watched.frame("yuyv").shape == (32, 24, 2)
    with Watched(tmp_path / "a.mp4", crop=(0.0, 0.0, 0.33, 0.33)) as watched:
        assert watched.frame("nv12").shape == (24, 20), "NV12 has even sides"


def test_frames_have_numbers_that_go_on_over_a_loss_and_the_time_at_which_they_came():
    with MjpegCamera(jpeg("red")) as server, Watched(server.url) as watched:
        began_s = time.time()
        shots = [watched.shot() for _ in range(3)]
        watched.child().kill()
        shots += [watched.shot() for _ in range(3)]
        numbers = [each.number for each in shots]
        assert numbers == sorted(set(numbers))
        assert all(began_s - 1 <= each.captured_s <= time.time() for each in shots)


def test_a_frame_that_is_kept_stays_as_it_is_however_many_are_kept(tmp_path):
    """Frames come in memory that the reader writes again; more than there is place for come by its socket."""
    write_video(tmp_path / "a.mkv", "libx264", [RED, GREEN, BLUE] * 10)
    regions = Regions(RegionBounds(1 << 30, 1 << 30, 1 << 30))
    with Watched(tmp_path / "a.mkv", regions=regions) as watched:
        kept = [watched.shot() for _ in range(MAX_SLOTS + 5)]
        first = kept[0].number
        file_frames = [(each.number - 1) % 30 % 3 for each in kept]
        assert [colour_of(each.pixels) for each in kept] == file_frames
        assert regions.snapshot()["regions"] == MAX_SLOTS
        del kept
        later = [watched.shot() for _ in range(MAX_SLOTS + 5)]
        assert later[0].number > first
        assert [colour_of(each.pixels) for each in later] == [(each.number - 1) % 30 % 3 for each in later]
        assert regions.snapshot()["regions"] == MAX_SLOTS
    del watched, later
    regions.drain()
    assert regions.are_none


def test_models_that_take_different_forms_see_the_same_pictures_of_one_reader(tmp_path):
    write_video(tmp_path / "a.mkv", "libx264", [RED, BLUE] * 20, rate=2)
    with Watched(tmp_path / "a.mkv") as watched:
        other = watched.camera.look(lambda: None)
        seen = []
        for _ in range(5):
            other.ask("gray")
            seen.append(watched.shot().number)
            assert other.take() is not None or watched.shot().number
        assert np.diff(seen).max() <= 2, "one form costs the other no picture"
        readers = [each for each in psutil.Process().children() if "read_camera" in " ".join(each.cmdline())]
        assert len(readers) == 1


def test_a_camera_may_send_another_size_with_each_picture():
    regions = Regions(RegionBounds(1 << 30, 1 << 30, 1 << 30))
    with MjpegCamera(jpeg("red")) as server, Watched(server.url, regions=regions) as watched:
        for size in [(64, 48), (640, 480), (32, 24), (1280, 960), (50, 38), (64, 48)]:
            server.picture = jpeg("red", size)
            end_s = time.monotonic() + ANSWER_S
            while (frame := watched.frame()).shape != (size[1], size[0], 3):
                assert time.monotonic() < end_s
            assert colour_of(frame) == RED
        assert watched.camera.losses == 0
        assert regions.snapshot()["regions"] <= MAX_SLOTS


def test_a_camera_that_stalls_within_a_picture_is_lost_and_comes_back():
    with MjpegCamera(jpeg("red")) as server, Watched(server.url, silence_s=0.5) as watched:
        watched.frame()
        whole = server.picture
        server.picture = whole[: len(whole) // 2]
        server.is_silent = True
        assert watched.wait_reason()
        server.picture, server.is_silent = jpeg("blue"), False
        while colour_of(watched.frame()) != BLUE:
            pass


def test_two_hundred_cameras_are_named_and_each_has_a_place_of_its_own():
    cameras = by_name([CameraSettings(f"camera{number}", f"rtsp://10.0.0.{number}/s") for number in range(200)])
    places = {place_of(PublishRule("m", source="camera", camera=name), cameras) for name in cameras}
    assert len(places) == 200


@needs_mosquitto
def test_eight_cameras_that_come_and_go_are_all_seen_again(models, broker, tmp_path):
    with ExitStack() as stack:
        servers = {f"camera{number}": stack.enter_context(MjpegCamera(jpeg("red"))) for number in range(8)}
        cameras = [camera(name, server) for name, server in servers.items()]
        rules = [rule("colours", name) for name in servers]
        stack.enter_context(serving(models, broker, tmp_path, cameras, rules))
        fleet = stack.enter_context(Fleet(broker.url))
        fleet.wait_cameras(**dict.fromkeys(servers, "online"))
        for server in servers.values():
            server.is_there = False
        fleet.wait_cameras(**dict.fromkeys(servers, "lost"))
        for server in servers.values():
            server.is_there = True
        fleet.wait_cameras(**dict.fromkeys(servers, "online"))


def test_a_reason_is_in_our_words(tmp_path):
    with Watched(tmp_path / "nothing.mp4") as watched:
        assert watched.wait_reason() == "there is no such file or device"
    with MjpegCamera(jpeg("red")) as server:
        url = server.url
    with Watched(url) as watched:
        assert watched.wait_reason().startswith("its address refuses connections")
    with MjpegCamera(jpeg("red")) as server, Watched(server.url) as watched:
        server.is_there = False
        assert watched.wait_reason("5xx") == "it answers that it fails (5xx)"


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "front door"}, {"name": ""}, {"name": "a/b"}, {"name": "x" * 65}, {"name": "-a"}, {"name": "a+"},
        {"crop": (0.5, 0.0, 0.5, 1.0)}, {"crop": (0.0, 0.9, 1.0, 0.1)},
    ],
)  # fmt: skip
def test_a_camera_that_cannot_be_is_refused(fields):
    with pytest.raises(ValueError, match=r"name|crop"):
        CameraSettings(**{"name": "door", "url": "/dev/video0", **fields})


# ---- a daemon with named cameras ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    for name in ("colours", "again"):
        put_model(models, name, onnx_models.colours, toml=COLOURS)
        (models / name / "labels.txt").write_text("\n".join(LABELS))
    put_model(models, "finder", onnx_models.finder, toml=BOXES)
    return models


@pytest.fixture
def broker(tmp_path):
    """One of its own: what is retained is looked at."""
    with Broker(tmp_path / "broker") as broker:
        yield broker


@contextmanager
def serving(models, broker, folder, cameras, rules, **settings):
    """A daemon with these cameras and rules, a control client of it, and a listener on what it publishes."""
    mqtt = settings.pop("mqtt", None) or MqttSettings(
        url=f"{broker.url}/dev1", reconnect_min_s=0.05, state_interval_s=0.3
    )
    with Peer(broker.url) as listener:
        listener.subscribe("edge/dev1/result/#", 1)
        options = {"mqtt": mqtt, "publish": tuple(rules), "camera": tuple(cameras), **settings}
        with (
            running_daemon(models, folder / "run", **options) as daemon,
            Client(daemon.endpoints[1]) as client,
        ):
            yield daemon, client, listener


def reload(daemon, models, cameras, rules, **settings):
    """As SIGHUP does, with other tables in the file."""
    config = daemon._config
    daemon.reload(
        configured(
            models=str(models),
            state=config.state,
            zmq=config.zmq,
            start_limit_s=config.start_limit_s,
            **({"mqtt": config.mqtt} if hasattr(config, "mqtt") else {}),
            publish=tuple(rules),
            camera=tuple(cameras),
            **settings,
        )
    )


def next_result(listener, topic):
    """The next message on a topic; a result as JSON."""
    while (message := listener.next()).topic != topic or not message.payload:
        pass
    return json.loads(message.payload)


class Fleet(Peer):
    """Who watches the device's retained state."""

    def __enter__(self):
        super().__enter__()
        self.subscribe("edge/dev1/state", 1)
        return self

    def wait_cameras(self, **states):
        """Until the device's state has these cameras and no others; that state."""
        while True:
            state = json.loads(self.next().payload)
            if {name: each["state"] for name, each in state["cameras"].items()} == states:
                return state


def best(said):
    return said["classes"][0]["label"]


def camera(name, server, **fields):
    return CameraSettings(name, getattr(server, "url", str(server)), fps=50.0, **fields)


def rule(model, at, **fields):
    return PublishRule(model, source="camera", camera=at, **fields)


@needs_mosquitto
def test_two_cameras_of_one_model_have_topics_and_results_with_their_names(models, broker, tmp_path):
    with MjpegCamera(jpeg("red")) as front, MjpegCamera(jpeg("blue")) as back:
        cameras = [camera("front", front), camera("back", back)]
        rules = [rule("colours", "front"), rule("colours", "back", name="yard")]
        with serving(models, broker, tmp_path, cameras, rules) as (_, client, listener):
            said = {}
            while len(said) < 2:
                message = listener.next()
                said[message.topic] = json.loads(message.payload)
            front_said, back_said = said["edge/dev1/result/colours/front"], said["edge/dev1/result/colours/yard"]
            assert (front_said["camera"], best(front_said), "name" in front_said) == ("front", "red", False)
            assert (back_said["camera"], best(back_said), back_said["name"]) == ("back", "blue", "yard")
            assert front_said["frame"] >= 1
            captured, told = (datetime.fromisoformat(front_said[key]) for key in ("captured", "time"))
            assert captured <= told
            entries = client.cameras()
            assert [(each["camera"], each["state"]) for each in entries] == [("front", "online"), ("back", "online")]
            assert "secret-word" not in json.dumps(entries)


@needs_mosquitto
def test_several_models_look_at_one_camera_which_is_read_once(models, broker, tmp_path):
    with MjpegCamera(jpeg("red")) as server:
        rules = [rule("colours", "door"), rule("again", "door"), rule("finder", "door")]
        with serving(models, broker, tmp_path, [camera("door", server)], rules) as (_, _, listener):
            wanted = {f"edge/dev1/result/{model}/door" for model in ("colours", "again", "finder")}
            while wanted:
                wanted.discard(listener.next().topic)
            readers = [each for each in psutil.Process().children() if "read_camera" in " ".join(each.cmdline())]
            assert len(readers) == 1


@needs_mosquitto
def test_every_publishes_each_frame_as_it_is(models, broker, tmp_path):
    with MjpegCamera(jpeg("red")) as server:
        rules = [rule("colours", "door", on="every")]
        with serving(models, broker, tmp_path, [camera("door", server)], rules) as (_, _, listener):
            said = [next_result(listener, "edge/dev1/result/colours/door") for _ in range(10)]
            numbers = [each["frame"] for each in said]
            assert numbers == sorted(set(numbers))
            assert {best(each) for each in said} == {"red"}


@needs_mosquitto
def test_a_lost_camera_is_a_state_a_metric_and_a_reason_for_health(models, broker, tmp_path):
    write_video(tmp_path / "a.mp4", "libx264", [RED] * 5)
    with RtspCamera(BLUE) as server:
        cameras = [camera("door", tmp_path / "a.mp4"), camera("yard", server)]
        rules = [rule("colours", "door"), rule("colours", "yard")]
        options = {"metrics": MetricsSettings(port=0)}
        with (
            serving(models, broker, tmp_path, cameras, rules, **options) as (daemon, client, _),
            Fleet(broker.url) as fleet,
        ):
            fleet.wait_cameras(door="online", yard="online")
            (tmp_path / "a.mp4").rename(tmp_path / "b.mp4")
            state = fleet.wait_cameras(door="lost", yard="online")
            assert state["health"] == "degraded"
            assert state["reasons"] == ["camera door: there is no such file or device"]
            with Fleet(broker.url) as later:
                assert later.next().retain
            entries = {each["camera"]: each for each in client.cameras()}
            assert entries["door"]["state"] == "lost"
            assert entries["door"]["reason"] == "there is no such file or device"
            with urllib.request.urlopen(daemon.metrics_url) as answer:
                text = answer.read().decode()
            assert 'edge_runtime_camera_online{camera="door"} 0.0' in text
            assert 'edge_runtime_camera_online{camera="yard"} 1.0' in text
            (tmp_path / "b.mp4").rename(tmp_path / "a.mp4")
            state = fleet.wait_cameras(door="online", yard="online")
            assert (state["health"], state["reasons"]) == ("ok", [])


@needs_mosquitto
def test_a_camera_whose_server_stops_is_lost_and_comes_back(models, broker, tmp_path):
    with (
        MjpegCamera(jpeg("red")) as server,
        serving(models, broker, tmp_path, [camera("door", server)], [rule("colours", "door")]) as (_, _, listener),
        Fleet(broker.url) as fleet,
    ):
        fleet.wait_cameras(door="online")
        server.is_there = False
        fleet.wait_cameras(door="lost")
        server.picture, server.is_there = jpeg("blue"), True
        fleet.wait_cameras(door="online")
        while best(next_result(listener, "edge/dev1/result/colours/door")) != "blue":
            pass


@needs_mosquitto
def test_cameras_are_added_changed_and_removed_by_a_reload_and_the_others_go_on(models, broker, tmp_path):
    with MjpegCamera(jpeg("red")) as first, MjpegCamera(jpeg("blue")) as second:
        one, rules = camera("one", first), [rule("colours", "one")]
        with (
            serving(models, broker, tmp_path, [one], rules) as (daemon, client, listener),
            Fleet(broker.url) as fleet,
        ):
            assert best(next_result(listener, "edge/dev1/result/colours/one")) == "red"
            (reader,) = [each for each in psutil.Process().children() if "read_camera" in " ".join(each.cmdline())]

            reload(daemon, models, [one, camera("two", second)], [*rules, rule("colours", "two")])
            assert best(next_result(listener, "edge/dev1/result/colours/two")) == "blue"
            assert reader.is_running(), "what did not change goes on"

            reload(daemon, models, [one, camera("two", first)], [*rules, rule("colours", "two")])
            assert best(next_result(listener, "edge/dev1/result/colours/two")) == "red"

            reload(daemon, models, [one], rules)
            fleet.wait_cameras(one="online")
            assert [each["camera"] for each in client.cameras()] == ["one"]
            assert reader.is_running()

            reload(daemon, models, [], [PublishRule("colours")])
            fleet.wait_cameras()
            end_s = time.monotonic() + ANSWER_S
            while reader.is_running():
                assert time.monotonic() < end_s
            client.infer("colours", {"image": np.zeros((1, 3, 8, 8), np.float32)})
            next_result(listener, "edge/dev1/result/colours")


@needs_mosquitto
def test_a_reload_that_cannot_be_leaves_cameras_as_they_are(models, broker, tmp_path, caplog):
    with MjpegCamera(jpeg("red")) as server:
        cameras, rules = [camera("door", server)], [rule("colours", "door", on="every")]
        with serving(models, broker, tmp_path, cameras, rules) as (daemon, client, listener):
            next_result(listener, "edge/dev1/result/colours/door")
            reload(daemon, models, cameras, [*rules, rule("colours", "dor")])
            assert "cameras and results are as before" in caplog.text
            assert "wanted the name of a [[camera]] (door)" in str(
                [getattr(each, "reason", "") for each in caplog.records]
            )
            assert [each["camera"] for each in client.cameras()] == ["door"]
            next_result(listener, "edge/dev1/result/colours/door")


@needs_mosquitto
def test_an_operation_adds_changes_and_removes_a_camera(models, broker, tmp_path):
    with (
        MjpegCamera(jpeg("red")) as first,
        MjpegCamera(jpeg("blue")) as second,
        serving(models, broker, tmp_path, [], [PublishRule("again")]) as (_, client, listener),
    ):
        assert client.cameras() == []
        (entry,) = client.camera_add("door", first.url)
        assert (entry["camera"], entry["state"]) == ("door", "unused")
        client.camera_add("door", first.url, "colours")
        assert best(next_result(listener, "edge/dev1/result/colours/door")) == "red"
        client.camera_add("door", second.url)
        assert best(next_result(listener, "edge/dev1/result/colours/door")) == "blue"
        with pytest.raises(DecodeFailed, match=r"camera\.url"):
            client.camera_add("door", "ftp://x")
        with pytest.raises(DecodeFailed, match="wanted letters"):
            client.camera_add("a door", second.url)
        assert client.camera_remove("door") == []
        with pytest.raises(DecodeFailed, match="there is no camera 'door'"):
            client.camera_remove("door")


@needs_mosquitto
def test_the_commands_of_the_page_do_what_it_says(models, broker, tmp_path, capsys):
    """docs/cameras.md, with a camera of our own in the place of its address, and a model that is there."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs/cameras.md").read_text(), re.DOTALL | re.MULTILINE)
    with MjpegCamera(jpeg("red")) as server, serving(models, broker, tmp_path, [], [PublishRule("again")]) as served:
        _, client, listener = served
        said = []
        for line in "".join(blocks).splitlines():
            words = shlex.split(line.replace("rtsp://192.168.1.21/live", server.url).replace("people", "colours"), True)
            assert main([*words[1:], "--connect", client.endpoint]) == 0
            said.append(capsys.readouterr().out)
            if "add" in words:
                assert best(next_result(listener, "edge/dev1/result/colours/yard")) == "red"
        assert ["yard" in each for each in said] == [False, True, False]
        assert "colours" in said[1]


@needs_mosquitto
def test_two_cameras_that_would_share_a_topic_are_refused(models, broker, tmp_path):
    mqtt = MqttSettings(url=f"{broker.url}/dev1")
    cameras = [CameraSettings("one", "/dev/video0"), CameraSettings("two", "/dev/video1")]
    pairs = [
        [rule("colours", "/dev/video0"), rule("colours", "/dev/video1")],
        [rule("colours", "one", topic="site/x"), rule("again", "two", topic="site/x")],
        [rule("colours", "/dev/video0"), PublishRule("colours")],
        [rule("colours", "one"), rule("again", "nobody")],
        [rule("colours", "one", name="a"), rule("again", "two", name="a")],
    ]
    for rules in pairs:
        with (
            pytest.raises(ConfigError, match=r"two rules|name of a \[\[camera"),
            running_daemon(models, tmp_path / "run", mqtt=mqtt, publish=tuple(rules), camera=tuple(cameras)),
        ):
            pass


def test_a_daemon_without_rules_says_what_to_add(models, tmp_path):
    with (
        running_daemon(models, tmp_path / "run") as daemon,
        Client(daemon.endpoints[1]) as client,
        pytest.raises(Unsupported, match="'publish' is in the daemon's configuration"),
    ):
        client.cameras()


@needs_mosquitto
def test_the_first_camera_of_a_daemon_is_taken_by_a_reload(models, broker, tmp_path, caplog):
    mqtt = MqttSettings(url=f"{broker.url}/dev1", reconnect_min_s=0.05, state_interval_s=0.3)
    with MjpegCamera(jpeg("red")) as server, Peer(broker.url) as listener, Fleet(broker.url) as fleet:
        listener.subscribe("edge/dev1/result/#", 1)
        with running_daemon(models, tmp_path / "run", mqtt=mqtt) as daemon, Client(daemon.endpoints[1]) as client:
            reload(daemon, models, [], [rule("colours", "nobody")])
            assert "'nobody'; wanted the name of a [[camera]]" in str([vars(each) for each in caplog.records])
            assert "publish" not in daemon.doors
            reload(daemon, models, [camera("door", server)], [rule("colours", "door")])
            assert best(next_result(listener, "edge/dev1/result/colours/door")) == "red"
            fleet.wait_cameras(door="online")
            assert [each["camera"] for each in client.cameras()] == ["door"]
            told = [each.settings for each in caplog.records if "need a restart" in each.message]
            assert not {"camera", "publish"} & {name for each in told for name in each.split(", ")}


@needs_mosquitto
def test_the_first_camera_of_a_daemon_is_added_by_an_operation(models, broker, tmp_path):
    mqtt = MqttSettings(url=f"{broker.url}/dev1", reconnect_min_s=0.05)
    with MjpegCamera(jpeg("red")) as server, Peer(broker.url) as listener:
        listener.subscribe("edge/dev1/result/#", 1)
        with running_daemon(models, tmp_path / "run", mqtt=mqtt) as daemon, Client(daemon.endpoints[1]) as client:
            with pytest.raises(DecodeFailed, match=r"camera\.url"):
                client.camera_add("door", "ftp://x")
            client.camera_add("door", server.url, "colours")
            assert best(next_result(listener, "edge/dev1/result/colours/door")) == "red"


def test_a_camera_that_is_added_without_a_broker_is_refused_with_what_to_add(models, tmp_path, caplog):
    with running_daemon(models, tmp_path / "run") as daemon, Client(daemon.endpoints[1]) as client:
        with pytest.raises(Unsupported, match=r"camera_add: .* add \[mqtt\]"):
            client.camera_add("door", "/dev/video0")
        reload(daemon, models, [camera("door", "/dev/video0")], [])
        assert "add [mqtt]" in str([vars(each) for each in caplog.records])


def test_cameras_want_a_broker(models, tmp_path):
    with (
        pytest.raises(ConfigError, match=r"add \[mqtt\]"),
        running_daemon(models, tmp_path / "run", camera=(CameraSettings("door", "/dev/video0"),)),
    ):
        pass


# ---- in Home Assistant ----------------------------------------------------------------------------------------------


@contextmanager
def at_home(models, broker, folder, cameras, rules):
    """A daemon that Home Assistant discovers."""
    mqtt = MqttSettings(
        url=f"{broker.url}/dev1", reconnect_min_s=0.05, state_interval_s=0.3, home_assistant="homeassistant"
    )
    with serving(models, broker, folder, cameras, rules, mqtt=mqtt) as served:
        yield served


def shows(assistant, **states):
    """Until it shows these states of colours, by camera."""
    assistant.wait(lambda: states == {name: assistant.states().get(f"dev1 {name}: colours label") for name in states})


@needs_mosquitto
def test_home_assistant_shows_two_cameras_over_a_restart_of_each_side(models, broker, tmp_path):
    with MjpegCamera(jpeg("red")) as front, MjpegCamera(jpeg("blue")) as back:
        cameras = [camera("front", front), camera("back", back)]
        rules = [rule("colours", "front", picture=True), rule("colours", "back")]
        with HomeAssistant(broker.url) as assistant:
            with at_home(models, broker, tmp_path, cameras, rules) as _:
                shows(assistant, front="red", back="blue")
                assistant.wait(lambda: assistant.states()["dev1 front: colours picture"] == "picture")
                assistant.wait(lambda: assistant.states()["dev1 front: Connection"] == "ON")
                device = assistant.devices["edge_dev1_camera_front"]
                assert (device["name"], device["via_device"]) == ("dev1 front", "edge_dev1")
                assert "dev1: colours label" not in assistant.states()
                with HomeAssistant(broker.url) as restarted:  # scenes that stay as they are
                    shows(restarted, front="red", back="blue")
                    back.is_there = False
                    shows(restarted, front="red", back=UNAVAILABLE)
                    restarted.wait(lambda: restarted.states()["dev1 back: Connection"] == "OFF")
                    back.is_there = True
                    shows(restarted, front="red", back="blue")
            shows(assistant, front=UNAVAILABLE, back=UNAVAILABLE)
            with at_home(models, broker, tmp_path, cameras, rules):
                shows(assistant, front="red", back="blue")
                back.picture = jpeg("lime")
                shows(assistant, front="red", back="green")


@needs_mosquitto
def test_home_assistant_forgets_a_camera_that_is_removed(models, broker, tmp_path):
    with MjpegCamera(jpeg("red")) as front, MjpegCamera(jpeg("blue")) as back, HomeAssistant(broker.url) as assistant:
        cameras, rules = (
            [camera("front", front), camera("back", back)],
            [rule("colours", "front"), rule("colours", "back")],
        )
        with at_home(models, broker, tmp_path, cameras, rules) as (daemon, _, _):
            shows(assistant, front="red", back="blue")
            reload(daemon, models, cameras[:1], rules[:1])
            shows(assistant, front="red", back=None)
            assistant.wait(lambda: not [each for each in assistant.states() if each.startswith("dev1 back")])


@needs_mosquitto
def test_home_assistant_shows_a_scene_that_stays_as_it_is_without_a_named_camera(models, broker, tmp_path):
    with MjpegCamera(jpeg("red")) as server:
        rules = [PublishRule("colours", source="camera", camera=server.url, fps=50.0)]
        with at_home(models, broker, tmp_path, [], rules) as (_, _, listener):
            assert best(next_result(listener, "edge/dev1/result/colours")) == "red"
            with HomeAssistant(broker.url) as assistant:
                assistant.wait(lambda: assistant.states().get("dev1: colours label") == "red")
                server.is_there = False
                assistant.wait(lambda: assistant.states()["dev1: colours label"] == UNAVAILABLE)
