"""Home Assistant's MQTT discovery, device form: the message by which it shows this device without set-up.

Owns: the message at `<prefix>/device/<device_id>/config` (www.home-assistant.io/integrations/mqtt, "Device discovery
payload"), and one at `…/<device_id>/<camera>/config` for each named camera, a device of its own there. Values come from
`status` and `state`, which doors/mqtt/device_status.py publishes in any case, and from the results of `[[publish]]`.
Thread: the MQTT transport's, except `start`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from edge_runtime import __version__
from edge_runtime.clock import Clock
from edge_runtime.doors.mqtt.publishing import ONLINE, DevicePublisher, DeviceTopics, check_prefix
from edge_runtime.site.publication import ShownResult
from edge_runtime.site.results import ResultPublisher

log = logging.getLogger(__name__)

BIRTH = b"online"
"""Home Assistant's birth message."""

SPREAD_S = 2.0
"""Home Assistant asks devices not to answer its birth all in the same moment."""

SAY_S = (1.0, 15.0)
"""Home Assistant subscribes to a new entity's topic within some 0.1 s of the message that describes it, later on a busy
machine; what is not retained is said again after these times."""

GONE_COMPONENTS = 1024
"""Components that left since the start and are removed with each message, since Home Assistant may have been away."""

HEALTH = ("starting", "ok", "degraded", "stopping")
"""All words of `health` in the state."""

MIB = 1 << 20


def birth_topic(prefix: str) -> str:
    """Home Assistant's own status topic. Raises ConfigError for a prefix that is not a topic."""
    return f"{check_prefix('mqtt.home_assistant', prefix)}/status"


def page_for_others(pages: Iterable[str], hostname: str) -> str | None:
    """The first of these URLs that opens on another machine, or None: loopback would be the viewer's own machine.

    hostname: in place of an address that stands for all of this machine's.
    """
    for page in pages:
        url = urlsplit(page)
        host = url.hostname or ""
        try:
            address = ip_address(host)
        except ValueError:
            if host and host != "localhost":
                return page
            continue
        if not address.is_loopback:
            return page.replace(url.netloc, f"{hostname}:{url.port}", 1) if address.is_unspecified else page
    return None


class Discovery:
    """One device in Home Assistant. Raises ConfigError for a prefix that is not a topic.

    has_temperature: whether this host has a temperature sensor. has_updates: whether this device looks for updates.
    results: the publisher of `[[publish]]`, whose results are shown; None without. entities: further components of the
    device by key, of other doors, which its state tells of.
    """

    takes_retained = True

    def __init__(
        self,
        prefix: str,
        publisher: DevicePublisher,
        *,
        profile: str,
        has_temperature: bool,
        clock: Clock,
        has_updates: bool = False,
        results: ResultPublisher | None = None,
        entities: Callable[[], Mapping[str, Mapping[str, Any]]] = dict,
        jitter: random.Random | None = None,
    ) -> None:
        self.topics: tuple[str, ...] = (birth_topic(prefix),)
        self._prefix = prefix
        self._device_topics = publisher.topics
        self._publisher = publisher
        self._profile = profile
        self._has_temperature = has_temperature
        self._has_updates = has_updates
        self._results = results
        self._entities = entities
        self._clock = clock
        self._jitter = jitter or random.Random()  # noqa: S311 (spreads devices; nothing secret)
        self._page: str | None = None
        self._described: dict[str, DescribedDevice] = {}
        self._again_s: float | None = None
        self._says_s: tuple[float, ...] = ()

    def start(self, models: list[str], page: str | None = None) -> None:
        """Publish for the first time. The transport repeats it with each connection. page: the device's web page."""
        self._page = page
        self.look(models)

    def look(self, models: list[str]) -> None:
        """Publish these models and the results of now, and remove what left; nothing where all is as it was."""
        shown = self._results.shown() if self._results is not None else ()
        devices = {
            "": device_components(
                self._device_topics,
                models,
                [each for each in shown if not each.camera],
                has_temperature=self._has_temperature,
                has_updates=self._has_updates,
                topic_of=self._publisher.topic_of,
            )
        }
        devices[""] |= {key: dict(component) for key, component in self._entities().items()}
        for each in shown:
            if each.camera:
                components = devices.setdefault(each.camera, {})
                devices[each.camera] = {**camera_components(self._device_topics, each), **components}
        for camera, components in devices.items():
            device = self._described.setdefault(camera, DescribedDevice())
            if device.change(components):
                self._publish(camera, device)
        for camera in self._described.keys() - devices.keys():
            del self._described[camera]
            self._publisher.retain(self._topic(camera), b"", qos=1)

    def message(self, payload: bytes) -> None:
        """Home Assistant's status changed: when it came up, publish again soon."""
        if payload == BIRTH and self._again_s is None:
            self._again_s = self._clock.monotonic_s() + SPREAD_S * self._jitter.random()

    def online(self) -> None:
        """Say values again: Home Assistant may have come up while there was no connection."""
        self._say_soon()

    def beat(self) -> None:
        """Publish again, and have values said again, when due."""
        now_s = self._clock.monotonic_s()
        if self._again_s is not None and now_s >= self._again_s:
            self._again_s = None
            for camera, device in self._described.items():
                self._publish(camera, device)
        if self._says_s and now_s >= self._says_s[0]:
            self._says_s = self._says_s[1:]
            if self._results is not None:
                self._results.say_again()

    def _publish(self, camera: str, device: DescribedDevice) -> None:
        message = device_message(
            self._device_topics, device.components, device.gone, self._profile, self._page, camera=camera
        )
        if reason := self._publisher.retain(self._topic(camera), json.dumps(message).encode(), qos=1):
            log.warning("this device cannot be shown in Home Assistant", extra={"reason": reason, "camera": camera})
        self._say_soon()

    def _say_soon(self) -> None:
        now_s = self._clock.monotonic_s()
        self._says_s = tuple(now_s + each for each in SAY_S)

    def _topic(self, camera: str) -> str:
        return f"{self._prefix}/device/{self._device_topics.device_id}/{f'{camera}/' if camera else ''}config"


