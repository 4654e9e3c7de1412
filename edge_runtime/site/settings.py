"""The settings of each `[[publish]]`, described below each field as in config/settings.py."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from edge_runtime.config.settings import NotNegative, Positive, PositiveFloat


class PublishRule(Struct, frozen=True, forbid_unknown_fields=True):
    """One rule that publishes results of a model by MQTT as they come, for subscribers that only listen."""

    model: str
    """The model."""

    source: Literal["zmq", "mqtt", "folder", "camera"] = "zmq"
    """`"zmq"` publishes the replies to ZeroMQ clients, `"mqtt"` those to MQTT clients and cameras; `"folder"` runs each
    file that appears in `folder`; `"camera"` runs the newest frame of `camera`."""

    folder: str | None = None
    """Folder for `source = "folder"`: `.npy`, `.json`, and pictures for a model that declares steps for them."""

    camera: str | None = None
    """Camera for `source = "camera"`: `"/dev/video0"`, `"rtsp://…"`, `"http://…"`, or a file, which is played again and
    again. It needs the extra `camera`, and a model that declares steps for pictures."""

    every_s: PositiveFloat | None = None
    """Time between two frames of `camera` that are run. When absent: `fps`, else 1."""

    fps: Annotated[float, Meta(gt=0, le=1000)] | None = None
    """Frames of `camera` a second, in place of `every_s`. A model that is slower gets the newest each time."""

    steady: tuple[Positive, Positive] = (2, 3)
    """With `camera`, two numbers: a label, or one more box of it, appears or goes when the first number of frames, of
    the second number of last ones, say so; `[1, 1]` takes every frame as it is."""

    topic: str | None = None
    """Topic of the results. When absent: `<prefix>/<device_id>/result/<model>`."""

    on: Literal["change", "interval"] = "change"
    """`"change"` publishes when outputs differ from the last published; `"interval"` publishes the latest result of
    each interval."""

    interval_s: NotNegative = 0.0
    """That interval; with `"change"` the least time between two publications."""

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

    def __post_init__(self) -> None:
        if (self.folder is None) == (self.source == "folder"):
            raise ValueError('source = "folder" needs folder = "/path", and folder needs that source')
        if (self.camera is None) == (self.source == "camera"):
            raise ValueError('source = "camera" needs camera = "/dev/video0" or a URL, and camera needs that source')
        if self.camera is None and (self.every_s is not None or self.fps is not None):
            raise ValueError('every_s and fps are for source = "camera"')
        if self.every_s is not None and self.fps is not None:
            raise ValueError("got every_s and fps; say one of the two")
        seen, of = self.steady
        if not of < 2 * seen <= 2 * of:
            raise ValueError(f"steady = [{seen}, {of}]; wanted more than half, and at most all, of the last frames")
        if self.on == "interval" and not self.interval_s:
            raise ValueError('on = "interval" needs interval_s')
        if self.remove and self.source != "folder":
            raise ValueError('remove is for source = "folder"')
