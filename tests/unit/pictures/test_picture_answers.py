"""Turned boxes, masks and points of Ultralytics' heads, held against slow code written from its published formulae."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edge_runtime.answers import (
    Answer,
    Box,
    Keypoints,
    ObjectMask,
    PictureRead,
    answer_fields,
    answers_from_fields,
    answers_of,
    layout_of,
)
from edge_runtime.errors import LoadFailed
from edge_runtime.hosts.steps_instance import AnswerSteps
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.pictures.box_layouts import suppress_turned
from edge_runtime.pictures.fit import place
from edge_runtime.pictures.values import runs_of
from edge_runtime.steps import ModelSteps, OutputSteps
from tests.unit.hosts.test_steps_instance import Outputs

WIDE, HIGH = 64, 32
IMAGE = TensorSpec("image", "FP32", (DYNAMIC, 3, HIGH, WIDE))
LABELS = ("ship", "plane")


def made(output, labels=LABELS, **arrays) -> AnswerSteps:
    specs = tuple(TensorSpec(name, "FP32", (DYNAMIC, *array.shape[1:])) for name, array in arrays.items())
    steps = ModelSteps({}, {"out": output}, {"out": tuple(labels)} if labels else {})
    return AnswerSteps(Outputs(ModelSpec((IMAGE,), specs)), steps, None)


def words(output, labels=LABELS, places=(), **arrays) -> list[Answer]:
    """The answers of these outputs' rows, as a caller has them. places: of pictures; else they were tensors."""
    arrays = {name: np.asarray(array, np.float32) for name, array in arrays.items()}
    answers = made(output, labels, **arrays)
    inputs = {"image": np.zeros((len(arrays["out"]), 3, HIGH, WIDE), np.float32)}
    (told,) = answers.make({name: arrays[name] for name in answers.needs}, inputs, places)
    assert answers.specs[0].fits(told.shape)
    return answers_of(ModelSteps({}, {"out": output}, {"out": tuple(labels)}), {"out": told})


def there_and_back(answer: Answer) -> Answer:
    (back,) = answers_from_fields(answer_fields([answer], as_list=False))
    return back


# ---- slow code from the published definitions ------------------------------------------------------------------------


def prob_iou(one, other):
    """Llerena et al., "Gaussian Bounding Boxes and Probabilistic Intersection-over-Union", as Ultralytics writes it."""

    def gaussian(box):
        *_, w, h, t = box
        turn = np.array([[math.cos(t), -math.sin(t)], [math.sin(t), math.cos(t)]])
        return turn @ np.diag([w * w / 12, h * h / 12]) @ turn.T

    first, second = gaussian(one), gaussian(other)
    apart = np.array(one[:2]) - np.array(other[:2])
    together = (first + second) / 2
    distance = apart @ np.linalg.inv(together) @ apart / 8 + 0.5 * math.log(
        np.linalg.det(together) / math.sqrt(np.linalg.det(first) * np.linalg.det(second))
    )
    return 1 - math.sqrt(1 - math.exp(-min(max(distance, 1e-7), 100)))


def corners_of(x, y, w, h, t):
    """Each corner of an upright box, turned about its middle."""
    turned = []
    for right, down in ((0.5, 0.5), (0.5, -0.5), (-0.5, -0.5), (-0.5, 0.5)):
        a, b = right * w, down * h
        turned.append((x + a * math.cos(t) - b * math.sin(t), y + a * math.sin(t) + b * math.cos(t)))
    return turned


def mask_of(coefficients, prototypes, box):
    """`process_mask`: the sum of prototypes above 0, inside of the box scaled to their grid."""
    _, high, wide = prototypes.shape
    left, top, right, bottom = (side * scale for side, scale in zip(box, (wide / WIDE, high / HIGH) * 2, strict=True))
    mask = np.zeros((high, wide), np.uint8)
    for row in range(high):
        for column in range(wide):
            value = sum(c * p for c, p in zip(coefficients, prototypes[:, row, column], strict=True))
            mask[row, column] = value > 0 and left <= column < right and top <= row < bottom
    return mask


# ---- turned boxes ---------------------------------------------------------------------------------------------------


def obb_head(*boxes):
    """[1, 4 + classes + 1, n] of middle, sides, class, score, angle."""
    head = np.zeros((1, 7, max(len(boxes), 20)), np.float32)
    for index, (x, y, w, h, kind, score, angle) in enumerate(boxes):
        head[0, :4, index] = x, y, w, h
        head[0, 4 + kind, index], head[0, 6, index] = score, angle
    return head


OBB = OutputSteps(layout="yolov8-obb")


