"""Ids that last: which of a frame's boxes are things that earlier frames had, by ByteTrack's method.

Owns: the things that are followed, seen or lost for a while. Decides by the frames and instants that it is given, and
does no I/O. Boxes with high scores look for a thing first, then those with low scores look among the things that the
last frame had and no box found: something half hidden scores low and stays where it is expected. Thread: one at a time.

What differs from the paper's own code (github.com/ifzhang/ByteTrack): time is a frame's own and not counted, so that
frames that were skipped are predicted; a thing gets its id when a second frame has it, and no id is spent on what one
frame had; a box of another label finds a thing only where it overlaps it well.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from edge_runtime.tracks import motion
from edge_runtime.tracks.assignment import ALONE, heaviest_pairs

HIGH_SCORE = 0.5
"""ByteTrack's `track_thresh`: boxes above it look for things first."""

LOW_SCORE = 0.1
"""Boxes below it are noise; of the paper."""

NEW_MARGIN = 0.1
"""A new thing scores so much more than HIGH_SCORE; of the paper's code."""

LOST_S = 2.0
"""A thing that no frame has for longer is gone. The paper has 30 frames, of videos of 14 to 30 a second."""

LOST_STEPS = 3
"""But a thing may be missing from so many frames, however slowly they come."""

LEAST_SHARED = 0.2
"""Of a box with a high score and a thing: intersection over union times the score. The paper's limit of 0.8 on their
distance."""

LEAST_LOW_SHARED = 0.5
"""Of a box with a low score and a thing: intersection over union."""

LEAST_NEW_SHARED = 0.3
"""Of a box and a thing that one frame has had; as LEAST_SHARED."""

OTHER_LABEL = 0.5
"""What an overlap counts where labels differ: detectors call one thing a car and a truck by turns, yet a person is not
the bicycle."""

ONE_THING = 0.85
"""A thing that is seen and a lost one that overlap more are one; of the paper's code."""

MOST_TRUST = 5.0
"""Sum of scores up to which a thing's label is trusted: another label needs as much to replace it."""

MOST_THINGS = 512
"""An answer has 1000 boxes at most (steps.py), a picture seldom 100. Beyond, those that are lost longest go first."""

KNOWN_STEPS = 9
"""Times between frames whose median is a step: two or three that were skipped do not change it."""

Boxes = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class FrameBoxes(NamedTuple):
    """The boxes of one frame: boxes [n, 4] (left, top, right, bottom, in pixels), scores [n], labels [n] as numbers."""

    boxes: Boxes
    scores: Boxes
    labels: Numbers


class Track(Struct, frozen=True):
    """One thing. row: its box among this frame's; None while it is lost.

    box: where it is: this frame's box, or the expected one. label: the number that most of its boxes had. since_s,
    seen_s: the instants of the first frame that had it, and of the last.
    """

    id: int
    label: int
    row: int | None
    box: tuple[float, float, float, float]
    since_s: float
    seen_s: float


class _Things(Struct):
    """All things that are followed, as columns. id: 0 until a second frame has it. row: ALONE while it is lost."""

    state: motion.State
    id: Numbers
    label: Numbers
    trust: Boxes
    since_s: Boxes
    seen_s: Boxes
    row: Numbers

    def chosen(self, which: Flags | Numbers) -> _Things:
        """Return these of them."""
        return _Things(
            self.state[:, which],
            self.id[which],
            self.label[which],
            self.trust[which],
            self.since_s[which],
            self.seen_s[which],
            self.row[which],
        )

    def joined(self, others: _Things) -> _Things:
        """Return both, these first."""
        return _Things(
            np.concatenate((self.state, others.state), axis=1),
            np.concatenate((self.id, others.id)),
            np.concatenate((self.label, others.label)),
            np.concatenate((self.trust, others.trust)),
            np.concatenate((self.since_s, others.since_s)),
            np.concatenate((self.seen_s, others.seen_s)),
            np.concatenate((self.row, others.row)),
        )


