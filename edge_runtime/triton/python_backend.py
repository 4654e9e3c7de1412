"""Runs a `TritonPythonModel`: Triton's python backend, in a host of ours.

Owns: what Triton does around such a class: its configuration and arguments, requests made of a run's inputs, and its
responses checked and handed on. interface.py is what the class itself sees. python_backend.py imports
`model.py` and hands it over; hosts/child.py hands the runs.

`execute` gets every request of a run by itself. Responses whose tensors join along axis 0 go back joined; any other
answer (an error, other rows, another shape) goes back request by request, and so does each response of a decoupled
model. The words of errors are Triton's (`pb_stub.cc`).
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.backends.base import Fault, LoadOptions, RequestsRun
from edge_runtime.backends.python import BACKEND
from edge_runtime.backends.python.steps import error_words
from edge_runtime.errors import LoadFailed, Refused, RunFailed, error_from_wire
from edge_runtime.hosts.messages import RequestLine
from edge_runtime.messages import SEQUENCE_END, SEQUENCE_ID, SEQUENCE_START, RequestHeader, TensorHeader
from edge_runtime.model_spec import ByRequest, ModelSpec, TensorSpec
from edge_runtime.tensors import (
    DATATYPES,
    Array,
    Tensors,
    as_empty_datatype,
    as_tensors,
    datatype_name,
    values_to_bits,
)
from edge_runtime.triton import CONFIG_OPTION
from edge_runtime.triton import interface as triton

CLASS = "TritonPythonModel"

MOST_STREAMS = 64
"""Runs of a decoupled model that may be on at once, where as many cores are lent to it."""

_MODULE = "triton_python_backend_utils"

_CODES = {
    triton.TritonError.NOT_FOUND: "model_not_found",
    triton.TritonError.INVALID_ARG: "tensor_mismatch",
    triton.TritonError.ALREADY_EXISTS: "tensor_mismatch",
    triton.TritonError.UNAVAILABLE: "not_ready",
    triton.TritonError.UNSUPPORTED: "unsupported",
    triton.TritonError.CANCELLED: "cancelled",
}
"""The code of ours that a caller gets for one of Triton's; run_failed for the others."""

_run: ContextVar[RequestsRun | None] = ContextVar("triton_run", default=None)


def is_triton_model(artifact: Path) -> bool:
    """Whether a `model.py` is Triton's by what it names. Raises OSError."""
    return CLASS.encode() in artifact.read_bytes()


def import_triton_model(artifact: Path) -> types.ModuleType:
    """Import it as Triton does: from a package named as its version's folder, with that folder on the path."""
    folder = artifact.parent
    sys.modules.setdefault(_MODULE, triton)
    sys.path.insert(0, str(folder))
    package = types.ModuleType(folder.name)
    package.__path__ = [str(folder)]
    sys.modules[folder.name] = package
    import importlib

    return importlib.import_module(f"{folder.name}.{artifact.stem}")


def load_triton_model(module: types.ModuleType, artifact: Path, options: LoadOptions) -> TritonInstance:
    """Complete the configuration, and make and initialise the model. Raises LoadFailed, and what the model raises."""
    kind = getattr(module, CLASS, None)
    if kind is None or not callable(getattr(kind, "execute", None)):
        raise LoadFailed(f"Python model {artifact} does not implement `execute` method of {CLASS}.")
    config = _completed(kind, _config(artifact, options))
    environment = config.get("parameters", {}).get("EXECUTION_ENV_PATH")
    if environment is not None:
        raise LoadFailed(
            "EXECUTION_ENV_PATH is not served: models run with the daemon's Python and its packages; install what this "
            "model imports there, and leave the parameter out"
        )
    ports = _Ports(config)
    triton.call_by(_call_other)
    model = kind()
    if hasattr(model, "initialize"):
        model.initialize(_arguments(config, artifact))
    return TritonInstance(model, config["name"], ports, options.precision or "f32", artifact.parent)


