"""The big model of the demo: a real network of that size, the same on every machine, whose axis 0 is rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from demo.make_vision_model import CLASSES, PICTURE_SHAPE, main, mobilenetv2_bytes


@pytest.fixture(scope="module")
def content() -> bytes:
    return mobilenetv2_bytes()


def test_the_same_seed_writes_the_same_file(content: bytes) -> None:
    assert mobilenetv2_bytes() == content
    assert mobilenetv2_bytes(seed=12) != content


def test_it_has_as_many_weights_as_the_published_network(content: bytes) -> None:
    weights = sum(int(np.prod(tensor.dims)) for tensor in onnx.load_from_string(content).graph.initializer)
    # 3.50 million in torchvision's, whose batch normalisation is folded into biases here.
    assert weights == pytest.approx(3.49e6, rel=0.01)


def test_rows_do_not_influence_each_other(content: bytes) -> None:
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    pictures = np.random.default_rng(0).random((3, *PICTURE_SHAPE), np.float32)
    (together,) = session.run(["scores"], {"image": pictures})
    assert together.shape == (3, CLASSES)
    np.testing.assert_allclose(together.sum(axis=1), 1, rtol=1e-4)
    for row in range(3):
        (alone,) = session.run(["scores"], {"image": pictures[row : row + 1]})
        np.testing.assert_allclose(alone[0], together[row], rtol=1e-3, atol=1e-6)


def test_different_pictures_get_different_scores(content: bytes) -> None:
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    pictures = np.stack([np.zeros(PICTURE_SHAPE, np.float32), np.ones(PICTURE_SHAPE, np.float32)])
    (scores,) = session.run(["scores"], {"image": pictures})
    assert np.abs(scores[0] - scores[1]).max() > 1e-3


def test_the_program_writes_a_whole_file_and_leaves_no_part(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mobilenetv2" / "1" / "model.onnx"
    assert main([str(file)]) == 0
    assert file.read_bytes() == content
    assert [entry.name for entry in file.parent.iterdir()] == ["model.onnx"]
    assert "14.0 MB" in capsys.readouterr().out
