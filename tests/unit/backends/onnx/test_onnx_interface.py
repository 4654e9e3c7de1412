"""What a model declares, read without a library, is what ONNX's own library reads."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.onnx.interface import declared_interface
from edge_runtime.backends.registry import backend
from edge_runtime.errors import LoadFailed
from edge_runtime.model_spec import ModelSpec, TensorSpec
from tests.models import onnx_models


def save(folder: Path, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]) -> Path:
    graph = helper.make_graph([], "g", inputs, outputs)
    onnx.save(helper.make_model(graph, ir_version=8), folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize("maker", ["mlp", "two_in_two_out", "running_sum", "product", "where_nonzero", "wide"])
def test_it_is_what_onnx_runtime_reads(tmp_path: Path, maker: str) -> None:
    artifact = getattr(onnx_models, maker)(tmp_path)
    instance = backend("onnxruntime").load(artifact, LoadOptions())
    try:
        assert declared_interface(artifact) == instance.spec
    finally:
        instance.close()


@pytest.mark.parametrize("datatype", list(onnx_models.ELEMENT_TYPES))
def test_every_datatype_is_known(tmp_path: Path, datatype: str) -> None:
    spec = declared_interface(onnx_models.identity(tmp_path, datatype))
    assert spec == ModelSpec((TensorSpec("x", datatype, (-1, 2)),), (TensorSpec("y", datatype, (-1, 2)),))


def test_weights_listed_as_inputs_are_not_inputs(tmp_path: Path) -> None:
    artifact = onnx_models.mlp(tmp_path)
    model = onnx.load(artifact)
    model.graph.input.append(helper.make_tensor_value_info("first", TensorProto.FLOAT, [16, 32]))
    onnx.save(model, artifact)
    assert [tensor.name for tensor in declared_interface(artifact).inputs] == ["x"]


def test_an_output_without_a_rank_is_refused(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    with pytest.raises(LoadFailed, match="output 'y' has no known rank"):
        declared_interface(save(tmp_path, [x], [y]))


def test_a_sequence_is_refused(tmp_path: Path) -> None:
    x = helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, [1])
    with pytest.raises(LoadFailed, match="input 'x' of the ONNX model is not a tensor"):
        declared_interface(save(tmp_path, [x], []))


def test_an_element_type_that_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.COMPLEX64, [1])
    with pytest.raises(LoadFailed, match="element type 14, which cannot be sent"):
        declared_interface(save(tmp_path, [x], []))


@given(data=st.binary(max_size=200))
def test_rubbish_is_refused_and_never_crashes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    artifact = tmp_path_factory.mktemp("rubbish") / "model.onnx"
    artifact.write_bytes(data)
    with pytest.raises(LoadFailed):
        declared_interface(artifact)
