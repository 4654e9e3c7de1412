"""The settings of what is watched in a `[[publish]]` with `track = true`, described below each field."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from edge_runtime.steps import Share

Point = tuple[Share, Share]
"""Of the picture's width and height, from its upper left corner."""

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
"""One level of a topic."""

Label = Annotated[str, Meta(min_length=1)]


class ZoneSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the picture, with `track = true`: what is in it is counted; who enters and leaves is told."""

    name: Name
    """Its name: of its topic, `<topic>/event/NAME`, in results, and in Home Assistant."""

    points: tuple[Point, ...]
    """Its corners in order, 3 to 64: `[[0.1, 0.5], [0.6, 0.5], [0.6, 1.0], [0.1, 1.0]]`, as shares of the picture's
    width and height, from its upper left corner."""

    labels: tuple[Label, ...] = ()
    """Labels that count. When empty: all."""

    anchor: Literal["bottom", "center"] = "bottom"
    """The point of a box that must lie inside: the middle of its lower side, where a thing stands on the ground, or its
    center."""

    def __post_init__(self) -> None:
        if not 3 <= len(self.points) <= 64:
            raise ValueError(f"zone {self.name!r} has {len(self.points)} points; wanted 3 to 64 corners")


class LineSettings(Struct, frozen=True, forbid_unknown_fields=True, rename={"start": "from", "end": "to"}):
    """A line in the picture, with `track = true`: what crosses it is counted and told, each way by itself."""

    name: Name
    """Its name: of its topic, `<topic>/event/NAME`, in results, and in Home Assistant."""

    start: Point
    """One end: `[0.0, 0.5]`, as shares of the picture's width and height, from its upper left corner."""

    end: Point
    """The other end."""

    direction: Literal["both", "left", "right"] = "both"
    """Which way counts, as seen by who stands at `from` and looks to `to`: `"right"` counts what goes from the left
    side to the right one."""

    labels: tuple[Label, ...] = ()
    """Labels that count. When empty: all."""

    anchor: Literal["bottom", "center"] = "bottom"
    """The point of a box that must cross: the middle of its lower side, or its center."""

    def __post_init__(self) -> None:
        if self.start == self.end:
            raise ValueError(f"line {self.name!r} begins and ends at {list(self.start)}; wanted two points")


class AlarmSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """An alarm over a line or a zone: on while more things than `above` crossed, entered, or are there."""

    name: Name
    """Its name: of its topic, `<topic>/event/NAME`, in results, and in Home Assistant."""

    above: Annotated[int, Meta(ge=0, le=100_000)]
    """It is on while there are more."""

    zone: str | None = None
    """The zone whose things are counted."""

    line: str | None = None
    """The line whose crossings are counted; it needs `within_s`."""

    within_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    """Crossings, or entries into the zone, are counted that happened in the last so many seconds: 60.0 for a rate a
    minute. When absent: how many are in the zone now."""

    labels: tuple[Label, ...] = ()
    """Labels that count. When empty: all."""

    def __post_init__(self) -> None:
        if (self.zone is None) == (self.line is None):
            raise ValueError(f"alarm {self.name!r} names {'both a' if self.zone else 'no'} zone and line; wanted one")
        if self.line is not None and self.within_s is None:
            raise ValueError(f"alarm {self.name!r} counts crossings of a line; say within_s = 60.0 for those a minute")


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
