"""TensorFlow Serving's paths on the HTTP door, and those of KServe's first protocol: which they are, what answers each.

Owns: the calls, and how models and their signatures are described. message.py beside it knows what bodies mean.
Thread: the door's; `read` any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edge_runtime.daemon.doors import DoorContext
from edge_runtime.doors.http.answer import error_frames, json_response
from edge_runtime.doors.http.call import INFER, HttpCall
from edge_runtime.doors.http.connection import Frames
from edge_runtime.doors.http.head import HttpHead
from edge_runtime.doors.http.protocols import CallRequests, paths
from edge_runtime.doors.open_inference.operations import Caller, OpenInference
from edge_runtime.doors.open_inference.request import version_number
from edge_runtime.errors import DecodeFailed, EdgeRuntimeError, ModelNotFound, Unsupported
from edge_runtime.models.model_table import VersionState
from edge_runtime.models.servable import Servable
from edge_runtime.request.operation_handlers import Done
from edge_runtime.request.replies import Encoding
from edge_runtime.request.request import Request
from edge_runtime.tensorflow_serving.message import SIGNATURE, PredictBody, prediction_requests, read_predict_body
from edge_runtime.wire import codec

MODELS, STATUS, SIGNATURES, OTHER_METHOD, LIVE = (
    *("v1_models", "v1_status", "v1_signatures", "v1_other_method", "v1_live"),
)

_MODEL = r"/v1/models/(?P<name>[^/:]+)(?:/versions/(?P<version>[0-9]+)|/labels/(?P<label>[^/:]+))?"

STATES = {
    VersionState.READY.value: "AVAILABLE",
    VersionState.ON_DEMAND.value: "AVAILABLE",
    VersionState.LOADING.value: "LOADING",
    **{state.value: "LOADING" for state in VersionState if state.is_being_made},
    VersionState.UNLOADING.value: "UNLOADING",
}
"""TensorFlow Serving's names of states; all others are END."""

LISTED = (VersionState.READY.value, VersionState.ON_DEMAND.value)
"""The states of versions that answer."""

