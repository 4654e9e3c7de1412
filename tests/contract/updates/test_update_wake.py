"""A broker's word to look for updates, on a real mosquitto: who hears it, and what a device says of its updates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_runtime.doors.mqtt.settings import MqttSettings
from edge_runtime.errors import ConfigError
from tests.contract.running_door import Looks, running_door
from tests.fakes.broker import Broker, needs_mosquitto
from tests.fakes.mqtt_peer import Peer

pytestmark = needs_mosquitto

GROUPS = ("line-1", "site")
UNHEARD = "No matching subscribers"


@pytest.fixture
def models(tmp_path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def settings(broker: Broker, device: str = "dev1", **more) -> MqttSettings:
    return MqttSettings(url=f"{broker.url}/{device}", reconnect_min_s=0.05, **more)


@pytest.mark.smoke
@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("qos", [0, 1])
def test_a_command_and_the_wake_of_each_group_make_the_device_look(broker, models, tmp_path, protocol, qos):
    looks = Looks()
    with (
        running_door(models, tmp_path, settings(broker, groups=GROUPS), updates=looks) as core,
        Peer(broker.url, protocol) as peer,
    ):
        looks.wait(1)  # the connection itself
        for count, topic in enumerate(("edge/dev1/command/check-update", "fleet/line-1/wake", "fleet/site/wake"), 2):
            peer.publish(topic, b"", qos)
            looks.wait(count)
        assert core.metrics.counters()["mqtt_wakes"] == 3


def test_a_device_listens_to_its_own_prefix_and_to_further_groups_once_each(broker, models, tmp_path):
    looks = Looks("site", "canary")
    mqtt = settings(broker, groups=("site",), prefix="plant/line1")
    with (
        running_door(models, tmp_path, mqtt, updates=looks),
        Peer(broker.url) as peer,
    ):
        looks.wait(1)
        for count, topic in enumerate(
            ("plant/line1/dev1/command/check-update", "fleet/canary/wake", "fleet/site/wake"), 2
        ):
            peer.publish(topic, b"", 1)
            looks.wait(count)
        assert peer.publish("edge/dev1/command/check-update", b"", 1) == UNHEARD


def test_a_device_without_updates_listens_to_no_command(broker, models, tmp_path):
    with running_door(models, tmp_path, settings(broker, groups=GROUPS)), Peer(broker.url) as peer:
        peer.subscribe("edge/dev1/status", 1)
        while peer.next().payload != b"online":
            pass
        for topic in ("edge/dev1/command/check-update", "fleet/line-1/wake"):
            assert peer.publish(topic, b"", 1) == UNHEARD


def test_a_connection_that_comes_back_is_a_wake(models, tmp_path):
    looks = Looks()
    with (
        Broker(tmp_path / "broker") as broker,
        running_door(models, tmp_path, settings(broker, groups=GROUPS), updates=looks),
    ):
        looks.wait(1)
        broker.kill()
        broker.restart()
        looks.wait(2)
        with Peer(broker.url) as peer:
            peer.publish("fleet/line-1/wake", b"", 1)
            looks.wait(3)


def test_a_group_that_is_not_an_id_is_refused(broker, models, tmp_path):
    with (
        pytest.raises(ConfigError, match=r"mqtt\.groups: got '\+'"),
        running_door(models, tmp_path, settings(broker, groups=("+",)), updates=Looks()),
    ):
        pass


def test_the_state_says_at_once_how_updates_go(broker, models, tmp_path):
    updates = Looks(state="idle", release="mlp 3")
    with (
        Peer(broker.url) as peer,
        running_door(models, tmp_path, settings(broker, state_interval_s=3600.0), updates=updates),
    ):
        peer.subscribe("edge/dev1/state", 1)
        wait_update(peer, {"state": "idle", "release": "mlp 3"})
        updates.state["state"] = "staging"
        wait_update(peer, {"state": "staging", "release": "mlp 3"})


def test_the_state_of_a_device_without_updates_says_off(broker, models, tmp_path):
    with Peer(broker.url) as peer, running_door(models, tmp_path, settings(broker, "plain")):
        peer.subscribe("edge/plain/state", 1)
        wait_update(peer, {"state": "off"})


def wait_update(peer: Peer, update) -> None:
    while json.loads(peer.next().payload)["update"] != update:
        pass


def until_heard(peer: Peer, group: str) -> None:
    while peer.publish(f"fleet/{group}/wake", b"", 1) == UNHEARD:
        pass


def until_unheard(peer: Peer, group: str) -> None:
    while peer.publish(f"fleet/{group}/wake", b"", 1) != UNHEARD:
        pass


@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
def test_a_device_that_is_moved_hears_its_new_group_at_once_and_the_old_one_no_more(broker, models, tmp_path, protocol):
    looks = Looks("line-1")
    with (
        running_door(models, tmp_path, settings(broker, protocol=protocol, groups=("site",)), updates=looks) as core,
        Peer(broker.url) as peer,
    ):
        looks.wait(1)
        looks.groups = ("line-2",)
        looks.wait(2)  # which it takes as a wake: one may have been lost meanwhile
        until_heard(peer, "line-2")
        until_unheard(peer, "line-1")
        looks.wait(3)
        looks.groups = ("site",)
        until_unheard(peer, "line-2")
        until_heard(peer, "site")  # a group of its own settings stays
        assert core.metrics.counters()["mqtt_connections"] == 1


def test_a_device_that_is_moved_without_a_connection_hears_its_new_group_with_the_next(models, tmp_path):
    looks = Looks("line-1")
    with (
        Broker(tmp_path / "broker") as broker,
        running_door(models, tmp_path, settings(broker), updates=looks),
    ):
        looks.wait(1)
        broker.kill()
        looks.groups = ("line-2",)
        looks.wait(2)
        broker.restart()
        looks.wait(3)  # the connection itself
        with Peer(broker.url) as peer:
            until_heard(peer, "line-2")
            until_unheard(peer, "line-1")
