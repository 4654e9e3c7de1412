"""ONNX files as exporters write them: old operators, weights in a file beside."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_runtime.errors import ConversionFailed
from edge_runtime_converters.conversion import convert, convert_to_serve
from edge_runtime_converters.importing.report import ImportedModel, ImportReport, sentences
from edge_runtime_converters.int8_from_onnx import quantise
from edge_runtime_converters.openvino_from_onnx import convert as to_openvino
from edge_runtime_converters.options import ConversionOptions
from edge_runtime_converters.original import serve
from tests.converters.sources import DIGITS, images, needs, present
from tests.models.onnx_models import scaled


def dense(path: Path, opset: int) -> Path:
    """A dense layer over digits in an old opset."""
    weights = numpy_helper.from_array(np.random.default_rng(1).normal(0, 0.3, (64, 10)).astype(np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["image", "w"], ["scores"])], "g",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["rows", 64])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["rows", 10])], [weights],
    )  # fmt: skip
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=6).SerializeToString()
    )
    return path


def samples(rows: int) -> list[dict[str, np.ndarray]]:
    return [{"image": images(rows)[place : place + 1]} for place in range(rows)]


@pytest.mark.parametrize("opset", [9, 11, 13])
def test_a_model_of_an_old_opset_is_raised_to_one_that_has_int8(tmp_path: Path, opset: int) -> None:
    quantise(dense(tmp_path / "model.onnx", opset), tmp_path / "model.int8.onnx", samples(32))
    served = serve(tmp_path / "model.int8.onnx")
    assert {node.op_type for node in onnx.load(tmp_path / "model.int8.onnx").graph.node} >= {"QuantizeLinear"}
    served.close()


def test_weights_in_a_file_beside_the_model_are_taken_in(tmp_path: Path) -> None:
    model = onnx.load(DIGITS)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="weights", size_threshold=1024)
    report = convert(ConversionOptions(source=str(tmp_path / "model.onnx"), target="onnx", precision="fp16"))
    assert report.is_near_enough
    (tmp_path / "weights").unlink()
    serve(Path(report.files[0])).close()


def test_a_model_that_answers_all_rows_alike_is_served_and_reports_say_what_could_not_be_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = scaled(tmp_path / "source", 0.0, size=4)
    refused = convert(ConversionOptions(source=str(source), target="ort"))
    assert (refused.faults, refused.files, refused.is_near_enough) == ((), (), False)
    (said,) = refused.unjudged
    assert "1 answer to 64 rows" in said
    # At load nobody is there to give other data.
    for name in ("TMPDIR", "TORCH_FORCE_WEIGHTS_ONLY_LOAD"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "work" / "out").mkdir(parents=True)
    served = convert_to_serve(
        str(source), "ort", shapes=(), work=str(tmp_path / "work"), memory_limit_bytes=64 << 30,
        progress=lambda _stage, _share=None: None,
    )  # fmt: skip
    assert (served.is_near_enough, served.unjudged) == (True, refused.unjudged)
    model = ImportedModel(name="zeros", was="a handler", state="taken", conversions=(served,))
    told = sentences(ImportReport(source="x", system="y", models_folder="z", models=(model,), notes=(), seconds=1.0))
    assert f"zeros: {said}" in list(told)


def test_int8_is_int8_and_smaller(tmp_path: Path) -> None:
    quantise(DIGITS, tmp_path / "model.int8.onnx", samples(64))
    weights = onnx.load(tmp_path / "model.int8.onnx").graph.initializer
    assert sum(each.data_type == TensorProto.INT8 for each in weights) >= 4
    assert (tmp_path / "model.int8.onnx").stat().st_size < 0.4 * DIGITS.stat().st_size


def test_quantising_without_samples_writes_nothing(tmp_path: Path) -> None:
    for write in (
        lambda: quantise(DIGITS, tmp_path / "model.onnx", []),
        lambda: to_openvino(DIGITS, tmp_path / "model.xml", precision="int8", calibration=[]),
    ):
        with pytest.raises(ConversionFailed, match="got none"):
            write()
    assert list(tmp_path.iterdir()) == []


def test_samples_of_another_name_or_shape_are_an_error_that_writes_nothing(tmp_path: Path) -> None:
    for bad in ({"picture": images(1)}, {"image": images(1)[:, :5]}):
        with pytest.raises(ConversionFailed, match="cannot be quantised"):
            quantise(DIGITS, tmp_path / "model.onnx", [bad])
    assert list(tmp_path.iterdir()) == []


def test_an_artifact_that_was_there_is_as_it_was_after_a_failure(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("mine")
    with pytest.raises(ConversionFailed):
        quantise(DIGITS, tmp_path / "model.onnx", [])
    assert (tmp_path / "model.onnx").read_text() == "mine"


def grouped(path: Path) -> Path:
    """A depthwise convolution over digits of 8 x 8, between two plain ones, as mobile networks have."""
    random = np.random.default_rng(2)
    weights = [
        numpy_helper.from_array(random.normal(0, 0.3, shape).astype(np.float32), name)
        for name, shape in (("w1", (8, 1, 3, 3)), ("w2", (8, 1, 3, 3)), ("w3", (2, 8, 1, 1)))
    ]
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["image", "w1"], ["a"], pads=[1, 1, 1, 1]),
            helper.make_node("Conv", ["a", "w2"], ["b"], pads=[1, 1, 1, 1], group=8),
            helper.make_node("Conv", ["b", "w3"], ["scores"]),
        ],
        "g",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["rows", 1, 8, 8])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["rows", 2, 8, 8])], weights,
    )  # fmt: skip
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    )
    return path


def test_a_grouped_convolution_runs_in_int8_as_the_others_do(tmp_path: Path) -> None:
    present("nncf")
    calibration = [{"image": each["image"].reshape(1, 1, 8, 8)} for each in samples(16)]
    to_openvino(grouped(tmp_path / "m.onnx"), tmp_path / "m.xml", precision="int8", calibration=calibration)
    [openvino] = needs("openvino")
    operators = openvino.Core().read_model(str(tmp_path / "m.xml")).get_ops()
    inner = [each for each in operators if each.get_type_name() == "GroupConvolution"]
    assert len(inner) == 1
    assert inner[0].input_value(0).get_node().get_type_name() == "FakeQuantize"
    weights = inner[0].input_value(1).get_node()
    while weights.get_type_name() in ("Multiply", "Subtract", "Convert"):
        weights = weights.input_value(0).get_node()
    assert weights.get_element_type() == openvino.Type.i8
