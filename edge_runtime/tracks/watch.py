"""Zones and lines of a picture, and tracks in it: who is where, for how long, and what happened.

Owns: for each zone who is in it since when, for each line on which side things are and what crossed, and alarms over
both. A side is believed when two frames in a row say it, so that a box that trembles on an edge causes nothing. Decides
by the tracks and instants that it is given, and does no I/O. Thread: one at a time.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from edge_runtime.site.settings import AlarmSettings, LineSettings, Point, ZoneSettings
from edge_runtime.tracks.tracker import Track

EventKind = Literal["entered", "left", "crossed", "raised", "cleared"]
Direction = Literal["left", "right"]

KEPT_TIMES = 10_000
"""Crossings and entries that an alarm remembers at least: more within its time look like so many."""


class WatchSettings(Struct, frozen=True):
    """All that is watched of one rule. Raises ValueError: two share a name, or an alarm is over what is not there."""

    zones: tuple[ZoneSettings, ...] = ()
    lines: tuple[LineSettings, ...] = ()
    alarms: tuple[AlarmSettings, ...] = ()

    def __post_init__(self) -> None:
        zones, lines = [each.name for each in self.zones], [each.name for each in self.lines]
        names = [*zones, *lines, *(each.name for each in self.alarms)]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two zones, lines or alarms are named {name!r}; give each its own name")
        for alarm in self.alarms:
            kind, wanted, known = ("zone", alarm.zone, zones) if alarm.line is None else ("line", alarm.line, lines)
            if wanted not in known:
                listed = ", ".join(map(repr, known)) or "none"
                raise ValueError(f"alarm {alarm.name!r}: there is no {kind} {wanted!r}; the rule has {listed}")


class TrackEvent(Struct, frozen=True):
    """Something that happened. name: the zone's, line's or alarm's. at_s: when, on the clock of frames.

    track, label, box: of the thing, None for alarms. direction: of what crossed. dwell_s: of what left, since it
    entered. count: of an alarm.
    """

    kind: EventKind
    name: str
    at_s: float
    track: int | None = None
    label: str | None = None
    direction: Direction | None = None
    dwell_s: float | None = None
    count: int | None = None


class Present(Struct, frozen=True):
    """A thing that is there, as zones and lines see it. spots: by anchor, in shares of the picture; None while lost."""

    id: int
    label: str
    seen_s: float
    spots: Mapping[str, Point] | None


class Watch:
    """The zones, lines and alarms of one camera's picture. settings: checked."""

    def __init__(self, settings: WatchSettings) -> None:
        self._zones = [_Zone(each) for each in settings.zones]
        self._lines = [_Line(each) for each in settings.lines]
        self._alarms = [_Alarm(each) for each in settings.alarms]
        self._present: dict[int, Present] = {}

    def look(
        self, tracks: Iterable[Track], labels: Mapping[int, str], size: tuple[int, int], now_s: float
    ) -> list[TrackEvent]:
        """Take the tracks of one frame. Return the events, in order of time.

        labels: the text of each track's label. size: width and height of the picture that boxes are in. now_s: the
        instant that the tracker was given.
        """
        before, self._present = self._present, {each.id: _present(each, labels, size) for each in tracks}
        gone = [each for number, each in before.items() if number not in self._present]
        events: list[TrackEvent] = []
        places: tuple[_Zone | _Line, ...] = (*self._zones, *self._lines)
        for place in places:
            for thing in gone:
                events += place.lose(thing)
            for thing in self._present.values():
                if thing.spots is not None:
                    spot = thing.spots[place.settings.anchor]
                    events += place.see(thing, spot, is_new=thing.id not in before)
        events.sort(key=lambda event: event.at_s)
        for alarm in self._alarms:
            events += alarm.look(events, self._counts_of(alarm.settings.zone), now_s)
        return events

    def end(self) -> list[TrackEvent]:
        """Take leave of all that is there, as when frames come no more."""
        return self.look((), {}, (1, 1), max((each.seen_s for each in self._present.values()), default=0.0))

    def counts(self) -> dict[str, int]:
        """How many things of each label are there, lost ones for a while among them."""
        return _ordered(each.label for each in self._present.values())

    def zones_of(self, track: int) -> list[str]:
        """The zones that a thing is in."""
        return [zone.settings.name for zone in self._zones if track in zone.stays]

    def fields(self, now_s: float) -> dict[str, Any]:
        """All of it as JSON values: `counts`, and those of `zones`, `lines` and `alarms` that are watched."""
        found: dict[str, Any] = {"counts": self.counts()}
        if self._zones:
            found["zones"] = {zone.settings.name: zone.fields(now_s) for zone in self._zones}
        if self._lines:
            found["lines"] = {line.settings.name: line.fields() for line in self._lines}
        if self._alarms:
            found["alarms"] = {alarm.settings.name: alarm.fields() for alarm in self._alarms}
        return found

    def _counts_of(self, zone: str | None) -> Mapping[str, int]:
        return next((each.counts() for each in self._zones if each.settings.name == zone), {})


