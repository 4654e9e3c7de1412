"""The device's retained `status` and `state` on a broker.

Owns: their content, and when they are published. `status` is one word; `state` is JSON for dashboards and fleets,
published when models or updates change and at intervals; device_state.py says what of it goes into parts. Thread: the
MQTT transport's, except `ready` and `stopping`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from edge_runtime import __version__
from edge_runtime.clock import Clock
from edge_runtime.doors.mqtt.device_state import StateMessagesMaker, model_totals, part_of
from edge_runtime.doors.mqtt.identity import UpdateSource
from edge_runtime.doors.mqtt.packets import Outgoing
from edge_runtime.doors.mqtt.topics import OFFLINE, ONLINE, STOPPED, DeviceTopics
from edge_runtime.doors.mqtt.transport import Sender
from edge_runtime.models.model_table import ModelTable, VersionState, VersionStatus
from edge_runtime.sandbox.landlock import guard
from edge_runtime.telemetry.host import HostProbe
from edge_runtime.telemetry.metrics import Histogram, Metrics

NO_UPDATES: Mapping[str, Any] = {"state": "off"}

SourceTables = Mapping[str, Mapping[str, Mapping[str, str]]]
"""By table, such as `cameras`, and by name: `state` and `reason` of each source."""

LOOK_S = 1.0
"""Time between two checks of models and updates for a change, which is published at once."""


def last_will(topics: DeviceTopics) -> Outgoing:
    """The status that the broker publishes when it loses the device."""
    return _status(topics, OFFLINE)


class StatusPublisher:
    """Publishes one device's status and state.

    updates: None for a device without updates. Its summary is read once in LOOK_S, and so is the result of `sources`:
    by table, the state of each camera and the like, and the reason of a loss. groups: of devices, that this one belongs
    to. now_utc: the host's date.
    """

    topics: tuple[str, ...] = ()
    takes_retained = False

    def __init__(
        self,
        topics: DeviceTopics,
        sender: Sender,
        *,
        table: ModelTable,
        metrics: Metrics,
        host: HostProbe,
        clock: Clock,
        profile: str,
        interval_s: float,
        updates: UpdateSource | None = None,
        sources: Callable[[], SourceTables] = dict,
        groups: Sequence[str] = (),
        now_utc: Callable[[], datetime] = lambda: datetime.now(timezone.utc),
    ) -> None:
        self._device_topics = topics
        self._sender = sender
        self._table = table
        self._metrics = metrics
        self._host = host
        self._clock = clock
        self._profile = profile
        self._interval_s = interval_s
        self._health = "starting"
        self._statuses: list[VersionStatus] = []
        self._updates = updates
        self._summary: Mapping[str, Any] = NO_UPDATES
        self._read_sources = sources
        self._sources: SourceTables = {}
        self._groups = groups
        self._sandbox = guard().as_json()
        self._now_utc = now_utc
        self._rates = Rates(clock)
        self._maker = StateMessagesMaker()
        self._condition: tuple[str, Sequence[str]] = ("", ())
        self._since_utc = ""
        self._look_due_s = 0.0
        self._state_due_s = 0.0

    def ready(self) -> None:
        """Publish `online`: the daemon answers from now on. Thread: any."""
        self._health = "ok"
        self._state_due_s = 0.0
        self._sender.retain(_status(self._device_topics, ONLINE))

    def stopping(self) -> None:
        """Publish `stopped`: the daemon ends on purpose. Thread: any."""
        self._health = "stopping"
        self._sender.retain(_status(self._device_topics, STOPPED))

    def message(self, payload: bytes) -> None:
        """Nothing: it listens to no topic."""

    def online(self) -> None:
        """Nothing: the transport publishes retained messages again by itself."""

    def beat(self) -> None:
        """Publish the state when models or updates changed, or the interval is over."""
        now_s = self._clock.monotonic_s()
        if now_s < self._look_due_s or self._health == "stopping":
            return
        self._look_due_s = now_s + LOOK_S
        statuses = self._table.statuses()
        summary = NO_UPDATES if self._updates is None else dict(self._updates.summary())
        sources = self._read_sources()
        known = (self._statuses, self._summary, self._sources)
        if (statuses, summary, sources) == known and now_s < self._state_due_s:
            return
        self._statuses, self._summary, self._sources = statuses, summary, sources
        self._state_due_s = now_s + self._interval_s
        topics, messages = self._device_topics, self._maker.messages(self.state(), self._sources)
        for number, part in messages.parts.items():
            self._sender.retain(Outgoing(topics.state_part(number), part, qos=1, retain=True))
        self._sender.retain(Outgoing(topics.state, messages.state, qos=1, retain=True))

    def topic_of(self, model: str) -> str:
        """Return the topic whose JSON has a model in `models`: the state, or one of its parts. Thread: any."""
        return self._device_topics.state_part(part_of(model)) if self._maker.is_in_parts else self._device_topics.state

    def state(self) -> dict[str, Any]:
        """The state, as JSON values. Rates and latencies are of the time since the last call."""
        temperatures = self._host.temperatures().values()
        reasons = [*map(_failure_of, filter(_has_failed, self._statuses)), *_losses_of(self._sources)]
        condition = "degraded" if reasons and self._health == "ok" else self._health, reasons
        now_utc = self._now_utc().isoformat(timespec="seconds")
        if condition != self._condition:
            self._condition, self._since_utc = condition, now_utc
        models, total_p95_ms = self._models()
        return {
            "device_id": self._device_topics.device_id,
            "runtime_version": __version__,
            "profile": self._profile,
            "groups": self._groups_now(),
            "time": now_utc,
            "interval_s": self._interval_s,
            "health": condition[0],
            "reasons": reasons,
            "since": self._since_utc,
            "cameras": {},
            **self._sources,
            "totals": {**model_totals(models), "p95_ms": total_p95_ms},
            "models": models,
            "update": self._summary,
            "sandbox": self._sandbox,
            "temperature_celsius": max(temperatures, default=None),
            "memory_bytes": self._host.rss_bytes(),
            "cpu_cores": round(self._host.cpu_cores(), 4),
        }

    def _groups_now(self) -> list[str]:
        """Return the groups: of the configuration, and the one that updates follow, which may change meanwhile."""
        followed = self._summary.get("group")
        return list(dict.fromkeys((*self._groups, *((followed,) if followed else ()))))

    def _models(self) -> tuple[dict[str, Any], float | None]:
        """Return the models by name, and the p95 of all their answers since the last call."""
        found: dict[str, Any] = {}
        rates, total_p95_ms = self._rates.since_last(self._metrics)
        for entry in self._table.listing():
            name = entry.pop("name")
            model = found.setdefault(name, {"version": None, **rates.get(name, NO_RATE), "versions": []})
            model["versions"].append(entry)
            if entry["state"] == VersionState.READY.value:
                model["version"] = max(entry["version"], model["version"] or 0)
        latest = _latest_versions(self._summary)
        for name, model in found.items():
            model["latest"] = latest.get(name, model["version"])
        return found, total_p95_ms


NO_RATE = {"rate_per_s": 0.0, "p95_ms": None}


class Rates:
    """Answers a second and p95 of each model between two calls."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_s = clock.monotonic_s()
        self._counts: dict[str, list[int]] = {}

    def since_last(self, metrics: Metrics) -> tuple[dict[str, dict[str, float | None]], float | None]:
        """Rates by model, and the p95 of all models; a model without answers meanwhile has no p95."""
        now_s = self._clock.monotonic_s()
        elapsed_s, self._last_s = max(now_s - self._last_s, 1e-9), now_s
        found: dict[str, dict[str, float | None]] = {}
        of_all = Histogram()
        for name, model in metrics.models().items():
            before = self._counts.get(name) or [0] * len(model.total.counts)
            between = model.total.since(before)
            self._counts[name] = [count + more for count, more in zip(before, between.counts, strict=True)]
            of_all.add(between)
            found[name] = {"rate_per_s": round(between.count / elapsed_s, 3), "p95_ms": _p95_ms(between)}
        return found, _p95_ms(of_all)


def _p95_ms(times: Histogram) -> float | None:
    p95_s = times.quantile(0.95)
    return None if p95_s is None else round(p95_s * 1e3, 3)


def _has_failed(status: VersionStatus) -> bool:
    return status.state is VersionState.FAILED


def _failure_of(status: VersionStatus) -> str:
    return f"model {status.model} version {status.number}: {status.reason or 'failed'}"


def _losses_of(tables: SourceTables) -> Iterator[str]:
    """A sentence for each source that is lost."""
    for table, sources in tables.items():
        for name, source in sources.items():
            if source["state"] == "lost":
                yield f"{table.removesuffix('s')} {name}: {source['reason']}"


def _latest_versions(summary: Mapping[str, Any]) -> dict[str, int]:
    """By model, the version that is being installed, or that the last check found for this device."""
    offers = list((summary.get("checked") or {}).get("offers", ()))
    if summary.get("under_way"):
        offers.append({"action": "under way", **summary["under_way"]})
    return {
        each["model"]: each["version"]
        for each in offers
        if each["version"] is not None and each["action"] not in {"passed over", "refused"}
    }


def _status(topics: DeviceTopics, word: str) -> Outgoing:
    return Outgoing(topics.status, word.encode(), qos=1, retain=True)
