"""What a model's own file says of it: names of classes and its family, whoever wrote the file."""

from __future__ import annotations

import onnx
import pytest

from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.pictures.model_metadata import ModelMetadata, parse_names, read_interface, read_metadata
from tests.models import ir_models, onnx_models

MODEL_INFO = """<rt_info><model_info><labels value="cat traffic_light &amp;c" /><model_type value="YOLO" />
<resize_type value="fit_to_window_letterbox" /></model_info></rt_info></net>"""


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{0: 'person', 1: 'bicycle'}", ("person", "bicycle")),
        ("['cat', 'dog']", ("cat", "dog")),
        ("{0: \"rock'n'roll\", 1: 'say \"a\"', 2: 'a, b: {c}',}", ("rock'n'roll", 'say "a"', "a, b: {c}")),
        (r"{0: 'a\'b', 1: 'stra\xdfe', 2: '鳥'}", ("a'b", "straße", "鳥")),
        ('{"0": "cat", "1": "dog"}', ("cat", "dog")),
        ("{}", ()),
        ("{1: 'cat'}", ()),
        ("{0: 'cat', 2: 'dog'}", ()),
        ("{0: cat}", ()),
        ("{0: 'cat' + 'dog'}", ()),
        ("__import__('os').system('true')", ()),
        ("{0: __import__('os')}", ()),
        (r"{0: '\ud800'}", ()),
        ("{0: 'cat'", ()),
        ("", ()),
        ("{" * 100_000 + "}", ()),
        ("[" + "-" * 100_000 + "1]", ()),
    ],
)
def test_names_are_read_and_nothing_is_computed(text, names):
    assert parse_names(text) == names


def described(folder, **entries):
    """`colours` with metadata."""
    path = onnx_models.colours(folder)
    model = onnx.load(path)
    onnx.helper.set_model_props(model, entries)
    onnx.save(model, path)
    return path


def test_an_ultralytics_export_is_known_by_what_it_writes(tmp_path):
    path = described(
        tmp_path, description="Ultralytics YOLOv8n model", stride="32", task="detect", batch="1", imgsz="[640, 480]",
        names="{0: 'red', 1: 'green', 2: 'blue'}",
    )  # fmt: skip
    assert read_metadata(path) == ModelMetadata(("red", "green", "blue"), "ultralytics", "detect", (640, 480))


def test_names_alone_are_not_a_family(tmp_path):
    assert read_metadata(described(tmp_path, names="['red', 'green', 'blue']")) == ModelMetadata(
        ("red", "green", "blue")
    )


def test_a_plain_model_says_nothing(tmp_path):
    assert read_metadata(onnx_models.colours(tmp_path)) == ModelMetadata()


@pytest.mark.parametrize("content", [b"", b"\x72\xff", b"no model", b"\x00" * 100])
@pytest.mark.parametrize("name", ["model.onnx", "model.xml", "model.py"])
def test_a_broken_file_says_nothing(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert read_metadata(tmp_path / name) == ModelMetadata()
    assert read_interface(tmp_path / name) is None
    assert read_metadata(tmp_path / f"absent_{name}") == ModelMetadata()


@pytest.fixture(scope="module")
def ir(tmp_path_factory):
    """`colours` as OpenVINO writes it; of the module, since its converter keeps a thread for a while."""
    pytest.importorskip("openvino")
    folder = tmp_path_factory.mktemp("ir")
    return ir_models.from_onnx(onnx_models.colours(folder), folder).read_text()


def test_an_ir_reports_its_labels_and_tensors(tmp_path, ir):
    path, text = tmp_path / "model.xml", ir
    path.write_text(text.partition("<rt_info>\n\t\t<info")[0].removesuffix("</net>") + MODEL_INFO)
    assert read_metadata(path) == ModelMetadata(("cat", "traffic light", "&c"), "ultralytics", "detect")
    image, scores = TensorSpec("image", "FP32", (DYNAMIC, 3, 8, 8)), TensorSpec("scores", "FP32", (DYNAMIC, 3))
    assert read_interface(path) == ModelSpec((image,), (scores,))


@pytest.mark.parametrize(
    "piece", ["<layer ", '<layer type="Parameter">', '<layer type="Parameter"></layer>', "<model_info>", '<a value="']
)
def test_an_ir_made_to_keep_the_daemon_busy_is_read_in_one_pass(tmp_path, piece):
    path = tmp_path / "model.xml"
    path.write_text("<model_info>" + piece * 100_000)
    assert read_metadata(path).names == ()
    assert read_interface(path) is None
