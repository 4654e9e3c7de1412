"""Whoever reaches the broker can make a device look for updates, and can do nothing else, on a real mosquitto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgpack
import pytest

from edge_runtime.daemon.core import Core
from edge_runtime.doors.mqtt.settings import MqttSettings
from tests.contract.running_daemon import floats, header, put_model
from tests.contract.running_door import Looks, running_door
from tests.fakes.broker import Broker, needs_mosquitto
from tests.fakes.daemon_process import GROWTH_BYTES, resident_bytes
from tests.fakes.mqtt_peer import Peer
from tests.models import onnx_models

pytestmark = needs_mosquitto

COMMAND, WAKE = "edge/dev1/command/check-update", "fleet/line-1/wake"
TOPICS = (COMMAND, WAKE)
LIMIT_BYTES = 1 << 20
GOOD = msgpack.packb([msgpack.unpackb(header("mlp")), floats(1, 16).tobytes()])

FORGED = [
    b"",
    b"\x00\xff" * 100,
    b"http://evil.example/repository",
    b"../../../etc/passwd",
    json.dumps({"url": "http://evil.example", "version": 99, "root": {"keys": {}}}).encode(),
    json.dumps({"op": "unload", "model": "mlp", "reply_to": "reply/harm", "id": "1"}).encode(),
    msgpack.packb([{"v": 1, "op": "unload", "model": "mlp"}]),
    GOOD,
    b"[" * 100_000,
]


@dataclass
class Victim:
    """A device that serves and may be woken."""

    core: Core
    looks: Looks
    peer: Peer
    folder: Path

    def is_served(self) -> bool:
        return msgpack.unpackb(self.peer.ask("edge/dev1/infer/mlp", GOOD).payload)[0]["model"] == "mlp"

    def all_there_is(self) -> object:
        """What no message may change: files, models, and what it is subscribed to."""
        files = [(str(path), path.stat().st_mtime_ns) for path in sorted(self.folder.rglob("*")) if path.is_file()]
        return files, self.core.table.listing()

    def looked(self) -> int:
        """So often, when all that was sent so far has been heard: a request came after it."""
        assert self.is_served()
        return self.looks.count


@pytest.fixture(scope="module")
def broker(tmp_path_factory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("broker"), config="max_queued_messages 0\n") as broker:
        yield broker


@pytest.fixture(scope="module", params=[4, 5], ids=["3.1.1", "5"])
def protocol(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def victim(broker, tmp_path_factory) -> Iterator[Victim]:
    folder, looks = tmp_path_factory.mktemp("device"), Looks()
    put_model(folder / "models", "mlp", onnx_models.mlp)
    settings = MqttSettings(
        url=f"{broker.url}/dev1", reconnect_min_s=0.05, groups=("line-1",), max_packet_bytes=LIMIT_BYTES
    )
    with running_door(folder / "models", folder, settings, updates=looks) as core, Peer(broker.url) as peer:
        looks.wait(1)
        yield Victim(core, looks, peer, folder)


@pytest.fixture
def attacker(broker, protocol) -> Iterator[Peer]:
    with Peer(broker.url, protocol) as attacker:
        attacker.subscribe("reply/harm", 1)
        yield attacker


@pytest.mark.parametrize("payload", FORGED, ids=range(len(FORGED)))
def test_a_forged_message_is_a_look_whatever_it_says(victim, attacker, payload):
    before, looked = victim.all_there_is(), victim.looked()
    for topic in TOPICS:
        attacker.publish(topic, payload, 1)
    assert victim.looked() == looked + 2
    assert victim.all_there_is() == before
    assert attacker.is_silent(0), "it was answered"


def test_a_reply_that_a_command_asks_for_is_not_given(victim, broker):
    looked = victim.looked()
    with Peer(broker.url) as attacker:
        attacker.subscribe("reply/harm", 1)
        for topic in TOPICS:
            for payload in (GOOD, b'{"op": "models"}'):
                attacker.publish(topic, payload, 1, response_topic="reply/harm", correlation=b"1")
        assert victim.looked() == looked + 4
        assert attacker.is_silent(0)


def test_a_replayed_message_is_one_look_each_time_and_nothing_is_kept(victim, attacker):
    looked = victim.looked()
    for _ in range(20):
        attacker.publish(WAKE, b"release 7", 1)
    assert victim.looked() == looked + 20


def test_a_retained_wake_wakes_whoever_listens_now_and_nobody_who_comes_later(broker, victim, attacker, tmp_path):
    for topic in ("fleet/later/wake", "edge/later/command/check-update"):
        attacker.publish(topic, b"now", 1, retain=True)
    looks = Looks()
    (tmp_path / "models").mkdir()
    settings = MqttSettings(url=f"{broker.url}/later", reconnect_min_s=0.05, groups=("later",))
    with running_door(tmp_path / "models", tmp_path, settings, updates=looks) as core:
        looks.wait(1)
        attacker.publish("fleet/later/wake", b"now", 1)  # after the retained ones on its way
        looks.wait(2)
        assert core.metrics.counters()["mqtt_retained_ignored"] == 2
        assert core.metrics.counters()["mqtt_wakes"] == 1
        assert looks.count == 2


def test_a_huge_message_costs_nothing_and_one_above_the_devices_limit_never_comes(victim, attacker):
    looked, before = victim.looked(), victim.all_there_is()
    room = LIMIT_BYTES - 64
    for topic in TOPICS:
        attacker.publish(topic, bytes(room), 1)
    assert victim.looked() == looked + 2
    # MQTT 5 has the broker keep back what is larger than the device said it takes.
    for topic in TOPICS:
        attacker.publish(topic, bytes(LIMIT_BYTES), 1)
    assert victim.looked() == looked + 2
    assert victim.all_there_is() == before


def test_thousands_a_second_leave_the_device_answering_and_no_memory_behind(victim, attacker):
    def flood() -> None:
        for index in range(3_000):
            attacker.publish(TOPICS[index % 2], b"%d" % index * 40)
        attacker.publish(WAKE, b"", 1)  # acknowledged: the broker has them all
        assert victim.is_served()

    flood()
    resident, looked, before = resident_bytes(), victim.looked(), victim.all_there_is()
    flood()
    flood()
    assert victim.looked() == looked + 2 * 3_001
    assert victim.all_there_is() == before
    assert resident_bytes() - resident < GROWTH_BYTES


def test_huge_ones_a_hundred_in_a_row_leave_no_memory_behind(victim, attacker):
    def flood() -> None:
        for _ in range(100):
            attacker.publish(WAKE, bytes(LIMIT_BYTES - 64), 1)
        assert victim.is_served()

    flood()
    resident = resident_bytes()
    flood()
    assert resident_bytes() - resident < GROWTH_BYTES


@pytest.mark.parametrize(
    "topic",
    [
        "fleet/line-2/wake",
        "fleet/LINE-1/wake",
        "Fleet/line-1/wake",
        "fleet/line-1/Wake",
        "fleet/line-1/wake/",
        "fleet/line-1/wake/now",
        "/fleet/line-1/wake",
        "fleet/line-1",
        "fleet//wake",
        "edge/dev1/command",
        "edge/dev1/command/",
        "edge/dev1/command/CHECK-UPDATE",
        "edge/dev1/command/check-update/now",
        "edge/dev1/command/reboot",
        "edge/DEV1/command/check-update",
        "edge/dev2/command/check-update",
    ],
)
def test_another_topic_is_not_a_look(victim, attacker, topic):
    looked, before = victim.looked(), victim.all_there_is()
    attacker.publish(topic, b"now", 1)
    assert victim.looked() == looked
    assert victim.all_there_is() == before


def test_a_request_cannot_have_its_reply_wake_a_fleet(victim):
    looked = victim.looked()
    for topic in TOPICS:
        victim.peer.publish("edge/dev1/infer/mlp", GOOD, 1, response_topic=topic)
    assert victim.looked() == looked
    assert victim.core.metrics.counters()["mqtt_forbidden_replies"] >= 2
