"""A loaded model under the names and shapes of its config, on its own and with fixed buffers."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edge_runtime.backends.base import Instance, LoadOptions
from edge_runtime.backends.declared_instance import DeclaringBackend, as_declared
from edge_runtime.backends.onnxruntime.backend import OnnxRuntimeBackend
from edge_runtime.errors import LoadFailed
from edge_runtime.model_spec import DeclaredTensor, Interface
from tests.models import onnx_models


@pytest.fixture
def instance(tmp_path) -> Instance:
    return OnnxRuntimeBackend().load(onnx_models.two_in_two_out(tmp_path), LoadOptions())


def declared(name: str, datatype: str, *shape: int, inner: tuple[int, ...] | None = None) -> DeclaredTensor:
    return DeclaredTensor(name, datatype, shape, inner or shape)


SWAPPED = Interface(
    "m",
    (declared("b", "INT64", -1, 2, 1, inner=(-1, 2)), declared("a", "FP32", -1, 3)),
    (declared("OUTPUT__1", "INT64", -1, 1, 2, inner=(-1, 2)),),
    max_batch_size=8,
)
"""Other order, other shapes, an output by its place, and one left out."""

A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.arange(4, dtype=np.int64).reshape(2, 2, 1)


def test_names_order_and_shapes_are_the_configs(instance):
    seen = as_declared(instance, SWAPPED)
    assert [(each.name, each.shape) for each in seen.spec.inputs] == [("b", (-1, 2, 1)), ("a", (-1, 3))]
    assert [(each.name, each.shape) for each in seen.spec.outputs] == [("OUTPUT__1", (-1, 1, 2))]
    (found,) = seen.run({"b": B, "a": A})
    np.testing.assert_array_equal(found, (B * 2).reshape(2, 1, 2))


def test_fixed_buffers_are_seen_in_the_configs_shapes_without_a_copy(instance):
    bound = as_declared(instance, SWAPPED).bind(4)
    assert bound is not None
    assert [each.shape for each in bound.inputs] == [(4, 2, 1), (4, 3)]
    bound.inputs[0][:2], bound.inputs[1][:2] = B, A
    bound.run(2)
    np.testing.assert_array_equal(bound.outputs[0][:2], (B * 2).reshape(2, 1, 2))


def test_a_config_as_the_model_is_leaves_it_as_it_is(instance):
    same = Interface("m", (declared("a", "FP32", -1, 3), declared("b", "INT64", -1, 2)), ())
    assert as_declared(instance, same) is instance


def test_an_open_dimension_of_the_config_is_as_the_model_has_it(instance):
    opened = Interface("m", (declared("a", "FP32", -1, -1), declared("b", "INT64", -1, 2)), ())
    assert as_declared(instance, opened).spec.inputs[0].shape == (-1, 3)


def test_an_interface_that_does_not_fit_is_refused_by_the_backend_too(tmp_path):
    backend = DeclaringBackend(OnnxRuntimeBackend())
    options = LoadOptions(interface=Interface("m", (), (declared("z", "FP32", -1, 3),)))
    with pytest.raises(LoadFailed, match="unexpected inference output 'z', allowed outputs are: sum, twice"):
        backend.load(onnx_models.two_in_two_out(tmp_path), options)


@pytest.mark.parametrize("outputs", [(), (declared("y", "FP32", -1, 3),)])
def test_a_config_of_rows_alone_is_refused_where_the_models_first_dimension_is_fixed(tmp_path, outputs):
    """As Triton: what the config leaves out is completed from the model, which cannot batch."""
    options = LoadOptions(interface=Interface("m", (), outputs, max_batch_size=4))
    with pytest.raises(LoadFailed, match=r"does not support batching while non-zero max_batch_size is specified.*x"):
        DeclaringBackend(OnnxRuntimeBackend()).load(fixed(tmp_path), options)


def fixed(folder):
    """x FP32 [2, 3] -> y FP32 [2, 3]."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "fixed", tensors[:1], tensors[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"
