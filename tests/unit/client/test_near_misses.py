"""A caller whose array nearly fits is told how to change it, and the changed array does fit."""

from __future__ import annotations

import numpy as np
import pytest

from edge_runtime.client.frames import arrays, checked_options, fit_datatypes
from edge_runtime.client.near_misses import advised
from edge_runtime.errors import TensorMismatch
from edge_runtime.model_spec import TensorSpec
from edge_runtime.tensors import Array

SPECS = {
    "x": TensorSpec("x", "FP32", (-1, 16)),
    "picture": TensorSpec("picture", "FP32", (-1, 3, 32, 32)),
    "frame": TensorSpec("frame", "UINT8", (1, 32, 32, 3)),
    "ids": TensorSpec("ids", "INT32", (-1, 8)),
}
METADATA = {
    "inputs": [{"name": each.name, "datatype": each.datatype, "shape": list(each.shape)} for each in SPECS.values()]
}


def told(name: str, array: Array) -> str:
    return advised(TensorMismatch("it does not fit"), {name: array}, METADATA).message


@pytest.mark.parametrize(
    ("name", "given", "code"),
    [
        ("x", np.zeros((2, 16)), "x.astype(np.float32), or cast=True"),
        ("x", np.zeros(16, np.float32), "x[None]"),
        ("x", np.zeros(16), "x[None].astype(np.float32)"),
        ("picture", np.zeros((1, 32, 32, 3), np.float32), "picture.transpose(0, 3, 1, 2)"),
        ("picture", np.zeros((32, 32, 3), np.uint8), "picture[None].transpose(0, 3, 1, 2).astype(np.float32)"),
        ("frame", np.zeros((1, 3, 32, 32), np.uint8), "frame.transpose(0, 2, 3, 1)"),
        ("ids", np.zeros((1, 8), np.int64), "ids.astype(np.int32), or cast=True"),
        ("ids", np.zeros((1, 8), np.float32), "ids.astype(np.int32)"),
    ],
)
def test_an_array_changed_as_advised_fits_the_model(name: str, given: Array, code: str) -> None:
    assert told(name, given) == f"it does not fit; send {code}"
    fitting = eval(code.partition(",  or")[0].partition(", or")[0], {"np": np, name: given})
    assert SPECS[name].fits(fitting.shape)
    assert fitting.dtype.name in (SPECS[name].datatype.lower().replace("fp", "float"), "uint8")


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("x", np.zeros((1, 17), np.float32)),
        ("x", np.array([["a"]], object)),
        ("other", np.zeros(16)),
        ("picture", np.zeros((1, 33, 32, 3), np.float32)),
    ],
)
def test_an_array_that_fits_in_no_simple_way_gets_no_advice(name: str, given: Array) -> None:
    assert told(name, given) == "it does not fit"


def test_a_cast_keeps_what_is_of_another_kind_and_refuses_integers_that_do_not_fit() -> None:
    inputs = {"x": np.ones((1, 16)), "ids": np.full((1, 8), 0.5)}
    fit_datatypes(inputs, list(inputs), METADATA)
    assert (inputs["x"].dtype, inputs["ids"].dtype) == (np.float32, np.float64)
    with pytest.raises(TensorMismatch, match="a value does not fit INT32"):
        fit_datatypes({"ids": np.full((1, 8), 1 << 40)}, ["ids"], METADATA)


def test_inputs_without_names_are_refused_with_the_form() -> None:
    with pytest.raises(TensorMismatch, match=r"inputs: got ndarray, wanted arrays by name"):
        arrays(np.zeros(3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"timeout_ms": "5"}, "timeout_ms: got '5', wanted milliseconds"),
        ({"timeout_ms": True}, "timeout_ms: got True"),
        ({"priority": "high"}, "priority: got 'high', wanted 1"),
        ({"priority": 1.5}, "priority: got 1.5"),
        ({"version": "2"}, "version: got '2', wanted a number such as 2"),
        ({"version": True}, "version: got True"),
    ],
)
def test_an_option_of_another_type_is_named(wrong: dict[str, object], text: str) -> None:
    with pytest.raises(TypeError) as raised:
        checked_options(
            **{"version": None, "outputs": None, "timeout_ms": None, "priority": 0, "timing": False} | wrong
        )  # type: ignore[arg-type]
    assert text in str(raised.value)


def test_numbers_of_numpy_and_one_name_are_taken() -> None:
    options = checked_options(np.int64(2), "scores", np.float32(2.5), np.int8(3), timing=False)
    assert options == (2, ("scores",), 2.5, 3, False, (), None, False)
    assert [type(each) for each in options[:1] + options[2:4]] == [int, float, int]
