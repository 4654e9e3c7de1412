"""The settings of each `[[publish]]` and `[[camera]]`, described below each field as in config/settings.py."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta, Struct

from edge_runtime.config.settings import NotNegative, Positive, PositiveFloat
from edge_runtime.steps import why_not_steady

FramesPerSecond = Annotated[float, Meta(gt=0, le=1000)]
Share = Annotated[float, Meta(ge=0, le=1)]
"""Of a picture's width or height, from its left or its top."""

Point = tuple[Share, Share]
"""Of the picture's width and height, from its upper left corner."""

Label = Annotated[str, Meta(min_length=1)]

WHOLE = (0.0, 0.0, 1.0, 1.0)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class CameraSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """One camera with a name: rules of `[[publish]]` name it, and topics, results and Home Assistant carry the name.

    However many rules look at it, it is read once. Cameras are added, changed and removed by a reload too.
    """

    name: str
    """Its name: letters, digits, `_` and `-`, at most 64."""

    url: str
    """`"/dev/video0"`, `"rtsp://…"`, `"http://…"`, or a file, which is played again and again. It needs the extra
    `camera`."""

    rotate: Literal[0, 90, 180, 270] = 0
    """Degrees by which its pictures are turned clockwise, after the rotation that a video itself declares."""

    crop: tuple[Share, Share, Share, Share] = WHOLE
    """The part of the turned picture that models see: left, top, right and bottom as shares of its width and height.
    Boxes are in pixels of this part."""

    fps: FramesPerSecond | None = None
    """Frames a second for rules that say neither `fps` nor `every_s`."""

    def __post_init__(self) -> None:
        check_name("name", self.name)
        left, top, right, bottom = self.crop
        if left >= right or top >= bottom:
            raise ValueError(f"crop = {list(self.crop)}; wanted left, top, right, bottom, as [0.25, 0.0, 1.0, 0.5]")


def check_name(key: str, name: str) -> None:
    """Raise ValueError for a name that a topic cannot carry."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{key}: got {name!r}; wanted letters, digits, '_' and '-', at most 64, as 'front-door'")


class ZoneSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the picture, with `track = true`: what is in it is counted; who enters and leaves is told."""

    name: str
    """Its name, in events, in results, and in Home Assistant: letters, digits, `_` and `-`, at most 64."""

    points: tuple[Point, ...]
    """Its corners in order, 3 to 64: `[[0.1, 0.5], [0.6, 0.5], [0.6, 1.0], [0.1, 1.0]]`, as shares of the picture's
    width and height, from its upper left corner."""

    labels: tuple[Label, ...] = ()
    """Labels that count. When empty: all."""

    anchor: Literal["bottom", "center"] = "bottom"
    """The point of a box that must lie inside: the middle of its lower side, where a thing stands on the ground, or its
    center."""

    def __post_init__(self) -> None:
        check_name("zone.name", self.name)
        if not 3 <= len(self.points) <= 64:
            raise ValueError(f"zone {self.name!r} has {len(self.points)} points; wanted 3 to 64 corners")


class LineSettings(Struct, frozen=True, forbid_unknown_fields=True, rename={"start": "from", "end": "to"}):
    """A line in the picture, with `track = true`: what crosses it is counted and told, each way by itself."""

    name: str
    """Its name, in events, in results, and in Home Assistant: letters, digits, `_` and `-`, at most 64."""

    start: Point
    """One end: `[0.0, 0.5]`, as shares of the picture's width and height, from its upper left corner."""

    end: Point
    """The other end."""

    direction: Literal["both", "left", "right"] = "both"
    """Which way counts, as seen by who stands at `from` and looks to `to`: `"right"` counts what goes from the left
    side to the right one."""

    labels: tuple[Label, ...] = ()
    """Labels that count. When empty: all."""

    anchor: Literal["bottom", "center"] = "bottom"
    """The point of a box that must cross: the middle of its lower side, or its center."""

    def __post_init__(self) -> None:
        check_name("line.name", self.name)
        if self.start == self.end:
            raise ValueError(f"line {self.name!r} begins and ends at {list(self.start)}; wanted two points")


class AlarmSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """An alarm over a line or a zone: on while more things than `above` crossed, entered, or are there."""

    name: str
    """Its name, in events, in results, and in Home Assistant: letters, digits, `_` and `-`, at most 64."""

    above: Annotated[int, Meta(ge=0, le=100_000)]
    """It is on while there are more."""

    zone: str | None = None
    """The zone whose things are counted."""

    line: str | None = None
    """The line whose crossings are counted; it needs `within_s`."""

    within_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    """Crossings, or entries into the zone, are counted that happened in the last so many seconds: 60.0 for a rate a
    minute. When absent: how many are in the zone now."""

    labels: tuple[Label, ...] = ()
    """Labels that count. When empty: all."""

    def __post_init__(self) -> None:
        check_name("alarm.name", self.name)
        if (self.zone is None) == (self.line is None):
            raise ValueError(f"alarm {self.name!r} names {'both a' if self.zone else 'no'} zone and line; wanted one")
        if self.line is not None and self.within_s is None:
            raise ValueError(f"alarm {self.name!r} counts crossings of a line; say within_s = 60.0 for those a minute")