# ---- private --------------------------------------------------------------------------------------------------------


class _Stay(Struct):
    """A thing in a zone. label: as it was when it entered, for as long as it stays."""

    label: str
    since_s: float


class _Zone:
    """Who is in a zone. stays: by the thing's id."""

    def __init__(self, settings: ZoneSettings) -> None:
        self.settings = settings
        self.stays: dict[int, _Stay] = {}
        self._doubts: dict[int, float] = {}  # since when one frame says other than `stays`

    def see(self, thing: Present, spot: Point, *, is_new: bool) -> Iterator[TrackEvent]:
        """Take where a thing is now. is_new: two frames had it by now, so that they need no third."""
        stay = self.stays.get(thing.id)
        is_in = is_inside(spot, self.settings.points) and (stay is not None or _counts(self.settings, thing.label))
        if is_in is (stay is not None):
            self._doubts.pop(thing.id, None)
            return
        if not is_new and thing.id not in self._doubts:
            self._doubts[thing.id] = thing.seen_s
            return
        at_s = self._doubts.pop(thing.id, thing.seen_s)
        if stay is not None:
            yield self._left(thing.id, at_s)
            return
        self.stays[thing.id] = _Stay(thing.label, at_s)
        yield TrackEvent("entered", self.settings.name, at_s, thing.id, thing.label)

    def lose(self, thing: Present) -> Iterator[TrackEvent]:
        """Forget a thing that is gone: it left when it was last seen here."""
        at_s = self._doubts.pop(thing.id, thing.seen_s)
        if thing.id in self.stays:
            yield self._left(thing.id, at_s)

    def counts(self) -> dict[str, int]:
        """How many are in it, by label."""
        return _ordered(stay.label for stay in self.stays.values())

    def fields(self, now_s: float) -> dict[str, Any]:
        """JSON values. dwell_s: of what is in it longest; 0 where nothing is."""
        longest_s = max((now_s - stay.since_s for stay in self.stays.values()), default=0.0)
        return {"counts": self.counts(), "dwell_s": round(longest_s, 3)}

    def _left(self, track: int, at_s: float) -> TrackEvent:
        stay = self.stays.pop(track)
        dwell_s = round(at_s - stay.since_s, 3)
        return TrackEvent("left", self.settings.name, at_s, track, stay.label, dwell_s=dwell_s)


class _Side(Struct):
    """Where a thing is beside a line. spot: where it last was on its side. doubt: the first spot on the other side."""

    is_right: bool
    spot: Point
    doubt: tuple[Point, float] | None = None


