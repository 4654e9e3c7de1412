"""Boxes in the outputs of detectors, against a slow reference of each family's published definition."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edge_runtime.errors import LoadFailed, RunFailed
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.pictures.box_layouts import BoxReader, suppress
from edge_runtime.steps import DEFAULT_OVERLAP, OutputSteps

SIZE = (64, 32)
"""Width and height of the model's picture."""


# ---- the reference: one box after another, in Python's own numbers --------------------------------------------------


def overlap_of(one, other):
    """Intersection over union, as torchvision's `box_iou`."""
    width = max(min(one[2], other[2]) - max(one[0], other[0]), 0.0)
    height = max(min(one[3], other[3]) - max(one[1], other[1]), 0.0)
    shared = width * height
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    union = areas[0] + areas[1] - shared
    return shared / union if union else 0.0


def suppressed(found, limit, most):
    """Greedy suppression by class of (class, score, box): best first, each against all kept ones."""
    kept = []
    for each in sorted(found, key=lambda item: -item[1]):
        if all(each[0] != other[0] or overlap_of(each[2], other[2]) <= limit for other in kept):
            kept.append(each)
    return kept[:most]


def corners(middle):
    x, y, width, height = middle
    return (x - width / 2, y - height / 2, x + width / 2, y + height / 2)


def best_class(scores):
    index = max(range(len(scores)), key=lambda each: scores[each])
    return index, scores[index]


