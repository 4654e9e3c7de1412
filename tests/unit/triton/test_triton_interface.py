"""The interface of a TritonPythonModel, and runs without a host: datatypes, tensors, configurations, error words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.python.backend import PythonBackend
from edge_runtime.errors import LoadFailed, NotReady, RunFailed, TensorMismatch
from edge_runtime.triton import CONFIG_OPTION
from edge_runtime.triton import interface as pb_utils
from edge_runtime.triton.python_backend import TritonInstance
from tests.models.triton_models import HEAD, IDENTITY, tensor

KINDS = {
    "TYPE_BOOL": np.bool_, "TYPE_UINT8": np.uint8, "TYPE_UINT16": np.uint16, "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64, "TYPE_INT8": np.int8, "TYPE_INT16": np.int16, "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64, "TYPE_FP16": np.float16, "TYPE_FP32": np.float32, "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}  # fmt: skip


@pytest.mark.parametrize(("number", "name"), list(enumerate(KINDS, 1)))
def test_every_datatype_has_its_number_and_its_numpy_type(number: int, name: str) -> None:
    kind = KINDS[name]
    assert np.dtype(pb_utils.triton_string_to_numpy(name)) == np.dtype(kind)
    assert pb_utils.triton_to_numpy_type(number) == kind
    assert pb_utils.numpy_to_triton_type(kind) == number
    assert pb_utils.Tensor("x", np.zeros(2, kind)).triton_dtype() == number


def test_an_unknown_datatype_has_neither_a_number_nor_a_numpy_type() -> None:
    assert pb_utils.triton_to_numpy_type(0) is None
    assert pb_utils.triton_to_numpy_type(99) is None
    assert pb_utils.numpy_to_triton_type(np.complex64) is None
    assert pb_utils.numpy_to_triton_type(np.bytes_) == 13
    with pytest.raises(KeyError):
        pb_utils.triton_string_to_numpy("TYPE_FP8")


@pytest.mark.parametrize("elements", [[b"one", b"", b"\0three"], ["text", b"bytes"]])
def test_text_becomes_bytes_with_lengths_and_back(elements: list[Any]) -> None:
    packed = pb_utils.serialize_byte_tensor(np.array(elements, object).reshape(1, -1))
    assert packed[:4] == len(elements[0]).to_bytes(4, "little")
    back = pb_utils.deserialize_bytes_tensor(packed)
    assert back.tolist() == [each if isinstance(each, bytes) else each.encode() for each in elements]
    assert pb_utils.serialize_byte_tensor(np.zeros(0, object)) == ()
    assert pb_utils.serialize_byte_tensor(np.zeros(3)) is None


def test_a_tensor_is_its_array_and_goes_both_ways_by_dlpack() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    made = pb_utils.Tensor("x", array)
    assert (made.name(), made.shape(), made.is_cpu()) == ("x", [2, 3], True)
    assert made.as_numpy() is array
    assert np.shares_memory(np.from_dlpack(made), array)
    again = pb_utils.Tensor.from_dlpack("y", made.to_dlpack())
    assert again.name() == "y"
    assert again.as_numpy().tolist() == array.tolist()
    assert pb_utils.Tensor.from_dlpack("z", array).as_numpy().tolist() == array.tolist()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: pb_utils.Tensor("x", np.array(["text"])), "Please use np.object_ instead"),
        (lambda: pb_utils.Tensor("x", [1, 2]), "got list"),
        (lambda: pb_utils.Tensor("x", np.array([b"x"], object)).to_dlpack(), "does not have support for string"),
        (lambda: pb_utils.Tensor.from_dlpack("x", np.zeros((2, 3)).T), "Only contiguous DLPack tensors"),
        (lambda: pb_utils.InferenceResponse([np.zeros(2)]), "wanted pb_utils.Tensor"),
        (lambda: pb_utils.InferenceResponse(error="text"), "wanted pb_utils.TritonError"),
        (lambda: pb_utils.InferenceRequest().get_response_sender(), "decoupled transaction policy"),
        (lambda: pb_utils.InferenceRequest().set_release_flags(2), "RESCHEDULE"),
        (lambda: pb_utils.InferenceRequest().exec(), "model_name"),
        (lambda: pb_utils.load_model("other"), "loads and unloads no others"),
        (lambda: pb_utils.unload_model("other"), "loads and unloads no others"),
        (lambda: pb_utils.is_model_ready("other", "1"), "'other' 1"),
    ],
)
def test_a_wrong_use_is_reported(make: Any, words: str) -> None:
    with pytest.raises(pb_utils.TritonModelException, match=words):
        make()


def test_requests_and_responses_say_what_they_were_made_of() -> None:
    x = pb_utils.Tensor("x", np.zeros(1))
    request = pb_utils.InferenceRequest(
        request_id="1", correlation_id="c", inputs=[x], requested_output_names=["y"], model_name="m", model_version=2,
        flags=pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, timeout=5, parameters={"key": "value"},
        preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 1),
    )  # fmt: skip
    assert (request.request_id(), request.correlation_id(), request.inputs()) == ("1", "c", [x])
    assert (request.requested_output_names(), request.timeout(), request.flags()) == (["y"], 5, 1)
    assert json.loads(request.parameters()) == {"key": "value"}
    assert request.preferred_memory().preferred_device_id == 1
    assert (request.is_cancelled(), request.priority()) == (False, 0)
    assert pb_utils.get_input_tensor_by_name(request, "x") is x
    assert pb_utils.get_input_tensor_by_name(request, "y") is None
    response = pb_utils.InferenceResponse(output_tensors=[x], parameters={"a": 1})
    assert pb_utils.get_output_tensor_by_name(response, "x") is x
    assert (response.has_error(), response.error(), json.loads(response.parameters())) == (False, None, {"a": 1})
    failed = pb_utils.InferenceResponse(error=pb_utils.TritonError("words", pb_utils.TritonError.NOT_FOUND))
    error = failed.error()
    assert error is not None
    assert (failed.has_error(), error.message(), error.code(), str(error)) == (True, "words", 2, "words")


def config(**values: Any) -> pb_utils.ModelConfig:
    return pb_utils.ModelConfig(json.dumps({"name": "m", "max_batch_size": 0, "input": [], "output": [], **values}))


def test_a_configuration_is_completed_and_not_overruled() -> None:
    made = config(input=[{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}])
    made.add_input(tensor("x", "FP32", 4))
    made.add_output(tensor("y", "INT64", 2))
    made.set_max_batch_size(8)
    made.set_dynamic_batching()
    made.set_model_transaction_policy({"decoupled": True})
    found = made.as_dict()
    assert [each["name"] for each in found["input"]] == ["x"]
    assert pb_utils.get_output_config_by_name(found, "y") == tensor("y", "INT64", 2)
    assert pb_utils.get_input_config_by_name(found, "z") is None
    assert (found["max_batch_size"], found["dynamic_batching"]) == (8, {})
    assert pb_utils.using_decoupled_model_transaction_policy(found)


@pytest.mark.parametrize(
    ("complete", "words"),
    [
        (lambda made: made.add_input({"name": "x", "dims": [4]}), "missing 'data_type'"),
        (lambda made: made.add_input({**tensor("x", "FP32", 4), "shade": 1}), "contains property other than"),
        (lambda made: made.add_input(tensor("known", "FP32", 4)), "configuration expects datatype TYPE_INT8 for input"),
        (lambda made: made.add_input(tensor("known", "INT8", 5)), r"the model expects dims \[5\] but the model config"),
        (lambda made: made.add_output({"data_type": "TYPE_FP32", "dims": [4]}), "output in .* is missing 'name'"),
        (lambda made: made.set_max_batch_size(2), "specified max_batch_size 4, but"),
        (lambda made: made.set_dynamic_batching(), "scheduling_choice as 'sequence_batching'"),
        (lambda made: made.set_model_transaction_policy({"decoupled": True}), "trying to change decoupled property"),
        (lambda made: made.set_model_transaction_policy({"other": 1}), "property other than 'decoupled'"),
    ],
)
def test_a_configuration_that_says_otherwise_is_named_in_tritons_words(complete: Any, words: str) -> None:
    policy = {"model_transaction_policy": {"decoupled": False}, "sequence_batching": {}}
    made = config(max_batch_size=4, input=[tensor("known", "INT8", 4)], **policy)
    with pytest.raises(ValueError, match=words):
        complete(made)


def load(folder: Path, body: str, **values: Any) -> TritonInstance:
    """Load a model here, without a host: x and y FP32 [2] where nothing else is said."""
    path = folder / "model" / "1" / "model.py"
    path.parent.mkdir(parents=True)
    path.write_text(HEAD + body)
    ports = {"input": [tensor("x", "FP32", 2)], "output": [tensor("y", "FP32", 2)]}
    extra = {CONFIG_OPTION: json.dumps({"name": "m", **ports, **values})}
    made = PythonBackend(allow=True).load(path, LoadOptions(extra=extra))
    assert isinstance(made, TritonInstance)
    return made


@pytest.fixture(autouse=True)
def own_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave no module and no path of a test's model behind."""
    import sys

    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        before = set(sys.modules)
        yield
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ("1", "triton_python_backend_utils"):
                del sys.modules[name]


