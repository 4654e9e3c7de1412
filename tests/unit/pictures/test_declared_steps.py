"""The steps of a version, whole: tables, label files, the model's own metadata, presets."""

from __future__ import annotations

import onnx
import pytest
from onnx import helper

from edge_runtime.config.loading import lay_over, read_model_keys
from edge_runtime.errors import LoadFailed
from edge_runtime.models.folder import ModelFolder, VersionFolder
from edge_runtime.models.loading import preset_note
from edge_runtime.pictures.declared_steps import declared_steps, why_no_picture
from edge_runtime.pictures.picture_steps import PictureSteps
from edge_runtime.steps import ModelSteps
from tests.models import onnx_models

YOLO = {"stride": "32", "task": "detect", "imgsz": "[32, 64]", "names": "{0: 'cat', 1: 'dog'}"}


def write_model(folder, inputs=None, outputs=None, metadata=None, datatype="FP32"):
    """A model that is only read. inputs, outputs: shape by name."""
    inputs, outputs = inputs or {"images": ["rows", 3, 224, 224]}, outputs or {"scores": ["rows", 10]}
    described = [
        [helper.make_tensor_value_info(name, onnx_models.ELEMENT_TYPES[kind], shape) for name, shape in each.items()]
        for each, kind in ((inputs, datatype), (outputs, "FP32"))
    ]
    path = onnx_models.save(folder, helper.make_graph([], "graph", *described))
    if metadata:
        model = onnx.load(path)
        helper.set_model_props(model, metadata)
        onnx.save(model, path)
    return path


def steps_in(folder, toml="", labels=None, **model):
    """The steps of a model in a folder, and its settings."""
    folder.mkdir(exist_ok=True)
    (folder / "model.toml").write_text(toml)
    if labels is not None:
        (folder / "labels.txt").write_bytes(labels)
    artifact = write_model(folder / "1", **model)
    version = VersionFolder("m", 1, folder / "1", {"model.onnx": artifact}, ())
    settings = lay_over(read_model_keys(folder / "model.toml"), {}, "")
    whole = ModelFolder("m", folder, settings, None, {1: version}, (), ())
    return declared_steps(settings, whole, version, artifact), settings


@pytest.mark.parametrize("metadata", [None, YOLO], ids=["plain", "ultralytics"])
def test_a_model_without_steps_has_none_whatever_its_file_says(tmp_path, metadata):
    steps, settings = steps_in(tmp_path, "threads = 1", metadata=metadata)
    assert steps is None
    assert preset_note(settings, steps) == ""


def test_a_table_that_describes_its_tensor_alone_declares_no_step(tmp_path):
    described = "[input.images]\nshape = [-1, 3, 8, 8]\n[output.scores]\nshape = [-1, 10]\n"
    assert steps_in(tmp_path, described)[0] is None
    steps, _ = steps_in(tmp_path, described + "top_k = 3\n")
    assert (dict(steps.inputs), steps.outputs["scores"].top_k) == ({}, 3)
    steps, _ = steps_in(tmp_path, 'preset = "torchvision"\n' + described)
    assert steps.inputs["images"].fit == "crop"


# ---- labels ---------------------------------------------------------------------------------------------------------


def test_labels_are_one_a_line_without_empty_ones_at_the_end(tmp_path):
    toml = '[output.scores]\nlabels = "labels.txt"'
    steps, _ = steps_in(tmp_path, toml, "\ufeffcat \r\n traffic light\n\n \nstraße\n\n\n".encode())
    assert steps.labels == {"scores": ("cat", "traffic light", "", " ", "straße")}


def test_names_in_the_models_own_metadata_are_labels(tmp_path):
    steps, _ = steps_in(tmp_path, "[output.scores]\n", metadata={"names": "{0: 'cat', 1: 'dog'}"})
    assert steps.labels == {"scores": ("cat", "dog")}
    assert steps.preset is None


def test_a_file_of_labels_comes_before_the_models_own_names(tmp_path):
    steps, _ = steps_in(tmp_path, '[output.scores]\nlabels = "labels.txt"', b"katze\nhund", metadata=YOLO)
    assert steps.labels == {"scores": ("katze", "hund")}


def test_labels_may_stand_in_the_table_themselves(tmp_path):
    steps, _ = steps_in(tmp_path, '[output.scores]\nlabels = ["katze", "hund"]')
    assert steps.labels == {"scores": ("katze", "hund")}


@pytest.mark.parametrize("name", ["../labels.txt", "/etc/passwd", "a/labels.txt"])
def test_labels_come_from_the_models_folder_only(tmp_path, name):
    with pytest.raises(LoadFailed, match="wanted the name of a file beside"):
        steps_in(tmp_path, f"[output.scores]\nlabels = '{name}'")