class TritonInstance:
    """A `TritonPythonModel` that was initialised. One run at a time, but for a decoupled model."""

    backend = BACKEND.name
    device = "CPU"

    def __init__(self, model: Any, name: str, ports: _Ports, precision: str, folder: Path) -> None:
        self.spec = ports.spec
        self.precision = precision
        self.memory_bytes = 0
        self._folder = folder
        self.concurrency = MOST_STREAMS if ports.rules.streams else 1
        self._model: Any | None = model
        self._name = name
        self._ports = ports
        self._turn = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, inputs: Tensors, outputs: Sequence[str] | None = None) -> list[Array]:
        """Run one request that no door asked for, such as a warm-up. Raises RunFailed."""
        lone = _LoneRun()
        found = self.run_requests(inputs, lone)
        if found is None:
            if lone.fault is not None:
                raise error_from_wire(*lone.fault)
            if lone.outputs is None:
                raise RunFailed(f"model '{self._name}' sent no response")
            found = [each if each is not None else np.empty(0) for each in lone.outputs]
        by_name = {spec.name: array for spec, array in zip(self.spec.outputs, found, strict=True)}
        try:
            return [by_name[name] for name in (by_name if outputs is None else outputs)]
        except KeyError as error:
            raise RunFailed(f"the model has no output {error}") from error

    def run_requests(self, inputs: Mapping[str, Array], run: RequestsRun) -> list[Array] | None:
        """Execute once; returns the outputs of all, joined along axis 0, or None where each request was answered alone.

        inputs: of all requests, joined. Raises RunFailed, Refused: no request was answered.
        """
        if self._model is None:
            raise RunFailed("the instance is closed")
        token = _run.set(run)
        try:
            if self._ports.rules.streams:
                self._stream(_Streams(self._ports.requests(inputs, run), run, self._ports))
                return None
            return self._answer(self._ports.requests(inputs, run), run)
        except Refused:
            raise
        except Exception as error:
            traceback.print_exc()
            raise RunFailed(self._failed(error)) from error
        finally:
            _run.reset(token)

    def bind(self, max_rows: int) -> None:
        """Return None: the model makes its own arrays."""

    def attach(self, call: object) -> None:
        """Nothing: it calls others by the run that is on."""

    def close(self) -> None:
        """Let the model finalise. Raises nothing."""
        model, self._model = self._model, None
        if model is not None and hasattr(model, "finalize"):
            try:
                model.finalize()
            except Exception:  # noqa: BLE001 (it ends anyhow, and its log says why)
                traceback.print_exc()

    def _answer(self, requests: list[triton.InferenceRequest], run: RequestsRun) -> list[Array] | None:
        """Execute, and return what joins, or answer each request by itself."""
        assert self._model is not None
        responses = self._model.execute(requests)
        if not isinstance(responses, list) and asyncio.iscoroutine(responses):
            responses = asyncio.run(responses)
        if not isinstance(responses, list):
            raise _wrong(f"Expected a list in the execute return, found type '{type(responses)}'.")
        if len(responses) != len(requests):
            raise _wrong(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(responses)}\n"
            )
        for response in responses:
            if not isinstance(response, triton.InferenceResponse):
                raise _wrong(
                    "Expected an 'InferenceResponse' object in the execute function return list, found type "
                    f"'{type(response)}'."
                )
        joined = self._ports.joined(responses, run.rows)
        if joined is None:
            for index, (request, response) in enumerate(zip(requests, responses, strict=True)):
                outputs, fault = self._ports.outputs(request, response)
                run.respond(index, outputs, fault, is_last=True)
        return joined

    def _stream(self, streams: _Streams) -> None:
        """Execute a decoupled model, and wait until each request has its last response."""
        assert self._model is not None
        try:
            with self._turn:
                returned = self._model.execute(streams.take_requests())
                if asyncio.iscoroutine(returned):
                    if self._loop is None:
                        self._loop = _new_loop()
                    future = asyncio.run_coroutine_threadsafe(returned, self._loop)
                else:
                    future = None
            if future is not None:
                returned = future.result()
            if returned is not None:
                raise _wrong(
                    f"Python model '{self._name}_0_0' is using the decoupled mode and the execute function must return "
                    "None."
                )
        except Exception as error:  # noqa: BLE001 (these requests' answer: some may have responses already)
            traceback.print_exc()
            streams.fail(self._failed(error))
            return
        streams.wait()

    def _failed(self, error: Exception) -> str:
        words = error_words(error, self._folder)
        return f"Failed to process the request(s) for model instance '{self._name}_0_0', message: {words}"[:1500]


