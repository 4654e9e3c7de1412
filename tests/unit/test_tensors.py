"""Arrays as bytes on the wire: round trips, exact lengths, and nothing hostile gets further than a TensorMismatch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge_runtime.errors import EdgeRuntimeError, TensorMismatch, Unsupported
from edge_runtime.tensors import (
    DATATYPES,
    array_from_wire,
    array_to_wire,
    bf16_from_fp32,
    bf16_to_fp32,
    bits_to_values,
    datatype,
    datatype_name,
    element_count,
    fits_datatype,
    pack_bytes,
    unpack_bytes,
    values_to_bits,
)

FIXED = [name for name, kind in DATATYPES.items() if kind.itemsize and name != "BF16"]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@pytest.mark.parametrize("name", FIXED)
@given(data=st.data())
def test_an_array_is_read_back_as_it_was_sent(name: str, data: st.DataObject) -> None:
    array = data.draw(hnp.arrays(DATATYPES[name].dtype, SHAPES))
    wire = array_to_wire(array)
    assert memoryview(wire).nbytes == element_count(array.shape) * DATATYPES[name].itemsize
    back = array_from_wire(name, array.shape, wire)
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()
    assert datatype_name(back.dtype) == name


@given(hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=3, max_side=4)))
def test_memory_order_and_byte_order_of_the_sender_do_not_matter(array: np.ndarray) -> None:
    wanted = array.astype("<f4").tobytes()
    for other in (np.asfortranarray(array), array.astype(">f4"), array[::-1][::-1], np.repeat(array, 2, axis=0)[::2]):
        assert bytes(array_to_wire(other)) == wanted
        assert datatype_name(other.dtype) == "FP32"


def test_a_contiguous_array_is_sent_without_a_copy() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    wire = array_to_wire(array)
    array[0, 0] = 7
    assert np.frombuffer(wire, np.float32)[0] == 7


def test_a_frame_is_viewed_without_a_copy_unless_it_is_unaligned() -> None:
    frame = bytearray(np.arange(6, dtype=np.float32).tobytes())
    view = array_from_wire("FP32", (2, 3), frame)
    frame[0:4] = np.float32(7).tobytes()
    assert view[0, 0] == 7
    shifted = memoryview(bytearray(b"\0") + frame)[1:]
    assert array_from_wire("FP32", (2, 3), shifted).flags.aligned


@given(
    st.sampled_from([*DATATYPES, "FP8", "", "fp32"]),
    st.lists(st.integers(-3, 5) | st.integers(0, 1 << 48), max_size=6),
    st.binary(max_size=64),
)
def test_hostile_shapes_and_frames_raise_only_our_errors(name: str, shape: list[int], data: bytes) -> None:
    try:
        array = array_from_wire(name, shape, data)
    except EdgeRuntimeError:
        return
    assert list(array.shape) == shape
    assert name == "BYTES" or array.tobytes() == data


@pytest.mark.parametrize(
    ("name", "shape", "data"),
    [
        ("FP32", (2,), b"1234567"),
        ("FP32", (2,), b"123456789"),
        ("FP32", (), b""),
        ("FP32", (-1, -1), b"1234"),
        ("FP32", (0, 1 << 48, 1 << 48), b""),
        ("BYTES", (0, 1 << 48, 1 << 48), b""),
        ("BYTES", (1 << 48, 1 << 48), b""),
        ("BYTES", (-1,), b"\0\0\0\0"),
        ("BYTES", (1,), b""),
        ("BYTES", (1,), b"\1\0\0"),
        ("BYTES", (1,), b"\2\0\0\0x"),
        ("BYTES", (1,), b"\xff\xff\xff\xff"),
        ("BYTES", (1,), b"\0\0\0\0x"),
        ("BYTES", (2,), b"\4\0\0\0abcd"),
        ("BOOL", (2,), b"\0\2"),
        ("BOOL", (1,), b"\xff"),
    ],
)
def test_a_frame_that_is_not_its_shape_is_a_mismatch(name: str, shape: tuple[int, ...], data: bytes) -> None:
    with pytest.raises(TensorMismatch):
        array_from_wire(name, shape, data)


def test_a_wrong_length_says_what_was_got_and_what_was_wanted() -> None:
    with pytest.raises(TensorMismatch, match=r"FP32 tensor of shape \[2, 3\] is 24 bytes, got 23"):
        array_from_wire("FP32", (2, 3), bytes(23))


# ---- BYTES


@given(hnp.arrays(object, SHAPES, elements=st.binary(max_size=20)))
def test_bytes_are_read_back_as_they_were_sent(array: np.ndarray) -> None:
    back = unpack_bytes(pack_bytes(array), array.shape)
    assert back.shape == array.shape
    assert back.tolist() == array.tolist()


@given(hnp.arrays(object, SHAPES, elements=st.text(max_size=10)))
def test_text_is_sent_as_utf_8(array: np.ndarray) -> None:
    back = array_from_wire("BYTES", array.shape, array_to_wire(array))
    assert [item.decode() for item in back.reshape(-1)] == array.reshape(-1).tolist()


@pytest.mark.parametrize(
    "array", [np.array(["ab", "c"]), np.array([b"ab", b"c"]), np.array([bytearray(b"ab"), "c"], object)]
)
def test_every_kind_of_text_array_becomes_bytes(array: np.ndarray) -> None:
    assert datatype_name(array.dtype) == "BYTES"
    assert array_from_wire("BYTES", (2,), array_to_wire(array)).tolist() == [b"ab", b"c"]


@pytest.mark.parametrize("element", [5, None, 1.5, ["a"], "\ud800"])
def test_an_element_that_is_neither_bytes_nor_text_is_refused(element: object) -> None:
    array = np.empty(1, dtype=object)
    array[0] = element
    with pytest.raises(TensorMismatch, match="a BYTES element is"):
        array_to_wire(array)


@given(st.binary(max_size=100), st.lists(st.integers(0, 4), max_size=3))
def test_hostile_bytes_layouts_are_read_exactly_or_refused(data: bytes, shape: list[int]) -> None:
    try:
        array = unpack_bytes(data, shape)
    except TensorMismatch:
        return
    assert pack_bytes(array) == data


# ---- BF16


@given(st.integers(0, 0xFFFF))
def test_every_bf16_pattern_survives_a_trip_through_floats(bits: int) -> None:
    pattern = np.array([bits], dtype=np.uint16)
    back = bf16_from_fp32(bf16_to_fp32(pattern))
    if np.isnan(bf16_to_fp32(pattern))[0]:
        assert np.isnan(bf16_to_fp32(back))[0]
    else:
        assert back[0] == bits


@given(hnp.arrays(np.float32, 8, elements=st.floats(width=32)))
def test_rounding_to_bf16_agrees_with_ml_dtypes(array: np.ndarray) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with np.errstate(all="ignore"):
        wanted = array.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(bf16_to_fp32(bf16_from_fp32(array)), wanted)


def test_bf16_is_seen_through_ml_dtypes_where_it_is_installed() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = np.array([[0x3F80, 0xC000]], dtype=np.uint16)
    values = bits_to_values("BF16", bits)
    assert values.dtype == ml_dtypes.bfloat16
    assert values.astype(np.float32).tolist() == [[1.0, -2.0]]
    assert values_to_bits(values).tolist() == bits.tolist()
    assert bytes(array_to_wire(values)) == bytes(array_to_wire(bits)) == bits.tobytes()
    assert array_from_wire("BF16", (1, 2), bits.tobytes()).tolist() == bits.tolist()
    assert datatype_name(values.dtype) == "BF16"
    assert fits_datatype(values.dtype, "BF16")


def test_other_datatypes_are_seen_as_they_are() -> None:
    array = np.array([1, 2], dtype=np.uint16)
    assert bits_to_values("UINT16", array) is array
    assert values_to_bits(array) is array


# ---- names


@pytest.mark.parametrize(
    ("dtype", "name", "fits"),
    [
        (np.uint16, "BF16", True),
        (np.uint16, "UINT16", True),
        (np.uint16, "INT16", False),
        (np.float32, "FP32", True),
        (">f4", "FP32", True),
        (np.float64, "FP32", False),
        (object, "BYTES", True),
        ("U3", "BYTES", True),
        (np.complex64, "FP32", False),
        (np.float32, "BF16", False),
    ],
)
def test_a_dtype_fits_its_own_datatype_only(dtype: object, name: str, fits: bool) -> None:
    assert fits_datatype(np.dtype(dtype), name) is fits


@pytest.mark.parametrize("dtype", [np.complex64, "M8[s]", "m8[s]", "V4", np.dtype([("a", np.int8)])])
def test_a_dtype_without_a_datatype_is_unsupported(dtype: object) -> None:
    with pytest.raises(Unsupported, match="has no OIP datatype"):
        datatype_name(np.dtype(dtype))


def test_an_unknown_datatype_names_the_known_ones_and_not_all_of_itself() -> None:
    with pytest.raises(Unsupported, match="wanted one of BOOL, UINT8") as caught:
        datatype("X" * 10_000)
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\1\0\0\0aaaa", "incomplete string length indicator for it, expecting 4 bytes but only 3 bytes available"),
        (b"\4\0\0\0aaaa", "expected 2 string elements for it, got 1"),
        (b"\1\0\0", "expected 2 string elements for it, got 3 bytes"),
        (
            b"\1\0\0\0a\7\0\0\0a",
            "incomplete string data for it, expecting string of length 7 but only 1 bytes available",
        ),
        (b"\0\0\0\0\0\0\0\0\0", "unexpected number of string elements 3 for it, expecting 2"),
    ],
)
def test_data_that_is_not_a_bytes_tensor_is_named_as_triton_names_it(data: bytes, words: str) -> None:
    with pytest.raises(TensorMismatch, match=words):
        unpack_bytes(data, (2,), "it")