@pytest.mark.parametrize(("content", "message"), [(None, "no such file"), (b"\xff\xfe", "labels are not UTF-8")])
def test_labels_that_cannot_be_read_fail_the_load(tmp_path, content, message):
    with pytest.raises(LoadFailed, match=message):
        steps_in(tmp_path, '[output.scores]\nlabels = "labels.txt"', content)


# ---- presets --------------------------------------------------------------------------------------------------------


def test_torchvision_crops_and_normalises_as_its_training_did(tmp_path):
    steps, settings = steps_in(tmp_path, 'preset = "torchvision"')
    read = steps.inputs["images"]
    assert (read.fit, read.shorter_side, read.filter, read.color) == ("crop", 256, "bilinear", "rgb")
    assert read.mean == pytest.approx([255 * mean for mean in (0.485, 0.456, 0.406)])
    assert read.scale == pytest.approx([1 / (255 * deviation) for deviation in (0.229, 0.224, 0.225)])
    assert list(steps.outputs) == ["scores"]
    assert preset_note(settings, steps) == ""  # model.toml says it


def test_torchvisions_resize_grows_with_the_models_picture(tmp_path):
    steps, _ = steps_in(tmp_path, 'preset = "torchvision"', inputs={"x": ["rows", 3, 299, 299]})
    assert steps.inputs["x"].shorter_side == 342  # inception_v3's own


@pytest.mark.parametrize("preset", ["keras", "mediapipe"])
def test_keras_and_mediapipe_stretch_into_minus_one_to_one(tmp_path, preset):
    steps, _ = steps_in(tmp_path, f'preset = "{preset}"', inputs={"x": ["rows", 224, 224, 3]})
    assert steps.inputs == {"x": PictureSteps(fit="stretch", filter="bilinear", range="-1..1")}
    assert list(steps.outputs) == ["scores"]


def test_a_model_of_whole_pixels_gets_them_whole(tmp_path):
    steps, _ = steps_in(tmp_path, 'preset = "mediapipe"', inputs={"x": ["rows", 224, 224, 3]}, datatype="UINT8")
    assert steps.inputs == {"x": PictureSteps(fit="stretch", filter="bilinear")}


def test_a_key_that_a_table_sets_is_never_filled(tmp_path):
    tables = '[input.images]\nfit = "stretch"\nmean = [1.0]\n[output.scores]\noverlap = 0.0\nlayout = "yolov5"'
    toml = f'preset = "ultralytics"\n{tables}'
    steps, _ = steps_in(tmp_path, toml, outputs={"scores": ["rows", 6, 100]}, metadata=YOLO)
    assert steps.inputs == {"images": PictureSteps(fit="stretch", filter="linear", mean=(1.0,))}
    assert (steps.outputs["scores"].overlap, steps.outputs["scores"].layout) == (0.0, "yolov5")


@pytest.mark.parametrize(
    ("shape", "layout"), [(["rows", 6, 8400], "yolov8"), (["rows", 25200, 7], "yolov5"), (["rows", 300, 6], "yolov8")]
)
@pytest.mark.parametrize("metadata", [None, YOLO], ids=["plain", "own names"])
def test_ultralytics_letterboxes_and_its_layout_is_recognised_by_the_shape(tmp_path, shape, layout, metadata):
    image = {"images": ["rows", 3, "height", "width"]}
    steps, _ = steps_in(tmp_path, 'preset = "ultralytics"', inputs=image, outputs={"output0": shape}, metadata=metadata)
    read, boxes = steps.inputs["images"], steps.outputs["output0"]
    assert (read.fit, read.fill, read.filter, read.range) == ("letterbox", (114,), "linear", "0..1")
    assert read.size == ((32, 64) if metadata else None)
    assert (boxes.layout, boxes.overlap, boxes.threshold) == (layout, 0.7, 0.25)
    assert steps.labels == ({"output0": ("cat", "dog")} if metadata else {})


@pytest.mark.parametrize(("count", "layout"), [(25200, "yolov5"), ("n", "yolov5"), (300, "yolov8")])
def test_six_numbers_a_box_of_one_class_are_a_head_or_finished_boxes_by_their_count(tmp_path, count, layout):
    told = {**YOLO, "names": "{0: 'cat'}"}
    steps, _ = steps_in(tmp_path, 'preset = "ultralytics"', outputs={"o": ["rows", count, 6]}, metadata=told)
    assert steps.outputs["o"].layout == layout


