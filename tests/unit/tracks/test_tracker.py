"""Ids that last: on made-up scenes beside the reference's figures, and whatever boxes come."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.tracks.tracker import LOST_S, MOST_THINGS, FrameBoxes, Track, Tracker
from tests.moving_scenes import Frame, scenes, switches

pytestmark = pytest.mark.long  # it is about numbers, whatever the Python

REFERENCE = json.loads((Path(__file__).parent / "reference.json").read_text())
"""The record of bench/track_reference.py: of each scene, how often ByteTrack's own code changed an id."""

STEP_S = 1 / 15


def frame(*boxes: tuple[float, ...], score: float = 0.9, label: int = 0) -> FrameBoxes:
    """Boxes of one score and label; a fifth number is a box's own score, a sixth its label."""
    listed = [(*box, score, label)[:6] if len(box) < 6 else box for box in boxes]
    listed = [(*box[:4], box[4] if len(box) > 4 else score, box[5] if len(box) > 5 else label) for box in listed]
    array = np.array(listed, np.float64).reshape(-1, 6)
    return FrameBoxes(array[:, :4], array[:, 4], array[:, 5].astype(np.int64))


def boxes_of(scene: Frame) -> FrameBoxes:
    return frame(*((*seen.box, seen.score, seen.label) for seen in scene.seen))


def ids(tracks: Sequence[Track]) -> dict[int, int]:
    """The id of each box of this frame."""
    return {track.row: track.id for track in tracks if track.row is not None}


def box(x: float, y: float = 100.0, width: float = 40.0, height: float = 100.0) -> tuple[float, float, float, float]:
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


# ---- the reference --------------------------------------------------------------------------------------------------


def test_ids_change_no_oftener_than_the_references_on_scenes_of_each_kind() -> None:
    ours, theirs, named = Counter[str](), Counter[str](), []
    for name, frames in scenes():
        tracker, kind = Tracker(), name.split()[0]
        changes, share = switches(frames, [ids(tracker.track(boxes_of(each), each.time_s)) for each in frames])
        ours[kind] += changes
        theirs[kind] += REFERENCE["scenes"][name]["switches"]
        named.append(share)
    assert {kind: (count, theirs[kind]) for kind, count in ours.items() if count > 1.1 * theirs[kind]} == {}
    assert ours["skipped"] < 0.5 * theirs["skipped"]  # which counts frames, where we go by time
    assert np.mean(named) >= np.mean([each["named"] for each in REFERENCE["scenes"].values()]) - 0.01


def test_the_reference_was_recorded_on_these_scenes() -> None:
    boxes = {name: sum(len(each.seen) for each in frames) for name, frames in scenes()}
    assert boxes == {name: each["boxes"] for name, each in REFERENCE["scenes"].items()}


# ---- single things --------------------------------------------------------------------------------------------------


def test_a_box_that_stands_still_keeps_its_id() -> None:
    tracker = Tracker()
    found = [ids(tracker.track(frame(box(100)), number * STEP_S)) for number in range(1000)]
    assert found[1:] == [{0: 1}] * 999


def test_a_thing_gets_its_id_with_its_second_frame() -> None:
    tracker = Tracker()
    assert tracker.track(frame(box(100)), 0.0) == []
    (track,) = tracker.track(frame(box(102)), STEP_S)
    assert (track.id, track.row, track.since_s, track.seen_s) == (1, 0, 0.0, STEP_S)


def test_a_thing_that_one_frame_has_gets_no_id_and_spends_none() -> None:
    tracker = Tracker()
    for number in range(10):
        assert tracker.track(frame(box(100 + 300 * (number % 3))), number * STEP_S) == []
    tracker.track(frame(box(700)), 1.0)
    assert ids(tracker.track(frame(box(700)), 1.0 + STEP_S)) == {0: 1}


def test_a_thing_that_is_half_hidden_keeps_its_id_by_its_low_scores() -> None:
    tracker = Tracker()
    for number in range(10):
        tracker.track(frame(box(100 + 4 * number)), number * STEP_S)
    for number in range(10, 60):
        assert ids(tracker.track(frame((*box(100 + 4 * number), 0.2)), number * STEP_S)) == {0: 1}


def test_low_scores_begin_nothing() -> None:
    tracker = Tracker()
    assert [tracker.track(frame((*box(100), 0.4)), number * STEP_S) for number in range(20)] == [[]] * 20


def test_a_thing_that_was_hidden_is_found_where_it_is_expected() -> None:
    tracker = Tracker()
    for number in range(15):
        tracker.track(frame(box(100 + 6 * number)), number * STEP_S)
    for number in range(15, 30):
        (track,) = tracker.track(frame(), number * STEP_S)
        assert (track.id, track.row) == (1, None)
    assert track.box[0] > box(100 + 6 * 24)[0]
    assert ids(tracker.track(frame(box(100 + 6 * 30)), 30 * STEP_S)) == {0: 1}


def test_frames_that_were_skipped_are_predicted_by_their_time() -> None:
    """The same thing after the same time is found, whether frames said that nothing was there or did not come."""
    tracker = Tracker()
    for number in range(15):
        tracker.track(frame(box(100 + 6 * number)), number * STEP_S)
    assert ids(tracker.track(frame(box(100 + 6 * 30)), 30 * STEP_S)) == {0: 1}