def by_reference(layout, arrays, output):
    """The boxes that the family's own post-processing finds in one row. arrays: one row's, as nested lists."""
    width, height = SIZE
    found = []

    def tell(index, score, box):
        if score > output.threshold:
            found.append((index, score, box))

    def on_picture(box):
        return (box[0] * width, box[1] * height, box[2] * width, box[3] * height)

    match layout:
        case "yolov8":
            for each in zip(*arrays[0], strict=True):
                tell(*best_class(each[4:]), corners(each[:4]))
        case "yolov5":
            for each in arrays[0]:
                index, score = best_class(each[5:])
                tell(index, score * each[4], corners(each[:4]))
        case "yolox":
            cells = [
                (x, y, stride)
                for stride in (8, 16, 32)
                for y in range(height // stride)
                for x in range(width // stride)
            ]
            for (x, y, stride), each in zip(cells, arrays[0], strict=True):
                index, score = best_class(each[5:])
                middle = ((each[0] + x) * stride, (each[1] + y) * stride, *(math.exp(e) * stride for e in each[2:4]))
                tell(index, score * each[4], corners(middle))
        case "yolonas":
            for box, scores in zip(*arrays, strict=True):
                tell(*best_class(scores), tuple(box))
        case "ssd":
            boxes, scores, classes, (count,) = arrays
            for place, (top, left, bottom, right) in enumerate(boxes):
                if place < count:
                    tell(int(classes[place]), scores[place], on_picture((left, top, right, bottom)))
        case "detr":
            for box, logits in zip(*arrays, strict=True):
                powers = [math.exp(each) for each in logits]
                tell(*best_class([each / sum(powers) for each in powers[:-1]]), on_picture(corners(box)))
        case "dfine" | "rfdetr" | "rtdetr":
            for box, logits in zip(*arrays, strict=True):
                for index, logit in enumerate(logits):
                    tell(index, 1 / (1 + math.exp(-logit)), on_picture(corners(box)))
    if layout.startswith("yolo"):
        return suppressed(found, DEFAULT_OVERLAP, output.most)
    return sorted(found, key=lambda item: -item[1])[: output.most]


# ---- what a model of each family gives ------------------------------------------------------------------------------


def middles(random, count):
    """Middles and sides in pixels, many of them on top of one another."""
    centres = random.uniform(0, SIZE, (count, 2))
    centres[count // 2 :] = centres[: count - count // 2] + random.normal(size=(count - count // 2, 2))
    return np.concatenate([centres, random.uniform(2, 24, (count, 2))], axis=1)


def shares(random, count):
    return middles(random, count) / (*SIZE, *SIZE)


def made(layout, random, count, classes):
    """The outputs of one row, in the model's order: the boxes, then their partners."""
    match layout:
        case "yolov8":
            return [np.concatenate([middles(random, count), random.uniform(size=(count, classes))], 1).T]
        case "yolov5":
            return [np.concatenate([middles(random, count), random.uniform(size=(count, 1 + classes))], 1)]
        case "yolox":
            head = [random.normal(size=(42, 4)), random.uniform(size=(42, 1 + classes))]  # 42 cells of SIZE
            return [np.concatenate(head, 1)]
        case "yolonas":
            boxes = middles(random, count)
            return [
                np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1),
                random.uniform(size=(count, classes)),
            ]
        case "ssd":
            boxes = random.uniform(size=(count, 4))
            kinds = random.integers(0, classes, count).astype(float)
            return [boxes, random.uniform(size=count), kinds, np.array([float(count - 3)])]
        case _:
            return [shares(random, count), random.normal(size=(count, classes + (layout == "detr")))]


NAMES = {
    "yolonas": ("boxes", "scores"),
    "ssd": ("detection_boxes", "detection_scores", "detection_classes", "num_detections"),
    **dict.fromkeys(("detr", "dfine", "rfdetr", "rtdetr"), ("pred_boxes", "logits")),
}
LAYOUTS = ("yolov5", "yolov8", "yolox", "yolonas", "ssd", "detr", "dfine", "rfdetr", "rtdetr")


def reader_of(layout, arrays, labels=(), **keys):
    """A reader, and the outputs by name, of arrays of all rows."""
    names = NAMES.get(layout, ("output0",))[: len(arrays)]
    outputs = tuple(
        TensorSpec(name, "FP32", (DYNAMIC, *array.shape[1:])) for name, array in zip(names, arrays, strict=True)
    )
    output = OutputSteps(layout=layout, **keys)
    reader = BoxReader(names[0], output, ModelSpec((), outputs), labels, SIZE)
    return reader, dict(zip(names, [array.astype(np.float32) for array in arrays], strict=True))


def read(layout, arrays, labels=(), **keys):
    """The boxes of a single row."""
    reader, results = reader_of(layout, [array[None] for array in arrays], labels, **keys)
    return reader.read(results, 0, 1, SIZE)


def assert_same(found, wanted):
    assert [int(index) for index in found[:, 0]] == [index for index, _, _ in wanted]
    np.testing.assert_allclose(found[:, 1], [score for _, score, _ in wanted], rtol=1e-5)
    np.testing.assert_allclose(
        found[:, 2:], np.array([box for _, _, box in wanted]).reshape(-1, 4), rtol=1e-6, atol=1e-4
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(6))
def test_boxes_are_those_of_the_familys_own_definition(layout, seed):
    random = np.random.default_rng(seed)
    arrays = [each.astype(np.float32) for each in made(layout, random, 60, 3)]
    output = OutputSteps(layout=layout, threshold=0.3, most=40)
    wanted = by_reference(layout, [each.astype(float).tolist() for each in arrays], output)
    assert wanted
    assert_same(read(layout, arrays, threshold=0.3, most=40), wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_order_of_a_models_boxes_does_not_matter(layout):
    if layout == "yolox":
        pytest.skip("its places are its grid")
    random = np.random.default_rng(1)
    arrays = [np.round(each, 1) for each in made(layout, random, 60, 3)]  # many scores are equal
    turned = []
    order = random.permutation(60)
    if layout == "ssd":
        order = np.concatenate([random.permutation(57), [57, 58, 59]])
    for each in arrays:
        turned.append(each[..., order] if layout == "yolov8" else each[order] if len(each) == 60 else each)
    found = read(layout, arrays)
    assert len(found)
    assert found.tolist() == read(layout, turned).tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_best_first_above_the_threshold_and_apart(layout, seed):
    random = np.random.default_rng(seed)
    found = read(layout, made(layout, random, 200, 2), threshold=0.5, overlap=0.3, most=50)
    scores = found[:, 1].tolist()
    assert scores == sorted(scores, reverse=True)
    assert min(scores) > 0.5
    if layout.startswith("yolo"):
        for place, one in enumerate(found.astype(float).tolist()):
            for other in found.astype(float).tolist()[:place]:
                assert one[0] != other[0] or overlap_of(one[2:], other[2:]) <= 0.3


def test_a_head_the_other_way_round_has_the_same_boxes():
    (head,) = made("yolov8", np.random.default_rng(0), 60, 3)
    found = read("yolov8", [head])
    assert len(found)
    assert found.tolist() == read("yolov11", [head.T]).tolist()


def test_labels_show_which_way_round_a_head_is():
    (head,) = made("yolov8", np.random.default_rng(0), 60, 80)
    found = read("yolov8", [head], [str(index) for index in range(80)])
    assert len(found)
    assert found.tolist() == read("yolov8", [head.T], [str(index) for index in range(80)]).tolist()


@pytest.mark.parametrize("labels", [0, 2, 3, 80])
def test_finished_boxes_of_a_yolo_are_taken_as_they_are(labels):
    finished = np.array([[1, 2, 30, 20, 0.9, 2], [1, 2, 30, 20, 0.8, 2], [0, 0, 9, 9, 0.1, 0]])
    found = read("yolov8", [finished], [str(index) for index in range(labels)])
    assert found.tolist() == read("yolov10", [finished], [str(index) for index in range(labels)]).tolist()
    assert found.tolist() == [[2, np.float32(0.9), 1, 2, 30, 20], [2, np.float32(0.8), 1, 2, 30, 20]]


def test_a_head_of_thousands_is_not_a_yolov10():
    with pytest.raises(LoadFailed, match=r"wanted \[rows, n, 6\]"):
        read("yolov10", made("yolov8", np.random.default_rng(0), 60, 3))


def test_rtdetr_by_ultralytics_has_boxes_and_scores_side_by_side():
    random = np.random.default_rng(3)
    boxes, scores = shares(random, 60), random.uniform(size=(60, 3))
    found = read("rtdetr", [np.concatenate([boxes, scores], 1)], ["a", "b", "c"], threshold=0.6, most=40)
    width, height = SIZE
    wanted = []
    for box, by_class in zip(boxes.astype(np.float32).tolist(), scores.astype(np.float32).tolist(), strict=True):
        index, score = best_class(by_class)
        if score > 0.6:
            left, top, right, bottom = corners(box)
            wanted.append((index, score, (left * width, top * height, right * width, bottom * height)))
    assert_same(found, sorted(wanted, key=lambda item: -item[1])[:40])


@pytest.mark.parametrize(
    ("layout", "wanted"), [("ssd", [3, 0.75, 6.4, 6.4, 32, 16]), ("yolonas", [3, 0.75, 6.4, 6.4, 32, 16])]
)
def test_a_list_of_sevens_says_which_row_each_box_is_of(layout, wanted):
    box = (0.1, 0.2, 0.5, 0.5) if layout == "ssd" else (6.4, 6.4, 32, 16)
    line = (3, 0.75, *box) if layout == "ssd" else (*box, 0.75, 3)
    lines = np.array([[0, *line], [1, *line], [-1, *line], [0, *line]], np.float32)
    spec = TensorSpec("found", "FP32", (1, 1, DYNAMIC, 7) if layout == "ssd" else (DYNAMIC, 7))
    reader = BoxReader("found", OutputSteps(layout=layout), ModelSpec((), (spec,)), (), SIZE)
    results = {"found": lines[None, None] if layout == "ssd" else lines}
    for row, count in enumerate((1, 1, 0)):
        found = reader.read(results, row, 3, SIZE)
        assert len(found) == count
        np.testing.assert_allclose(found, np.array([wanted] * count).reshape(-1, 6), rtol=1e-6)


def test_only_wanted_labels_are_reported():
    arrays = made("yolov8", np.random.default_rng(2), 60, 3)
    found = read("yolov8", arrays, ["cat", "dog", "bird"], wanted=("dog",))
    everything = read("yolov8", arrays, ["cat", "dog", "bird"])
    assert found.tolist() == [box for box in everything.tolist() if box[0] == 1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_box_that_is_not_a_number_is_left_out(layout, value):
    arrays = made(layout, np.random.default_rng(3), 60, 3)
    for each in arrays[:2]:
        each[...] = np.where(np.random.default_rng(4).uniform(size=each.shape) < 0.05, value, each)
    found = read(layout, arrays, most=200)
    assert len(found)
    assert np.isfinite(found).all()


def test_more_boxes_than_are_looked_at_together_are_suppressed_all_the_same():
    random = np.random.default_rng(5)
    boxes = np.concatenate([random.uniform(0, 300, (4000, 2)), random.uniform(60, 90, (4000, 2))], 1)
    boxes = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1).astype(np.float32)
    classes = random.integers(0, 2, 4000)
    kept = suppress(boxes, classes, 0.3, 1000)
    found = [
        (int(kind), -place, box)
        for place, (kind, box) in enumerate(zip(classes, boxes.astype(float).tolist(), strict=True))
    ]
    wanted = suppressed(found, 0.3, 1000)
    assert kept.tolist() == [-place for _, place, _ in wanted]
    assert kept.max() > 1000


def test_boxes_without_area_are_not_a_reason_to_fail():
    boxes = np.array([[5, 5, 5, 5], [5, 5, 5, 5], [1, 1, 9, 9]], np.float32)
    with np.errstate(all="ignore"):
        assert suppress(boxes, np.zeros(3, np.intp), 0.5, 9).tolist() == [0, 1, 2]


def test_a_picture_that_does_not_fit_the_grid_is_said():
    (head,) = made("yolox", np.random.default_rng(0), 42, 3)
    with pytest.raises(RunFailed, match="41 cells are none of YOLOX's for 64 x 32 pixels"):
        read("yolox", [head[:41]])


def test_rows_that_are_missing_are_said():
    reader, results = reader_of("yolov8", [made("yolov8", np.random.default_rng(0), 60, 3)[0][None]])
    with pytest.raises(RunFailed, match="output output0 has 1 rows, and the input has 2"):
        reader.read(results, 1, 2, SIZE)


@pytest.mark.parametrize(
    ("keys", "shapes", "labels", "message"),
    [
        ({"answer": "boxes"}, {"boxes": (-1, 84, 8400)}, 0, "say which family writes the boxes"),
        ({"layout": "yolov8"}, {"boxes": (-1, 84)}, 0, r"its shape is \[-1, 84\]; wanted \[rows, 4 \+ classes, n\]"),
        ({"layout": "yolov8"}, {"boxes": ()}, 0, r"its shape is \[\]"),
        ({"layout": "yolov8"}, {"boxes": (-1, -1, -1)}, 0, "leaves the number of classes open"),
        ({"layout": "yolov8"}, {"boxes": (-1, 4, 8400)}, 0, "wanted"),
        ({"layout": "yolov8"}, {"boxes": (-1, 84, 8400)}, 79, "there are 79 labels, and the model has 80 classes"),
        ({"layout": "yolov5"}, {"boxes": (-1, 25200, -1)}, 0, "with a known last length"),
        ({"layout": "yolonas"}, {"boxes": (-1, 10, 4)}, 0, 'say scores = "…": the model has no other output'),
        ({"layout": "yolonas", "scores": "b"}, {"boxes": (-1, 10, 4)}, 0, "scores = 'b': the model has no such output"),
        ({"layout": "yolov8", "count": "b"}, {"boxes": (-1, 84, 8400), "b": (1,)}, 0, "count is not of layout"),
        ({"layout": "ssd"}, {"boxes": (-1, 10, 4), "a": (-1, 10), "b": (-1, 10)}, 0, "the model has a, b"),
        ({"layout": "detr"}, {"boxes": (-1, 10, 4), "a": (-1, 10, 1)}, 0, "classes and none"),
        (
            {"layout": "yolov8", "wanted": ("cat",)},
            {"boxes": (-1, 84, 8400)},
            0,
            "'cat', which is none of its 0 labels",
        ),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_reported_at_load(keys, shapes, labels, message):
    spec = ModelSpec((), tuple(TensorSpec(name, "FP32", shape) for name, shape in shapes.items()))
    with pytest.raises(LoadFailed, match=message):
        BoxReader("boxes", OutputSteps(**keys), spec, [str(index) for index in range(labels)], SIZE)


def test_shares_of_a_picture_need_a_picture():
    spec = ModelSpec((), (TensorSpec("boxes", "FP32", (-1, 10, 4)), TensorSpec("a", "FP32", (-1, 10, 91))))
    with pytest.raises(LoadFailed, match="needs the size of the picture"):
        BoxReader("boxes", OutputSteps(layout="rfdetr"), spec, (), None)
