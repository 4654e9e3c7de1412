"""A whole daemon on a real broker: it is woken, installs what is assigned, and tells what runs and what does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edge_runtime.doors.mqtt.settings import MqttSettings
from tests.contract.running_daemon import running_daemon
from tests.contract.updates.updated_device import Fleet, update_settings
from tests.fakes.broker import Broker, needs_mosquitto
from tests.fakes.mqtt_peer import Peer

pytestmark = needs_mosquitto


def told(peer: Peer, wanted: Any) -> dict[str, Any]:
    """The state's word on updates, as soon as it is as wanted."""
    while True:
        message = peer.next()
        if message.topic.endswith("/state") and wanted(update := json.loads(message.payload)["update"]):
            return update


def runs(release: int) -> Any:
    return lambda update: update.get("models", {}).get("adder", {}).get("release") == release


def test_a_device_that_is_woken_installs_and_says_what_runs_and_why_it_refused(broker: Broker, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.release(1)
    changes = {"folder": str(fleet.mirror), "auto": True, "wake_jitter_s": 0.0, "min_check_s": 0.0}
    update = update_settings(tmp_path, fleet.site.root, **changes)
    mqtt = MqttSettings(url=f"{broker.url}/dev1")
    (tmp_path / "models").mkdir()
    with Peer(broker.url) as peer:
        peer.subscribe("edge/dev1/state", 1)
        with running_daemon(tmp_path / "models", tmp_path, mqtt=mqtt, update=update):
            assert told(peer, runs(1))["models"]["adder"]["version"] == 1
            fleet.release(2)
            peer.publish("fleet/line/wake", b"whatever it says", 1)
            assert told(peer, runs(2))["refused"] == []
            fleet.release(3, says=4.0)
            peer.publish("edge/dev1/command/check-update", b"", 1)
            refused = told(peer, lambda update: update.get("refused") and update["state"] == "idle")
            (why,) = refused["refused"]
            assert (why["model"], why["release"]) == ("adder", 3)
            assert "too far from the golden ones" in why["reason"]
            assert refused["models"]["adder"]["release"] == 2
            assert "next_check_s" not in refused  # it would be news each second
    with Peer(broker.url) as latecomer:
        latecomer.subscribe("edge/dev1/state", 1)
        assert told(latecomer, runs(2))["refused"] == refused["refused"]
