"""Pictures in place of tensors through every client: the same answer, whoever asks and however the picture is given."""

from __future__ import annotations

import io

import msgpack
import pytest
from PIL import Image

from edge_runtime.steps import InputSteps, ModelSteps, OutputSteps, steps_from_fields
from tests.contract.running_daemon import RawClient, put_model, running_daemon
from tests.models import onnx_models

COLOURS = """
[input.image]
range = "0..1"
[output.scores]
labels = "labels.txt"
top_k = 2
"""


def encoded(colour, size=(64, 48), kind="PNG"):
    """The bytes of a picture of one colour."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind)
    return file.getvalue()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    put_model(models, "colours", onnx_models.colours, toml=COLOURS)
    (models / "colours" / "labels.txt").write_text("red\ngreen\nblue\n")
    put_model(models, "silent", onnx_models.colours)
    put_model(models, "numbers", onnx_models.mlp)
    with running_daemon(models, tmp_path_factory.mktemp("run")) as daemon:
        yield daemon


# ---- the wire -------------------------------------------------------------------------------------------------------


def ask_without_a_name(daemon, model):
    """Send a red picture as the input that has no name; the reply's header."""
    inputs = [{"name": "", "datatype": "BYTES", "shape": [1]}]
    data = encoded("red")
    with RawClient(daemon.endpoints[1]) as client:
        header = msgpack.packb({"v": 1, "op": "infer", "model": model, "inputs": inputs})
        return msgpack.unpackb(client.ask(header, b"1", len(data).to_bytes(4, "little") + data)[0])


def test_an_input_without_a_name_is_the_one_that_takes_pictures(daemon):
    assert [each["name"] for each in ask_without_a_name(daemon, "colours")["outputs"]] == ["scores", "picture_size"]


def test_a_picture_for_a_model_without_steps_is_refused_with_the_lines_to_write(daemon):
    error = ask_without_a_name(daemon, "silent")["error"]
    assert error["code"] == "tensor_mismatch"
    assert '[input.image]\nrange = "0..1"' in error["message"]
    assert '[output.scores]\nanswer = "classes"' in error["message"]


def test_a_picture_for_a_model_that_can_take_none_says_what_it_takes(daemon):
    error = ask_without_a_name(daemon, "numbers")["error"]
    assert error["code"] == "tensor_mismatch"
    assert "x FP32 [-1, 16]" in error["message"]


def test_metadata_has_the_steps_as_model_toml_declares_them(daemon):
    with RawClient(daemon.endpoints[1]) as client:
        found = client.result("metadata", model="colours")["steps"]
        assert "steps" not in client.result("metadata", model="silent")
    assert found["inputs"]["image"]["from"] == "picture"
    assert steps_from_fields(found) == ModelSteps(
        {"image": InputSteps(range="0..1")},
        {"scores": OutputSteps(labels="labels.txt", top_k=2)},
        {"scores": ("red", "green", "blue")},
    )


def test_steps_of_a_newer_daemon_are_read_without_what_is_new(daemon):
    fields = {"inputs": {"image": {"from": "frames", "sharpen": 3}}, "outputs": {}, "labels": {}, "sounds": {}}
    assert steps_from_fields(fields) == ModelSteps({"image": InputSteps(source="frames")})
