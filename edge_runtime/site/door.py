"""The daemon's door that only publishes: results of `[[publish]]`, and this device in Home Assistant, over its broker.

Imported only with `[[publish]]`, `[[camera]]` or `mqtt.home_assistant`. It answers the operations of cameras. Thread:
main, but for what the broker's door and operations call.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

from msgspec import ValidationError, convert
from msgspec.structs import asdict

from edge_runtime.daemon.doors import DoorContext
from edge_runtime.doors.door import keeping
from edge_runtime.doors.mqtt.publishing import PublishingDoor
from edge_runtime.errors import ConfigError, DecodeFailed
from edge_runtime.site.camera import CameraAddress
from edge_runtime.site.discovery import Discovery, page_for_others
from edge_runtime.site.results import ResultPublisher
from edge_runtime.site.settings import CameraSettings, PublishRule
from edge_runtime.wire.codec import short

LOOK_S = 1.0
"""Time between two looks at which models and results Home Assistant is shown."""


def open_door(context: DoorContext) -> SiteDoor:
    """Return the door that publishes. Raises ConfigError: no broker is named, or a rule cannot be."""
    if "mqtt" not in context.doors:
        raise ConfigError("publish: results go to a broker, and none is named; add [mqtt], or --mqtt URL")
    return SiteDoor(context, cast("PublishingDoor", context.doors["mqtt"]))


class SiteDoor:
    """Publishes the site of one device. It is a part of the broker's door."""

    topics: tuple[str, ...] = ()
    takes_retained = True

    def __init__(self, context: DoorContext, broker: PublishingDoor) -> None:
        core = context.core
        self._context = context
        self._table = core.table
        self._clock = core.clock
        self._status = context.status
        self._results = ResultPublisher(
            context.settings("publish") or (),
            broker.publisher,
            table=core.table,
            infer=core.infer,
            metrics=core.metrics,
            clock=core.clock,
            cameras=context.settings("camera") or (),
            regions=core.regions,
            state=core.state,
        )
        self._listen()
        self._discovery: Discovery | None = None
        prefix = context.settings("mqtt").home_assistant
        if prefix is not None:
            self._discovery = Discovery(
                prefix,
                broker.publisher,
                profile=core.profile.name,
                has_temperature=bool(context.host.temperatures()),
                has_updates=core.updates is not None,
                results=self._results,
                entities=lambda: context.shared.get("device_entities", {}),
                clock=core.clock,
            )
            self.topics = self._discovery.topics
        self._look_due_s = 0.0
        self._is_stopping = False
        self.changing = threading.Lock()
        """Held from a look at the rules and cameras of now until those made of them are taken: else a reload in between
        would be undone."""
        broker.attach(self)

    def start(self) -> None:
        """Nothing: it publishes once the models are there."""

    def ready(self) -> None:
        """Begin to publish."""
        if self._discovery is not None:
            self._discovery.start(self._models(), page_for_others(self._status.pages, socket.gethostname()))
        self._results.start()

    def reload(self) -> None:
        """Publish by the rules, and read the cameras, of the configuration that was read again."""
        reasons: list[str] = []
        with keeping("cameras and results are", reasons), self.changing:
            self.take(self._context.settings("publish") or (), self._context.settings("camera") or ())
        if reasons:
            raise ConfigError(reasons[0])

    def stop_admitting(self, limit_s: float) -> None:  # noqa: ARG002 (nothing is asked here)
        """Look no more which models there are: they leave now."""
        self._is_stopping = True

    def close(self) -> None:
        """Post the results that are due, before the broker's door closes. Idempotent."""
        self._results.close()

    def status(self) -> Mapping[str, Any]:
        """Nothing of its own: the broker's door shows the sources."""
        return {}

    def last_results(self) -> list[dict[str, Any]]:
        """The last result of each rule, as JSON values. Thread: any."""
        return self._results.last_results()

    def last_picture(self, topic: str) -> bytes | None:
        """The last JPEG of a rule, by its topic; None: there is none. Thread: any."""
        return self._results.last_picture(topic)

    @property
    def rules(self) -> tuple[PublishRule, ...]:
        """The rules of now."""
        return self._results.rules

    @property
    def cameras(self) -> tuple[CameraSettings, ...]:
        """The named cameras of now."""
        return self._results.cameras

    def take(self, rules: Sequence[PublishRule], cameras: Sequence[CameraSettings]) -> None:
        """Publish by these rules from now on. Raises ConfigError: it is all as before. Thread: any."""
        self._results.take(rules, cameras)
        self._listen()

    # ---- a part of the broker's door; thread: its transport's --------------------------------------------------------

    def sources(self) -> list[dict[str, Any]]:
        """The status of each folder and camera, as JSON values."""
        return self._results.status()

    def states(self) -> dict[str, dict[str, dict[str, str]]]:
        """By the table of its kind, the state of each source by its name or its address, and why it is lost."""
        return self._results.states()

    def message(self, payload: bytes) -> None:
        """Take Home Assistant's own status."""
        if self._discovery is not None:
            self._discovery.message(payload)

    def online(self) -> None:
        """Have Home Assistant's values said again: the transport does that of retained messages alone."""
        if self._discovery is not None:
            self._discovery.online()

    def beat(self) -> None:
        """Show Home Assistant the models and results of now."""
        if self._discovery is None:
            return
        now_s = self._clock.monotonic_s()
        if now_s >= self._look_due_s and not self._is_stopping:
            self._look_due_s = now_s + LOOK_S
            self._discovery.look(self._models())
        self._discovery.beat()

    def _listen(self) -> None:
        for name, frontend in self._context.frontends.items():
            frontend.listeners = self._results.listeners(name)

    def _models(self) -> list[str]:
        return sorted({status.model for status in self._table.statuses()})


