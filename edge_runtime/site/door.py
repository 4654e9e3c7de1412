"""The daemon's door that only publishes: results of `[[publish]]`, and this device in Home Assistant, over its broker.

Imported only with `[[publish]]` or `mqtt.home_assistant`. Thread: main, but for what the broker's door calls.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any, cast

from edge_runtime.daemon.doors import DoorContext
from edge_runtime.doors.mqtt.publishing import PublishingDoor
from edge_runtime.errors import ConfigError
from edge_runtime.site.discovery import Discovery, page_for_others
from edge_runtime.site.results import ResultPublisher

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
        )
        for name, frontend in context.frontends.items():
            frontend.listeners = self._results.listeners(name)
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
                clock=core.clock,
            )
            self.topics = self._discovery.topics
        self._look_due_s = 0.0
        self._is_stopping = False
        broker.attach(self)

    def start(self) -> None:
        """Nothing: it publishes once the models are there."""

    def ready(self) -> None:
        """Begin to publish."""
        if self._discovery is not None:
            self._discovery.start(self._models(), page_for_others(self._status.pages, socket.gethostname()))
        self._results.start()

    def reload(self) -> None:
        """Nothing: it reads no file again."""

    def stop_admitting(self, limit_s: float) -> None:  # noqa: ARG002 (nothing is asked here)
        """Look no more which models there are: they leave now."""
        self._is_stopping = True

    def close(self) -> None:
        """Post the results that are due, before the broker's door closes. Idempotent."""
        self._results.close()

    def status(self) -> Mapping[str, Any]:
        """Nothing of its own: the broker's door shows the sources."""
        return {}

    # ---- a part of the broker's door; thread: its transport's --------------------------------------------------------

    def sources(self) -> list[dict[str, Any]]:
        """The status of each folder and camera, as JSON values."""
        return self._results.status()

    def message(self, payload: bytes) -> None:
        """Take Home Assistant's own status."""
        if self._discovery is not None:
            self._discovery.message(payload)

    def online(self) -> None:
        """Nothing: the transport publishes retained messages again by itself."""

    def beat(self) -> None:
        """Show Home Assistant the models and results of now."""
        if self._discovery is None:
            return
        now_s = self._clock.monotonic_s()
        if now_s >= self._look_due_s and not self._is_stopping:
            self._look_due_s = now_s + LOOK_S
            self._discovery.look(self._models())
        self._discovery.beat()

    def _models(self) -> list[str]:
        return sorted({status.model for status in self._table.statuses()})
