"""A device at a glance: its health in one sentence, its machine, and each of its models.

Owns: what counts as well, as worth a look and as bad, and the words for it. Reads the daemon's own parts, as the other
operations do. Thread: any; waits for nothing.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from edge_runtime import __version__
from edge_runtime.daemon.doors import DoorContext
from edge_runtime.models.model_table import VersionState
from edge_runtime.pages.history import History
from edge_runtime.profiles.match import match_profile
from edge_runtime.profiles.profile import load_profiles

GOOD, WARNING, BAD = "good", "warning", "bad"

LITTLE_DISK = 0.05
LITTLE_MEMORY = 0.05
"""Shares of what there is, below which a device needs somebody's look."""


class Overview:
    """Makes the result of `overview`."""

    def __init__(self, context: DoorContext, history: History) -> None:
        self._context = context
        self._history = history
        self._reason: str | None = None

    def now(self) -> dict[str, Any]:
        """Return the result of `overview`."""
        context, core = self._context, self._context.core
        status = context.status
        metrics = core.metrics.models()
        entries = core.table.inventory()
        models = [self._model(entry, metrics) for entry in entries]
        machine = self._machine(entries)
        update = dict(core.updates.summary()) if core.updates is not None else None
        level, sentence = self._health(entries, machine, update)
        return {
            "time": round(time.time(), 3),
            "level": level,
            "sentence": sentence,
            "version": __version__,
            "device": socket.gethostname(),
            "uptime_s": round(time.monotonic() - status.started_s, 1),
            "ready": status.is_ready,
            "draining": status.is_draining,
            "profile": {"name": core.profile.name, "reason": self._why()},
            "endpoints": [*status.endpoints, *(each for door in context.doors.values() for each in _endpoints(door))],
            "machine": machine,
            "all": {
                **self._history.now(),
                "requests": sum(each.requests for each in metrics.values()),
                "refused": _summed(each.refusals for each in metrics.values()),
            },
            "models": models,
            "update": update,
        }

    # ---- private ----------------------------------------------------------------------------------------------------

    def _model(self, entry: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
        found = metrics.get(entry["name"])
        queue = found.gauges.get("queue_rows") if found is not None else None
        version = entry["version"]
        servable = self._context.core.table.find(entry["name"], version) if version is not None else None
        return {
            **entry,
            "why": servable.about.why if servable is not None else "",
            **self._history.now(entry["name"]),
            "requests": found.requests if found is not None else 0,
            "refused": dict(found.refusals) if found is not None else {},
            "queue_rows": int(queue()) if queue is not None else 0,
        }

    def _machine(self, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        core = self._context.core
        sample = self._history.machine()
        free_bytes, disk_bytes = _disk(core.state)
        celsius, slows = sample["temperature_celsius"], core.profile.thermal.throttle_celsius
        return {
            "cpu_model": core.facts.cpu_model,
            "cores": core.facts.cores,
            "memory_bytes": core.facts.memory_bytes,
            **sample,
            "models_memory_bytes": sum(entry["memory_bytes"] for entry in entries),
            "models_budget_bytes": core.profile.limits.memory_bytes,
            "is_throttled": _is_any(
                self._history.is_slowed, None if celsius is None or slows is None else celsius >= slows
            ),
            "disk_free_bytes": free_bytes,
            "disk_bytes": disk_bytes,
        }

    def _health(
        self, entries: Sequence[Mapping[str, Any]], machine: Mapping[str, Any], update: Mapping[str, Any] | None
    ) -> tuple[str, str]:
        """How the device is, and one sentence of it: the worst first."""
        status, table = self._context.status, self._context.core.table
        if status.is_draining:
            return WARNING, "Stopping: it answers what was admitted, and takes nothing new."
        versions = [entry for entry in entries if entry["version"] is not None]
        failed = [entry for entry in versions if entry["state"] == VersionState.FAILED.value]
        if failed:
            first = failed[0]
            more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
            return BAD, f"{first['name']} version {first['version']}{more} failed; {_answering(versions)}"
        if not status.is_ready:
            return WARNING, f"Not ready yet: {table.progress()}."
        if worry := self._worry(entries, machine, update):
            return WARNING, worry
        if not versions:
            return WARNING, "Ready, and there is no model: put one into the models folder."
        return GOOD, f"Ready: {_answering(versions)}"

    def _worry(
        self, entries: Sequence[Mapping[str, Any]], machine: Mapping[str, Any], update: Mapping[str, Any] | None
    ) -> str:
        """The first thing to look at, though all that is loaded answers; "" for none."""
        left = next((entry for entry in entries if entry["version"] is None), None)
        refused = {name: sum(codes.values()) for name, codes in self._history.refused_lately().items()}
        check = (update or {}).get("checked") or {}
        if worry := _worry_of(machine):
            return worry
        if left is not None:
            return f"{left['path']} is not served: {left['reason']}"
        if refused:
            name = max(refused, key=lambda each: refused[each])
            return f"Ready, but {name} refused {refused[name]} requests in the last minute."
        return "" if check.get("is_ok", True) else f"Ready, but the last look for updates failed: {check['reason']}"

    def _why(self) -> str:
        if self._reason is None:
            core = self._context.core
            self._reason = match_profile(core.facts, load_profiles(), core.config.profile).reason
        return self._reason


def _is_any(*told: bool | None) -> bool | None:
    """Whether any says so; None where all are None."""
    known = [each for each in told if each is not None]
    return any(known) if known else None


def _worry_of(machine: Mapping[str, Any]) -> str:
    """The first thing of the machine to look at; "" for none."""
    if machine["is_throttled"]:
        celsius = machine["temperature_celsius"]
        return "The machine slows down to cool." if celsius is None else f"The machine slows down at {celsius:g} °C."
    if machine["disk_bytes"] and machine["disk_free_bytes"] < LITTLE_DISK * machine["disk_bytes"]:
        return f"The disk of the state folder has {machine['disk_free_bytes'] >> 20} MiB left."
    memory, available = machine["memory_bytes"], machine["memory_available_bytes"]
    if memory and available is not None and available < LITTLE_MEMORY * memory:
        return f"The machine has {int(available) >> 20} MiB of memory left."
    return ""


_ANSWERS = (VersionState.READY.value, VersionState.ON_DEMAND.value)


def _answering(versions: Sequence[Mapping[str, Any]]) -> str:
    count = sum(entry["state"] in _ANSWERS for entry in versions)
    return f"{count} of {len(versions)} model versions answer."


def _endpoints(door: Any) -> Sequence[str]:
    return getattr(door, "endpoints", ())


def _disk(state: Any) -> tuple[int | None, int | None]:
    """Free and all bytes of the disk of the state folder; None where there is none."""
    if state is None:
        return None, None
    try:
        disk = os.statvfs(state)
    except OSError:
        return 0, None  # a disk that cannot be asked cannot be written
    return disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize


def _summed(counts: Any) -> dict[str, int]:
    total: dict[str, int] = {}
    for each in counts:
        for code, count in dict(each).items():
            total[code] = total.get(code, 0) + count
    return total