class DescribedDevice:
    """One device as Home Assistant knows it. gone: components that left, and are removed with each message."""

    def __init__(self) -> None:
        self.components: dict[str, dict[str, Any]] = {}
        self.gone: dict[str, str] = {}

    def change(self, components: dict[str, dict[str, Any]]) -> bool:
        """Take the components of now. Return whether they are others than before."""
        if components == self.components:
            return False
        for key in self.components.keys() - components.keys():
            self.gone[key] = self.components[key]["platform"]
        for key in components:
            self.gone.pop(key, None)
        while len(self.gone) > GONE_COMPONENTS:
            del self.gone[next(iter(self.gone))]
        self.components = components
        return True


def device_message(
    topics: DeviceTopics,
    components: Mapping[str, Mapping[str, Any]],
    gone: Mapping[str, str],
    profile: str,
    page: str | None = None,
    *,
    camera: str = "",
) -> dict[str, Any]:
    """The whole message. gone: components to remove, with their platforms: one with nothing else is removed.

    camera: the name of the device's camera that it is about; empty: the device itself.
    """
    device = _id("edge", topics.device_id)
    link = {} if page is None else {"configuration_url": page}
    itself = {"identifiers": [device], "name": topics.device_id}
    if camera:
        itself = {
            "identifiers": [f"{device}_{_id('camera', camera)}"],
            "name": f"{topics.device_id} {camera}",
            "via_device": device,
        }
    return {
        "device": {
            **itself,
            "manufacturer": "edge-runtime",
            "model": profile,
            "sw_version": __version__,
            **link,
        },
        "origin": {"name": "edge-runtime", "sw_version": __version__},
        "availability": [_availability(topics.status)],
        "state_topic": topics.state,
        "qos": 1,
        "components": {
            **{key: {**component, "unique_id": f"{device}_{key}"} for key, component in components.items()},
            **{key: {"platform": platform} for key, platform in gone.items()},
        },
    }


def device_components(
    topics: DeviceTopics,
    models: Iterable[str],
    results: Iterable[ShownResult] = (),
    *,
    has_temperature: bool,
    has_updates: bool = False,
    topic_of: Callable[[str], str] | None = None,
) -> dict[str, dict[str, Any]]:
    """All components of a device by key: its own, three or four a model, and those of its results.

    topic_of: the topic that tells of a model, by its name; None: the device's state tells of all.
    """
    components = {"online": _online(topics), **_host_components(has_temperature=has_temperature)}
    if has_updates:
        components["check"] = _check_button(topics)
    for model in models:
        found = _model_components(model)
        if has_updates:
            found[_id("update", model)] = _update(model)
        topic = topic_of(model) if topic_of is not None else topics.state
        place = {} if topic == topics.state else {"state_topic": topic}
        components |= {key: {**place, **component} for key, component in found.items()}
    for result in results:
        components |= _result_components(topics, result)
    return components