class _Streams:
    """The requests of a decoupled run, and which still wait for a last response. OpenRequests. Thread: the model's."""

    def __init__(self, requests: list[triton.InferenceRequest], run: RequestsRun, ports: _Ports) -> None:
        self._run = run
        self._ports = ports
        self._changed = threading.Condition()
        self._open = set(range(len(requests)))
        self._forgotten: set[int] = set()
        self._requests: list[triton.InferenceRequest] = requests
        self._asked = [request.requested_output_names() for request in requests]
        for index, request in enumerate(requests):
            request.is_cancelled_by = self, index
            request.sender = triton.InferenceResponseSender(self, index)
            weakref.finalize(request.sender, self._let_go, index).atexit = False

    def take_requests(self) -> list[triton.InferenceRequest]:
        """The requests, which only the model holds from here on."""
        requests, self._requests = self._requests, []
        return requests

    def wait(self) -> None:
        """Wait for the last responses. A request whose sender the model let go gets an error."""
        with self._changed:
            self._changed.wait_for(lambda: self._open <= self._forgotten)
        self.fail("the model let go of its response sender without TRITONSERVER_RESPONSE_COMPLETE_FINAL")

    def fail(self, words: str) -> None:
        """Answer each request that is still open with an error."""
        with self._changed:
            left = sorted(self._open)
            self._open.clear()
        for index in left:
            self._run.respond(index, None, (RunFailed.code, words), is_last=True)

    def send(self, index: int, response: triton.InferenceResponse | None, *, is_last: bool) -> None:
        with self._changed:
            if index not in self._open:
                raise triton.TritonModelException("Unable to send response. Response sender has been closed.")
        outputs, fault = self._ports.selected(self._asked[index], response) if response is not None else (None, None)
        self._run.respond(index, outputs, fault, is_last=is_last)
        if is_last:
            with self._changed:
                self._open.discard(index)
                self._changed.notify_all()

    def is_cancelled(self, index: int) -> bool:
        """Whether no caller waits for another response to a request."""
        with self._changed:
            if index not in self._open:
                return True
        return self._run.is_cancelled(index)

    def _let_go(self, index: int) -> None:
        """No one holds the sender any more. Runs wherever it was collected, so it only says so."""
        with self._changed:
            self._forgotten.add(index)
            self._changed.notify_all()


