"""Outputs of each kind of detector's model, made by hand from known boxes, read as Frigate's plugin takes them."""

from __future__ import annotations

import numpy as np
import pytest

from edge_runtime.errors import RunFailed
from edge_runtime.frigate.boxes import detections

WIDTH, HEIGHT = 64, 32

KNOWN = ((3, 0.9, (8.0, 4.0, 24.0, 20.0)), (1, 0.6, (40.0, 8.0, 60.0, 30.0)), (0, 0.39, (1.0, 1.0, 9.0, 9.0)))
"""Class, score, and xmin, ymin, xmax, ymax in pixels; the last is below the least score."""

WANTED = [
    [3, 0.9, 4 / 32, 8 / 64, 20 / 32, 24 / 64],
    [1, 0.6, 8 / 32, 40 / 64, 30 / 32, 60 / 64],
]


def centred(box):
    xmin, ymin, xmax, ymax = box
    return (xmin + xmax) / 2, (ymin + ymax) / 2, xmax - xmin, ymax - ymin


def yolo(known=KNOWN, rows=50, classes=5):
    output = np.zeros((1, 4 + classes, rows), np.float32)
    for place, (label, score, box) in enumerate(known, 7):
        output[0, :4, place] = centred(box)
        output[0, 4 + label, place] = score
    return [("output0", output)]


def yolo_turned():
    return [("output0", yolo()[0][1].transpose(0, 2, 1))]


