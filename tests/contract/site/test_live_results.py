"""`results` and the pictures of a rule: what people who look see, of a real camera, detector, daemon and broker."""

from __future__ import annotations

import io
import json
import time
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
from PIL import Image

from edge_runtime.site import onlookers
from edge_runtime.site.settings import CameraSettings, PublishRule
from tests.contract.running_daemon import ANSWER_S, put_model
from tests.contract.site.test_camera_source import BOXES, COLOURS
from tests.contract.site.test_cameras import broker, next_result, serving
from tests.fakes.broker import needs_mosquitto
from tests.fakes.mjpeg_camera import MjpegCamera, jpeg
from tests.models import onnx_models

__all__ = ["broker"]

TOPIC = "edge/dev1/result/finder/door"
RULE = PublishRule("finder", source="camera", camera="door", fps=50.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "finder", onnx_models.finder, toml=BOXES)
    put_model(models, "colours", onnx_models.colours, toml=COLOURS)
    (models / "colours" / "labels.txt").write_text("red\ngreen\nblue\n")
    return models


@contextmanager
def looking(models, broker, folder, server, *rules):
    """A daemon with one camera, and a control client of it, once something was published."""
    cameras = [CameraSettings("door", server.url)]
    with serving(models, broker, folder, cameras, rules or [RULE]) as (daemon, client, listener):
        next_result(listener, TOPIC)
        yield daemon.doors["publish"], client


def until(look, is_wanted):
    """What a look finds that is wanted."""
    end_s = time.monotonic() + ANSWER_S
    while not is_wanted(found := look()):
        assert time.monotonic() < end_s, found
    return found


def drawers():
    """The processes that draw, those of them left out that have ended."""
    found = psutil.Process().children()
    return [
        each for each in found if each.status() != psutil.STATUS_ZOMBIE and "draw_pictures" in " ".join(each.cmdline())
    ]


@needs_mosquitto
def test_the_last_answer_of_a_rule_is_listed_though_nothing_new_is_published(models, broker, tmp_path):
    with MjpegCamera(jpeg("white")) as server, looking(models, broker, tmp_path, server) as (_, client):
        (entry,) = until(client.results, lambda found: found[0]["answer"] is not None)
        assert (entry["topic"], entry["model"], entry["camera"], entry["source"]) == (TOPIC, "finder", "door", "camera")
        assert (entry["has_picture"], len(entry["answer"]["boxes"])) == (True, 1)
        first = entry["answer"]["frame"]
        (later,) = until(client.results, lambda found: found[0]["answer"]["frame"] > first)
        assert later["time"] > entry["time"]
        assert later["answer"]["boxes"][0]["label"] == entry["answer"]["boxes"][0]["label"]


def colours_of(jpeg):
    """The sizes of a picture, and whether anything in it has a colour."""
    with Image.open(io.BytesIO(jpeg)) as picture:
        assert picture.format == "JPEG"
        return picture.size, bool((np.ptp(np.asarray(picture).astype(int), axis=2) > 50).any())


@needs_mosquitto
def test_a_picture_is_drawn_with_its_boxes_when_people_ask(models, broker, tmp_path):
    with MjpegCamera(jpeg("white", (1280, 960))) as server, looking(models, broker, tmp_path, server) as (door, _):
        assert not drawers()
        assert door.last_picture("edge/dev1/result/nothing") is None
        drawn = until(lambda: door.last_picture(TOPIC), lambda found: found)
        assert colours_of(drawn) == ((960, 720), True), "smaller, with a box"
        server.picture = jpeg("black", (1280, 960))
        until(lambda: door.last_picture(TOPIC), lambda found: not colours_of(found)[1])


@needs_mosquitto
def test_an_address_is_listed_without_its_password(models, broker, tmp_path):
    with MjpegCamera(jpeg("white")) as server:
        rule = PublishRule("finder", source="camera", camera=server.url, fps=50.0)
        with serving(models, broker, tmp_path, [], [rule]) as (_, client, _):
            assert "secret-word" in server.url
            assert "secret-word" not in json.dumps(until(client.results, lambda found: found[0]["answer"]))


@needs_mosquitto
def test_tracks_are_seen_with_their_ids_though_nothing_changes(models, broker, tmp_path):
    rule = PublishRule("finder", source="camera", camera="door", fps=50.0, track=True)
    with MjpegCamera(jpeg("white")) as server, looking(models, broker, tmp_path, server, rule) as (_, client):
        boxes = until(client.results, lambda found: (found[0]["answer"] or {}).get("boxes"))[0]["answer"]["boxes"]
        assert isinstance(boxes[0]["track"], int)
        assert until(client.results, lambda found: found[0]["answer"]["boxes"])[0]["answer"]["counts"]


@needs_mosquitto
def test_nothing_is_drawn_once_nobody_asks(models, broker, tmp_path, monkeypatch):
    monkeypatch.setattr(onlookers, "KEPT_S", 0.2)
    with MjpegCamera(jpeg("white")) as server, looking(models, broker, tmp_path, server) as (door, _):
        until(lambda: door.last_picture(TOPIC), lambda found: found)
        assert drawers()
        until(drawers, lambda found: not found)
        assert door.last_picture(TOPIC) is None


@needs_mosquitto
def test_an_answer_to_tensors_has_no_picture(models, broker, tmp_path):
    rules = [RULE, PublishRule("colours")]
    with MjpegCamera(jpeg("white")) as server, looking(models, broker, tmp_path, server, *rules) as (door, client):
        client.results()
        client.infer("colours", {"image": np.zeros((1, 3, 8, 8), np.float32)})
        (_, entry) = until(client.results, lambda found: found[1]["answer"] is not None)
        assert (entry["has_picture"], entry["answer"]["outputs"][0]["name"]) == (False, "scores")
        assert door.last_picture("edge/dev1/result/colours") is None