def test_a_turned_box_has_its_corners_and_their_hull():
    (answer,) = words(OBB, out=obb_head((30, 16, 20, 8, 1, 0.9, math.pi / 6)))
    (box,) = answer.boxes
    wanted = corners_of(30, 16, 20, 8, math.pi / 6)
    assert (box.label, box.index, box.score) == ("plane", 1, pytest.approx(0.9))
    assert np.array(box.corners) == pytest.approx(np.array(wanted), abs=1e-4)
    assert box.box == pytest.approx((*np.min(wanted, axis=0), *np.max(wanted, axis=0)), abs=1e-4)
    assert there_and_back(answer).boxes[0].corners == tuple(tuple(round(each, 2) for each in p) for p in box.corners)
    assert layout_of("boxes").lines(answer.boxes, ())[0].endswith("  turned 30°")


def test_a_turned_box_is_told_in_the_pixels_of_the_picture():
    placed = place("letterbox", (256, 256), (WIDE, HIGH))  # 32 x 32 in the middle
    (answer,) = words(OBB, out=obb_head((30, 16, 16, 8, 0, 0.9, 0.5)), places=[placed])
    wanted = [((x - 16) * 8, y * 8) for x, y in corners_of(30, 16, 16, 8, 0.5)]
    assert np.array(answer.boxes[0].corners) == pytest.approx(np.array(wanted), abs=1e-3)


def test_finished_turned_boxes_are_read_as_they_are():
    rows = np.zeros((1, 20, 7), np.float32)
    rows[0, 0] = 30, 16, 20, 8, 0.9, 1, 0.25
    (answer,) = words(OBB, out=rows)
    assert np.array(answer.boxes[0].corners) == pytest.approx(np.array(corners_of(30, 16, 20, 8, 0.25)), abs=1e-4)


def test_turned_boxes_are_suppressed_as_by_the_published_overlap():
    random = np.random.default_rng(0)
    boxes = np.stack(
        [
            random.uniform(10, 50, 60), random.uniform(5, 25, 60), random.uniform(4, 20, 60), random.uniform(4, 20, 60),
            random.uniform(-1, 2, 60),
        ], axis=1,
    ).astype(np.float32)  # fmt: skip
    classes = random.integers(0, 2, 60)
    wanted = [
        index
        for index in range(60)
        if not any(
            classes[better] == classes[index] and prob_iou(boxes[better], boxes[index]) >= 0.3
            for better in range(index)
        )
    ]
    assert 5 < len(wanted) < 55
    assert suppress_turned(boxes, classes, 0.3, 1000).tolist() == wanted
    assert suppress_turned(boxes, classes, 0.3, 3).tolist() == wanted[:3]


def test_a_box_that_was_dropped_drops_others_however_far_behind():
    chain = np.array([[0, 0, 20, 20, 0], [8, 0, 20, 20, 0], [16, 0, 20, 20, 0]], np.float32)
    assert prob_iou(chain[0], chain[1]) == prob_iou(chain[1], chain[2]) > 0.5 > prob_iou(chain[0], chain[2])
    between = np.stack([(each * 100.0, 1e4, 20, 20, 0) for each in range(1200)]).astype(np.float32)
    boxes = np.concatenate([chain[:2], between, chain[2:]])
    kept = suppress_turned(boxes, np.zeros(len(boxes), np.intp), 0.5, 5000)
    assert kept.tolist() == [0, *range(2, 1202)]


@pytest.mark.parametrize("sides", [(0, 8), (8, 0), (-4, 8)])
def test_a_turned_box_of_no_area_is_left_out(sides):
    (answer,) = words(OBB, out=obb_head((30, 16, *sides, 0, 0.9, 0.3), (30, 16, 8, 8, 1, 0.5, 0.0)))
    assert [each.label for each in answer.boxes] == ["plane"]


# ---- boxes of no area -----------------------------------------------------------------------------------------------


def finished(*rows):
    boxes = np.zeros((1, 8, 6), np.float32)
    boxes[0, : len(rows)] = rows
    return boxes


def test_a_box_of_no_area_is_left_out():
    rows = (5, 5, 5, 20, 0.9, 0), (5, 20, 9, 20, 0.8, 0), (9, 9, 5, 20, 0.7, 0), (1, 2, 3, 4, 0.6, 1)
    (answer,) = words(OutputSteps(layout="yolov10"), out=finished(*rows))
    assert [each.label for each in answer.boxes] == ["plane"]


def test_a_box_that_lies_beside_the_picture_is_left_out():
    placed = place("letterbox", (32, 32), (WIDE, HIGH))  # from 16 to 48
    rows = (2, 5, 15, 20, 0.9, 0), (10, 5, 20, 20, 0.8, 1)
    (answer,) = words(OutputSteps(layout="yolov10"), out=finished(*rows), places=[placed])
    assert answer.boxes == (Box("plane", 1, pytest.approx(0.8), (0, 5, 4, 20)),)


