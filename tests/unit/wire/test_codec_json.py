"""The one-frame JSON form: flat and nested data, non-finite floats by name, and nothing hostile gets through."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge_runtime.errors import DecodeFailed, EdgeRuntimeError, QueueFull, TensorMismatch, Unsupported
from edge_runtime.messages import TensorHeader
from edge_runtime.tensors import DATATYPES, bf16_from_fp32, bf16_to_fp32
from edge_runtime.wire.json_codec import (
    MAX_JSON_BYTES,
    JsonAnswers,
    JsonRequest,
    array_from_json,
    cut_known,
    dumps,
    json_id,
    loads,
    pack_data,
    pack_json_answer,
    pack_json_error,
    pack_json_result,
    unpack_json_request,
)

NUMERIC = [name for name in DATATYPES if name not in ("BYTES", "BF16")]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)


def request(**fields: Any) -> bytes:
    return json.dumps({"model": "digits", **fields}).encode()


def tensor(datatype: str, shape: list[int], data: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": datatype, "shape": shape, "data": data}


def array_of(datatype: str, shape: list[int], data: Any) -> np.ndarray:
    (array,) = unpack_json_request(request(inputs=[tensor(datatype, shape, data)])).arrays
    return array


def answer_data(datatype: str, array: np.ndarray) -> list[Any]:
    reply = json.loads(pack_json_answer("a", "digits", 3, [(TensorHeader("y", datatype, array.shape), array)]))
    return list(reply["outputs"][0]["data"])


@pytest.mark.parametrize("name", NUMERIC)
@given(data=st.data())
def test_numbers_survive_the_way_out_and_back_in(name: str, data: st.DataObject) -> None:
    array = data.draw(hnp.arrays(DATATYPES[name].dtype, SHAPES))
    back = array_of(name, list(array.shape), answer_data(name, array))
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


@given(hnp.arrays(np.int32, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=3)))
def test_flat_and_nested_data_are_the_same(array: np.ndarray) -> None:
    shape = list(array.shape)
    np.testing.assert_array_equal(
        array_of("INT32", shape, array.tolist()), array_of("INT32", shape, array.reshape(-1).tolist())
    )


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ([3, 2], [[1, 2, 3], [4, 5, 6]]),
        ([2, 3], [[1, 2], [3, 4, 5, 6]]),
        ([6], [[1, 2, 3], [4, 5, 6]]),
        ([2, 3], [[[1], [2], [3]], [[4], [5], [6]]]),
        ([1, 6, 1], [[1, 2, 3, 4, 5, 6]]),
    ],
)
def test_elements_count_in_their_order_whatever_their_nesting(shape: list[int], data: list[Any]) -> None:
    assert array_of("INT32", shape, data).tolist() == np.arange(1, 7).reshape(shape).tolist()


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ([2, 3], [[1, 2], [3, 4, 5]]),
        ([2, 2], [[1, 2], 3, 4]),
        ([2, 2], [1, 2, [3], 4]),
        ([3], [[1], 2, 3]),
        ([1], [[]]),
        ([2], [1]),
        ([2], [1, 2, 3]),
        ([], []),
        ([0, 1 << 48, 1 << 48], []),
        ([1 << 48] * 32, [1]),
    ],
)
def test_data_that_is_not_its_shape_is_a_mismatch(shape: list[int], data: list[Any]) -> None:
    with pytest.raises(TensorMismatch, match="input 'x'"):
        array_of("INT32", shape, data)


@pytest.mark.parametrize(
    ("datatype", "item"),
    [
        ("INT8", 128),
        ("INT8", -129),
        ("UINT8", -1),
        ("UINT8", 256),
        ("UINT64", 1 << 64),
        ("INT64", 1 << 63),
        ("INT64", 10**400),
        ("INT32", 1.0),
        ("INT32", "1"),
        ("INT32", True),
        ("INT32", None),
        ("BOOL", 1),
        ("BOOL", "true"),
        ("FP32", True),
        ("FP32", None),
        ("FP32", {}),
        ("FP32", "nan"),
        ("FP32", "1.0"),
        ("FP32", 1e39),
        ("FP32", 10**400),
        ("FP16", 70_000),
        ("FP64", 10**400),
        ("BF16", 3.4e38 * 1.01),
        ("BYTES", 5),
        ("BYTES", None),
        ("BYTES", "\ud800"),
    ],
)
def test_an_item_that_does_not_fit_its_datatype_is_a_mismatch(datatype: str, item: Any) -> None:
    with pytest.raises(TensorMismatch, match=f"data does not fit {datatype}") as caught:
        array_of(datatype, [2], [item, item])
    assert len(caught.value.message) < 400


def test_a_number_that_json_cannot_hold_is_not_taken_for_infinity() -> None:
    frame = request(inputs=[tensor("FP64", [1], ["@"])]).replace(b'"@"', b"1e400")
    with pytest.raises(TensorMismatch, match="too large"):
        unpack_json_request(frame)


@pytest.mark.parametrize("datatype", ["FP16", "FP32", "FP64", "BF16"])
def test_non_finite_floats_travel_as_their_names(datatype: str) -> None:
    names = ["NaN", "Infinity", "-Infinity", 1.5]
    array = array_of(datatype, [4], names)
    values = bf16_to_fp32(array) if datatype == "BF16" else array
    assert math.isnan(values[0])
    assert values[1:].tolist() == [math.inf, -math.inf, 1.5]
    assert answer_data(datatype, array) == names


def test_bf16_data_are_numbers_in_json_and_bits_inside() -> None:
    array = array_of("BF16", [2], [1, -2.5])
    assert array.dtype == np.uint16
    assert array.tolist() == bf16_from_fp32(np.array([1, -2.5], np.float32)).tolist()
    assert answer_data("BF16", array) == [1.0, -2.5]


def test_bf16_values_of_ml_dtypes_are_numbers_in_json_too() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert answer_data("BF16", np.array([1.5, np.nan], ml_dtypes.bfloat16)) == [1.5, "NaN"]


@given(hnp.arrays(object, SHAPES, elements=st.text(st.characters(exclude_categories=["Cs"]), max_size=8)))
def test_text_survives_the_way_in_and_out(array: np.ndarray) -> None:
    inside = array_of("BYTES", list(array.shape), array.reshape(-1).tolist())
    assert inside.shape == array.shape
    assert all(isinstance(item, bytes) for item in inside.reshape(-1))
    assert answer_data("BYTES", inside) == array.reshape(-1).tolist()


def test_bytes_that_are_not_text_are_shown_as_far_as_they_are() -> None:
    array = np.empty(1, object)
    array[0] = b"ok\xff"
    assert answer_data("BYTES", array) == ["ok\ufffd"]


# ---- the request around the data


def test_a_request_is_read_with_its_parameters() -> None:
    decoded = unpack_json_request(
        request(
            id="7",
            version=2,
            outputs=["y", {"name": "z"}],
            inputs=[tensor("FP32", [1], [0.5])],
            parameters={"timeout_ms": 20, "priority": 1, "timing": True, "other": 1},
        )
    )
    header = decoded.header
    assert (decoded.id, header.op, header.model, header.version, header.outputs) == (
        "7",
        "infer",
        "digits",
        2,
        ("y", "z"),
    )
    assert (header.timeout_ms, header.priority, header.timing) == (20.0, 1, True)
    assert header.inputs == (TensorHeader("x", "FP32", (1,)),)
    assert decoded.arrays[0].tolist() == [0.5]


def is_object(frame: bytes) -> bool:
    try:
        return isinstance(json.loads(frame), dict)
    except (ValueError, RecursionError):
        return False


@settings(max_examples=200)
@given(st.text(max_size=100) | st.binary(max_size=100))
@example("{")
@example(b"\xff\xfe{")
@example("[]")
@example("1")
def test_text_that_is_not_a_request_raises_only_our_errors(text: str | bytes) -> None:
    frame = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    assume(not is_object(frame))  # any object is a request, of a model that may not exist
    with pytest.raises(EdgeRuntimeError) as caught:
        unpack_json_request(frame)
    assert caught.value.code == "decode_failed"
    assert json_id(frame) is None


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=15,
)
TENSOR_LIKE = st.fixed_dictionaries(
    {},
    optional={
        "name": st.just("x") | JSON_VALUES,
        "datatype": st.sampled_from([*DATATYPES, "X"]) | JSON_VALUES,
        "shape": st.lists(st.integers(-1, 3) | st.just(1 << 48), max_size=3) | JSON_VALUES,
        "data": st.lists(st.integers() | st.floats() | st.text(max_size=3), max_size=9) | JSON_VALUES,
    },
)


PARAMETERS = st.dictionaries(st.sampled_from(["timeout_ms", "priority"]), JSON_VALUES)
REQUEST_LIKE = st.fixed_dictionaries(
    {},
    optional={
        "id": JSON_VALUES,
        "v": st.just(1) | JSON_VALUES,
        "op": st.just("infer") | JSON_VALUES,
        "model": JSON_VALUES,
        "version": JSON_VALUES,
        "inputs": st.lists(TENSOR_LIKE, max_size=3) | JSON_VALUES,
        "outputs": JSON_VALUES,
        "timeout_ms": JSON_VALUES,
        "parameters": PARAMETERS | JSON_VALUES,
    },
)


def decode(frame: bytes) -> JsonRequest | EdgeRuntimeError:
    """The request, or the error of ours that was raised; any other error fails the test."""
    try:
        return unpack_json_request(frame)
    except EdgeRuntimeError as error:
        return error


@pytest.mark.long
@settings(max_examples=400)
@given(REQUEST_LIKE)
def test_objects_of_anything_give_a_request_or_one_of_our_errors(fields: dict[str, Any]) -> None:
    frame = json.dumps(fields).encode()
    decoded = decode(frame)
    if isinstance(decoded, JsonRequest):
        assert json.loads(pack_json_answer(decoded.id, "digits", 1, []))["id"] == decoded.id
        for header, array in zip(decoded.header.inputs, decoded.arrays, strict=True):
            assert array.shape == header.shape
    else:
        reply = json.loads(pack_json_error(json_id(frame), decoded))
        assert reply["error"]["code"] in ("decode_failed", "unsupported", "tensor_mismatch")
        assert len(reply["error"]["message"]) < 1_000


@pytest.mark.parametrize(
    "frame",
    [
        b'{"a":' * 100_000,
        b"[" * 100_000,
        b'{"id":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"timeout_ms":' + b"9" * 4_000 + b"}",
        b'{"timeout_ms":' + b"9" * 10_000 + b"}",
        b'{"version":' + b"9" * 4_000 + b"}",
        b'{"id":NaN}',
        b'{"id":1e400}',
        b'{"id":true}',
        b'{"id":["a"]}',
        b'{"id":"' + b"x" * 65 + b'"}',
        b'{"id":' + b"9" * 65 + b"}",
        b'{"timeout_ms":Infinity}',
        b'{"parameters":{"timeout_ms":-1}}',
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[NaN]}]}',
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1]}]}',
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":1}]}',
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[' + b"[" * 900 + b"]" * 900 + b'],"data":[1]}]}',
        b'{"model":"\xff"}',
        b'{"x":"' + b"x" * MAX_JSON_BYTES + b'"}',
    ],
    ids=lambda frame: f"{frame[:16]!r}-{len(frame)}",
)
def test_a_hostile_object_fails_to_decode(frame: bytes) -> None:
    with pytest.raises(DecodeFailed) as caught:
        unpack_json_request(frame)
    assert len(caught.value.message) < 400
    json.loads(pack_json_error(json_id(frame), caught.value))


@pytest.mark.parametrize("request_id", [None, "", "a" * 64, "\ud800", 0, -5, 10**60])
def test_an_id_is_echoed_as_it_came(request_id: Any) -> None:
    decoded = unpack_json_request(request(id=request_id))
    assert decoded.id == request_id
    for reply in (
        pack_json_answer(decoded.id, "digits", 1, []),
        pack_json_result(decoded.id, True),
        pack_json_error(decoded.id, QueueFull("full")),
    ):
        assert json.loads(reply)["id"] == request_id


def test_the_id_of_a_request_that_fails_otherwise_is_still_found() -> None:
    frame = request(id="mine", version="two")
    with pytest.raises(DecodeFailed, match="version: got str, wanted int"):
        unpack_json_request(frame)
    assert json_id(frame) == "mine"


def test_deep_data_is_read_without_recursion() -> None:
    nested: Any = 1
    for _ in range(500):
        nested = [nested]
    assert array_of("INT32", [1], nested).tolist() == [1]
    with pytest.raises(TensorMismatch):
        array_of("INT32", [2], nested)


def test_another_protocol_or_datatype_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="protocol version 2"):
        unpack_json_request(request(v=2))
    with pytest.raises(Unsupported, match="datatype 'FP8' is unknown"):
        array_of("FP8", [1], [1])


def test_an_input_named_twice_is_a_mismatch() -> None:
    with pytest.raises(TensorMismatch, match="input 'x' is named twice"):
        unpack_json_request(request(inputs=[tensor("INT8", [1], [1]), tensor("INT8", [1], [2])]))


def test_a_result_with_non_finite_floats_is_still_json() -> None:
    result = {"p99_ms": math.inf, "models": [{"x": math.nan}], "count": 3}
    assert json.loads(pack_json_result(1, result))["result"] == {
        "p99_ms": "Infinity", "models": [{"x": "NaN"}], "count": 3,
    }  # fmt: skip


def test_an_answer_has_the_fields_of_the_open_inference_protocol() -> None:
    array = np.array([[1, 2]], np.int8)
    timing = {"queue_ms": 0.5, "run_ms": 1.0, "batch_rows": 1}
    reply = json.loads(pack_json_answer("7", "digits", 3, [(TensorHeader("y", "INT8", (1, 2)), array)], timing))
    assert reply == {
        "id": "7",
        "model_name": "digits",
        "model_version": "3",
        "outputs": [{"name": "y", "datatype": "INT8", "shape": [1, 2], "data": [1, 2]}],
        "timing": timing,
    }


# ---- numbers as short as they can be, and requests whose header is known


def test_fp32_is_written_in_its_shortest_form() -> None:
    array = np.array([0.1, 1 / 3, 1e-7, 16777216, -0.0], np.float32)
    packed = pack_json_answer(1, "digits", 1, [(TensorHeader("y", "FP32", (5,)), array)])
    assert b'"data":[0.1,0.33333334,1e-7,16777216.0,-0.0]' in packed
    with_nan = pack_json_answer(1, "m", 1, [(TensorHeader("y", "FP32", (2,)), np.array([0.1, np.nan], np.float32))])
    assert b'"data":[0.1,"NaN"]' in with_nan


def test_integers_beyond_the_doubles_are_exact() -> None:
    values = [2**53 + 1, -(2**63), 2**63 - 1]
    assert array_of("INT64", [3], values).tolist() == values
    assert array_of("UINT64", [1], [2**64 - 1]).tolist() == [2**64 - 1]
    assert answer_data("INT64", np.array(values)) == values


@pytest.mark.parametrize("text", [b"1e400", b"-1e400", b"1e39", b"9" * 400])
@pytest.mark.parametrize("datatype", ["FP16", "FP32", "BF16"])
def test_a_number_that_the_datatype_lacks_is_never_infinity(datatype: str, text: bytes) -> None:
    frame = request(inputs=[tensor(datatype, [2], [1, "@"])]).replace(b'"@"', text)
    with pytest.raises(TensorMismatch):
        unpack_json_request(frame)


def test_a_null_stays_null_beside_floats_that_are_not_finite() -> None:
    assert json.loads(dumps({"a": None, "b": [math.inf], "c": "null"})) == {"a": None, "b": ["Infinity"], "c": "null"}
    assert json.loads(dumps({"a": np.array([1.5], np.float32), "b": "\ud800"})) == {"a": [1.5], "b": "\ud800"}


def known_of(frame: bytes) -> Any:
    return cut_known(frame, loads(frame))


def test_requests_that_differ_in_id_and_data_only_are_known_as_the_same() -> None:
    one = known_of(request(id="1", inputs=[tensor("FP32", [2], [1, 2])]))
    two = known_of(request(inputs=[tensor("FP32", [2], [0.5, 7])], id=2))
    assert one[0] == known_of(request(id=None, inputs=[tensor("FP32", [2], [1])]))[0]
    assert (one[1:], two[1:]) == (("1", [[1, 2]]), (2, [[0.5, 7]]))
    assert one[0] != known_of(request(id="1", inputs=[tensor("FP32", [1], [1, 2])]))[0]
    assert one[0] != known_of(request(id="1", inputs=[tensor("FP32", [2], [1, 2])], timeout_ms=1))[0]


@pytest.mark.parametrize("fields", [{}, {"inputs": 1}, {"inputs": [], "id": 10**30}, {"inputs": [{"data": [True]}]}])
def test_a_request_that_needs_a_closer_look_is_not_known(fields: dict[str, Any]) -> None:
    assert known_of(request(**fields)) is None


@given(REQUEST_LIKE)
def test_cutting_a_request_leaves_it_as_it_was(fields: dict[str, Any]) -> None:
    frame = json.dumps(fields, allow_nan=False).encode() if is_finite(fields) else b"{}"
    read = loads(frame)
    try:
        cut_known(frame, read)
    except DecodeFailed:
        return
    found, again = decode(frame), unpack_or_error(frame, read)
    assert type(found) is type(again)


def is_finite(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def unpack_or_error(frame: bytes, fields: dict[str, Any]) -> JsonRequest | EdgeRuntimeError:
    try:
        return unpack_json_request(frame, fields)
    except EdgeRuntimeError as error:
        return error


@pytest.mark.parametrize("name", NUMERIC)
@given(data=st.data())
def test_flat_data_is_packed_as_it_is_read(name: str, data: st.DataObject) -> None:
    if name == "BOOL":
        return
    values = data.draw(st.lists(st.integers(-300, 300) | st.floats(allow_nan=False, allow_infinity=False), max_size=4))
    header = TensorHeader("x", name, (len(values),))
    packed = pack_data(header, values)
    if packed is None:
        return  # a closer look decides
    assert packed == array_from_json(header, values).tobytes()


@pytest.mark.parametrize("datatype", ["FP32", "FP64", "FP16", "BF16", "INT64", "BOOL"])
@pytest.mark.parametrize("request_id", ["7", 7, None, "\ud800", 10**30])
def test_answers_of_a_known_header_have_the_text_of_others(datatype: str, request_id: Any) -> None:
    values = [[1.5, math.nan], [0.1, 7.0]] if datatype in ("FP32", "FP64", "FP16") else [[1, 0], [1, 1]]
    header = TensorHeader("y", datatype, (2,))
    answers = JsonAnswers("digits", 3, [header, header])
    arrays = [np.array(each, DATATYPES[datatype].dtype) for each in values]
    packed = answers.pack(request_id, [array.tobytes() for array in arrays])
    assert packed == pack_json_answer(request_id, "digits", 3, [(header, array) for array in arrays])