class Tracker:
    """Follows what is seen by one camera.

    high: boxes that score more look for things first, as HIGH_SCORE. lost_s: as LOST_S. next_id: of the next thing,
    above all that were given.
    """

    def __init__(self, high: float = HIGH_SCORE, lost_s: float = LOST_S, next_id: int = 1) -> None:
        self.next_id = next_id
        self._high = high
        self._lost_s = lost_s
        self._time_s: float | None = None
        self._times: deque[float] = deque(maxlen=KNOWN_STEPS)
        self._step_s = 0.0
        none = FrameBoxes(np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64))
        self._things = _begun(none, np.zeros(0, np.int64), 0.0)

    def track(self, frame: FrameBoxes, time_s: float) -> list[Track]:
        """Return the things with an id, by id: those of this frame, and those that are lost for a while.

        time_s: when the frame was taken, monotonic; earlier than the last one counts as the same instant. A thing that
        is listed no more is gone, and its id is never used again.
        """
        steps = self._advance(time_s)
        self._forget()
        things = self._things
        things.state = motion.predict(things.state, steps)
        was_seen = things.row != ALONE
        things.row = np.full(len(things.id), ALONE, np.int64)
        high, low = self._wanted(frame)
        shared = _shared(things, frame)
        has_id = things.id > 0
        scored = shared * frame.scores
        self._pair(scored, has_id, high, LEAST_SHARED)
        self._pair(shared, has_id & was_seen & (things.row == ALONE), low, LEAST_LOW_SHARED)
        is_free = np.ones(len(frame.scores), bool)
        is_free[things.row[things.row != ALONE]] = False
        self._pair(scored, ~has_id, high[is_free[high]], LEAST_NEW_SHARED)
        is_free[things.row[things.row != ALONE]] = False
        self._learn(frame)
        self._begin(frame, high[is_free[high]])
        self._unite()
        self._name()
        return self._tracks(frame)

    # ---- the steps --------------------------------------------------------------------------------------------------

    def _advance(self, time_s: float) -> float:
        """Set the clock. Return how many steps it went."""
        passed_s = 0.0 if self._time_s is None else max(time_s - self._time_s, 0.0)
        self._time_s = time_s if self._time_s is None else self._time_s + passed_s
        if not passed_s:
            return 0.0
        self._times.append(passed_s)
        self._step_s = statistics.median(self._times)
        return passed_s / self._step_s

    def _forget(self) -> None:
        """Drop the things that were not seen for too long."""
        assert self._time_s is not None
        limit_s = max(self._lost_s, LOST_STEPS * self._step_s)
        self._things = self._things.chosen(self._time_s - self._things.seen_s <= limit_s)

    def _wanted(self, frame: FrameBoxes) -> tuple[Numbers, Numbers]:
        """The rows of boxes with high and with low scores; a box without an area is in neither."""
        is_box = np.isfinite(frame.boxes).all(axis=1) & (frame.boxes[:, 2:] > frame.boxes[:, :2]).all(axis=1)
        is_high = frame.scores > self._high
        return np.flatnonzero(is_box & is_high), np.flatnonzero(is_box & ~is_high & (frame.scores > LOW_SCORE))

    def _pair(self, shared: Boxes, which: Flags, rows: Numbers, least: float) -> None:
        """Give these rows of the frame to these things. shared: of each thing with each row; below `least`: none."""
        (able,) = which.nonzero()
        if not len(able) or not len(rows):
            return
        partners = heaviest_pairs(shared[able][:, rows] - least)
        is_paired = partners != ALONE
        self._things.row[able[is_paired]] = rows[partners[is_paired]]

    def _learn(self, frame: FrameBoxes) -> None:
        """Take over what this frame says of things; drop those without an id that it has no more."""
        assert self._time_s is not None
        things = self._things
        is_seen = things.row != ALONE
        rows = things.row[is_seen]
        things.state[:, is_seen] = motion.correct(things.state[:, is_seen], frame.boxes[rows])
        things.state[motion.SPEED, ~is_seen, motion.HEIGHT] = 0.0  # what is hidden does not grow
        things.seen_s[is_seen] = self._time_s
        trust, scores = things.trust[is_seen], frame.scores[rows]
        is_same = things.label[is_seen] == frame.labels[rows]
        trust = np.where(is_same, np.minimum(trust + scores, MOST_TRUST), trust - scores)
        things.label[is_seen] = np.where(trust < 0, frame.labels[rows], things.label[is_seen])
        things.trust[is_seen] = np.abs(trust)
        is_kept = is_seen | (things.id > 0)
        self._things = things if is_kept.all() else things.chosen(is_kept)

    def _begin(self, frame: FrameBoxes, free: Numbers) -> None:
        """Begin to follow what looks new among these rows, as long as there is room."""
        assert self._time_s is not None
        new = free[frame.scores[free] > self._high + NEW_MARGIN]
        if not len(new):
            return
        if len(self._things.id) + len(new) > MOST_THINGS:
            new = new[np.argsort(-frame.scores[new], kind="stable")][:MOST_THINGS]
            lasting = np.lexsort((self._things.id, -self._things.seen_s))  # seen last first, of these the oldest
            self._things = self._things.chosen(np.sort(lasting[: MOST_THINGS - len(new)]))
        self._things = self._things.joined(_begun(frame, new, self._time_s))

    def _unite(self) -> None:
        """Where a thing that is seen and a lost one are one, keep the older one's id."""
        things = self._things
        (seen,), (lost,) = (things.row != ALONE).nonzero(), (things.row == ALONE).nonzero()
        if not len(seen) or not len(lost):
            return
        boxes = motion.boxes_of(things.state)
        is_gone = np.zeros(len(things.id), bool)
        for first, second in zip(*(motion.overlaps(boxes[seen], boxes[lost]) > ONE_THING).nonzero(), strict=True):
            now, before = seen[first], lost[second]
            if is_gone[now] or is_gone[before]:
                continue
            if things.since_s[now] > things.since_s[before]:
                things.id[now], things.since_s[now] = things.id[before], things.since_s[before]
            is_gone[before] = True
        if is_gone.any():
            self._things = things.chosen(~is_gone)

    def _name(self) -> None:
        """Give an id to what two frames had."""
        things = self._things
        (nameless,) = ((things.id == 0) & (things.since_s < things.seen_s)).nonzero()
        things.id[nameless] = np.arange(self.next_id, self.next_id + len(nameless))
        self.next_id += len(nameless)

    def _tracks(self, frame: FrameBoxes) -> list[Track]:
        things = self._things
        boxes = motion.boxes_of(things.state)
        is_seen = things.row != ALONE
        boxes[is_seen] = frame.boxes[things.row[is_seen]]
        columns = (things.id, things.label, things.row, boxes, things.since_s, things.seen_s)
        found = [
            Track(number, label, None if row == ALONE else row, tuple(box), since_s, seen_s)
            for number, label, row, box, since_s, seen_s in zip(*(each.tolist() for each in columns), strict=True)
            if number
        ]
        return sorted(found, key=lambda track: track.id)


# ---- private --------------------------------------------------------------------------------------------------------


def _begun(frame: FrameBoxes, rows: Numbers, time_s: float) -> _Things:
    """Things that these rows of a frame begin."""
    count = len(rows)
    return _Things(
        motion.begin(frame.boxes[rows]),
        np.zeros(count, np.int64),
        frame.labels[rows].astype(np.int64),
        frame.scores[rows].astype(np.float64),
        np.full(count, time_s),
        np.full(count, time_s),
        rows.astype(np.int64),
    )


def _shared(things: _Things, frame: FrameBoxes) -> Boxes:
    """How far each thing, where it is expected, and each box are one. Shapes: -> [things, boxes]."""
    with np.errstate(all="ignore"):  # a box without an area is left out later
        shared = motion.overlaps(motion.boxes_of(things.state), frame.boxes)
    return np.where(things.label[:, None] == frame.labels[None, :], shared, shared * OTHER_LABEL)
