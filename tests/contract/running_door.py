"""A real core behind a real broker, with what wakes an updater in a test's hands."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from edge_runtime.config.settings import Config, MqttSettings
from edge_runtime.daemon.assemble import assemble_core
from edge_runtime.daemon.core import Core
from edge_runtime.doors.mqtt.door import MqttDoor
from edge_runtime.request.infer_frontend import InferFrontend
from edge_runtime.request.operation_handlers import OperationHandlers
from edge_runtime.telemetry.host import HostProbe
from tests.contract.running_daemon import ANSWER_S


class Looks:
    """Updates as a wake sees them: counts its looks. state: the summary, a test's to change."""

    def __init__(self, **state: str) -> None:
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
def running_door(models: Path, folder: Path, settings: MqttSettings, **words) -> Iterator[Core]:
    """Serve a folder of models behind a broker, and nowhere else. words: MqttDoor's."""
    core = assemble_core(Config(models=str(models), state=str(folder / "state"), mqtt=settings, calibrate=False))
    control = OperationHandlers(core.table, core.loader, core.pending_loads, SimpleNamespace(is_ready=True, stats=dict))
    infer = InferFrontend(core.table, core.infer, control, core.clock, core.metrics)
    door = MqttDoor(settings, (), core, infer, HostProbe(), **words)
    core.start()
    try:
        assert core.loader.has_settled.wait(ANSWER_S)
        door.start()
        yield core
    finally:
        door.stop_admitting(ANSWER_S)
        core.close(5.0)
        door.close()
