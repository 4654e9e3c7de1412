"""The filter of many boxes, beside the same written as matrices of 8 x 8 for one box."""

from __future__ import annotations

import numpy as np
import pytest

from edge_runtime.tracks import motion

pytestmark = pytest.mark.long  # it is about numbers, whatever the Python

BOXES = np.array([[100.0, 50.0, 140.0, 150.0], [300.0, 20.0, 420.0, 80.0]])
LATER = np.array([[106.0, 52.0, 147.0, 155.0], [297.0, 22.0, 415.0, 81.0]])


class Matrices:
    """One box: SORT's filter as its papers write it, with ByteTrack's noise."""

    def __init__(self, box: np.ndarray) -> None:
        self.mean = np.concatenate((self.measured(box), np.zeros(4)))
        height = self.mean[3]
        deviation = [height / 10, height / 10, 1e-2, height / 10, height / 16, height / 16, 1e-5, height / 16]
        self.covariance = np.diag(np.square(deviation))
        self.move = np.eye(8) + np.eye(8, k=4)
        self.look = np.eye(4, 8)

    @staticmethod
    def measured(box: np.ndarray) -> np.ndarray:
        left, top, right, bottom = box
        return np.array([(left + right) / 2, (top + bottom) / 2, (right - left) / (bottom - top), bottom - top])

    def predict(self) -> None:
        height = self.mean[3]
        deviation = [height / 20, height / 20, 1e-2, height / 20, height / 160, height / 160, 1e-5, height / 160]
        self.mean = self.move @ self.mean
        self.covariance = self.move @ self.covariance @ self.move.T + np.diag(np.square(deviation))

    def correct(self, box: np.ndarray) -> None:
        height = self.mean[3]
        noise = np.diag(np.square([height / 20, height / 20, 1e-1, height / 20]))
        expected = self.look @ self.covariance @ self.look.T + noise
        gain = self.covariance @ self.look.T @ np.linalg.inv(expected)
        self.mean = self.mean + gain @ (self.measured(box) - self.look @ self.mean)
        self.covariance = self.covariance - gain @ expected @ gain.T


def matches(state: motion.State, number: int, one: Matrices) -> None:
    variances = np.diag(one.covariance)
    columns = (one.mean[:4], one.mean[4:], variances[:4], np.diag(one.covariance, 4), variances[4:])
    for row, found in enumerate(columns):
        np.testing.assert_allclose(state[row, number], found, rtol=1e-9, atol=1e-12)


def test_many_boxes_move_as_each_would_by_its_matrices() -> None:
    state = motion.begin(BOXES)
    each = [Matrices(box) for box in BOXES]
    for boxes in (LATER, BOXES, LATER):
        state = motion.correct(motion.predict(state, 1), boxes)
        for number, one in enumerate(each):
            one.predict()
            one.correct(boxes[number])
            matches(state, number, one)


def test_steps_at_once_are_as_many_steps_one_by_one() -> None:
    state = motion.correct(motion.predict(motion.begin(BOXES), 1), LATER)
    state[motion.SPEED, :, motion.HEIGHT] = 0.0  # noise follows the height
    apart = state
    for _ in range(5):
        apart = motion.predict(apart, 1)
    np.testing.assert_allclose(motion.predict(state, 5), apart)


def test_no_time_changes_nothing() -> None:
    state = motion.correct(motion.predict(motion.begin(BOXES), 1), LATER)
    np.testing.assert_array_equal(motion.predict(state, 0), state)


def test_half_a_step_goes_half_as_far_and_is_surer() -> None:
    state = motion.correct(motion.predict(motion.begin(BOXES), 1), LATER)
    half, whole = motion.predict(state, 0.5), motion.predict(state, 1)
    np.testing.assert_allclose(half[motion.PLACE] - state[motion.PLACE], (whole - state)[motion.PLACE] / 2, atol=1e-12)
    assert (half[motion.PLACE_VARIANCE] < whole[motion.PLACE_VARIANCE]).all()


def test_boxes_come_back_as_they_were_seen() -> None:
    np.testing.assert_allclose(motion.boxes_of(motion.begin(BOXES)), BOXES)


def test_a_thing_that_shrinks_for_long_keeps_a_box() -> None:
    state = motion.begin(BOXES)
    state[motion.SPEED, :, motion.HEIGHT] = -50.0
    boxes = motion.boxes_of(motion.predict(state, 100))
    assert (boxes[:, 2:] > boxes[:, :2]).all()


@pytest.mark.parametrize(
    ("other", "share"),
    [
        ((0, 0, 10, 10), 1.0),
        ((5, 0, 15, 10), 1 / 3),
        ((10, 0, 20, 10), 0.0),
        ((30, 0, 40, 9), 0.0),
        ((0, 0, 5, 5), 0.25),
    ],
)
def test_an_overlap_is_the_shared_part_of_both(other: tuple[int, ...], share: float) -> None:
    found = motion.overlaps(np.array([[0.0, 0, 10, 10]]), np.array([other], np.float64))
    assert found.tolist() == [[pytest.approx(share)]]
