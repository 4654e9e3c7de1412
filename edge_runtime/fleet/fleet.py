"""A fleet as values: what devices said goes in, answers for people come out. No I/O, no clock, no thread of its own.

Owns: which devices are known, whether one is silent and since when, and the count of each release. An instant is Unix
seconds by this machine's clock, given by the caller; a device's own clock is shown, and believed only where nothing
else is known. Everything that a stranger may make grow is bounded, and what is left out is counted. Thread: one.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_runtime.doors.mqtt.topics import OFFLINE, ONLINE, STOPPED, is_id
from edge_runtime.fleet.states import ModelLine, ReleaseNote, StateLine, UpdateLine, read_part, read_state

MAX_DEVICES = 50_000
"""Further ones are counted. 10 000 of them with five models each take some 30 MB."""

COUNTED_S = 5.0
"""The counts of releases are kept so long where nothing changes: 10 000 devices of five models take 50 ms."""

MAX_MODEL_LINES = 400_000
"""Of all devices; a device beyond is known by its totals alone."""

SILENT_INTERVALS = 3.0
SILENT_S = 30.0
"""A device that is online and published no state for so many of its intervals, and this long beside, is silent."""

CLOCK_OFF_S = 60.0
"""A device's clock that differs by more is told: messages of a broker come within seconds."""

SHOWN_GROUPS = 1_000
"""The largest ones: a device may name any."""

SHOWN_RELEASES = 1_000
"""Of those that devices tell of: the ones that the most devices tell of."""

SHOWN_REASONS = 10
SLOW_DEVICES = 10
"""Of each model on each profile."""

PAGE = 100
MAX_PAGE = 1_000
"""Devices of one answer of the page; a verb lists as many as it is asked for."""

STATUSES = (ONLINE, STOPPED, OFFLINE)

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class AssignedRelease:
    """A release that a group is assigned. share: of a device, from 0 to 100: those below `percent` are meant.

    manifest_sha256: decides the share of each device.
    """

    group: str
    model: str
    release: int
    version: int | None
    percent: float
    manifest_sha256: str = ""


@dataclass(frozen=True, slots=True)
class SignedFleet:
    """The signed facts of a fleet, against which the words of devices are held.

    moved: the group of devices by id, which stands above what a device says. published: the release counters that the
    repository has of each model that is assigned.
    """

    assigned: Sequence[AssignedRelease] = ()
    moved: Mapping[str, str] = field(default_factory=dict)
    published: Mapping[str, frozenset[int]] = field(default_factory=dict)


@dataclass(slots=True)
class FleetDevice:
    """One device. heard_s: when a message of it came that was not retained; None: none yet.

    status_s: when its status changed while this process listened. parts: models of its parts, by number.
    """

    device_id: str
    status: str = ""
    status_s: float | None = None
    heard_s: float | None = None
    clock_off_s: float | None = None
    state: StateLine | None = None
    parts: dict[str, tuple[str, dict[str, ModelLine]]] | None = None
    counted_lines: int = 0
    revision: int = 0

    @property
    def models(self) -> Mapping[str, ModelLine]:
        """The models by name, those of parts that belong to the state included."""
        if self.state is None:
            return {}
        if not self.parts:
            return self.state.models
        found = dict(self.state.models)
        for number, (generation, models) in self.parts.items():
            if self.state.generations.get(number) == generation:
                found |= models
        return found

    @property
    def update(self) -> UpdateLine:
        """Its updates; off where nothing is known."""
        return self.state.update if self.state is not None else UpdateLine()

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups that it says it is in."""
        return self.state.groups if self.state is not None else ()


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """A change of a device that a person may want to know."""

    at_s: float
    device_id: str
    text: str


@dataclass(slots=True)
class Ignored:
    """Counts of messages that are not a fleet's: of no device, unreadable, or beyond a bound."""

    topics: int = 0
    states: int = 0
    devices: int = 0
    models: int = 0


INSTALLED, REFUSED, PASSED_OVER = "installed", "refused", "passed over"
NOT_MEANT, SILENT, WAITING = "not meant", "silent", "waiting"
"""The fates of a release on a device. PASSED_OVER: it is not for this kind of device. SILENT: the device does not
answer and has not told. WAITING: all else."""


OTHER_ID = "its update.device_id is another id than its topics have, so it may be anybody's; leave that key out there"
"""The reason for which a device's word on a release is not believed."""


