"""What Home Assistant is told of a device: names it can hold, models that come and go, and when it is told again."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.errors import ConfigError
from edge_runtime.fleet.discovery import GONE_MODELS, SPREAD_S, Discovery, device_message
from edge_runtime.transports.mqtt_packets import Inbound, Outgoing
from edge_runtime.wire.topics import DeviceTopics
from tests.fakes.clock import FakeClock

MODEL_NAMES = st.from_regex(re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII), fullmatch=True)
DEVICE_IDS = st.from_regex(re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII), fullmatch=True)


class FakeSender:
    """Keeps retained messages."""

    packet_limit = 1 << 20
    is_online = True

    def __init__(self) -> None:
        self.messages: list[Outgoing] = []

    def post(self, message: Outgoing) -> None:
        raise AssertionError("discovery is retained")

    def retain(self, message: Outgoing) -> None:
        self.messages.append(message)


class Always(random.Random):
    """Draws the same share each time."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def random(self) -> float:
        return self.share


class Told:
    """A discovery of device dev1, what it published, and the clock it goes by."""

    def __init__(self, *models: str, jitter: float = 0.5) -> None:
        self.clock = FakeClock()
        sender = FakeSender()
        self.messages = sender.messages
        self.discovery = Discovery(
            "homeassistant",
            DeviceTopics("dev1"),
            sender,
            profile="generic",
            has_temperature=True,
            clock=self.clock,
            jitter=Always(jitter),
        )
        self.discovery.start(sorted(models))

    @property
    def components(self) -> dict[str, dict[str, Any]]:
        """Of the latest message."""
        found: dict[str, dict[str, Any]] = json.loads(self.messages[-1].payload)["components"]
        return found

    def birth(self, payload: bytes) -> None:
        self.discovery.message(Inbound("homeassistant/status", payload, 0, retain=False))

    def is_gone(self, model: str) -> bool:
        return self.components[f"version_{model}"] == {"platform": "sensor"}


def message(device: str = "dev1", models: tuple[str, ...] = (), *, has_temperature: bool = False) -> dict[str, Any]:
    return device_message(DeviceTopics(device), models, (), profile="generic", has_temperature=has_temperature)


def unique_ids(said: dict[str, Any]) -> list[str]:
    return [component["unique_id"] for component in said["components"].values()]


def test_it_is_retained_at_least_once_where_home_assistant_looks():
    told = Told("a")
    (published,) = told.messages
    assert (published.topic, published.qos, published.retain) == ("homeassistant/device/dev1/config", 1, True)


@given(DEVICE_IDS, st.lists(MODEL_NAMES, unique=True, max_size=4))
def test_ids_have_characters_that_home_assistant_allows_and_never_meet(device: str, models: list[str]):
    said = message(device, tuple(models))
    assert len(set(unique_ids(said))) == len(unique_ids(said)) == 3 + 3 * len(models)
    for text in (*said["components"], *unique_ids(said)):
        assert re.fullmatch(r"[A-Za-z0-9_-]+", text)


@given(DEVICE_IDS, DEVICE_IDS, st.lists(MODEL_NAMES, max_size=3), st.lists(MODEL_NAMES, max_size=3))
def test_two_devices_never_share_an_id(first: str, second: str, models: list[str], others: list[str]):
    if first != second:
        shared = set(unique_ids(message(first, tuple(models)))) & set(unique_ids(message(second, tuple(others))))
        assert not shared


def test_devices_and_models_that_look_alike_are_told_apart():
    assert not set(unique_ids(message("x", ("online",)))) & set(unique_ids(message("x_version")))
    names = ("a.b", "a_b", "a-b", "a__b", "a_-b")
    assert len(message(models=names)["components"]) == 3 + 3 * len(names)


def test_a_temperature_is_shown_only_where_the_host_has_one():
    assert "temperature" not in message()["components"]
    assert message(has_temperature=True)["components"]["temperature"]["unit_of_measurement"] == "°C"


def test_only_the_connection_is_available_when_the_device_is_not():
    said = message(models=("a",))
    assert said["components"]["online"]["availability"] == []
    assert [key for key, component in said["components"].items() if "availability" in component] == ["online"]
    assert "'online' if value == 'online' else 'offline'" in said["availability"][0]["value_template"]


def test_a_model_that_leaves_is_removed_and_may_come_back():
    told = Told("a", "b")
    told.discovery.models_changed(["b", "c"])
    assert told.is_gone("a")
    assert not told.is_gone("b")
    assert not told.is_gone("c")
    told.discovery.models_changed(["c"])
    assert told.is_gone("a"), "whoever was away hears of it too"
    told.discovery.models_changed(["a", "c"])
    assert not told.is_gone("a")
    assert told.is_gone("b")


def test_the_same_models_again_are_not_published_again():
    told = Told("b", "a")
    told.discovery.models_changed(["a", "b"])
    assert len(told.messages) == 1


def test_models_that_come_and_go_for_ever_take_no_more_and_more_memory():
    told = Told()
    for index in range(GONE_MODELS + 50):
        told.discovery.models_changed([f"m{index}"])
    assert len(told.components) == 4 + 3 + 3 * GONE_MODELS


def test_a_birth_is_answered_once_after_a_wait_of_the_devices_own():
    told = Told("a", jitter=0.5)
    told.birth(b"online")
    told.birth(b"online")
    told.discovery.beat()
    assert len(told.messages) == 1
    told.clock.advance(SPREAD_S * 0.5)
    told.discovery.beat()
    told.discovery.beat()
    assert len(told.messages) == 2
    assert told.messages[0].payload == told.messages[1].payload


@pytest.mark.parametrize("payload", [b"offline", b"", b"ONLINE", b"\xff" * 100])
def test_other_words_of_home_assistant_are_ignored(payload: bytes):
    told = Told("a", jitter=0.0)
    told.birth(payload)
    told.discovery.beat()
    assert len(told.messages) == 1


@pytest.mark.parametrize("prefix", ["", "a/+", "#", "$SYS", "/a", "a\n"])
def test_a_prefix_that_cannot_be_is_refused(prefix: str):
    with pytest.raises(ConfigError, match=r"mqtt\.home_assistant"):
        Discovery(
            prefix, DeviceTopics("dev1"), FakeSender(), profile="generic", has_temperature=False, clock=FakeClock()
        )