class _Ports:
    """A model's inputs and outputs by its configuration, and how requests and responses are made of arrays.

    Raises LoadFailed: the configuration does not say what it must.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        name, most = config["name"], int(config["max_batch_size"])
        joins = most > 0 and ("dynamic_batching" in config or "sequence_batching" in config)
        self.rules = ByRequest(most, joins, triton.using_decoupled_model_transaction_policy(config))
        inputs, outputs = (_specs(config, key, most > 0) for key in ("input", "output"))
        if not inputs or not outputs:
            missing = "input" if not inputs else "output"
            raise LoadFailed(
                f"model '{name}' has no {missing}: write it into config.pbtxt, or add it in auto_complete_config with "
                f"add_{missing}"
            )
        self.spec = ModelSpec(inputs, outputs, by_request=self.rules)
        self._names = [spec.name for spec in outputs]
        self._inner = [_reshaped(each) for each in config["input"]]
        self._outer = [_reshaped(each) is not None for each in config["output"]]
        self._dtypes = [DATATYPES[spec.datatype].dtype for spec in outputs]
        self._is_text = [spec.datatype == "BYTES" for spec in outputs]

    def requests(self, inputs: Mapping[str, Array], run: RequestsRun) -> list[triton.InferenceRequest]:
        """Make the requests of a run."""
        rows, lines = run.rows or (0,), run.lines
        arrays = [
            array if inner is None else array.reshape((*array.shape[: self._batch_axes], *inner))
            for array, inner in zip(inputs.values(), self._inner, strict=True)
        ]
        names = list(inputs)
        if not lines:
            return self._cut_plain(names, arrays, rows, run)
        made: list[triton.InferenceRequest] = []
        start = 0
        for index, count in enumerate(rows):
            own = arrays if len(rows) == 1 else [array[start : start + count] for array in arrays]
            start += count
            line = lines[index]
            tensors = [
                triton.Tensor(name, array) for name, array in zip(names, own, strict=True) if name not in line.absent
            ]
            request = triton.InferenceRequest(
                line.id,
                line.sequence,
                tensors,
                line.outputs or self._names,
                flags=line.flags,
                timeout=line.timeout_us,
                parameters=line.parameters,
            )
            request.set_priority(line.priority)
            request.is_cancelled_by = run, index
            made.append(request)
        return made

    def _cut_plain(
        self, names: Sequence[str], arrays: Sequence[Array], rows: Sequence[int], run: RequestsRun
    ) -> list[triton.InferenceRequest]:
        """Requests with nothing but their tensors: they are many."""
        tensor, request, outputs = triton.Tensor.checked, triton.InferenceRequest.plain, self._names
        columns = [
            [tensor(name, part) for part in _cut(array, rows)] for name, array in zip(names, arrays, strict=True)
        ]
        return [request(own, outputs, (run, index)) for index, own in enumerate(zip(*columns, strict=True))]

    @property
    def _batch_axes(self) -> int:
        return 1 if self.rules.max_rows else 0

    def joined(self, responses: Sequence[triton.InferenceResponse], rows: Sequence[int]) -> list[Array] | None:
        """The outputs of all responses, joined; None where they do not join."""
        wanted, count = len(self._names), len(responses)
        if any(self._outer) or any(each.failure is not None or len(each.tensors) != wanted for each in responses):
            return None
        joined: list[Array] = []
        for index, (name, dtype) in enumerate(zip(self._names, self._dtypes, strict=True)):
            tensors = [each.tensors[index] for each in responses]
            arrays = [each.array for each in tensors]
            if any(each.own_name != name for each in tensors) or any(each.dtype != dtype for each in arrays):
                return None
            if count == 1:
                joined.append(arrays[0])
                continue
            try:
                if list(map(len, arrays)) != list(rows):
                    return None
                joined.append(np.concatenate(arrays))
            except (TypeError, ValueError):  # other shapes than its neighbours'
                return None
        return joined

    def outputs(
        self, request: triton.InferenceRequest, response: triton.InferenceResponse
    ) -> tuple[list[Array | None] | None, Fault | None]:
        """One response's outputs in the model's order, or why there are none."""
        return self.selected(request.requested_output_names(), response)

    def selected(
        self, names: Sequence[str], response: triton.InferenceResponse
    ) -> tuple[list[Array | None] | None, Fault | None]:
        """As `outputs`, by the names that the request asks for."""
        error = response.error()
        if error is not None:
            return None, (_CODES.get(error.code(), RunFailed.code), str(error.message()))
        given = {each.name(): each.as_numpy() for each in response.output_tensors()}
        found: list[Array | None] = []
        for spec, is_text, is_reshaped in zip(self.spec.outputs, self._is_text, self._outer, strict=True):
            array = given.get(spec.name)
            if array is None:
                if spec.name in names:
                    got = ", ".join(given) or "none"
                    return None, (RunFailed.code, f"the response has no output '{spec.name}'; got {got}")
                found.append(None)
                continue
            if is_text and array.dtype.kind == "S":
                array = array.astype(object)
            array = as_empty_datatype(spec.datatype, array)
            got = datatype_name(array.dtype)
            if got != spec.datatype and not (spec.datatype == "BF16" and got == "UINT16"):
                return None, (RunFailed.code, f"output '{spec.name}' is {got}; the configuration says {spec.datatype}")
            if is_reshaped:
                sizes = spec.shape[self._batch_axes :]
                array = array.reshape((*array.shape[: self._batch_axes], *sizes))
            found.append(array)
        return found, None


class _LoneRun:
    """A run without a host around it: one request, whose first answer counts."""

    rows: Sequence[int] = ()
    lines: Sequence[RequestLine] = ()

    def __init__(self) -> None:
        self.outputs: Sequence[Array | None] | None = None
        self.fault: Fault | None = None

    def respond(
        self, index: int, outputs: Sequence[Array | None] | None, fault: Fault | None, *, is_last: bool
    ) -> bool:
        del index, is_last
        if self.outputs is None and self.fault is None:
            self.outputs, self.fault = outputs, fault
        return True

    def is_cancelled(self, index: int) -> bool:
        del index
        return False

    def call(self, header: RequestHeader, arrays: Sequence[Array]) -> dict[str, Array]:
        del arrays
        raise RunFailed(f"this model can call {header.model!r} only where a daemon, or Runtime, serves it")


def _cut(array: Array, rows: Sequence[int]) -> Sequence[Array]:
    """Each request's share of an array, as views."""
    if len(rows) == 1:
        return [array]
    if min(rows) == max(rows):
        return list(array.reshape((len(rows), rows[0], *array.shape[1:])))
    ends = list(accumulate(rows))
    return [array[end - count : end] for end, count in zip(ends, rows, strict=True)]


def _wrong(words: str) -> triton.TritonModelException:
    return triton.TritonModelException(words)