class PublishRule(Struct, frozen=True, forbid_unknown_fields=True):
    """One rule that publishes results of a model by MQTT as they come, for subscribers that only listen."""

    model: str
    """The model."""

    name: str | None = None
    """Name of the rule, of letters, digits, `_` and `-`; results, the topic and Home Assistant carry it. When absent:
    that of a named `camera`, if there is one."""

    source: Literal["zmq", "mqtt", "folder", "camera", "audio"] = "zmq"
    """`"zmq"` publishes the replies to ZeroMQ clients, `"mqtt"` those to MQTT clients and cameras; `"folder"` runs each
    file that appears in `folder`; `"camera"` runs the newest frame of `camera`, `"audio"` each window of `audio`."""

    folder: str | None = None
    """Folder for `source = "folder"`: `.npy`, `.json`, and pictures for a model that declares steps for them."""

    camera: str | None = None
    """Camera for `source = "camera"`: the name of a `[[camera]]`, or an address as its `url`. It needs a model that
    declares steps for pictures."""

    audio: str | None = None
    """Microphone for `source = "audio"`: a name of ALSA's as `"hw:0"` (`arecord -L` lists them), `"rtsp://…"`,
    `"http://…"`, or a file, which is played again and again at its own pace. It needs the extra `camera`, and a model
    that declares windows of sound."""

    every_s: PositiveFloat | None = None
    """Time between two frames of `camera` that are run; when absent: `fps`, else the camera's, else 1. Of `audio`
    between two windows; when absent: each window is run."""

    fps: FramesPerSecond | None = None
    """Frames of `camera` a second, in place of `every_s`. A model that is slower gets the newest each time."""

    steady: tuple[Positive, Positive] = (2, 3)
    """With `camera` or `audio`, two numbers: a label, or one more box of it, appears or goes when the first number of
    frames or windows, of the second number of last ones, say so; `[1, 1]` takes every one as it is."""

    topic: str | None = None
    """Topic of the results. When absent: `<prefix>/<device_id>/result/<model>`, with `/<name>` where the rule has a
    name, or `/<camera>` where its camera has one."""

    on: Literal["change", "interval", "every"] = "change"
    """`"change"` publishes when outputs differ from the last published; `"interval"` publishes the latest result of
    each interval; `"every"` publishes each result, of `camera` each frame's as it is."""

    interval_s: NotNegative = 0.0
    """That interval; otherwise the least time between two publications."""

    outputs: tuple[str, ...] = ()
    """Outputs that are compared and published; empty means all."""

    qos: Literal[0, 1] = 0
    """0: at most once; 1: at least once."""

    retain: bool = False
    """Whether the broker keeps the last result for later subscribers."""

    picture: bool = False
    """Whether the picture of the last result is published too, with its answer drawn: a retained JPEG on
    `<topic>/picture`. It needs Pillow."""

    remove: bool = False
    """For `source = "folder"`: remove a file after its result was published."""

    track: bool = False
    """With `camera`: whether boxes get ids that last from frame to frame (docs/tracks.md), in place of `steady`.
    Results then have `track` in each box, and `counts` by label."""

    track_score: Share = 0.5
    """With `track`: boxes that score more look for things first, and one that scores 0.1 more begins a thing. Boxes
    that score less, down to 0.1, go on with things; the model's own `threshold` must let them through."""

    lost_s: PositiveFloat = 2.0
    """With `track`: a thing that no frame has for so long, and for three frames at least, is gone, and its id with
    it."""

    zone: tuple[ZoneSettings, ...] = ()
    line: tuple[LineSettings, ...] = ()
    alarm: tuple[AlarmSettings, ...] = ()

    def __post_init__(self) -> None:
        self._check_source()
        if self.name is not None:
            check_name("name", self.name)
        if self.every_s is not None and self.fps is not None:
            raise ValueError("got every_s and fps; say one of the two")
        seen, of = self.steady
        if reason := why_not_steady(seen, of):
            raise ValueError(f"{reason} frames")
        if self.track and self.camera is None:
            raise ValueError(
                'track is for source = "camera": clients and files send what belongs to several scenes (docs/tracks.md)'
            )
        if (self.zone or self.line or self.alarm) and not self.track:
            raise ValueError("zones, lines and alarms need track = true")
        if self.on == "interval" and not self.interval_s:
            raise ValueError('on = "interval" needs interval_s')
        if self.remove and self.source != "folder":
            raise ValueError('remove is for source = "folder"')

    def _check_source(self) -> None:
        if (self.folder is None) == (self.source == "folder"):
            raise ValueError('source = "folder" needs folder = "/path", and folder needs that source')
        if (self.camera is None) == (self.source == "camera"):
            raise ValueError(
                'source = "camera" needs camera = "NAME" of a [[camera]], "/dev/video0" or a URL, and camera needs '
                "that source"
            )
        if (self.audio is None) == (self.source == "audio"):
            raise ValueError(
                'source = "audio" needs audio = "hw:0", a URL or the path of a file, and audio needs that source'
            )
        if self.audio is not None and self.picture:
            raise ValueError("picture is for models of pictures, and audio is none")
        if self.camera is None and self.fps is not None:
            raise ValueError('fps is for source = "camera"')
        if self.camera is None and self.audio is None and self.every_s is not None:
            raise ValueError('every_s is for source = "camera" or "audio"')
