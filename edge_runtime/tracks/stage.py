"""The stage of a `[[publish]]` with `track = true`: boxes get ids that last, and zones, lines and alarms are watched.

Owns: one rule's tracker and watch, and how they look in results, events and Home Assistant. Thread: as of `Stage`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edge_runtime.answers import PICTURE_SIZE, answer_fields, answers_of, kind_of, label_of
from edge_runtime.durable import make_folder, read_kept, write_atomically
from edge_runtime.errors import ConfigError, StorageFailed
from edge_runtime.pictures.drawing import Overlay, Shape
from edge_runtime.site.publication import as_utc
from edge_runtime.site.settings import PublishRule
from edge_runtime.site.stage import FrameAnswer, Staged
from edge_runtime.steps import ModelSteps
from edge_runtime.tensors import Array
from edge_runtime.tracks.tracker import Boxes, FrameBoxes, Track, Tracker
from edge_runtime.tracks.watch import TrackEvent, Watch, WatchSettings

log = logging.getLogger(__name__)

MOST_SHOWN_LABELS = 20
"""Labels that Home Assistant gets counts of where a zone or line names none: those that were seen first."""

Component = dict[str, Any]

KINDS = ("boxes", "masks", "keypoints")
"""Answers whose things have boxes."""

_PLACES = {"entered": "zone", "left": "zone", "crossed": "line", "raised": "alarm", "cleared": "alarm"}


SERIES_IDS = 10**9
"""Ids of one series: more than things come in a life, and a name that is read as series and thing: 12000000007. As
numbers of JSON, exact to 2^53, there are nine million series."""

SERIES_FILE = "tracks"
"""In the state folder: how many series were given. A file of some bytes, written once for each rule of a start."""

_SERIES = threading.Lock()


def next_series(state: Path | None) -> int:
    """Return the number of a series of ids that this device never gave; 0 where there is no state folder."""
    if state is None:
        return 0
    path = state / SERIES_FILE
    with _SERIES:
        try:
            given = int(read_kept(path, 20))
        except FileNotFoundError:
            given = 0
        except (OSError, ValueError) as error:
            given = int(time.time()) // 3600  # above all that was given, unless a rule an hour was
            log.warning("how many series of ids were given is lost", extra={"path": str(path), "reason": str(error)})
        try:
            make_folder(state)
            write_atomically(path, str(given + 1).encode())
        except StorageFailed as error:
            log.warning("ids of tracks may come again after a restart", extra={"reason": error.message})
        return given


def open_stage(rule: PublishRule, state: Path | None) -> TrackStage:
    """Make the stage of a rule. Raises ConfigError: a name is there twice, or an alarm is over what is not there."""
    try:
        watched = WatchSettings(rule.zone, rule.line, rule.alarm)
    except ValueError as error:
        raise ConfigError(f"publish: {error}") from None
    return TrackStage(rule, watched, next_series(state) * SERIES_IDS + 1)


class TrackStage:
    """Follows what one rule's frames have."""

    def __init__(self, rule: PublishRule, watched: WatchSettings, first_id: int = 1) -> None:
        self._rule = rule
        self._watched = watched
        self._steps: ModelSteps | None = None
        self._tracker = Tracker(rule.track_score, rule.lost_s, first_id)
        self._watch = Watch(watched)
        self._labels: dict[int, str] = {}
        self._shown: tuple[str, ...] = ()
        self._before: object = None
        zones = (Shape(zone.name, zone.points) for zone in watched.zones)
        self._shapes = (*zones, *(Shape(line.name, (line.start, line.end)) for line in watched.lines))
        self._has_warned = False

    def take(self, frame: FrameAnswer) -> Staged:
        """Follow the boxes of the next frame."""
        name = things_output(frame.steps, frame.outputs)
        if name is None:
            self._warn()
            return Staged(frame.outputs, has_changed=True)
        events = self._begin(frame.steps)
        kind = kind_of(frame.steps.outputs[name])
        rows = things_of(kind, frame.outputs[name])
        tracks = self._tracker.track(FrameBoxes(rows[:, 2:], rows[:, 1], rows[:, 0].astype(np.int64)), frame.captured_s)
        for number in {track.label for track in tracks} - self._labels.keys():
            self._labels[number] = label_of(number, frame.steps.labels.get(name, ()))
        width, height = frame.outputs[PICTURE_SIZE][0].tolist()
        events += self._watch.look(tracks, self._labels, (width, height), frame.captured_s)
        seen = sorted((track for track in tracks if track.row is not None), key=lambda track: track.row or 0)
        outputs = {**frame.outputs, name: chosen_of(kind, frame.outputs[name], seen)}
        fields = self._watch.fields(frame.captured_s)
        has_changed = self._has_changed(tracks, fields)
        if (
            has_changed or frame.is_shown or self._rule.on != "change"
        ):  # else nothing is published, and words cost as much as tracking
            fields = {kind: self._things(kind, frame.steps, outputs, seen), **fields}
        overlay = Overlay(tuple(f"#{track.id % SERIES_IDS}" for track in seen), self._shapes)
        return Staged(outputs, has_changed, fields, [_told(event) for event in events], overlay)

    def entities(self, steps: ModelSteps) -> Mapping[str, Component]:  # noqa: ARG002 (of no version)
        """Counts and binary sensors by label and zone, crossings by line, way and label, and alarms."""
        return dict(_entities(self._watched, self._shown))

    # ---- private ----------------------------------------------------------------------------------------------------

    def _begin(self, steps: ModelSteps) -> list[TrackEvent]:
        """With another version, whose labels may be others, all things are new. Return the events of their end."""
        if self._steps is steps:
            return []
        events = self._watch.end() if self._steps is not None else []
        self._steps = steps
        self._tracker = Tracker(self._rule.track_score, self._rule.lost_s, self._tracker.next_id)
        self._labels = {}
        return events

    def _things(self, kind: str, steps: ModelSteps, outputs: Mapping[str, Array], seen: Sequence[Track]) -> list[Any]:
        """The boxes of a result as JSON values, with their ids and the zones that they are in."""
        things: list[Any] = answer_fields(answers_of(steps, outputs), as_list=False)[kind]
        for thing, track in zip(things, seen, strict=True):
            thing["track"] = track.id
            if self._watched.zones:
                thing["zones"] = self._watch.zones_of(track.id)
        return things

    def _has_changed(self, tracks: Sequence[Track], fields: Mapping[str, Any]) -> bool:
        """Whether a person would call this news: who is there, where, and what was counted; not where boxes are."""
        zones = [(track.id, track.label, self._watch.zones_of(track.id)) for track in tracks]
        now = (zones, fields.get("lines"), fields.get("alarms"))
        has_changed, self._before = now != self._before, now
        labels = [*self._shown, *(label for label in fields["counts"] if label not in self._shown)]
        self._shown = tuple(labels[:MOST_SHOWN_LABELS])
        return has_changed

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            advice = 'its model.toml declares no output of boxes, masks or keypoints (layout = "yolov8", …)'
            log.warning("nothing can be followed", extra={"model": self._rule.model, "reason": advice})


