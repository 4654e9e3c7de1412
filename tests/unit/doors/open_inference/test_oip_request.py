"""The part that the doors of the Open Inference Protocol share: requests read from plain fields."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.config.settings import ModelSettings, QueuePolicies
from edge_runtime.doors.open_inference.named_regions import RegionPart
from edge_runtime.doors.open_inference.oip import error_status, oip_status, readiness_status
from edge_runtime.doors.open_inference.request import OipRequest, infer_header, version_number
from edge_runtime.errors import DecodeFailed, NotReady, NotServed, TensorMismatch, Unsupported
from edge_runtime.request.plan import timeout_ms_of
from edge_runtime.triton.words import classes
from edge_runtime.wire.codec import MAX_DIMENSION

INPUT = {"name": "x", "datatype": "FP32", "shape": [1, 16]}


def read(version=None, *, timeout_ms=None, **fields) -> OipRequest:
    return infer_header("mlp", version, {"inputs": [INPUT], **fields}, timeout_ms=timeout_ms)


def test_a_request_names_model_version_tensors_and_id():
    request = read("3", id="a", outputs=[{"name": "y"}, {"name": "z"}])
    header = request.header
    assert (header.model, header.version, header.outputs, request.id) == ("mlp", 3, ("y", "z"), "a")
    assert [(each.name, each.datatype, each.shape) for each in header.inputs] == [("x", "FP32", (1, 16))]


def test_no_outputs_mean_all_and_json_is_the_default_form():
    request = read(outputs=[])
    assert request.header.outputs is None
    assert not request.is_binary("y")


def test_an_outputs_own_binary_flag_wins_over_the_requests():
    outputs = [{"name": "y", "parameters": {"binary_data": False}}, {"name": "z"}]
    request = read(parameters={"binary_data_output": True}, outputs=outputs)
    assert not request.is_binary("y")
    assert request.is_binary("z")


def test_the_smallest_timeout_counts_and_0_microseconds_are_none():
    assert read(parameters={"timeout": 0}).header.timeout_ms is None
    for parameters, transport_ms, timeout_ms in (
        ({"timeout": 2_500}, None, 2.5),
        ({"timeout": 2_500, "timeout_ms": 2}, 7.0, 2.0),
        ({"timeout": 9_000}, 7.0, 7.0),
    ):
        header = read(parameters=parameters, timeout_ms=transport_ms).header
        assert timeout_ms_of(header, ModelSettings()) == timeout_ms


def test_the_timeout_of_tritons_clients_is_not_a_deadline_where_the_model_has_a_queue_by_tritons_rules():
    header = read(parameters={"timeout": 2_500, "timeout_ms": 9}).header

    assert timeout_ms_of(header, ModelSettings(queue=QueuePolicies())) == 9.0
    assert header.queue_timeout_ms == 2.5


@pytest.mark.parametrize(("priority", "taken"), [(0, 0), (1, 1), (10, 10), (2**64 - 1, MAX_DIMENSION)])
def test_a_priority_is_1_to_9_and_a_level_of_a_model_any_number(priority, taken):
    header = read(parameters={"priority": priority}).header
    assert (header.priority, header.asked_level) == (min(taken, 9), taken)


def test_tensors_in_regions_and_classes_are_reported():
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 64}
    request = infer_header(
        "mlp",
        "",
        {
            "inputs": [{**INPUT, "parameters": {**place, "shared_memory_offset": 8}}, {**INPUT, "name": "w"}],
            "outputs": [
                {"name": "y", "parameters": place},
                {"name": "z", "parameters": {"classification": 3, "binary_data": True}},
            ],
        },
    )
    assert request.input_regions == (RegionPart("r", 8, 64), None)
    assert request.output_regions == {"y": RegionPart("r", 0, 64)}
    assert request.classes == {"z": 3}


def test_unknown_parameters_are_ignored():
    assert read(parameters={"headers": {"a": 1}}, raw=1).header.parameters == {}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"inputs": {}}, "inputs: got dict"),
        ({"inputs": [1]}, "wanted an object"),
        ({"inputs": [{**INPUT, "shape": [-1, 16]}]}, "wanted integers of 0 or more"),
        ({"inputs": [{**INPUT, "shape": [1 << 70]}]}, "causes total element count to exceed maximum size of"),
        ({"inputs": [{**INPUT, "parameters": {"binary_data_size": -1}}]}, "binary_data_size: got -1"),
        ({"inputs": [{**INPUT, "parameters": {"binary_data_size": "64"}}]}, "binary_data_size: got str"),
        ({"inputs": [{**INPUT, "parameters": {"shared_memory_region": "r"}}]}, "a tensor in shared memory has both"),
        ({"outputs": [{"name": "y"}, {"name": "y"}]}, "each once"),
        ({"outputs": [{}]}, "outputs: got name None"),
        ({"parameters": []}, "parameters: got list"),
        ({"parameters": {"timeout": -1}}, "timeout: got -1"),
        ({"parameters": {"timeout_ms": float("nan")}}, "timeout_ms: got nan"),
        ({"id": 7}, "id: got int"),
    ],
)
def test_a_field_that_cannot_be_read_is_named(fields, words):
    with pytest.raises(DecodeFailed) as caught:
        read(**fields)
    assert words in str(caught.value)


def test_an_unknown_datatype_is_the_callers_fault():
    with pytest.raises(TensorMismatch):
        read(inputs=[{**INPUT, "datatype": "FP31"}])


@pytest.mark.parametrize("sequence_id", [0, 7, 2**64 - 1, -(2**63), "", "a", "ä" * 64, None])
@pytest.mark.parametrize("marks", [{}, {"sequence_start": True}, {"sequence_start": False, "sequence_end": True}])
def test_a_sequence_means_nothing_to_a_model_without_state(sequence_id, marks):
    request = read(parameters={"sequence_id": sequence_id, **marks, "depth": 3})
    assert request.header.parameters == {"depth": 3}


@pytest.mark.parametrize(
    "parameters",
    [
        *({"sequence_id": each} for each in (True, 1.5, 2.0**64, [1], {}, "a" * 129, "ä" * 65)),
        *({"sequence_start": each} for each in (1, 0, "true", [])),
        {"sequence_end": 1.0},
    ],
)
def test_words_that_name_no_sequence_are_refused(parameters):
    with pytest.raises(DecodeFailed, match="sequence_"):
        read(parameters=parameters)


def test_an_empty_id_is_none_and_a_request_may_leave_out_all_inputs():
    request = infer_header("mlp", None, {"id": ""})
    assert (request.id, request.header.inputs) == (None, ())


@pytest.mark.parametrize("text", ["x", "0", "-1", "1.0", "٣", "1" * 40, " 1", True])
def test_a_version_is_a_positive_integer_in_digits(text):
    with pytest.raises(DecodeFailed):
        version_number(text)


KEYS = st.sampled_from(
    (
        *("id", "parameters", "inputs", "outputs", "name", "datatype", "shape", "timeout", "timeout_ms", "priority"),
        *("binary_data_size", "binary_data", "classification", "shared_memory_region", "shared_memory_byte_size"),
    )
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
TENSORS = st.lists(st.fixed_dictionaries({"name": VALUES, "shape": VALUES, "parameters": VALUES}) | VALUES, max_size=3)


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=5), TENSORS, TENSORS)
def test_any_fields_are_read_or_refused(fields, inputs, outputs):
    try:
        request = infer_header("mlp", None, {**fields, "inputs": inputs, "outputs": outputs})
    except (DecodeFailed, TensorMismatch, Unsupported):
        return
    assert len(request.header.inputs) == len(request.input_sizes) == len(request.input_regions) == len(inputs)


def test_codes_become_statuses_and_a_model_that_is_not_loaded_is_not_found():
    assert oip_status("tensor_mismatch") == (400, "INVALID_ARGUMENT")
    assert oip_status("load_failed") == (500, "INTERNAL")
    assert error_status(NotReady("loads")) == (503, "UNAVAILABLE")
    assert error_status(NotServed("unloaded")) == (404, "NOT_FOUND")


def test_not_ready_is_400_and_503_while_draining():
    assert readiness_status({"ready": True}) == 200
    assert readiness_status({"ready": False, "reason": "models are loading"}) == 400
    assert readiness_status({"ready": False, "reason": "draining"}) == 503


@pytest.mark.parametrize(
    ("values", "kind", "batches", "texts"),
    [
        (np.float32([[1, 3, 2]]), "FP32", True, [[b"3.000000:1", b"2.000000:2"]]),
        (np.float32([2, 2, 2]), "FP32", False, [b"2.000000:0", b"2.000000:1"]),
        (np.float64([np.nan, -1, np.inf]), "FP64", False, [b"inf:2", b"-1.000000:1"]),
        (
            np.array([2**64 - 1, 2**63], np.uint64),
            "UINT64",
            False,
            [b"%d:0" % (2**64 - 1), b"%d:1" % 2**63],
        ),
        (np.array([[[1, 2], [3, 4]]], np.int8), "INT8", True, [[b"4:3", b"3:2"]]),
        (np.array([0x3F80, 0x4000], np.uint16), "BF16", False, [b"2.000000:1", b"1.000000:0"]),
        (np.empty((1, 0), np.float32), "FP32", True, [[]]),
    ],
)
def test_classes_are_best_first_and_of_equals_the_first(values, kind, batches, texts):
    found = classes(values, kind, 2, batches=batches)
    assert found.tolist() == texts


@pytest.mark.parametrize("kind", ["BYTES", "BOOL"])
def test_a_datatype_that_has_no_order_has_no_classes(kind):
    with pytest.raises(TensorMismatch):
        classes(np.array([True]), kind, 1, batches=False)
