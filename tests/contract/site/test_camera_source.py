"""`source = "camera"`: a real MJPEG server and real files as cameras, a child that decodes them, a real daemon."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import wave
from contextlib import contextmanager
from functools import partial

import av
import numpy as np
import psutil
import pytest
from PIL import Image

from edge_runtime.doors.mqtt.settings import MqttSettings
from edge_runtime.doors.zmq.client import Client
from edge_runtime.errors import ConfigError
from edge_runtime.pictures.pictures import frame_pixels
from edge_runtime.site import cameras
from edge_runtime.site.camera import Camera, CameraAddress
from edge_runtime.site.settings import PublishRule
from tests.contract.running_daemon import ANSWER_S, put_model, running_daemon
from tests.fakes.broker import needs_mosquitto
from tests.fakes.mjpeg_camera import MjpegCamera, jpeg
from tests.fakes.mqtt_peer import Peer
from tests.fakes.rtsp_camera import RtspCamera
from tests.models import onnx_models

COLOURS = """
[input.image]
range = "0..1"
[output.scores]
labels = "labels.txt"
top_k = 2
"""

BOXES = """
[input.image]
range = "0..255"
[output.boxes]
layout = "yolov8"
"""

RED, GREEN, BLUE = 0, 1, 2


class Watched:
    """A camera and what it gives."""

    def __init__(self, address, silence_s=5.0, **options):
        self.has_news = threading.Event()
        self.camera = Camera(CameraAddress(str(address)), silence_s=silence_s, **options)
        self.view = self.camera.look(self.has_news.set)

    def __enter__(self):
        self.camera.start()
        return self

    def __exit__(self, *_):
        self.camera.close()

    def frame(self, wanted="frames"):
        """The next frame's pixels."""
        return self.shot(wanted).pixels

    def shot(self, wanted="frames"):
        """The next frame."""
        self.has_news.clear()
        self.view.ask(wanted)
        assert self.has_news.wait(ANSWER_S), self.camera.reason
        return self.view.take()

    def wait_reason(self, wanted=""):
        """Until the camera is lost for a reason with these words; the reason. Frames on their way are taken."""
        end_s = time.monotonic() + ANSWER_S
        while wanted not in (reason := self.camera.reason) or not reason:
            assert time.monotonic() < end_s
            self.view.ask()
            time.sleep(0.01)
        self.has_news.clear()
        self.view.take()
        return reason

    def child(self):
        """The process that reads it, once it is there."""
        end_s = time.monotonic() + ANSWER_S
        while time.monotonic() < end_s:
            for child in psutil.Process().children():
                if "camera_child:read_camera" in " ".join(child.cmdline()):
                    return child
        raise AssertionError("there is no such process")


def colour_of(frame):
    """The channel that is brightest everywhere."""
    means = frame.reshape(-1, 3).mean(axis=0)
    return int(means.argmax())


def write_video(path, codec, colours, rate=25, size=(64, 48)):
    """A video with one frame of each colour. Its title is "Kitchen"."""
    with av.open(str(path), "w") as container:
        container.metadata["title"] = "Kitchen"
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for colour in colours:
            pixels = np.zeros((size[1], size[0], 3), np.uint8)
            pixels[:, :, colour] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
        container.mux(stream.encode())


# ---- a camera by itself ---------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_camera_by_http_gives_its_frames_as_a_model_declares_them():
    with MjpegCamera(jpeg("red")) as server, Watched(server.url) as watched:
        frame = watched.frame()
        assert (frame.shape, frame.dtype, colour_of(frame)) == ((48, 64, 3), np.uint8, RED)
        assert watched.frame("gray").shape == (48, 64, 1)
        for source, shape in (("yuyv", (48, 64, 2)), ("nv12", (72, 64))):
            frame = watched.frame(source)
            assert frame.shape == shape
            assert frame_pixels(frame, source, "rgb")[5, 5].tolist() == pytest.approx([254, 0, 0], abs=4)