def test_two_that_cross_keep_their_ids() -> None:
    tracker = Tracker()
    found: list[dict[int, int]] = []
    for number in range(60):
        there, back = box(100 + 6 * number), box(454 - 6 * number, 108)
        is_hidden = abs(there[0] - back[0]) < 25
        found.append(ids(tracker.track(frame(there, *(() if is_hidden else (back,))), number * STEP_S)))
    assert found[1] == found[-1] == {0: 1, 1: 2}


def test_a_thing_that_is_lost_for_long_is_gone_and_its_id_too() -> None:
    tracker = Tracker()
    for number in range(10):
        tracker.track(frame(box(100)), number * STEP_S)
    last_s = 9 * STEP_S
    assert len(tracker.track(frame(), last_s + LOST_S)) == 1
    assert tracker.track(frame(), last_s + LOST_S + STEP_S) == []
    tracker.track(frame(box(100)), last_s + LOST_S + 2 * STEP_S)
    assert ids(tracker.track(frame(box(100)), last_s + LOST_S + 3 * STEP_S)) == {0: 2}


def test_a_slow_camera_may_miss_a_thing_three_times() -> None:
    tracker = Tracker()
    for number in range(6):
        tracker.track(frame(box(100)), number * 10.0)
    for number in range(6, 9):
        assert len(tracker.track(frame(), number * 10.0)) == 1
    assert tracker.track(frame(), 90.0) == []


def test_a_label_that_flickers_is_the_one_that_most_frames_say() -> None:
    tracker = Tracker()
    for number in range(30):
        found = tracker.track(frame((*box(100), 0.8, number % 5 == 0)), number * STEP_S)
    assert [(track.id, track.label) for track in found] == [(1, 0)]


def test_a_label_that_changed_for_good_is_taken_over() -> None:
    tracker = Tracker()
    for number in range(30):
        found = tracker.track(frame((*box(100), 0.8, number >= 10)), number * STEP_S)
    assert [(track.id, track.label) for track in found] == [(1, 1)]


def test_a_thing_before_another_of_another_label_does_not_take_its_id() -> None:
    tracker = Tracker()
    rider, bicycle = (*box(100, 90, 50, 120), 0.9, 0), (*box(104, 120, 60, 90), 0.9, 1)
    for number in range(10):
        found = tracker.track(frame(rider, bicycle), number * STEP_S)
    before = {track.label: track.id for track in found}
    for number in range(10, 20):
        found = tracker.track(frame(bicycle), number * STEP_S)
        assert {track.label: track.id for track in found if track.row is not None} == {1: before[1]}


@pytest.mark.parametrize("back_s", [0.0, -5.0])
def test_a_clock_that_stands_or_goes_back_counts_as_the_same_instant(back_s: float) -> None:
    tracker = Tracker()
    for number in range(10):
        tracker.track(frame(box(100 + 6 * number)), number * STEP_S)
    assert ids(tracker.track(frame(box(154)), 9 * STEP_S + back_s)) == {0: 1}
    assert ids(tracker.track(frame(box(160)), 10 * STEP_S)) == {0: 1}


@pytest.mark.parametrize("bad", [(math.nan, 0, 10, 10), (10, 0, 10, 10), (10, 10, 0, 0), (0, 0, math.inf, 10)])
def test_corners_that_make_no_box_get_no_id(bad: tuple[float, ...]) -> None:
    tracker = Tracker()
    for number in range(5):
        found = tracker.track(frame(bad, box(100)), number * STEP_S)
    assert ids(found) == {1: 1}


def test_things_are_bounded_and_the_longest_lost_go_first() -> None:
    tracker = Tracker(lost_s=1e6)
    for number in range(20):
        boxes = frame(*(box(60.0 * place, 200.0 * number) for place in range(100)))
        tracker.track(boxes, number * 2 * STEP_S)
        found = tracker.track(boxes, (number * 2 + 1) * STEP_S)
    assert len(found) == MOST_THINGS
    assert sorted(ids(found).values()) == list(range(1901, 2001))


# ---- whatever comes -------------------------------------------------------------------------------------------------

SOME_BOXES = st.lists(
    st.tuples(
        st.integers(0, 300), st.integers(0, 300), st.sampled_from((0.05, 0.3, 0.55, 0.7, 0.9)), st.integers(0, 2)
    ),
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(SOME_BOXES, st.sampled_from((0.0, 0.05, 0.1, 0.5, 3.0))), max_size=30))
def test_ids_are_unique_and_none_returns_after_it_is_gone_whatever_frames_come(
    shown: list[tuple[list[tuple[int, int, float, int]], float]],
) -> None:
    tracker, now_s = Tracker(), 0.0
    before: set[int] = set()
    gone: set[int] = set()
    for boxes, passed_s in shown:
        now_s += passed_s
        listed = frame(*((*box(x, y, 60, 60), score, label) for x, y, score, label in boxes))
        found = tracker.track(listed, now_s)
        numbers = [track.id for track in found]
        rows = [track.row for track in found if track.row is not None]
        assert numbers == sorted(set(numbers))
        assert len(rows) == len(set(rows))
        assert all(0 <= row < len(boxes) for row in rows)
        assert not gone & set(numbers)
        assert all(number > max((before | gone) or {0}) for number in set(numbers) - before)
        assert all(listed.boxes[track.row].tolist() == list(track.box) for track in found if track.row is not None)
        assert all(track.since_s < track.seen_s <= now_s for track in found)
        gone |= before - set(numbers)
        before = set(numbers)