@dataclass(frozen=True, slots=True)
class ReleaseFates:
    """The devices of a group by the fate of one release.

    Each is counted once: installed, refused, passed_over, waiting, silent, or not_meant. went_silent: of those that the
    release is for, all that do not answer, whatever they told before. not_meant_silent: the same of the others.
    """

    devices: int = 0
    installed: int = 0
    refused: int = 0
    passed_over: int = 0
    waiting: int = 0
    silent: int = 0
    not_meant: int = 0
    went_silent: int = 0
    not_meant_silent: int = 0
    reasons: tuple[Mapping[str, Any], ...] = ()


class Fleet:
    """All devices. started_s: when this process began to listen.

    `say_*` take what a broker delivers; `is_retained`: the broker kept it, so when it was said is not known. Their
    result: whether a person sees a change.
    """

    def __init__(self, started_s: float) -> None:
        self.started_s = started_s
        self.listening_s: float | None = None
        """Since when the broker is there; None: it is away, so that no silence can be told."""
        self.ignored = Ignored()
        self.revision = 0
        """It rises with each change that a person sees."""
        self.events: list[FleetEvent] = []
        """Since the last `take_events`."""
        self._devices: dict[str, FleetDevice] = {}
        self._sorted: list[FleetDevice] | None = None
        self._lines = 0
        self._counted: tuple[Any, float, list[dict[str, Any]]] | None = None

    def __len__(self) -> int:
        return len(self._devices)

    # ---- what devices say -------------------------------------------------------------------------------------------

    def say_status(self, device_id: str, word: str, at_s: float, *, is_retained: bool) -> bool:
        """A device's status: one of STATUSES; any other word, or an empty one, says that it is gone."""
        word = sys.intern(word) if word in STATUSES else ""
        device = self._device(device_id, makes=bool(word))
        if device is None:
            return False
        if not is_retained:
            device.heard_s = at_s if word != OFFLINE else device.heard_s  # the broker says that it is offline
        if device.status == word:
            return False
        device.status, device.status_s = word, None if is_retained else at_s
        return self._changed(device, at_s, f"is {word or 'removed'}", is_told=not is_retained)

    def say_state(self, device_id: str, payload: bytes, at_s: float, *, is_retained: bool) -> bool:
        """A device's state. An empty one removes it; an unreadable one is counted and changes nothing."""
        device = self._device(device_id, makes=bool(payload))
        if device is None:
            return False
        state = read_state(payload) if payload else None
        if state is None and payload:
            self.ignored.states += 1
            return False
        before, device.state = device.state, state
        if state is not None and not is_retained:
            device.heard_s = at_s
            off_s = None if state.said_s is None else state.said_s - at_s
            device.clock_off_s = round(off_s) if off_s is not None and abs(off_s) > CLOCK_OFF_S else None
        if state is None or not state.generations:
            device.parts = None
        else:
            parts = device.parts or {}
            device.parts = {number: parts[number] for number in state.generations if number in parts}
        self._bound(device)
        texts = list(_changes(before, state))
        for text in texts:
            self._tell(device, at_s, text, is_told=not is_retained)
        if not texts and _seen(before) == _seen(state):
            return False
        return self._changed(device, at_s)

    def say_part(self, device_id: str, number: str, payload: bytes) -> bool:
        """A part of a device's state; an empty one removes it."""
        device = self._device(device_id, makes=False)
        if device is None or len(number) > 2:
            return False
        parts = device.parts or {}
        if not payload:
            parts.pop(number, None)
            device.parts = parts or None
            return False
        part = read_part(payload)
        if part is None:
            self.ignored.states += 1
            return False
        parts[sys.intern(number)] = (part.generation, part.models)
        device.parts = parts
        self._bound(device)
        return self._changed(device, 0.0)

    def forget(self, device_id: str) -> None:
        """Drop a device of which the broker retains nothing any more."""
        device = self._devices.get(device_id)
        if device is not None:
            device.status, device.state, device.parts = "", None, None
            self._bound(device)
            self._changed(device, 0.0)

    def ids(self) -> set[str]:
        """Return the ids of all devices."""
        return set(self._devices)

    def without_state(self) -> set[str]:
        """Return the ids of devices whose state is unknown."""
        return {device.device_id for device in self._devices.values() if device.state is None}

    def missing_parts(self) -> list[str]:
        """Return the ids of devices of whose state parts are missing, or of another state."""
        return [
            device.device_id
            for device in self._by_id()
            if device.state is not None
            and any(
                (device.parts or {}).get(number, ("",))[0] != generation
                for number, generation in device.state.generations.items()
            )
        ]

    def changed_since(self, revision: int, most: int) -> list[str] | None:
        """Return the ids of devices that changed after a revision; None: there are more than `most`."""
        found = [device.device_id for device in self._devices.values() if device.revision > revision]
        return found if len(found) <= most else None

    def take_events(self) -> list[FleetEvent]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        return events

    # ---- answers, as JSON values ------------------------------------------------------------------------------------

    def overview(self, now_s: float) -> dict[str, Any]:
        """Count devices by what a person asks first."""
        devices = self._devices.values()
        conditions = Counter(self.condition(device, now_s)[0] for device in devices)
        return {
            "devices": len(self._devices),
            "conditions": dict(conditions.most_common()),
            "versions": _counted(device.state.version for device in devices if device.state is not None),
            "profiles": _counted(device.state.profile for device in devices if device.state is not None),
            "groups": _counted(group for device in devices for group in device.groups),
            "rate_per_s": round(sum(device.state.rate_per_s for device in devices if device.state is not None), 1),
            "clocks_off": sum(device.clock_off_s is not None for device in devices),
            "refusing": sum(bool(device.update.refused) for device in devices),
            "broker": self.listening_s is not None,
            "ignored": {
                "topics": self.ignored.topics,
                "states": self.ignored.states,
                "devices": self.ignored.devices,
                "models": self.ignored.models,
            },
            "revision": self.revision,
        }

    def devices(
        self,
        now_s: float,
        *,
        search: str = "",
        group: str = "",
        condition: str = "",
        offset: int = 0,
        limit: int = PAGE,
    ) -> dict[str, Any]:
        """List devices by id. search: words that each must be in its id, groups, profile, version, models or health.

        condition: one of those of `condition`, or "silent" for all that do not answer.
        """
        words = search.lower().split()
        found = [
            device
            for device in self._by_id()
            if (not group or group in device.groups)
            and (not condition or condition in self.condition(device, now_s)[:2])
            and (not words or _has_words(device, words))
        ]
        offset, limit = max(offset, 0), max(limit, 1)
        return {
            "count": len(found),
            "offset": offset,
            "devices": [self._line(device, now_s) for device in found[offset : offset + limit]],
        }

    def groups(self, now_s: float) -> list[dict[str, Any]]:
        """Count the devices of each group by what a person asks first; "" has those that name no group."""
        members: dict[str, list[FleetDevice]] = defaultdict(list)
        for device in self._by_id():
            for group in device.groups or ("",):
                members[group].append(device)
        largest = sorted(members, key=lambda group: (-len(members[group]), group))[:SHOWN_GROUPS]
        return [self._group(group, members[group], now_s) for group in sorted(largest)]

    def device(self, device_id: str, now_s: float) -> dict[str, Any] | None:
        """Tell all that is known of a device; None: it is unknown."""
        device = self._devices.get(device_id)
        if device is None:
            return None
        update = device.update
        return {
            **self._line(device, now_s),
            "reasons": list(device.state.reasons) if device.state is not None else [],
            "temperature_celsius": device.state.temperature_celsius if device.state is not None else None,
            "memory_bytes": device.state.memory_bytes if device.state is not None else None,
            "models": [
                {
                    "name": name,
                    "version": each.version,
                    "state": each.state,
                    "reason": each.reason,
                    "release": each.release,
                    "rate_per_s": each.rate_per_s,
                    "p95_ms": each.p95_ms,
                }
                for name, each in sorted(device.models.items())
            ],
            "update": {
                "is_on": update.is_on,
                "state": update.state,
                "group": update.group,
                "checked_at": update.checked_at,
                "trouble": update.trouble,
                "refused": [_note_json(each) for each in update.refused],
                "open": [_note_json(each) for each in update.open],
            },
        }

    def releases(self, now_s: float, signed: SignedFleet | None = None) -> list[dict[str, Any]]:
        """Count the devices of each release: installed, refused, waiting, with the reasons.

        signed: by the repository; None: there is none to read, and releases are those that devices tell of. The same
        list until something changes, at most for COUNTED_S: a device that falls silent changes nothing.
        """
        known_by = (self.revision, signed)
        if self._counted is None or self._counted[0] != known_by or not 0 <= now_s - self._counted[1] < COUNTED_S:
            self._counted = known_by, now_s, self._count_releases(now_s, signed)
        return self._counted[2]

    def _count_releases(self, now_s: float, signed: SignedFleet | None) -> list[dict[str, Any]]:
        moved = signed.moved if signed is not None else {}
        by_group: dict[str, list[FleetDevice]] = defaultdict(list)
        for device in self._by_id():
            if group := moved.get(device.device_id, device.update.group):
                by_group[group].append(device)
        if signed is None:
            signed = SignedFleet(_told(by_group))
        meant = _Meant(signed)
        return [self._release(each, by_group.get(each.group, ()), meant, now_s) for each in signed.assigned]

    def fates(self, now_s: float, assigned: AssignedRelease, moved: Mapping[str, str] | None = None) -> ReleaseFates:
        """Count the devices of a group by the fate of one release, which is the newest of its model there.

        moved: the group of devices by id, as the repository's owner signed it: it stands above what a device says. A
        device is who its topic says, which the broker vouches for, and only those that the release is for count: what
        others say of it moves nothing.
        """
        meant = _Meant(SignedFleet([assigned]))
        counts: Counter[str] = Counter()
        told = ReleaseCount()
        for device in self._devices.values():
            if (moved or {}).get(device.device_id, device.update.group) != assigned.group:
                continue
            if _update_id(device) != device.device_id:
                kind, reason = WAITING, OTHER_ID
            elif not meant.includes(assigned, device):
                kind, reason = NOT_MEANT, ""
            else:
                kind, reason = self._fate(assigned, device, meant, now_s)
            is_silent = bool(self.condition(device, now_s)[1])
            counts["devices"] += 1
            counts[kind] += 1
            counts["went silent" if kind != NOT_MEANT else "not meant, silent"] += is_silent
            if kind in (REFUSED, PASSED_OVER, WAITING):
                told.add(kind, reason)
        return ReleaseFates(
            devices=counts["devices"],
            installed=counts[INSTALLED],
            refused=counts[REFUSED],
            passed_over=counts[PASSED_OVER],
            waiting=counts[WAITING],
            silent=counts[SILENT],
            not_meant=counts[NOT_MEANT],
            went_silent=counts["went silent"],
            not_meant_silent=counts["not meant, silent"],
            reasons=tuple(told.reasons()),
        )

    def slow(self, *, group: str = "") -> list[dict[str, Any]]:
        """List each model on each profile, with its slowest devices; the worst against its median first."""
        times: dict[tuple[str, str], list[tuple[float, FleetDevice, int | None]]] = defaultdict(list)
        for device in self._devices.values():
            if device.state is not None and device.status == ONLINE and (not group or group in device.groups):
                for name, model in device.models.items():
                    if model.p95_ms is not None:
                        times[device.state.profile, name].append((model.p95_ms, device, model.version))
        rows = [_slow_row(profile, name, entries) for (profile, name), entries in times.items()]
        return sorted(rows, key=lambda row: (-row["worst_ratio"], -row["worst_p95_ms"], row["model"]))

    def condition(self, device: FleetDevice, now_s: float) -> tuple[str, str, float | None]:
        """Return the condition of a device, "silent" or "", and since when it is silent, where that is known.

        Conditions: "ok", "degraded", "starting", "stopping", "unknown" (no state), "stopped", "offline", "mute": online
        by its broker, and it publishes nothing.
        """
        if device.status in (STOPPED, OFFLINE):
            return device.status, "silent", device.status_s or _believed(device, now_s)
        if device.status != ONLINE:
            return "unknown", "silent", None
        if self.listening_s is not None and device.state is not None:
            heard_s = max(device.heard_s or 0.0, self.listening_s)
            if now_s - heard_s > SILENT_INTERVALS * device.state.interval_s + SILENT_S:
                return "mute", "silent", device.heard_s or _believed(device, now_s)
        return (device.state.health or "unknown") if device.state is not None else "unknown", "", None

    # ---- private ----------------------------------------------------------------------------------------------------

    def _device(self, device_id: str, *, makes: bool) -> FleetDevice | None:
        device = self._devices.get(device_id)
        if device is None and makes:
            if not is_id(device_id):
                self.ignored.topics += 1
            elif len(self._devices) >= MAX_DEVICES:
                self.ignored.devices += 1
            else:
                device = self._devices[device_id] = FleetDevice(device_id)
                self._sorted = None
        return device

    def _changed(self, device: FleetDevice, at_s: float, text: str = "", *, is_told: bool = False) -> bool:
        self.revision += 1
        device.revision = self.revision
        self._tell(device, at_s, text, is_told=is_told)
        if not device.status and device.state is None:  # nothing of it is retained any more
            self._devices.pop(device.device_id, None)
            self._sorted = None
            self._lines -= device.counted_lines
            device.counted_lines = 0
        return True

    def _tell(self, device: FleetDevice, at_s: float, text: str, *, is_told: bool) -> None:
        if text and is_told and len(self.events) < MAX_DEVICES:
            self.events.append(FleetEvent(at_s, device.device_id, text))

    def _bound(self, device: FleetDevice) -> None:
        """Count the lines of a device's models, and keep none where they would be too many in all."""
        state = device.state
        count = sum(len(models) for _, models in (device.parts or {}).values())
        count += 0 if state is None else len(state.models)
        if self._lines - device.counted_lines + count > MAX_MODEL_LINES:
            self.ignored.models += count
            device.parts, count = None, 0
            if state is not None:
                state.models.clear()
        self._lines += count - device.counted_lines
        device.counted_lines = count

    def _by_id(self) -> list[FleetDevice]:
        if self._sorted is None:
            self._sorted = sorted(self._devices.values(), key=lambda device: device.device_id)
        return self._sorted

    def _group(self, group: str, devices: Sequence[FleetDevice], now_s: float) -> dict[str, Any]:
        conditions = [self.condition(device, now_s)[:2] for device in devices]
        states = [device.state for device in devices if device.state is not None]
        return {
            "group": group,
            "devices": len(devices),
            "silent": sum(bool(silent) for _, silent in conditions),
            "conditions": dict(Counter(condition for condition, _ in conditions).most_common()),
            "versions": _counted(state.version for state in states),
            "profiles": _counted(state.profile for state in states),
            "rate_per_s": round(sum(state.rate_per_s for state in states), 1),
            "refusing": sum(bool(device.update.refused) for device in devices),
        }

    def _line(self, device: FleetDevice, now_s: float) -> dict[str, Any]:
        condition, silent, since_s = self.condition(device, now_s)
        state = device.state
        return {
            "device": device.device_id,
            "condition": condition,
            "health": _sentence(device, condition),
            "is_silent": bool(silent),
            "silent_since": since_s,
            "since": state.since_s if state is not None and not silent else since_s,
            "groups": list(device.groups),
            "version": state.version if state is not None else "",
            "profile": state.profile if state is not None else "",
            "models": state.model_count if state is not None else 0,
            "ready": state.ready_count if state is not None else 0,
            "rate_per_s": state.rate_per_s if state is not None else 0.0,
            "p95_ms": state.p95_ms if state is not None else None,
            "clock_off_s": device.clock_off_s,
            "refused": _note_json(device.update.refused[-1]) if device.update.refused else None,
        }

    def _fate(self, assigned: AssignedRelease, device: FleetDevice, meant: _Meant, now_s: float) -> tuple[str, str]:
        """Return the fate of a release on a device, and the reason."""
        model = device.models.get(assigned.model)
        contradiction = _contradiction(assigned, model, meant.published(assigned.model))
        if model is not None and model.release == assigned.release and not contradiction:
            return INSTALLED, ""
        if (note := _note_of(device.update.refused, assigned)) is not None:
            return REFUSED, note.reason
        if not meant.includes(assigned, device):
            return NOT_MEANT, ""
        if silent := self.condition(device, now_s)[1]:
            return SILENT, silent
        note = _note_of(device.update.open, assigned)
        if note is None:
            return WAITING, contradiction or "has not looked yet"
        # One that looked when the release was for fewer devices was passed over for that, and will look again.
        is_for_others = note.action == PASSED_OVER and meant.share_of(assigned, device) < note.percent
        return PASSED_OVER if is_for_others else WAITING, f"{note.action}: {note.reason}"

    def _release(
        self, assigned: AssignedRelease, devices: Sequence[FleetDevice], meant: _Meant, now_s: float
    ) -> dict[str, Any]:
        count = ReleaseCount()
        for device in devices:
            kind, reason = self._fate(assigned, device, meant, now_s)
            if kind == INSTALLED:
                count.installed += 1
            elif kind == REFUSED:
                count.refused += 1
                count.add("refused", reason)
            elif kind == NOT_MEANT:
                count.not_meant += 1
            else:
                count.waiting += 1
                count.add("waiting", reason)
        return {
            "group": assigned.group,
            "model": assigned.model,
            "release": assigned.release,
            "version": assigned.version,
            "percent": assigned.percent,
            "devices": len(devices),
            "installed": count.installed,
            "refused": count.refused,
            "waiting": count.waiting,
            "not_meant": count.not_meant,
            "reasons": count.reasons(),
        }


