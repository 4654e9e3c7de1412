"""Steps that a preset fills, named in `model.toml` or told by the model's own file, asked through a daemon."""

from __future__ import annotations

import base64
import io

import numpy as np
import onnx
import pytest
from PIL import Image

from tests.contract.running_daemon import RawClient, put_model, running_daemon
from tests.models import onnx_models

TABLES = """
[input.image]
[output.boxes]
"""
MANY = 60_000
LABELLED = f"""
[input.image]
range = "0..1"
[output.scores]
labels = "labels.txt"
wanted = ["the class of number {MANY - 1}", "the class of number 7"]
"""
CAT, DOG = (4.0, 0.0, 12.0, 8.0), (2.0, 0.0, 6.0, 2.0)
"""Where the model finds them in a picture of 16 x 8, letterboxed into its 8 x 8: a cat in the middle."""


def ultralytics(folder):
    """`detector`, with what Ultralytics writes into its exports."""
    path = onnx_models.detector(folder)
    model = onnx.load(path)
    told = {"stride": "32", "task": "detect", "imgsz": "[8, 8]", "names": "{0: 'cat', 1: 'dog'}"}
    onnx.helper.set_model_props(model, told)
    onnx.save(model, path)
    return path


def one_number(folder):
    """x [rows, 3, 8, 8] -> y, one number without axes."""
    node = onnx.helper.make_node("ReduceMean", ["x"], ["y"], keepdims=0)
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["rows", 3, 8, 8])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [])
    return onnx_models.save(folder, onnx.helper.make_graph([node], "one", [x], [y]))


def many_classes(folder):
    """image [rows, 3, 8, 8] -> scores [rows, 60000]: all pixels' mean, but for the last, which is 1."""
    nodes = [
        onnx.helper.make_node("ReduceMean", ["image"], ["mean"], axes=[1, 2, 3], keepdims=1),
        onnx.helper.make_node("Reshape", ["mean", "column"], ["one"]),
        onnx.helper.make_node("Expand", ["one", "shape"], ["wide"]),
        onnx.helper.make_node("Pad", ["wide", "pads", "sure"], ["scores"]),
    ]
    weights = [
        onnx.numpy_helper.from_array(np.array(value, dtype), name)
        for name, value, dtype in (
            ("column", [-1, 1], np.int64), ("shape", [1, MANY - 1], np.int64), ("pads", [0, 0, 0, 1], np.int64),
            ("sure", 1, np.float32),
        )
    ]  # fmt: skip
    inputs = [onnx.helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, ["rows", 3, 8, 8])]
    outputs = [onnx.helper.make_tensor_value_info("scores", onnx.TensorProto.FLOAT, ["rows", MANY])]
    return onnx_models.save(folder, onnx.helper.make_graph(nodes, "many", inputs, outputs, weights))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "named", ultralytics, toml='preset = "ultralytics"')
    put_model(models, "told", ultralytics, toml=TABLES)
    put_model(models, "silent", ultralytics)
    put_model(models, "tensors", ultralytics, toml="[output.boxes]")
    put_model(models, "odd", one_number, toml="[output.y]")
    put_model(models, "misnamed", onnx_models.detector, toml="[output.scores]")
    put_model(models, "many", many_classes, toml=LABELLED)
    put_model(models, "letters", onnx_models.colours, toml='[output.scores]\nanswer = "text"\nlabels = "labels.txt"')
    for name in ("many", "letters"):
        (models / name / "labels.txt").write_text("".join(f"the class of number {index}\n" for index in range(MANY)))
    with running_daemon(models, tmp_path_factory.mktemp("run")) as daemon:
        yield daemon


@pytest.fixture
def client(daemon):
    with RawClient(daemon.endpoints[1]) as client:
        yield client


def picture():
    file = io.BytesIO()
    Image.new("RGB", (16, 8), "red").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def reason(client, model):
    """What is said of a model in the list of all."""
    (found,) = (each for each in client.result("models") if each["name"] == model)
    return found["reason"]


@pytest.mark.parametrize("model", ["named", "told"])
def test_a_picture_is_answered_with_boxes_and_the_files_own_labels(client, model):
    reply = client.ask_json(op="infer", model=model, picture=picture())
    assert reply["picture"] == {"width": 16, "height": 8, "fit": "letterbox", "color": "rgb"}
    assert [(each["label"], each["score"], tuple(each["box"])) for each in reply["boxes"]] == [
        ("cat", 0.9, CAT),
        ("dog", 0.5, DOG),
    ]


def test_a_model_may_have_very_many_labels(client):
    reply = client.ask_json(op="infer", model="many", picture=picture())
    assert [(each["label"], each["index"]) for each in reply["classes"]] == [
        (f"the class of number {MANY - 1}", MANY - 1),
        ("the class of number 7", 7),
    ]


def test_a_preset_in_the_file_is_reported(client):
    assert reason(client, "told").startswith('its metadata says preset = "ultralytics"')
    assert reason(client, "named") == ""


def test_a_model_without_steps_is_offered_its_preset_and_stays_as_it_is(client):
    refused = client.ask_json(op="infer", model="silent", picture=picture())
    assert refused["error"]["code"] == "tensor_mismatch"
    assert refused["error"]["message"].endswith('model.toml:\npreset = "ultralytics"')
    metadata = client.result("metadata", model="silent")
    assert (metadata["preset"], "steps" in metadata) == ("ultralytics", False)
    assert "preset" not in client.result("metadata", model="named")
    assert reason(client, "silent") == ""


def test_a_tensor_is_answered_with_boxes_in_the_models_pixels_where_raw_is_false(client):
    tensor = {"name": "image", "datatype": "FP32", "shape": [1, 3, 8, 8], "data": np.zeros(192).tolist()}
    reply = client.ask_json(op="infer", model="tensors", inputs=[tensor], parameters={"raw": False})
    boxes = reply["answer"]["boxes"]
    assert [(each["label"], each["box"]) for each in boxes] == [("cat", [2, 2, 6, 6]), ("dog", [1, 1, 3, 3])]
    bare = client.ask_json(op="infer", model="tensors", inputs=[tensor])
    assert bare["outputs"][0]["shape"] == [1, 6, 2]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("letters", "can be told; declare fewer labels"),
        ("odd", "[output.y]: it has no axes"),
        ("misnamed", "[output.scores]: the model has no such output; it has boxes"),
    ],
)
def test_tables_that_do_not_fit_fail_the_load(client, model, message):
    assert message in reason(client, model)
