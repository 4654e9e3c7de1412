"""A real core behind a real broker, with what wakes an updater in a test's hands."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from edge_runtime.config.loading import configured
from edge_runtime.daemon.assemble import assemble_core
from edge_runtime.daemon.core import Core, DaemonStatus
from edge_runtime.daemon.doors import DoorContext, open_doors
from edge_runtime.doors.io_loop import IoLoop
from edge_runtime.doors.mqtt.settings import MqttSettings
from edge_runtime.request.operation_handlers import OperationHandlers
from edge_runtime.sandbox.descriptors import Descriptors
from edge_runtime.telemetry.host import HostProbe
from tests.contract.running_daemon import ANSWER_S


class Looks:
    """Updates as a wake sees them: counts its looks. groups: its own. state: the summary, a test's to change."""

    def __init__(self, *groups: str, **state: str) -> None:
        self.groups = groups
        self.count = 0
        self.state = state or {"state": "off"}
        self._changed = threading.Condition()

    def look(self) -> None:
        with self._changed:
            self.count += 1
            self._changed.notify_all()

    def summary(self) -> dict[str, str]:
        return self.state

    def wait(self, count: int) -> None:
        """Until it was called so often in all."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.count >= count, ANSWER_S), f"{self.count} looks, wanted {count}"


@contextmanager
def running_door(models: Path, folder: Path, settings: MqttSettings, *, updates: Looks | None = None) -> Iterator[Core]:
    """Serve a folder of models behind a broker, and nowhere else."""
    core = assemble_core(configured(models=str(models), state=str(folder / "state"), mqtt=settings, calibrate=False))
    status, loop = DaemonStatus(core, HostProbe()), IoLoop(core.metrics)
    operations = OperationHandlers(core.table, core.loader, core.pending_loads, status)
    context = DoorContext(replace(core, updates=updates), status, operations, HostProbe(), Descriptors(), loop)
    open_doors(context)
    core.start()
    try:
        assert core.loader.has_settled.wait(ANSWER_S)
        for door in context.doors.values():
            door.ready()
        yield core
    finally:
        for door in context.doors.values():
            door.stop_admitting(ANSWER_S)
        core.close(5.0)
        for door in reversed(context.doors.values()):
            door.close()
        loop.close()
