"""Tracks on made-up scenes: what a frame costs, and how often ids change beside ByteTrack's own code."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.scenarios import Bench
from edge_runtime.tracks.tracker import FrameBoxes, Tracker
from tests import moving_scenes
from tests.moving_scenes import Frame

REFERENCE = Path(__file__).parents[1] / "tests" / "unit" / "tracks" / "reference.json"
"""Made by bench/track_reference.py."""

BOXES, FRAMES = 20, 600


def tracks(bench: Bench) -> None:
    """20 walkers who hide one another, 15 frames a second: CPU a frame. And ids on all scenes."""
    frames = _twenty_boxes()
    for _ in bench.rounds("tracks"):
        tracker, cpu_s = Tracker(), []
        for frame, boxes in frames:
            began_s = time.process_time_ns()
            tracker.track(boxes, frame.time_s)
            cpu_s.append((time.process_time_ns() - began_s) / 1e9)
        bench.figures.add("tracks.cpu_ms", float(np.mean(cpu_s)) * 1e3)
        bench.figures.add("tracks.cpu_p99_ms", float(np.percentile(cpu_s, 99)) * 1e3)
    ours = 0
    for _, scene in moving_scenes.scenes():
        tracker = Tracker()
        ours += moving_scenes.switches(scene, [_ids(tracker, frame) for frame in scene])[0]
    theirs = json.loads(REFERENCE.read_text())
    changes = sum(each["switches"] for each in theirs["scenes"].values())
    bench.figures.add("tracks.switches_ratio", ours / changes)
    bench.figures.note("tracks", f"{ours} id switches; {changes} by {theirs['made_by']}")


SCENARIOS = {"tracks": tracks}


# ---- private --------------------------------------------------------------------------------------------------------


def _twenty_boxes() -> list[tuple[Frame, FrameBoxes]]:
    """Frames that have BOXES boxes each: what is hidden wholly is replaced by what is nothing's."""
    random_ = random.Random("bench")
    scene = moving_scenes.crowd(random_, BOXES, FRAMES / 15)
    found = []
    for frame in scene:
        seen = list(frame.seen)
        while len(seen) < BOXES:
            seen.append(moving_scenes.nothing(random_))
        full = frame._replace(seen=tuple(seen[:BOXES]))
        found.append((full, frame_boxes(full)))
    return found


def frame_boxes(frame: Frame) -> FrameBoxes:
    seen: Sequence[moving_scenes.Seen] = frame.seen
    return FrameBoxes(
        np.array([each.box for each in seen], np.float64).reshape(-1, 4),
        np.array([each.score for each in seen], np.float64),
        np.array([each.label for each in seen], np.int64),
    )


def _ids(tracker: Tracker, frame: Frame) -> dict[int, int]:
    found = tracker.track(frame_boxes(frame), frame.time_s)
    return {track.row: track.id for track in found if track.row is not None}