@dataclass(slots=True)
class ReleaseCount:
    """Counts of one release, and the reasons of devices that do not run it."""

    installed: int = 0
    refused: int = 0
    waiting: int = 0
    not_meant: int = 0
    _reasons: dict[tuple[str, str], tuple[str, int]] = field(default_factory=dict)

    def add(self, kind: str, reason: str) -> None:
        """Count a reason; those that differ by numbers alone are one."""
        key = kind, _NUMBER.sub("0", reason)
        example, count = self._reasons.get(key, (reason, 0))
        self._reasons[key] = example, count + 1

    def reasons(self) -> list[dict[str, Any]]:
        """Return the most frequent ones."""
        ordered = sorted(self._reasons.items(), key=lambda each: (-each[1][1], each[0]))
        return [
            {"kind": kind, "reason": example, "devices": count}
            for (kind, _), (example, count) in ordered[:SHOWN_REASONS]
        ]


class _Meant:
    """Which devices a release is meant for, as they decide it themselves."""

    def __init__(self, signed: SignedFleet) -> None:
        self._of: dict[tuple[str, str], list[AssignedRelease]] = defaultdict(list)
        self._published = signed.published
        for each in signed.assigned:
            self._of[each.group, each.model].append(each)

    def published(self, model: str) -> frozenset[int] | None:
        """Return the releases that a repository has of a model; None where none is read."""
        return self._published.get(model)

    def includes(self, assigned: AssignedRelease, device: FleetDevice) -> bool:
        from edge_runtime.updates.release_checks import share

        if not assigned.manifest_sha256:
            return True
        device_id = _update_id(device)
        others = self._of[assigned.group, assigned.model]
        counters = [each.release for each in others if share(device_id, each.manifest_sha256) < each.percent]
        return max(counters, default=None) == assigned.release

    @staticmethod
    def share_of(assigned: AssignedRelease, device: FleetDevice) -> float:
        """Return the place of a device in the rollout of a release; 0 where its manifest is not known."""
        from edge_runtime.updates.release_checks import share

        return share(_update_id(device), assigned.manifest_sha256) if assigned.manifest_sha256 else 0.0


