"""The doors of one daemon: what a door is made of, and which the configuration opens.

Owns: how a row of the table of doors becomes an open `Door`. Names no door. Called by assemble.py. Thread: main.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct, field

from edge_runtime import plugins
from edge_runtime.config.settings import Config
from edge_runtime.daemon.core import Core, DaemonStatus
from edge_runtime.daemon.parts import load
from edge_runtime.doors.door import Door, DoorDeclaration, keeping
from edge_runtime.doors.io_loop import IoLoop
from edge_runtime.request.infer_frontend import InferFrontend
from edge_runtime.request.operation_handlers import OperationHandlers
from edge_runtime.request.replies import FRAMES, Encoding
from edge_runtime.sandbox.descriptors import Descriptors
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.typed_toml import build


class DoorContext(Struct, eq=False):
    """The parts of its daemon that a door may use. doors: those that were opened before it, by name.

    loop: of the I/O thread. frontends: by the name of a door, what hears its requests for inference. access: by the
    name of a door whose table has `rules`, its addresses and who may do what there, a DoorAccess. tables: of plug-ins,
    and those that a reload took over. shared: what several doors use, by a name, made by the first.
    opening: held while a door is opened.
    """

    core: Core
    status: DaemonStatus
    operations: OperationHandlers
    host: HostProbe
    descriptors: Descriptors
    loop: IoLoop
    doors: dict[str, Door] = field(default_factory=dict)
    frontends: dict[str, InferFrontend] = field(default_factory=dict)
    access: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    opening: Any = field(default_factory=threading.Lock)

    def settings(self, name: str) -> Any:
        """Return the table of a door, as the last reload found it; None where the configuration has none."""
        return self.tables[name] if name in self.tables else self.config.table(name)

    def take_tables(self, config: Config) -> set[str]:
        """Take over the tables of a new configuration that doors read again, open or not. Return their names."""
        taken: set[str] = set()
        for name in plugins.names("doors"):
            if plugins.is_plugin("doors", name) or not (
                name in self.doors or config.table(name) is not None or self.settings(name) is not None
            ):
                continue
            declaration: DoorDeclaration = plugins.declared("doors", name)
            if declaration.reloads:
                self.tables[name] = config.table(name)
                taken.add(name)
        return taken

    def open_new(self) -> list[str]:
        """Open the doors of tables that a reload took over and that had none. Return why one cannot be, also logged."""
        reasons: list[str] = []
        for name in plugins.names("doors"):
            if name in self.tables and self.tables[name] and not plugins.is_plugin("doors", name):
                declaration: DoorDeclaration = plugins.declared("doors", name)
                door = name if declaration.opens else declaration.brings[""]
                if declaration.reloads and door not in self.doors:
                    with keeping(f"[[{name}]] is", reasons):
                        self.open_door(door)
        return reasons

    def open_door(self, name: str) -> None:
        """Open a door while the daemon serves; nothing where it is open. Raises ConfigError. Thread: any."""
        with self.opening:
            if name not in self.doors:
                door: Door = load(plugins.declared("doors", name))(self)
                door.start()
                door.ready()
                self.doors[name] = door

    @property
    def config(self) -> Config:
        """The daemon's settings."""
        return self.core.config

    def new_frontend(self, name: str, *, encoding: Encoding = FRAMES, **options: Any) -> InferFrontend:
        """Make the frontend of a door: one for each thread that brings requests. encoding: of replies."""
        core = self.core
        frontend = self.frontends[name] = InferFrontend(
            core.table, core.infer, self.operations, core.clock, core.metrics, encoding=encoding, door=name, **options
        )
        return frontend


def open_doors(context: DoorContext) -> None:
    """Make the doors that the configuration wants, in the order of their table. Raises ConfigError."""
    config, brought = context.config, set[str]()
    for name in plugins.names("doors"):
        table = config.table(name)
        if table is None and name not in brought:
            continue
        if plugins.is_plugin("doors", name):
            _open_plugin(context, name, table)
            continue
        declaration: DoorDeclaration = plugins.declared("doors", name)
        if table is not None:
            brought.update(row for key, row in declaration.brings.items() if not key or getattr(table, key))
        if not declaration.opens:
            continue
        if name in brought or (declaration.is_wanted(table) and _has_address(table, name, context)):
            open_door = load(declaration)
            context.doors[name] = open_door(context)


class PluginDoor:
    """The door of a plug-in, as the daemon calls it: what it raises becomes the plug-in's state, and ends nothing."""

    def __init__(self, name: str, door: Door) -> None:
        self._name = name
        self._door = door
        self._has_failed = False

    def start(self) -> None:
        """Bind, and answer from now on."""
        self._guarded(self._door.start)

    def ready(self) -> None:
        """Begin what waits for the models."""
        self._guarded(self._door.ready)

    def reload(self) -> None:
        """Read again the files that may change while serving."""
        self._guarded(self._door.reload)

    def stop_admitting(self, limit_s: float) -> None:
        """Refuse new requests, and wait at most `limit_s` until the door's thread does."""
        self._guarded(lambda: self._door.stop_admitting(limit_s))

    def close(self) -> None:
        """Close, also a door that failed."""
        self._has_failed = False
        self._guarded(self._door.close)

    def status(self) -> Mapping[str, Any]:
        """Its entries in the result of `stats`; {} once it failed."""
        return self._guarded(self._door.status) or {}

    def _guarded(self, call: Callable[[], Any]) -> Any:
        if self._has_failed:
            return None
        try:
            return call()
        except Exception as error:  # noqa: BLE001 (a stranger's code)
            self._has_failed = True
            plugins.fail("doors", self._name, error)
            return None


def _open_plugin(context: DoorContext, name: str, table: Any) -> None:
    """Make the door of a plug-in, whose table is as it is in the file. Raises ConfigError: its table has a mistake."""
    declaration: DoorDeclaration = plugins.declared("doors", name)
    settings = context.tables[name] = build(declaration.settings, table, name)
    if not (declaration.is_wanted(settings) and _has_address(settings, name, context)):
        return
    try:
        context.doors[name] = PluginDoor(name, plugins.named(declaration.opens)(context))
    except Exception as error:  # noqa: BLE001 (as in PluginDoor)
        plugins.fail("doors", name, error)


def _has_address(table: Any, name: str, context: DoorContext) -> bool:
    """Whether a table that may name addresses names one. Raises ConfigError."""
    rules = getattr(table, "rules", "")
    if not rules:
        return True
    access = plugins.named(rules)(table, name)
    if access is not None:
        context.access[name] = access
    return access is not None