def camera_components(topics: DeviceTopics, result: ShownResult) -> dict[str, dict[str, Any]]:
    """The components of a named camera's device by key: whether it gives pictures, and those of one of its results."""
    assert result.source is not None
    online = {
        "platform": "binary_sensor",
        "name": "Connection",
        "device_class": "connectivity",
        "entity_category": "diagnostic",
        "state_topic": topics.state,
        "value_template": _source_template(result.source, "'ON' if state == 'online' else 'OFF'"),
    }
    return {_id("camera", result.camera): online, **_result_components(topics, result)}


# ---- components -----------------------------------------------------------------------------------------------------


def _online(topics: DeviceTopics) -> dict[str, Any]:
    """Whether the device is connected: the one component that stays available without it."""
    return {
        "platform": "binary_sensor",
        "name": "Connection",
        "device_class": "connectivity",
        "entity_category": "diagnostic",
        "state_topic": topics.status,
        "value_template": _is_online("ON", "OFF"),
        "availability": [],
    }


def _host_components(*, has_temperature: bool) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {
        "health": {
            "platform": "sensor",
            "name": "Health",
            "entity_category": "diagnostic",
            "device_class": "enum",
            "options": list(HEALTH),
            "value_template": "{{ value_json.health }}",
        },
        "memory": {
            **_number("Memory", "MiB", f"{{{{ (value_json.memory_bytes or 0) / {MIB} }}}}", decimals=0),
            "device_class": "data_size",
            "entity_category": "diagnostic",
        },
    }
    if has_temperature:
        found["temperature"] = {
            **_number("Temperature", "°C", "{{ value_json.temperature_celsius }}", decimals=1),
            "device_class": "temperature",
            "entity_category": "diagnostic",
        }
    return found


def _model_components(model: str) -> dict[str, dict[str, Any]]:
    # A model's name is letters, digits, '.', '_' and '-', so it needs no escape between quotes.
    value = f"{{{{ value_json.models.get('{model}', {{}}).get('%s') }}}}"
    return {
        _id("version", model): {
            "platform": "sensor",
            "name": f"{model} version",
            "value_template": value % "version",
        },
        _id("rate", model): _number(f"{model} rate", "1/s", value % "rate_per_s", decimals=1),
        _id("p95", model): {
            **_number(f"{model} p95", "ms", value % "p95_ms", decimals=2),
            "device_class": "duration",
        },
    }


def _update(model: str) -> dict[str, Any]:
    """Versions of a model; without a command to install: only the control endpoint installs."""
    # What is not known is left out, since Home Assistant takes text there only.
    return {
        "platform": "update",
        "name": f"{model} update",
        "entity_category": "diagnostic",
        "value_template": (
            f"{{% set said = value_json.models.get('{model}', {{}}) %}}{{% set known = {{}} %}}"
            "{% if said.get('version') %}{% set known = dict(installed_version=said.version|string) %}{% endif %}"
            "{% if said.get('latest') %}{% set known = dict(known, latest_version=said.latest|string) %}{% endif %}"
            "{{ known | to_json }}"
        ),
    }


def _check_button(topics: DeviceTopics) -> dict[str, Any]:
    return {
        "platform": "button",
        "name": "Look for updates",
        "device_class": "update",
        "entity_category": "config",
        "command_topic": topics.check_update,
        "payload_press": "check",
        "retain": False,
    }


# ---- results --------------------------------------------------------------------------------------------------------

MOST_STATE = 255
"""Characters of a state in Home Assistant (homeassistant/const.py, MAX_LENGTH_STATE_STATE)."""

_FOUND = (
    "{% set said = (value_json.get('answers') or [value_json])[0] %}"
    "{% set found = said.get('classes') or said.get('boxes') or said.get('masks') or said.get('keypoints') or "
    "said.get('tags') or [] %}"
)
"""Sets `found` to the classes or things of an answer, or of the first of several, best first; tags are in order."""


