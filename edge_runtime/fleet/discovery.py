"""Home Assistant's MQTT discovery, device form: the message by which it shows this device without set-up.

Owns: the message at `<prefix>/device/<device_id>/config` (www.home-assistant.io/integrations/mqtt, "Device discovery
payload"). Its values come from `status` and `state`, which status.py publishes in any case. Thread: the MQTT
transport's, except `start`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

from edge_runtime import __version__
from edge_runtime.clock import Clock
from edge_runtime.transports.mqtt_packets import Inbound, Outgoing
from edge_runtime.transports.mqtt_transport import Sender
from edge_runtime.wire.topics import DeviceTopics, check_prefix

ONLINE = "online"
"""The device's status while it answers, and Home Assistant's birth message."""

SPREAD_S = 2.0
"""Home Assistant asks devices not to answer its birth all in the same moment."""

GONE_MODELS = 256
"""Models that left since the start and are removed with each message, since Home Assistant may have been away."""

MIB = 1 << 20


def birth_topic(prefix: str) -> str:
    """Home Assistant's own status topic. Raises ConfigError for a prefix that is no topic."""
    return f"{check_prefix('mqtt.home_assistant', prefix)}/status"


class Discovery:
    """One device in Home Assistant. Raises ConfigError for a prefix that is no topic.

    has_temperature: whether this host has a temperature sensor.
    """

    takes_retained = True

    def __init__(
        self,
        prefix: str,
        topics: DeviceTopics,
        sender: Sender,
        *,
        profile: str,
        has_temperature: bool,
        clock: Clock,
        jitter: random.Random | None = None,
    ) -> None:
        self.topics: tuple[str, ...] = (birth_topic(prefix),)
        self._config_topic = f"{prefix}/device/{topics.device_id}/config"
        self._device_topics = topics
        self._sender = sender
        self._profile = profile
        self._has_temperature = has_temperature
        self._clock = clock
        self._jitter = jitter or random.Random()  # noqa: S311 (spreads devices; nothing secret)
        self._models: list[str] = []
        self._gone: dict[str, None] = {}
        self._again_s: float | None = None

    def start(self, models: list[str]) -> None:
        """Publish for the first time. The transport repeats it with each connection."""
        self._models = models
        self._publish()

    def models_changed(self, models: list[str]) -> None:
        """Publish these models, and remove those that left."""
        if models == self._models:
            return
        for name in set(self._models) - set(models):
            self._gone[name] = None
        for name in models:
            self._gone.pop(name, None)
        while len(self._gone) > GONE_MODELS:
            del self._gone[next(iter(self._gone))]
        self._models = models
        self._publish()

    def message(self, message: Inbound) -> None:
        """Home Assistant's status changed: when it came up, publish again soon."""
        if message.payload == ONLINE.encode() and self._again_s is None:
            self._again_s = self._clock.monotonic_s() + SPREAD_S * self._jitter.random()

    def online(self) -> None:
        """Nothing: the transport publishes retained messages again by itself."""

    def beat(self) -> None:
        """Publish again when due."""
        if self._again_s is not None and self._clock.monotonic_s() >= self._again_s:
            self._again_s = None
            self._publish()

    def _publish(self) -> None:
        message = device_message(
            self._device_topics, self._models, self._gone, profile=self._profile, has_temperature=self._has_temperature
        )
        self._sender.retain(Outgoing(self._config_topic, json.dumps(message).encode(), qos=1, retain=True))


def device_message(
    topics: DeviceTopics, models: Iterable[str], gone: Iterable[str], *, profile: str, has_temperature: bool
) -> dict[str, Any]:
    """The whole message. Each model has three components; one with nothing but a platform is removed."""
    components = {"online": _online(topics), **_host_components(has_temperature=has_temperature)}
    for model in models:
        components |= _model_components(model)
    for model in gone:
        components |= {key: {"platform": "sensor"} for key in _model_components(model)}
    device = _id("edge", topics.device_id)
    return {
        "device": {
            "identifiers": [device],
            "name": topics.device_id,
            "manufacturer": "edge-runtime",
            "model": profile,
            "sw_version": __version__,
        },
        "origin": {"name": "edge-runtime", "sw_version": __version__},
        "availability": [{"topic": topics.status, "value_template": _is_online("online", "offline")}],
        "state_topic": topics.state,
        "qos": 1,
        "components": {
            key: {**component, "unique_id": f"{device}_{key}"} if len(component) > 1 else component
            for key, component in components.items()
        },
    }


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