def things_output(steps: ModelSteps, outputs: Mapping[str, Array]) -> str | None:
    """The output with the boxes that are followed: the first that is declared so."""
    declared = (name for name, output in steps.outputs.items() if kind_of(output) in KINDS and name in outputs)
    return next(declared, None) if PICTURE_SIZE in outputs else None


def things_of(kind: str, array: Array) -> Boxes:
    """The boxes of one row of an output: FP64 [boxes, 6], index, score, left, top, right, bottom.

    Shapes: array [1, most, 6 or more], and index -1 behind the last (pictures/answer_makers.py); of masks BYTES [1].
    """
    if kind == "masks":
        return np.array([(index, score, *box) for index, score, box, *_ in _masks(array)], np.float64).reshape(-1, 6)
    rows = array[0, :, :6].astype(np.float64)
    return rows[rows[:, 0] >= 0]


def chosen_of(kind: str, array: Array, tracks: Sequence[Track]) -> Array:
    """An output like `array` with the boxes of these tracks alone, each with its track's label."""
    rows = [track.row or 0 for track in tracks]
    if kind == "masks":
        masks, found = _masks(array), np.empty_like(array)
        found[0] = msgspec.json.encode(
            [(track.label, *masks[row][1:]) for track, row in zip(tracks, rows, strict=True)]
        )
        return found
    found = np.zeros_like(array)
    found[:, :, 0] = -1
    found[0, : len(tracks)] = array[0, rows]
    found[0, : len(tracks), 0] = [track.label for track in tracks]
    return found


# ---- private --------------------------------------------------------------------------------------------------------


def _masks(array: Array) -> list[Any]:
    """Lists that begin with index, score and box."""
    listed: list[Any] = msgspec.json.decode(bytes(array[0]))
    return listed


def _told(event: TrackEvent) -> dict[str, Any]:
    """An event as JSON values."""
    more = {
        name: getattr(event, name)
        for name in ("track", "label", "direction", "dwell_s", "count")
        if getattr(event, name) is not None
    }
    return {"event": event.kind, _PLACES[event.kind]: event.name, **more, "at": as_utc(event.at_s)}


def _key(*parts: str) -> str:
    """A key of letters, digits and '_': what else a label has is told apart by a digest."""
    text = "_".join(parts)
    plain = re.sub("[^A-Za-z0-9_]", "_", text)
    return plain if plain == text else f"{plain}_{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def _entities(watched: WatchSettings, shown: Sequence[str]) -> Iterator[tuple[str, Component]]:
    for label in shown:
        yield _key("count", label), _count(label, f"value_json.counts.get({json.dumps(label)}, 0)")
    for zone in watched.zones:
        counts = f"value_json.zones[{json.dumps(zone.name)}].counts"
        for label in zone.labels or shown:
            value = f"{counts}.get({json.dumps(label)}, 0)"
            yield _key("zone", zone.name, label), _count(f"{zone.name} {label}", value)
            yield _key("in", zone.name, label), _is_on(f"{label} in {zone.name}", value, "occupancy")
    for line in watched.lines:
        for way in ("right", "left") if line.direction == "both" else (line.direction,):
            for label in line.labels or shown:
                value = f"value_json.lines[{json.dumps(line.name)}].{way}.get({json.dumps(label)}, 0)"
                name = f"{line.name} {label} to the {way}"
                yield _key("line", line.name, way, label), {**_count(name, value), "state_class": "total_increasing"}
    for alarm in watched.alarms:
        said = f"value_json.alarms[{json.dumps(alarm.name)}]"
        yield _key("alarm", alarm.name), _is_on(alarm.name, f"{said}.on", "problem")
        yield _key("alarm_count", alarm.name), _count(f"{alarm.name} count", f"{said}.count")


def _count(name: str, value: str) -> Component:
    return {
        "platform": "sensor",
        "name": name,
        "state_class": "measurement",
        "value_template": f"{{{{ {value} }}}}",
    }


def _is_on(name: str, value: str, device_class: str) -> Component:
    return {
        "platform": "binary_sensor",
        "name": name,
        "device_class": device_class,
        "value_template": f"{{{{ 'ON' if {value} else 'OFF' }}}}",
    }
