"""Made-up inputs."""

from __future__ import annotations

import numpy as np
import pytest

from edge_runtime.model_spec import DYNAMIC, ModelSpec, TensorSpec
from edge_runtime.serving.warmup import make_inputs
from edge_runtime.tensors import DATATYPES


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("shape", [(), (DYNAMIC,), (DYNAMIC, 3)])
def test_every_made_up_input_is_an_array_of_the_right_type_and_shape(datatype: str, shape: tuple[int, ...]) -> None:
    spec = ModelSpec((TensorSpec("x", datatype, shape),), ())
    made = make_inputs(spec, 2, 1, {})["x"]
    assert isinstance(made, np.ndarray)
    assert made.dtype == DATATYPES[datatype].dtype
    assert made.shape == tuple(2 if size == DYNAMIC else size for size in shape)