X = {"x": np.array([1, 2], np.float32)}


def test_a_model_without_rows_has_the_shapes_of_its_configuration(tmp_path: Path) -> None:
    made = load(tmp_path, IDENTITY)
    assert (made.spec.inputs[0].shape, made.spec.by_request.max_rows) == ((2,), 0)
    assert made.run(X)[0].tolist() == [1, 2]
    made.close()
    with pytest.raises(RunFailed, match="closed"):
        made.run(X)


def test_a_reshape_is_what_the_model_sees_and_dims_what_callers_do(tmp_path: Path) -> None:
    body = """
class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        assert x.shape == (2, 1, 1, 2), x.shape
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])]
"""
    x, y = (tensor(name, "FP32", 2, reshape={"shape": [1, 1, 2]}) for name in "xy")
    made = load(tmp_path, body, max_batch_size=4, input=[x], output=[y])
    assert made.run({"x": np.zeros((2, 2), np.float32)})[0].shape == (2, 2)


def test_finalize_runs_once_and_its_failure_is_only_reported(tmp_path: Path, capfd: Any) -> None:
    made = load(tmp_path, f"{IDENTITY}\n    def finalize(self):\n        raise ValueError('at the end')\n")
    made.close()
    made.close()
    assert capfd.readouterr().err.count("ValueError: at the end") == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("class TritonPythonModel:\n    pass\n", "does not implement `execute` method"),
        (f"{IDENTITY}\n    def initialize(self, args):\n        raise ValueError('no weights')\n", "no weights"),
        (
            f"{IDENTITY}\n    @staticmethod\n    def auto_complete_config(c):\n        return None\n",
            "must return a valid",
        ),
        ("import absent_module\nclass TritonPythonModel: ...\n", "absent_module"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(LoadFailed, match=words):
        load(tmp_path, body)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"input": [{"name": "x", "dims": [2]}]}, "data_type is None; wanted one of TYPE_BOOL"),
        ({"output": [tensor("y", "FP32", 2)] * 2}, "names an output twice"),
        ({"output": []}, "has no output: write it into config.pbtxt"),
    ],
)
def test_a_configuration_that_does_not_describe_a_model_says_why(tmp_path: Path, values: Any, words: str) -> None:
    with pytest.raises(LoadFailed, match=words):
        load(tmp_path, IDENTITY, **values)


