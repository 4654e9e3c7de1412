"""Labels that a few frames agree on: what flickers neither appears nor disappears."""

from __future__ import annotations

import numpy as np
import pytest

from edge_runtime.answers import PICTURE_SIZE
from edge_runtime.steady import SteadyAnswer
from edge_runtime.steps import ModelSteps, OutputSteps

BOXES = ModelSteps({}, {"found": OutputSteps(layout="yolov8")})
CLASSES = ModelSteps({}, {"scores": OutputSteps()})


def boxes(*labels: int, left: float = 0.0) -> dict[str, np.ndarray]:
    """A frame's answer with a box of each label; of the same label the later is a little less sure."""
    array = np.full((1, 4, 6), 0, np.float32)
    array[:, :, 0] = -1
    for row, label in enumerate(labels):
        array[0, row] = (label, 0.9 - row / 10, left + row, 0, left + row + 1, 1)
    return {"found": array, PICTURE_SIZE: np.array([[64, 48]])}


def classes(*labels: int) -> dict[str, np.ndarray]:
    return {"scores": np.array([[(label, 0.9 - row / 10) for row, label in enumerate(labels)]], np.float32)}


def labels_of(outputs: dict[str, np.ndarray], name: str) -> list[int]:
    return [int(row[0]) for row in outputs[name][0] if row[0] >= 0]


def told(steps: ModelSteps, frames: list[dict[str, np.ndarray]], seen: int = 2, of: int = 3) -> list[list[int]]:
    """The labels at each change."""
    steady = SteadyAnswer(steps, (), seen, of)
    name = next(iter(steps.outputs))
    found = []
    for frame in frames:
        outputs, has_changed = steady.agree(frame)
        if has_changed:
            found.append(labels_of(outputs, name))
    return found


@pytest.mark.parametrize(
    ("frames", "changes"),
    [
        ([()], []),
        ([(), ()], [[]]),
        ([(1,), (1,), (1,)], [[1]]),
        ([(), (), (1,), (), (1,)], [[], [1]]),
        ([(), (), (1,), (), ()], [[]]),
        ([(1,), (1,), (), (1,), (1,)], [[1]]),
        ([(1,), (1,), (), ()], [[1], []]),
        ([(1,), (1,), (1, 1), (1, 1), (1,), (1,)], [[1], [1, 1], [1]]),
        ([(1,), (1,), (1, 2), (1, 2)], [[1], [1, 2]]),
        ([(1,), (2,), (1,), (2,), (1,)], [[], [1], [2], [1]]),
    ],
)
def test_a_box_appears_and_goes_when_two_of_three_frames_say_so(frames, changes):
    assert told(BOXES, [boxes(*each) for each in frames]) == changes


def test_more_frames_hold_longer():
    frames = [(1,)] * 3 + [()] * 2 + [(1,)] + [()] * 3
    assert told(BOXES, [boxes(*each) for each in frames], 3, 4) == [[1], []]


def test_every_frame_counts_where_one_of_one_is_wanted():
    assert told(BOXES, [boxes(*each) for each in [(), (1,), (), (1,)]], 1, 1) == [[], [1], [], [1]]


@pytest.mark.parametrize(
    ("frames", "changes"),
    [
        ([(1, 2), (1, 2)], [[1, 2]]),
        ([(1, 2), (2, 1), (1, 2), (1, 2)], [[1, 2]]),
        ([(1, 2), (1, 2), (2, 1), (2, 1)], [[1, 2], [2, 1]]),
        ([(1, 2), (1, 2), (2, 1), (3, 1), (4, 1), (1, 2)], [[1, 2]]),
        ([(1, 2), (1, 3), (1, 4)], [[1, 3]]),
    ],
)
def test_a_class_changes_when_two_of_three_frames_have_it_best(frames, changes):
    assert told(CLASSES, [classes(*each) for each in frames]) == changes


def test_a_label_that_this_frame_missed_is_reported_as_it_was_last_seen():
    steady = SteadyAnswer(BOXES, (), 2, 3)
    for frame in (boxes(1, left=5), boxes(1, left=6)):
        steady.agree(frame)
    outputs, has_changed = steady.agree(boxes())
    assert not has_changed
    assert outputs["found"][0, 0, 2] == 6
    assert outputs["found"].shape == (1, 4, 6)


def test_one_box_more_than_is_agreed_on_is_left_out():
    steady = SteadyAnswer(BOXES, (), 2, 3)
    steady.agree(boxes(1))
    steady.agree(boxes(1))
    outputs, _ = steady.agree(boxes(1, 1, 2))
    assert labels_of(outputs, "found") == [1]


def test_outputs_that_do_not_count_change_nothing_and_are_passed_on():
    steps = ModelSteps({}, {"found": OutputSteps(layout="yolov8"), "scores": OutputSteps()})
    steady = SteadyAnswer(steps, ("found",), 1, 1)
    steady.agree({**boxes(1), **classes(1, 2)})
    outputs, has_changed = steady.agree({**boxes(1), **classes(2, 1)})
    assert not has_changed
    assert labels_of(outputs, "scores") == [2, 1]


def test_without_labels_every_frame_is_a_change():
    steady = SteadyAnswer(ModelSteps({}, {"vector": OutputSteps(answer="embedding")}), (), 2, 3)
    assert steady.agree({"vector": np.ones((1, 3), np.float32)})[1]


def test_things_with_points_are_agreed_on_as_boxes_are():
    steps = ModelSteps({}, {"found": OutputSteps(answer="keypoints", keypoints=(2, 3))})
    frames = []
    for label in (1, None, 1, 1):
        array = np.zeros((1, 4, 12), np.float32)
        array[:, :, 0] = -1
        if label is not None:
            array[0, 0] = (label, 0.9, 0, 0, 9, 9, 1, 2, 0.5, 3, 4, 0.5)
        frames.append({"found": array})
    assert told(steps, frames) == [[], [1]]
    steady = SteadyAnswer(steps, (), 2, 3)
    for frame in frames:
        outputs, _ = steady.agree(frame)
    assert outputs["found"][0, 0].tolist() == frames[0]["found"][0, 0].tolist()
