"""The module that a `TritonPythonModel` imports, `triton_python_backend_utils`: Triton's interface, over our hosts.

Owns: what such a model sees: tensors, requests, responses, errors, the configuration that it completes. A host puts it
among its modules by that name, and nothing else imports it so; python_backend.py runs the model. Names, signatures and
the words of errors are those of Triton's python_backend (README.md, and `pb_stub.cc` for the words), so
models and their callers need no change. Thread: a host's.
"""

from __future__ import annotations

import json
import logging
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from edge_runtime.errors import EdgeRuntimeError, RequestError

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_CPU_PINNED = 1
TRITONSERVER_MEMORY_GPU = 2

_KINDS: tuple[tuple[str, Any], ...] = (
    ("TYPE_BOOL", np.bool_),
    ("TYPE_UINT8", np.uint8),
    ("TYPE_UINT16", np.uint16),
    ("TYPE_UINT32", np.uint32),
    ("TYPE_UINT64", np.uint64),
    ("TYPE_INT8", np.int8),
    ("TYPE_INT16", np.int16),
    ("TYPE_INT32", np.int32),
    ("TYPE_INT64", np.int64),
    ("TYPE_FP16", np.float16),
    ("TYPE_FP32", np.float32),
    ("TYPE_FP64", np.float64),
    ("TYPE_STRING", np.object_),
)
"""Triton's datatypes from 1 on, in the order of TRITONSERVER_DataType, as numpy has them."""

TRITON_STRING_TO_NUMPY = {**dict(_KINDS), "TYPE_BOOL": bool}

_NUMBERS = {np.dtype(kind): number for number, (_, kind) in enumerate(_KINDS, 1)}

_CPU = (1, 0)
"""DLPack's device of the CPU."""


class TritonModelException(Exception):
    """An error of the model itself, or of how it uses this module."""

    def __init__(self, msg: str | None = None) -> None:
        super().__init__(msg)
        self._msg = msg

    def message(self) -> str | None:
        """The words."""
        return self._msg


class TritonError:
    """The error of one request: words, and one of the codes below."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    __slots__ = ("_code", "_message")

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message = message
        self._code = code

    def message(self) -> str:
        """The words."""
        return self._message

    def code(self) -> int:
        """The code."""
        return self._code

    def __str__(self) -> str:
        return str(self._message)


class Tensor:
    """A named array, always in the CPU's memory."""

    __slots__ = ("array", "own_name")

    def __init__(self, name: str, numpy_array: Any) -> None:
        """Raises TritonModelException: numpy has no such tensor for Triton."""
        if not isinstance(numpy_array, np.ndarray):
            raise TritonModelException(f"Tensor {name!r} is made of a numpy array; got {type(numpy_array).__name__}")
        if numpy_array.dtype.kind in "UV":
            raise TritonModelException(
                "Tensor dtype used for numpy_array is not support by Python backend. Please use np.object_ instead."
            )
        self.own_name = name
        self.array = numpy_array

    @classmethod
    def checked(cls, name: str, array: Any) -> Tensor:
        """A tensor of an array of which all is known."""
        made = cls.__new__(cls)
        made.own_name, made.array = name, array
        return made

    def name(self) -> str:
        """Its name."""
        return self.own_name

    def as_numpy(self) -> Any:
        """The array itself."""
        return self.array

    def shape(self) -> list[int]:
        """Its shape."""
        return list(self.array.shape)

    def triton_dtype(self) -> int | None:
        """The number of its datatype in Triton."""
        return numpy_to_triton_type(self.array.dtype)

    def is_cpu(self) -> bool:
        """True: no tensor is given or taken on a GPU."""
        return True

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """A tensor of another library's, in place where it can be. Raises TritonModelException."""
        source = tensor if hasattr(tensor, "__dlpack__") else _Capsule(tensor)
        if source.__dlpack_device__()[0] != _CPU[0]:
            raise TritonModelException(f"tensor {name!r} is not in the CPU's memory; move it there first")
        try:
            array = np.from_dlpack(source)
        except (BufferError, RuntimeError, TypeError) as error:
            raise TritonModelException(f"tensor {name!r} cannot be read by DLPack: {error}") from error
        if not array.flags.c_contiguous:
            raise TritonModelException(
                "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are "
                "supported."
            )
        return Tensor(name, array)

    def to_dlpack(self) -> Any:
        """A DLPack capsule of the same memory. Raises TritonModelException."""
        return self.__dlpack__()

    def __dlpack__(self, stream: Any = None, **_: Any) -> Any:
        del stream
        if self.array.dtype.kind in "OS":
            raise TritonModelException("DLPack does not have support for string tensors.")
        array = self.array if self.array.flags.writeable else self.array.copy()
        return array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU


class _Capsule:
    """A bare capsule, which says nothing of its device; numpy reads only the CPU's."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU


class PreferredMemory:
    """Where a caller wants the outputs of another model. They come in the CPU's memory all the same."""

    TRITONSERVER_MEMORY_CPU, TRITONSERVER_MEMORY_GPU = TRITONSERVER_MEMORY_CPU, TRITONSERVER_MEMORY_GPU

    def __init__(self, preferred_memory_type: int = TRITONSERVER_MEMORY_CPU, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceTrace:
    """A trace of Triton's; none is written here, so it is empty."""


class InferenceResponse:
    """The answer to one request: tensors, or an error."""

    __slots__ = ("details", "failure", "tensors")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises TritonModelException: it is made of something else."""
        if error is None:
            for each in output_tensors:
                if type(each) is not Tensor and not isinstance(each, Tensor):
                    raise TritonModelException(f"output_tensors holds {type(each).__name__}; wanted pb_utils.Tensor")
        elif not isinstance(error, TritonError):
            raise TritonModelException(f"error is {type(error).__name__}; wanted pb_utils.TritonError")
        self.tensors = output_tensors
        self.failure = error
        self.details = parameters

    def output_tensors(self) -> list[Tensor]:
        """Its tensors."""
        return list(self.tensors)

    def has_error(self) -> bool:
        """Whether it is an error."""
        return self.failure is not None

    def error(self) -> TritonError | None:
        """The error, or None."""
        return self.failure

    def parameters(self) -> str:
        """Its parameters, as JSON."""
        return json.dumps(dict(self.details or {}))


class OpenRequests(Protocol):
    """The requests of a decoupled run, by their places in it. Thread: any of the model's."""

    def send(self, index: int, response: InferenceResponse | None, *, is_last: bool) -> None:
        """Send a response to a request, or none. Raises TritonModelException: its last one was sent."""
        ...

    def is_cancelled(self, index: int) -> bool:
        """Whether no caller waits for another response to a request."""
        ...


class InferenceResponseSender:
    """Sends the responses to one request, as many as there are. Thread: any of the model's."""

    def __init__(self, requests: OpenRequests, index: int) -> None:
        """index: the place of its request."""
        self._requests = requests
        self._index = index

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send one response, or none; with TRITONSERVER_RESPONSE_COMPLETE_FINAL it was the last.

        Raises TritonModelException.
        """
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException(
                "Unable to send response. Unsupported flag provided: only TRITONSERVER_RESPONSE_COMPLETE_FINAL is"
            )
        if response is None and not flags:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        self._requests.send(self._index, response, is_last=bool(flags))

    def is_cancelled(self) -> bool:
        """Whether no caller waits for a response any more."""
        return self._requests.is_cancelled(self._index)


class InferenceRequest:
    """A request: one that this model is to answer, or one that it makes of another model (`exec`, `async_exec`)."""

    # Most requests have nothing but tensors: `plain` sets no more than that.
    _request_id: str = ""
    _correlation_id: int | str = 0
    _timeout = _priority = own_flags = 0
    _preferred_memory: PreferredMemory | None = None
    _trace: InferenceTrace | None = None
    details: Mapping[str, str | int | bool | float] | None = None
    model, version = "", -1
    sender: InferenceResponseSender | None = None
    is_cancelled_by: tuple[Any, int] | None = None

    def __init__(  # noqa: PLR0917 (Triton's order)
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, str | int | bool | float] | None = None,
    ) -> None:
        """timeout: microseconds, 0 for none. model_version: -1 for the one that is served."""
        self._request_id = request_id
        self._correlation_id = correlation_id
        self.tensors = inputs
        self.wanted = requested_output_names
        self.model = model_name
        self.version = model_version
        self.own_flags = flags
        self._timeout = timeout
        self._preferred_memory = preferred_memory
        self._trace = trace
        self.details = parameters

    @classmethod
    def plain(cls, tensors: Sequence[Tensor], outputs: Sequence[str], is_cancelled_by: tuple[Any, int]) -> Any:
        """A request of a model's callers that is nothing but these tensors, and asks for all outputs."""
        made = cls.__new__(cls)
        made.tensors, made.wanted, made.is_cancelled_by = tensors, outputs, is_cancelled_by
        return made

    def inputs(self) -> list[Tensor]:
        """Its input tensors."""
        return list(self.tensors)

    def request_id(self) -> str:
        """The caller's name for it, "" for none."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """The id of its sequence; 0: it belongs to none."""
        return self._correlation_id

    def requested_output_names(self) -> list[str]:
        """Names of the outputs that it asks for."""
        return list(self.wanted)

    def parameters(self) -> str:
        """Its parameters, as JSON."""
        return json.dumps(dict(self.details or {}))

    def flags(self) -> int:
        """TRITONSERVER_REQUEST_FLAG_SEQUENCE_START and _END, of its sequence."""
        return self.own_flags

    def set_flags(self, flags: int) -> None:
        """Set flags of sequences, for a request of another model."""
        self.own_flags = flags

    def timeout(self) -> int:
        """Its timeout, in microseconds; 0: it has none."""
        return self._timeout

    def priority(self) -> int:
        """Its priority, 0 for the model's own."""
        return self._priority

    def set_priority(self, priority: int) -> None:
        """Set its priority."""
        self._priority = priority

    def preferred_memory(self) -> PreferredMemory:
        """Where its outputs are wanted."""
        return self._preferred_memory or PreferredMemory()

    def trace(self) -> InferenceTrace:
        """Its trace, which is empty."""
        return self._trace or InferenceTrace()

    def is_cancelled(self) -> bool:
        """Whether no caller waits for its answer any more."""
        if self.is_cancelled_by is None:
            return False
        run, index = self.is_cancelled_by
        return bool(run.is_cancelled(index))

    def get_response_sender(self) -> InferenceResponseSender:
        """Who sends its responses. Raises TritonModelException: the model is not decoupled."""
        if self.sender is None:
            raise TritonModelException(
                "'get_response_sender' function must be called only when the model is using the decoupled transaction "
                "policy."
            )
        return self.sender

    def set_release_flags(self, flags: int) -> None:
        """Take the request as answered (ALL). Raises TritonModelException for RESCHEDULE, which is not served."""
        if flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE:
            raise TritonModelException(
                "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE is for iterative sequences, which are not served here; "
                "answer by a decoupled sender, or in one response"
            )

    def exec(self, decoupled: bool = False) -> Any:
        """Ask the other model, and wait: its response, or with `decoupled` an iterator of its responses."""
        response = _asked(self)
        return iter(ResponseIterator(response)) if decoupled else response

    def async_exec(self, decoupled: bool = False) -> Any:
        """The same, as an awaitable of the running event loop."""
        import asyncio
        import contextvars

        run = contextvars.copy_context().run
        return asyncio.get_running_loop().run_in_executor(None, run, self.exec, decoupled)


class ResponseIterator:
    """The responses of another model, of which there is one."""

    def __init__(self, response: InferenceResponse) -> None:
        self._responses = iter((response,))

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        return next(self._responses)

    def cancel(self) -> None:
        """Do nothing: the response is there."""


CallOther = Callable[[InferenceRequest, dict[str, Any]], Mapping[str, Any]]
"""Asks another model: the request, its arrays by name; returns its outputs by name. Raises EdgeRuntimeError."""

_call_other: CallOther | None = None


def call_by(call: CallOther) -> None:
    """Ask other models by this. Called by the host, before the model is made."""
    global _call_other  # noqa: PLW0603 (the module is the interface: a model makes requests of it, not of an object)
    _call_other = call


def _asked(request: InferenceRequest) -> InferenceResponse:
    """The other model's answer, or the error of the call as a response. Raises TritonModelException."""
    if not request.model:
        raise TritonModelException("model_name: wanted the name of a served model")
    if _call_other is None:
        raise TritonModelException("BLS is only supported during the 'execute' function.")
    try:
        outputs = _call_other(request, {each.name(): each.as_numpy() for each in request.tensors})
    except EdgeRuntimeError as error:
        return InferenceResponse(error=TritonError(error.message, CODES_BY_ERROR.get(error.code, _code_of(error))))
    return InferenceResponse([Tensor(name, array) for name, array in outputs.items()])


CODES_BY_ERROR = {
    "model_not_found": TritonError.NOT_FOUND,
    "unsupported": TritonError.UNSUPPORTED,
    "cancelled": TritonError.CANCELLED,
    "run_failed": TritonError.INTERNAL,
}
"""Triton's code of an error's; of the others see `_code_of`."""


def _code_of(error: EdgeRuntimeError) -> int:
    if isinstance(error, RequestError):
        return TritonError.INVALID_ARG
    return TritonError.UNAVAILABLE if error.retryable else TritonError.INTERNAL


# ---- the model's configuration --------------------------------------------------------------------------------------


class ModelConfig:
    """The configuration that `auto_complete_config` completes."""

    def __init__(self, model_config: str) -> None:
        """model_config: JSON."""
        self._config: dict[str, Any] = json.loads(model_config)
        self._where = f"in auto-complete-config function for model '{self._config['name']}'"

    def as_dict(self) -> dict[str, Any]:
        """The configuration as it is now."""
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set it. Raises ValueError: the configuration says a larger one."""
        said = self._config["max_batch_size"]
        if said > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {said}, but {self._where} specified max_batch_size "
                f"{max_batch_size}"
            )
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Have requests run together. Raises ValueError: the configuration has another scheduler."""
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{other}', but auto-complete-config function for "
                    f"model '{self._config['name']}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._config.setdefault("dynamic_batching", {})

    def add_input(self, input: dict[str, Any]) -> None:  # noqa: A002 (Triton's name)
        """Add an input: name, data_type, dims, optional. Raises ValueError: the configuration says otherwise."""
        self._add("input", input, ("name", "data_type", "dims", "optional"))

    def add_output(self, output: dict[str, Any]) -> None:
        """Add an output: name, data_type, dims. Raises ValueError: the configuration says otherwise."""
        self._add("output", output, ("name", "data_type", "dims"))

    def set_model_transaction_policy(self, transaction_policy_dict: dict[str, Any]) -> None:
        """Set `decoupled`. Raises ValueError: the configuration says otherwise."""
        if set(transaction_policy_dict) - {"decoupled"}:
            raise ValueError(f"model transaction property {self._where} contains property other than 'decoupled'.")
        policy = self._config.setdefault("model_transaction_policy", {})
        for wanted in transaction_policy_dict.values():
            if policy.setdefault("decoupled", wanted) != wanted:
                raise ValueError(
                    f"trying to change decoupled property in auto-complete-config for model '{self._config['name']}', "
                    f"which is already set to '{policy['decoupled']}'."
                )

    def _add(self, kind: str, tensor: dict[str, Any], properties: tuple[str, ...]) -> None:
        name, model = tensor.get("name"), self._config["name"]
        if set(tensor) - set(properties):
            wanted = f"{', '.join(map(repr, properties[:-1]))} and {properties[-1]!r}"
            raise ValueError(f"{kind} '{name}' {self._where} contains property other than {wanted}.")
        for wanted in ("name", "data_type", "dims"):
            if wanted not in tensor:
                said = f"{kind} '{name}'" if name is not None else kind
                raise ValueError(f"{said} {self._where} is missing '{wanted}' property.")
        for known in self._config[kind]:
            if known["name"] != name:
                continue
            if known.get("data_type", "TYPE_INVALID") not in ("TYPE_INVALID", tensor["data_type"]):
                raise ValueError(
                    f"unable to load model '{model}', configuration expects datatype {known['data_type']} for {kind} "
                    f"'{name}', model provides {tensor['data_type']}"
                )
            for key in ("dims", "optional"):
                if key in tensor and known.get(key) and known[key] != tensor[key]:
                    raise ValueError(
                        f"model '{model}', tensor '{name}': the model expects {key} {tensor[key]} but the model "
                        f"configuration specifies {key} {known[key]}"
                    )
            known.update(tensor)
            return
        self._config[kind].append(tensor)


# ---- functions ------------------------------------------------------------------------------------------------------


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The input of that name, or None."""
    for each in inference_request.tensors:
        if each.own_name == name:
            return each
    return None


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The output of that name, or None."""
    for each in inference_response.tensors:
        if each.own_name == name:
            return each
    return None


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return a configuration's entry for an input, or None."""
    return next((each for each in model_config.get("input", ()) if each["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return a configuration's entry for an output, or None."""
    return next((each for each in model_config.get("output", ()) if each["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Whether a configuration makes its model decoupled."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """The numpy type of "TYPE_FP32" and the like. Raises KeyError."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """The numpy type of a datatype's number in Triton, or None."""
    return _KINDS[data_type - 1][1] if 0 < data_type <= len(_KINDS) else None


def numpy_to_triton_type(data_type: Any) -> int | None:
    """The number of a numpy type in Triton, or None."""
    dtype = np.dtype(data_type)
    return _NUMBERS[np.dtype(np.object_)] if dtype.kind == "S" else _NUMBERS.get(dtype)


def serialize_byte_tensor(input_tensor: Any) -> Any:
    """The elements of a tensor of text as bytes, each with its length before it; () for none, None for numbers."""
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    parts: list[bytes] = []
    for each in input_tensor.reshape(-1):
        text = each if isinstance(each, bytes) else str(each).encode()
        parts += (struct.pack("<I", len(text)), text)
    return b"".join(parts)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Any:
    """The elements that `serialize_byte_tensor` wrote, as an object array of one dimension."""
    found: list[bytes] = []
    offset = 0
    while offset < len(encoded_tensor):
        (length,) = struct.unpack_from("<I", encoded_tensor, offset)
        found.append(bytes(encoded_tensor[offset + 4 : offset + 4 + length]))
        offset += 4 + length
    return np.array(found, np.object_)


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Raises TritonModelException: a model here asks others, and does not look after them."""
    raise TritonModelException(_NO_CONTROL.format("is_model_ready", model_name, model_version and f" {model_version}"))


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Raises TritonModelException, as `is_model_ready`."""
    del config, files
    raise TritonModelException(_NO_CONTROL.format("load_model", model_name, ""))


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Raises TritonModelException, as `is_model_ready`."""
    del unload_dependents
    raise TritonModelException(_NO_CONTROL.format("unload_model", model_name, ""))


_NO_CONTROL = (
    "{}: a model loads and unloads no others here; got {!r}{}. Served models are loaded by the daemon; "
    "'InferenceRequest.exec' says in its error when one is not ready"
)


# ---- log and metrics ------------------------------------------------------------------------------------------------


class TritonLogger:
    """Writes to the daemon's log, a line each; verbose lines go to `logging`, which leaves them out by default."""

    INFO, WARNING, ERROR, VERBOSE = range(4)

    @staticmethod
    def log(message: str, level: int = INFO) -> None:
        """Write a line of this level."""
        (TritonLogger.log_info, TritonLogger.log_warn, TritonLogger.log_error, TritonLogger.log_verbose)[level](message)

    @staticmethod
    def log_info(message: str) -> None:
        """Write a line."""
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()

    @staticmethod
    def log_warn(message: str) -> None:
        """Write a warning."""
        TritonLogger.log_info(f"warning: {message}")

    @staticmethod
    def log_error(message: str) -> None:
        """Write an error."""
        TritonLogger.log_info(f"error: {message}")

    @staticmethod
    def log_verbose(message: str) -> None:
        """Hand a line to `logging`, as DEBUG."""
        logging.getLogger("triton").debug("%s", message)


Logger = TritonLogger


class Metric:
    """A number that the model keeps. It stays in the model's process: see MetricFamily."""

    def __init__(self, labels: Mapping[str, str] | None = None) -> None:
        self.labels = dict(labels or {})
        self._value = 0.0

    def increment(self, value: float) -> None:
        """Add."""
        self._value += value

    def set(self, value: float) -> None:
        """Replace."""
        self._value = value

    def observe(self, value: float) -> None:
        """Add, as the sum of a histogram."""
        self._value += value

    def value(self) -> float:
        """The number as it is now."""
        return self._value


class MetricFamily:
    """Metrics of one name. They count in the model's process, and are not among the daemon's; its log says so once."""

    COUNTER, GAUGE, HISTOGRAM = range(3)

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.name, self.description, self.kind = name, description, kind
        TritonLogger.log_warn(
            f"the custom metric {name!r} is kept in the model's process, and not exported by the daemon"
        )

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:  # noqa: N802 (Triton's name)
        """A metric of it with these labels."""
        del buckets
        return Metric(labels)