def _result_components(topics: DeviceTopics, result: ShownResult) -> dict[str, dict[str, Any]]:
    """Keys have the model's name and a digest of the topic: it distinguishes two rules of one model."""
    model, topic, name = result.model, result.topic, result.name or result.model
    found: dict[str, dict[str, Any]] = {}
    if result.has_labels:
        template = _FOUND + "{{ found[0].label if found else none if 'outputs' in said else 'nothing' }}"
        found[_result_id("label", model, topic)] = {
            "platform": "sensor",
            "name": f"{name} label",
            "value_template": template,
        }
        template = _FOUND + "{{ found[0].score * 100 if found else none }}"
        found[_result_id("score", model, topic)] = _number(f"{name} score", "%", template, decimals=1)
    if result.counts:
        found[_result_id("count", model, topic)] = {
            "platform": "sensor",
            "name": f"{name} count",
            "state_class": "measurement",
            "value_template": _FOUND + "{{ none if 'outputs' in said else found | length }}",
        }
    if result.unit is not None:
        found[_result_id("number", model, topic)] = {
            "platform": "sensor",
            "name": f"{name} number",
            "state_class": "measurement",
            "value_template": _FOUND + "{{ said.get('number', {}).get('value') }}",
            **({"unit_of_measurement": result.unit} if result.unit else {}),
        }
    if result.has_text:
        found[_result_id("text", model, topic)] = {
            "platform": "sensor",
            "name": f"{name} text",
            "value_template": _FOUND + f"{{{{ said.get('text', '')[:{MOST_STATE}] }}}}",
        }
    for value in result.values:
        of_name = f"{{% for each in value_json.outputs if each.name == {json.dumps(value.name)} %}}"
        found[_result_id("value", model, topic, value.name)] = {
            "platform": "sensor",
            "name": f"{name} {value.name}",
            "value_template": of_name + "{{ each.data[0] }}{% endfor %}",
            **({"state_class": "measurement"} if value.is_number else {}),
        }
    for key, entity in result.entities.items():
        found[_result_id(key, model, topic)] = {**entity, "name": f"{name} {entity['name']}"}
    components = {key: {"state_topic": topic, **component} for key, component in found.items()}
    if result.picture_topic is not None:
        components[_result_id("picture", model, result.picture_topic)] = {
            "platform": "image",
            "name": f"{name} picture",
            "image_topic": result.picture_topic,
            "content_type": "image/jpeg",
        }
    if result.source is not None:  # what a lost camera showed last is not so now
        template = _source_template(result.source, "'offline' if state == 'lost' else 'online'")
        both = [_availability(topics.status), {"topic": topics.state, "value_template": template}]
        for component in components.values():
            component |= {"availability": both, "availability_mode": "all"}
    return components


def _source_template(source: tuple[str, str], word: str) -> str:
    """A template that reads the `state` of a source in the device's state. Its name is text of Jinja as it is of JSON.

    source: the table of its kind, and its name there. word: an expression of `state`.
    """
    table, name = source
    return (
        f"{{% set state = value_json.get('{table}', {{}}).get({json.dumps(name)}, {{}}).get('state') %}}"
        f"{{{{ {word} }}}}"
    )


def _availability(topic: str) -> dict[str, str]:
    return {"topic": topic, "value_template": _is_online("online", "offline")}


def _result_id(kind: str, model: str, *where: str) -> str:
    digest = hashlib.sha256("\0".join(where).encode()).hexdigest()
    return f"{_id(kind, model)}_{digest[:8]}"


def _number(name: str, unit: str, template: str, *, decimals: int) -> dict[str, Any]:
    return {
        "platform": "sensor",
        "name": name,
        "unit_of_measurement": unit,
        "state_class": "measurement",
        "suggested_display_precision": decimals,
        "value_template": template,
    }


def _is_online(yes: str, no: str) -> str:
    """A template, since `stopped` is unavailable too and the payload options name only two words."""
    return f"{{{{ '{yes}' if value == '{ONLINE}' else '{no}' }}}}"


def _id(kind: str, name: str) -> str:
    """An id of letters, digits, '_' and '-', unique for each name: '_' becomes '__', and '.' becomes '_-'."""
    return f"{kind}_{name.replace('_', '__').replace('.', '_-')}"
