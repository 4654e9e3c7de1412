"""Pictures drawn for `[[publish]]`: by a child each, the newest of a topic only, and a bad one ends nothing."""

from __future__ import annotations

import io
import queue

import numpy as np
import pytest
from PIL import Image

from edge_runtime.answers import Answer, Box, ClassScore, PictureRead
from edge_runtime.doors.mqtt.packets import Outgoing
from edge_runtime.doors.mqtt.publishing import DevicePublisher
from edge_runtime.doors.mqtt.topics import DeviceTopics
from edge_runtime.pictures.drawing import Overlay, Shape
from edge_runtime.site.drawn_pictures import PictureDrawer
from edge_runtime.telemetry.metrics import Metrics
from tests.fakes.clock import FakeClock

DRAWN_S = 90.0
NOTHING_SEEN = Answer(boxes=())


class KeptPictures:
    """A sender that keeps what is retained."""

    is_online = True

    def __init__(self, packet_limit: int = 1 << 20) -> None:
        self.packet_limit = packet_limit
        self.retained: queue.SimpleQueue[Outgoing] = queue.SimpleQueue()

    def post(self, message: Outgoing) -> None:
        raise AssertionError("a drawn picture is retained")

    def retain(self, message: Outgoing) -> None:
        self.retained.put(message)

    def next(self) -> tuple[str, Image.Image]:
        message = self.retained.get(timeout=DRAWN_S)
        drawn = Image.open(io.BytesIO(message.payload))
        assert (drawn.format, message.retain) == ("JPEG", True)
        return message.topic, drawn.convert("RGB")


def drawer_over(sender: KeptPictures, metrics: Metrics) -> PictureDrawer:
    return PictureDrawer(DevicePublisher(DeviceTopics("dev1"), sender), FakeClock(), metrics)


def white(size: tuple[int, int] = (80, 60)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, "white").save(file, "PNG")
    return file.getvalue()


def test_boxes_masks_and_classes_are_drawn_on_pictures_and_frames():
    sender = KeptPictures()
    drawer = drawer_over(sender, Metrics())
    mask = np.zeros((2, 2), np.uint8)
    mask[1, 1] = 1
    read = PictureRead(80, 60, "stretch", "rgb")
    offers = {
        "box": (white(), Answer(boxes=(Box("cat", 0, 0.9, (10, 10, 70, 50)),))),
        "mask": (white(), Answer(picture=read, mask=mask)),
        "gray": (np.full((60, 80, 1), 255, np.uint8), Answer(classes=(ClassScore("cat", 0, 0.9),))),
    }
    for topic, (picture, answer) in offers.items():
        drawer.offer(topic, picture, answer, ("none", "cat"))
    drawer.start()
    try:
        drawn = dict(sender.next() for _ in offers)
    finally:
        drawer.close()
    assert {each.size for each in drawn.values()} == {(80, 60)}
    assert min(drawn["box"].getpixel((10, 30))) < 200  # type: ignore[type-var]
    assert min(drawn["box"].getpixel((40, 40))) > 240  # type: ignore[type-var]
    assert min(drawn["mask"].getpixel((60, 45))) < 200  # type: ignore[type-var]
    assert len(drawn["gray"].getcolors(1 << 16) or ()) > 5


def test_of_several_that_wait_for_a_topic_the_newest_is_drawn():
    sender = KeptPictures()
    drawer = drawer_over(sender, Metrics())
    for side in (20, 40, 80):
        drawer.offer("t", white((side, side)), NOTHING_SEEN, ())
    drawer.start()
    try:
        assert sender.next()[1].size == (80, 80)
    finally:
        drawer.close()
    assert sender.retained.empty()


@pytest.mark.parametrize("bad", [b"", b"no picture", white()[:40]], ids=["nothing", "text", "cut"])
def test_a_picture_that_cannot_be_drawn_is_counted_and_the_next_one_is_drawn(bad: bytes):
    sender, metrics = KeptPictures(), Metrics()
    drawer = drawer_over(sender, metrics)
    drawer.offer("bad", bad, NOTHING_SEEN, ())
    drawer.offer("good", white(), NOTHING_SEEN, ())
    drawer.start()
    try:
        assert sender.next()[0] == "good"
    finally:
        drawer.close()
    assert metrics.counters()["mqtt_pictures_failed"] == 1


def test_a_picture_that_the_broker_would_not_take_is_counted():
    sender, metrics = KeptPictures(packet_limit=400), Metrics()
    drawer = drawer_over(sender, metrics)
    drawer.offer("large", white(), NOTHING_SEEN, ())
    drawer.offer("last", b"", NOTHING_SEEN, ())
    drawer.start()
    try:
        while metrics.counters().get("mqtt_pictures_failed", 0) < 2:
            pass
    finally:
        drawer.close()
    assert sender.retained.empty()


def test_notes_lines_and_zones_are_drawn_beside_the_boxes():
    sender = KeptPictures()
    drawer = drawer_over(sender, Metrics())
    answer = Answer(boxes=(Box("a", 0, 0.9, (20, 60, 120, 140)),))
    overlay = Overlay(
        ("#12",), (Shape("z", ((0.5, 0.25), (0.9, 0.25), (0.9, 0.9))), Shape("l", ((0.0, 0.95), (1.0, 0.95))))
    )
    drawer.start()
    try:
        pictures = []
        for each in (None, overlay):
            drawer.offer("t", white((200, 160)), answer, (), each)
            pictures.append(np.asarray(sender.next()[1], np.int16))
    finally:
        drawer.close()
    differs = np.abs(pictures[0] - pictures[1]).max(axis=2) > 60
    assert differs[150:154, 100].any()  # the line
    assert differs[80, 178:182].any()  # a side of the zone
    assert differs[44:60, 60:90].any()  # the note, behind the label
    assert not differs[90:130, 30:90].any()
