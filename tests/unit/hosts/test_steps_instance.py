"""Answers of a model's outputs: classes, boxes in the picture's pixels, masks, embeddings, text; each row alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.onnxruntime.backend import OnnxRuntimeBackend
from edge_runtime.errors import LoadFailed, RunFailed
from edge_runtime.hosts.steps_instance import AnswerSteps
from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.pictures.fit import place
from edge_runtime.pictures.picture_steps import PictureSteps
from edge_runtime.steps import ModelSteps, OutputSteps
from edge_runtime.tensors import bf16_from_fp32
from tests.models import onnx_models

IMAGE = TensorSpec("image", "FP32", (DYNAMIC, 3, 32, 64))


@dataclass
class Outputs:
    """A model that gives what it is told, whatever goes in; the runs that it was asked for are kept."""

    spec: ModelSpec
    given: dict[str, np.ndarray] = field(default_factory=dict)
    runs: list[dict[str, np.ndarray]] = field(default_factory=list)

    def run(self, inputs, outputs=None):
        self.runs.append(dict(inputs))
        if not self.given:
            raise RunFailed("it takes no noise")
        return [self.given[name] for name in outputs or [each.name for each in self.spec.outputs]]


def model(shape, given=None, datatype="FP32", name="out", inputs=(IMAGE,)):
    given = {} if given is None else {name: np.asarray(given)}
    return Outputs(ModelSpec(inputs, (TensorSpec(name, datatype, shape),)), given)


def steps_of(output, labels=(), name="out", inputs=None):
    return ModelSteps(inputs or {}, {name: output}, {name: tuple(labels)} if labels else {})


def answers(array, output, labels=(), shape=None, datatype="FP32", places=()):
    """The answer of one output of these rows."""
    array = np.asarray(array)
    made = AnswerSteps(model(shape or (DYNAMIC, *array.shape[1:]), None, datatype), steps_of(output, labels), None)
    (answer,) = made.make({"out": array}, {"image": np.zeros((len(array), 3, 32, 64), np.float32)}, places)
    (spec,) = made.specs
    assert spec.fits(answer.shape), (spec, answer.shape)
    return answer


def classes(rows, labels=(), **keys):
    return answers(np.array(rows, np.float32), OutputSteps(**keys), labels).tolist()


# ---- classes --------------------------------------------------------------------------------------------------------


def test_classes_are_reported_best_first():
    assert classes([[0.25, 0.5, 0.25], [0.0, 0.25, 0.75]], softmax=False, top_k=2) == [
        [[1, 0.5], [0, 0.25]],
        [[2, 0.75], [1, 0.25]],
    ]


def test_logits_become_probabilities():
    logits = [1.0, 2.0, -700.0, 800.0]
    ((best,),) = classes([logits], softmax=True, top_k=1)
    assert best == [3, 1]
    ((best, _),) = classes([[math.log(3), 0.0]], softmax=True)
    assert best == [0, pytest.approx(0.75)]


def test_rows_of_one_batch_do_not_change_each_others_answers():
    image = {"image": np.zeros((2, 3, 32, 64), np.float32)}
    sure, odd = [0.9, 0.1], [5.0, -5.0]  # alone the first looks like probabilities, with the second like logits
    made = AnswerSteps(model((DYNAMIC, 2), [[0.6, 0.4]]), steps_of(OutputSteps()), None)
    (together,) = made.make({"out": np.array([sure, odd], np.float32)}, image, ())
    (alone,) = made.make({"out": np.array([sure], np.float32)}, {"image": image["image"][:1]}, ())
    assert together[0].tolist() == alone[0].tolist() == [[0, np.float32(0.9)], [1, np.float32(0.1)]]


@pytest.mark.parametrize(
    ("first_runs", "wanted"),
    [([[0.5, 0.5]], 0.9), ([[0.2, 0.2]], 0.9), ([[-0.1, 0.5]], 0.6899745), ([[3.0, 0.0]], 0.6899745)],
)
def test_first_runs_show_whether_scores_are_probabilities(first_runs, wanted):
    made = AnswerSteps(model((DYNAMIC, 2), first_runs), steps_of(OutputSteps(top_k=1)), None)
    (answer,) = made.make({"out": np.array([[0.9, 0.1]], np.float32)}, {"image": np.zeros((1, 3, 32, 64))}, ())
    assert answer[0, 0, 1] == pytest.approx(wanted)


def test_first_runs_show_the_model_what_its_pictures_can_become(tmp_path):
    steps = steps_of(OutputSteps(top_k=1), name="scores", inputs={"image": PictureSteps(range="0..1")})
    instance = OnnxRuntimeBackend().load(onnx_models.colours(tmp_path), LoadOptions())
    try:
        made = AnswerSteps(instance, steps, (8, 8))
        (answer,) = made.make({"scores": np.array([[0.5, 1, 0]], np.float32)}, {"image": np.zeros((1, 3, 8, 8))}, ())
        assert answer.tolist() == [[[1, 1]]]
    finally:
        instance.close()


def test_first_runs_are_in_the_declared_range_and_size():
    image = TensorSpec("image", "FP32", (DYNAMIC, 3, DYNAMIC, DYNAMIC))
    noisy = model((DYNAMIC, 2), [[0.5, 0.5]], inputs=(image,))
    AnswerSteps(noisy, steps_of(OutputSteps(), inputs={"image": PictureSteps(mean=(100.0,), scale=(0.1,))}), (32, 64))
    assert {each["image"].shape for each in noisy.runs} == {(1, 3, 32, 64)}
    assert min(each["image"].min() for each in noisy.runs) >= -10.0
    assert max(each["image"].max() for each in noisy.runs) == pytest.approx(15.5, abs=0.2)


def test_no_run_is_made_where_softmax_is_said():
    quiet = model((DYNAMIC, 2))
    AnswerSteps(quiet, steps_of(OutputSteps(softmax=True)), None)
    assert quiet.runs == []


def test_a_model_that_cannot_be_tried_wants_softmax_said():
    with pytest.raises(LoadFailed, match=r"it takes no noise\); say softmax = true"):
        AnswerSteps(model((DYNAMIC, 2)), steps_of(OutputSteps()), None)


def test_a_class_whose_score_is_not_a_number_is_not_reported():
    assert classes([[0.25, math.nan, 0.5]], softmax=False) == [[[2, 0.5], [0, 0.25], [-1, 0]]]
    assert classes([[0.25, math.nan, 0.5]], softmax=True) == [[[-1, 0]] * 3]
    assert classes([[0.25, math.nan], [0.0, 1.0]], softmax=False)[1] == [[1, 1], [0, 0]]


def test_classes_are_left_out_below_a_threshold_that_is_set():
    assert classes([[0.2, 0.1]], softmax=False) == [[[0, np.float32(0.2)], [1, np.float32(0.1)]]]
    assert classes([[0.6, 0.3]], softmax=False, threshold=0.5) == [[[0, np.float32(0.6)], [-1, 0]]]


def test_only_wanted_classes_are_reported():
    found = classes([[0.5, 0.25, 0.25]], ["cat", "dog", "bird"], softmax=False, wanted=("bird", "dog"))
    assert found == [[[1, 0.25], [2, 0.25], [-1, 0]]]


def test_bf16_scores_are_numbers():
    scores = bf16_from_fp32(np.array([[0.25, 0.75]], np.float32))
    assert answers(scores, OutputSteps(softmax=False), datatype="BF16").tolist() == [[[1, 0.75], [0, 0.25]]]


# ---- boxes ----------------------------------------------------------------------------------------------------------


HEAD = np.array([[[32.0, 16.0, 16.0, 8.0, 0.9, 0.1]]]).transpose(0, 2, 1).astype(np.float32)
"""One box in the middle of a picture of 64 x 32, of class 0."""


def test_boxes_of_a_picture_are_in_its_own_pixels():
    boxes = OutputSteps(layout="yolov8", most=2)
    tall = place("letterbox", (100, 400), (64, 32))  # 8 x 32 in the middle
    found = answers(HEAD, boxes, shape=(DYNAMIC, 6, DYNAMIC), places=[tall])
    assert found.tolist() == [[[0, np.float32(0.9), 0, 150, 100, 250], [-1, 0, 0, 0, 0, 0]]]


def test_boxes_of_a_tensor_are_in_the_models_pixels():
    found = answers(HEAD, OutputSteps(layout="yolov8", most=1), shape=(DYNAMIC, 6, DYNAMIC))
    assert found.tolist() == [[[0, np.float32(0.9), 24, 12, 40, 20]]]


@pytest.mark.parametrize("fit", ["stretch", "crop", "letterbox"])
def test_a_box_comes_back_to_where_it_was_in_the_picture(fit):
    placed = place(fit, (640, 480), (64, 32))
    source = np.array([[200, 190, 420, 290]], np.float32)
    scale = np.array([placed.width / 640, placed.height / 480] * 2)
    inside = (source * scale + [placed.left, placed.top] * 2).astype(np.float32)
    np.testing.assert_allclose(placed.to_source(inside), source, atol=1e-3)
    assert placed.to_source(np.array([[-99, -99, 999, 999]], np.float32)).tolist() == [[0, 0, 640, 480]]


def test_partners_of_boxes_are_not_answers_of_their_own():
    outputs = TensorSpec("boxes", "FP32", (DYNAMIC, 1, 4)), TensorSpec("logits", "FP32", (DYNAMIC, 1, 2))
    made = AnswerSteps(
        Outputs(ModelSpec((IMAGE,), outputs)), steps_of(OutputSteps(layout="rfdetr", most=1), name="boxes"), None
    )
    assert made.needs == ["boxes", "logits"]
    results = {"boxes": np.full((1, 1, 4), 0.5, np.float32), "logits": np.array([[[-9.0, 9.0]]], np.float32)}
    (found,) = made.make(results, {"image": np.zeros((1, 3, 32, 64), np.float32)}, ())
    assert found[0, 0].tolist() == [1, pytest.approx(0.99987, abs=1e-5), 16, 8, 48, 24]


# ---- masks, embeddings, text ----------------------------------------------------------------------------------------


def test_a_mask_is_the_best_class_of_each_pixel_either_way_round():
    scores = np.random.default_rng(0).normal(size=(2, 5, 6, 7)).astype(np.float32)
    wanted = scores.argmax(axis=1)
    assert answers(scores, OutputSteps(answer="mask")).tolist() == wanted.tolist()
    assert answers(scores.transpose(0, 2, 3, 1), OutputSteps(answer="mask")).tolist() == wanted.tolist()


def test_a_mask_of_one_class_is_where_it_is_likely():
    plane = np.array([[[[-1.0, 1.0], [0.4, math.nan]]]], np.float32)
    assert answers(plane, OutputSteps(answer="mask", softmax=True)).tolist() == [[[0, 1], [1, 0]]]
    assert answers(plane, OutputSteps(answer="mask", softmax=False)).tolist() == [[[0, 1], [0, 0]]]
    assert answers(plane[:, 0], OutputSteps(answer="mask", softmax=False)).tolist() == [[[0, 1], [0, 0]]]


def test_a_mask_that_the_model_has_made_is_reported_as_it_is():
    plane = np.array([[[0, 3], [2, 1]]], np.int64)
    assert answers(plane, OutputSteps(answer="mask"), datatype="INT64").tolist() == plane.tolist()


def test_an_embedding_has_the_length_one():
    found = answers(np.array([[[3.0], [4.0]], [[0.0], [0.0]]], np.float32), OutputSteps(answer="embedding"))
    np.testing.assert_allclose(found, [[0.6, 0.8], [0, 0]], rtol=1e-6)


def test_text_is_reported_as_it_is():
    texts = np.array(["straße".encode(), b""], object)
    found = answers(texts, OutputSteps(answer="text"), shape=(DYNAMIC,), datatype="BYTES")
    assert found.tolist() == ["straße".encode(), b""]


@pytest.mark.parametrize("labels", [["a", "b", " "], ["<blank>", "a", "b", " "]])
def test_characters_are_put_together_without_repeats_and_blanks(labels):
    read = [[0, 1, 1, 0, 1, 2, 3, 3, 2], [0, 0, 0, 0, 0, 0, 0, 0, 0]]
    scores = np.eye(4, dtype=np.float32)[np.array(read)]
    assert answers(scores, OutputSteps(answer="text"), labels).tolist() == [b"aab b", b""]


# ---- what does not fit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "datatype", "keys", "labels", "message"),
    [
        ((), "FP32", {}, 0, "it has no axes"),
        ((), "FP32", {"layout": "yolov8"}, 0, "it has no axes"),
        ((DYNAMIC,), "FP32", {}, 0, r"wanted \[rows, n\]"),
        ((DYNAMIC, DYNAMIC), "FP32", {}, 0, "with known lengths behind axis 0"),
        ((DYNAMIC, 3), "INT64", {}, 0, 'it is INT64; answer = "classes" wants FP32'),
        ((DYNAMIC, 3), "FP32", {}, 2, "there are 2 labels, and the model has 3 classes"),
        ((DYNAMIC, 3), "FP32", {"wanted": ("cat",)}, 3, "'cat', which is none of 3 labels"),
        ((DYNAMIC,), "FP32", {"answer": "embedding"}, 0, r"wanted \[rows, n\]"),
        ((DYNAMIC, 3), "FP32", {"answer": "mask"}, 0, r"wanted \[rows, classes, height, width\]"),
        ((DYNAMIC, 300, 4, 300), "FP32", {"answer": "mask"}, 0, "it has 300 classes; a mask has at most 256"),
        ((DYNAMIC, 3), "FP32", {"answer": "text"}, 0, "wanted BYTES"),
        ((DYNAMIC, 20, 4), "FP32", {"answer": "text"}, 2, "there are 2 labels for 4 characters; wanted 3"),
        ((DYNAMIC, 20, 4), "FP32", {"answer": "text"}, 4, "a line <blank>"),
        ((DYNAMIC, 2), "BYTES", {"answer": "text"}, 0, "wanted one text a row"),
    ],
)
def test_an_output_that_cannot_be_the_declared_answer_fails_the_load(shape, datatype, keys, labels, message):
    output = OutputSteps(softmax=False, **keys)
    with pytest.raises(LoadFailed, match=r"\[output.out\].*" + message):
        AnswerSteps(model(shape, None, datatype), steps_of(output, [str(each) for each in range(labels)]), None)


def test_an_output_that_is_not_there_is_reported_with_those_that_are():
    with pytest.raises(LoadFailed, match=r"\[output.boxes\]: the model has no such output; it has out"):
        AnswerSteps(model((DYNAMIC, 3)), steps_of(OutputSteps(), name="boxes"), None)


@pytest.mark.parametrize("array", [np.float32(1), np.zeros((3, 2), np.float32)])
@pytest.mark.parametrize("answer", ["classes", "embedding"])
def test_a_run_without_a_row_for_each_picture_fails(array, answer):
    made = AnswerSteps(model((DYNAMIC, 2)), steps_of(OutputSteps(answer=answer, softmax=False)), None)
    with pytest.raises(RunFailed, match="for 2 rows; wanted as many along axis 0"):
        made.make({"out": np.asarray(array)}, {"image": np.zeros((2, 3, 32, 64), np.float32)}, ())
