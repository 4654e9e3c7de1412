"""Whether steps fit together: what is found out of their models, and every mismatch in words."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edge_runtime.config.settings import Config
from edge_runtime.daemon.runtime import Runtime
from edge_runtime.pipelines.definition import read_pipeline
from edge_runtime.pipelines.fit import Fit, fit_pipeline
from tests.models import onnx_models

FINDER = '[input.image]\nrange = "0..255"\n[output.boxes]\nlayout = "yolov8"\n'
COLOURS = '[input.image]\nrange = "0..255"\n[output.scores]\nanswer = "classes"\nsoftmax = false\n'

CROP = """
[[step]]
name = "detect"
model = "finder"
inputs = {image = "input.picture"}
[[step]]
name = "classify"
model = "colours"
inputs = {image = "detect.boxes"}
crop = {picture = "input.picture", box = "detect.boxes"}
[output]
classes = "classify.scores"
boxes = "detect.boxes"
"""

ADD = """
[[step]]
name = "one"
model = "added"
inputs = {x = "input.x"}
[[step]]
name = "two"
model = "added"
inputs = {x = "one.y"}
[output]
y = "two.y"
"""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    models = tmp_path_factory.mktemp("fit") / "models"
    onnx_models.added(models / "added" / "1")
    onnx_models.added(models / "wide" / "1", columns=3)
    onnx_models.finder(models / "finder" / "1")
    onnx_models.finder(models / "bare" / "1")
    onnx_models.colours(models / "colours" / "1")
    onnx_models.colours(models / "floats" / "1")
    onnx_models.identity(models / "ints" / "1", "INT64")
    (models / "finder" / "model.toml").write_text(FINDER)
    (models / "colours" / "model.toml").write_text(COLOURS)
    config = Config(watch=False, calibrate=False, state=str(models.parent / "state"))
    with Runtime(models, config=config) as found:
        yield found


def fit(runtime: Runtime, text: str) -> Fit:
    pipeline = read_pipeline(text, "pipeline.toml")
    servables = {step.name: runtime.core.table.find(step.model, 1) for step in pipeline.steps if step.model}
    return fit_pipeline(pipeline, servables, 64)


def described(found: Fit) -> dict[str, str]:
    tensors = (*found.spec.inputs, *found.spec.outputs)
    return {each.name: f"{each.datatype} {list(each.shape)}" for each in tensors}


def test_rows_in_are_rows_everywhere_where_all_models_batch(runtime: Runtime) -> None:
    found = fit(runtime, ADD)
    assert described(found) == {"x": "FP32 [-1, 2]", "y": "FP32 [-1, 2]"}
    assert (found.batches, found.max_rows, found.faults) == (True, 64, ())


def test_a_condition_ends_that(runtime: Runtime) -> None:
    found = fit(runtime, ADD.replace('inputs = {x = "one.y"}', 'inputs = {x = "one.y"}\nwhen = "one.y > 3"'))
    assert (found.batches, found.faults) == (False, ())


def test_a_declared_picture_is_taken_encoded_and_decoded_once_more_for_crops(runtime: Runtime) -> None:
    found = fit(runtime, CROP)
    assert found.faults == ()
    assert described(found) == {
        "picture": "BYTES [-1]", "classes": "FP32 [-1, 3, 2]", "boxes": "FP32 [-1, 100, 6]"
    }  # fmt: skip
    assert [step.name for step in found.pipeline.steps] == ["detect", "decode_1", "classify"]


def test_described_frames_are_cropped_as_they_are(runtime: Runtime) -> None:
    found = fit(runtime, CROP + '[input.picture]\ndatatype = "UINT8"\nshape = [1, -1, -1, 3]\n')
    assert found.faults == ()
    assert [step.name for step in found.pipeline.steps] == ["detect", "classify"]


def test_a_step_may_ask_for_a_models_own_tensors(runtime: Runtime) -> None:
    text = CROP.partition('[[step]]\nname = "classify"')[0].replace('model = "finder"', 'model = "finder"\nraw = true')
    found = fit(runtime, text + '[output]\nboxes = "detect.boxes"\n')
    assert described(found)["boxes"] == "FP32 [-1, 7, 16]"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            CROP.replace('"colours"', '"floats"'),
            "input 'image' of model 'floats' is FP32 [-1,3,8,8]; it is given the cropped pictures, UINT8 [-1,-1,-1,-1]",
        ),
        (
            CROP.replace('"finder"', '"bare"'),
            "step 'classify': crop: input.picture is FP32 [-1,3,32,32]; wanted UINT8 [1,height,width,1 or 3], or",
        ),
        (
            ADD.replace('model = "added"\ninputs = {x = "input.x"}', 'model = "wide"\ninputs = {x = "input.x"}'),
            "step 'two': input 'x' of model 'added' is FP32 [-1,2]; one.y is FP32 [-1,3]",
        ),
        (
            ADD.replace('model = "added"\ninputs = {x = "one.y"}', 'model = "ints"\ninputs = {x = "one.y"}'),
            "step 'two': input 'x' of model 'ints' is INT64 [-1,2]; one.y is FP32 [-1,2]",
        ),
        (
            ADD.replace('{x = "one.y"}', '{z = "one.y"}'),
            "step 'two': input 'x' of model 'added' is not given; it takes x",
        ),
        (ADD.replace('"two.y"', '"two.q"'), "step 'two': model 'added' has no output 'q'; it gives y"),
        (
            ADD.replace('inputs = {x = "one.y"}', 'inputs = {x = "one.y"}\nwhen = "one.y == \'cat\'"'),
            "step 'two': when: one.y is FP32, and cannot be 'cat'",
        ),
        (
            CROP.replace("crop = {", 'when = "detect.boxes > 3"\ncrop = {').replace('"detect.boxes > 3"', '"input.big"')
            + '[input.big]\ndatatype = "FP32"\nshape = [-1, 100, 100]\n',
            "step 'classify': when: input.big is FP32 [-1,100,100]; wanted 4096 numbers a row at most",
        ),
    ],
)  # fmt: skip
def test_a_step_that_does_not_fit_is_reported(runtime: Runtime, text: str, fault: str) -> None:
    assert fault in "; ".join(fit(runtime, text).faults)