def test_three_hundred_queries_with_a_score_a_class_are_rtdetrs(tmp_path):
    told = {**YOLO, "names": "{0: 'cat', 1: 'dog', 2: 'bird'}"}
    steps, _ = steps_in(tmp_path, 'preset = "ultralytics"', outputs={"o": ["rows", 300, 7]}, metadata=told)
    assert steps.outputs["o"].layout == "rtdetr"


def test_an_ultralytics_classifier_crops(tmp_path):
    steps, _ = steps_in(tmp_path, 'preset = "ultralytics"', metadata={**YOLO, "task": "classify"})
    assert (steps.inputs["images"].fit, steps.outputs["scores"].layout) == ("crop", None)


def test_an_ultralytics_task_that_is_not_known_keeps_its_own_outputs(tmp_path):
    steps, _ = steps_in(
        tmp_path, 'preset = "ultralytics"', outputs={"o": ["rows", 38, 8400]}, metadata={**YOLO, "task": "segment"}
    )
    assert list(steps.inputs) == ["images"]
    assert steps.outputs == {}


TASKS = {
    "segment": ({"o": ["rows", 38, 8400], "p": ["rows", 32, 160, 160]}, {"answer": "masks", "layout": None}),
    "pose": ({"o": ["rows", 57, 8400]}, {"answer": "keypoints", "keypoints": (17, 3)}),
    "obb": ({"o": ["rows", 7, 8400]}, {"answer": None, "layout": "yolov8-obb"}),
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("toml", ['preset = "ultralytics"', "[input.images]\n[output.o]\n"], ids=["preset", "tables"])
def test_each_task_of_ultralytics_is_told_by_its_file(tmp_path, task, toml):
    outputs, wanted = TASKS[task]
    told = {**YOLO, "task": task, **({"kpt_shape": "[17, 3]"} if task == "pose" else {})}
    steps, _ = steps_in(tmp_path, toml, outputs=outputs, metadata=told)
    assert list(steps.outputs) == ["o"]
    assert {key: getattr(steps.outputs["o"], key) for key in wanted} == wanted
    assert steps.outputs["o"].overlap == 0.7
    assert (steps.inputs["images"].fit, steps.labels["o"]) == ("letterbox", ("cat", "dog"))


@pytest.mark.parametrize("task", TASKS)
def test_a_task_that_the_file_does_not_say_is_told_by_its_outputs(tmp_path, task):
    outputs, wanted = TASKS[task]
    told = {key: value for key, value in YOLO.items() if key != "task"}
    steps, _ = steps_in(tmp_path, 'preset = "ultralytics"', outputs=outputs, metadata=told)
    assert {key: getattr(steps.outputs["o"], key) for key in wanted} == wanted


def test_a_family_that_the_file_names_fills_tables_and_adds_none(tmp_path):
    steps, settings = steps_in(tmp_path, "[input.images]", metadata=YOLO)
    assert steps.preset == "ultralytics"
    assert (steps.inputs["images"].fit, steps.inputs["images"].range) == ("letterbox", "0..1")
    assert steps.outputs == {}
    assert preset_note(settings, steps).startswith('its metadata says preset = "ultralytics"')


def test_tables_without_a_preset_stay_as_they_are(tmp_path):
    steps, _ = steps_in(tmp_path, '[input.images]\nrange = "0..1"\n[output.scores]')
    assert steps.inputs == {"images": PictureSteps(fit="stretch", filter="bilinear", range="0..1")}
    assert steps.outputs["scores"].overlap == 0.45
    assert isinstance(steps, ModelSteps)
    assert steps.preset is None


@pytest.mark.parametrize(
    ("toml", "inputs", "message"),
    [
        (
            'preset = "keras"',
            {"x": ["rows", 10]},
            r"which input takes pictures by a table \[input.NAME\]; it has x",
        ),
        ('preset = "keras"', {"a": ["n", 3, 8, 8], "b": ["n", 3, 8, 8]}, "it has a, b"),
        ('preset = "torchvision"\n[input.x]\ncolor = "gray"', {"x": ["rows", 1, 8, 8]}, "say mean and scale"),
        (
            'preset = "keras"\n[input.x]\nshorter_side = 9',
            {"x": ["rows", 3, 8, 8]},
            r"\[input.x\]: shorter_side is for",
        ),
        ("[input.x]\nshorter_side = 9", {"x": ["rows", 3, 8, 8]}, r"\[input.x\]: shorter_side is for"),
    ],
)
def test_a_preset_that_does_not_declare_enough_fails_the_load(tmp_path, toml, inputs, message):
    with pytest.raises(LoadFailed, match=message):
        steps_in(tmp_path, toml, inputs=inputs)


def test_a_refused_picture_names_the_preset_in_the_file():
    assert why_no_picture("m", None, "ultralytics").endswith('model.toml:\npreset = "ultralytics"')