# ---- private --------------------------------------------------------------------------------------------------------


def _changes(before: StateLine | None, now: StateLine | None) -> Iterator[str]:
    """Sentences, without their subject, about what changed of a state."""
    if now is None or before is None:
        return
    if before.health != now.health:
        reason = f": {now.reasons[0]}" if now.reasons else ""
        yield f"went from {before.health or 'unknown'} to {now.health or 'unknown'}{reason}"
    if before.version != now.version:
        yield f"runs edge-runtime {now.version}, before {before.version}"
    known = {(each.model, each.release) for each in before.update.refused}
    for each in now.update.refused:
        if (each.model, each.release) not in known:
            yield f"refused {each.model} release {each.release}: {each.reason}"
    for name, model in now.models.items():
        old = before.models.get(name)
        if old is not None and model.release is not None and old.release != model.release:
            yield f"runs {name} release {model.release}, before {old.release}"


def _seen(state: StateLine | None) -> Any:
    """Return what of a state a person sees change: not its rates, nor its time."""
    if state is None:
        return None
    return (
        state.health, state.reasons, state.version, state.profile, state.groups, state.model_count, state.ready_count,
        state.update,
    )  # fmt: skip


SENTENCES = {
    STOPPED: "Stopped on purpose.",
    OFFLINE: "The broker lost its connection.",
    "mute": "Connected, and it publishes nothing.",
}


