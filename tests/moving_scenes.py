"""Made-up scenes for trackers: things that move, cross, hide behind one another and flicker, as a detector tells them.

The same numbers everywhere: from `random.Random` alone, rounded. `switches` counts how often a thing's id changes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 1280, 720


class Seen(NamedTuple):
    """A box that a detector tells. thing: whose it is, -1 for nothing's."""

    box: tuple[float, float, float, float]
    score: float
    label: int
    thing: int


class Frame(NamedTuple):
    """What is told of one frame, in no order."""

    time_s: float
    seen: tuple[Seen, ...]


class Thing(NamedTuple):
    """What moves. middle: (seconds) -> x, y of its center in pixels, or None while it is not in the picture.

    depth: the smaller is in front of the other.
    """

    middle: Callable[[float], tuple[float, float] | None]
    size: tuple[float, float]
    depth: float
    label: int = 0


PILLAR = (600.0, 0.0, 680.0, 720.0)


def detected(
    things: Sequence[Thing],
    times: Sequence[float],
    random_: random.Random,
    *,
    jitter: float = 0.02,
    missed: float = 0.02,
    false: float = 0.0,
    pillar: tuple[float, float, float, float] | None = None,
    flips: float = 0.0,
) -> list[Frame]:
    """Look at things as a detector does: what is half hidden scores low, what is nearly hidden is not seen at all.

    jitter: deviation of each side, as a share of the height. missed: share of boxes that are not told for no reason.
    false: boxes a frame that are nothing's. flips: share of boxes with another label.
    """
    frames = []
    for time_s in times:
        boxes = {}
        for number, thing in enumerate(things):
            middle = thing.middle(time_s)
            if middle is not None:
                (x, y), (width, height) = middle, thing.size
                boxes[number] = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
        seen = []
        for number, box in boxes.items():
            before = [other for each, other in boxes.items() if things[each].depth < things[number].depth]
            share = _visible(box, [*before, *([pillar] if pillar else [])])
            score = min(max(0.35 + 0.6 * share + random_.gauss(0, 0.06), 0.05), 0.99)
            if share < 0.3:
                continue
            if share < 0.65:
                score = min(score, random_.uniform(0.15, 0.48))
            if random_.random() < missed:
                continue
            noise = [random_.gauss(0, jitter) * things[number].size[1] for _ in range(4)]
            told = tuple(round(side + error, 2) for side, error in zip(box, noise, strict=True))
            label = things[number].label
            if random_.random() < flips:
                label = 1 - label
            seen.append(Seen(told, round(score, 3), label, number))  # type: ignore[arg-type]
        for _ in range(_whole(false, random_)):
            seen.append(nothing(random_))
        random_.shuffle(seen)
        frames.append(Frame(round(time_s, 4), tuple(seen)))
    return frames


def scenes() -> Iterator[tuple[str, list[Frame]]]:
    """All of them: name, frames."""
    for number in range(6):
        random_ = random.Random(f"crossing {number}")
        yield f"crossing {number}", detected(_crossing(random_), _times(15, 8), random_)
    for number in range(4):
        random_ = random.Random(f"pillar {number}")
        yield f"pillar {number}", detected(_walkers(random_, 6), _times(15, 12), random_, pillar=PILLAR)
    for number in range(4):
        random_ = random.Random(f"crowd {number}")
        yield f"crowd {number}", crowd(random_, 20, 12)
    for number in range(4):
        random_ = random.Random(f"flicker {number}")
        yield f"flicker {number}", detected(_walkers(random_, 8), _times(15, 12), random_, missed=0.15, false=0.5)
    for number in range(4):
        random_ = random.Random(f"slow {number}")
        yield f"slow {number}", detected(_walkers(random_, 6, pace=0.6), _times(5, 24), random_)
    for number in range(4):
        random_ = random.Random(f"skipped {number}")
        yield f"skipped {number}", detected(_walkers(random_, 6), _skipped(_times(15, 12), random_), random_)


def crowd(random_: random.Random, count: int, seconds: float) -> list[Frame]:
    """So many walkers before one another, 15 frames a second."""
    return detected(_walkers(random_, count), _times(15, seconds), random_)


