"""A rule with `track = true`: what its frames become in results, events, pictures and Home Assistant."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import numpy as np
import pytest

from edge_runtime.answers import PICTURE_SIZE
from edge_runtime.errors import ConfigError
from edge_runtime.site.settings import AlarmSettings, LineSettings, PublishRule, ZoneSettings
from edge_runtime.site.stage import FrameAnswer, Staged, open_stage
from edge_runtime.steps import InputSteps, ModelSteps, OutputSteps
from edge_runtime.tracks.stage import TrackStage

pytestmark = pytest.mark.long  # it is about numbers, whatever the Python

STEPS = ModelSteps({"image": InputSteps()}, {"found": OutputSteps(layout="yolov8")}, {"found": ("person", "car")})
DOOR = ZoneSettings("door", ((0.5, 0.0), (1.0, 0.0), (1.0, 1.0), (0.5, 1.0)))
GATE = LineSettings("gate", (0.5, 0.0), (0.5, 1.0))
FULL = AlarmSettings("full", 0, zone="door")


def rule(**fields: Any) -> PublishRule:
    return PublishRule("people", source="camera", camera="/dev/video0", track=True, **fields)


def frame(number: int, *boxes: tuple[float, ...], steps: ModelSteps = STEPS) -> FrameAnswer:
    """A frame of 100 x 100 with these boxes: index, score, x and y of the center; each 20 wide and 40 high."""
    array = np.zeros((1, 8, 6), np.float32)
    array[:, :, 0] = -1
    for row, (index, score, x, y) in enumerate(boxes):
        array[0, row] = (index, score, x - 10, y - 20, x + 10, y + 20)
    outputs = {"found": array, "other": np.ones((1, 2), np.float32), PICTURE_SIZE: np.array([[100, 100]], np.int64)}
    return FrameAnswer(steps, outputs, number, number / 10)


def opened(**fields: Any) -> TrackStage:
    stage = open_stage(rule(**fields))
    assert isinstance(stage, TrackStage)
    return stage


def walk(stage: TrackStage, *places: float | None) -> list[Staged]:
    """The results of a person who is at these places, frame by frame."""
    return [
        stage.take(frame(number, *([] if x is None else [(0, 0.9, x, 50)]))) for number, x in enumerate(places)
    ]  # fmt: skip


def test_a_rule_that_tracks_has_this_stage_and_others_have_none() -> None:
    assert isinstance(open_stage(rule()), TrackStage)
    assert open_stage(PublishRule("people", source="camera", camera="/dev/video0")) is None


def ids(state: Path) -> list[int]:
    """The ids of a thing after a start of the daemon."""
    stage = open_stage(rule(on="every"), state)
    assert isinstance(stage, TrackStage)
    return [box["track"] for staged in walk(stage, 20, 21) for box in staged.fields["boxes"]]


def test_an_id_is_never_given_again_by_a_device_however_often_it_starts(tmp_path: Path) -> None:
    assert [ids(tmp_path / "state") for _ in range(3)] == [[1], [1_000_000_001], [2_000_000_001]]


def test_an_id_is_new_although_the_file_of_series_is_broken(tmp_path: Path) -> None:
    (tmp_path / "tracks").write_text("garbage")
    (first,), (second,) = ids(tmp_path), ids(tmp_path)
    assert second > first > 400_000_000_000_000
    assert second < 2**53, "a number that JSON has exactly"


def test_an_id_is_given_where_no_state_can_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "state").write_text("a file")
    assert len(ids(tmp_path / "state")) == 1
    assert "may come again" in caplog.text


def test_a_result_has_the_boxes_that_are_followed_with_their_ids_and_zones() -> None:
    stage = opened(on="every", zone=(DOOR,), line=(GATE,), alarm=(FULL,))
    stage.take(frame(0, (0, 0.9, 20, 50), (1, 0.8, 80, 50), (1, 0.3, 50, 50)))
    staged = stage.take(frame(1, (0, 0.9, 21, 50), (1, 0.8, 79, 50), (1, 0.3, 50, 50)))
    assert [(box["label"], box["track"], box["zones"]) for box in staged.fields["boxes"]] == [
        ("person", 1, []), ("car", 2, ["door"]),
    ]  # fmt: skip
    assert {key: value for key, value in staged.fields.items() if key != "boxes"} == {
        "counts": {"car": 1, "person": 1},
        "zones": {"door": {"counts": {"car": 1}, "dwell_s": 0.0}},
        "lines": {"gate": {"right": {}, "left": {}}},
        "alarms": {"full": {"on": True, "count": 1}},
    }
    assert staged.outputs["found"][0, :, 0].tolist() == [0, 1, -1, -1, -1, -1, -1, -1]
    assert staged.outputs.keys() == {"found", "other", PICTURE_SIZE}
    assert json.dumps(staged.fields)


def test_masks_and_points_of_things_are_followed_too() -> None:
    points = np.full((1, 4, 6 + 2 * 3), -1, np.float32)
    points[0, 0] = (0, 0.9, 10, 10, 30, 50, 12, 12, 0.9, 20, 20, 0.8)
    masks = np.empty(1, object)
    masks[0] = msgspec.json.encode(
        [(0, 0.9, (10, 10, 30, 50), (2, 2), (1, 3)), (1, 0.3, (60, 10, 80, 50), (2, 2), (4,))]
    )
    for answer, array in (("keypoints", points), ("masks", masks)):
        steps = ModelSteps(STEPS.inputs, {"found": OutputSteps(answer=answer)}, STEPS.labels)
        stage = opened(on="every")
        for number in range(2):
            outputs = {"found": array, PICTURE_SIZE: np.array([[100, 100]], np.int64)}
            staged = stage.take(FrameAnswer(steps, outputs, number, number / 10))
        (thing,) = staged.fields[answer]
        assert (thing["label"], thing["track"], thing["box"]) == ("person", 1, [10, 10, 30, 50])
        assert thing.keys() & {"mask", "points"}
        again = stage.take(FrameAnswer(steps, {**outputs, "found": staged.outputs["found"]}, 2, 0.2))
        assert [each["track"] for each in again.fields[answer]] == [1]


def test_pictures_show_ids_zones_and_lines() -> None:
    stage = opened(zone=(DOOR,), line=(GATE,))
    _, staged = walk(stage, 20, 21)
    assert staged.overlay is not None
    assert staged.overlay.notes == ("#1",)
    assert [(shape.name, len(shape.points)) for shape in staged.overlay.shapes] == [("door", 4), ("gate", 2)]


def test_news_is_who_comes_goes_enters_and_crosses_and_not_where_boxes_are() -> None:
    stage = opened(zone=(DOOR,))
    news = [staged.has_changed for staged in walk(stage, 20, 22, 24, 28, 34, 42, 50, 58, 66, 68, 70)]
    assert news == [True, True, False, False, False, False, False, True, False, False, False]


def test_a_frame_that_is_not_published_costs_no_words() -> None:
    for on, words in (("change", False), ("every", True)):
        *_, staged = walk(opened(on=on), 20, 22, 24)
        assert ("boxes" in staged.fields) is words


def test_memory_stays_bounded_however_many_things_come() -> None:
    stage = opened(zone=(DOOR,), line=(GATE,), alarm=(AlarmSettings("rate", 5, line="gate", within_s=2.0),), lost_s=0.3)

    def run(first: int, last: int) -> None:
        for number in range(first, last):
            age, x = number % 10, 30 + 5 * (number % 10)
            stage.take(frame(number, (number // 10 % 2, 0.9, x, 30), (1, 0.9, 95 - age, 70)))

    run(0, 500)
    tracemalloc.start()
    try:
        run(500, 1500)  # what older Pythons keep for later once
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        run(1500, 4000)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 16_384
    assert stage.take(frame(4000, (0, 0.9, 30, 30))).fields["counts"].keys() <= {"person", "car"}


def test_events_say_what_happened_where_and_when() -> None:
    stage = opened(zone=(DOOR,), line=(GATE,), lost_s=0.1)
    told = [event for staged in walk(stage, 40, 46, 52, 58, *[None] * 6) for event in staged.events]
    assert told == [
        {"event": "entered", "zone": "door", "track": 1, "label": "person", "at": "1970-01-01T00:00:00.200+00:00"},
        {
            "event": "crossed", "line": "gate", "track": 1, "label": "person", "direction": "left",
            "at": "1970-01-01T00:00:00.200+00:00",
        },
        {
            "event": "left", "zone": "door", "track": 1, "label": "person", "dwell_s": 0.1,
            "at": "1970-01-01T00:00:00.300+00:00",
        },
    ]  # fmt: skip


def test_another_version_begins_with_new_ids_and_all_leave() -> None:
    stage = opened(zone=(DOOR,))
    walk(stage, 80, 80)
    other = ModelSteps(STEPS.inputs, STEPS.outputs, {"found": ("dog", "cat")})
    first = stage.take(frame(2, (0, 0.9, 80, 50), steps=other))
    assert [event["event"] for event in first.events] == ["left"]
    second = stage.take(frame(3, (0, 0.9, 80, 50), steps=other))
    assert [(box["label"], box["track"]) for box in second.fields["boxes"]] == [("dog", 2)]


def test_a_model_without_boxes_is_published_as_it_is_and_the_log_says_why_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = opened()
    steps = ModelSteps(STEPS.inputs, {"found": OutputSteps(answer="embedding")})
    for number in range(3):
        staged = stage.take(frame(number, (0, 0.9, 50, 50), steps=steps))
        assert staged.has_changed
        assert not staged.fields
    assert [record.getMessage() for record in caplog.records] == ["nothing can be followed"]


def test_an_alarm_over_a_zone_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="publish: alarm 'full': there is no zone 'door'; the rule has none"):
        open_stage(rule(alarm=(FULL,)))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"track": False, "zone": (DOOR,)}, "need track = true"),
        ({"source": "zmq", "camera": None}, 'track is for source = "camera"'),
    ],
)
def test_settings_that_mean_nothing_are_refused(fields: Mapping[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PublishRule(**{"model": "m", "source": "camera", "camera": "/dev/video0", "track": True, **fields})


def test_home_assistant_gets_counts_and_sensors_by_label_zone_and_line() -> None:
    stage = opened(zone=(DOOR,), line=(GATE,), alarm=(FULL,))
    assert set(stage.entities(STEPS)) == {"alarm_full", "alarm_count_full"}
    *_, staged = walk(stage, 40, 46, 52, 58)
    said = json.loads(json.dumps(staged.fields))
    shown = {
        component["name"]: jinja2.Template(component["value_template"]).render(value_json=said)
        for component in stage.entities(STEPS).values()
    }
    assert shown == {
        "person": "1",
        "door person": "1",
        "person in door": "ON",
        "gate person to the right": "0",
        "gate person to the left": "1",
        "full": "ON",
        "full count": "1",
    }


def test_labels_of_any_text_have_keys_and_templates_of_their_own() -> None:
    zone = ZoneSettings("door", DOOR.points, labels=('a "b"', "a_b", "a b", "é"))
    entities = opened(zone=(zone,)).entities(STEPS)
    assert len(entities) == 8
    assert all(key.replace("_", "").isascii() and key.replace("_", "").isalnum() for key in entities)
    said = {"zones": {"door": {"counts": {'a "b"': 3, "é": 4}}}}
    shown = {
        each["name"]: jinja2.Template(each["value_template"]).render(value_json=said) for each in entities.values()
    }
    assert (shown['door a "b"'], shown["door é"], shown["a b in door"]) == ("3", "4", "OFF")
