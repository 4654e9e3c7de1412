"""Home Assistant as far as MQTT discovery goes: devices, entities, their availability and states, from a real broker.

As its integration does (www.home-assistant.io/integrations/mqtt): it says `online` on its status topic when it has
subscribed, reads device discovery at `<prefix>/device/[<node>/]<object>/config`, subscribes to what an entity names
when it is discovered, and makes its state by the entity's template, with Jinja. A new one knows nothing of older ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import jinja2.sandbox

from tests.fakes.mqtt_peer import ANSWER_S, Peer

if TYPE_CHECKING:
    from typing_extensions import Self

UNKNOWN, UNAVAILABLE = "unknown", "unavailable"
ROOT_OPTIONS = ("availability", "availability_mode", "state_topic", "qos")
"""Options of the whole message that count for a component that does not have them."""


class HomeAssistant:
    """One run of it. devices: by identifier, as its message describes it. entities: by unique id."""

    def __init__(self, url: str, prefix: str = "homeassistant") -> None:
        self.devices: dict[str, dict[str, Any]] = {}
        self.entities: dict[str, dict[str, Any]] = {}
        self._prefix = prefix
        self._of_topic: dict[str, dict[str, str]] = {}  # by config topic, identifier and unique ids
        self._values: dict[str, bytes] = {}
        self._jinja = jinja2.sandbox.ImmutableSandboxedEnvironment()
        self._jinja.filters["to_json"] = json.dumps
        self._peer = Peer(url)

    def __enter__(self) -> Self:
        self._peer.connect()
        for level in ("+", "+/+"):
            self._peer.subscribe(f"{self._prefix}/device/{level}/config", 1)
        self._peer.publish(f"{self._prefix}/status", b"online", 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._peer.close()

    def wait(self, is_so: Callable[[], bool]) -> None:
        """Take messages until something is so."""
        end_s = time.monotonic() + ANSWER_S
        while not is_so():
            assert time.monotonic() < end_s, self.states()
            message = self._peer.next()
            if message.topic.startswith(f"{self._prefix}/device/"):
                self._discover(message.topic, message.payload)
            else:
                self._values[message.topic] = message.payload

    def states(self) -> dict[str, str]:
        """The state of each entity, by its device's name and its own."""
        return {
            f"{self.devices[entity['device']]['name']}: {entity['name']}": self._state(entity)
            for entity in self.entities.values()
        }

    def _discover(self, topic: str, payload: bytes) -> None:
        known = self._of_topic.pop(topic, {})
        for unique_id in known.values():
            self.entities.pop(unique_id, None)
        if not payload:
            return
        said = json.loads(payload)
        assert said["origin"]["name"]
        identifier = said["device"]["identifiers"][0]
        self.devices[identifier] = said["device"]
        found = self._of_topic[topic] = {}
        for key, component in said["components"].items():
            if component.keys() == {"platform"}:
                continue
            shared = {name: said[name] for name in ROOT_OPTIONS if name in said}
            entity = {**shared, **component, "device": identifier}
            assert entity["unique_id"] not in self.entities, "one id, one entity"
            self.entities[entity["unique_id"]] = entity
            found[key] = entity["unique_id"]
            for wanted in self._topics_of(entity):
                self._peer.subscribe(wanted, 1)

    def _topics_of(self, entity: Mapping[str, Any]) -> list[str]:
        topics = [each["topic"] for each in entity.get("availability", ())]
        return [*topics, *(entity[key] for key in ("state_topic", "image_topic") if key in entity)]

    def _state(self, entity: Mapping[str, Any]) -> str:
        there = [self._render(each, self._values.get(each["topic"])) for each in entity.get("availability", ())]
        assert entity.get("availability_mode", "latest") == "all" or len(there) <= 1
        if any(word != "online" for word in there):
            return UNAVAILABLE
        if "image_topic" in entity:
            return "picture" if self._values.get(entity["image_topic"]) else UNKNOWN
        if "value_template" not in entity:
            return UNKNOWN
        said = self._render(entity, self._values.get(entity["state_topic"]))
        return UNKNOWN if said in (None, "None", "") else str(said)

    def _render(self, entity: Mapping[str, Any], payload: bytes | None) -> str | None:
        if payload is None:
            return None
        text = payload.decode()
        values: dict[str, Any] = {"value": text}
        if text[:1] in "{[" and text:
            values["value_json"] = json.loads(text)
        return self._jinja.from_string(entity["value_template"]).render(**values)