def nothing(random_: random.Random) -> Seen:
    """A box of nothing's."""
    x, y, side = random_.uniform(0, WIDTH), random_.uniform(0, HEIGHT), random_.uniform(20, 120)
    box = round(x, 2), round(y, 2), round(x + side, 2), round(y + side * 1.5, 2)
    return Seen(box, round(random_.uniform(0.15, 0.75), 3), 0, -1)


def switches(frames: Sequence[Frame], ids: Sequence[Mapping[int, int]]) -> tuple[int, float]:
    """Return how often a thing's id changed, and the share of its boxes that had one.

    ids: of each frame, by the place of a box in it, the id that it got. Boxes of nothing do not count.
    """
    last: dict[int, int] = {}
    changes = boxes = named = 0
    for frame, given in zip(frames, ids, strict=True):
        for place, seen in enumerate(frame.seen):
            if seen.thing < 0:
                continue
            boxes += 1
            if place in given:
                named += 1
                changes += last.get(seen.thing, given[place]) != given[place]
                last[seen.thing] = given[place]
    return changes, named / boxes


# ---- private --------------------------------------------------------------------------------------------------------


def _times(fps: float, seconds: float) -> list[float]:
    return [number / fps for number in range(int(fps * seconds))]


def _skipped(times: Sequence[float], random_: random.Random) -> list[float]:
    """Times of a camera whose model is busy by turns: runs of up to 8 frames are skipped."""
    kept, left = [], 0
    for time_s in times:
        if left:
            left -= 1
            continue
        kept.append(time_s)
        if random_.random() < 0.12:
            left = random_.randint(2, 8)
    return kept


def _crossing(random_: random.Random) -> list[Thing]:
    """Pairs that meet in the middle, one in front of the other."""
    things = []
    for lane in range(3):
        y = 160 + lane * 200
        for side, depth in ((1, 1.0), (-1, 2.0)):
            speed = random_.uniform(110, 190)
            start = -60 if side > 0 else WIDTH + 60
            offset = random_.uniform(-15, 15)
            things.append(Thing(_straight(start, y + offset, side * speed, 0), (60, 150), depth + lane / 10))
    return things


def _walkers(random_: random.Random, count: int, pace: float = 1.0) -> list[Thing]:
    """Things that go to and fro, each at its own pace and distance."""
    things = []
    for number in range(count):
        height = random_.uniform(90, 190)
        lane = random_.uniform(120, HEIGHT - 120)
        reach, middle = random_.uniform(200, 520), random_.uniform(420, WIDTH - 420)
        turn_s, phase = random_.uniform(9, 20) / pace, random_.uniform(0, 2 * math.pi)
        sway, sway_s = random_.uniform(5, 40), random_.uniform(4, 9)
        way = _swinging(middle, reach, turn_s, phase, lane, sway, sway_s)
        things.append(Thing(way, (height * 0.42, height), -lane + number / 100))
    return things


def _straight(x: float, y: float, speed_x: float, speed_y: float) -> Callable[[float], tuple[float, float] | None]:
    def middle(time_s: float) -> tuple[float, float] | None:
        place = x + speed_x * time_s, y + speed_y * time_s
        return place if -30 <= place[0] <= WIDTH + 30 else None

    return middle


def _swinging(
    middle: float, reach: float, turn_s: float, phase: float, lane: float, sway: float, sway_s: float
) -> Callable[[float], tuple[float, float] | None]:
    def place(time_s: float) -> tuple[float, float] | None:
        x = middle + reach * math.sin(2 * math.pi * time_s / turn_s + phase)
        return x, lane + sway * math.sin(2 * math.pi * time_s / sway_s)

    return place


def _visible(box: tuple[float, ...], others: Sequence[tuple[float, ...]]) -> float:
    """The share of a box that no other covers, by a grid of points."""
    left, top, right, bottom = box
    free = 0
    for across in range(8):
        for down in range(8):
            x = left + (right - left) * (across + 0.5) / 8
            y = top + (bottom - top) * (down + 0.5) / 8
            free += not any(each[0] <= x <= each[2] and each[1] <= y <= each[3] for each in others)
    return free / 64


def _whole(expected: float, random_: random.Random) -> int:
    return int(expected) + (random_.random() < expected % 1)
