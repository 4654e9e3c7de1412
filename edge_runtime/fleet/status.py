"""What a device tells of itself: the retained `status` and `state` (DESIGN 5).

Owns: when they are published and what they say. `status` is one word; `state` is JSON for dashboards and fleets,
published when models change and at intervals. Thread: the MQTT transport's, except `ready` and `stopping`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from edge_runtime import __version__
from edge_runtime.clock import Clock
from edge_runtime.serving.servables import Servables, Standing, State
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.telemetry.metrics import Metrics
from edge_runtime.transports.outbox import Outgoing
from edge_runtime.wire.topics import DeviceTopics

ONLINE, STOPPED, OFFLINE = "online", "stopped", "offline"

NO_UPDATES: Mapping[str, Any] = {"state": "off"}

LOOK_S = 1.0
"""How often models and updates are looked at for a change that is told at once."""


def last_will(topics: DeviceTopics) -> Outgoing:
    """What the broker says of a device that it lost."""
    return _status(topics, OFFLINE)


class Presence:
    """One device's status and state. `retain` is the transport's.

    update: what the state says of updates, JSON's own types; asked once in LOOK_S on the transport's thread, so it must
    not block; None: there are no updates.
    """

    def __init__(
        self,
        topics: DeviceTopics,
        retain: Callable[[Outgoing], None],
        *,
        servables: Servables,
        metrics: Metrics,
        host: HostProbe,
        clock: Clock,
        profile: str,
        interval_s: float,
        update: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self._topics = topics
        self._retain = retain
        self._servables = servables
        self._metrics = metrics
        self._host = host
        self._clock = clock
        self._profile = profile
        self._interval_s = interval_s
        self._health = "starting"
        self._standings: list[Standing] = []
        self._update = update or (lambda: NO_UPDATES)
        self._updates: Mapping[str, Any] = NO_UPDATES
        self._rates = Rates(clock)
        self._look_due_s = 0.0
        self._state_due_s = 0.0
        self.on_models: Callable[[list[str]], None] = lambda _: None

    def ready(self) -> None:
        """The daemon answers from now on. Thread: any."""
        self._health = "ok"
        self._state_due_s = 0.0
        self._retain(_status(self._topics, ONLINE))

    def stopping(self) -> None:
        """It no longer does, on purpose. Thread: any."""
        self._health = "stopping"
        self._retain(_status(self._topics, STOPPED))

    def beat(self) -> None:
        """Publish the state when models or updates changed, or it is time."""
        now_s = self._clock.monotonic_s()
        if now_s < self._look_due_s or self._health == "stopping":
            return
        self._look_due_s = now_s + LOOK_S
        standings = self._servables.standings()
        updates = dict(self._update())
        if standings == self._standings and updates == self._updates and now_s < self._state_due_s:
            return
        has_other_models = _names(standings) != _names(self._standings)
        self._standings, self._updates = standings, updates
        self._state_due_s = now_s + self._interval_s
        if has_other_models:
            self.on_models(_names(standings))
        self._retain(Outgoing(self._topics.state, json.dumps(self.state()).encode(), qos=1, retain=True))

    def state(self) -> dict[str, Any]:
        """What is published: see README. Rates and latencies are of the time since the last look."""
        host = self._host.snapshot()
        temperatures = host["temperatures_celsius"].values()
        has_failed = any(standing.state is State.FAILED for standing in self._standings)
        return {
            "device_id": self._topics.device_id,
            "runtime_version": __version__,
            "profile": self._profile,
            "health": "degraded" if has_failed and self._health == "ok" else self._health,
            "models": self._models(),
            "update": self._updates,
            "temperature_celsius": max(temperatures, default=None),
            "memory_bytes": host["rss_bytes"],
            "cpu_cores": host["cpu_cores"],
        }

    def _models(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        rates = self._rates.since_last(self._metrics)
        for entry in self._servables.listing():
            name = entry.pop("name")
            model = found.setdefault(name, {"version": None, **rates.get(name, NO_RATE), "versions": []})
            model["versions"].append(entry)
            if entry["state"] == State.READY.value:
                model["version"] = max(entry["version"], model["version"] or 0)
        return found


NO_RATE = {"rate_per_s": 0.0, "p95_ms": None}


class Rates:
    """Answers a second and p95 of each model between two looks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looked_s = clock.monotonic_s()
        self._counts: dict[str, list[int]] = {}

    def since_last(self, metrics: Metrics) -> dict[str, dict[str, float | None]]:
        """By model; a model that answered nothing meanwhile has no p95."""
        now_s = self._clock.monotonic_s()
        elapsed_s, self._looked_s = max(now_s - self._looked_s, 1e-9), now_s
        found: dict[str, dict[str, float | None]] = {}
        for name, model in metrics.models().items():
            before = self._counts.get(name) or [0] * len(model.total.counts)
            between = model.total.since(before)
            self._counts[name] = [then + more for then, more in zip(before, between.counts, strict=True)]
            p95_s = between.quantile(0.95)
            found[name] = {
                "rate_per_s": round(between.count / elapsed_s, 3),
                "p95_ms": None if p95_s is None else round(p95_s * 1e3, 3),
            }
        return found


def _status(topics: DeviceTopics, word: str) -> Outgoing:
    return Outgoing(topics.status, word.encode(), qos=1, retain=True)


def _names(standings: list[Standing]) -> list[str]:
    return sorted({standing.model for standing in standings})
