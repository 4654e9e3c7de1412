"""Zones, lines, dwell, counts and alarms, by the tracks of frames."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.site.settings import AlarmSettings, LineSettings, ZoneSettings
from edge_runtime.tracks.tracker import Track
from edge_runtime.tracks.watch import TrackEvent, Watch, WatchSettings, is_inside

pytestmark = pytest.mark.long  # it is about numbers, whatever the Python

SIZE = (100, 100)
LABELS = {0: "person", 1: "car"}
DOOR = ZoneSettings("door", ((0.5, 0.0), (1.0, 0.0), (1.0, 1.0), (0.5, 1.0)))
GATE = LineSettings("gate", (0.5, 0.0), (0.5, 1.0))
"""Looks down: the left half of the picture is on its right side."""


def track(number: int, x: float | None, now_s: float, label: int = 0, y: float = 50.0) -> Track:
    """A thing whose lower side has its middle there; lost where there is no x, as seen one second ago."""
    if x is None:
        return Track(number, label, None, (0, 0, 1, 1), 0.0, now_s - 1)
    return Track(number, label, 0, (x - 2, y - 20, x + 2, y), 0.0, now_s)


def walked(watch: Watch, places: Sequence[float | None], number: int = 1, label: int = 0) -> list[TrackEvent]:
    """The events of one thing that is at these places, a second apart, and then gone."""
    events: list[TrackEvent] = []
    for now_s, x in enumerate(places):
        events += watch.look([track(number, x, now_s, label)], LABELS, SIZE, now_s)
    return events + watch.look([], LABELS, SIZE, len(places))


def told(events: Sequence[TrackEvent]) -> list[tuple[str, str, float]]:
    return [(event.kind, event.name, event.at_s) for event in events]


# ---- zones ----------------------------------------------------------------------------------------------------------


def test_a_thing_that_enters_and_leaves_a_zone_is_told_with_the_time_between() -> None:
    events = walked(Watch(WatchSettings((DOOR,))), [20, 30, 60, 70, 80, 30, 20, 10])
    assert told(events) == [("entered", "door", 2), ("left", "door", 5)]
    assert (events[1].track, events[1].label, events[1].dwell_s) == (1, "person", 3.0)


def test_a_box_that_trembles_on_the_edge_of_a_zone_causes_nothing() -> None:
    assert walked(Watch(WatchSettings((DOOR,))), [45, 55, 45, 55, 45, 55, 45, 45]) == []


def test_a_thing_that_appears_in_a_zone_entered_it() -> None:
    assert told(walked(Watch(WatchSettings((DOOR,))), [60, 60])) == [("entered", "door", 0), ("left", "door", 1)]


def test_a_thing_that_is_gone_left_when_it_was_last_seen() -> None:
    watch = Watch(WatchSettings((DOOR,)))
    events = walked(watch, [60, 60, 60])
    assert told(events)[-1] == ("left", "door", 2)


def test_a_thing_that_is_hidden_for_a_moment_is_still_there() -> None:
    watch = Watch(WatchSettings((DOOR,)))
    watch.look([track(1, 60, 0)], LABELS, SIZE, 0)
    assert watch.look([track(1, None, 1)], LABELS, SIZE, 1) == []
    assert watch.fields(1)["counts"] == {"person": 1}
    assert watch.fields(1)["zones"] == {"door": {"counts": {"person": 1}, "dwell_s": 1.0}}


def test_a_zone_counts_only_its_labels() -> None:
    zone = ZoneSettings("door", DOOR.points, labels=("car",))
    assert walked(Watch(WatchSettings((zone,))), [60, 60, 60]) == []
    assert told(walked(Watch(WatchSettings((zone,))), [60, 60], label=1))[0] == ("entered", "door", 0)


def test_a_thing_leaves_with_the_label_that_it_entered_with() -> None:
    watch = Watch(WatchSettings((DOOR,)))
    events = watch.look([track(1, 60, 0)], LABELS, SIZE, 0)
    for now_s in (1, 2):
        events += watch.look([track(1, 60, now_s, label=1)], LABELS, SIZE, now_s)
    events += watch.look([], LABELS, SIZE, 3)
    assert [(event.kind, event.label) for event in events] == [("entered", "person"), ("left", "person")]


def test_a_zone_looks_at_the_lower_side_of_a_box_or_at_its_center() -> None:
    low = ((0.0, 0.45), (1.0, 0.45), (1.0, 1.0), (0.0, 1.0))
    ground, middle = ZoneSettings("ground", low), ZoneSettings("middle", low, anchor="center")
    assert {event.name for event in walked(Watch(WatchSettings((ground, middle))), [20, 20])} == {"ground"}


def test_a_thing_that_the_pictures_edge_cuts_off_stands_in_a_zone_that_ends_there() -> None:
    watch = Watch(WatchSettings((DOOR,)))
    (event,) = watch.look([track(1, 60, 0, y=100.4)], LABELS, SIZE, 0)
    assert event.kind == "entered"


def test_at_the_end_all_leave() -> None:
    watch = Watch(WatchSettings((DOOR,)))
    watch.look([track(1, 60, 0), track(2, 70, 0)], LABELS, SIZE, 0)
    assert [(event.kind, event.track) for event in watch.end()] == [("left", 1), ("left", 2)]
    assert watch.end() == []


@pytest.mark.parametrize(
    ("spot", "inside"),
    [((0.2, 0.5), True), ((0.8, 0.5), True), ((0.5, 0.2), False), ((0.5, 0.9), True), ((1.2, 0.5), False)],
)
def test_a_zone_may_have_a_dent(spot: tuple[float, float], inside: bool) -> None:
    assert is_inside(spot, ((0.0, 0.0), (0.5, 0.6), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0))) is inside


# ---- lines ----------------------------------------------------------------------------------------------------------


def test_a_thing_that_crosses_a_line_is_told_with_its_way() -> None:
    watch = Watch(WatchSettings((), (GATE,)))
    events = walked(watch, [60, 55, 45, 40]) + walked(watch, [40, 45, 55, 60], number=2, label=1)
    assert [(event.kind, event.direction, event.label, event.at_s) for event in events] == [
        ("crossed", "right", "person", 2), ("crossed", "left", "car", 2),
    ]  # fmt: skip
    assert watch.fields(9)["lines"] == {"gate": {"right": {"person": 1}, "left": {"car": 1}}}


def test_a_box_that_trembles_on_a_line_crosses_it_once_at_most() -> None:
    watch = Watch(WatchSettings((), (GATE,)))
    assert told(walked(watch, [60, 45, 55, 45, 55, 45, 40, 45, 55, 40, 30])) == [("crossed", "gate", 5)]


def test_a_thing_that_goes_around_the_end_of_a_line_does_not_cross_it() -> None:
    short = LineSettings("short", (0.5, 0.0), (0.5, 0.3))
    assert walked(Watch(WatchSettings((), (short,))), [60, 55, 45, 40]) == []


def test_a_line_of_one_way_tells_that_way_alone() -> None:
    one_way = LineSettings("gate", GATE.start, GATE.end, direction="left")
    watch = Watch(WatchSettings((), (one_way,)))
    assert walked(watch, [60, 55, 45, 40]) == []
    assert len(walked(watch, [40, 45, 55, 60])) == 1
    assert watch.fields(0)["lines"] == {"gate": {"left": {"person": 1}}}


def test_a_thing_that_was_last_seen_behind_a_line_crossed_it() -> None:
    assert told(walked(Watch(WatchSettings((), (GATE,))), [70, 60, 40])) == [("crossed", "gate", 2)]


def test_a_thing_that_stands_on_the_line_is_on_neither_side() -> None:
    assert told(walked(Watch(WatchSettings((), (GATE,))), [50, 60, 50, 50, 40, 40])) == [("crossed", "gate", 4)]


# ---- alarms ---------------------------------------------------------------------------------------------------------


def test_an_alarm_of_a_rate_is_on_while_more_cross_in_its_time() -> None:
    watch = Watch(WatchSettings((), (GATE,), (AlarmSettings("belt", 2, line="gate", within_s=60.0),)))
    events = []
    for second in range(0, 100, 5):
        number = second + 1
        shown = [track(number, x, second) for x in (60,)] if second < 50 else []
        events += watch.look(shown, LABELS, SIZE, second)
        for step in (1, 2):
            moved = [track(number, 40, second + step)] if second < 50 else []
            events += watch.look(moved, LABELS, SIZE, second + step)
    alarms = [(event.kind, event.at_s, event.count) for event in events if event.name == "belt"]
    assert alarms == [("raised", 12, 3), ("cleared", 97, 2)]
    assert watch.fields(100)["alarms"] == {"belt": {"on": False, "count": 2}}


def test_an_alarm_without_a_time_counts_who_is_in_the_zone() -> None:
    alarm = AlarmSettings("full", 1, zone="door", labels=("person",))
    watch = Watch(WatchSettings((DOOR,), (), (alarm,)))
    three = [track(1, 60, 0), track(2, 70, 0, label=1)]
    assert [event.kind for event in watch.look(three, LABELS, SIZE, 0)] == ["entered", "entered"]
    events = watch.look([*three, track(3, 80, 1)], LABELS, SIZE, 1)
    counts = [(event.kind, event.name, event.count) for event in events]
    assert counts == [("entered", "door", None), ("raised", "full", 2)]
    assert watch.end()[-1].kind == "cleared"


# ---- settings -------------------------------------------------------------------------------------------------------


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="named 'door'"):
        WatchSettings((DOOR, DOOR))


def test_an_alarm_over_what_is_not_there_is_refused_with_what_is() -> None:
    with pytest.raises(ValueError, match="no zone 'dor'; the rule has 'door'"):
        WatchSettings((DOOR,), (), (AlarmSettings("x", 1, zone="dor"),))


def test_an_alarm_over_a_line_says_within_which_time() -> None:
    with pytest.raises(ValueError, match=r"within_s = 60\.0"):
        AlarmSettings("x", 1, line="gate")


# ---- whatever comes -------------------------------------------------------------------------------------------------

PLACES = st.lists(st.one_of(st.none(), st.integers(0, 100)), min_size=1, max_size=25)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.integers(1, 5), st.tuples(st.integers(0, 20), PLACES), max_size=5))
def test_every_thing_that_leaves_entered_before_and_no_event_is_told_twice(
    walks: dict[int, tuple[int, list[float | None]]],
) -> None:
    watch = Watch(WatchSettings((DOOR,), (GATE,)))
    events: list[TrackEvent] = []
    for now_s in range(50):
        shown = []
        for number, (start, places) in walks.items():
            if start <= now_s < start + len(places):
                shown.append(track(number, places[now_s - start], now_s))
        events += watch.look(shown, LABELS, SIZE, now_s)
        inside = {number: watch.zones_of(number) for number in walks}
        assert watch.fields(now_s)["zones"]["door"]["counts"].get("person", 0) == sum(map(len, inside.values()))
    by_thing = defaultdict(list)
    for event in events:
        by_thing[event.track, event.name].append(event)
    for (_, name), own in by_thing.items():
        if name == "door":
            assert [event.kind for event in own] == ["entered", "left"] * (len(own) // 2)
            stays = zip(own[::2], own[1::2], strict=True)
            assert all(left.dwell_s == left.at_s - entered.at_s >= 0 for entered, left in stays)
        else:
            assert all(event.direction != before.direction for before, event in pairwise(own))
    assert watch.end() == []