def _sentence(device: FleetDevice, condition: str) -> str:
    state = device.state
    if condition in SENTENCES:
        return SENTENCES[condition]
    if state is None:
        return "It has published no state."
    if state.reasons:
        more = len(state.reasons) - 1
        return f"{state.reasons[0]}{f' (and {more} more)' if more else ''}"
    if condition == "ok":
        return f"{state.ready_count} of {state.model_count} models are loaded."
    return f"{condition.capitalize()}."


def _has_words(device: FleetDevice, words: Sequence[str]) -> bool:
    state = device.state
    text = device.device_id.lower()
    if all(word in text for word in words):
        return True
    if state is not None:
        parts = (*state.groups, state.profile, state.version, state.health, *state.reasons, *device.models)
        text = f"{text} {device.status} {' '.join(parts)}".lower()
    return all(word in text for word in words)


def _counted(values: Iterable[str], most: int = 100) -> dict[str, int]:
    return dict(Counter(values).most_common(most))


def _believed(device: FleetDevice, now_s: float) -> float | None:
    """Return when a device last spoke by its own clock, where that can be: not in the future, not before 2020."""
    said_s = device.state.said_s if device.state is not None else None
    return said_s if said_s is not None and 1_577_836_800 < said_s <= now_s else None


def _update_id(device: FleetDevice) -> str:
    return device.update.device_id or device.device_id