def _new_loop() -> asyncio.AbstractEventLoop:
    """An event loop on a thread of its own, for the coroutines of a decoupled model."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="triton-asyncio", daemon=True).start()
    return loop


def _call_other(request: triton.InferenceRequest, inputs: dict[str, Any]) -> dict[str, Array]:
    """Ask another served model for the run of this thread. Raises EdgeRuntimeError, TritonModelException."""
    run = _run.get()
    if run is None:
        raise triton.TritonModelException(
            "BLS is only supported during the 'execute' function, on its own thread or in its coroutine."
        )
    arrays = as_tensors(inputs)
    names = request.requested_output_names()
    parameters = dict(request.details or {})
    if request.correlation_id():
        parameters[SEQUENCE_ID] = request.correlation_id()
        parameters[SEQUENCE_START] = bool(request.flags() & triton.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
        parameters[SEQUENCE_END] = bool(request.flags() & triton.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
    header = RequestHeader(
        model=request.model,
        version=None if request.version == -1 else request.version,
        inputs=tuple(TensorHeader(name, datatype_name(each.dtype), each.shape) for name, each in arrays.items()),
        outputs=tuple(names) or None,
        timeout_ms=request.timeout() / 1e3 or None,
        parameters=parameters,
    )
    return run.call(header, [values_to_bits(each) for each in arrays.values()])


# ---- configuration --------------------------------------------------------------------------------------------------


def _config(artifact: Path, options: LoadOptions) -> dict[str, Any]:
    """The model's configuration, with what Triton fills in where there is no file. Raises LoadFailed."""
    folder = artifact.absolute().parent
    text = options.extra.get(CONFIG_OPTION, "{}")
    try:
        given = json.loads(text)
    except ValueError as error:
        raise LoadFailed(f"{CONFIG_OPTION}: no JSON: {error}") from error
    config: dict[str, Any] = {
        "name": folder.parent.name,
        "platform": "",
        "backend": "python",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,
        "input": [],
        "output": [],
        "default_model_filename": "model.py",
        "instance_group": [{"name": f"{folder.parent.name}_0", "kind": "KIND_CPU", "count": 1, "gpus": []}],
        "parameters": {},
        **given,
    }
    config["max_batch_size"] = int(config["max_batch_size"])
    for tensor in (*config["input"], *config["output"]):
        tensor["dims"] = [int(size) for size in tensor.get("dims", ())]
    return config


def _completed(kind: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration after `auto_complete_config`, where the model has one. Raises LoadFailed, ValueError."""
    complete = getattr(kind, "auto_complete_config", None)
    if not callable(complete):
        return config
    made = complete(triton.ModelConfig(json.dumps(config)))
    if not isinstance(made, triton.ModelConfig):
        raise LoadFailed(
            f"auto_complete_config function in model '{config['name']}' must return a valid "
            "pb_utils.ModelConfig object."
        )
    return made.as_dict()


def _arguments(config: Mapping[str, Any], artifact: Path) -> dict[str, str]:
    """Return the arguments of `initialize`."""
    folder = artifact.absolute().parent
    group: dict[str, Any] = next(iter(config.get("instance_group") or [{}]))
    has_gpu = group.get("kind") == "KIND_GPU" and Path("/dev/nvidiactl").exists()
    return {
        "model_config": json.dumps(config),
        "model_instance_kind": "GPU" if has_gpu else "CPU",
        "model_instance_name": f"{config['name']}_0_0",
        "model_instance_device_id": str(next(iter(group.get("gpus") or [0]))) if has_gpu else "0",
        "model_repository": str(folder.parent),
        "model_version": folder.name,
        "model_name": config["name"],
    }


def _specs(config: Mapping[str, Any], key: str, batches: bool) -> tuple[TensorSpec, ...]:
    """Inputs or outputs, axis 0 included where it is rows. Raises LoadFailed."""
    specs: list[TensorSpec] = []
    for tensor in config[key]:
        name, kind = str(tensor.get("name", "")), str(tensor.get("data_type", "TYPE_INVALID")).removeprefix("TYPE_")
        kind = "BYTES" if kind == "STRING" else kind
        if not name or kind not in DATATYPES:
            raise LoadFailed(
                f"model '{config['name']}', {key} {name!r}: data_type is {tensor.get('data_type')!r}; wanted one of "
                f"{', '.join(triton.TRITON_STRING_TO_NUMPY)}, TYPE_BF16"
            )
        shape = tuple(int(size) for size in tensor["dims"])
        specs.append(
            TensorSpec(name, kind, (-1, *shape) if batches else shape, is_optional=bool(tensor.get("optional", False)))
        )
    if len({spec.name for spec in specs}) != len(specs):
        raise LoadFailed(f"model '{config['name']}' names an {key} twice")
    return tuple(specs)


def _reshaped(tensor: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The shape that the model sees in place of `dims`, without axis 0; None for `dims`."""
    reshape = tensor.get("reshape")
    return None if reshape is None else tuple(int(size) for size in reshape.get("shape", ()))
