"""The doors of one daemon: what a door is made of, and which the configuration opens.

Owns: how a row of the table of doors becomes an open `Door`. Names no door. Called by assemble.py. Thread: main.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from edge_runtime import plugins
from edge_runtime.config.settings import Config, DoorSettings
from edge_runtime.daemon.core import Core, DaemonStatus
from edge_runtime.daemon.parts import load
from edge_runtime.doors.door import Door, DoorDeclaration
from edge_runtime.doors.io_loop import IoLoop
from edge_runtime.request.infer_frontend import InferFrontend
from edge_runtime.request.operation_handlers import OperationHandlers
from edge_runtime.request.replies import FRAMES, Encoding
from edge_runtime.sandbox.descriptors import Descriptors
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.typed_toml import build

if TYPE_CHECKING:
    from edge_runtime.config.door_access import DoorAccess


class DoorContext(Struct, eq=False):
    """The parts of its daemon that a door may use. doors: those that were opened before it, by name.

    loop: of the I/O thread. frontends: by the name of a door, what hears its requests for inference. access: by the
    name of a door whose table is a `DoorSettings`, its addresses and who may do what there. tables: of plug-ins.
    """

    core: Core
    status: DaemonStatus
    operations: OperationHandlers
    host: HostProbe
    descriptors: Descriptors
    loop: IoLoop
    doors: dict[str, Door] = field(default_factory=dict)
    frontends: dict[str, InferFrontend] = field(default_factory=dict)
    access: dict[str, DoorAccess] = field(default_factory=dict)
    tables: dict[str, Any] = field(default_factory=dict)

    def settings(self, name: str) -> Any:
        """Return the table of a door; None where the configuration has none."""
        return self.tables.get(name) or self.config.table(name)

    @property
    def config(self) -> Config:
        """The daemon's settings."""
        return self.core.config

    def new_frontend(self, name: str, *, encoding: Encoding = FRAMES, **options: Any) -> InferFrontend:
        """Make the frontend of a door: one for each thread that brings requests. encoding: of replies."""
        core = self.core
        frontend = self.frontends[name] = InferFrontend(
            core.table, core.infer, self.operations, core.clock, core.metrics, encoding=encoding, **options
        )
        return frontend


def open_doors(context: DoorContext) -> None:
    """Make the doors that the configuration wants, in the order of their table. Raises ConfigError."""
    config, brought = context.config, set[str]()
    for name in plugins.names("doors"):
        table = config.table(name)
        if table is None and name not in brought:
            continue
        declaration: DoorDeclaration = plugins.declared("doors", name)
        if isinstance(table, Mapping):  # a plug-in's
            table = context.tables[name] = build(declaration.settings, table, name)
        if table is not None:
            brought.update(row for key, row in declaration.brings.items() if getattr(table, key))
        if name in brought or (declaration.is_wanted(table) and _has_address(table, name, context)):
            open_door = load(declaration)
            context.doors[name] = open_door(context)


def _has_address(table: Any, name: str, context: DoorContext) -> bool:
    """Whether a table that may name addresses names one. Raises ConfigError."""
    if not isinstance(table, DoorSettings):
        return True
    from edge_runtime.config.door_access import door_access

    access = door_access(table, name)
    if access is not None:
        context.access[name] = access
    return access is not None