DTYPES = {
    "FP32": "DT_FLOAT",
    "FP64": "DT_DOUBLE",
    "FP16": "DT_HALF",
    "BF16": "DT_BFLOAT16",
    "BOOL": "DT_BOOL",
    "BYTES": "DT_STRING",
    **{f"{sign}INT{bits}": f"DT_{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)},
}
"""TensorFlow's names of datatypes."""


def open_protocol(context: DoorContext, protocol: OpenInference) -> TensorFlowServing:
    """Return the protocol that answers TensorFlow Serving's paths."""
    del context
    return TensorFlowServing(protocol)


class TensorFlowServing:
    """TensorFlow Serving's calls, as requests for inference and operations of the one table."""

    paths = paths(
        (_MODEL + ":predict", {"POST": INFER}),
        (_MODEL + ":(?P<method>classify|regress)", {"POST": OTHER_METHOD}),
        (_MODEL + "/metadata", {"GET": SIGNATURES}),
        (_MODEL, {"GET": STATUS}),
        ("/v1/models", {"GET": MODELS}),
        ("/", {"GET": LIVE}),
    )
    open_calls = frozenset((LIVE,))

    def __init__(self, protocol: OpenInference) -> None:
        self._protocol = protocol

    def encoding(self, call: HttpCall) -> Encoding:
        """Return the encoding that words errors as TensorFlow Serving does."""
        del call
        return TensorFlowErrors()

    def understand(self, head: HttpHead, call: HttpCall) -> None:
        """Refuse what no model here has. Raises DecodeFailed, Unsupported."""
        del head
        call.ignores_body = call.name != INFER
        version_number(call.values.get("version"))
        if "label" in call.values:
            raise DecodeFailed(
                f"Unrecognized servable version label: {codec.short(call.values['label'])}; versions here have numbers "
                "alone: .../versions/2, or neither for the newest"
            )
        if call.name == OTHER_METHOD:
            raise Unsupported(
                f"{call.values['method']} is not offered: it takes tf.Example, which no model here reads; use :predict"
            )

    def claims(self, call: HttpCall) -> bool:
        """No: another protocol may claim a model of its own kind."""
        del call
        return False

    def reads_long(self, body: bytes | memoryview, head: HttpHead) -> bool:
        """Yes: its bodies are JSON."""
        del body, head
        return True

    def read(self, body: bytes | memoryview, head: HttpHead, call: HttpCall) -> PredictBody:
        """Read the fields of a body. Raises DecodeFailed."""
        del head, call
        return read_predict_body(bytes(body))

    def model_of(self, message: PredictBody, call: HttpCall) -> tuple[str, int | None]:
        """Return the model of the path."""
        del message
        return call.values["name"], call.version

    def requests_of(self, servable: Servable, message: PredictBody, head: HttpHead, call: HttpCall) -> CallRequests:
        """Return the requests that a body means. Raises EdgeRuntimeError."""
        del head
        return prediction_requests(servable, message, call)

    def call(self, call: HttpCall, fields: Mapping[str, Any], caller: Caller, reply: Done) -> None:
        """Tell of models. Raises EdgeRuntimeError."""
        del fields
        values = call.values
        if call.name == LIVE:
            reply(({"status": "alive"}, 200))  # as KServe's first protocol has it
        elif call.name == MODELS:
            self._protocol.operate("models", {}, caller, reply, lambda entries: ({"models": _names(entries)}, 200))
        elif call.name == STATUS:
            self._protocol.operate("models", {}, caller, reply, lambda entries: _status(entries, values))
        else:
            self._protocol.operate("metadata", values, caller, reply, lambda described: (_signatures(described), 200))

    def close(self) -> None:
        """Nothing: it keeps nothing."""


class TensorFlowErrors:
    """Writes errors, and results that are JSON with a status."""

    def answer(self, request: Request, request_id: Any) -> Frames:
        """Nothing that runs has this encoding."""
        raise NotImplementedError

    def refusal(self, error: EdgeRuntimeError, request_id: Any) -> Frames:  # noqa: ARG002 (errors have no id)
        """An error."""
        return error_frames(error, fields={"error": error.message})

    def result(self, result: Any, request_id: Any) -> Frames:  # noqa: ARG002 (as above)
        """The JSON of another call, and its status."""
        return json_response(*result)


# ---- private --------------------------------------------------------------------------------------------------------


def _names(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({each["name"] for each in entries if each["version"] is not None and each["state"] in LISTED})


def _status(entries: Sequence[Mapping[str, Any]], values: Mapping[str, str]) -> Any:
    """The state of each version, the newest first; beside them KServe's `name` and `ready`."""
    name, number = values["name"], version_number(values.get("version"))
    found = [each for each in entries if each["name"] == name and each["version"] is not None]
    found = [each for each in found if number in (None, each["version"])]
    if not found:
        return ModelNotFound(f"Could not find any versions of model {codec.short(name)}")
    told = [_version_status(each) for each in sorted(found, key=lambda each: -each["version"])]
    return {
        "model_version_status": told,
        "name": name,
        "ready": any(each["state"] == "AVAILABLE" for each in told),
    }, 200


def _version_status(entry: Mapping[str, Any]) -> dict[str, Any]:
    has_failed = entry["state"] == VersionState.FAILED.value
    return {
        "version": str(entry["version"]),
        "state": STATES.get(entry["state"], "END"),
        "status": {
            "error_code": "UNKNOWN" if has_failed else "OK",
            "error_message": entry["reason"] if has_failed else "",
        },
    }


def _signatures(described: Mapping[str, Any]) -> dict[str, Any]:
    """The one signature of a model, as a SavedModel's is told."""
    signature = {
        "inputs": {each["name"]: _tensor_fields(each) for each in described["inputs"]},
        "outputs": {each["name"]: _tensor_fields(each) for each in described["outputs"]},
        "method_name": "tensorflow/serving/predict",
        "defaults": {},
    }
    return {
        "model_spec": {"name": described["name"], "signature_name": "", "version": str(described["version"])},
        "metadata": {"signature_def": {"signature_def": {SIGNATURE: signature}}},
    }


def _tensor_fields(tensor: Mapping[str, Any]) -> dict[str, Any]:
    dims = [{"size": str(length), "name": ""} for length in tensor["shape"]]
    return {
        "dtype": DTYPES.get(tensor["datatype"], "DT_INVALID"),
        "tensor_shape": {"dim": dims, "unknown_rank": False},
        "name": f"{tensor['name']}:0",
    }