# ---- operations; thread: their door's -------------------------------------------------------------------------------


def list_cameras(door: SiteDoor) -> list[dict[str, Any]]:
    """The status of each camera's rules; of a camera that none looks at its name and place."""
    told = [each for each in door.sources() if each["source"] == "camera"]
    seen = {each.get("camera") for each in told}
    unseen = [each for each in door.cameras if each.name not in seen]
    idle = "no rule of [[publish]] looks at it"
    return told + [
        {
            "camera": each.name,
            "source": "camera",
            "from": CameraAddress(each.url).shown,
            "state": "unused",
            "reason": idle,
        }
        for each in unseen
    ]


def list_results(door: SiteDoor) -> list[dict[str, Any]]:
    """The last result of each rule of [[publish]]."""
    return door.last_results()


def add_camera(door: SiteDoor, camera: str, url: str, model: str | None) -> list[dict[str, Any]]:
    """Read a camera, in place of one of that name, whose other settings stay; with a model, publish its answers."""
    try:
        with door.changing:
            before = next((each for each in door.cameras if each.name == camera), None)
            fields = {**(asdict(before) if before is not None else {}), "name": camera, "url": url}
            added = convert(fields, CameraSettings)
            rules = list(door.rules)
            if model and not any((each.camera, each.model) == (camera, model) for each in rules):
                rules.append(PublishRule(model, source="camera", camera=camera))
            door.take(rules, [*(each for each in door.cameras if each.name != camera), added])
    except (ValidationError, ConfigError) as error:
        raise DecodeFailed(f"camera_add: {getattr(error, 'message', error)}") from None
    return list_cameras(door)


def remove_camera(door: SiteDoor, camera: str) -> list[dict[str, Any]]:
    """Stop reading a camera, with the rules that look at it."""
    with door.changing:
        if all(each.name != camera for each in door.cameras):
            known = ", ".join(each.name for each in door.cameras) or "none now"
            raise DecodeFailed(f"camera_remove: there is no camera {short(camera)}; wanted one of {known}")
        door.take(
            [each for each in door.rules if each.camera != camera],
            [each for each in door.cameras if each.name != camera],
        )
    return list_cameras(door)