def yolo_in_three(classes=5):
    outputs = [np.zeros((1, 3 * (5 + classes), HEIGHT // s, WIDTH // s), np.float32) for s in (8, 16, 32)]
    anchors = ((12, 16), (36, 75), (142, 110))
    for at, (label, score, box) in enumerate(KNOWN[:2]):
        stride = (8, 16)[at]
        x, y, w, h = centred(box)
        column, row = int(x // stride), int(y // stride)
        cell = outputs[at][0, : 5 + classes, row, column]  # the first anchor
        cell[0], cell[1] = (x / stride - column + 0.5) / 2, (y / stride - row + 0.5) / 2
        cell[2], cell[3] = np.sqrt(w / anchors[at][0]) / 2, np.sqrt(h / anchors[at][1]) / 2
        cell[4], cell[5 + label] = 1.0, score
    return [(str(index), output) for index, output in enumerate(outputs)]


def yolox(classes=5):
    cells = [(x, y, s) for s in (8, 16, 32) for y in range(HEIGHT // s) for x in range(WIDTH // s)]
    output = np.zeros((1, len(cells), 5 + classes), np.float32)
    for place, (label, score, box) in zip((9, 33, 20), KNOWN, strict=True):
        x, y, w, h = centred(box)
        column, row, stride = cells[place]
        output[0, place, :4] = x / stride - column, y / stride - row, np.log(w / stride), np.log(h / stride)
        output[0, place, 4], output[0, place, 5 + label] = 0.9, score / 0.9
    return [("output", output)]


def yolonas():
    rows = [(0, *box, score, label) for label, score, box in KNOWN]
    return [("graph2_flat_predictions", np.array([*rows, (0, 0, 0, 50, 30, 0.99, -1)], np.float32))]


def ssd():
    rows = [(0, label, score, *np.divide(box, (WIDTH, HEIGHT) * 2)) for label, score, box in KNOWN]
    return [("detection_out", np.array([[rows]], np.float32))]


def ssd_in_four(names=("boxes", "classes", "scores", "count")):
    boxes = [[box[1] / HEIGHT, box[0] / WIDTH, box[3] / HEIGHT, box[2] / WIDTH] for _, _, box in KNOWN]
    arrays = [boxes], [[label for label, _, _ in KNOWN]], [[score for _, score, _ in KNOWN]], [len(KNOWN)]
    return [(name, np.array(array, np.float32)) for name, array in zip(names, arrays, strict=True)]


def ssd_of_tensorflow():
    outputs = dict(ssd_in_four(("detection_boxes", "detection_classes", "detection_scores", "num_detections")))
    return [(name, outputs[name]) for name in sorted(outputs, reverse=True)]


def dfine():
    labels = np.array([[label for label, _, _ in KNOWN]])
    # The model multiplies shares by `orig_target_sizes`, which Frigate gives as height and width.
    boxes = np.array(
        [[np.divide(box, (WIDTH, HEIGHT, WIDTH, HEIGHT)) * (HEIGHT, WIDTH, HEIGHT, WIDTH) for *_, box in KNOWN]]
    )
    scores = np.array([[score for _, score, _ in KNOWN]])
    return [("labels", labels), ("boxes", boxes.astype(np.float32)), ("scores", scores.astype(np.float32))]


def rfdetr(classes=5):
    boxes = np.array([[np.divide(centred(box), (WIDTH, HEIGHT) * 2) for _, _, box in KNOWN]], np.float32)
    logits = np.zeros((1, len(KNOWN), 1 + classes), np.float32)
    for row, (label, score, _) in enumerate(KNOWN):
        logits[0, row] = np.log((1 - score) / classes)
        logits[0, row, 1 + label] = np.log(score)
    return [("dets", boxes), ("labels", logits)]


KINDS = {
    "yolo, classes first": ("yologeneric", yolo()),
    "yolo, boxes first": ("yologeneric", yolo_turned()),
    "yolo in three outputs": ("yologeneric", yolo_in_three()),
    "yolo by the enum's value": ("yolo-generic", yolo()),
    "yolox": ("yolox", yolox()),
    "yolonas": ("yolonas", yolonas()),
    "ssd": ("ssd", ssd()),
    "ssd in four outputs": ("ssd", ssd_in_four()),
    "ssd in four named outputs": ("ssd", ssd_of_tensorflow()),
    "dfine": ("dfine", dfine()),
    "dfine in another order": ("dfine", dfine()[::-1]),
    "rfdetr": ("rfdetr", rfdetr()),
}


@pytest.mark.parametrize(("model_type", "outputs"), KINDS.values(), ids=KINDS)
def test_each_kind_of_model_gives_the_same_rows(model_type, outputs):
    table = detections(model_type, outputs, WIDTH, HEIGHT)
    assert table.shape == (20, 6)
    assert table.dtype == np.float32
    np.testing.assert_allclose(table[:2], WANTED, atol=1e-5)
    assert not table[2:].any(), "a score below 0.4 ends the list"


def test_of_boxes_that_overlap_the_best_one_stands_whatever_their_classes():
    near = [(3, 0.7, (8.0, 4.0, 24.0, 20.0)), (1, 0.9, (9.0, 4.0, 25.0, 20.0)), (2, 0.5, (40.0, 4.0, 56.0, 20.0))]
    table = detections("yologeneric", yolo(near), WIDTH, HEIGHT)
    assert table[:4, 0].tolist() == [1, 2, 0, 0]
    np.testing.assert_allclose(table[:3, 1], [0.9, 0.5, 0])


def test_no_more_than_the_20_best_are_reported():
    many = [(1, 0.5 + index / 100, (index * 2.0, 0.0, index * 2.0 + 1, 1.0)) for index in range(30)]
    table = detections("yologeneric", yolo(many), WIDTH, HEIGHT)
    np.testing.assert_allclose(table[:, 1], [0.79 - index / 100 for index in range(20)], atol=1e-6)


def test_a_model_that_finds_nothing_gives_zeros():
    for model_type, outputs in KINDS.values():
        nothing = [(name, np.zeros_like(array)) for name, array in outputs]
        if model_type not in ("rfdetr", "yolonas"):
            assert not detections(model_type, nothing, WIDTH, HEIGHT).any()
    assert not detections("yolonas", [("flat", np.zeros((0, 7), np.float32))], WIDTH, HEIGHT).any()


def test_boxes_outside_the_picture_are_cut_at_its_sides_and_what_is_not_a_number_is_left_out():
    odd = [(1, 0.9, (-5.0, -5.0, 90.0, 90.0)), (2, 0.8, (np.nan, 0.0, 1.0, 1.0)), (2, np.nan, (0.0, 0.0, 1.0, 1.0))]
    table = detections("yologeneric", yolo(odd), WIDTH, HEIGHT)
    np.testing.assert_allclose(table[0], [1, 0.9, 0, 0, 1, 1], atol=1e-6)
    assert not table[1:].any()


@pytest.mark.parametrize("model_type", ["ssd", "yolox", "yolonas", "yologeneric", "dfine", "rfdetr"])
def test_outputs_of_another_kind_of_model_are_an_error_that_names_them(model_type):
    with pytest.raises(RunFailed, match=r"scores \[1, 3\].*set model_type in Frigate"):
        detections(model_type, [("scores", np.zeros((1, 3), np.float32))], WIDTH, HEIGHT)


def test_an_unknown_kind_is_an_error_that_names_the_known_ones():
    with pytest.raises(RunFailed, match="wanted one of ssd, yolox"):
        detections("faster-rcnn", yolo(), WIDTH, HEIGHT)
