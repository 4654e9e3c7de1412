"""What `model.toml` declares of pictures and does not fit: told at load, with what was found and what to write."""

from __future__ import annotations

import re
import sys

import msgspec
import pytest

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.onnxruntime.backend import OnnxRuntimeBackend
from edge_runtime.errors import LoadFailed
from edge_runtime.extras import install_advice
from edge_runtime.hosts.steps_instance import make_forms
from edge_runtime.pictures.picture_steps import PictureSteps
from edge_runtime.steps import ModelSteps
from tests.models import onnx_models

FITS = {"range": "0..1"}


def load(folder, shape=("rows", 3, 8, 8), datatype="FP32", name="image", **steps):
    instance = OnnxRuntimeBackend().load(onnx_models.picture_copy(folder, shape, datatype), LoadOptions())
    try:
        return make_forms(instance, ModelSteps({name: PictureSteps(**steps)}), 1)
    finally:
        instance.close()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"range": "0..1", "mean": [1.0]}, "range beside mean or scale; say one of the two"),
        ({"range": "0..1", "scale": [1.0]}, "range beside mean or scale; say one of the two"),
        ({"mean": [1.0, 2.0]}, "mean has 2 numbers; wanted one, or one for each of 3 channels"),
        ({"scale": [1.0, 2.0]}, "scale has 2 numbers"),
        ({"fill": []}, "fill has 0 numbers"),
        ({"fill": [1, 2]}, "fill has 2 numbers"),
        ({"fill": [256]}, "fill"),
        ({"shorter_side": 256, "fit": "stretch"}, 'shorter_side is for fit = "crop"; got fit = "stretch"'),
        ({"from": "jpeg"}, "jpeg"),
        ({"fit": "contain"}, "contain"),
        ({"color": "rgba"}, "rgba"),
        ({"filter": "area"}, "area"),
        ({"range": "0..2"}, "0..2"),
        ({"size": [0, 8]}, "size"),
        ({"size": [8]}, "size"),
        ({"normalise": True}, "normalise"),
    ],
    ids=str,
)
def test_a_table_that_contradicts_itself_is_refused(fields, said):
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(fields, PictureSteps)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ({"name": "picture", **FITS}, "[input.picture]: the model has no such input; it has image"),
        ({}, 'say what its FP32 numbers mean: range = "0..1" (or "-1..1", "0..255"), or mean and scale'),
        ({"datatype": "INT8"}, "say what its INT8 numbers mean"),
        ({"datatype": "INT8", "range": "0..255"}, 'range = "0..255" does not fit in INT8'),
        ({"datatype": "UINT8", "range": "0..1"}, 'range = "0..1" does not fit in UINT8; wanted mean and scale'),
        ({"datatype": "INT64", **FITS}, "it takes INT64; wanted FP32, FP16, UINT8 or INT8"),
        ({"color": "gray", **FITS}, '[rows, height, width, 1] for color = "gray"; say color = "rgb" or "bgr"'),
        ({"shape": ("rows", 1, 8, 8), **FITS}, 'for color = "rgb"; say color = "gray"'),
        ({"shape": ("rows", 4, 8, 8), **FITS}, "its shape is [-1, 4, 8, 8]; wanted [rows, 3, height, width]"),
        ({"shape": ("rows", 64), **FITS}, "its shape is [-1, 64]; wanted"),
        ({"shape": ("rows", 3, "h", "w"), **FITS}, "leaves height or width open; say size = [height, width]"),
        ({"shape": ("rows", 3, "h", 8), "size": (8, 9), **FITS}, "size is [8, 9], and the model takes [-1, 8]"),
        ({"size": (9, 8), **FITS}, "size is [9, 8], and the model takes [8, 8]"),
        ({"fit": "crop", "shorter_side": 7, **FITS}, "shorter_side is 7, less than the model's 8 x 8"),
        ({"shape": ("rows", 1, 8, 8), "color": "gray", "mean": (1.0, 2.0, 3.0)}, "mean has 3 numbers; wanted one"),
        ({"shape": ("rows", 1, 8, 8), "color": "gray", "fill": (1, 2, 3), **FITS}, "fill has 3 numbers; wanted one"),
    ],
    ids=str,
)
def test_steps_that_do_not_fit_their_model_are_refused_at_load(tmp_path, steps, said):
    with pytest.raises(LoadFailed) as refused:
        load(tmp_path, **steps)
    assert said in refused.value.message


def test_two_inputs_of_pictures_are_refused(tmp_path):
    instance = OnnxRuntimeBackend().load(onnx_models.picture_copy(tmp_path), LoadOptions())
    both = ModelSteps({"image": PictureSteps(**FITS), "mask": PictureSteps(**FITS)})
    with pytest.raises(LoadFailed, match="steps are declared for image, mask; wanted one input"):
        make_forms(instance, both, 1)
    instance.close()


@pytest.mark.parametrize(
    ("source", "frames"),
    [
        ("picture", (-1, -1, -1, -1)),
        ("frames", (-1, -1, -1, -1)),
        ("gray", (-1, -1, -1, 1)),
        ("nv12", (-1, -1, -1)),
        ("yuyv", (-1, -1, -1, 2)),
    ],
)
def test_each_form_says_what_it_takes(tmp_path, source, frames):
    specs = {each.form.kind: each.spec.inputs[0] for each in load(tmp_path, source=source, **FITS)}
    assert (specs["frames"].datatype, specs["frames"].shape) == ("UINT8", frames)
    assert ("picture" in specs) == (source == "picture")


def test_a_model_of_one_row_takes_one_picture(tmp_path):
    specs = {each.form.kind: each.spec.inputs[0] for each in load(tmp_path, shape=(1, 3, 8, 8), **FITS)}
    assert specs["picture"].shape == (1,)
    assert specs["frames"].shape == (1, -1, -1, -1)


def test_without_pillow_the_load_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(LoadFailed, match=r"need Pillow .*; " + re.escape(install_advice("pictures"))):
        load(tmp_path, **FITS)
