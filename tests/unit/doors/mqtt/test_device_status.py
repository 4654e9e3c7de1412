"""What the state of a device is made of: numbers that cost the MQTT transport's thread little."""

from __future__ import annotations

import json
from typing import Any

from edge_runtime.doors.mqtt.device_status import StatusPublisher
from edge_runtime.doors.mqtt.packets import Outgoing
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


class Sender:
    """Keeps the last state. updates: what the device's updates say."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.updates: dict[str, Any] = {"state": "idle", "group": "line-1"}

    def retain(self, message: Outgoing) -> None:
        if message.topic.endswith("/state"):
            self.state = json.loads(message.payload)

    def summary(self) -> dict[str, Any]:
        return self.updates


def test_state_names_the_group_that_updates_follow_now_and_not_the_one_before() -> None:
    sender, clock = Sender(), FakeClock()
    told: Any = sender
    publisher = StatusPublisher(
        DeviceTopics("dev1"), told, table=ModelTable(Executor()), metrics=Metrics(), host=Probe(), clock=clock,
        profile="generic", interval_s=10, updates=told, groups=("all",),
    )  # fmt: skip
    publisher.beat()
    assert sender.state["groups"] == ["all", "line-1"]
    sender.updates = {"state": "idle", "group": "line-2"}
    clock.advance(11.0)
    publisher.beat()
    assert sender.state["groups"] == ["all", "line-2"]