@pytest.mark.parametrize(("code", "kind"), [("UNAVAILABLE", NotReady), ("INVALID_ARG", TensorMismatch)])
def test_an_error_without_a_host_is_raised_with_its_code(tmp_path: Path, code: str, kind: type[Exception]) -> None:
    body = f"""
class TritonPythonModel:
    def execute(self, requests):
        error = pb_utils.TritonError("not now", pb_utils.TritonError.{code})
        return [pb_utils.InferenceResponse(error=error) for _ in requests]
"""
    with pytest.raises(kind, match="not now"):
        load(tmp_path, body).run(X)


def test_custom_metrics_count_in_the_models_process_and_the_log_says_so(capfd: Any) -> None:
    family = pb_utils.MetricFamily(name="seen", description="", kind=pb_utils.MetricFamily.COUNTER)
    metric = family.Metric(labels={"model": "m"})
    metric.increment(2)
    metric.increment(1)
    assert metric.value() == 3
    assert "'seen' is kept in the model's process, and not exported" in capfd.readouterr().err


def test_a_logger_writes_a_line_a_message_and_leaves_verbose_ones_out(capfd: Any) -> None:
    logger = pb_utils.Logger
    logger.log_info("one")
    logger.log_warn("two")
    logger.log("three", logger.ERROR)
    logger.log_verbose("four")
    assert capfd.readouterr().err.splitlines() == ["one", "warning: two", "error: three"]
