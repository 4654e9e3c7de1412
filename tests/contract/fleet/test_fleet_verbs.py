"""A fleet on a real broker: verbs read what devices retain, follow what they say, and fear no stranger."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from edge_runtime.cli.main import main
from edge_runtime.doors.mqtt.broker import broker_access
from edge_runtime.doors.mqtt.device_state import StateMessagesMaker
from edge_runtime.doors.mqtt.settings import MqttSettings
from edge_runtime.fleet.fleet import MAX_PAGE, Fleet, FleetEvent
from edge_runtime.fleet.history import FleetHistory
from edge_runtime.fleet.listener import FleetListener
from tests.contract.running_daemon import ANSWER_S
from tests.fakes.broker import Broker, needs_mosquitto
from tests.fakes.mqtt_peer import Peer
from tests.unit.doors.mqtt.test_device_state import models as many_models
from tests.unit.doors.mqtt.test_device_state import state as large_state

pytestmark = needs_mosquitto


@pytest.fixture
def own_broker(tmp_path) -> Iterator[Broker]:
    with Broker(tmp_path / "broker", config="max_queued_messages 200") as broker:
        yield broker


def say(peer: Peer, device: str, status: str = "online", **fields: Any) -> None:
    told = {"health": "ok", "profile": "orin", "runtime_version": "1.0", "groups": ["line-1"], "interval_s": 15.0}
    peer.publish(f"edge/{device}/status", status, 1, retain=True)
    peer.publish(f"edge/{device}/state", json.dumps({**told, **fields}), 1, retain=True)


def say_large(peer: Peer, device: str, count: int) -> None:
    """A device with so many models, as a daemon tells of them."""
    told = {"runtime_version": "1.0", "profile": "orin", "groups": ["line-1"], "interval_s": 15.0}
    messages = StateMessagesMaker().messages(large_state(many_models(count, p95_ms=4.0), **told))
    for number, part in messages.parts.items():
        peer.publish(f"edge/{device}/state/models/{number}", part, 1, retain=True)
    peer.publish(f"edge/{device}/state", messages.state, 1, retain=True)
    peer.publish(f"edge/{device}/status", "online", 1, retain=True)


def fleet_json(capsys: pytest.CaptureFixture[str], broker: Broker, *words: str) -> Any:
    assert main(["fleet", *words, "--mqtt", broker.url, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


class Seen:
    """Waits for changes of a fleet."""

    def __init__(self) -> None:
        import threading

        self._changed = threading.Condition()

    def tell(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait(self, listener: FleetListener, question: Any) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: listener.ask(question), ANSWER_S)


@contextmanager
def listening(broker: Broker) -> Iterator[tuple[FleetListener, Seen]]:
    seen = Seen()
    listener = FleetListener(broker_access(MqttSettings(url=broker.url)), "edge", on_change=seen.tell)
    listener.start()
    try:
        listener.wait_loaded(ANSWER_S)
        yield listener, seen
    finally:
        listener.close()


def conditions(fleet: Fleet) -> dict[str, str]:
    return {each["device"]: each["condition"] for each in fleet.devices(0.0, limit=1_000)["devices"]}


# ---- verbs ----------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_verbs_tell_of_all_that_devices_retain(own_broker, capsys):
    with Peer(own_broker.url) as peer:
        for index in range(250):
            models = {"digits": {"version": 1, "p95_ms": 5.0 + index, "rate_per_s": 1.0, "versions": []}}
            say(peer, f"cam-{index:03}", models=models)
        say(peer, "gate", "offline", groups=["line-2"])
        say_large(peer, "hub", 250)
        found = fleet_json(capsys, own_broker, "devices")
        assert found["count"] == 252
        assert found["devices"][0]["device"] == "cam-000"
        silent = fleet_json(capsys, own_broker, "devices", "--silent")
        assert [each["device"] for each in silent["devices"]] == ["gate"]
        assert fleet_json(capsys, own_broker, "devices", "--group", "line-2", "--search", "gat")["count"] == 1
        hub = fleet_json(capsys, own_broker, "device", "hub")
        assert {each["name"] for each in hub["models"]} == set(many_models(250))
        slow = {each["model"]: each for each in fleet_json(capsys, own_broker, "slow")}
        assert slow["digits"]["slowest"][0] == {"device": "cam-249", "p95_ms": 254.0, "version": 1}
        assert len(slow) == 251
        assert fleet_json(capsys, own_broker, "releases") == []
        overview = fleet_json(capsys, own_broker, "overview")
        assert (overview["devices"], overview["groups"]) == (252, {"line-1": 251, "line-2": 1})
        line_1, line_2 = fleet_json(capsys, own_broker, "groups")
        assert (line_1["group"], line_1["devices"], line_1["conditions"]) == ("line-1", 251, {"ok": 251})
        assert (line_2["group"], line_2["silent"], line_2["versions"]) == ("line-2", 1, {"1.0": 1})


def test_devices_beyond_a_page_are_all_listed_where_the_limit_lets_them(own_broker, capsys):
    with Peer(own_broker.url) as peer:
        for index in range(MAX_PAGE + 200):
            say(peer, f"cam-{index:04}")
        every = [f"cam-{index:04}" for index in range(MAX_PAGE + 200)]
        for limit in (50, MAX_PAGE + 100, 9_999):
            found = fleet_json(capsys, own_broker, "devices", "--limit", str(limit))
            assert (found["count"], found["offset"]) == (MAX_PAGE + 200, 0)
            assert [each["device"] for each in found["devices"]] == every[:limit]
    assert fleet_json(capsys, own_broker, "devices", "--search", "nobody")["devices"] == []


def test_groups_and_the_overview_are_printed_for_people(own_broker, capsys):
    with Peer(own_broker.url) as peer:
        say(peer, "cam")
        say(peer, "gate", health="degraded", groups=[], runtime_version="2.0")
    assert main(["fleet", "groups", "--mqtt", own_broker.url]) == 0
    printed = capsys.readouterr().out
    assert "(none)" in printed
    assert "2.0 1" in printed
    assert main(["fleet", "overview", "--mqtt", own_broker.url]) == 0
    printed = capsys.readouterr().out
    assert "2 devices of mqtt://" in printed
    assert "ok 1, degraded 1" in printed


def test_history_is_read_from_the_file_of_a_page_that_goes_on(tmp_path, capsys):
    history = FleetHistory(str(tmp_path / "fleet.db"))
    history.add([FleetEvent(float(index), "cam" if index % 2 else "gate", f"event {index}") for index in range(600)])
    assert main(["fleet", "history", "--history", str(tmp_path / "fleet.db"), "--limit", "550", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (len(found), found[0]) == (550, {"time": 599.0, "device": "cam", "what": "event 599"})
    history.add([FleetEvent(600.0, "gate", "event 600")])
    assert main(["fleet", "history", "--history", str(tmp_path / "fleet.db"), "--device", "gate", "--limit", "2"]) == 0
    printed = capsys.readouterr().out
    assert "event 600" in printed
    assert "event 599" not in printed
    history.close()


@pytest.mark.parametrize("content", [None, b"no database", b""])
def test_a_file_that_is_not_a_history_is_a_mistake_and_is_left_as_it_is(tmp_path, capsys, content):
    file = tmp_path / "fleet.db"
    if content is not None:
        file.write_bytes(content)
    assert main(["fleet", "history", "--history", str(file)]) == 1
    assert "wanted the file that `fleet --history` writes" in capsys.readouterr().err
    assert [path.read_bytes() for path in tmp_path.iterdir()] == ([] if content is None else [content])


def test_verbs_print_tables_without_obeying_what_devices_say(own_broker, capsys):
    with Peer(own_broker.url) as peer:
        say(peer, "cam", health="degraded", reasons=["\x1b[2J<b>bad</b>"], profile="\x07orin")
    assert main(["fleet", "--mqtt", own_broker.url, "devices"]) == 0
    printed = capsys.readouterr().out
    assert "\\x1b[2J<b>bad</b>" in printed
    assert "1 devices." in printed
    assert main(["fleet", "device", "cam", "--mqtt", own_broker.url]) == 0
    assert "\x07" not in capsys.readouterr().out


def test_a_broker_that_is_away_and_a_device_that_is_unknown_are_failures(own_broker, capsys):
    assert main(["fleet", "device", "nobody", "--mqtt", own_broker.url]) == 1
    assert "knows no device 'nobody'" in capsys.readouterr().err
    own_broker.stop()
    assert main(["fleet", "devices", "--mqtt", own_broker.url, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "no_daemon"
    assert main(["fleet", "devices"]) == 2


def test_a_wake_reaches_the_group_and_is_not_retained(own_broker, capsys):
    with Peer(own_broker.url) as peer:
        say(peer, "cam")
        peer.subscribe("fleet/+/wake", 1)
        assert fleet_json(capsys, own_broker, "wake", "line-1") == {"group": "line-1", "devices": 1}
        message = peer.next()
        assert (message.topic, message.payload, message.retain) == ("fleet/line-1/wake", b"", False)
        assert main(["fleet", "wake", "a/b", "--mqtt", own_broker.url]) == 2


def test_a_wake_that_the_broker_refuses_is_a_failure(tmp_path, capsys):
    acl = tmp_path / "acl"
    acl.write_text("topic read edge/#\n")
    acl.chmod(0o600)
    with Broker(tmp_path / "broker", config=f"acl_file {acl}") as broker:
        assert main(["fleet", "wake", "line-1", "--mqtt", broker.url]) == 1
    assert "does not let this client publish" in capsys.readouterr().err


# ---- following ------------------------------------------------------------------------------------------------------


def test_a_change_of_a_device_is_seen_as_it_happens(own_broker):
    with Peer(own_broker.url) as peer:
        say(peer, "cam")
        with listening(own_broker) as (listener, seen):
            assert listener.ask(conditions) == {"cam": "ok"}
            say(peer, "cam", health="degraded", reasons=["no backend"])
            seen.wait(listener, lambda fleet: fleet.devices(0.0)["devices"][0]["condition"] == "degraded")
            say(peer, "new", status="stopped")
            seen.wait(listener, lambda fleet: conditions(fleet).get("new") == "stopped")
            assert next(each.text for each in listener.ask(Fleet.take_events)) == "went from ok to degraded: no backend"


def test_a_broker_that_comes_back_tells_all_anew_and_devices_that_it_lost_are_gone(own_broker):
    with Peer(own_broker.url) as peer:
        say(peer, "stays")
        say(peer, "goes")
    with listening(own_broker) as (listener, seen):
        assert set(listener.ask(conditions)) == {"stays", "goes"}
        own_broker.stop()
        seen.wait(listener, lambda fleet: fleet.listening_s is None)
        assert listener.ask(conditions) == {"stays": "ok", "goes": "ok"}
        own_broker.restart()  # it keeps nothing of before
        with Peer(own_broker.url, reconnects=True) as peer:
            say(peer, "stays", health="degraded", reasons=["why"])
            say(peer, "came")
            seen.wait(listener, lambda fleet: fleet.listening_s is not None)
            seen.wait(listener, lambda fleet: conditions(fleet).get("came") == "ok")
            seen.wait(listener, lambda fleet: conditions(fleet)["stays"] == "degraded")
            for _ in range(2):  # a broker drops messages: one look in which a device is missing does not count
                listener.look_again()
            seen.wait(listener, lambda fleet: fleet.ids() == {"stays", "came"})


def test_strangers_on_a_broker_make_nothing_grow_and_stop_nothing(own_broker):
    with Peer(own_broker.url) as peer:
        say(peer, "cam")
        with listening(own_broker) as (listener, seen):
            peer.publish("edge/evil/status", "online", 1, retain=True)
            peer.publish("edge/evil/state", b"\xff" * 1_000_000, 1, retain=True)
            peer.publish("edge/evil/state", b"[" * 100_000, 1, retain=True)
            peer.publish("edge/<b>x<%2fb>/status", "online", 1, retain=True)
            peer.publish(f"edge/{'x' * 65}/state", "{}", 1, retain=True)
            peer.publish("edge/evil/state/models/123456", "{}", 1, retain=True)
            peer.publish("edge/nobody/state/models/1", "{}", 1, retain=True)
            for index in range(5_000):
                peer.publish(f"edge/not an id {index}/state", "{}")
            say(peer, "last")
            seen.wait(listener, lambda fleet: conditions(fleet).get("last") == "ok")
            assert listener.ask(conditions) == {"cam": "ok", "evil": "unknown", "last": "ok"}
            ignored = listener.ask(lambda fleet: fleet.overview(0.0))["ignored"]
            assert ignored["states"] == 2
            assert ignored["topics"] >= 5_002


def test_a_broker_of_mqtt_3_1_1_serves_as_well(own_broker):
    with Peer(own_broker.url) as peer:
        for index in range(300):
            say(peer, f"cam-{index}", pad="x" * 3_000)
    settings = MqttSettings(url=own_broker.url, protocol="3.1.1")
    listener = FleetListener(broker_access(settings), "edge")
    listener.start()
    try:
        listener.wait_loaded(ANSWER_S)
        assert listener.ask(lambda fleet: (len(fleet), len(fleet.without_state()))) == (300, 0)
    finally:
        listener.close()
