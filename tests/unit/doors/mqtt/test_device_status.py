"""What the state of a device is made of: numbers that cost the MQTT transport's thread little."""

from __future__ import annotations

from typing import Any

from edge_runtime.doors.mqtt.device_status import StatusPublisher
from edge_runtime.doors.mqtt.topics import DeviceTopics
from edge_runtime.models.executor import Executor
from edge_runtime.models.model_table import ModelTable
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.telemetry.metrics import Metrics
from tests.fakes.clock import FakeClock


class Probe(HostProbe):
    """The kernel walks all memory for one of its numbers."""

    def pss_bytes(self) -> int | None:
        raise AssertionError("the state does not tell it")


def test_state_tells_memory_and_cores_without_walking_the_memory() -> None:
    sender: Any = None
    publisher = StatusPublisher(
        DeviceTopics("dev1"), sender, table=ModelTable(Executor()), metrics=Metrics(), host=Probe(),
        clock=FakeClock(), profile="generic", interval_s=10,
    )  # fmt: skip
    told = publisher.state()
    assert told["memory_bytes"] > 0
    assert told["cpu_cores"] >= 0
