"""Where things are, how they move, and where they will be: a Kalman filter of many boxes at once, in numpy.

The model is SORT's and ByteTrack's (arxiv.org/abs/2110.06864): a box is its centre, its width over its height, and its
height, each moving with a constant speed; noise grows with the box's height. No two of the four have to do with one
another in it, so that its matrices of 8 x 8 are four filters of 2 x 2 for each box, which are written out here. A step
is the usual time between two frames. Unlike theirs, `predict` takes any number of steps, whole or not: it gives what
that many predictions would.

A state is FP64 [5, boxes, 4]: the place, the speed a step, the variance of the place, its covariance with the speed,
and the variance of the speed. Pure: every function returns a new state.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

State = npt.NDArray[np.float64]
Boxes = npt.NDArray[np.float64]

PLACE, SPEED, PLACE_VARIANCE, COVARIANCE, SPEED_VARIANCE = range(5)

HEIGHT = 3
"""Of the four, the last."""

# Deviations in heights of the box, and beside them those of the shape, which has no height in it. As ByteTrack's
# kalman_filter.py has them, which took them from DeepSORT.
_PLACE_NOISE = np.array([1 / 20, 1 / 20, 0, 1 / 20]), np.array([0, 0, 1e-2, 0])
_SPEED_NOISE = np.array([1 / 160, 1 / 160, 0, 1 / 160]), np.array([0, 0, 1e-5, 0])
_SEEN_NOISE = np.array([1 / 20, 1 / 20, 0, 1 / 20]), np.array([0, 0, 1e-1, 0])
_FIRST_PLACE = np.array([2.0, 2.0, 1.0, 2.0])
_FIRST_SPEED = np.array([10.0, 10.0, 1.0, 10.0])

LEAST_SIDE = 1e-3
"""A thing that was predicted to shrink does not vanish: its sides are at least this long, in pixels."""


def begin(boxes: Boxes) -> State:
    """Return the state of things that were seen once. boxes: [boxes, 4], left, top, right, bottom."""
    state = np.zeros((5, len(boxes), 4))
    state[PLACE] = _measured(boxes)
    heights = state[PLACE, :, HEIGHT:]
    state[PLACE_VARIANCE] = (_FIRST_PLACE * _deviation(heights, _PLACE_NOISE)) ** 2
    state[SPEED_VARIANCE] = (_FIRST_SPEED * _deviation(heights, _SPEED_NOISE)) ** 2
    return state


def predict(state: State, steps: float) -> State:
    """Return the state after a number of steps, whole or not."""
    found: State = state.copy()
    heights = state[PLACE, :, HEIGHT:]
    place_noise = _deviation(heights, _PLACE_NOISE) ** 2
    speed_noise = _deviation(heights, _SPEED_NOISE) ** 2
    covariance, speed = state[COVARIANCE], state[SPEED_VARIANCE]
    # What the noise of each step's speed adds to the place is carried by the steps that follow it.
    once, twice = max(steps * (steps - 1) / 2, 0.0), max(steps * (steps - 1) * (2 * steps - 1) / 6, 0.0)
    found[PLACE] += steps * state[SPEED]
    found[PLACE_VARIANCE] += 2 * steps * covariance + steps * steps * speed + steps * place_noise + twice * speed_noise
    found[COVARIANCE] += steps * speed + once * speed_noise
    found[SPEED_VARIANCE] += steps * speed_noise
    np.maximum(found[PLACE, :, HEIGHT], LEAST_SIDE, out=found[PLACE, :, HEIGHT])
    return found


def correct(state: State, boxes: Boxes) -> State:
    """Return the state after each thing was seen in its box. boxes: as for `begin`, one for each."""
    found = np.empty_like(state)
    place, speed, variance, covariance, speed_variance = state
    seen_noise = _deviation(place[:, HEIGHT:], _SEEN_NOISE) ** 2
    apart = _measured(boxes) - place
    gain = 1 / (variance + seen_noise)
    kept = seen_noise * gain
    found[PLACE] = place + variance * gain * apart
    found[SPEED] = speed + covariance * gain * apart
    found[PLACE_VARIANCE] = variance * kept
    found[COVARIANCE] = covariance * kept
    found[SPEED_VARIANCE] = speed_variance - covariance * covariance * gain
    return found


def boxes_of(state: State) -> Boxes:
    """Return the boxes [boxes, 4] of a state: left, top, right, bottom."""
    centre, shape, heights = state[PLACE, :, :2], state[PLACE, :, 2:3], state[PLACE, :, HEIGHT:]
    half = np.concatenate((np.maximum(shape * heights, LEAST_SIDE), heights), axis=1) / 2
    return np.concatenate((centre - half, centre + half), axis=1)


def overlaps(first: Boxes, second: Boxes) -> Boxes:
    """Return the intersection over union of each of the first boxes [n, 4] with each of the second [m, 4]: [n, m]."""
    sides = np.minimum(first[:, None, 2:], second[None, :, 2:]) - np.maximum(first[:, None, :2], second[None, :, :2])
    np.maximum(sides, 0, out=sides)
    shared = sides[:, :, 0] * sides[:, :, 1]
    areas = [(each[:, 2] - each[:, 0]) * (each[:, 3] - each[:, 1]) for each in (first, second)]
    found: Boxes = shared / (areas[0][:, None] + areas[1][None, :] - shared)
    return found


# ---- private --------------------------------------------------------------------------------------------------------


def _measured(boxes: Boxes) -> Boxes:
    """Centre, width over height, and height. Shapes: [boxes, 4] -> [boxes, 4]."""
    sides = boxes[:, 2:] - boxes[:, :2]
    found = np.empty_like(boxes)
    found[:, :2] = boxes[:, :2] + sides / 2
    found[:, 2] = sides[:, 0] / sides[:, 1]
    found[:, HEIGHT] = sides[:, 1]
    return found


def _deviation(heights: Boxes, noise: tuple[Boxes, Boxes]) -> Boxes:
    """The deviation of each of the four numbers. Shapes: [boxes, 1] -> [boxes, 4]."""
    of_height, besides = noise
    return heights * of_height + besides
