"""A device's retained state as a fleet reads it: bytes of any sender in, small values out, or nothing.

Owns: which fields count, and the bound of each. A device may say anything: a text is cut, a name that is not a model's
is left out, and a state is a JSON object of known shapes or nothing. Texts that many devices say are kept once. Pure.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TypeVar

import msgspec
from msgspec import Struct

from edge_runtime.models.names import MAX_VERSION

Said = TypeVar("Said")

MAX_STATE_BYTES = 128 << 10
"""Of a state, or of a part of one. Daemons publish 16 KB at most; older ones had all models of a device in one."""

MAX_TEXT = 300
MAX_GROUPS = 16
MAX_REASONS = 10
MAX_MODELS = 1_000
"""Of one device; further ones only count."""

SHOWN_REFUSALS = 5

MOST_RATE_PER_S, MOST_MS, MOST_CELSIUS, MOST_BYTES = 1e9, 86_400_000.0, 1_000.0, float(1 << 60)
"""A figure beyond these is dropped: the sum of two could be infinite, and one alone would hide the rate of others."""

_GROUP_NAME = re.compile(r"[a-z0-9-]{1,64}")
"""Of a group of updates, as a repository has it."""

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,128}")
"""Of a model, or of one that belongs to a pipeline: `reader/detect`."""

READY = "ready"


class ModelLine(Struct, frozen=True, gc=False):
    """One model of a device. version: that answers, None without one.

    release: the counter of its active release, of an updated model. release_version, manifest_sha256: what the device
    says of that release; None and "" where it says nothing.
    """

    version: int | None
    state: str
    reason: str
    rate_per_s: float
    p95_ms: float | None
    release: int | None = None
    release_version: int | None = None
    manifest_sha256: str = ""


class ReleaseNote(Struct, frozen=True, gc=False):
    """The fate of a release on a device: refused for good, put off, passed over, under way. reason: may be empty.

    percent: of the group that the release was for when the device looked.
    """

    model: str
    release: int
    action: str
    reason: str
    percent: float = 100.0


class UpdateLine(Struct, frozen=True, gc=False):
    """The updates of a device. group, device_id: as the repository sees it. is_on: whether it looks for any.

    refused: for good, the last ones. open: offered, and not installed.
    """

    is_on: bool = False
    state: str = "off"
    group: str = ""
    device_id: str = ""
    checked_at: str = ""
    trouble: str = ""
    refused: tuple[ReleaseNote, ...] = ()
    open: tuple[ReleaseNote, ...] = ()


class StateLine(Struct, frozen=True, gc=False):
    """A state. said_s: when by the device's clock, as Unix seconds. since_s: of its health, by the same.

    models: by name; of a state in parts those that are not ready. generations: of its parts, by number.
    """

    said_s: float | None
    interval_s: float
    version: str
    profile: str
    groups: tuple[str, ...]
    health: str
    reasons: tuple[str, ...]
    since_s: float | None
    model_count: int
    ready_count: int
    rate_per_s: float
    p95_ms: float | None
    temperature_celsius: float | None
    memory_bytes: float | None
    models: dict[str, ModelLine]
    update: UpdateLine
    generations: dict[str, str]


class PartLine(Struct, frozen=True, gc=False):
    """A part of a state."""

    generation: str
    models: dict[str, ModelLine]


def read_state(payload: bytes) -> StateLine | None:
    """Return a state; None for bytes that are none."""
    said = _decoded(_STATE, payload)
    if said is None:
        return None
    update = said.update
    models = _models(said.models, update.models)
    totals = said.totals
    ready = sum(each.version is not None for each in models.values())
    return StateLine(
        said_s=_instant(said.time),
        interval_s=said.interval_s if said.interval_s is not None and 0 < said.interval_s < 86_400 else 15.0,
        version=_text(said.runtime_version, 40),
        profile=_text(said.profile, 80),
        groups=tuple(_text(each, 64) for each in said.groups[:MAX_GROUPS]),
        health=_text(said.health, 20),
        reasons=tuple(_text(each) for each in said.reasons[:MAX_REASONS]),
        since_s=_instant(said.since),
        model_count=len(said.models) if totals is None else _number(totals.models) or 0,
        ready_count=ready if totals is None else _number(totals.states.get(READY)) or 0,
        rate_per_s=_rate(sum(each.rate_per_s for each in models.values()) if totals is None else totals.rate_per_s),
        p95_ms=None if totals is None else _figure(totals.p95_ms, MOST_MS),
        temperature_celsius=_figure(said.temperature_celsius, MOST_CELSIUS, -MOST_CELSIUS),
        memory_bytes=_figure(said.memory_bytes, MOST_BYTES),
        models=models,
        update=_update(update),
        generations={sys.intern(number[:4]): each[:16] for number, each in list(said.parts.items())[:64]},
    )


def read_part(payload: bytes) -> PartLine | None:
    """Return a part of a state; None for bytes that are none."""
    said = _decoded(_PART, payload)
    return None if said is None else PartLine(said.generation[:16], _models(said.models, said.updates))


# ---- the JSON, as device_status.py publishes it ---------------------------------------------------------------------


class _Version(Struct, frozen=True, gc=False):
    state: str = ""
    reason: str = ""


class _Model(Struct, frozen=True, gc=False):
    version: int | None = None
    rate_per_s: float = 0.0
    p95_ms: float | None = None
    versions: list[_Version] = []


class _Totals(Struct, frozen=True, gc=False):
    models: int = 0
    states: dict[str, int] = {}
    rate_per_s: float = 0.0
    p95_ms: float | None = None


class _Release(Struct, frozen=True, gc=False):
    release: int | None = None
    # Beside the point, so that an odd one hides no device.
    version: object = None
    manifest_sha256: object = None


class _Note(Struct, frozen=True, gc=False):
    model: str = ""
    release: int = 0
    action: str = ""
    state: str = ""
    reason: str = ""
    percent: float = 100.0


class _Checked(Struct, frozen=True, gc=False):
    at_utc: str = ""
    is_ok: bool = True
    reason: str = ""
    offers: list[_Note] = []


class _Update(Struct, frozen=True, gc=False):
    state: str = "off"
    group: str = ""
    device_id: str = ""
    reason: str = ""
    under_way: _Note | None = None
    checked: _Checked | None = None
    refused: list[_Note] = []
    models: dict[str, _Release] = {}


class _StateText(Struct, frozen=True, gc=False):
    time: str = ""
    interval_s: float | None = None
    runtime_version: str = ""
    profile: str = ""
    groups: list[str] = []
    health: str = ""
    reasons: list[str] = []
    since: str = ""
    totals: _Totals | None = None
    models: dict[str, _Model] = {}
    update: _Update = _Update()
    parts: dict[str, str] = {}
    temperature_celsius: float | None = None
    memory_bytes: float | None = None


class _PartText(Struct, frozen=True, gc=False):
    generation: str = ""
    models: dict[str, _Model] = {}
    updates: dict[str, _Release] = {}


_NO_RELEASE = _Release()
_STATE = msgspec.json.Decoder(_StateText)
_PART = msgspec.json.Decoder(_PartText)


def _decoded(decoder: msgspec.json.Decoder[Said], payload: bytes) -> Said | None:
    if len(payload) > MAX_STATE_BYTES:
        return None
    try:
        return decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _models(said: dict[str, _Model], releases: dict[str, _Release]) -> dict[str, ModelLine]:
    found = {}
    for name, each in list(said.items())[:MAX_MODELS]:
        if _MODEL_NAME.fullmatch(name):
            last = each.versions[-1] if each.versions else _Version()
            release = releases.get(name, _NO_RELEASE)
            version = _number(each.version)
            is_ready = version is not None
            found[sys.intern(name)] = ModelLine(
                version,
                READY if is_ready else _text(last.state, 20),
                "" if is_ready else _text(last.reason),
                _rate(each.rate_per_s),
                _figure(each.p95_ms, MOST_MS),
                _number(release.release),
                _number(release.version),
                _text(release.manifest_sha256, 64) if isinstance(release.manifest_sha256, str) else "",
            )
    return found


def _update(said: _Update) -> UpdateLine:
    checked = said.checked or _Checked()
    open_notes = [each for each in checked.offers if each.action not in ("runs", "installed")]
    if said.under_way is not None:
        step = said.under_way
        open_notes.insert(0, _Note(step.model, step.release, "under way", reason=step.state))
    return UpdateLine(
        is_on=said.state != "off",
        state=_text(said.state, 20),
        group=_text(said.group) if _GROUP_NAME.fullmatch(said.group) else "",
        device_id=_text(said.device_id, 64),
        checked_at=_text(checked.at_utc, 40),
        trouble=_text(said.reason or ("" if checked.is_ok else checked.reason)),
        refused=tuple(_notes(said.refused[-SHOWN_REFUSALS:], "refused")),
        open=tuple(_notes(open_notes[:10])),
    )


def _notes(said: Iterable[_Note], action: str = "") -> Iterator[ReleaseNote]:
    for each in said:
        release = _number(each.release)
        if release is not None and _MODEL_NAME.fullmatch(each.model):
            name, fate = sys.intern(each.model), _text(action or each.action, 20)
            yield ReleaseNote(name, release, fate, _text(each.reason), _figure(each.percent, 100.0) or 0.0)


def _number(said: object) -> int | None:
    """Return a version, a release or a count; None for one that cannot be."""
    return said if type(said) is int and 0 < said <= MAX_VERSION else None


def _figure(said: float | None, most: float, least: float = 0.0) -> float | None:
    return said if said is not None and least <= said <= most else None


def _rate(said: float) -> float:
    return _figure(said, MOST_RATE_PER_S) or 0.0


def _text(text: str, most: int = MAX_TEXT) -> str:
    """Return a text, cut to `most` characters: the same object for the same text."""
    return sys.intern(text if len(text) <= most else f"{text[: most - 1]}…")


def _instant(text: str) -> float | None:
    """Return Unix seconds of a date in ISO 8601 with its offset; None for anything else."""
    try:
        found = datetime.fromisoformat(text)
        return found.timestamp() if found.tzinfo is not None else None
    except (ValueError, OverflowError, OSError):
        return None