def test_a_camera_by_rtsp_gives_its_newest_frame_and_comes_back():
    with RtspCamera(RED) as server, Watched(server.url) as watched:
        assert colour_of(watched.frame()) == RED
        server.colour = BLUE
        assert BLUE in [colour_of(watched.frame()) for _ in range(10)]
        assert server.methods == ["OPTIONS", "DESCRIBE", "SETUP", "PLAY"]
        watched.child().send_signal(signal.SIGKILL)
        assert colour_of(watched.frame()) == BLUE
        assert server.methods[4:] == ["OPTIONS", "DESCRIBE", "SETUP", "PLAY"]


@pytest.mark.parametrize("size", [(50, 38), (854, 480)])
def test_a_camera_of_any_width_gives_whole_rows(tmp_path, size):
    """FFmpeg pads the rows of widths that are no multiples of 32."""
    write_video(tmp_path / "a.mkv", "libx264", [GREEN] * 5, size=size)
    with Watched(tmp_path / "a.mkv") as watched:
        for source, shape in (
            ("frames", (size[1], size[0], 3)), ("gray", (size[1], size[0], 1)), ("yuyv", (size[1], size[0], 2)),
            ("nv12", (size[1] * 3 // 2, size[0])),
        ):  # fmt: skip
            frame = watched.frame(source)
            assert frame.shape == shape
            if source == "frames":
                assert frame.argmax(axis=2).tolist() == np.full(shape[:2], GREEN).tolist()


@pytest.mark.parametrize(("name", "codec"), [("a.avi", "mjpeg"), ("a.mp4", "libx264"), ("a.mkv", "libx264")])
def test_a_file_is_a_camera_that_is_played_again_and_again(tmp_path, name, codec):
    write_video(tmp_path / name, codec, [RED] * 5 + [BLUE] * 5)
    with Watched(tmp_path / name) as watched:
        seen = {colour_of(watched.frame()) for _ in range(25)}
        assert seen == {RED, BLUE}
        assert watched.camera.losses == 0


def test_the_newest_frame_is_given_and_none_is_kept_for_later():
    with MjpegCamera(jpeg("red")) as server, Watched(server.url) as watched:
        assert colour_of(watched.frame()) == RED
        server.wait_sent(100)
        server.picture = jpeg("blue")
        server.wait_sent(20)
        colours = [colour_of(watched.frame()) for _ in range(10)]
        assert BLUE in colours[:5], "a hundred red ones were sent before"
        assert colours == sorted(colours)


def test_a_camera_that_goes_is_reported_and_comes_back():
    with MjpegCamera(jpeg("red")) as server, Watched(server.url) as watched:
        watched.frame()
        server.is_there = False
        reason = watched.wait_reason()
        assert reason
        assert "secret-word" not in reason + watched.camera.address.shown
        server.is_there = True
        assert colour_of(watched.frame()) == RED
        assert watched.camera.reason == ""
        assert watched.camera.losses >= 1


def test_a_camera_that_says_nothing_is_lost():
    with MjpegCamera(jpeg("red")) as server, Watched(server.url, silence_s=0.5) as watched:
        watched.frame()
        server.is_silent = True
        assert "exit requested" not in watched.wait_reason().lower()


def test_a_camera_that_takes_the_connection_and_answers_nothing_is_reported_in_our_words():
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        Watched(f"http://127.0.0.1:{silent.getsockname()[1]}/live", silence_s=0.5) as watched,
    ):
        assert watched.wait_reason() == "no picture came for 0.5 s"


def test_pictures_that_are_garbage_are_passed_over():
    with MjpegCamera(jpeg("red")) as server, Watched(server.url, silence_s=1.0) as watched:
        watched.frame()
        server.picture = b"\xff\xd8\xff" + os.urandom(3000)
        watched.wait_reason("could not be decoded")
        server.picture = jpeg("blue")
        assert colour_of(watched.frame()) == BLUE


def test_a_stream_of_garbage_is_a_camera_that_is_lost(tmp_path):
    (tmp_path / "noise.mp4").write_bytes(np.random.default_rng(1).bytes(1 << 20))
    with Watched(tmp_path / "noise.mp4") as watched:
        assert watched.wait_reason() == "it sends something else than a video"


def test_a_title_that_is_not_utf8_is_not_a_reason_to_see_nothing(tmp_path):
    write_video(tmp_path / "a.avi", "mjpeg", [RED])
    data = (tmp_path / "a.avi").read_bytes()
    assert b"Kitchen" in data
    (tmp_path / "a.avi").write_bytes(data.replace(b"Kitchen", b"K\xfcche  "))
    with Watched(tmp_path / "a.avi") as watched:
        assert colour_of(watched.frame()) == RED


def test_a_file_without_pictures_is_a_camera_that_is_lost(tmp_path):
    with wave.open(str(tmp_path / "a.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(16_000))
    with Watched(tmp_path / "a.wav") as watched:
        assert watched.wait_reason() == "the stream has no pictures"


def test_a_picture_that_says_it_is_enormous_is_not_made():
    data = bytearray(jpeg("red"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = b"\xff\x00\xff\x00"
    with MjpegCamera(jpeg("red")) as server, Watched(server.url, silence_s=1.0) as watched:
        watched.frame()
        server.picture = bytes(data)
        watched.wait_reason("could not be decoded")
        server.picture = jpeg("blue")
        assert colour_of(watched.frame()) == BLUE


def test_a_decoder_that_is_killed_is_started_again():
    with MjpegCamera(jpeg("red")) as server, Watched(server.url) as watched:
        watched.frame()
        watched.child().send_signal(signal.SIGKILL)
        assert colour_of(watched.frame()) == RED
        assert watched.camera.losses == 1


def test_a_camera_ends_at_once_whatever_it_does():
    with MjpegCamera(jpeg("red")) as server:
        server.is_silent = True
        with Watched(server.url, silence_s=3600.0) as watched:
            watched.view.ask()
            child = watched.child()
            began_s = time.monotonic()
        assert time.monotonic() - began_s < ANSWER_S
        assert not child.is_running()


def test_a_decoder_reads_no_file_but_its_camera(tmp_path):
    """A stream can name other files to be played: here a list of segments, as hostile cameras would send it."""
    write_video(tmp_path / "private.mp4", "libx264", [RED] * 5)
    listed = f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile://{tmp_path}/private.mp4\n#EXT-X-ENDLIST\n"
    (tmp_path / "list.m3u8").write_text(listed)
    with Watched(tmp_path / "list.m3u8") as watched:
        assert watched.wait_reason()
        assert watched.view.take() is None


@pytest.mark.parametrize("address", ["video0", "ftp://a/b", "relative/a.mp4", ""])
def test_an_address_that_is_not_a_cameras_is_refused(address):
    with pytest.raises(ConfigError, match=r"publish\.camera"):
        CameraAddress(address)


# ---- a daemon with a camera -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "colours", onnx_models.colours, toml=COLOURS)
    (models / "colours" / "labels.txt").write_text("red\ngreen\nblue\n")
    put_model(models, "undeclared", onnx_models.colours)
    put_model(models, "finder", onnx_models.finder, toml=BOXES)
    return models


@contextmanager
def watching(models, broker, folder, server, **rule):
    """A daemon with this camera, a client of it, and a listener on what it publishes."""
    settings = MqttSettings(url=f"{broker.url}/dev1", reconnect_min_s=0.05)
    with server, Peer(broker.url) as listener:
        listener.subscribe("edge/dev1/result/#", 1)
        rules = [PublishRule(source="camera", camera=server.url, **rule)]
        with (
            running_daemon(models, folder / "run", mqtt=settings, publish=rules) as daemon,
            Client(daemon.endpoints[1]) as client,
        ):
            yield client, listener


def source(client):
    (told,) = client.stats()["mqtt"]["sources"]
    return told


def best(message):
    return json.loads(message.payload)["classes"][0]["label"]


@needs_mosquitto
def test_a_label_is_published_once_when_frames_agree_on_it(models, broker, tmp_path):
    server = MjpegCamera(jpeg("red"))
    with watching(models, broker, tmp_path, server, model="colours", fps=50.0) as (client, listener):
        message = listener.next()
        assert best(message) == "red"
        assert json.loads(message.payload)["picture"]["width"] == 64
        for label in ("blue", "lime"):
            server.picture = jpeg(label)
            assert best(listener.next()) == label.replace("lime", "green")
        told = source(client)
        assert (told["model"], told["source"], told["reason"], told["losses"]) == ("colours", "camera", "", 0)
        assert "secret-word" not in json.dumps(client.stats())
        assert client.stats()["metrics"]["counters"]["camera_frames"] >= 6


@needs_mosquitto
def test_boxes_are_published_when_they_come_and_when_they_go(models, broker, tmp_path):
    server = MjpegCamera(jpeg("black"))
    with watching(models, broker, tmp_path, server, model="finder", fps=50.0) as (_, listener):
        for colour, count in (("black", 0), ("white", 1), ("black", 0)):
            server.picture = jpeg(colour)
            boxes = json.loads(listener.next().payload)["boxes"]
            assert len(boxes) == count
            if boxes:
                assert boxes[0]["box"] == pytest.approx([16, 12, 48, 36], abs=1)


@needs_mosquitto
def test_the_frame_of_a_result_is_published_with_its_answer_drawn(models, broker, tmp_path):
    rule = {"model": "colours", "fps": 50.0, "picture": True, "topic": "site/camera"}
    with watching(models, broker, tmp_path, MjpegCamera(jpeg("red", (320, 240))), **rule) as (_, listener):
        listener.subscribe("site/camera/picture", 1)
        with Image.open(io.BytesIO(listener.next().payload)) as picture:
            assert (picture.format, picture.size) == ("JPEG", (320, 240))
            assert picture.getpixel((160, 230)) == pytest.approx((254, 0, 0), abs=12)


@needs_mosquitto
def test_a_camera_that_goes_is_in_the_status_and_the_daemon_serves_on(models, broker, tmp_path):
    server = MjpegCamera(jpeg("red"))
    with watching(models, broker, tmp_path, server, model="colours", fps=50.0) as (client, listener):
        assert best(listener.next()) == "red"
        server.is_there = False
        end_s = time.monotonic() + ANSWER_S
        while not source(client)["reason"]:
            assert time.monotonic() < end_s
        server.picture = jpeg("blue")
        server.is_there = True
        assert best(listener.next()) == "blue"
        assert source(client)["losses"] >= 1


@needs_mosquitto
def test_a_model_without_steps_gets_no_frame_and_the_status_says_what_to_write(models, broker, tmp_path):
    server = MjpegCamera(jpeg("red"))
    with watching(models, broker, tmp_path, server, model="undeclared") as (client, _):
        end_s = time.monotonic() + ANSWER_S
        while "[input.image]\n" not in source(client)["reason"]:
            assert time.monotonic() < end_s
        assert "camera_frames" not in client.stats()["metrics"]["counters"]


@needs_mosquitto
def test_a_daemon_ends_at_once_while_its_camera_is_silent(models, broker, tmp_path, monkeypatch):
    monkeypatch.setattr(cameras, "Camera", partial(Camera, silence_s=3600.0))
    server = MjpegCamera(jpeg("red"))
    server.is_silent = True
    with watching(models, broker, tmp_path, server, model="colours") as (client, _):
        assert source(client)["losses"] == 0
        began_s = time.monotonic()
    assert time.monotonic() - began_s < ANSWER_S


@pytest.mark.parametrize(
    "fields",
    [
        {"source": "camera"},
        {"camera": "/dev/video0"},
        {"fps": 5.0},
        {"every_s": 5.0},
        {"source": "camera", "camera": "/dev/video0", "fps": 5.0, "every_s": 1.0},
        {"source": "camera", "camera": "/dev/video0", "steady": (1, 2)},
        {"source": "camera", "camera": "/dev/video0", "steady": (3, 2)},
    ],
)
def test_a_rule_that_cannot_be_is_refused(fields):
    with pytest.raises(ValueError, match=r"camera|every_s|steady"):
        PublishRule("colours", **fields)


def test_a_daemon_without_a_camera_imports_nothing_of_it():
    code = "import sys, edge_runtime.doors.mqtt.door; sys.exit('av' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