# ---- masks ----------------------------------------------------------------------------------------------------------


PROTOTYPES = np.random.default_rng(1).normal(size=(1, 4, 8, 16)).astype(np.float32)
COEFFICIENTS = np.random.default_rng(2).normal(size=(3, 4)).astype(np.float32)
BOXES = ((20.0, 12.0, 22.0, 14.0), (40.0, 20.0, 30.0, 18.0), (21.0, 12.5, 22.0, 14.0))
"""Middles and sides; the last is the first once more."""

SEGMENT = OutputSteps(answer="masks")


def segment_head():
    """[1, 4 + classes + coefficients, n]"""
    head = np.zeros((1, 10, 30), np.float32)
    for index, (box, score, kind) in enumerate(zip(BOXES, (0.9, 0.8, 0.7), (0, 1, 0), strict=True)):
        head[0, :4, index], head[0, 4 + kind, index], head[0, 6:, index] = box, score, COEFFICIENTS[index]
    return head


def corners(x, y, w, h):
    return x - w / 2, y - h / 2, x + w / 2, y + h / 2


def test_each_thing_has_the_mask_of_the_published_formula():
    (answer,) = words(SEGMENT, out=segment_head(), protos=PROTOTYPES)
    assert [each.label for each in answer.masks] == ["ship", "plane"]
    for index, each in enumerate(answer.masks):
        box = corners(*BOXES[index])
        assert each.box == pytest.approx(box)
        assert each.mask.tolist() == mask_of(COEFFICIENTS[index], PROTOTYPES[0], box).tolist()
        assert 0 < each.mask.sum() < each.mask.size
    back = there_and_back(answer)
    assert [each.mask.tolist() for each in back.masks] == [each.mask.tolist() for each in answer.masks]
    assert layout_of("masks").short(answer.masks) == ["ship 0.90", "plane 0.80"]


def test_prototypes_may_have_their_channels_last():
    (answer,) = words(SEGMENT, out=segment_head(), protos=PROTOTYPES.transpose(0, 2, 3, 1))
    assert answer.masks[0].mask.tolist() == mask_of(COEFFICIENTS[0], PROTOTYPES[0], corners(*BOXES[0])).tolist()


def test_finished_things_have_their_masks():
    rows = np.zeros((1, 20, 10), np.float32)
    rows[0, 0] = *corners(*BOXES[0]), 0.9, 1, *COEFFICIENTS[0]
    (answer,) = words(SEGMENT, out=rows, protos=PROTOTYPES)
    assert answer.masks[0].label == "plane"
    assert answer.masks[0].mask.tolist() == mask_of(COEFFICIENTS[0], PROTOTYPES[0], corners(*BOXES[0])).tolist()


def test_a_thing_without_a_pixel_is_left_out():
    head = segment_head()
    head[0, 6:, 0] = 0
    (answer,) = words(SEGMENT, out=head, protos=PROTOTYPES)
    assert [each.label for each in answer.masks] == ["plane"]


def test_masks_of_rows_do_not_change_each_other():
    head, protos = np.concatenate([segment_head(), segment_head()]), np.concatenate([PROTOTYPES, -PROTOTYPES])
    first, second = words(SEGMENT, out=head, protos=protos)
    (alone,) = words(SEGMENT, out=segment_head(), protos=PROTOTYPES)
    assert answer_fields([first], as_list=False) == answer_fields([alone], as_list=False)
    assert not (first.masks[0].mask & second.masks[0].mask).any()


def test_masks_want_their_prototypes():
    with pytest.raises(LoadFailed, match=r'say prototypes = "…": the model has no other output'):
        made(SEGMENT, out=segment_head())
    with pytest.raises(LoadFailed, match=r"the model has a \[-1, 4, 8, 16\], b"):
        made(SEGMENT, out=segment_head(), a=PROTOTYPES, b=PROTOTYPES)
    both = OutputSteps(answer="masks", prototypes="b")
    assert made(both, out=segment_head(), a=PROTOTYPES, b=PROTOTYPES).needs == ["out", "b"]


def thing(size, counts) -> ObjectMask:
    return ObjectMask("a", 0, 0.5, (0.0, 0.0, 1.0, 1.0), size, tuple(counts))


def test_runs_of_a_mask_are_cocos():
    mask = np.array([[0, 1, 1], [0, 1, 0]], np.uint8)
    assert runs_of(mask) == [2, 3, 1]
    assert runs_of(1 - mask) == [0, 2, 3, 1]
    for each in (mask, 1 - mask, mask * 0):
        assert thing(each.shape, runs_of(each)).mask.tolist() == each.tolist()
        assert thing(each.shape, runs_of(each)).pixels == each.sum()


