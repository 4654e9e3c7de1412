"""What Home Assistant is told of a device: names it can hold, models that come and go, and when it is told again."""

from __future__ import annotations

import json
import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.doors.mqtt.packets import Outgoing
from edge_runtime.doors.mqtt.publishing import DevicePublisher
from edge_runtime.doors.mqtt.topics import DeviceTopics
from edge_runtime.errors import ConfigError
from edge_runtime.site.discovery import (
    GONE_COMPONENTS,
    HEALTH,
    SPREAD_S,
    Discovery,
    device_components,
    device_message,
    page_for_others,
)
from edge_runtime.site.publication import ShownOutput, ShownResult
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
        self.clock, self.said = FakeClock(), 0
        sender = FakeSender()
        self.messages = sender.messages
        self.discovery = Discovery(
            "homeassistant",
            DevicePublisher(DeviceTopics("dev1"), sender),
            profile="generic",
            has_temperature=True,
            results=self,
            clock=self.clock,
            jitter=Always(jitter),
        )
        self.discovery.start(sorted(models))

    def shown(self) -> tuple[ShownResult, ...]:
        """No results are shown."""
        return ()

    def say_again(self) -> None:
        """Results are said again."""
        self.said += 1

    @property
    def components(self) -> dict[str, dict[str, Any]]:
        """Of the latest message."""
        found: dict[str, dict[str, Any]] = json.loads(self.messages[-1].payload)["components"]
        return found

    def birth(self, payload: bytes) -> None:
        self.discovery.message(payload)

    def is_gone(self, model: str) -> bool:
        return self.components[f"version_{model}"] == {"platform": "sensor"}


def message(device: str = "dev1", models: tuple[str, ...] = (), *, has_temperature: bool = False) -> dict[str, Any]:
    topics = DeviceTopics(device)
    return device_message(topics, device_components(topics, models, has_temperature=has_temperature), {}, "generic")


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


def test_devices_and_models_that_look_alike_are_distinguished():
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
    told.discovery.look(["b", "c"])
    assert told.is_gone("a")
    assert not told.is_gone("b")
    assert not told.is_gone("c")
    told.discovery.look(["c"])
    assert told.is_gone("a"), "whoever was away hears of it too"
    told.discovery.look(["a", "c"])
    assert not told.is_gone("a")
    assert told.is_gone("b")


def test_the_same_models_again_are_not_published_again():
    told = Told("b", "a")
    told.discovery.look(["a", "b"])
    assert len(told.messages) == 1


