"""Which models may run inside the daemon, and the reason that each other one gets."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.declaration import why_not_inside
from edge_runtime.backends.onnx.rule import OPERATORS
from edge_runtime.backends.registry import declaration_of
from tests.models import onnx_models
from tests.models.harmful_models import HARMFUL

ROOT = Path(__file__).resolve().parents[3]


def reason(path: Path, **options) -> str | None:
    return why_not_inside(declaration_of("onnxruntime"), path, LoadOptions(**options))


def one_node(
    folder: Path, operator: str, inputs=("x",), weights=None, shape=("rows", 4), out=None, **attributes
) -> Path:
    """x FP32 `shape` -> y FP32 `out`, by one node whose other inputs are constants."""
    node = helper.make_node(operator, list(inputs), ["y"], **attributes)
    constants = [numpy_helper.from_array(np.asarray(array), name) for name, array in (weights or {}).items()]
    described = helper.make_tensor_value_info("x", TensorProto.FLOAT, list(shape))
    result = onnx.ValueInfoProto(name="y")
    if out is not None:
        result = helper.make_tensor_value_info("y", TensorProto.FLOAT, list(out))
    return onnx_models.save(folder, helper.make_graph([node], "one", [described], [result], constants))


@pytest.mark.parametrize(
    "make", [onnx_models.mlp, onnx_models.mlp_int8, onnx_models.renamed, onnx_models.two_in_two_out, onnx_models.wide]
)
def test_small_ordinary_models_may_run_inside(make, tmp_path):
    assert reason(make(tmp_path)) is None


def test_the_demos_digits_may_run_inside():
    assert reason(ROOT / "demo" / "models" / "digits" / "1" / "model.onnx") is None


@pytest.mark.parametrize("name", HARMFUL)
def test_no_model_that_does_harm_may_run_inside(name, tmp_path):
    for backend in ("onnxruntime", "openvino"):
        assert why_not_inside(declaration_of(backend), HARMFUL[name].make(tmp_path), LoadOptions())


@pytest.mark.parametrize(
    ("wanted", "keywords"),
    [
        ("input 1 is not constant", {"operator": "MatMul", "inputs": ("x", "x")}),
        ("fixed lengths", {"operator": "Relu", "shape": ("rows", "length")}),
        ("fixed lengths", {"operator": "Relu", "shape": ("rows", 0)}),
        ("a row has more than", {"operator": "Relu", "shape": ("rows", 2**40)}),
        ("bytes of values for one row", {"operator": "Relu", "shape": ("rows", 100_000)}),
        ("has no axes", {"operator": "Relu", "shape": ()}),
        ("not one that may", {"operator": "NonZero"}),
        ("attribute that its row does not know", {"operator": "Relu", "surprise": 1}),
        ("input that its row does not know", {"operator": "Relu", "inputs": ("x", "x")}),
        ("along the axis of the rows", {"operator": "Softmax", "axis": 0}),
        ("fixed lengths", {"operator": "Transpose", "perm": [1, 0]}),
        ("nothing has written", {"operator": "Relu", "inputs": ("z",)}),
        ("is declared as", {"operator": "Relu", "out": ("rows", 5)}),
        ("do not fit", {"operator": "Add", "inputs": ("x", "w"), "weights": {"w": np.zeros(3, np.float32)}}),
        ("rows would be", {"operator": "Add", "inputs": ("x", "w"), "weights": {"w": np.zeros((2, 1, 4), np.float32)}}),
        ("of type 7", {"operator": "Div", "inputs": ("i", "i"), "weights": {"i": np.zeros(3, np.int64)}}),
        ("a place that is not there", {"operator": "Gather", "inputs": ("x", "i"), "weights": {"i": [4]}, "axis": 1}),
        ("how many rows", {"operator": "Reshape", "inputs": ("x", "s"), "weights": {"s": [-1, 2]}}),
        ("is empty", {"operator": "Reshape", "inputs": ("x", "s"), "weights": {"s": np.zeros(0, np.int64)}}),
        ("the rows to another axis", {"operator": "Reshape", "inputs": ("x", "s"), "weights": {"s": [2, 2]}}),
        (
            "not all positive",
            {"operator": "QuantizeLinear", "inputs": ("x", "s"), "weights": {"s": np.float32(0)}},
        ),
        (
            "a window is larger",
            {"operator": "MaxPool", "shape": ("rows", 1, 2, 2), "kernel_shape": [3, 3]},
        ),
        (
            "as large as the window",
            {"operator": "MaxPool", "shape": ("rows", 1, 2, 2), "kernel_shape": [2, 2], "pads": [2, 2, 2, 2]},
        ),
    ],
)
def test_the_reason_names_what_keeps_a_model_in_a_host(wanted, keywords, tmp_path):
    got = reason(one_node(tmp_path, **keywords))
    assert got is not None
    assert re.search(wanted, got), got


SOUND = {
    "nodes_treeids": [0, 0, 0],
    "nodes_nodeids": [0, 1, 2],
    "nodes_featureids": [1, 0, 0],
    "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
    "nodes_values": [0.5, 0.0, 0.0],
    "nodes_truenodeids": [1, 0, 0],
    "nodes_falsenodeids": [2, 0, 0],
    "class_treeids": [0, 0],
    "class_nodeids": [1, 2],
    "class_ids": [0, 1],
    "class_weights": [1.0, 1.0],
    "classlabels_int64s": [0, 1],
}


def forest(folder: Path, **changes) -> Path:
    """x FP32 [rows, 2] -> label INT64 [rows], y FP32 [rows, 2], by one tree of three nodes."""
    attributes = {**SOUND, **changes}
    node = helper.make_node("TreeEnsembleClassifier", ["x"], ["label", "y"], domain="ai.onnx.ml", **attributes)
    described = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 2])
    results = [onnx.ValueInfoProto(name=name) for name in ("label", "y")]
    return onnx_models.save(folder, helper.make_graph([node], "forest", [described], results))


def test_a_sound_forest_may_run_inside(tmp_path):
    assert reason(forest(tmp_path)) is None


@pytest.mark.parametrize(
    ("wanted", "changes"),
    [
        ("a child that is not there", {"nodes_truenodeids": [7, 0, 0]}),
        ("two parents, or is its own", {"nodes_truenodeids": [0, 0, 0]}),
        ("two parents, or is its own", {"nodes_truenodeids": [2, 0, 0]}),
        ("a column outside", {"nodes_featureids": [2, 0, 0]}),
        ("a column outside", {"nodes_featureids": [-1, 0, 0]}),
        ("a class outside", {"class_ids": [0, 2]}),
        ("weighs nothing", {"class_nodeids": [1, 0]}),
        ("weighs nothing", {"class_nodeids": [1, 1], "class_ids": [0, 1]}),
        ("one number", {"nodes_nodeids": [0, 1, 1]}),
        ("different lengths", {"nodes_values": [0.5]}),
        ("a mode that is not known", {"nodes_modes": ["BRANCH_MEMBER", "LEAF", "LEAF"]}),
        ("nothing leads to", {"nodes_modes": ["LEAF", "LEAF", "LEAF"], "class_nodeids": [0, 0]}),
        ("base_values", {"base_values": [1.0]}),
        ("2 to 1024", {"classlabels_int64s": [0]}),
    ],
)
def test_a_forest_that_a_library_could_lose_its_way_in_stays_in_a_host(wanted, changes, tmp_path):
    got = reason(forest(tmp_path, **changes))
    assert got is not None
    assert wanted in got, got


@pytest.mark.parametrize("opset", [8, 99])
def test_operators_of_another_opset_stay_in_a_host(opset, tmp_path):
    path = onnx_models.mlp(tmp_path)
    model = onnx.load(path)
    model.opset_import[0].version = opset
    onnx.save(model, path)
    assert "opset" in (reason(path) or "")


def test_external_data_functions_and_foreign_operators_stay_in_a_host(tmp_path):
    assert "another file" in (reason(onnx_models.add_weights(tmp_path, onnx_models.external_tensor("w"))) or "")
    path = onnx_models.mlp(tmp_path)
    model = onnx.load(path)
    model.functions.add(name="MatMul", domain="")
    onnx.save(model, path)
    assert "functions" in (reason(path) or "")
    del model.functions[:]
    model.graph.node[1].domain = "com.microsoft"
    onnx.save(model, path)
    assert "com.microsoft.Relu" in (reason(path) or "")


def test_the_size_that_a_constant_says_it_has_must_be_true(tmp_path):
    path = onnx_models.added(tmp_path)
    model = onnx.load(path)
    model.graph.initializer[0].dims[:] = [2**31]
    path.write_bytes(model.SerializeToString())
    assert "as much data" in (reason(path) or "")


def test_only_what_was_tried_may_run_inside(tmp_path):
    path = onnx_models.mlp(tmp_path)
    assert "always run in a host" in (why_not_inside(declaration_of("python"), path, LoadOptions()) or "")
    assert "always run in a host" in (why_not_inside(declaration_of("tensorrt"), path, LoadOptions()) or "")
    assert "CUDA:0" in (reason(path, device="CUDA:0") or "")
    assert "bf16" in (reason(path, precision="bf16") or "")
    assert "an_option" in (reason(path, extra={"an_option": "1"}) or "")
    assert reason(path, device="CPU", precision="f32", extra={"arena": "0"}) is None


def test_files_that_are_not_models_stay_in_a_host(tmp_path):
    path = tmp_path / "model.onnx"
    assert reason(path), "it is not there"
    path.write_bytes(b"\xff" * 100)
    assert reason(path)
    whole = onnx_models.mlp(tmp_path).read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        assert reason(path), length


def test_the_page_of_models_inside_the_daemon_names_every_operator_that_may():
    page = (ROOT / "docs" / "inside.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`(\w+)`", page[page.index("| operators |") : page.index("## The proof")]))
    assert {name.rpartition(".")[2] for name in OPERATORS} <= told