def _note_json(note: ReleaseNote) -> dict[str, Any]:
    return {"model": note.model, "release": note.release, "action": note.action, "reason": note.reason}


def _note_of(notes: Iterable[ReleaseNote], assigned: AssignedRelease) -> ReleaseNote | None:
    return next((each for each in notes if (each.model, each.release) == (assigned.model, assigned.release)), None)


def _contradiction(assigned: AssignedRelease, model: ModelLine | None, published: frozenset[int] | None) -> str:
    """Return how what a device says of a model's release cannot be, by what is signed; "" where it can."""
    if model is None or model.release is None:
        return ""
    said = f"says that it runs release {model.release}"
    if model.release != assigned.release:
        is_known = published is None or model.release in published
        return "" if is_known else f"{said}, which the repository does not have"
    if None not in (model.release_version, assigned.version) and model.release_version != assigned.version:
        return f"{said} as version {model.release_version}; it is version {assigned.version}"
    if model.manifest_sha256 and assigned.manifest_sha256 and model.manifest_sha256 != assigned.manifest_sha256:
        return f"{said} by another manifest than the one that is signed"
    return ""


def _told(by_group: Mapping[str, Iterable[FleetDevice]]) -> list[AssignedRelease]:
    """Return the releases that the most devices say they run, refused, or were offered, by group, model and number.

    The version of each is the one that most of its devices say.
    """
    devices_of: Counter[tuple[str, str, int]] = Counter()
    versions: dict[tuple[str, str, int], Counter[int]] = defaultdict(Counter)
    for group, devices in by_group.items():
        for device in devices:
            update = device.update
            told = {(group, each.model, each.release) for each in (*update.refused, *update.open)}
            for name, model in device.models.items():
                if model.release is not None:
                    release = group, name, model.release
                    told.add(release)
                    if (version := model.release_version or model.version) is not None:
                        versions[release][version] += 1
            devices_of.update(told)
    shown = sorted(devices_of, key=lambda each: (-devices_of[each], each))[:SHOWN_RELEASES]
    return [
        AssignedRelease(*each, next((version for version, _ in versions[each].most_common(1)), None), percent=100.0)
        for each in sorted(shown, key=lambda each: (each[0], each[1], -each[2]))
    ]


def _slow_row(profile: str, name: str, entries: list[tuple[float, FleetDevice, int | None]]) -> dict[str, Any]:
    entries.sort(key=lambda entry: (-entry[0], entry[1].device_id))
    median = statistics.median(entry[0] for entry in entries)
    return {
        "profile": profile,
        "model": name,
        "devices": len(entries),
        "median_p95_ms": round(median, 3),
        "worst_p95_ms": entries[0][0],
        "worst_ratio": round(entries[0][0] / median, 2) if median else 1.0,
        "slowest": [
            {"device": device.device_id, "p95_ms": p95_ms, "version": version}
            for p95_ms, device, version in entries[:SLOW_DEVICES]
        ],
    }
