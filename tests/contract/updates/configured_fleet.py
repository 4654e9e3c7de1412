"""A fleet whose group has a role for its configuration, and a daemon around a device's core that takes one over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from edge_runtime.config.settings import Config
from edge_runtime.daemon.core import ObservedCondition, Reloaded
from edge_runtime.daemon.parts import with_kept
from tests.contract.updates.updated_device import Fleet, UpdatedDevice
from tests.fakes.update_site import GROUP

ROLE, PATH = f"config-{GROUP}", f"config/{GROUP}/overlay.toml"


def configured_fleet(folder: Path) -> Fleet:
    """A fleet whose group's configuration says nothing yet."""
    fleet = Fleet(folder)
    fleet.site.repository.delegate("targets", ROLE, [PATH])
    configure(fleet, "")
    fleet.site.repository.publish("targets", "snapshot", "timestamp")
    fleet.sync()
    return fleet


def configure(fleet: Fleet, text: str | bytes, role: str = ROLE, path: str = PATH) -> None:
    """Let a role sign a configuration."""
    fleet.site.repository.add_target(path, text.encode() if isinstance(text, str) else text, role)
    fleet.site.repository.publish(role, "snapshot", "timestamp")
    fleet.sync()


class SurroundingDaemon:
    """The daemon around the device's core: reads the configuration again as a daemon does.

    own: the device's own settings. told: how a reload ends, by the settings that it takes over. health: the trouble of
    each source and model, "" for none; loses: those that are lost with the level "debug". level: of the log, as it was
    taken over last; reloads: how often.
    """

    def __init__(self, device: UpdatedDevice, own: Config | None = None) -> None:
        core = device.runtime.core
        self.is_ready = True
        self.own = own or core.config
        self.told: Callable[[Config], Reloaded] = lambda _: Reloaded()
        self.health: dict[str, str] = {}
        self.loses: dict[str, str] = {}
        self.level = ""
        self.reloads = 0
        self._folder = core.state
        self.settings = with_kept(self.own, self._folder, is_start=False)
        core.daemon = self

    def reload(self, stop: threading.Event) -> Reloaded:
        self.reloads += 1
        read = with_kept(self.own, self._folder, is_start=False)
        told = self.told(read.config)
        if told.is_read:
            self.settings, self.level = read, read.config.log.level
        if self.level == "debug":
            self.health.update(self.loses)
        return told

    def conditions(self) -> list[ObservedCondition]:
        named = [(what.partition(" "), trouble) for what, trouble in self.health.items()]
        return [ObservedCondition(kind, name, trouble) for (kind, _, name), trouble in named]
