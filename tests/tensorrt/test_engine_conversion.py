"""`convert --to tensorrt` by the real library: engines for a GPU that is not here, judged by what they are of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from demo.digits import load_training
from edge_runtime.errors import ConversionFailed
from edge_runtime_converters.comparison import Report
from edge_runtime_converters.conversion import convert
from edge_runtime_converters.formats import PRECISIONS, SourceFormat, why_empty
from edge_runtime_converters.options import ConversionOptions
from tests.tensorrt.real_library import needs_rtx, why_no_gpu

DIGITS = Path(__file__).parents[2] / "demo" / "models" / "digits" / "1" / "model.onnx"
MARK = b"vtrt"
"""Of an engine of RTX."""

pytestmark = needs_rtx


def converted(source: Path, folder: Path, precision: str = "fp32", gpu: str = "SM89", *shapes: str) -> Report:
    samples = folder / "samples.npz"
    np.savez(samples, image=load_training().images[:64].astype(np.float32))
    return convert(
        ConversionOptions(
            source=str(source),
            target="tensorrt",
            precision=precision,  # type: ignore[arg-type]
            output=str(folder / "made.engine"),
            calibration=str(samples) if precision == "int8" else "",
            shapes=shapes,
            gpu=gpu,
        )
    )


def open_text(path: Path) -> Path:
    """ids FP32 [rows, length] -> sums FP32 [rows, length]: more than the rows is open."""
    graph = helper.make_graph(
        [helper.make_node("Add", ["ids", "ids"], ["sums"])], "g",
        [helper.make_tensor_value_info("ids", TensorProto.FLOAT, ["rows", "length"])],
        [helper.make_tensor_value_info("sums", TensorProto.FLOAT, ["rows", "length"])],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize(
    "precision", [each for each in PRECISIONS if not why_empty(SourceFormat.ONNX, "tensorrt", each)]
)
def test_an_engine_is_built_in_each_precision_and_its_model_is_near_its_source(precision: str, tmp_path: Path) -> None:
    report = converted(DIGITS, tmp_path, precision)
    assert report.faults == ()
    assert report.files == (str(tmp_path / "made.engine"),)
    assert (tmp_path / "made.engine").read_bytes()[:4] == MARK
    assert report.rows == 64
    assert any("engine was not run" in note for note in report.notes)


def test_an_engine_holds_the_precision_that_was_asked_for(tmp_path: Path) -> None:
    """What its layers hold, as RTX writes it into an engine."""
    held = {}
    for precision in ("fp32", "fp16", "int8"):
        folder = tmp_path / precision
        folder.mkdir()
        converted(DIGITS, folder, precision)
        engine = (folder / "made.engine").read_bytes()
        held[precision] = {word for word in (b"Half", b"Int8") if word in engine}
    assert held == {"fp32": set(), "fp16": {b"Half"}, "int8": {b"Int8"}}


@pytest.mark.parametrize("is_for_tensorrt", [False, True])
def test_an_int8_model_becomes_an_engine_where_it_was_made_for_tensorrt(is_for_tensorrt: bool, tmp_path: Path) -> None:
    model = tmp_path / "model.int8.onnx"
    np.savez(tmp_path / "samples.npz", image=load_training().images[:64].astype(np.float32))
    options = ConversionOptions(
        source=str(DIGITS), target="onnx", precision="int8", output=str(model),
        calibration=str(tmp_path / "samples.npz"), is_for_tensorrt=is_for_tensorrt,
    )  # fmt: skip
    assert convert(options).files == (str(model),)
    if is_for_tensorrt:
        assert converted(model, tmp_path).files
    else:
        with pytest.raises(ConversionFailed, match="TensorRT for RTX"):
            converted(model, tmp_path)


@pytest.mark.parametrize("gpu", ["SM89", "sm_89", "8.9"])
def test_a_gpu_is_named_as_nvidia_names_it(gpu: str, tmp_path: Path) -> None:
    assert converted(DIGITS, tmp_path, gpu=gpu).files


@pytest.mark.parametrize("gpu", ["SM1", "ada", "../x", "8.9.1"])
def test_an_unknown_gpu_is_refused_with_those_that_are_known(gpu: str, tmp_path: Path) -> None:
    with pytest.raises(ConversionFailed, match=r"builds for .*SM89"):
        converted(DIGITS, tmp_path, gpu=gpu)
    assert not list(tmp_path.glob("*.engine"))


@pytest.mark.skipif(not why_no_gpu(), reason="a GPU is here")
def test_without_a_gpu_it_is_said_how_to_build_for_another(tmp_path: Path) -> None:
    with pytest.raises(ConversionFailed, match="--gpu SM89"):
        converted(DIGITS, tmp_path, gpu="")


@pytest.mark.parametrize("shapes", [(), ("ids=-1,-1",)])
def test_an_open_size_that_nobody_says_is_named(shapes: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConversionFailed, match="--shapes ids=-1,128"):
        converted(open_text(tmp_path / "text.onnx"), tmp_path, "fp32", "SM89", *shapes)


def test_open_sizes_are_said_by_shapes(tmp_path: Path) -> None:
    assert converted(open_text(tmp_path / "text.onnx"), tmp_path, "fp32", "SM89", "ids=-1,16").files


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_engine_itself_that_is_compared(tmp_path: Path) -> None:
    if why_no_gpu():
        pytest.skip(why_no_gpu())
    report = converted(DIGITS, tmp_path, gpu="")
    assert report.faults == ()
    assert not any("not run" in note for note in report.notes)
