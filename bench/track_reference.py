"""Record how often ByteTrack's own code changes ids on the made-up scenes of tests/moving_scenes.py.

Run by hand: `python -m bench.track_reference CLONE`, in an environment that has `lap` and `scipy`; CLONE is one of
github.com/ifzhang/ByteTrack, whose tracker is run as it is. It writes tests/unit/tracks/reference.json, which a test
and the scenario `tracks` compare with. `supervision` and `edgefirst-tracker` after it print what these libraries do.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from tests.moving_scenes import HEIGHT, WIDTH, Frame, scenes, switches

LOST_S = 2.0
"""As edge_runtime/tracks/tracker.py has it."""

RECORDED = Path(__file__).parents[1] / "tests" / "unit" / "tracks" / "reference.json"

Follow = Callable[[Sequence[Frame]], list[dict[int, int]]]
"""All frames of a scene -> of each frame the ids by the places of its boxes."""


def main(clone: str, *others: str) -> None:
    """Record what the original does; print what others do."""
    commit = subprocess.run(
        ["git", "-C", clone, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    name = f"github.com/ifzhang/ByteTrack, {commit}"
    found = measured(name, original(Path(clone)))
    RECORDED.write_text(json.dumps({"made_by": name, "scenes": found}, indent=1) + "\n", encoding="utf-8")
    for other in others:
        measured(f"{other} {importlib.metadata.version(other)}", FOLLOWERS[other])


def measured(name: str, follow: Follow) -> dict[str, dict[str, float]]:
    """The figures of each scene; and print their sums."""
    found = {}
    for scene, frames in scenes():
        changes, named = switches(frames, follow(frames))
        boxes = sum(len(each.seen) for each in frames)
        found[scene] = {"switches": changes, "named": round(named, 4), "boxes": boxes}
    kinds = dict.fromkeys(scene.split()[0] for scene in found)
    sums = {kind: sum(each["switches"] for scene, each in found.items() if scene.split()[0] == kind) for kind in kinds}
    share = np.mean([each["named"] for each in found.values()])
    print(f"{name}: {sums}, {sum(sums.values())} in all; {share:.3f} of boxes named")
    return found


def frames_of(seconds: float, frames: Sequence[Frame]) -> int:
    """How many frames so many seconds are."""
    times = np.diff([each.time_s for each in frames])
    return round(seconds / float(np.median(times)))


def original(clone: Path) -> Follow:
    """ByteTrack's own tracker. What it imports and tracking does not need is left out; its IoU is of numpy."""
    for name, path in (("yolox", clone / "yolox"), ("yolox.tracker", clone / "yolox" / "tracker")):
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    for name in ("torch", "torch.nn", "torch.nn.functional", "cv2", "cython_bbox"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["cython_bbox"].bbox_overlaps = overlaps  # type: ignore[attr-defined]
    vars(np)["float"] = float  # an alias that numpy had
    tracking = importlib.import_module("yolox.tracker.byte_tracker")

    def follow(frames: Sequence[Frame]) -> list[dict[int, int]]:
        options = types.SimpleNamespace(
            track_thresh=0.5, track_buffer=frames_of(LOST_S, frames), match_thresh=0.8, mot20=False
        )
        tracker = tracking.BYTETracker(options)
        return [_ids(tracker, frame) for frame in frames]

    return follow


def _ids(tracker: Any, frame: Frame) -> dict[int, int]:
    """The ids of a frame's boxes: the box that a track's filter was corrected with is the one closest to it."""
    told = np.array([(*each.box, each.score) for each in frame.seen]).reshape(-1, 5)
    found: dict[int, int] = {}
    tracks = tracker.update(told.copy(), (HEIGHT, WIDTH), (HEIGHT, WIDTH))
    if not tracks:
        return found
    shared = overlaps(np.array([track.tlbr for track in tracks]), told[:, :4])
    for row, place in zip(*linear_sum_assignment(-shared), strict=True):
        found[int(place)] = tracks[row].track_id
    return found


def overlaps(first: Any, second: Any) -> Any:
    """Intersection over union of each of the first boxes with each of the second."""
    sides = np.minimum(first[:, None, 2:], second[:, 2:]) - np.maximum(first[:, None, :2], second[:, :2])
    area = np.maximum(sides, 0).prod(axis=2)
    sizes = [(each[:, 2:] - each[:, :2]).prod(axis=1) for each in (first, second)]
    return area / (sizes[0][:, None] + sizes[1] - area)


def supervision(frames: Sequence[Frame]) -> list[dict[int, int]]:
    import supervision as sv

    warnings.simplefilter("ignore")
    tracker = sv.ByteTrack(
        track_activation_threshold=0.5, lost_track_buffer=frames_of(LOST_S, frames), minimum_matching_threshold=0.8
    )
    found = []
    for frame in frames:
        detections = sv.Detections(
            xyxy=np.array([each.box for each in frame.seen], np.float32).reshape(-1, 4),
            confidence=np.array([each.score for each in frame.seen], np.float32),
            class_id=np.array([each.label for each in frame.seen], int),
            data={"place": np.arange(len(frame.seen))},
        )
        tracked = tracker.update_with_detections(detections)
        if tracked.tracker_id is None or not len(tracked):
            found.append({})
            continue
        pairs = zip(tracked.data["place"], tracked.tracker_id, strict=True)
        found.append({int(place): int(number) for place, number in pairs if number >= 0})
    return found


def edgefirst(frames: Sequence[Frame]) -> list[dict[int, int]]:
    from edgefirst.tracker import ByteTrack

    tracker = ByteTrack(high_conf=0.5, lifespan_ns=int(LOST_S * 1e9))
    numbers: dict[str, int] = {}
    found = []
    for frame in frames:
        tracked = tracker.update(
            np.array([each.box for each in frame.seen], np.float32).reshape(-1, 4) / 1280,
            np.array([each.score for each in frame.seen], np.float32),
            np.array([each.label for each in frame.seen], np.uint64),
            int(frame.time_s * 1e9),
        )
        found.append({
            place: numbers.setdefault(str(each.uuid), len(numbers)) for place, each in enumerate(tracked) if each
        })  # fmt: skip
    return found


FOLLOWERS: dict[str, Follow] = {"supervision": supervision, "edgefirst-tracker": edgefirst}


if __name__ == "__main__":
    main(*sys.argv[1:])
