"""Engines built by the real library, without a GPU: parsing, profiles, precisions, progress, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from bench import gpu_models, makers
from bench.makers import BenchModel
from edge_runtime.backends.onnx.interface import declared_interface
from edge_runtime.backends.tensorrt.build import BuiltEngine, build_engine
from edge_runtime.backends.tensorrt.library import import_tensorrt
from edge_runtime.backends.tensorrt.plan import EnginePlan, plan_engine, plan_shapes
from edge_runtime.errors import BackendUnavailable, LoadFailed
from tests.models import onnx_models
from tests.tensorrt.real_library import TARGET, needs_rtx

pytestmark = needs_rtx


def plan(
    artifact: Path, precision: str = "", options: dict[str, str] | None = None, max_rows: int | None = None
) -> EnginePlan:
    library = import_tensorrt()
    ranges = plan_shapes(declared_interface(artifact).inputs, max_rows, options or {})
    return plan_engine(
        str(artifact), (library.name, library.version), precision, ranges, options or {}, gpu=TARGET
    )  # fmt: skip


def quantised(folder: Path) -> Path:
    """x FP32 [rows, 16] -> y FP32 [rows, 4], both the input and the weights quantised to int8."""
    weights = onnx_models.mlp_weights()[0]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["x8"]),
        helper.make_node("DequantizeLinear", ["x8", "scale", "zero"], ["x32"]),
        helper.make_node("DequantizeLinear", ["w8", "scale", "zero"], ["w32"]),
        helper.make_node("MatMul", ["x32", "w32"], ["y"]),
    ]
    constants = [
        numpy_helper.from_array(np.array(0.05, np.float32), "scale"),
        numpy_helper.from_array(np.array(0, np.int8), "zero"),
        numpy_helper.from_array(np.clip(weights / 0.05, -127, 127).astype(np.int8), "w8"),
    ]
    graph = helper.make_graph(
        nodes,
        "quantised",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 32])],
        constants,
    )
    folder.mkdir(parents=True, exist_ok=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def build(wanted: EnginePlan) -> BuiltEngine:
    built = build_engine(wanted)
    assert bytes(built.engine[:4]) == b"vtrt"  # RTX's own mark: a real engine
    return built


def test_an_engine_is_built_of_an_onnx_model_with_progress_that_never_falls(tmp_path: Path) -> None:
    told: list[float] = []
    built = build_engine(plan(onnx_models.mlp(tmp_path)), lambda share, _: told.append(share))
    assert len(built.engine) > 1000
    assert told == sorted(told)
    assert 0 < told[0] < told[-1] <= 1
    assert len(told) > 10


def test_a_model_of_fixed_shape_needs_no_profile(tmp_path: Path) -> None:
    build(plan(onnx_models.mlp(tmp_path, rows=3)))


def test_a_quantised_model_is_built_as_int8_where_that_is_asked_for(tmp_path: Path) -> None:
    build(plan(quantised(tmp_path), "int8"))


def test_int8_of_a_model_that_holds_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="precision int8 was asked for, and the model holds f32"):
        build_engine(plan(onnx_models.mlp(tmp_path), "int8"))


def test_a_precision_that_the_version_cannot_lower_to_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"this one holds f32, and f16 was asked for.*--precision fp16"):
        build_engine(plan(onnx_models.mlp(tmp_path), "f16"))


def test_external_data_inside_the_folder_is_built_in(tmp_path: Path) -> None:
    artifact = onnx_models.wide(tmp_path / "one")
    model = onnx.load(artifact)
    outside = tmp_path / "two"
    outside.mkdir()
    onnx.save_model(model, outside / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    built = build(plan(outside / "model.onnx"))
    assert len(built.engine) > 4 * 1024 * 1024  # the weights


def test_external_data_outside_the_folder_is_refused_before_the_library_sees_it(tmp_path: Path) -> None:
    artifact = onnx_models.wide(tmp_path / "one")
    model = onnx.load(artifact)
    inside = tmp_path / "two"
    inside.mkdir()
    onnx.save_model(model, inside / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    content = (inside / "model.onnx").read_bytes()
    (inside / "model.onnx").write_bytes(content.replace(b"weights.bin", b"/etc/passwd"))
    with pytest.raises(LoadFailed, match="'/etc/passwd' is refused"):
        build_engine(plan(inside / "model.onnx"))


def test_an_operator_that_nobody_knows_is_named(tmp_path: Path) -> None:
    node = helper.make_node("Abracadabra", ["x"], ["y"], domain="magic")
    graph = helper.make_graph(
        [node],
        "unknown",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("magic", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "model.onnx")
    with pytest.raises(LoadFailed, match=r"cannot read model\.onnx: .*Abracadabra"):
        build_engine(plan(tmp_path / "model.onnx"))


def test_bytes_that_are_not_a_model_are_refused(tmp_path: Path) -> None:
    good = plan(onnx_models.mlp(tmp_path))
    (tmp_path / "model.onnx").write_bytes(b"vtrt" + b"\0" * 60)
    with pytest.raises(LoadFailed):
        build_engine(good)


def test_a_second_dynamic_axis_is_built_for_the_shapes_in_the_options(tmp_path: Path) -> None:
    shapes = {
        "min_shapes": "a:1x1,b:1x1", "opt_shapes": "a:8x16,b:16x8", "max_shapes": "a:64x64,b:64x64",
    }  # fmt: skip
    build(plan(onnx_models.product(tmp_path), options=shapes))


def test_another_version_than_the_planned_one_does_not_build(tmp_path: Path) -> None:
    import msgspec

    wanted = msgspec.structs.replace(plan(onnx_models.mlp(tmp_path)), version="0.0.1")
    with pytest.raises(BackendUnavailable, match=r"0\.0\.1 is planned"):
        build_engine(wanted)


@pytest.mark.long
@pytest.mark.parametrize("model", [gpu_models.resnet50, makers.mobilenetv2, gpu_models.transformer])
def test_networks_of_real_shapes_are_built(model: Callable[[], BenchModel]) -> None:
    made = model()
    built = build(plan(made.path, max_rows=8))
    assert len(built.engine) > made.path.stat().st_size / 2