class _Line:
    """The things beside a line, and how many crossed it."""

    def __init__(self, settings: LineSettings) -> None:
        self.settings = settings
        self._sides: dict[int, _Side] = {}
        ways: tuple[Direction, ...] = ("right", "left")
        self._crossed: dict[Direction, Counter[str]] = {
            way: Counter() for way in ways if settings.direction in ("both", way)
        }

    def see(self, thing: Present, spot: Point, *, is_new: bool) -> Iterator[TrackEvent]:  # noqa: ARG002 (as of zones)
        """Take where a thing is now; on the line itself it is on neither side."""
        turn = _turn(self.settings.start, self.settings.end, spot)
        if not turn:
            return
        side = self._sides.get(thing.id)
        if side is None:
            self._sides[thing.id] = _Side(turn > 0, spot)
        elif side.is_right == (turn > 0):
            side.spot, side.doubt = spot, None
        elif side.doubt is None:
            side.doubt = spot, thing.seen_s
        else:
            yield from self._cross(thing, side)
            self._sides[thing.id] = _Side(turn > 0, spot)

    def lose(self, thing: Present) -> Iterator[TrackEvent]:
        """Forget a thing that is gone. It crossed if its last frame says so: no other can."""
        side = self._sides.pop(thing.id, None)
        if side is not None and side.doubt is not None:
            yield from self._cross(thing, side)

    def fields(self) -> dict[str, Any]:
        """JSON values: how many crossed since the start, by way and label."""
        return {way: dict(sorted(counts.items())) for way, counts in self._crossed.items()}

    def _cross(self, thing: Present, side: _Side) -> Iterator[TrackEvent]:
        """Go to the other side; around an end of the line is not across it."""
        assert side.doubt is not None
        spot, at_s = side.doubt
        way: Direction = "left" if side.is_right else "right"
        is_across = _turn(side.spot, spot, self.settings.start) * _turn(side.spot, spot, self.settings.end) <= 0
        if is_across and way in self._crossed and _counts(self.settings, thing.label):
            self._crossed[way][thing.label] += 1
            yield TrackEvent("crossed", self.settings.name, at_s, thing.id, thing.label, direction=way)


class _Alarm:
    """One alarm."""

    def __init__(self, settings: AlarmSettings) -> None:
        self.settings = settings
        self._of = settings.zone or settings.line
        self._kind: EventKind = "crossed" if settings.zone is None else "entered"
        self._times: deque[float] = deque(maxlen=max(KEPT_TIMES, settings.above + 1))
        self._count = 0
        self._is_on = False

    def look(self, events: Sequence[TrackEvent], present: Mapping[str, int], now_s: float) -> list[TrackEvent]:
        """Take the events, and how many of each label are in its zone. Return whether it went on or off."""
        within_s = self.settings.within_s
        if within_s is None:
            self._count = sum(count for label, count in present.items() if _counts(self.settings, label))
        else:
            self._times.extend(now_s for event in events if self._is_counted(event))
            while self._times and self._times[0] <= now_s - within_s:
                self._times.popleft()
            self._count = len(self._times)
        was_on, self._is_on = self._is_on, self._count > self.settings.above
        if was_on is self._is_on:
            return []
        return [TrackEvent("raised" if self._is_on else "cleared", self.settings.name, now_s, count=self._count)]

    def fields(self) -> dict[str, Any]:
        """JSON values."""
        return {"on": self._is_on, "count": self._count}

    def _is_counted(self, event: TrackEvent) -> bool:
        return (
            event.kind == self._kind
            and event.name == self._of
            and event.label is not None
            and _counts(self.settings, event.label)
        )


def is_inside(spot: Point, corners: Sequence[Point]) -> bool:
    """Whether a spot lies in a polygon: whether a ray from it to the right meets its sides an odd number of times."""
    x, y = spot
    inside = False
    for (x1, y1), (x2, y2) in zip(corners, (*corners[1:], corners[0]), strict=True):
        if (y1 > y) != (y2 > y) and x < x1 + (y - y1) / (y2 - y1) * (x2 - x1):
            inside = not inside
    return inside


def _turn(start: Point, end: Point, spot: Point) -> float:
    """Above 0 where a spot is to the right of who goes from one point to another, below 0 to the left."""
    return (end[0] - start[0]) * (spot[1] - start[1]) - (end[1] - start[1]) * (spot[0] - start[0])


def _counts(settings: ZoneSettings | LineSettings | AlarmSettings, label: str) -> bool:
    return not settings.labels or label in settings.labels


def _present(track: Track, labels: Mapping[int, str], size: tuple[int, int]) -> Present:
    label = labels.get(track.label, str(track.label))
    if track.row is None:
        return Present(track.id, label, track.seen_s, None)
    left, top, right, bottom = track.box
    across = (left + right) / 2 / size[0]
    # The lower edge of the picture is in it: a box that is cut off there stands on it.
    ground = min(bottom / size[1], math.nextafter(1.0, 0.0))
    spots = {"bottom": (across, ground), "center": (across, (top + bottom) / 2 / size[1])}
    return Present(track.id, label, track.seen_s, spots)


def _ordered(labels: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(labels).items()))