def test_models_that_come_and_go_for_ever_take_no_more_and_more_memory():
    told = Told()
    for index in range(GONE_COMPONENTS // 3 + 50):
        told.discovery.look([f"m{index}"])
    assert len(told.components) == 4 + 3 + GONE_COMPONENTS


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


def test_results_are_said_again_soon_after_a_message_and_once_more_for_a_busy_machine():
    told, counts = Told("a"), []
    for seconds in (0.5, 0.6, 5, 10, 60):
        told.clock.advance(seconds)
        told.discovery.beat()
        counts.append(told.said)
    assert counts == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("payload", [b"offline", b"", b"ONLINE", b"\xff" * 100])
def test_other_words_of_home_assistant_are_ignored(payload: bytes):
    told = Told("a", jitter=0.0)
    told.birth(payload)
    told.discovery.beat()
    assert len(told.messages) == 1


@pytest.mark.parametrize("prefix", ["", "a/+", "#", "$SYS", "/a", "a\n"])
def test_a_prefix_that_cannot_be_is_refused(prefix: str):
    publisher = DevicePublisher(DeviceTopics("dev1"), FakeSender())
    with pytest.raises(ConfigError, match=r"mqtt\.home_assistant"):
        Discovery(prefix, publisher, profile="generic", has_temperature=False, clock=FakeClock())


# ---- what Home Assistant's schema asks for ---------------------------------------------------------------------------

SHARED = {"state_topic", "qos", "availability"}
"""Options of the whole message that go into each component; those that a platform does not know are dropped."""

COMMON = {"platform", "name", "unique_id", "entity_category", "device_class", "value_template", "availability"}

OPTIONS: dict[str, tuple[set[str], set[str]]] = {
    "sensor": (
        {"state_topic"},
        COMMON | {"state_topic", "unit_of_measurement", "state_class", "suggested_display_precision", "options"},
    ),
    "binary_sensor": ({"state_topic"}, COMMON | {"state_topic"}),
    "button": (
        {"command_topic"},
        COMMON - {"value_template"} | {"command_topic", "payload_press", "retain"},
    ),
    "update": (set(), COMMON | {"state_topic"}),
    "image": ({"image_topic"}, COMMON - {"value_template"} | {"image_topic", "content_type"}),
}
"""By platform, what is required and what may be there: www.home-assistant.io/integrations/<platform>.mqtt."""

RESULTS = (
    ShownResult("a", "edge/dev1/result/a", has_labels=True, counts=True, picture_topic="edge/dev1/result/a/picture"),
    ShownResult("a", "site/a", has_labels=True),
    ShownResult(
        "b.c", "edge/dev1/result/b.c", values=(ShownOutput('odd "name" %}', True), ShownOutput("digit", False))
    ),
)


def whole() -> dict[str, Any]:
    topics = DeviceTopics("dev1")
    components = device_components(topics, ["a", "b.c"], RESULTS, has_temperature=True, has_updates=True)
    return device_message(topics, components, {"update_x": "update"}, "generic", "http://here:9100/metrics")


@pytest.mark.parametrize("key", [key for key in whole()["components"] if key != "update_x"])
def test_each_component_has_what_its_platform_requires_and_nothing_that_it_does_not_know(key: str):
    said = whole()
    component = said["components"][key]
    required, allowed = OPTIONS[component["platform"]]
    assert required <= component.keys() | (said.keys() & SHARED)
    assert component.keys() <= allowed
    assert re.fullmatch(r"[A-Za-z0-9_-]+", key)


def test_health_is_one_of_the_words_that_it_may_be():
    health = whole()["components"]["health"]
    assert (health["device_class"], health["options"]) == ("enum", list(HEALTH))
    assert "state_class" not in health, "Home Assistant refuses an enum that is measured"


def test_a_device_without_updates_has_no_update_and_no_button():
    assert {each["platform"] for each in message(models=("a",))["components"].values()} == {"sensor", "binary_sensor"}


def test_the_button_looks_for_updates_and_nothing_can_be_installed_from_there():
    components = whole()["components"]
    assert components["check"]["command_topic"] == "edge/dev1/command/check-update"
    assert components["check"]["retain"] is False, "retained commands are ignored"
    assert [key for key, each in components.items() if "command_topic" in each] == ["check"]


def test_two_rules_of_one_model_are_distinguished_and_each_is_read_where_it_is_published():
    labels = {key: each for key, each in whole()["components"].items() if key.startswith("label_a_")}
    assert sorted(each["state_topic"] for each in labels.values()) == ["edge/dev1/result/a", "site/a"]


def rendered(name: str, value: dict[str, Any]) -> str:
    """What a template makes of a message, by Jinja as Home Assistant has it, with its filter `to_json`."""
    jinja = pytest.importorskip("jinja2.sandbox", reason="Jinja is not installed")
    environment = jinja.ImmutableSandboxedEnvironment()
    environment.filters["to_json"] = json.dumps
    components = {each["name"]: each for each in whole()["components"].values() if "value_template" in each}
    text: str = environment.from_string(components[name]["value_template"]).render(value_json=value)
    return text


CAT = {"label": "cat", "index": 3, "score": 0.931}


@pytest.mark.parametrize(
    ("value", "label", "score", "count"),
    [
        ({"boxes": [{**CAT, "box": [1, 2, 3, 4]}, {**CAT, "label": "dog"}]}, "cat", "93.1", "2"),
        ({"classes": [CAT]}, "cat", "93.1", "1"),
        ({"answers": [{"boxes": [CAT]}, {"boxes": []}]}, "cat", "93.1", "1"),
        ({"boxes": []}, "nothing", "None", "0"),
        ({"outputs": [{"name": "y", "data": [1]}]}, "None", "None", "None"),
    ],
)
def test_templates_read_the_best_label_its_score_and_how_many(
    value: dict[str, Any], label: str, score: str, count: str
):
    said = [rendered(name, value) for name in ("a label", "a score", "a count")]
    assert [said[0], f"{float(said[1]):g}" if said[1] != "None" else said[1], said[2]] == [label, score, count]


def test_templates_read_single_values_whatever_their_name():
    value = {"outputs": [{"name": "digit", "data": [7]}, {"name": 'odd "name" %}', "data": [0.5]}]}
    assert rendered("b.c digit", value) == "7"
    assert rendered('b.c odd "name" %}', value) == "0.5"


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ({"a": {"version": 2, "latest": 3}}, {"installed_version": "2", "latest_version": "3"}),
        ({"a": {"version": None, "latest": None}}, {}),
        ({}, {}),
    ],
)
def test_an_update_reports_versions_as_text_and_leaves_out_what_is_not_known(
    models: dict[str, Any], expected: dict[str, str]
):
    assert json.loads(rendered("a update", {"models": models})) == expected


def test_a_link_is_given_only_where_others_can_open_it():
    assert whole()["device"]["configuration_url"] == "http://here:9100/metrics"
    assert "configuration_url" not in message()["device"]
    assert (
        page_for_others(["http://127.0.0.1:9100/metrics", "http://localhost:1/", "https://[::1]:8/v2"], "box") is None
    )
    assert page_for_others(["http://127.0.0.1:1/metrics", "http://0.0.0.0:8000/v2"], "box") == "http://box:8000/v2"
    assert page_for_others(["https://10.0.0.4:8000/v2"], "box") == "https://10.0.0.4:8000/v2"


def test_a_result_that_ends_is_removed_with_its_own_platform():
    results: list[ShownResult] = [RESULTS[0]]
    publisher: Any = SimpleNamespace(shown=lambda: tuple(results))
    sender = FakeSender()
    discovery = Discovery(
        "homeassistant",
        DevicePublisher(DeviceTopics("dev1"), sender),
        profile="generic",
        has_temperature=False,
        clock=FakeClock(),
        results=publisher,
    )
    discovery.start(["a"])
    results.clear()
    discovery.look(["a"])
    first, last = (json.loads(each.payload)["components"] for each in sender.messages)
    (picture,) = [key for key in first if key.startswith("picture_a_")]
    assert last[picture] == {"platform": "image"}
    assert first.keys() == last.keys()


def test_values_of_a_model_come_from_the_part_of_the_state_that_has_it() -> None:
    topics = DeviceTopics("dev1")
    places = {"far": topics.state_part(3), "near": topics.state}
    said = device_components(topics, ("far", "near"), has_temperature=False, has_updates=True, topic_of=places.get)
    for key in ("version_far", "rate_far", "p95_far", "update_far"):
        assert said[key]["state_topic"] == "edge/dev1/state/models/3"
        assert "state_topic" not in said[key.replace("far", "near")]