@pytest.mark.parametrize(("size", "counts"), [((2, 3), [7]), ((2, 3), [8, -2]), ((10**5, 10**5), [10**10])])
def test_runs_that_are_not_a_mask_are_refused(size, counts):
    with pytest.raises(ValueError, match="are not a mask of"):
        thing(size, counts).mask  # noqa: B018


# ---- points ---------------------------------------------------------------------------------------------------------


def pose_head(points, length):
    """[1, 4 + 1 + points * length, n] with one person."""
    head = np.zeros((1, 5 + points * length, 40), np.float32)
    head[0, :5, 3] = 32, 16, 20, 12, 0.9
    head[0, 5:, 3] = np.arange(points * length) / 2
    return head


def test_points_are_told_with_their_scores():
    (answer,) = words(OutputSteps(answer="keypoints", keypoints=(5, 3)), ["person"], out=pose_head(5, 3))
    (found,) = answer.keypoints
    assert (found.label, found.box) == ("person", (22, 10, 42, 22))
    assert found.points == tuple((each, each + 0.5, each + 1) for each in (0, 1.5, 3, 4.5, 6))
    assert there_and_back(answer).keypoints[0].points == found.points


def test_points_without_scores_have_none():
    (answer,) = words(OutputSteps(answer="keypoints", keypoints=(4, 2)), ["person"], out=pose_head(4, 2))
    assert answer.keypoints[0].points == ((0, 0.5), (1, 1.5), (2, 2.5), (3, 3.5))
    assert answer_fields([answer], as_list=False)["keypoints"][0]["points"][1] == [1, 1.5]


def test_points_are_told_in_the_pixels_of_the_picture_and_inside_of_it():
    placed = place("letterbox", (320, 320), (WIDE, HIGH))  # 32 x 32 from 16 on
    head = pose_head(2, 3)
    head[0, 5:, 3] = 26, 4, 0.5, 50, 31, 0.25
    (answer,) = words(OutputSteps(answer="keypoints", keypoints=(2, 3)), ["person"], places=[placed], out=head)
    assert answer.keypoints[0].box == (60, 100, 260, 220)
    assert answer.keypoints[0].points == ((100, 40, 0.5), (320, 310, 0.25))


def test_finished_people_have_their_points():
    rows = np.zeros((1, 30, 6 + 6), np.float32)
    rows[0, 0] = 10, 5, 30, 25, 0.8, 0, 11, 6, 0.9, 20, 15, 0.4
    (answer,) = words(OutputSteps(answer="keypoints", keypoints=(2, 3)), ["person"], out=rows)
    assert answer.keypoints == (
        Keypoints(
            "person",
            0,
            pytest.approx(0.8),
            (10, 5, 30, 25),
            ((11, 6, pytest.approx(0.9)), (20, 15, pytest.approx(0.4))),
        ),
    )
    assert layout_of("keypoints").lines(answer.keypoints, ())[1] == "  11,6 20,15"


def test_points_want_their_number():
    with pytest.raises(LoadFailed, match=r"how many numbers a point: keypoints = \[17, 3\]"):
        made(OutputSteps(answer="keypoints"), ["person"], out=pose_head(5, 3))
    with pytest.raises(LoadFailed, match="there are 1 labels, and the model has 7 classes"):
        made(OutputSteps(answer="keypoints", keypoints=(3, 3)), ["person"], out=pose_head(5, 3))


def test_a_family_without_masks_or_points_is_refused():
    with pytest.raises(LoadFailed, match='layout = "ssd" has neither masks nor points'):
        made(OutputSteps(answer="keypoints", keypoints=(5, 3), layout="ssd"), ["person"], out=pose_head(5, 3))


def test_an_object_mask_of_a_client_is_written_as_it_came():
    answer = Answer(masks=(thing((3, 3), [0, 1, 3, 1, 3, 1]),))
    assert there_and_back(answer) == answer
    assert answer.masks[0].mask.tolist() == np.eye(3).tolist()


def test_an_answer_is_drawn_in_a_notebook_and_its_labels_are_text() -> None:
    marked = "<script>cat</script>"
    answer = Answer(
        picture=PictureRead(640, 480, "stretch", "rgb"),
        boxes=(Box(marked, 1, 0.9, (10.0, 20.0, 100.0, 200.0)),),
        text=marked,
    )
    shown = answer._repr_html_()
    assert shown.startswith('<svg viewBox="0 0 640 480"')
    assert "10.0,20.0 100.0,20.0 100.0,200.0 10.0,200.0" in shown
    assert shown.count("&lt;script&gt;cat") == 3
    assert "<script" not in shown
    assert "<svg" not in Answer(text="hello")._repr_html_()
