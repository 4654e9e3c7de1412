"""The shipped digit model is what its report says, and the program beside it really trains such a model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from demo.digits import HELD_OUT_ROWS, as_text, load_held_out, load_training
from demo.train_digits import HIDDEN, MODEL_FILE, REPORT_FILE, Floats, gradients, judge, main, onnx_bytes, train, warp
from tests.changes import when_changed


def test_shipped_model_gets_as_many_held_out_images_right_as_its_report_says() -> None:
    report = json.loads(REPORT_FILE.read_text())
    # Another processor rounds sums in another order; one image may stand between two digits so narrowly.
    assert judge(MODEL_FILE, load_held_out())["correct"] == pytest.approx(report["correct"], abs=1)
    assert report["held_out"] == HELD_OUT_ROWS
    assert report["correct"] / report["held_out"] >= 0.98


def test_no_held_out_image_is_among_those_trained_on() -> None:
    trained_on = {image.tobytes() for image in load_training().images}
    assert not [image for image in load_held_out().images if image.tobytes() in trained_on]


def test_shipped_model_takes_the_names_and_shapes_that_the_documentation_promises() -> None:
    session = onnxruntime.InferenceSession(MODEL_FILE, providers=["CPUExecutionProvider"])
    assert [(put.name, put.type, put.shape) for put in session.get_inputs()] == [
        ("image", "tensor(float)", ["rows", 64])
    ]
    assert [(put.name, put.type, put.shape) for put in session.get_outputs()] == [
        ("scores", "tensor(float)", ["rows", 10]),
        ("digit", "tensor(int64)", ["rows"]),
    ]


def test_scores_are_chances_and_the_digit_is_the_best_of_them() -> None:
    session = onnxruntime.InferenceSession(MODEL_FILE, providers=["CPUExecutionProvider"])
    scores, digit = session.run(["scores", "digit"], {"image": load_held_out().images.astype(np.float32)})
    np.testing.assert_allclose(scores.sum(axis=1), 1, atol=1e-5)
    assert scores.min() >= 0
    np.testing.assert_array_equal(scores.argmax(axis=1), digit)


@pytest.mark.long
def test_a_few_passes_over_the_images_already_read_most_digits(tmp_path: Path) -> None:
    weights = train(load_training(), epochs=10)
    model = tmp_path / "model.onnx"
    model.write_bytes(onnx_bytes(weights))
    assert judge(model, load_held_out())["correct"] / HELD_OUT_ROWS > 0.85


@pytest.mark.long
def test_training_twice_gives_the_same_weights() -> None:
    first, second = train(load_training(), epochs=1), train(load_training(), epochs=1)
    for name, weight in first.items():
        np.testing.assert_allclose(weight, second[name], rtol=1e-4, atol=1e-5)


@pytest.mark.long
@when_changed("demo/train_digits.py", "demo/digits.py", "demo/models/digits", "requirements/dev.lock")
def test_the_whole_training_gives_a_model_as_good_as_the_shipped_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, report = tmp_path / "1" / "model.onnx", tmp_path / "digits.json"
    assert main(["--model", str(model), "--report", str(report)]) == 0
    assert "held-out images right" in capsys.readouterr().out
    shipped = json.loads(REPORT_FILE.read_text())
    assert json.loads(report.read_text())["correct"] == pytest.approx(shipped["correct"], abs=5)


@pytest.mark.long
@pytest.mark.parametrize("name", ["kernel_1", "kernel_1_bias", "kernel_2", "dense_1", "dense_2", "dense_2_bias"])
def test_gradients_are_the_slope_of_what_the_written_model_loses(name: str) -> None:
    weights, digits = train(load_training(), epochs=1), load_training()
    images, labels = digits.images[:64], digits.labels[:64]
    pictures = images.reshape(-1, 1, 8, 8).astype(np.float32)
    slope = gradients(weights, pictures, labels, np.ones((64, HIDDEN), np.float32))[name]

    def loss(weight: Floats) -> float:
        session = onnxruntime.InferenceSession(onnx_bytes(weights | {name: weight}))
        (scores,) = session.run(["scores"], {"image": images.astype(np.float32)})
        return float(-np.log(scores[np.arange(64), labels].astype(np.float64)).mean())

    uphill = slope / np.linalg.norm(slope)
    step = np.float32(0.01)
    measured = (loss(weights[name] + step * uphill) - loss(weights[name] - step * uphill)) / (2 * step)
    assert measured == pytest.approx(float(np.linalg.norm(slope)), rel=0.03)


def test_warped_images_keep_their_shape_and_their_ink_stays_in_range() -> None:
    images = load_training().images[:50].reshape(-1, 1, 8, 8).astype(np.float32)
    warped = warp(images, np.random.default_rng(0))
    assert warped.shape == images.shape
    assert warped.min() >= 0
    assert warped.max() <= 16.0001
    assert not np.array_equal(warped, images)


def test_an_image_is_drawn_as_eight_lines_darker_where_there_is_more_ink() -> None:
    image = np.zeros(64, np.uint8)
    image[0], image[63] = 16, 8
    lines = as_text(image)
    assert [len(line) for line in lines] == [16] * 8
    assert lines[0].startswith("@@ ")
    assert lines[7] == " " * 14 + "=="


def test_the_scan_of_the_readmes_tour_is_a_held_out_seven() -> None:
    held_out = load_held_out()
    scan = np.array(json.loads(REPORT_FILE.with_name("seven.json").read_text()))
    assert scan.shape == (1, 64)
    (row,) = np.flatnonzero((held_out.images == scan).all(axis=1))
    assert held_out.labels[row] == 7
