"""A device's state as retained messages of bounded size: one message, or one and parts.

Owns: the bound, which model is in which part, and which parts must be published again. Does no I/O. `device_status.py`
publishes what it returns, `client.py` and fleet/ read it back.

Decision: how a state of many models is published.
Context: with 247 models the state had 63 KB, and went out whole each 15 s. A broker keeps it for each device, and sends
it to every reader. Home Assistant reads a model's values from one topic, by a template.
Options: parts by order of names: one new model moves all later ones. A topic for each model: 247 retained messages for
each device, and the broker's queue for one reader is full. Parts by a hash of the model's name.
Decision: a state that fits into STATE_BYTES is one message, as before. A larger one keeps its totals, what is not well,
and the models that are not ready, all within the bound. Each model then is in the part that its name alone decides, of
PARTS at `<state>/models/<n>`. The state names each part with its generation, a digest of the part's content: a part
with another generation is from before or after that state. A part is published when it changed; a rate or a latency
that moved little is not a change.
Cost: a reader of a large device reads up to PARTS more messages, and its rates are RATE_SLACK exact.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

STATE_BYTES = 16_384
"""The most bytes of a state or of one of its parts; a state with 50 models has some 12 KB."""

WHOLE_AGAIN_BYTES = STATE_BYTES * 3 // 4
"""A state in parts becomes one message again below this, so that no model moves it to and fro."""

PARTS = 32
"""Parts of a state that is too large: of 247 models some 2 KB each, of 1 000 some 9 KB."""

RATE_SLACK = 0.25
"""A rate or p95 in a part is told again when it moved by this share of what was told, and by RATE_STEP."""

RATE_STEP = 1.0
"""Answers a second, or milliseconds."""

MAX_TEXT = 240
"""Characters of each text of a state in parts: a sentence with its advice. The device's own `status` has all of it."""

SHOWN_REASONS = 10
SHOWN_REFUSALS = 5
SHOWN_OFFERS = 10
SHOWN_SOURCES = 40
"""Of a state in parts; `left_out` counts the others."""

REMOVED = b""
"""Removes a retained message."""

State = Mapping[str, Any]


class StateMessages(Struct, frozen=True):
    """The messages of one state. parts: by number, those that changed; REMOVED for one that is no more."""

    state: bytes
    parts: Mapping[int, bytes]


def part_of(model: str) -> int:
    """Return the number of the part that a model is in when its device's state is in parts."""
    return zlib.crc32(model.encode()) % PARTS


class StateMessagesMaker:
    """Makes the messages of one device's states, and remembers what it told. Thread: one at a time.

    Before the first state every part may be retained from an earlier life of the daemon, so each is removed once.
    """

    def __init__(self) -> None:
        self.is_in_parts = False
        """Whether the last state was in parts. Thread: any."""
        self._models: dict[str, Any] = {}
        self._generations: dict[int, str] = dict.fromkeys(range(PARTS), "")

    def messages(self, state: State, tables: Iterable[str] = ()) -> StateMessages:
        """Return the messages of a state, which `device_status.py` makes. tables: keys of its tables of sources."""
        whole = _encoded(state)
        self.is_in_parts = len(whole) > (WHOLE_AGAIN_BYTES if self.is_in_parts else STATE_BYTES)
        if not self.is_in_parts:
            self._models = {}
            return StateMessages(whole, self._changed({}))
        self._models = {name: _held(self._models.get(name), model) for name, model in state["models"].items()}
        parts = _parts_of(self._models, state["update"].get("models") or {})
        changed = self._changed(parts)
        return StateMessages(_head(state, tables, self._generations), changed)

    def _changed(self, parts: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return the parts that differ from those told, and REMOVED for those that are no more."""
        generations = {number: _generation(content) for number, content in parts.items()}
        found = {
            number: _encoded({"generation": generations[number], **json.loads(content)})
            for number, content in parts.items()
            if self._generations.get(number) != generations[number]
        }
        found.update(dict.fromkeys(self._generations.keys() - generations.keys(), REMOVED))
        self._generations = generations
        return found


def joined(state: State, parts: Iterable[State]) -> dict[str, Any]:
    """Return a state with the models of its parts: those whose generation it names. Ignores malformed ones."""
    named, models, releases = state.get("parts"), dict[str, Any](), dict[str, Any]()
    for part in parts:
        if isinstance(named, dict) and part.get("generation") in named.values():
            models |= _dict_of(part.get("models"))
            releases |= _dict_of(part.get("updates"))
    if not models and not releases:
        return dict(state)
    update = _dict_of(state.get("update"))
    return {
        **state,
        "models": {**_dict_of(state.get("models")), **models},
        "update": {**update, "models": {**_dict_of(update.get("models")), **releases}},
    }


def model_totals(models: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return how many models there are, how many are in each state, and their answers a second."""
    return {
        "models": len(models),
        "states": dict(Counter(map(_state_of, models.values()))),
        "rate_per_s": round(sum(model["rate_per_s"] for model in models.values()), 3),
    }


# ---- private --------------------------------------------------------------------------------------------------------


def _parts_of(models: Mapping[str, Any], releases: Mapping[str, Any]) -> dict[int, bytes]:
    """Return the content of each part that has a model, or an updated one."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for kind, entries in (("models", models), ("updates", releases)):
        for name, entry in entries.items():
            found.setdefault(part_of(name), {"models": {}, "updates": {}})[kind][name] = entry
    return {number: _fitted_part(content) for number, content in sorted(found.items())}


def _fitted_part(content: dict[str, dict[str, Any]]) -> bytes:
    """Encode a part. One that is too large tells less of each model, then of fewer models."""
    room = STATE_BYTES - 64  # for its generation
    encoded = _encoded(content)
    if len(encoded) > room:
        content = {**content, "models": {name: _short(model) for name, model in content["models"].items()}}
        encoded = _encoded(content)
    left_out = 0
    while len(encoded) > room:
        kept = {kind: dict(list(entries.items())[: len(entries) * 3 // 4]) for kind, entries in content.items()}
        left_out += len(content["models"]) - len(kept["models"])
        content = kept
        encoded = _encoded({**content, "left_out": left_out})
    return encoded


def _short(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model without its versions' details."""
    versions = [
        {key: _clipped(each.get(key), 80) for key in ("version", "state", "reason")} for each in model["versions"][:4]
    ]
    return {**model, "versions": versions}


def _head(state: State, tables: Iterable[str], generations: Mapping[int, str]) -> bytes:
    """Encode a state in parts, within STATE_BYTES: the parts' names, and of all else what is not well, first."""
    reasons, sources = state["reasons"], {table: state[table] for table in tables}
    shown = {
        table: dict(
            sorted(entries.items(), key=lambda each: each[1]["state"] != "lost")[: SHOWN_SOURCES // len(sources)]
        )
        for table, entries in sources.items()
    }
    head = {
        **state,
        "reasons": _clipped(reasons[:SHOWN_REASONS], MAX_TEXT),
        **_clipped(shown, MAX_TEXT // 4),
        "update": _short_update(state["update"]),
        "parts": {str(number): generation for number, generation in generations.items()},
        "models": {},
        "left_out": {
            "reasons": len(reasons[SHOWN_REASONS:]),
            **{table: len(entries) - len(shown[table]) for table, entries in sources.items()},
        },
    }
    room = STATE_BYTES - len(_encoded(head))
    for name, model in sorted(state["models"].items(), key=lambda each: _rank(each[1])):
        entry = {**_short(model), "versions": _clipped(_short(model)["versions"], MAX_TEXT)}
        room -= len(_encoded({name: entry}))
        if _rank(model) == READY_RANK or room < 0:
            break
        head["models"][name] = entry
    return _encoded(head)


def _short_update(update: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of updates without what goes well: that is in the parts, by model."""
    found = {key: value for key, value in _clipped(update, MAX_TEXT).items() if key != "models"}
    if "models" in update:
        trouble = {name: each for name, each in update["models"].items() if each.get("not_served")}
        found["models"] = _clipped(dict(list(trouble.items())[:SHOWN_REFUSALS]), MAX_TEXT)
    if "refused" in found:
        found["refused"] = found["refused"][-SHOWN_REFUSALS:]
    checked = found.get("checked")
    if checked:
        open_offers = [each for each in checked["offers"] if each["action"] not in ("runs", "installed")]
        found["checked"] = {**checked, "offers": open_offers[:SHOWN_OFFERS]}
    return found


READY_RANK = 9
RANKS = {"failed": 0, **dict.fromkeys(("ready", "on_demand", "standby"), READY_RANK)}


def _rank(model: Mapping[str, Any]) -> int:
    """Failed models first, then those on their way or unloaded, those that answer when they are asked last."""
    return RANKS.get(_state_of(model), 1)


def _state_of(model: Mapping[str, Any]) -> str:
    """Return `ready` where a version answers, else the state of the newest."""
    if model["version"] is not None:
        return "ready"
    return str(max(model["versions"], key=lambda each: each["version"])["state"])


def _held(told: Mapping[str, Any] | None, model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a model with its rate and p95 as they were told, where they moved little."""
    if told is None or not _is_near(told["rate_per_s"], model["rate_per_s"]):
        return model
    p95_ms = told["p95_ms"] if model["p95_ms"] is None else model["p95_ms"]
    if told["p95_ms"] is not None and _is_near(told["p95_ms"], p95_ms):
        p95_ms = told["p95_ms"]
    return {**model, "rate_per_s": told["rate_per_s"], "p95_ms": p95_ms}


def _is_near(told: float, now: float) -> bool:
    return abs(now - told) <= max(RATE_STEP, RATE_SLACK * told)


def _clipped(value: Any, characters: int) -> Any:
    """Return a value with each of its texts cut to `characters`."""
    match value:
        case str():
            return value if len(value) <= characters else f"{value[: characters - 1]}…"
        case Mapping():
            return {key: _clipped(each, characters) for key, each in value.items()}
        case list() | tuple():
            return [_clipped(each, characters) for each in value]
    return value


def _dict_of(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _generation(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"


def _encoded(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
